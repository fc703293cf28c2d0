"""Draws the clients of a round.

Nothing here imports torch: the report of an experiment does without it.
"""

from __future__ import annotations

from fedml_noniid.data.streams import stream


def cohort_size(participation: float, n_clients: int) -> int:
    """M = max(1, round(C N)), clients per round."""
    return max(1, round(participation * n_clients))


def draw_cohort(seed: int, round_: int, n_clients: int, size: int) -> tuple[int, ...]:
    """`size` clients, uniformly without replacement, ascending; the same for every recipe."""
    if size == n_clients:
        return tuple(range(n_clients))
    chosen = stream(seed, "cohort", round_).choice(n_clients, size, replace=False)
    return tuple(sorted(chosen.tolist()))
