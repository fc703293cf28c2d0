"""dvc.lock as a certificate: settings, code and data determine every byte of an experiment's
results."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.pipelines.small import PARAMS, Repository, copy

pytestmark = pytest.mark.slow

KILLS = 10
SEED = 2026
LONG = PARAMS.replace("rounds: 3", "rounds: 60").replace(
    "device: cpu", "device: cpu, observe: true"
)


def has_begun(repository: Repository) -> bool:
    """Whether a training has written a checkpoint and has not ended."""
    return any(repository.folder.glob(".resume/*/checkpoint.safetensors"))


def test_the_same_lock_after_a_kill_and_on_another_machine(tmp_path: Path) -> None:
    """The second time with other settings of the machine, and killed in the middle of training."""
    once, again = Repository(copy(tmp_path / "once")), Repository(copy(tmp_path / "again"))
    once.repro(LONG.replace("{checkpoint_every: 1}", "{processes: 2}"))
    other = LONG.replace(
        "{checkpoint_every: 1}", "{processes: 1, memory_mb: 64, checkpoint_every: 2}"
    )
    (again.folder / "params.yaml").write_text(other)
    process = again.start("dvc", "repro", "--force", "report")
    while not has_begun(again) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (again.folder / "report").exists()
    again.repro(other)
    lines = [(one.folder / "dvc.lock").read_text().splitlines() for one in (once, again)]
    assert lines[0] == lines[1]
    assert {"runs", "evaluation", "report"} <= {
        line.split()[-1] for line in lines[0] if "- path: " in line
    }


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    """`kill -9` of all its processes at random moments: the weights are those of the undisturbed
    one."""
    small = Repository(copy(tmp_path / "small"))
    two = LONG.replace("{checkpoint_every: 1}", "{checkpoint_every: 1, processes: 2}")
    (small.folder / "params.yaml").write_text(two)
    stage = ("python", "-m", "fedml_noniid.pipelines.stages")
    small.run(*stage, "prepare")
    small.run(*stage, "partition")
    began = time.monotonic()
    small.run(*stage, "train")
    undisturbed = time.monotonic() - began
    expected = weights(small)
    source, killed = random.Random(SEED), 0
    while killed < KILLS:
        if weights(small) == expected:
            forget(small)
        process = small.start(*stage, "train")
        time.sleep(source.uniform(0, undisturbed))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate(timeout=60)
        assert weights(small).items() <= expected.items()
    small.run(*stage, "train")
    assert weights(small) == expected
    assert list((small.folder / ".resume").iterdir()) == []


def weights(small: Repository) -> dict[str, str]:
    """Item -> hash of its final weights, of the items that have ended."""
    records = [json.loads(path.read_text()) for path in small.folder.glob("runs/*/run.json")]
    return {record["recipe"]: record["weights_sha256"] for record in records}


def forget(small: Repository) -> None:
    """Removes all that has been trained."""
    shutil.rmtree(small.folder / "runs")
    for path in small.folder.glob(".items/*/made.json"):
        shutil.rmtree(path.parent)
