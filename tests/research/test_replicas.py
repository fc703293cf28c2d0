"""The authors' code of papers is held to the contract, as a stranger's method is; rFedAvg's also to
arithmetic by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.contract import checks, suite
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import row
from research.replicas import CLASSES
from tests import federation
from tests.engines.test_feature_skew import skewed
from tests.methods import by_hand as hand
from tests.methods.conftest import engine as engine
from tests.methods.test_rfedavg import EVERYBODY, LAM, PARTIAL, Reference, compare
from tests.walks import thinned

FNR: dict[str, Any] = {"p": 0.7, "epochs": 2, "batch_size": 8, "lam": 0.1}
# With Adam, a step of a gradient that is nothing but rounding is a whole step.
PUBLIC = FNR | {"public_data": "train_holdout", "refine_optimizer": "same"}
CASES = [
    suite.Case("fnr_authors", PUBLIC, {"p": 0.0}),
    suite.Case("rfedavg_authors", {"lam": 0.01, "L": 3}),
    suite.Case("rfedavg_plus_authors", {"lam": 0.01, "L": 3}),
    suite.Case("scaffold_authors", {"start": "network", "divisor": "cohort"}),
    suite.Case("scaffold_flower"),
    suite.Case("scaffold_fedbench", {"clip": 1.0}),
]
READINGS: list[dict[str, Any]] = [
    FNR | {"refine_optimizer": "same"},  # on the test set
    PUBLIC | {"fnr_reg": "squared_live"},
]


@pytest.mark.parametrize(("case", "check"), thinned(product(CASES, suite.CHECKS), every=6))
def test_the_contract(case: suite.Case, check: str) -> None:
    """A check that says nothing about a method is skipped with its reason."""
    suite.CHECKS[check].run(case)


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_the_engines_agree_on_other_readings(reading: dict[str, Any]) -> None:
    checks.engines_agree("fnr_authors", {"fnr_authors": reading})


def test_the_names_are_those_of_the_plans() -> None:
    for name, path in CLASSES.items():
        assert suite.Case(path).kind.name == name


class Authors(Reference):
    """As the authors' code: a batch is mapped, the cohort counts, momentum stays."""

    def mapped(self, k: int, key: torch.Tensor) -> hand.Array:
        order = np.argsort(uniform(fold(key, "draw"), hand.SIZES[k]).numpy(), kind="stable")
        return hand.CLIENTS[k][order[: self.options["L"]]]

    def compared(self, k: int, cohort: tuple[int, ...]) -> list[int]:
        return [j for j in cohort if self.plus or j != k]

    def begin(self, k: int) -> hand.Tree:
        return self.v[k]

    def shares(self, cohort: tuple[int, ...]) -> hand.Array:
        return np.full(len(cohort), 1 / len(cohort))

    def mapping(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        return EVERYBODY


@pytest.mark.parametrize("name", ["rfedavg_authors", "rfedavg_plus_authors"])
def test_rfedavg_with_momentum(name: str, engine: str) -> None:
    """Two of three clients, mini-batches of 2; the optimisers of those that are absent stay."""
    ran = hand.run(name, {name: {"lam": LAM, "L": 2}}, engine=engine, **PARTIAL)
    reference = Authors(name, ran, momentum=0.5, lr=0.12, L=2)
    compare(reference, name)
    for k, v in reference.v.items():
        hand.same(row(ran.memory(name)["optimizer"]["v"], k), v)


def test_rfedavg_reads_the_batch_that_it_draws_with_noise() -> None:
    """rFedAvg draws a batch of its own from a client's samples: that is a look at them as well."""
    settings = {"rfedavg_authors": {"lam": 0.01, "L": 3}}
    a, b, clean = (
        federation.run(
            "rfedavg_authors", settings, model=checks.images_network(), data=of, engine=engine
        )
        for of, engine in (
            (skewed(), "sequential"),
            (skewed(), "vectorized"),
            (federation.images(), "sequential"),
        )
    )
    checks.close(b.params, a.params, 1e-8)
    first = "rfedavg_authors/mmd"
    assert not torch.equal(a.tensors[first], clean.tensors[first])
    torch.testing.assert_close(
        b.tensors[first], a.tensors[first], rtol=1e-8, atol=1e-12, equal_nan=True
    )
