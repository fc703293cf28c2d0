"""dvc.lock as a certificate: settings, code and data determine every byte of an experiment's
results."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.pipelines.small import PARAMS, Repository, copy, run_stages

pytestmark = pytest.mark.slow

KILLS, SEED = 6, 2026
LONG = PARAMS.replace("rounds: 3", "rounds: 100").replace(
    "device: cpu", "device: cpu, observe: true"
)


def test_the_same_lock_after_kills_and_on_another_machine(tmp_path: Path) -> None:
    """The second time with other settings of the machine, and with `kill -9` of all processes of
    the training at random moments."""
    once, again = Repository(copy(tmp_path / "once")), Repository(copy(tmp_path / "again"))
    once.repro(LONG.replace("{checkpoint_every: 1}", "{processes: 2}"))
    other = "{processes: 1, memory_mb: 64, clients_memory: disk, checkpoint_every: 2}"
    settings = LONG.replace("{checkpoint_every: 1}", other)
    (again.folder / "params.yaml").write_text(settings)
    run_stages(again.folder, ("prepare", "partition"))
    source, killed = random.Random(SEED), 0
    for _ in range(KILLS):
        process = again.start("python", "-m", "fedml_noniid.pipelines.stages", "train")
        time.sleep(source.uniform(1, 8))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate(timeout=60)
    assert killed, "the training is too short for this machine"
    again.repro(settings)
    lines = [(one.folder / "dvc.lock").read_text().splitlines() for one in (once, again)]
    assert lines[0] == lines[1]
    assert {"runs", "evaluation", "report"} <= {
        line.split()[-1] for line in lines[0] if "- path: " in line
    }
    assert list((again.folder / ".resume").iterdir()) == []
