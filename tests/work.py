"""Counts what Python does, to notice work for each client or each sample where arrays should do."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any


def calls(function: Callable[[], object]) -> int:
    """Calls of functions, of Python and of C, while `function` runs."""
    found = 0

    def count(_frame: object, event: str, _what: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that `function` takes at a time, in bytes, as Python and NumPy count it."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
