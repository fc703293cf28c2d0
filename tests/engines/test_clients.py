"""What clients read, remember and refuse."""

from __future__ import annotations

import math
from typing import Any

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
)
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.trees import Tree
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.plugins import registry
from tests import federation
from tests.core.test_foreign_methods import made

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


def test_a_client_without_samples_is_refused() -> None:
    of = federation.federation()
    of.clients[2] = np.empty(0, dtype=np.int64)
    with pytest.raises(UserError, match=r"client 2 has no samples"):
        federation.simulation("fedavg", data=of)


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
        recipe, data=poisoned, engine=engine, cohort=2, rounds=first + 2
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


def of_client_2(server: Server) -> Tree:
    return {"spoilt": torch.tensor(server.cohort) == 2}


def again(self: Component, server: Server) -> Asks:
    if server.round:
        yield Ask("again", server.cohort, server.params, each=of_client_2(server))


def spoilt(client: Client) -> Answer:
    """1e38 twice, the sum of which overflows, is finite; of client 2, one of them is not."""
    kept = torch.where(client.each["spoilt"], math.inf, 1e38)
    return Answer(memory={"kept": torch.stack([kept, torch.tensor(3e38)])})


HOOKS: dict[str, Any] = {
    "report": lambda self, trace, client: spoilt(client),
    "answer": lambda self, client: spoilt(client),
    "nowhere": None,
}


@ENGINES
@pytest.mark.parametrize("hook", ["report", "answer", "nowhere"])
def test_what_a_client_keeps_is_finite(
    engine: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.tensor([1e38, 3e38])
    members = {
        "init_client": lambda self, client: {"kept": large, "counts": large.long() * 0},
        "message": lambda self, server: of_client_2(server),
        "exchanges": lambda self, setting: Exchanges(round=1),
        "survey": again,
        "answer": lambda self, client: Answer(),
    }
    kind = made(**members | {hook: HOOKS[hook]} if HOOKS[hook] else members)
    monkeypatch.setitem(registry.METHODS, "made", kind)
    first = next(t for t in range(1, 99) if 2 in draw_cohort(3, t, 6, 2))
    run = federation.simulation("made", engine=engine, cohort=2, rounds=first)
    if hook == "nowhere":
        assert len(run.run().rows) == first, "large numbers are finite"
        return
    with pytest.raises(NonFiniteError, match=rf"round {first}, client 2: .* memory is not finite"):
        run.run()


@pytest.mark.parametrize(
    ("recipe", "named"),
    [("fedavg", "round 2, server: .* test loss"), ("ditto", "round 2, client 0")],
)
def test_a_test_loss_that_is_not_finite_stops_the_run(recipe: str, named: str) -> None:
    """Of the model of all, or of a client's own. The test is due after round 2."""
    of = federation.federation()
    of.test.x[:] = torch.nan
    made = federation.simulation(recipe, data=of, evaluate_every=2)
    with pytest.raises(NonFiniteError, match=named):
        made.run()
    assert len(made.loop.rows) == 1
