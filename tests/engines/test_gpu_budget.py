"""No method costs a GPU more than docs/results/gpu-budget.csv says; counted on a fake GPU."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks import gpu_budget
from benchmarks.fake_gpu import Counts, Watch
from benchmarks.gpu_budget import SMALL, of_round
from tests.recipe_table import ALONE
from tests.walks import thinned

# What torch 2.11 refuses on a GPU in deterministic runs, of what a forward pass, a hook or a
# metric may use. With floats only: cumsum.
REFUSED = {
    "aten::put_",
    "aten::histc",
    "aten::kthvalue",
    "aten::median.dim",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss",
    "aten::cumsum",
}
AGAIN = "if this has to be, `python -m benchmarks budget` writes the table again"


@cache
def budget() -> dict[tuple[str, str], Counts]:
    with (Path(__file__).parents[2] / gpu_budget.FILE).open() as file:
        lines = list(csv.DictReader(file))
    return {
        (line["recipe"], line["engine"]): Counts(*(int(line[key]) for key in Counts._fields))
        for line in lines
    }


WAYS = [  # a GPU trains clients side by side; one by one, its hooks are the same
    *thinned(((entry, "vectorized") for entry in ALONE), 0, 12),
    *((entry, "sequential") for entry in ("fnr", "scaffold")),
]


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch without a deterministic kernel fails the test."""
    counted = Watch.__torch_dispatch__

    def dispatched(self: Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = counted(self, func, types, args, kwargs), func._schema.name
        floats = isinstance(out, Tensor) and out.is_cuda and out.is_floating_point()
        assert not (floats and name in REFUSED), name
        weights = (*args, *(kwargs or {}).values())[1:2] if name == "aten::bincount" else ()
        assert not any(isinstance(each, Tensor) for each in weights), name
        return out

    monkeypatch.setattr(Watch, "__torch_dispatch__", dispatched)


@pytest.mark.parametrize(("entry", "engine"), WAYS)
def test_a_method_keeps_its_budget(entry: str, engine: str) -> None:
    allowed = budget().get((entry, engine))
    assert allowed is not None, (
        f"{entry} has no line in {gpu_budget.FILE}; `python -m benchmarks budget` writes it"
    )
    counts, waits = of_round(*ALONE[entry], engine, SMALL, 2)
    for what, found, most in zip(Counts._fields, counts, allowed, strict=True):
        assert found <= most, (
            f"{found} {what} in a round, the budget is {most}; waits: {dict(waits)}; {AGAIN}"
        )


@pytest.mark.slow
def test_the_round_of_pfls_benchmark_meets_the_target() -> None:
    """At most 60 launches a step, and two waits: one look at the uploads, one at the row."""
    counts, waits = of_round("fedavg", {}, "vectorized", gpu_budget.PFL, 5)
    assert counts.waits <= 2, waits
    assert all(place.startswith("engines/") for place in waits), "a wait names its line"
    assert gpu_budget.per_step("fedavg", {}, "vectorized", gpu_budget.PFL) <= 60
