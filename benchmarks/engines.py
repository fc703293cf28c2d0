"""The compared engines: the bare loop, our engines, FedML's simulator, and peers if the user names
an interpreter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.workloads import Workload, network


@dataclass(frozen=True)
class Engine:
    """A program that runs a job in a separate process."""

    name: str
    module: str
    # if it ends in a number, that is the number of workers: processes, threads or actors
    argument: str = "-"
    same_order: bool = True  # whether it reads the batches in the job's order
    python: str = sys.executable

    @property
    def parallel(self) -> bool:
        """Whether its number of workers can be chosen."""
        return self.argument[-1].isdigit()

    def with_workers(self, workers: int) -> Engine:
        """The same engine with another number of workers."""
        return replace(self, argument=self.argument.rstrip("0123456789") + str(workers))


# Environment variable with an interpreter -> its engines: (name, module, argument, whether it keeps
# the job's order).
PEERS = {
    "PFL": [
        ("pfl-research", "benchmarks.peers.with_pfl", "-", True),
        ("pfl-research, two processes", "benchmarks.peers.with_pfl_processes", "2", True),
    ],
    "FLOWER": [("Flower, two actors", "benchmarks.peers.with_flower", "2", False)],
    "FEDLAB": [("FedLab", "benchmarks.peers.with_fedlab", "-", True)],
    "BLAZEFL": [
        ("BlazeFL, two threads", "benchmarks.peers.with_blazefl", "threads:2", True),
        ("BlazeFL, two processes", "benchmarks.peers.with_blazefl", "processes:2", True),
    ],
}


BARE = Engine("bare loop", "benchmarks.bare")


def ours(workload: Workload) -> list[Engine]:
    """Our engines that make sense for a workload on a CPU."""
    engines = [
        Engine("ours, sequential", "benchmarks.ours", "sequential"),
        Engine("ours, two workers", "benchmarks.ours", "workers:2"),
    ]
    if network(workload).dense:  # on a CPU, vectorized convolutions are slower than sequential ones
        engines.insert(1, Engine("ours, vectorized", "benchmarks.ours", "vectorized"))
    return engines


def variants(workload: Workload) -> list[Engine]:
    """Our engines with a choice that is not the default, for the comparison of engines only."""
    if network(workload).dense:
        return []
    # Dense models are slower in bf16. Its weights differ, so the final loss is compared.
    return [
        Engine("ours, sequential, bf16", "benchmarks.ours", "bf16-sequential", same_order=False)
    ]


def others(environment: Mapping[str, str], quick: bool) -> tuple[list[Engine], list[str]]:
    """(simulators that can run, a line for each that can't)."""
    engines, skipped = [], []
    if quick:
        skipped.append("FedML: skipped with --quick (its import takes 11 s)")
    elif importlib.util.find_spec("fedml") is None:
        skipped.append("FedML: skipped, it is not installed here")
    else:
        module = "benchmarks.peers.with_fedml"
        engines.append(Engine("FedML, its loaders", module, "loaders", same_order=False))
        engines.append(Engine("FedML, ready batches", module, "batches"))
    for variable, ways in PEERS.items():
        if environment.get(variable):
            engines += [Engine(*way, python=environment[variable]) for way in ways]
        else:
            name = ways[0][0].partition(",")[0]
            skipped.append(
                f"{name}: skipped, name an interpreter that has it ({variable}=/path/python "
                "python -m benchmarks bench)"
            )
    return engines, skipped
