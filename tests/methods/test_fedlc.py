"""FedLC (Zhang et al.

2022) against arithmetic by hand, with three classes of which no client has all.

The labels are 0; 1, 2; 1, 1, 0. Padding points at sample 0, whose class client 1 does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.models.networks import mlp
from tests import federation
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
    net = mlp((2,), 3, hidden=2)
    return hand.Given(net.name, net.blocks, net.head, start=start)


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


def gradient(w: hand.Tree, x: hand.Array, do: hand.Array) -> hand.Tree:
    h = hand.hidden(w, x)
    dz = (do @ w["fc2.weight"]) * (h > 0)
    return {
        "fc1.weight": dz.T @ x,
        "fc1.bias": dz.sum(0),
        "fc2.weight": do.T @ h,
        "fc2.bias": do.sum(0),
    }


def local(
    w: hand.Tree, k: int, batches: Sequence[hand.Array], form: str, absent: str, tau: float = TAU
) -> tuple[hand.Tree, float]:
    """(w_k, mean loss of the steps)."""
    losses = []

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        loss, do = calibrated(hand.logits(w, x), y, COUNTS[k], tau, form, absent)
        losses.append(loss)
        return gradient(w, x, do)

    return hand.descend(w, batches, direction, y=Y), float(np.mean(losses))


def one_round(
    w: hand.Tree,
    cohort: Sequence[int],
    batches: Sequence[list[hand.Array]],
    form: str,
    absent: str,
    tau: float = TAU,
) -> tuple[hand.Tree, list[float]]:
    n = np.array([hand.SIZES[k] for k in cohort], dtype=float)
    found = [local(w, k, of, form, absent, tau) for k, of in zip(cohort, batches, strict=True)]
    return hand.average(n / n.sum(), [w_k for w_k, _ in found]), [loss for _, loss in found]


@FORMS
@ABSENT
@pytest.mark.parametrize("tau", [TAU, 0.0])
def test_two_rounds(engine: str, form: str, absent: str, tau: float) -> None:
    """Clients of 1, 2, 3 samples side by side: padding of a class that client 1 lacks."""
    settings: dict[str, dict[str, object]] = {"fedlc": {"form": form, "absent": absent, "tau": tau}}
    ran = hand.run("fedlc", settings, engine=engine, network=network())
    w = W0
    for t in range(2):
        w, losses = one_round(
            w, (0, 1, 2), [[client] * 2 for client in hand.CLIENTS], form, absent, tau
        )
        np.testing.assert_allclose(ran.exchanges[t][1].loss.numpy(), losses, rtol=1e-10, atol=1e-14)
    hand.same(ran.outcome.params, w)


@FORMS
@ABSENT
def test_counts_are_the_clients_not_the_batchs(engine: str, form: str, absent: str) -> None:
    """Batches of 2 of 3 samples, and clients that have done with their steps before others."""
    settings: dict[str, dict[str, object]] = {"fedlc": {"form": form, "absent": absent, "tau": TAU}}
    ran = hand.run(
        "fedlc", settings, engine=engine, network=network(), rounds=4, cohort=2, batch_size=2
    )
    w = W0
    for t in (1, 2, 3, 4):
        cohort = draw_cohort(0, t, 3, 2)
        w, losses = one_round(w, cohort, [ran.batches(k, t) for k in cohort], form, absent)
        np.testing.assert_allclose(
            ran.exchanges[t - 1][1].loss.numpy(), losses, rtol=1e-10, atol=1e-14
        )
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


def test_masked_is_the_limit_of_a_vanishing_count(engine: str) -> None:
    """A margin that grows without bound: the classes that are there get the same loss."""
    ran = hand.run("fedlc", {"fedlc": {"tau": TAU}}, engine=engine, network=network(), rounds=1)
    o = hand.logits(W0, hand.X[hand.CLIENTS[2]])
    margin = np.array([1.0, 2**-0.25, 1e-16**-0.25])  # n = (1, 2, 1e-16): 10^4
    z = o - TAU * margin
    loss = -np.log(hand.softmax(z)[np.arange(3), Y[hand.CLIENTS[2]]]).mean()
    first, _ = calibrated(o, Y[hand.CLIENTS[2]], COUNTS[2], TAU, "all", "masked")
    assert first == pytest.approx(loss, rel=1e-12)
    assert ran.outcome.rows[0]["local_loss"] < 10


def test_the_rarer_the_class_the_larger_its_margin() -> None:
    """From o = 0 and n = (1, 2, -), the softmax gives class 1 more than class 0: its samples push
    less."""
    start = {
        key: np.zeros_like(leaf) if key.startswith("fc2") else leaf for key, leaf in W0.items()
    }
    ran = hand.run(
        "fedlc", {"fedlc": {"tau": 1.0}}, epochs=1, rounds=1, lr=1.0, network=network(start)
    )
    p = np.exp([-1.0, -(2**-0.25)])
    p /= p.sum()
    found = ran.trained(0)["fc2.bias"][2].numpy()  # - mean over the samples 1, 1, 0 of (p - onehot)
    np.testing.assert_allclose(found, [1 / 3 - p[0], 2 / 3 - p[1], 0.0], rtol=1e-12, atol=1e-15)
    assert p[1] > p[0]


def test_with_tau_zero_and_a_floor_it_is_fedavg_to_the_bit(engine: str) -> None:
    settings = {"fedlc": {"tau": 0.0, "absent": "floor"}}
    for batch_norm in (False, True):
        found = federation.run("fedlc", settings, engine=engine, batch_norm=batch_norm)
        assert federation.equal_models(
            found, federation.run("fedavg", engine=engine, batch_norm=batch_norm)
        )


@FORMS
@ABSENT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_single_and_double_precision_stay_finite(
    engine: str, form: str, absent: str, dtype: torch.dtype
) -> None:
    settings = {"fedlc": {"form": form, "absent": absent}}
    out = federation.run("fedlc", settings, engine=engine, dtype=dtype, batch_norm=True)
    assert all(leaf.dtype == dtype and torch.isfinite(leaf).all() for leaf in out.params.values())
    assert all(abs(row["local_loss"]) < 10 for row in out.rows)


def test_logits_of_any_size_do_not_bring_a_masked_class_back() -> None:
    """Far below: o = -1e6 for the classes that are there."""
    start = W0 | {"fc2.bias": np.array([-1e6, -1e6, 0.1])}
    ran = hand.run("fedlc", network=network(start), rounds=1)
    assert ran.trained(0)["fc2.bias"][2, 2].item() == 0.1
    assert ran.exchanges[0][1].loss[2].item() < 10


def test_evaluation_and_traffic_are_fedavgs() -> None:
    ran = hand.run("fedlc", network=network(), rounds=1)
    w = {key: leaf.numpy() for key, leaf in ran.outcome.params.items()}
    p = hand.softmax(hand.logits(w, hand.PUBLIC_X))[np.arange(4), hand.PUBLIC_Y]
    assert ran.outcome.rows[0]["test_loss"] == pytest.approx(-np.log(p).mean(), rel=1e-10)
    for row in federation.run("fedlc").rows:
        assert (row["bytes_up"], row["bytes_down"]) == (4 * 53 * 4, 4 * 53 * 4)
