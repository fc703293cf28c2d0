"""Sets dask for long trainings, each value with its reason."""

from __future__ import annotations

import logging
import os
from typing import Any

import dask

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# With dask's value of 65,536, training takes 1.3 to 1.7 times as long.
TRIM = "MALLOC_TRIM_THRESHOLD_"
SETTINGS: dict[str, Any] = {
    # A lost item is tried again by the front, from its checkpoint.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,  # the front gives a worker one item at a time
    # A worker that computes for minutes without a pause isn't dead.
    "distributed.scheduler.worker-ttl": None,
    # It moves and drops copies of results; there are none.
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.worker.daemon": False,  # a training may start processes
    "distributed.worker.profile.enabled": False,  # it stops the training's thread every 10 ms
    # Memory is the training's; nothing of it can be spilled.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # A worker that trains answers late.
    "distributed.comm.timeouts.connect": "120s",
    "distributed.comm.timeouts.tcp": "300s",
}


def apply(threads: int = 1) -> None:
    """Sets dask in a process of the cluster and in the workers that it starts.

    `threads`: of one training. The number decides the order of sums, so it decides bits.
    """
    # dask takes these from the environment before it takes them from its settings.
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    os.environ.pop(TRIM, None)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # people read our lines
    environ = {TRIM: None, **dict.fromkeys(THREADS, threads)}
    dask.config.set(SETTINGS | {"distributed.nanny.pre-spawn-environ": environ})
