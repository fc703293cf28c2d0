"""Processes, and a run that was killed, end with the bits of a whole run in one process; clients
side by side end near them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.engines.attackers import Attackers
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import Clock
from fedml_noniid.engines.schedule import Devices, Waits
from fedml_noniid.rates import Cosine
from tests import federation
from tests.engines.test_absences import often
from tests.recipe_table import ALONE, settings
from tests.walks import thinned

N = len(federation.SIZES)
UNEVEN = Devices(tuple(range(1, N + 1)), (0,) * N, (0,) * N)  # client k takes k + 1 us for a step
BUFFER: dict[str, Any] = {"clock": Clock(UNEVEN, Waits(buffer=2, concurrency=4)), "cohort": 2}
OWN = ("apfl", "ditto", "fedala", "fedbn", "fedper", "fedproto", "fedrep", "fedrod", "finetune")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("rfedavg_plus+fednnnn", {}),  # which evaluates another model than it sends
    ("scaffold+fnr+rfedavg_plus+ccn", {}),
    ("scaffold+fnr", {"lr": Cosine(0.1, warm_up=1), "absent": often}),
    ("dpfedavg+dpsgd", {"settings": {"dpfedavg": {"noise": 1.0}, "dpsgd": {"noise": 1.0}}}),
    ("ccvr", {}),  # which asks after the last round
    ("fedgen", {}),  # whose server trains
    ("scaffold", {"attackers": Attackers("gaussian", {"sigma": 0.1}, (1, 4), seed=3)}),
    # Models that clients have for themselves. Without norms they have no buffers.
    *((recipe, {"batch_norm": recipe != "fedper"}) for recipe in OWN),
    *((recipe, {}) for recipe in ("ditto+scaffold", "fedala+moon", "fedrep+feddyn")),
    *((recipe, {}) for recipe in ("ifca", "cfl", "fedbn+fedprox+ifca")),
    # A virtual clock: models of earlier rounds, fewer steps, clients that the server chooses.
    *((recipe, BUFFER) for recipe in ("fedbuff+fedavgm", "fedasync+fedprox", "fedbuff+moon")),
    ("fednova", {"clock": Clock(UNEVEN, Waits(deadline=30, partial=True))}),
    *((recipe, {"clock": Clock(UNEVEN, Waits())}) for recipe in ("oort", "powd", "rpowd")),
]


@pytest.mark.parametrize(("recipe", "changed"), thinned(CASES, 0, 2))
def test_processes_and_a_killed_run_have_the_same_bits(
    recipe: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, rows and records; memories of the clients and the state of the server."""
    if "dpsgd" in recipe:
        pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    how = {"settings": settings(recipe), "batch_norm": True} | changed
    whole, path = federation.simulation(recipe, **how), tmp_path / "run.safetensors"
    result, trees = whole.run(), flatten(whole.loop.trees)
    next(federation.simulation(recipe, checkpoint=path, **how).rounds())
    resumed = federation.simulation(recipe, checkpoint=path, workers=2, **how)
    assert resumed.start_round == 1 and federation.equal(resumed.run(), result)
    kept = flatten(resumed.loop.trees)
    assert kept.keys() == trees.keys()
    assert all(torch.equal(leaf, trees[name]) for name, leaf in kept.items())
    beside = federation.simulation(recipe, engine="vectorized", **how)
    for name, leaf in beside.run().params.items():
        torch.testing.assert_close(leaf, result.params[name], rtol=1e-4, atol=1e-5)


def test_no_method_with_models_of_clients_is_left_out() -> None:
    """The cases have each of them."""
    kinds = {
        recipe
        for recipe, methods in ALONE.values()
        if "own_models" in federation.simulation(recipe, methods, batch_norm=True).remarks
    }
    assert kinds == {*OWN, "cfl", "ifca"}
