"""The plain loop of the core is the local training that engines run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.data import Batch
from fedml_noniid.plugins.core.optimizers import SGD
from fedml_noniid.plugins.core.task import Output, Task
from fedml_noniid.plugins.core.training import Descent, Step, descend, train
from fedml_noniid.plugins.core.trees import Params, Tree, row, sub, tree_map
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.personal import PERSONAL, joined, parted
from fedml_noniid.plugins.engines.sequential import Sequential
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.models.networks import mlp
from tests import federation
from tests.recipe_table import ALONE


class Plain(Sequential):
    """Trains by the plain loop."""

    def _trained(
        self, ask: Ask, position: int, round_: int, key: Tensor, host_key: Tensor, out: Params
    ) -> Tree:
        clients, client = self.clients, ask.to[position]
        read, _ = clients.reads(key)
        steps = self._steps(clients.steps(client, round_), read)
        memory = self._memory(client)
        # The plain loop trains whatever it is given, so here the client's own part too.
        params, buffers = joined(ask.params, ask.buffers, memory)
        model = ask._replace(params=params, buffers=buffers)
        seen = self._client(model, round_, key, client)
        trace, answers = train(
            clients.algorithm, seen, ask._replace(each=row(ask.each, position)), memory, steps
        )
        found: Tree = {
            field: {name: getattr(answer, field) for name, answer in answers.items()}
            for field in ("upload", "memory", "metrics")
        }
        if PERSONAL in memory:
            kept, (params, buffers, _) = parted(memory, trace.params, trace.buffers, {})
            trace = trace._replace(params=params, buffers=buffers)
            found["memory"][PERSONAL] = kept[PERSONAL]
        clients.memory.put_row(client, found.pop("memory"))
        if clients.asked_again(ask):
            clients.store(client, trace.params, trace.buffers)
        delta = sub(trace.params, ask.params)
        if clients.changes_updates:
            trees = {"key": key, "each": row(ask.each, position), "memory": self._memory(client)}
            delta = clients.left_as(ask, round_, trees, delta)
        tree_map(lambda leaf, part: leaf.copy_(part), out, delta)
        return {
            "buffers": trace.buffers,
            **found,
            **self._counts(client, trace.steps, trace.loss * trace.steps),
        }


@pytest.mark.parametrize("entry", ALONE)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_plain_loop_is_the_engines(entry: str, batch_norm: bool) -> None:
    """One round of four clients with 1 to 12 samples, in float64: what all of them sent, kept and
    lost."""
    recipe, settings = ALONE[entry]

    def ran(plain: bool) -> tuple[Params, list[float]]:
        simulation: Simulation = federation.simulation(
            recipe, settings, batch_norm=batch_norm, dtype=torch.float64, rounds=2
        )
        clients = simulation.engine.clients
        clients._draws = True  # the plain loop makes every step's key
        simulation.engine = Plain(clients) if plain else simulation.engine
        outcome = simulation.run()
        found = {
            "state": simulation.loop.state._asdict(),
            "memory": clients.memory.whole(),
            "evaluated": outcome.evaluated,
        }
        return flatten(found), [row["local_loss"] for row in outcome.rows]

    (found, losses), (wanted, other) = ran(True), ran(False)
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-12, atol=1e-12, msg=key)
    assert losses == pytest.approx(other, rel=1e-12)


TASK = Task(mlp((2,), 2), SGD(0.5))
ZERO = Descent({"w": torch.zeros(1)})


def quadratic(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output | None]:
    """(w - x)^2 / 2 for the mean x of the batch."""
    return ((w["w"] - batch.mean(batch.x)) ** 2).sum() / 2, None


def batches(*xs: float, **more: Any) -> list[Batch]:
    return [Batch(torch.tensor([[float(x)]]), torch.zeros(1), **more) for x in xs]


def test_descend_steps_down_the_gradient() -> None:
    """w = 0; eta = 1/2: to x = 4, w = 2; to x = 8, w = 5. Losses 8 and 18."""
    found = descend(TASK, quadratic, ZERO, batches(4, 8), Step(SGD(0.5)))
    assert (found.params["w"].item(), found.steps.item(), found.loss.item()) == (5.0, 2.0, 26.0)
    assert found.state == {} and found.buffers == {} and found.features is None


def test_terms_factors_and_rates_of_a_descent() -> None:
    """Gradient 0 - 4 plus 2, rate 1: w = 0 + 3 * 1/2 * 2 = 3; then 3 - 8 + 2 = -3, rate 1/3: w = 3
    + 1.5 = 4.5."""
    step = Step(
        SGD(0.5),
        term=lambda w: {"w": torch.full((1,), 2.0)},
        factor={"w": torch.tensor([3.0])},
        rate=lambda s: (1.0, 1 / 3)[s],
    )
    found = descend(TASK, quadratic, ZERO, batches(4, 8), step)
    assert found.params["w"].item() == pytest.approx(4.5)


def test_a_step_that_a_client_does_not_have_changes_nothing() -> None:
    steps = [*batches(4, live=torch.tensor(True)), *batches(8, live=torch.tensor(False))]
    found = descend(TASK, quadratic, ZERO, steps, Step(SGD(0.5, momentum=0.9)))
    assert (found.params["w"].item(), found.steps.item(), found.loss.item()) == (2.0, 1.0, 8.0)
    assert found.state["v"]["w"].item() == -4.0


def test_a_descent_goes_on_from_a_state() -> None:
    """v = 10; v <- v / 2 - 4 = 1, w = -1/2."""
    state = {"v": {"w": torch.tensor([10.0])}}
    found = descend(
        TASK, quadratic, ZERO._replace(state=state), batches(4), Step(SGD(0.5, momentum=0.5))
    )
    assert found.params["w"].item() == -0.5 and state["v"]["w"].item() == 10.0
