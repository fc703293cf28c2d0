"""Every faster form of a local step gives the result of the run without it, also where the rate
changes by round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.forms import FORMS
from fedml_noniid.contract.checks import close
from fedml_noniid.engines.run import Outcome
from fedml_noniid.rates import Exponential
from tests import federation

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
