"""FedDyn (Acar et al. 2021), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Reply, Server
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.plugins.baselines.feddyn_authors import FedDynAuthors
from tests.methods import by_hand as hand

ALPHA = 0.3
EVERYBODY = (0, 1, 2)
PLAIN: dict[str, dict[str, object]] = {"feddyn": {"alpha": ALPHA}}
ADAPTED: dict[str, dict[str, object]] = {"feddyn_authors": {"alpha": ALPHA, "clip": 0.0}}
BOTH = pytest.mark.parametrize(
    "settings", [PLAIN, ADAPTED], ids=lambda settings: next(iter(settings))
)


def clipped(clip: float) -> dict[str, dict[str, object]]:
    return {"feddyn_authors": {"alpha": ALPHA, "alpha_adapt": "off", "clip": clip}}


def start(settings: dict[str, dict[str, object]], **options: Any) -> hand.Ran:
    return hand.run(next(iter(settings)), settings, **options)


class Reference:
    """Algorithm 1; `alpha` is the client's own in the authors' form."""

    def __init__(self, adapt: bool = False, clip: float = np.inf) -> None:
        self.w, self.h, self.lr = hand.W0, hand.zeros(), hand.LR
        self.g = [hand.zeros() for _ in hand.CLIENTS]
        n = np.array(hand.SIZES)
        self.alpha = ALPHA / (n / n.mean()) if adapt else np.full(3, ALPHA)
        self.clip, self.clipped = clip, 0

    def local(self, k: int, batches: list[hand.Array]) -> hand.Tree:
        alpha, g_k, w_t = self.alpha[k], self.g[k], self.w

        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            g = hand.each(
                lambda g, g_k, w, w_t: g - g_k + alpha * (w - w_t),
                hand.gradient(w, x, y),
                g_k,
                w,
                w_t,
            )
            if hand.length(g) + 1e-6 <= self.clip:
                return g
            self.clipped += 1
            factor = self.clip / (hand.length(g) + 1e-6)  # as torch's clip_grad_norm_
            return hand.each(lambda leaf: factor * leaf, g)

        return hand.descend(w_t, batches, direction, self.lr)

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        w_t, local = self.w, [self.local(k, of) for k, of in zip(cohort, batches, strict=True)]
        for k, w_k in zip(cohort, local, strict=True):
            alpha_k = self.alpha[k]
            self.g[k] = hand.each(
                lambda g, w_k, w_t, a=alpha_k: g - a * (w_k - w_t), self.g[k], w_k, w_t
            )
            self.h = hand.each(
                lambda h, w_k, w_t: h - ALPHA / 3 * (w_k - w_t), self.h, w_k, w_t
            )  # 1/N, N all
        mean = hand.average([1 / len(cohort)] * len(cohort), local)
        self.w = hand.each(lambda m, h: m - h / ALPHA, mean, self.h)


def compare(ran: hand.Ran, reference: Reference) -> None:
    (name,) = {"feddyn", "feddyn_authors"} & ran.server.slices.keys()
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state(name)["h"], reference.h)
    for k, g_k in enumerate(reference.g):
        hand.same(hand.row(ran.memory(name)["g"], k), g_k)


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 1}], ids=["full", "ones"]
)
@BOTH
def test_its_lines(
    engine: str, settings: dict[str, dict[str, object]], options: dict[str, int]
) -> None:
    """Everybody with full batches; and two of three with batches of 1: 2, 4, 6 steps. Clients that
    are not drawn keep g_k; the mean is over S, h moves by 1/N."""
    ran, reference = start(settings, engine=engine, **options), Reference(settings is ADAPTED)
    ran.replay(reference)
    compare(ran, reference)


@pytest.mark.parametrize(("clip", "steps"), [(0.4, range(1, 18)), (1e6, range(1))])
def test_the_corrected_gradient_is_clipped(engine: str, clip: float, steps: range) -> None:
    """To the norm over all parameters, and only where it is longer."""
    ran, reference = start(clipped(clip), engine=engine, rounds=3), Reference(clip=clip)
    ran.replay(reference)
    assert reference.clipped in steps
    compare(ran, reference)


def test_without_its_options_the_authors_form_is_the_papers(engine: str) -> None:
    assert hand.identical(start(clipped(0.0), engine=engine), start(PLAIN, engine=engine))


def test_a_client_whose_answer_was_dropped_has_the_plain_alpha() -> None:
    """Clients 0 and 2 answer, n = 1 and 3 with mean 2: alpha_k = 2 alpha, alpha, 2/3 alpha."""
    method, w = FedDynAuthors(alpha=0.3), {"w": torch.zeros(2)}
    server = Server(Task(hand.given(), SGD(0.1)), w, {}, 0, 3, cohort=EVERYBODY)
    asks = method.survey(replace(server, state=method.init_server(server)))
    assert next(asks).to == EVERYBODY
    reply = Reply((0, 2), {}, {}, {}, torch.tensor([1, 3]), torch.zeros(2), torch.zeros(2))
    with pytest.raises(StopIteration) as stop:
        asks.send(reply)
    torch.testing.assert_close(stop.value.value.state["alpha"], torch.tensor([0.6, 0.3, 0.2]))
