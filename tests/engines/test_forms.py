"""Every faster form of a local step gives the result of the run without it, also where the rate
changes by round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fedml_noniid.contract.checks import close
from fedml_noniid.core.training import Step
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.engines import local
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.rates import Exponential
from tests import federation


def _plain(walk: local.LocalSteps, factor: Params, owned: bool) -> Step:
    return Step(walk.task.optimizer, walk.hooks.term, factor)


@dataclass(frozen=True)
class _Fresh(local.InMemory):
    def __call__(
        self, grads: Params, params: Params, state: Tree, s: int = 0, out: Params | None = None
    ) -> Any:
        return super().__call__(grads, params, state, s)


def _fresh(walk: local.LocalSteps, factor: Params, owned: bool) -> Step:
    optimizer = walk.task.optimizer
    return _Fresh(
        optimizer, walk.hooks.term, factor, fused=local.plain_rate(optimizer), update=optimizer.step
    )


# Inside such a context, steps run without the form.
FORMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one pass, in place": partial(patch.object, local, "step_form", _plain),
    "in place": partial(patch.object, local, "step_form", _fresh),
    "no record for autograd": partial(patch.object, torch, "inference_mode", nullcontext),
    "written-out gradient": partial(patch.object, Stacked, "written_out", False),
}
ROUNDED = {
    "one pass, in place"
}  # torch rounds w - eta g of one pass once, and that of two passes twice


def run(engine: str, dtype: torch.dtype) -> Outcome:
    """Three rounds at rates 0.1, 0.05 and 0.025."""
    options: Any = {"engine": engine, "dtype": dtype, "lr": Exponential(0.1, factor=0.5)}
    return federation.run("fedavg", **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_form_changes_no_result(form: str, engine: str) -> None:
    """To the bit; to rounding in float64 where the form rounds otherwise."""
    for dtype in (torch.float32, torch.float64):
        whole = run(engine, dtype)
        with FORMS[form]():
            without = run(engine, dtype)
        if form not in ROUNDED:
            assert federation.equal(whole, without)
        elif dtype is torch.float64:
            close(whole.params, without.params, 1e-12)
