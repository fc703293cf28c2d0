"""FedPer (Arivazhagan et al. 2019) against the same federation of `torch.nn` modules, in
float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.packing import flatten
from tests import federation
from tests.methods.test_fedbn import (
    COHORT,
    MU,
    ROUNDS,
    SIZES,
    Modules,
    personal,
    same,
    simulation,
    theirs,
)

HEAD = ("fc2.weight", "fc2.bias")
SHARED = ("fc1.weight", "fc1.bias", "bn1.weight", "bn1.bias")
RUNNING = ("bn1.mean", "bn1.var")


@pytest.mark.parametrize("recipe", ["fedper", "fedprox+fedper", "fedbn+fedper"])
def test_it_is_the_federation_of_modules(recipe: str, engine: str) -> None:
    """Two of three clients a round, so a client's classifier waits for it.

    The running statistics are averaged with the base, but for FedBN.
    """
    settings = {"fedprox": {"mu": MU}} if "fedprox" in recipe else {}
    ours = simulation(recipe, settings, engine)
    norms = "fedbn" in recipe
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    start = ours.loop.start
    whole = start.params | start.task.personal["params"]
    model.load_state_dict({theirs(name): leaf for name, leaf in whole.items()}, strict=False)
    params = SHARED[:2] if norms else SHARED
    names = params if norms else (*params, *RUNNING)
    state = model.state_dict()
    shared = {theirs(name): state[theirs(name)].clone() for name in names}
    reference = Modules([copy.deepcopy(model) for _ in SIZES], shared)
    for t, found in enumerate(ours.rounds(), start=1):
        cohort = draw_cohort(0, t, len(SIZES), COHORT)
        reference.round(cohort, [SIZES[k] for k in cohort], MU if settings else 0.0)
        same(ours.loop.state.params, reference.shared, params)
        same(ours.loop.state.buffers, reference.shared, () if norms else RUNNING)
        for k, module in enumerate(reference.clients):
            kept = (*HEAD, *SHARED[2:], *RUNNING) if norms else HEAD
            same(personal(ours, k), module.state_dict(), kept)
        accuracy, loss = reference.scores()
        assert found["test_accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert found["test_loss"] == pytest.approx(loss, rel=1e-12)
        # 3 * 4 + 4 numbers of the base, 4 of each part of the batch norm; the 15 of the classifier
        # never leave.
        sent = 16 if norms else 32
        assert found["bytes_up"] == found["bytes_down"] == COHORT * sent * 8
    assert t == ROUNDS


def test_a_run_goes_on_after_a_kill_without_batch_norms(tmp_path: Path) -> None:
    """A personal part without buffers, which no file has."""
    how = {"rounds": 4, "checkpoint": tmp_path / "it"}
    whole = federation.run("fedper", rounds=4)
    first = federation.simulation("fedper", **how)
    for _ in range(2):
        next(rounds := first.rounds())
        rounds.close()
    again = federation.simulation("fedper", **how)
    assert again.start_round == 2
    ended = again.run()
    assert federation.equal(ended, whole)
    assert all(
        torch.equal(leaf, flatten(whole.personal)[name])
        for name, leaf in flatten(ended.personal).items()
    )
