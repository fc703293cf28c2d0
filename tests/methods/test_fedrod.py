"""Fed-RoD (Chen, Chao 2022) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.methods import by_hand as hand


def test_two_rounds(engine: str) -> None:
    """The generic model descends the balanced softmax; the personal head descends the plain
    cross-entropy of W_g h + W_p h + b_g + b_p, and moves nothing else."""
    ran = hand.run("fedrod", engine=engine, batch_size=2)

    def local(w: hand.Tree, head: hand.Tree, k: int, batches: list[hand.Array]) -> Any:
        with np.errstate(divide="ignore"):  # -inf for a class that the client lacks
            log_n = np.log(np.bincount(hand.Y[hand.CLIENTS[k]], minlength=2))
        for batch in batches:
            x, y = hand.X[batch], hand.Y[batch]
            g = hand.gradient(w | {name: w[name] + leaf for name, leaf in head.items()}, x, y)
            head = {name: leaf - hand.LR * g[name] for name, leaf in head.items()}
            balanced = hand.softmax(hand.logits(w, x) + log_n)
            step = hand.backward(w, x, (balanced - np.eye(2)[y]) / len(y))
            w = hand.each(lambda w, g: w - hand.LR * g, w, step)
        return w, head

    nothing = {name: np.zeros_like(hand.W0[name]) for name in ("fc2.weight", "fc2.bias")}
    model, heads = ran.kept(local, nothing)
    hand.same(ran.outcome.params, model)
    ran.tests([model | {name: model[name] + h[name] for name in h} for h in heads])
