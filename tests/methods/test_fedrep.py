"""FedRep (Collins et al. 2021) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.methods import by_hand as hand

HEAD, BODY = ("fc2.weight", "fc2.bias"), ("fc1.weight", "fc1.bias")


def train(
    w: hand.Tree, batches: list[hand.Array], n_head: int, momentum: float = 0.0, decay: float = 0.0
) -> hand.Tree:
    """SGD as in torch; the part that rests keeps its momentum."""
    m = hand.zeros()
    for step, batch in enumerate(batches):
        g = hand.gradient(w, hand.X[batch], hand.Y[batch])
        for name in HEAD if step < n_head else BODY:
            m = m | {name: momentum * m[name] + g[name] + decay * w[name]}
            w = w | {name: w[name] - hand.LR * m[name]}
    return w


@pytest.mark.parametrize(
    ("head_epochs", "options"),
    [
        (1, {"epochs": 3}),
        (2, {"epochs": 3, "momentum": 0.9, "weight_decay": 0.1}),
        (1, {"epochs": 1, "rounds": 3, "cohort": 2}),
        (9, {"epochs": 2}),
        (1, {"local_steps": 4}),
    ],
)
def test_the_head_then_the_body(head_epochs: int, options: dict[str, float], engine: str) -> None:
    """Batches of 2: clients with 1, 1 and 2 batches a pass. The last step is the body's."""
    settings = {"fedrep": {"head_epochs": head_epochs}}
    ran = hand.run("fedrep", settings, engine=engine, batch_size=2, **options)
    sgd = options.get("momentum", 0.0), options.get("weight_decay", 0.0)

    def local(w: hand.Tree, head: hand.Tree, k: int, batches: list[hand.Array]) -> Any:
        n_head = min(head_epochs * (2 if k == 2 else 1), len(batches) - 1)
        end = train(w | head, batches, n_head, *sgd)
        return end, {name: end[name] for name in HEAD}

    w, heads = ran.kept(local, {name: hand.W0[name] for name in HEAD})
    hand.same(ran.server.params, {name: w[name] for name in BODY})
    ran.tests(heads)


def test_with_adam_the_part_that_rests_keeps_its_moments(engine: str) -> None:
    """One client, two passes of one batch: a step of the head, then one of the body. Adam's count
    is 2 for the body's first step."""
    ran = hand.run("fedrep", engine=engine, rounds=1, optimizer="adam", lr=0.01)
    for k, of in enumerate(next(ran.rounds())[2]):
        adam, w = hand.Adam(hand.W0), hand.W0
        x, y = hand.X[of[0]], hand.Y[of[0]]
        step = adam.step(w, hand.gradient(w, x, y), 0.01)
        w = w | {name: step[name] for name in HEAD}
        fresh = hand.Adam(hand.W0)
        fresh.t = 1
        step = fresh.step(w, hand.gradient(w, x, y), 0.01)
        hand.same(hand.row(ran.exchanges[0][1].deltas, k), {n: step[n] - w[n] for n in BODY})
        hand.same(hand.row(ran.outcome.personal["params"], k), {name: w[name] for name in HEAD})
