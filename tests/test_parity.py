"""The vectorized engine equals the sequential one, for every recipe of the table."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.run import Outcome
from fedml_noniid.plugins.models import build
from tests import federation
from tests.recipe_table import ALONE, EVERY

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def close(found: Params, wanted: Params, rtol: float) -> None:
    """Relative to the largest number of a tensor: single weights pass through zero."""
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        assert found[key].dtype == leaf.dtype
        torch.testing.assert_close(
            found[key], leaf, rtol=rtol, atol=rtol * leaf.abs().max().item(), msg=key
        )


def close_together(found: Params, wanted: Params, rtol: float) -> None:
    """Relative to the largest number of all: the gradient of a bias before a batch norm is nothing
    but rounding."""
    assert found.keys() == wanted.keys()
    largest = max((leaf.abs().max().item() for leaf in wanted.values()), default=0.0)
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=rtol, atol=rtol * largest, msg=key)


# Every recipe where it is hardest; a method by itself in float32 too.
WAYS = [
    *((entry, True, torch.float64) for entry in EVERY),
    *((entry, False, torch.float32) for entry in ALONE),
]


def test_the_table_is_not_small() -> None:
    assert len(EVERY) >= 60


@pytest.mark.parametrize(
    ("entry", "batch_norm", "dtype"),
    WAYS,
    ids=[f"{e}-{'norm' if b else 'plain'}-{d}" for e, b, d in WAYS],
)
def test_rounds_on_ragged_clients(entry: str, batch_norm: bool, dtype: torch.dtype) -> None:
    """Four of six clients a round; 1 to 12 samples, so 1 to 3 steps, and short last batches."""
    recipe, settings = EVERY[entry]
    rounds = federation.ROUNDS if entry in ALONE else 2
    outcomes: list[Outcome] = []
    states: list[Params] = []
    for engine in ("sequential", "vectorized"):
        simulation = federation.simulation(
            recipe,
            settings,
            dtype=dtype,
            batch_norm=batch_norm,
            engine=engine,
            epochs=1,
            rounds=rounds,
        )
        outcomes.append(simulation.run())
        states.append(
            flatten(
                {"state": simulation.loop.state.slices, "memory": simulation.engine.clients.memory}
            )
        )
    a, b = outcomes
    rtol = TOLERANCE[dtype]
    for part in ("params", "evaluated", "buffers"):
        close(getattr(b, part), getattr(a, part), rtol)
    close_together(states[1], states[0], rtol)
    assert bool(a.buffers) is batch_norm
    for mine, other in zip(a.rows, b.rows, strict=True):
        assert (mine["bytes_up"], mine["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        for key in ("local_loss", "update_norm_client", "update_norm_server", "test_loss"):
            assert other[key] == pytest.approx(mine[key], rel=rtol)


@pytest.fixture(scope="module")
def images() -> federation.Federation:
    return federation.images()


@pytest.mark.parametrize("entry", ALONE)
def test_convolutions_and_what_is_recorded(
    entry: str, images: federation.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, and every quantity that methods measure and observe, on rFedAvg's CNN in small with
    batch norm."""
    recipe, settings = ALONE[entry]
    if recipe == "fednlr" and "mu" in settings["fednlr"]:
        settings = {"fednlr": settings["fednlr"] | {"mu": "fc1=3 conv2=2"}}
    net = build(
        "cnn", (1, 6, 6), federation.N_CLASSES, {"channels": 2, "hidden": 4, "batch_norm": True}
    )
    monkeypatch.setattr(federation, "network", lambda batch_norm: net)
    outcomes: list[Outcome] = []
    for engine in ("sequential", "vectorized"):
        options = {"dtype": torch.float64, "engine": engine, "rounds": 2, "observing": True}
        outcomes.append(federation.simulation(recipe, settings, of=images, **options).run())
    a, b = outcomes
    close(b.params, a.params, 1e-8)
    assert b.tensors.keys() == a.tensors.keys()
    for key, leaf in a.tensors.items():
        torch.testing.assert_close(
            b.tensors[key], leaf, rtol=1e-6, atol=1e-9, equal_nan=True, msg=key
        )
