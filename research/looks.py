"""Tests that may stop early: a few looks at growing data, with one level for all of them.

Lan, DeMets: Discrete sequential boundaries for clinical trials, Biometrika 70, 1983,
https://doi.org/10.1093/biomet/70.3.659. The spending function is their Pocock-like one,
level * log(1 + (e - 1) t) at the fraction t of all seeds. The O'Brien-Fleming-like one would leave
almost nothing for the first look: where 100 claims share 5 %, two-sided p would have to be below
1e-8 at 8 of 24 seeds.

The levels are those of normal differences with known deviation. A t test takes them as levels for
its p (Jennison, Turnbull: Group Sequential Methods, 2000, section 3.8), of a level that was divided
by T_EXCESS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from fedml_noniid.data.types import Floats

# By how much t tests at 8, 16 and 24 seeds exceed the level of normal ones, at most (simulated).
T_EXCESS = 1.06
CELLS = 400  # of the interval in which a test goes on
SMALLEST = 1e-15  # no p of several looks is below


@cache
def levels(fractions: tuple[float, ...], level: float) -> tuple[float, ...]:
    """The two-sided level of each look, so that all of them together have `level`.

    `fractions`: of all seeds, ascending, up to 1.
    """
    levels_: list[float] = []
    inside: tuple[Floats, Floats] | None = None  # sums where the test goes on, their masses
    before = 0.0
    for t in fractions:
        if inside is None:
            crossing = spent(level, t)
            bound = -ndtri(crossing / 2) * math.sqrt(t)
        else:
            bound = _bound(*inside, t - before, spent(level, t) - spent(level, before))
        levels_.append(float(2 * ndtr(-bound / math.sqrt(t))))
        if t < 1:
            inside = _within(bound, t - before, inside)
        before = t
    return tuple(levels_)


def spent(level: float, fraction: float) -> float:
    """The part of `level` that looks up to this fraction of the seeds may use."""
    return level * math.log1p((math.e - 1) * fraction)


def p_of_look(p: float, fractions: Sequence[float]) -> float:
    """The smallest level of all looks together at which the last of `fractions` rejects with `p`.

    Of several looks that reject, the smallest result is the p value of the whole test.
    """

    def excess(log_level: float) -> float:
        return levels(tuple(fractions), math.exp(log_level))[-1] - p

    if excess(0.0) < 0:
        return 1.0
    lowest = math.log(SMALLEST)
    return SMALLEST if excess(lowest) >= 0 else math.exp(brentq(excess, lowest, 0.0))


def _within(
    bound: float, step: float, inside: tuple[Floats, Floats] | None
) -> tuple[Floats, Floats]:
    """Midpoints of the cells between -bound and bound, and the mass of the sum in each."""
    edges = np.linspace(-bound, bound, CELLS + 1)
    points, masses = (np.zeros(1), np.ones(1)) if inside is None else inside
    reached = ndtr((edges[:, None] - points) / math.sqrt(step))  # [CELLS + 1, points]
    return (edges[1:] + edges[:-1]) / 2, np.diff(reached, axis=0) @ masses


def _bound(points: Floats, masses: Floats, step: float, crossing: float) -> float:
    """The bound that the next sum crosses, on either side, with this probability."""

    def excess(bound: float) -> float:
        tail = ndtr((-bound - points) / math.sqrt(step)) + ndtr((points - bound) / math.sqrt(step))
        return math.log(max(float(tail @ masses), 1e-300) / crossing)

    return float(brentq(excess, 0.0, float(points[-1]) + 40 * math.sqrt(step)))
