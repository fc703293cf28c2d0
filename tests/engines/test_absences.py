"""Clients that are missing: the round goes on without them, in every engine, and as if they had not
been asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedml_noniid.core.component import Asks, Server
from fedml_noniid.core.errors import UserError
from fedml_noniid.engines import absences
from fedml_noniid.engines.absences import Absent, listed, nobody, sometimes
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.rfedavg import RFedAvgPlus
from tests import federation
from tests.methods import by_hand as hand
from tests.recipe_table import ALONE, CHOOSING, MORE, settings
from tests.walks import thinned

N = len(federation.SIZES)
TABLE = ALONE | {
    recipe: (recipe, settings(recipe)) for recipe in (*MORE, "scaffold+fnr", "ccvr+fnr")
}


def simulation(
    entry: str, absent: Absent, observing: bool = False, **options: object
) -> Simulation:
    recipe, methods = TABLE[entry]
    return federation.simulation(recipe, methods, absent=absent, observing=observing, **options)


def often(round_: int, exchange: int, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Nobody misses the first training, the last client the second, all but one the third; one
    every later exchange."""
    if len(asked) == 1:
        return ()
    if exchange > 0 or round_ == 0:
        return asked[:1]
    return {1: (), 2: asked[-1:], 3: asked[1:]}[round_]


def fedavg(missing: absences.Missing) -> hand.Ran:
    """One round on the clients of `by_hand`."""
    return hand.run("fedavg", of=replace(hand.federation(), absent=listed(missing)), rounds=1)


def test_the_mean_is_over_those_that_answer() -> None:
    """Client 1 is missing. Traffic: 12 numbers of 8 bytes to and from two clients."""
    ran = fedavg({(1, 0): {1}})
    (row,) = ran.outcome.rows
    ends = [hand.descend(hand.W0, [hand.CLIENTS[k]] * 2) for k in (0, 2)]
    hand.same(ran.outcome.params, hand.average(hand.shares((0, 2)), ends))
    assert row["bytes_up"] == row["bytes_down"] == 2 * 12 * 8
    assert ran.outcome.tensors["round/clients"].tolist() == [[0, 2]]


def test_somebody_has_to_answer() -> None:
    words = (
        r"^round 1, job 'train': every client that is asked \(0, 1, 2\) is missing; at least one"
    )
    with pytest.raises(UserError, match=words):
        fedavg({(1, 0): {0, 1, 2}})


def test_pooled_data_belong_to_no_client() -> None:
    """The one that trains stands for all, so the list is not about it."""
    ran = [federation.run("centralised", absent=of) for of in (nobody, listed({(1, 0): {0}}))]
    assert federation.equal(*ran)


@dataclass(frozen=True)
class MapsAll(RFedAvgPlus):
    """Asks every client, also those that miss the round."""

    name: ClassVar[str] = "maps_all"

    def map(self, server: Server, to: tuple[int, ...]) -> Asks:
        return super().map(server, tuple(range(server.n_clients)))


def test_who_misses_an_exchange_misses_the_rest_of_the_round() -> None:
    """The method maps the data of all clients: before round 1, and behind every training."""
    registry.register(MapsAll)
    absent = listed({(0, 0): {1}, (1, 0): {3}, (2, 1): {0}})
    ran = federation.simulation("maps_all", absent=absent, cohort=N, rounds=2)
    exchanges = hand.tapped(ran)
    ran.run()
    first, second = (0, 1, 2, 4, 5), (1, 2, 3, 4, 5)
    assert [ask.to for ask, _ in exchanges] == [
        (0, 2, 3, 4, 5),
        first,
        first,
        tuple(range(N)),
        second,
    ]


# A client that was asked and is missing counts in another way than one that was not asked.
ASKED = (
    "ccvr",
    "ccvr+fnr",  # everybody sends statistics after the last round, but not a client that misses it
)


# DP-FedAvg divides by the clients that were drawn, also if some are missing. Where a method
# chooses, a client that is not drawn may be a candidate still.
GOES_ON = [
    entry
    for entry in TABLE
    if entry not in ASKED and "=" not in entry and {*CHOOSING}.isdisjoint(entry.split("+"))
]


