"""Fed-RoD (Chen, Chao 2022) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import federation
from tests.methods import by_hand as hand


def test_two_rounds(engine: str) -> None:
    """The generic model descends the balanced softmax; the personal head descends the plain
    cross-entropy of W_g h + W_p h + b_g + b_p, and moves nothing else."""
    ran = hand.run("fedrod", engine=engine, batch_size=2)
    model = hand.W0
    heads = [{name: np.zeros_like(hand.W0[name]) for name in ("fc2.weight", "fc2.bias")}] * 3
    for _, _, batches in ran.rounds():
        ends = []
        for k, of in enumerate(batches):
            counts = np.bincount(hand.Y[hand.CLIENTS[k]], minlength=2)
            with np.errstate(divide="ignore"):
                log_n = np.log(counts)  # -inf for a class that the client lacks
            w = model
            for batch in of:
                x, y = hand.X[batch], hand.Y[batch]
                whole = w | {name: w[name] + leaf for name, leaf in heads[k].items()}
                g = hand.gradient(whole, x, y)
                balanced = hand.softmax(hand.logits(w, x) + log_n)
                heads[k] = {name: leaf - hand.LR * g[name] for name, leaf in heads[k].items()}
                step = hand.backward(w, x, (balanced - np.eye(2)[y]) / len(y))
                w = hand.each(lambda w, g: w - hand.LR * g, w, step)
            ends.append(w)
        model = hand.average(np.array(hand.SIZES) / 6, ends)
    hand.same(ran.outcome.params, model)
    for k in range(3):
        tested = model | {name: model[name] + leaf for name, leaf in heads[k].items()}
        hand.same(hand.row(ran.outcome.personal["params"], k), tested)


def test_a_client_begins_with_the_generic_model(engine: str) -> None:
    """One that never took part is tested with what it receives, batch norms' statistics too."""
    ran = federation.simulation("fedrod", engine=engine, batch_norm=True, cohort=1, rounds=1)
    out = ran.run()
    trained = out.personal["params"]["fc2.bias"] != out.params["fc2.bias"]
    assert trained.any(1).sum() == 1
    for part, tree in (("params", out.params), ("buffers", out.buffers)):
        for name, leaf in out.personal[part].items():
            if not name.startswith("fc2"):
                assert torch.equal(leaf, tree[name].expand_as(leaf)), name


@pytest.mark.parametrize("other", ["fedrs", "fedlc", "fedbabu", "ccvr", "fedper", "fedbn", "ditto"])
def test_refused(other: str) -> None:
    with pytest.raises(Exception, match="can't be combined"):
        federation.simulation(f"fedrod+{other}")
