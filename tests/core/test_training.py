"""The loop of steps, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedml_noniid.core.data import Batch
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Output, Task
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params
from fedml_noniid.models.networks import mlp

TASK = Task(mlp((2,), 2), SGD(0.5))
ZERO = Descent({"w": torch.zeros(1)})


def quadratic(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output | None]:
    """(w - x)^2 / 2 for the mean x of the batch."""
    return ((w["w"] - batch.mean(batch.x)) ** 2).sum() / 2, None


def batches(*xs: float, **more: Any) -> list[Batch]:
    return [Batch(torch.tensor([[float(x)]]), torch.zeros(1), **more) for x in xs]


def test_descend_steps_down_the_gradient() -> None:
    """w = 0; eta = 1/2: to x = 4, w = 2; to x = 8, w = 5. Losses 8 and 18."""
    found = descend(
        gradient_of(TASK, quadratic),
        ZERO,
        batches(4, 8),
        Step(SGD(0.5)),
        total=lambda losses: torch.stack(losses).sum(0),
    )
    assert (found.params["w"].item(), found.steps.item(), found.loss.item()) == (5.0, 2.0, 26.0)
    assert found.state == {} and found.buffers == {}


def test_terms_factors_and_rates_of_a_descent() -> None:
    """Gradient 0 - 4 plus 2, rate 1: w = 0 + 3 * 1/2 * 2 = 3; then 3 - 8 + 2 = -3, rate 1/3: w = 3
    + 1.5 = 4.5."""
    step = Step(
        SGD(0.5),
        term=lambda w: {"w": torch.full((1,), 2.0)},
        factor={"w": torch.tensor([3.0])},
        rate=lambda s: (1.0, 1 / 3)[s],
    )
    found = descend(gradient_of(TASK, quadratic), ZERO, batches(4, 8), step)
    assert found.params["w"].item() == pytest.approx(4.5)


def test_a_step_that_a_client_does_not_have_changes_nothing() -> None:
    steps = [*batches(4, live=torch.tensor(True)), *batches(8, live=torch.tensor(False))]
    found = descend(gradient_of(TASK, quadratic), ZERO, steps, Step(SGD(0.5, momentum=0.9)))
    assert (found.params["w"].item(), found.steps.item()) == (2.0, 1.0)
    assert found.state["v"]["w"].item() == -4.0


def test_a_descent_goes_on_from_a_state() -> None:
    """v = 10; v <- v / 2 - 4 = 1, w = -1/2."""
    state = {"v": {"w": torch.tensor([10.0])}}
    found = descend(
        gradient_of(TASK, quadratic),
        ZERO._replace(state=state),
        batches(4),
        Step(SGD(0.5, momentum=0.5)),
    )
    assert found.params["w"].item() == -0.5 and state["v"]["w"].item() == 10.0
