"""Learning-rate schedules: eta_t, the local step size of round t, as a pure function of the round.

Server and silos compute it themselves from the same settings, so no rate is ever sent. `warm_up`
rounds come first, in which the rate grows linearly (Goyal et al., Accurate, Large Minibatch SGD,
2017, https://arxiv.org/abs/1706.02677, section 2.2). With p the rounds since then:

    step         start factor^(p // every), or one more factor from each round of `at` on
    exponential  start factor^p
    cosine       end + (start - end) (1 + cos(pi p / P)) / 2, P the rounds after the warm-up
                 (Loshchilov and Hutter, SGDR, ICLR 2017, https://arxiv.org/abs/1608.03983, equation
                 5)

FedNova's experiments divide the rate in steps, FedDyn's decay exponentially with 0.998 per round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.core.options import (
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Share,
    check_options,
)
from fedml_noniid.own_code import call, find


@dataclass(frozen=True)
class Rate:
    """A constant rate, after the warm-up. A schedule overrides `decayed`."""

    start: Positive  # the largest rate
    warm_up: CountOrNone = 0  # rounds before the first with the rate `start`

    def at_round(self, t: int, rounds: int) -> float:
        """eta_t of round `t` of `rounds`, from 1. UserError unless it lies in (0, start]."""
        p = max(t, 1) - 1 - self.warm_up
        if p < 0:
            return self.start * max(t, 1) / (self.warm_up + 1)
        name = type(self).__name__
        rate: float = call(f"lr: {name}", self.decayed, p, max(rounds - self.warm_up, 1))
        if not 0 < rate <= self.start:
            raise UserError(
                f"lr: {name} gives {shown(rate)} in round {t}",
                allowed=f"above 0, at most {self.start:g}",
            )
        return rate

    def decayed(self, p: int, rounds: int) -> float:
        """The rate `p` rounds after the warm-up, of `rounds`."""
        return self.start


@dataclass(frozen=True)
class Step(Rate):
    """Multiplies the rate every so many rounds, or from some rounds on."""

    factor: Share = 0.1
    every: CountOrNone = 0  # rounds; 0: see `at`
    at: tuple[Count, ...] = ()  # rounds since the warm-up, from 1

    def __post_init__(self) -> None:
        if bool(self.every) is bool(self.at):
            raise UserError(
                "decay = step needs either `every` (rounds, from 1 up) or `at` (a list of rounds)"
            )

    def decayed(self, p: int, rounds: int) -> float:
        times = p // self.every if self.every else sum(p + 1 >= first for first in self.at)
        return self.start * self.factor**times


@dataclass(frozen=True)
class Exponential(Rate):
    """Multiplies the rate after each round."""

    factor: Share = 0.998

    def decayed(self, p: int, rounds: int) -> float:
        return self.start * self.factor**p


@dataclass(frozen=True)
class Cosine(Rate):
    """Lets the rate fall along half a cosine, to `end` behind the last round."""

    end: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.end > self.start:
            raise UserError(
                path=("end",), value=self.end, allowed=f"at most start = {self.start:g}"
            )

    def decayed(self, p: int, rounds: int) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * p / rounds)) / 2


DECAYS: dict[str, type[Rate]] = {
    "none": Rate,
    "step": Step,
    "exponential": Exponential,
    "cosine": Cosine,
}


def in_words(value: object) -> str:
    """A setting for a reader: `0.1`, or `0.1 (decay cosine, warm_up 5)`."""
    if not isinstance(value, Mapping):
        return f"{value:g}"
    rest = ", ".join(f"{key} {option}" for key, option in value.items() if key != "start")
    return f"{value['start']} ({rest})" if rest else f"{value['start']}"


def rate_of(value: float | Mapping[str, object]) -> Rate:
    """The schedule of a setting: a number, or {start, warm_up, decay, and the options of that
    decay}.

    `decay` is one of DECAYS, or a subclass of `Rate` as `package.module:name`. Raises UserError.
    """
    if not isinstance(value, Mapping):
        return Rate(value)
    options: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
    }
    kind = find("decay", options.pop("decay", "none"), DECAYS, Rate)
    check_options(kind, options, ("decay",))
    return kind(**options)
