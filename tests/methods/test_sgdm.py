"""SGDM (Liu et al. 2020) and the two other things of that name, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.methods import by_hand as hand

GAMMA = 0.7
THREE = pytest.mark.parametrize("form", ["sgdm", "sgdm_local", "sgdm_server"])


def settings(form: str = "sgdm", gamma: float = GAMMA) -> dict[str, dict[str, object]]:
    return {form: {"gamma": gamma}}


class Reference:
    """The server of each form."""

    def __init__(self, form: str, decay: float = 0.0, step: float = 1.0) -> None:
        self.form, self.decay, self.step = form, decay, step
        self.w, self.v, self.d = hand.W0, hand.zeros(), hand.zeros()

    def local(self, batches: Sequence[hand.Array]) -> tuple[hand.Tree, hand.Tree]:
        """(w_k, v_k)."""
        gamma = 0.0 if self.form == "sgdm_server" else GAMMA
        w, v = self.w, self.v if self.form == "sgdm" else hand.zeros()
        for batch in batches:
            g = hand.gradient(w, hand.X[batch], hand.Y[batch])
            v = hand.each(lambda v, g, w: gamma * v + g + self.decay * w, v, g, w)
            w = hand.each(lambda w, v: w - hand.LR * v, w, v)
        return w, v

    def round(self, cohort: Sequence[int], batches: Sequence[list[hand.Array]]) -> None:
        found = [self.local(of) for of in batches]
        average = hand.average(hand.shares(cohort), [w for w, _ in found])
        if self.form == "sgdm":
            self.v = hand.average(hand.shares(cohort), [v for _, v in found])
        if self.form == "sgdm_server":
            self.d = hand.each(lambda d, new, w: GAMMA * d + (new - w), self.d, average, self.w)
            average = hand.each(lambda w, d: w + self.step * d, self.w, self.d)
        self.w = average


@pytest.mark.parametrize(
    "options",
    [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 1}, {"weight_decay": 0.1}],
    ids=["full", "ones", "decay"],
)
@THREE
def test_its_lines(engine: str, form: str, options: dict[str, Any]) -> None:
    """Everybody with full batches; two of three with batches of 1: 2, 4, 6 steps, where those that
    are drawn start from the v of the cohort before; and weight decay, part of g as in torch."""
    ran = hand.run(form, settings(form), engine=engine, **options)
    reference = Reference(form, options.get("weight_decay", 0.0))
    for t, cohort, batches in ran.rounds():
        if form == "sgdm":
            hand.same(ran.exchanges[t - 1][0].shared["sgdm"]["v"], reference.v)
        reference.round(cohort, batches)
    hand.same(ran.outcome.params, reference.w)
    state = {"sgdm": reference.v, "sgdm_server": reference.d, "sgdm_local": {}}[form]
    hand.same(ran.state(form).get("v", ran.state(form).get("d", {})), state)
