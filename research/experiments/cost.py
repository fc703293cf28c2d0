"""Measures the CPU seconds of each round, for an experiment that runs one training at a time in one
process."""

from __future__ import annotations

import time

from fedml_noniid import Callback

_since = [
    0.0
]  # not an attribute: it would be in the checkpoint, and a new process counts from zero


class CpuSeconds(Callback):
    """Adds `cpu_seconds` to rounds.csv: of this process since the last round, its test included."""

    def on_start(self, run: object) -> None:
        """Begins to count."""
        _since[0] = time.process_time()

    def measure(self, end: object) -> dict[str, float]:
        """The seconds since the last call."""
        before, _since[0] = _since[0], time.process_time()
        return {"cpu_seconds": _since[0] - before}
