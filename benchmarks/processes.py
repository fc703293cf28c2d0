"""Runs a measurement in a process of its own, with one thread."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.engines import Engine
from benchmarks.peers.harness import read_results

ROOT = Path(__file__).parent.parent
LIMIT = 3600  # seconds
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch's
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",  # some peers take a GPU where there is one
    **dict.fromkeys(("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"), "0"),  # Flower and Ray phone home
    "PYTHONPATH": str(ROOT),
}


class FailedError(Exception):
    """A measured process ended without a result."""


def measure(engine: Engine, jobs: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What the engine found for each job, and the final weights of the last. Raises FailedError."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.npz"
        command = [engine.python, "-m", engine.module, str(result), engine.argument, *map(str, jobs)]
        # What this process has set for itself, by importing our engines, is not for peers.
        inherited = {key: value for key, value in os.environ.items() if key != LARGE_PAGES}
        pages = {LARGE_PAGES: "1"} if engine.large_pages else {}
        try:
            ended = subprocess.run(
                command, cwd=folder, env=inherited | ENVIRONMENT | pages, timeout=LIMIT, check=False, text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FailedError(str(error)) from None
        if ended.returncode or not result.exists():
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise FailedError(f"ended with {ended.returncode}: {last}")
        return read_results(result)
