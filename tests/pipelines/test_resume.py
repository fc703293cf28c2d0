"""An attempt goes on from the newest checkpoint of all attempts."""

from __future__ import annotations

from pathlib import Path

from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.pipelines.experiment import resume
from tests import federation


def attempt(folder: Path, name: str) -> Simulation:
    """With the clients' memories on disk."""
    path = resume.checkpoints(folder, "of the item", name).path
    how = {"clients_memory": "disk", "rounds": 9, "cohort": 2}
    return federation.simulation("scaffold", checkpoint=path, fingerprint="of the item", **how)


def test_the_memories_on_disk_go_with_the_checkpoint(tmp_path: Path) -> None:
    """The first attempt is taken for dead, but still runs and replaces its rows."""
    first = attempt(tmp_path, "first")
    rows = first.rounds()
    for _ in range(4):
        next(rows)
    second = attempt(tmp_path, "second")
    assert second.start_round == 4
    ends = [of.run() for of in (first, second)]
    wanted = federation.run("scaffold", rounds=9, cohort=2)
    assert all(federation.equal(end, wanted) for end in ends)
