"""CCVR (Luo et al. 2021), section 4, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedml_noniid.core.randomness import fold, identity, normal, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.plugins.baselines.ccvr import CCVR
from tests.methods import by_hand as hand

CALIBRATE: dict[str, object] = {
    "samples": 7,
    "epochs": 2,
    "batch_size": 4,
    "server_lr": 0.3,
    "momentum": 0.5,
}


def packed(cov: hand.Array) -> hand.Array:
    return np.array([cov[i, j] for i in range(len(cov)) for j in range(i, len(cov))])


def statistics(z: hand.Array, y: hand.Array, n_classes: int) -> dict[str, hand.Array]:
    """What a client with features z sends: mean, unbiased covariance and count of every class, 0
    where undefined."""
    d = z.shape[1]
    of = [z[y == c] for c in range(n_classes)]
    return {
        "mean": np.stack([rows.mean(0) if len(rows) else np.zeros(d) for rows in of]),
        "cov": np.stack(
            [packed(np.cov(rows.T) if len(rows) > 1 else np.zeros((d, d))) for rows in of]
        ),
        "n": np.array([len(rows) for rows in of], dtype=float),
    }


def received(ran: hand.Ran) -> hand.Tree:
    """The model that the statistics are of."""
    return {name: leaf.numpy() for name, leaf in ran.exchanges[-1][0].params.items()}


def test_what_clients_send(engine: str) -> None:
    """Mean, covariance (n - 1) and count per class under the final model; a class with one sample
    has covariance 0."""
    ran = hand.run("ccvr", engine=engine)
    found = ran.exchanges[-1][1].upload["ccvr"]
    for k, client in enumerate(hand.CLIENTS):
        wanted = statistics(hand.hidden(received(ran), hand.X[client]), hand.Y[client], 2)
        for name, leaf in wanted.items():
            np.testing.assert_allclose(found[name][k], leaf, rtol=1e-10, atol=1e-13, err_msg=name)
    assert found["cov"][0].abs().max() == 0, "client 0 has one sample"
    assert found["cov"][2].abs().max() > 0


def root(cov: hand.Array) -> hand.Array:
    """The symmetric root of a 2 x 2 matrix (Cayley and Hamilton): (S + s I) / sqrt(tr S + 2 s), s =
    sqrt(det S)."""
    s = np.sqrt(max(cov[0, 0] * cov[1, 1] - cov[0, 1] * cov[1, 0], 0.0))
    return np.asarray((cov + s * np.eye(2)) / np.sqrt(np.trace(cov) + 2 * s))


def test_the_classifier_is_trained_on_virtual_features(engine: str) -> None:
    """Two epochs of SGD with momentum over 2 x 7 features z = mu_c + Sigma_c^(1/2) eps, in batches
    of 4."""
    ran = hand.run("ccvr", {"ccvr": CALIBRATE}, engine=engine)
    w = received(ran)
    at = fold(torch.tensor(key(0, "server", 2)), identity(CCVR()))
    eps = normal(fold(at, "noise"), 2, 7, 2, dtype=torch.float64).numpy()
    h = hand.hidden(w, hand.X)
    z, y = [], []
    for c in (0, 1):
        of = h[c == hand.Y]
        z.append(of.mean(0) + eps[c] @ root(np.cov(of.T)))
        y += [c] * 7
    features, labels = np.concatenate(z), np.array(y)
    velocity = {"fc2.weight": np.zeros((2, 2)), "fc2.bias": np.zeros(2)}
    for epoch in range(2):
        order = np.argsort(uniform(fold(fold(at, "order"), epoch), 14).numpy(), kind="stable")
        for batch in np.split(order, [4, 8, 12]):
            f = features[batch]
            o = f @ w["fc2.weight"].T + w["fc2.bias"]
            do = (hand.softmax(o) - np.eye(2)[labels[batch]]) / len(batch)
            g = {"fc2.weight": do.T @ f, "fc2.bias": do.sum(0)}
            velocity = {name: 0.5 * v + g[name] for name, v in velocity.items()}
            w = w | {name: w[name] - 0.3 * v for name, v in velocity.items()}
    hand.same(ran.outcome.params, w, rtol=1e-7)
    hand.same(ran.outcome.evaluated, w, rtol=1e-7)


def virtual(
    n: Any, mean: Any, cov: Any, samples: int, seed: int = 0
) -> tuple[hand.Array, hand.Array]:
    as_tensor = [torch.tensor(np.asarray(value, dtype=float)) for value in (n, mean, cov)]
    z, y = CCVR(samples=samples).virtual(torch.tensor(seed), *as_tensor)
    return z.numpy(), y.numpy()


def test_classes_that_nobody_has_get_no_features_and_single_samples_get_their_own() -> None:
    z, y = virtual(
        [0, 1, 4], [[0, 0], [2, 3], [1, 1]], [np.zeros((2, 2)), np.zeros((2, 2)), np.eye(2)], 5
    )
    assert np.unique(y).tolist() == [1, 2]
    assert (z[y == 1] == [2, 3]).all()
    assert (z[y == 2] != [1, 1]).all()
