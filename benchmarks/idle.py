"""What a deployment takes while it waits: CPU seconds and memory of a server and of two of its
three silos. `python -m benchmarks idle` writes docs/results/idle.md and .csv.

The third silo never starts, so the server waits for it, and the two silos wait for a task.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import machine, transport
from benchmarks.report import render
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.deploy import exit_codes, silo_client
from fedml_noniid.pipelines.experiment.provenance import git_commit
from fedml_noniid.processes import loopback

SILOS, MEGABYTES = 3, 1
LIMIT_S, SETTLE_S = 300.0, 3.0
FILE, MB = "idle.csv", 1e6


def memory(pid: int | None, what: str) -> float:
    """Memory of a process, in MB: VmRSS or VmHWM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) * 1024 / MB


def cpu(pid: int | None) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(seconds: float) -> list[dict[str, Any]]:
    """A line per process. Raises UserError."""
    terms = transport.deployment(SILOS, MEGABYTES, 2)
    with (
        tempfile.TemporaryDirectory() as place,
        loopback.Processes(terms, transport.made_up(SILOS), Path(place)) as processes,
    ):
        for rank in range(SILOS):
            processes.start(rank)

        def there() -> bool:
            comm, kit = processes.deployment.comm_args, processes.deployment.kit(0)
            try:
                return len(silo_client.status(comm, kit)["there"]) == SILOS - 1
            except exit_codes.LostError:  # it does not listen yet
                return False

        _until(there)
        time.sleep(SETTLE_S)
        pids = {rank: process.pid for rank, process in processes.running.items()}
        before = {rank: cpu(pid) for rank, pid in pids.items()}
        time.sleep(seconds)
        return [
            {
                "process": loopback.name(rank),
                "seconds": seconds,
                "cpu_seconds": f"{cpu(pid) - before[rank]:.2f}",
                "rss_mb": f"{memory(pid, 'VmRSS'):.0f}",
                "most_mb": f"{memory(pid, 'VmHWM'):.0f}",
            }
            for rank, pid in pids.items()
        ]


def _until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        if time.monotonic() > end:
            raise UserError(f"no two silos after {LIMIT_S:.0f} s")
        time.sleep(0.5)


def write(root: Path, seconds: float, command: str) -> None:
    """Measures, and writes the page. The lines of other commits stay in the table."""
    to, commit, watch = root / "docs" / "results", git_commit(), machine.Watch()
    rows = [{"commit": commit, **row} for row in measure(seconds)]
    earlier = pd.read_csv(to / FILE, dtype=str) if (to / FILE).is_file() else pd.DataFrame()
    if len(earlier):
        rows = earlier[earlier["commit"] != commit].to_dict("records") + rows
    context = {"rows": rows, "command": command, "machine": machine.line(watch.found())}
    write_whole(to / FILE, pd.DataFrame(rows).to_csv(index=False))
    write_whole(to / "idle.md", render("idle.md.j2", context))
