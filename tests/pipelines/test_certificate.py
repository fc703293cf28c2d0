"""dvc.lock as a certificate: settings, code and data determine every byte of an experiment's
results."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.pipelines.small import PARAMS, Repository, copy

pytestmark = pytest.mark.slow

KILLS, SEED = 6, 2026
LONG = PARAMS.replace("rounds: 3", "rounds: 60").replace(
    "device: cpu", "device: cpu, observe: true"
)


def test_the_same_lock_after_kills_and_on_another_machine(tmp_path: Path) -> None:
    """The second time with other settings of the machine, and with `kill -9` of all processes at
    random moments."""
    once, again = Repository(copy(tmp_path / "once")), Repository(copy(tmp_path / "again"))
    began = time.monotonic()
    once.repro(LONG.replace("{checkpoint_every: 1}", "{processes: 2}"))
    undisturbed = time.monotonic() - began
    other = "{processes: 1, memory_mb: 64, checkpoint_every: 2}"
    settings = LONG.replace("{checkpoint_every: 1}", other)
    (again.folder / "params.yaml").write_text(settings)
    source, killed = random.Random(SEED), 0
    while killed < KILLS:
        process = again.start("dvc", "repro", "--force", "report")
        time.sleep(source.uniform(0, undisturbed))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate(timeout=60)
    again.repro(settings)
    lines = [(one.folder / "dvc.lock").read_text().splitlines() for one in (once, again)]
    assert lines[0] == lines[1]
    assert {"runs", "evaluation", "report"} <= {
        line.split()[-1] for line in lines[0] if "- path: " in line
    }
    assert list((again.folder / ".resume").iterdir()) == []
