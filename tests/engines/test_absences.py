"""Clients that are missing: the round goes on without them, in every engine, and as if they had not
been asked."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Asks, Server
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import tree_map
from fedml_noniid.engines import absences
from fedml_noniid.engines.absences import Absent, listed, nobody, sometimes
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models.networks import logistic_regression
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.rfedavg import RFedAvgPlus
from fedml_noniid.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand
from tests.recipe_table import ALONE, CHOOSING, MORE, settings
from tests.walks import thinned

ENGINES = ("sequential", "vectorized")
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


def kept(absent: Absent, missing: dict[tuple[int, int], tuple[int, ...]]) -> Absent:
    """The same, written down in `missing`."""

    def told(round_: int, exchange: int, asked: tuple[int, ...]) -> tuple[int, ...]:
        found = missing[round_, exchange] = tuple(absent(round_, exchange, asked))
        return found

    return told


def one_step(absent: Absent, engine: str) -> Simulation:
    """A logistic regression on one number, from 0; lr = 1, one step, three clients."""
    net = logistic_regression((1,), 2)
    zero = hand.Given(
        net.name,
        net.blocks,
        net.head,
        given={"fc.weight": np.zeros((2, 1)), "fc.bias": np.zeros(2)},
    )
    data = hand.samples(np.array([[2.0], [1.0], [1.0], [8.0]]), np.array([0, 1, 0, 1]))
    clients = [np.array([0]), np.array([3]), np.array([1, 2])]
    local = LocalTraining(lr=1.0, epochs=1, batch_size=2)
    return simulate(
        "fedavg",
        {},
        Federation.from_indices(data, clients, data, absent=absent),
        Plan(zero, local, 1, 3, 0, engine=engine),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_is_over_those_that_answer(engine: str) -> None:
    """w = 0, so p = (1/2, 1/2).

    Client 1 is missing. Client 0: x = 2, y = 0; client 2: x = 1, 1, y = 1, 0.

    client 0: gradient by logit (-1/2, 1/2), times x = 2: W = (1, -1), b = (1/2, -1/2)
    client 2: the two samples' gradients cancel: W = 0, b = 0
    n_k/n = 1/3, 2/3: W = (1/3, -1/3), b = (1/6, -1/6)
    Traffic: 4 numbers of 8 bytes to and from two clients.
    """
    out = one_step(listed({(1, 0): {1}}), engine).run()
    np.testing.assert_allclose(out.params["fc.weight"], [[1 / 3], [-1 / 3]], rtol=1e-15)
    np.testing.assert_allclose(out.params["fc.bias"], [1 / 6, -1 / 6], rtol=1e-15)
    assert out.rows[0]["local_loss"] == pytest.approx(math.log(2))
    assert out.rows[0]["bytes_up"] == out.rows[0]["bytes_down"] == 2 * 4 * 8
    assert out.tensors["round/clients"].tolist() == [[0, 2]]


def test_somebody_has_to_answer() -> None:
    message = (
        r"^round 1, job 'train': every client that is asked \(0, 1, 2\) is missing; at "
        r"least one has to answer$"
    )
    with pytest.raises(UserError, match=message):
        one_step(listed({(1, 0): {0, 1, 2}}), "sequential").run()


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


@pytest.mark.parametrize("entry", thinned(TABLE, 2, 4))
def test_a_killed_run_goes_on(entry: str, tmp_path: Path) -> None:
    """Weights, memories, rows and recorded quantities; the absences are then those of a file."""
    missing: dict[tuple[int, int], tuple[int, ...]] = {}
    path, other = tmp_path / "run.safetensors", tmp_path / "killed.safetensors"
    mine = simulation(entry, kept(often, missing), True, checkpoint=path, epochs=1)
    for done in mine.rounds():
        if done["round"] == 2:
            for suffix in (".safetensors", ".rounds"):
                shutil.copy(path.with_suffix(suffix), other.with_suffix(suffix))
    absences.write(tmp_path / "absent.csv", missing)
    assert any(clients for (round_, exchange), clients in missing.items() if round_ > exchange == 0)
    again = listed(absences.read(tmp_path / "absent.csv"))
    resumed = simulation(entry, again, True, checkpoint=other, epochs=1)
    assert resumed.start_round == 2
    assert federation.equal(resumed.run(), mine.outcome)
    hashes = {of.engine.clients.memory.sha256() for of in (mine, resumed)}
    assert len(hashes) == 1
    assert mine.outcome.tensors["round/clients"].shape == (1, 1)  # of the last round


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
    "entry", thinned((entry for entry in GOES_ON if "dpfedavg" not in entry), 1)
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


def test_processes_give_the_same_bits() -> None:
    """Also where a client goes on from what one of them holds."""
    alone, shared = (simulation("scaffold+fnr", often, workers=count) for count in (1, 2))
    assert type(alone.engine) is not type(shared.engine)
    assert federation.equal(shared.run(), alone.run())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_memory_of_a_missing_client_keeps_its_bits(engine: str) -> None:
    """Everybody is asked. Those that answer move."""
    ran = simulation("scaffold", listed({(2, 0): {1, 4}}), engine=engine, cohort=N, rounds=2)
    memories = []
    for _ in ran.rounds():
        memories.append([tree_map(torch.clone, ran.engine.clients.memory.row(k)) for k in range(N)])
    before, after = ([flatten(memory) for memory in of] for of in memories)
    same = [
        all(torch.equal(after[k][name], leaf) for name, leaf in before[k].items()) for k in range(N)
    ]
    assert same == [False, True, False, False, True, False]


def test_the_share_that_is_missing_is_the_rate() -> None:
    """4000 draws of rate 0.3, so the standard error is sqrt(0.3 0.7 / 4000); no two clients go
    together."""
    absent, asked = sometimes(0.3, 7), tuple(range(20))
    away = np.array([[k in absent(t, 0, asked) for k in asked] for t in range(1, 201)])
    assert abs(away.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / away.size)
    assert abs((away[:, 0] & away[:, 1]).mean() - 0.09) < 4 * math.sqrt(0.09 * 0.91 / 200)
    assert absent(0, 0, asked) == set()


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


def test_pooled_data_belong_to_no_client() -> None:
    """The one that trains stands for all, so the list is not about it."""
    of, plan = (
        federation.federation(),
        Plan(federation.network(), LocalTraining(lr=0.1, epochs=1, batch_size=4), 2, 4, 0),
    )
    ran = [
        simulate(
            "centralised",
            {},
            Federation.from_indices(of.train, of.clients, of.test, absent=absent),
            plan,
        ).run()
        for absent in (nobody, listed({(1, 0): {0}}))
    ]
    assert federation.equal(*ran)


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