@pytest.mark.parametrize(
    "entry", thinned((entry for entry in GOES_ON if "dpfedavg" not in entry), 1, 5)
)
def test_a_round_goes_on_as_if_the_missing_had_not_been_drawn(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(round_: int, exchange: int, asked: tuple[int, ...]) -> tuple[int, ...]:
        return (asked[round_],) if round_ and exchange == 0 and len(asked) > 1 else ()

    def drawn(seed: int, round_: int, n_clients: int, size: int) -> tuple[int, ...]:
        found = draw_cohort(seed, round_, n_clients, size)
        return tuple(client for client in found if client not in away(round_, 0, found))

    missing = simulation(entry, away, rounds=2, epochs=1)
    ran = missing.run()
    monkeypatch.setattr("fedml_noniid.engines.plan.draw_cohort", drawn)
    whole = simulation(entry, nobody, rounds=2, epochs=1).run()
    if missing.loop.start.task.own_models:  # whose model is not tested where it is missing
        assert federation.equal_models(whole, ran)
        kept = flatten(ran.personal)
        assert kept.keys() == flatten(whole.personal).keys()
        assert all(torch.equal(leaf, kept[key]) for key, leaf in flatten(whole.personal).items())
    else:
        assert federation.equal(whole, ran)


def test_a_client_is_missing_whoever_else_is_asked() -> None:
    absent, other = sometimes(0.5, 1), sometimes(0.5, 2)
    every = [absent(t, 0, tuple(range(9))) for t in range(1, 30)]
    some = [sometimes(0.5, 1)(t, 0, (2, 5, 7, 8)) for t in range(1, 30)]
    assert all(
        few == found & {2, 5, 7, 8} or {2, 5, 7, 8} <= found
        for few, found in zip(some, every, strict=True)
    )
    assert every != [other(t, 0, tuple(range(9))) for t in range(1, 30)]


def test_one_client_always_stays_and_for_the_whole_round() -> None:
    """At rate 0.9 often all of three would be missing. Later everybody is asked."""
    absent, two = sometimes(0.9, 0), 0
    for t in range(1, 101):
        away = set(absent(t, 0, (1, 3, 4)))
        assert away < {1, 3, 4} and set(absent(t, 1, tuple(range(6)))) & {1, 3, 4} == away
        two += len(away) == 2
    # Two are missing if two or three draws are below 0.9: 3 * 0.81 * 0.1 + 0.729 = 0.972, standard
    # error 0.017.
    assert two >= 91


def test_a_file_has_a_line_per_missing_answer(tmp_path: Path) -> None:
    path = tmp_path / "absent.csv"
    absences.write(path, {(10, 0): [3], (2, 1): [7, 0], (2, 0): {11}, (3, 0): ()})
    assert path.read_text() == "round,exchange,client\n2,0,11\n2,1,0\n2,1,7\n10,0,3\n"
    assert absences.read(path) == {(10, 0): {3}, (2, 1): {0, 7}, (2, 0): {11}}
    path.write_bytes(
        b"\xef\xbb\xbfround, exchange, client\r\n1,,4\r\n\r\n2, 1,0\r\n"
    )  # as a spreadsheet writes it
    assert absences.read(path) == {(1, 0): {4}, (2, 1): {0}}
    absences.write(path, {})
    assert absences.read(path) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1: '' is refused; allowed: round,exchange,client"),
        ("round;exchange;client\n", "line 1: 'round;exchange;client' is refused"),
        ("round,client\n1,2\n", "line 1: 'round,client' is refused"),
        ("round,exchange,client\n1,0\n", "line 2: has 2 cells; allowed: 3"),
        (
            "round,exchange,client\n1,0,2\n\n1,0,-1\n",
            "line 4: client = '-1' is refused; allowed: 0 to 5",
        ),
        ("round,exchange,client\n1,0,6\n", "line 2: client = '6' is refused; allowed: 0 to 5"),
        ("round,exchange,client\n4,0,1\n", "line 2: round = '4' is refused; allowed: 0 to 3"),
        ("round,exchange,client\n,0,1\n", "line 2: round = '' is refused; allowed: 0 to 3"),
        (
            "round,exchange,client\n1,one,1\n",
            "line 2: exchange = 'one' is refused; allowed: a whole number from 0 up",
        ),
        ("round,exchange,client\n1,0,1.0\n", "line 2: client = '1.0' is refused"),
        ("round,exchange,client\n1," + "9" * 5000 + ",1\n", "line 2: exchange = '999"),
        (
            "round,exchange,client\n1,0,1\n1,,1\n",
            "line 3: client 1 is named twice for round 1, exchange 0",
        ),
        ("round,exchange,client\n1,0," + "2" * 200_000, "line 2: client = '222"),
        ("round,exchange,client\n1,0,\xff", "can't be read ('utf-8' codec"),
    ],
)
def test_another_file_is_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "absent.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        absences.read(path, rounds=3, n_clients=N)
    message = str(error.value)
    assert (
        message.startswith(str(path))
        and words in message
        and "\n" not in message
        and len(message) < 300
    )
