"""What CCVR, FedDF, FSL, FedGen and FedFTG have in common: a server that learns, with any model and
in any dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate
from tests import federation

CHEAP: dict[str, dict[str, object]] = {
    "ccvr": {"samples": 6, "epochs": 1},
    "feddf": {"steps": 3},
    "fsl": {"epochs": 1},
    "fedgen": {"hidden": 4, "noise_dim": 2, "steps": 2, "gen_batch_size": 3, "batch_size": 5},
    "fedftg": {"iterations": 2, "model_steps": 2, "hidden": 4, "noise_dim": 2, "batch_size": 5},
}
EVERY = pytest.mark.parametrize("method", CHEAP)


def images(n: int, dtype: torch.dtype) -> Samples:
    x = torch.randn(n, 1, 28, 28, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return Samples(x.to(dtype), torch.arange(n) % 10)


def run(
    recipe: str, dtype: torch.dtype = torch.float32, batch_norm: bool = True, seed: int = 0
) -> Outcome:
    """Two rounds of a small CNN on noise."""
    network = build("cnn", (1, 28, 28), 10, {"channels": 2, "hidden": 6, "batch_norm": batch_norm})
    settings: dict[str, Any] = {
        method: CHEAP[method] for method in recipe.split("+") if method in CHEAP
    }
    return simulate(
        recipe,
        settings,
        Federation.from_indices(
            images(12, dtype),
            [np.arange(4), np.arange(4, 12)],
            images(10, dtype),
            public=images(7, dtype),
        ),
        Plan(
            network, LocalTraining(lr=0.05, epochs=1, batch_size=4), 2, 2, seed, engine="sequential"
        ),
    ).run()


@EVERY
@pytest.mark.parametrize(("batch_norm", "dtype"), [(False, torch.float64), (True, torch.float32)])
def test_it_trains_a_cnn_in_its_dtype(method: str, batch_norm: bool, dtype: torch.dtype) -> None:
    ran, plain = run(method, dtype, batch_norm), run("fedavg", dtype, batch_norm)
    for found, wanted in ((ran.params, plain.params), (ran.buffers, plain.buffers)):
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()
        }
        assert all(torch.isfinite(leaf).all() for leaf in found.values())
    assert not federation.equal_models(ran, plain)


@pytest.mark.parametrize(
    "recipe",
    [
        "ccvr+feddf",
        "fedgen+feddf",
        "fedgen+fedftg+ccvr",
        "feddf+fnr",
        "fedftg+fednnnn",
        "feddf+scaffold",
        "fsl+fnr",
    ],
)
def test_it_meets_others(recipe: str) -> None:
    """The evaluated model is the one that a learner left."""
    a = run(recipe)
    assert all(torch.equal(a.params[name], leaf) for name, leaf in a.evaluated.items())
    assert all(torch.isfinite(leaf).all() for leaf in a.params.values())


def test_a_frozen_head_stays_frozen() -> None:
    for method in ("feddf", "fedftg", "fedgen", "fsl"):
        ran, plain = run(f"fedbabu+{method}"), run("fedbabu")
        for name in ("fc2.weight", "fc2.bias"):
            assert torch.equal(ran.params[name], plain.params[name])
        assert not torch.equal(ran.params["fc1.weight"], plain.params["fc1.weight"])
