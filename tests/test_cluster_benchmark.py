"""The benchmark of items on a cluster: what it reads of checkpoints, and what kills leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("distributed", reason="a cluster needs [cluster]")

from benchmarks import cluster
from fedml_noniid.engines.checkpoint import Checkpoint, Checkpoints
from fedml_noniid.pipelines.experiment import resume

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # what dask leaves to the collector
    # mlflow's own use of SQLAlchemy, and its own type hints.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType"),
]


def test_the_rounds_of_a_checkpoint_are_those_of_its_state(tmp_path: Path) -> None:
    """Rounds that are written before their state does not name them do not count."""
    assert cluster.progress(tmp_path) == cluster.Progress(0, [])
    of, seconds = Checkpoints(tmp_path / resume.STATE, "f"), [0.5, 1.5e-05, 0.25]
    states = []
    for done in (2, 3):
        rows = [{"round": float(t + 1), "seconds": seconds[t]} for t in range(done)]
        of.write(Checkpoint(done, {"w": torch.zeros(1)}, "", [], rows, [{}] * done, False))
        states.append((tmp_path / resume.STATE).read_bytes())
        assert cluster.progress(tmp_path) == cluster.Progress(done, seconds[:done])
    (tmp_path / resume.STATE).write_bytes(states[0])
    assert cluster.progress(tmp_path) == cluster.Progress(2, seconds[:2])
