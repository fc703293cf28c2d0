"""FedLC (Zhang et al.

2022) against arithmetic by hand, with three classes of which no client has all.

The labels are 0; 1, 2; 1, 1, 0. Padding points at sample 0, whose class client 1 does not have.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedml_noniid.models.networks import mlp
from tests.methods import by_hand as hand

Y = np.array([0, 1, 2, 1, 1, 0])
COUNTS = np.array([[1, 0, 0], [0, 1, 1], [1, 2, 0]])
TAU = 0.8
W0: hand.Tree = hand.W0 | {
    "fc2.weight": np.array([[0.5, -0.8], [-0.3, 0.7], [0.4, 0.2]]),
    "fc2.bias": np.array([0.05, -0.15, 0.1]),
}
FORMS = pytest.mark.parametrize("form", ["all", "excl"])
ABSENT = pytest.mark.parametrize("absent", ["masked", "floor"])


@pytest.fixture(autouse=True)
def three_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand, "Y", Y)


def network(start: hand.Tree = W0) -> hand.Given:
    return hand.given(start, net=mlp((2,), 3, hidden=2))


def calibrated(
    o: hand.Array, y: hand.Array, n: hand.Array, tau: float, form: str, absent: str
) -> tuple[float, hand.Array]:
    """Mean of -log(e^{z_y} / sum e^{z_c}) and its derivative by o; z_c = o_c - tau n_c^(-1/4), over
    all c or c != y."""
    z = o - tau * np.maximum(n, 1).astype(float) ** -0.25
    if absent == "masked":
        z[:, n == 0] = -np.inf  # also for tau = 0
    e, true = np.exp(z), np.eye(3)[y]
    if form == "excl" and (e * (1 - true)).sum(1).all():
        e = e * (1 - true)
    rows = np.arange(len(y))
    loss = np.log(e.sum(1)) - z[rows, y]
    return float(loss.mean()), (e / e.sum(1, keepdims=True) - true) / len(y)


@FORMS
@ABSENT
@pytest.mark.parametrize("tau", [TAU, 0.0])
@pytest.mark.parametrize(
    "options", [{}, {"rounds": 4, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_its_loss(engine: str, form: str, absent: str, tau: float, options: dict[str, int]) -> None:
    """Clients of 1, 2, 3 samples side by side: padding of a class that client 1 lacks. Counts are
    the client's, not the batch's; some clients have done with their steps before others."""
    settings = {"fedlc": {"form": form, "absent": absent, "tau": tau}}
    ran = hand.run("fedlc", settings, engine=engine, network=network(), **options)
    w = W0
    for t, cohort, batches in ran.rounds():
        losses: list[list[float]] = [[] for _ in cohort]
        local = []
        for k, of, steps in zip(cohort, batches, losses, strict=True):
            w_k = w
            for batch in of:
                o = hand.logits(w_k, hand.X[batch])
                loss, do = calibrated(o, Y[batch], COUNTS[k], tau, form, absent)
                g = hand.backward(w_k, hand.X[batch], do)
                w_k = hand.each(lambda w, g: w - hand.LR * g, w_k, g)
                steps.append(loss)
            local.append(w_k)
        found, wanted = ran.exchanges[t - 1][1].loss, [np.mean(steps) for steps in losses]
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-14)
        n = np.array([hand.SIZES[k] for k in cohort])
        w = hand.average(n / n.sum(), local)
    hand.same(ran.outcome.params, w)


@FORMS
def test_what_is_masked_keeps_its_row_to_the_bit(engine: str, form: str) -> None:
    """Neither the classes a client lacks, nor anything where it has one class only: loss and
    gradient are 0."""
    ran = hand.run("fedlc", {"fedlc": {"form": form}}, engine=engine, network=network(), rounds=1)
    reply, trained = ran.exchanges[0][1], ran.trained(0)
    for k, counts in enumerate(COUNTS):
        for c in np.flatnonzero(counts == 0):
            assert np.array_equal(trained["fc2.weight"][k, c].numpy(), W0["fc2.weight"][c])
            assert trained["fc2.bias"][k, c].item() == W0["fc2.bias"][c]
    assert reply.loss[0].item() == 0
    assert all(np.array_equal(leaf[0].numpy(), W0[key]) for key, leaf in trained.items())
    assert reply.loss[1].item() != 0


def test_logits_of_any_size_do_not_bring_a_masked_class_back() -> None:
    """Far below: o = -1e6 for the classes that are there."""
    start = W0 | {"fc2.bias": np.array([-1e6, -1e6, 0.1])}
    ran = hand.run("fedlc", network=network(start), rounds=1)
    assert ran.trained(0)["fc2.bias"][2, 2].item() == 0.1
    assert ran.exchanges[0][1].loss[2].item() < 10
