"""FedExP (Jhunjhunwala et al. 2023) against arithmetic by hand."""

from __future__ import annotations

import numpy as np

from tests.methods import by_hand as hand


def test_two_rounds(engine: str) -> None:
    """The second step is longer than FedAvg's. The evaluated model is the mean of the last two."""
    ran = hand.run("fedexp", {"fedexp": {"eps": 0.01}}, engine=engine)
    w, steps, models = hand.W0, [], []
    for _ in range(2):
        deltas = [
            hand.each(np.subtract, hand.descend(w, [client] * 2), w) for client in hand.CLIENTS
        ]
        mean = hand.average([1 / 3] * 3, deltas)
        ratio = np.mean([hand.length(delta) ** 2 for delta in deltas]) / (
            2 * (hand.length(mean) ** 2 + 0.01)
        )
        steps.append(max(1.0, float(ratio)))
        w = hand.each(lambda w, delta, eta_g=steps[-1]: w + eta_g * delta, w, mean)
        models.append(w)
    hand.same(ran.outcome.params, models[1])
    hand.same(ran.outcome.evaluated, hand.average([0.5, 0.5], models))
    np.testing.assert_allclose([row["fedexp_eta_g"] for row in ran.outcome.rows], steps, rtol=1e-10)
    assert max(steps) > 1


def test_a_step_is_never_shorter_than_fedavgs(engine: str) -> None:
    """An eps that is far above all lengths makes the ratio small."""
    ran = hand.run("fedexp", {"fedexp": {"eps": 100.0}}, engine=engine)
    assert [row["fedexp_eta_g"] for row in ran.outcome.rows] == [1.0, 1.0]
    uniform = ran.federated(lambda w, k, of: hand.descend(w, of), (1, 1, 1))
    hand.same(ran.outcome.params, uniform)


def test_the_first_round_evaluates_its_model(engine: str) -> None:
    """w_0 is no iterate of the method: the authors average from the second round on."""
    assert hand.evaluates_what_it_sends(hand.run("fedexp", engine=engine, rounds=1))
    sent = {"fedexp": {"evaluate": "sent"}}
    assert hand.evaluates_what_it_sends(hand.run("fedexp", sent, engine=engine))
