"""What every method whose clients keep models of their own keeps: the bits of processes and of a
checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedml_noniid.engines.packing import flatten
from tests import federation
from tests.recipe_table import ALONE
from tests.walks import thinned

TOGETHER = ("ditto+scaffold", "fedala+moon", "fedbn+scaffold", "fedrep+feddyn")
OWN = ("apfl", "ditto", "fedala", "fedbn", "fedper", "fedproto", "fedrep", "fedrod", "finetune")
CLUSTERS = ("cfl", "ifca")  # `tests/engines/test_received.py` has these checks for them


def test_no_method_is_left_out() -> None:
    found = {
        recipe
        for recipe, settings in ALONE.values()
        if "own_models" in federation.simulation(recipe, settings, batch_norm=True).remarks
    }
    assert found == {*OWN, *CLUSTERS}


@pytest.mark.parametrize("recipe", thinned([*OWN, *TOGETHER], 0))
def test_processes_and_a_checkpoint_keep_the_bits(recipe: str, tmp_path: Path) -> None:
    """Of the clients' own models too. FedPer's have no buffers here, which no file then has."""
    batch_norm = recipe != "fedper"
    whole = federation.run(recipe, batch_norm=batch_norm)
    beside = federation.run(recipe, batch_norm=batch_norm, workers=2)
    file = tmp_path / "checkpoint"
    next(federation.simulation(recipe, batch_norm=batch_norm, checkpoint=file).rounds())
    resumed = federation.simulation(recipe, batch_norm=batch_norm, checkpoint=file)
    assert resumed.start_round == 1
    for found in (beside, resumed.run()):
        assert federation.equal(found, whole)
        stored, wanted = flatten(found.personal), flatten(whole.personal)
        assert stored.keys() == wanted.keys()
        assert all(torch.equal(stored[key], leaf) for key, leaf in wanted.items())
    leaf = whole.personal["params"]["bn1.weight" if "fedbn" in recipe else "fc2.weight"]
    assert not torch.equal(leaf[0], leaf[1]), "each client has its own"
