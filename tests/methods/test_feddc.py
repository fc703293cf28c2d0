"""FedDC (Gao et al. 2022), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand

ALPHA = 0.3
SETTINGS: dict[str, dict[str, object]] = {"feddc": {"alpha": ALPHA}}


class Reference:
    """Algorithm 1 for equal clients, with every client's h_k and Delta_k on the table."""

    def __init__(self) -> None:
        self.w, self.Delta = hand.W0, hand.zeros()
        self.h = [hand.zeros() for _ in hand.CLIENTS]
        self.Delta_k = [hand.zeros() for _ in hand.CLIENTS]

    def local(self, k: int, batches: list[hand.Array]) -> hand.Tree:
        """f_k(w) + (alpha/2) ||w - (w_t - h_k)||^2 + <w, Delta - Delta_k>, by its gradient."""
        w = self.w
        centre = hand.each(np.subtract, self.w, self.h[k])
        linear = hand.each(np.subtract, self.Delta, self.Delta_k[k])
        for batch in batches:
            g = hand.gradient(w, hand.X[batch], hand.Y[batch])
            g = hand.each(
                lambda g, w, centre, linear: g + ALPHA * (w - centre) + linear, g, w, centre, linear
            )
            w = hand.each(lambda w, g: w - hand.LR * g, w, g)
        return w

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        w_t, Delta = self.w, self.Delta  # noqa: N806, the paper's letter
        local = [self.local(k, of) for k, of in zip(cohort, batches, strict=True)]
        for k, w_k, of in zip(cohort, local, batches, strict=True):
            self.h[k] = hand.each(lambda h, w_k, w_t: h + w_k - w_t, self.h[k], w_k, w_t)
            k_eta = len(of) * hand.LR  # K, the steps really taken
            new = hand.each(
                lambda d_k, d, w_k, w_t, k_eta=k_eta: d_k - d + (w_t - w_k) / k_eta,
                self.Delta_k[k],
                Delta,
                w_k,
                w_t,
            )
            self.Delta = hand.each(
                lambda d, new, old: d + (new - old) / 3, self.Delta, new, self.Delta_k[k]
            )  # 1/N
            self.Delta_k[k] = new
        mean = hand.average([1 / len(cohort)] * len(cohort), local)
        self.w = hand.each(np.add, mean, hand.average([1 / 3] * 3, self.h))  # over all clients


ONES = {"rounds": 4, "cohort": 2, "batch_size": 1}


@pytest.mark.parametrize("options", [{"rounds": 3}, ONES], ids=str)
def test_its_lines(engine: str, options: dict[str, float]) -> None:
    """Everybody with full batches; and two of three with batches of 1: 2, 4, 6 steps."""
    ran = hand.run("feddc", SETTINGS, engine=engine, **options)
    reference = Reference()
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("feddc")["Delta"], reference.Delta)
    for key, wanted in (("h", reference.h), ("Delta", reference.Delta_k)):
        for k in range(3):
            hand.same(hand.row(ran.memory("feddc")[key], k), wanted[k])
