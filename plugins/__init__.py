"""Methods of federated learning: the five papers with their FedML pairs, baselines, the registry.

A paper's package has its component at once, and its pair when it is asked for:
`from fedml_noniid.plugins.fnr import FNR, FNRTrainer, FNRAggregator`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

HALVES = ("Trainer", "Aggregator")


def lazy_pair(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a paper's package: fedml, which takes seconds, is imported with the
    pair only."""

    def pair(name: str) -> Any:
        if not name.endswith(HALVES):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.pair"), name)

    return pair
