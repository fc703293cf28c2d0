"""Describes the machine and the code of a measurement, and the load from other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.harness import cpu_seconds
from fedml_noniid.pipelines.experiment.provenance import git_commit

BUSY = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal


class Watch:
    """Measures the machine's load and the CPU time of other processes, from its creation on."""

    def __init__(self) -> None:
        self._began, self._busy, self._ours = time.perf_counter(), _busy(), cpu_seconds()
        self._commit = git_commit()  # before the tables change the tree

    def facts(self) -> dict[str, Any]:
        """Returns the facts of the machine and the code."""
        cores = os.cpu_count() or 1
        seconds = (time.perf_counter() - self._began) * cores
        others = (_busy() - self._busy) - (cpu_seconds() - self._ours)
        return {
            "commit": self._commit,
            "cpu": _model(),
            "cores": cores,
            "usable_cores": len(os.sched_getaffinity(0)),
            "torch": str(torch.__version__),
            "load_average": os.getloadavg()[0],
            "others_percent": 100 * max(0.0, others) / max(seconds, 1e-9),
            "minutes": seconds / cores / 60,
        }

    def line(self) -> str:
        """Returns the facts in one line of a page."""
        return line(self.facts())


def line(facts: dict[str, Any]) -> str:
    """Returns the facts in one line."""
    return (
        f"Commit of the code: {facts['commit']}. {facts['cpu']}, {facts['cores']} cores "
        f"({facts['usable_cores']} usable), torch {facts['torch']}. While this "
        f"ran ({facts['minutes']:.0f} min), other processes took {facts['others_percent']:.0f} "
        "% of the machine's CPU "
        f"time; load average at the end {facts['load_average']:.1f}."
    )


def _busy() -> float:
    """CPU seconds of the whole machine since its start."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(ticks[i] for i in BUSY) / os.sysconf("SC_CLK_TCK")


def _model() -> str:
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("model name"):
            return row.partition(":")[2].strip()
    return "unknown CPU"
