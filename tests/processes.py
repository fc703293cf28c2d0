"""What tests ask about processes."""

from __future__ import annotations

from pathlib import Path


def alive(process: int) -> bool:
    """Whether it runs: one that has ended and that nobody waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
