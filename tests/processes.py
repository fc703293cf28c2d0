"""What tests ask about processes, and wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def alive(process: int) -> bool:
    """Whether it runs: one that has ended and that nobody waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(true: Callable[[], object], what: str = "it", seconds: float = 120.0) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited for {what} in vain"
        time.sleep(0.02)
