"""What clients read, remember and refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Client,
    Component,
    Exchanges,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.trees import Tree
from fedml_noniid.engines.clients import marked
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.plugins import registry
from tests import federation

ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def order(recipe: str, client: int, round_: int, **options: Any) -> tuple[list[int], Any]:
    found = federation.simulation(recipe, **options).engine.clients.steps(client, round_)
    return found.index.tolist(), found.sizes


def test_batches_depend_on_seed_round_and_client_only() -> None:
    wanted = order("fedavg", 3, 2)
    same = order("scaffold+ccn", 3, 2), order("fedavg", 3, 2, engine="vectorized")
    assert [*same, order("fedavg", 3, 2, cohort=1, rounds=9)] == [wanted] * 3
    assert wanted not in (order("fedavg", 3, 2, seed=4), order("fedavg", 3, 3))
    assert order("fedavg", 3, 2, epochs=1)[0] == wanted[0][:12], (
        "a longer run begins like a shorter one"
    )


def test_batches_do_not_depend_on_what_was_asked_before() -> None:
    clients = federation.simulation("fedavg").engine.clients
    wanted = clients.steps(3, 2).index.tolist()
    for round_ in range(4):
        clients.steps(5, round_)
    found = [one.index.tolist() for one in clients.orders((4, 1, 3), 2)]
    assert found == [clients.steps(client, 2).index.tolist() for client in (4, 1, 3)]
    assert found[-1] == wanted


def test_a_client_without_samples_is_refused() -> None:
    of = federation.federation()
    of.clients[2] = np.empty(0, dtype=np.int64)
    with pytest.raises(UserError, match=r"client 2 has no samples"):
        federation.simulation("fedavg", of=of)


@pytest.fixture
def poisoned() -> federation.Federation:
    """One sample of client 2 is not a number."""
    of = federation.federation()
    x = of.train.x.clone()
    x[6] = math.nan
    return federation.Federation(Samples(x, of.train.y), of.clients, of.test, of.public)


@ENGINES
@pytest.mark.parametrize("recipe", ["fedavg", "scaffold", "ccn"])
def test_a_loss_that_is_not_finite_names_client_and_round(
    engine: str, recipe: str, poisoned: federation.Federation
) -> None:
    """With two of six clients a round, in the first round that has client 2."""
    first = next(t for t in range(1, 99) if 2 in draw_cohort(3, t, 6, 2))
    assert first > 1, "the example has rounds without the client"
    simulation = federation.simulation(
        recipe, of=poisoned, engine=engine, cohort=2, rounds=first + 2
    )
    with pytest.raises(
        NonFiniteError, match=rf"round {first}, client 2: loss, update or memory is not finite"
    ) as error:
        simulation.run()
    assert "\n" not in str(error.value)
    assert len(simulation.loop.rows) == first - 1


UPDATE = r"round 1, client \d: loss, update or memory"


@pytest.mark.parametrize(
    ("recipe", "settings", "how", "words"),
    [
        # The loss of the last step is still finite; the step after it is not.
        ("fedavg", {}, {"lr": 1e38, "epochs": 1, "engine": "sequential"}, UPDATE),
        ("fedavg", {}, {"lr": 1e38, "epochs": 1, "engine": "vectorized"}, UPDATE),
        ("fednnnn", {"fednnnn": {"beta": 1e38}}, {"lr": 100.0}, "round 1, server"),
    ],
)
def test_an_update_or_server_step_that_is_not_finite_stops_the_run(
    recipe: str, settings: dict[str, Any], how: dict[str, Any], words: str
) -> None:
    with pytest.raises(NonFiniteError, match=words):
        federation.run(recipe, settings, **how)


def test_a_first_map_that_is_not_finite_names_its_client(poisoned: federation.Federation) -> None:
    """rFedAvg's delta_0 of client 2 is NaN before it ever trains: it must not reach the others
    unnoticed."""
    with pytest.raises(NonFiniteError, match=r"round [01], client 2"):
        federation.run("rfedavg", of=poisoned, cohort=6)


@dataclass(frozen=True)
class Keeps(Component):
    """Has client 2 keep a number that is not finite, in one of its hooks."""

    name: ClassVar[str] = "keeps"
    hook: str = "report"

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(round=1)

    def init_client(self, client: Client) -> Tree:
        return {"kept": torch.zeros(2), "counts": torch.zeros(2, dtype=torch.int64)}

    def message(self, server: Server) -> Tree:
        return {"spoilt": torch.tensor(server.cohort) == 2}

    def spoilt(self, client: Client, hook: str) -> Answer:
        """1e38 twice, the sum of which overflows, is finite; where it is spoilt, it is not."""
        spoilt = client.each["spoilt"].float() * float(self.hook == hook)
        return Answer(memory={"kept": torch.stack([1e38 / (1 - spoilt), torch.tensor(3e38)])})

    def report(self, trace: Trace, client: Client) -> Answer:
        return self.spoilt(client, "report")

    def survey(self, server: Server) -> Asks:
        if server.round:
            yield Ask("again", server.cohort, server.params, each=self.message(server))

    def answer(self, client: Client) -> Answer:
        return self.spoilt(client, "answer")


@ENGINES
@pytest.mark.parametrize("hook", ["report", "answer", "nowhere"])
def test_what_a_client_keeps_is_finite(
    engine: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.METHODS, "keeps", Keeps)
    first = next(t for t in range(1, 99) if 2 in draw_cohort(3, t, 6, 2))
    made = federation.simulation(
        "keeps", {"keeps": {"hook": hook}}, engine=engine, cohort=2, rounds=first
    )
    if hook == "nowhere":
        assert len(made.run().rows) == first, "large numbers are finite"
        return
    with pytest.raises(NonFiniteError, match=rf"round {first}, client 2: .* memory is not finite"):
        made.run()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_is_marked_by_any_number_that_is_not_finite(value: float) -> None:
    loss = torch.tensor(0.1)
    fine = {
        "m": {"c": torch.tensor([-3e38, 3e38]), "n": torch.tensor([2**40]), "e": loss[None][:0]}
    }
    assert marked(loss, fine).equal(loss) and marked(loss, {}) is loss
    assert marked(loss, {**fine, "v": torch.tensor([[0, value]])}).isnan()
    wide = marked(loss, {"v": torch.tensor([1e300], dtype=torch.float64)})
    assert wide.equal(loss) and wide.dtype == loss.dtype


@pytest.mark.parametrize(
    ("recipe", "named"),
    [("fedavg", "round 2, server: .* test loss"), ("ditto", "round 2, client 0")],
)
def test_a_test_loss_that_is_not_finite_stops_the_run(recipe: str, named: str) -> None:
    """Of the model of all, or of a client's own. The test is due after round 2."""
    of = federation.federation()
    of.test.x[:] = torch.nan
    made = federation.simulation(recipe, of=of, evaluate_every=2)
    with pytest.raises(NonFiniteError, match=named):
        made.run()
    assert len(made.loop.rows) == 1
