"""The number of clients of a round. Nothing here imports torch: the report of an experiment does without it."""

from __future__ import annotations


def cohort_size(participation: float, n_clients: int) -> int:
    """M = max(1, round(C N)), clients per round."""
    return max(1, round(participation * n_clients))
