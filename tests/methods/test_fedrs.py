"""FedRS (Li and Zhan 2021) against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.engines.cohort import draw_cohort
from tests import federation
from tests.methods import by_hand as hand

ALPHA = 0.3
# Labels of the clients: 0; 1, 0; 1, 1, 0.
SCALES = {
    "hard": np.array([[1.0, ALPHA], [1.0, 1.0], [1.0, 1.0]]),
    "soft": np.array([[1.0, ALPHA], [1.0, 1.0], [ALPHA + (1 - ALPHA) / 2, 1.0]]),
}


def gradient(w: hand.Tree, x: hand.Array, y: hand.Array, s: hand.Array) -> hand.Tree:
    """Of the mean cross-entropy of o_c = s_c w_c h + b_c."""
    h = hand.hidden(w, x)
    o = s * (h @ w["fc2.weight"].T) + w["fc2.bias"]
    do = (hand.softmax(o) - np.eye(2)[y]) / len(y)
    scores = do * s  # dL / d(w_c h)
    dz = (scores @ w["fc2.weight"]) * (h > 0)
    return {
        "fc1.weight": dz.T @ x,
        "fc1.bias": dz.sum(0),
        "fc2.weight": scores.T @ h,
        "fc2.bias": do.sum(0),
    }


def local(
    w: hand.Tree, s: hand.Array, batches: Sequence[hand.Array], frozen: tuple[str, ...] = ()
) -> hand.Tree:
    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return {key: 0 * g if key in frozen else g for key, g in gradient(w, x, y, s).items()}

    return hand.descend(w, batches, direction)


def one_round(
    w: hand.Tree,
    form: str,
    cohort: Sequence[int],
    batches: Sequence[list[hand.Array]],
    frozen: tuple[str, ...] = (),
) -> hand.Tree:
    n = np.array([hand.SIZES[k] for k in cohort], dtype=float)
    found = [local(w, SCALES[form][k], of, frozen) for k, of in zip(cohort, batches, strict=True)]
    return hand.average(n / n.sum(), found)


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_two_rounds(engine: str, form: str) -> None:
    ran = hand.run("fedrs", {"fedrs": {"form": form, "alpha": ALPHA}}, engine=engine)
    w = hand.W0
    for _ in range(2):
        w = one_round(w, form, (0, 1, 2), [[client] * 2 for client in hand.CLIENTS])
    hand.same(ran.outcome.params, w)


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_batches_do_not_change_which_classes_a_client_has(engine: str, form: str) -> None:
    """Batches of 1: every batch lacks a class, but only client 0 does."""
    ran = hand.run(
        "fedrs",
        {"fedrs": {"form": form, "alpha": ALPHA}},
        engine=engine,
        rounds=3,
        cohort=2,
        batch_size=1,
    )
    w = hand.W0
    for t in (1, 2, 3):
        cohort = draw_cohort(0, t, 3, 2)
        w = one_round(w, form, cohort, [ran.batches(k, t) for k in cohort])
    hand.same(ran.outcome.params, w)


def test_the_step_of_a_missing_class_is_alpha_as_long(engine: str) -> None:
    """One step from equal scores: with fc2.weight = 0 both ways see the same softmax, and w_1 moves
    by alpha of it."""
    start = hand.W0 | {"fc2.weight": np.zeros((2, 2))}
    moved = {}
    for alpha in (1.0, ALPHA):
        ran = hand.run(
            "fedrs",
            {"fedrs": {"alpha": alpha}},
            engine=engine,
            rounds=1,
            epochs=1,
            network=hand.given(start),
        )
        moved[alpha] = ran.trained(0)["fc2.weight"][0].numpy()  # client 0, from 0
    np.testing.assert_allclose(moved[ALPHA][0], moved[1.0][0], rtol=1e-12)
    np.testing.assert_allclose(moved[ALPHA][1], ALPHA * moved[1.0][1], rtol=1e-12)
    assert np.abs(moved[1.0]).max(axis=1).min() > 0.01


def test_with_alpha_zero_the_weights_of_a_missing_class_stay(engine: str) -> None:
    """Its bias, which is not scaled, does not."""
    ran = hand.run("fedrs", {"fedrs": {"alpha": 0.0}}, engine=engine, rounds=1)
    reply = ran.trained(0)
    np.testing.assert_allclose(
        reply["fc2.weight"][0, 1].numpy(), hand.W0["fc2.weight"][1], rtol=1e-14
    )
    assert abs(reply["fc2.bias"][0, 1].item() - hand.W0["fc2.bias"][1]) > 0.01


@pytest.mark.parametrize("form", ["hard", "soft"])
def test_with_alpha_one_it_is_fedavg_to_the_bit(engine: str, form: str) -> None:
    settings = {"fedrs": {"form": form, "alpha": 1.0}}
    for batch_norm in (False, True):
        found = federation.run("fedrs", settings, engine=engine, batch_norm=batch_norm)
        assert federation.equal_models(
            found, federation.run("fedavg", engine=engine, batch_norm=batch_norm)
        )


def test_the_bias_of_a_frozen_classifier_is_found(engine: str) -> None:
    """fedbabu+fedrs: the classifier is not among the trained parameters."""
    ran = hand.run("fedbabu+fedrs", {"fedrs": {"alpha": ALPHA}}, engine=engine)
    w = hand.W0
    for _ in range(2):
        batches = [[client] * 2 for client in hand.CLIENTS]
        w = one_round(w, "hard", (0, 1, 2), batches, frozen=("fc2.weight", "fc2.bias"))
    hand.same(ran.outcome.params, w)


def test_evaluation_and_traffic_are_fedavgs() -> None:
    ran = hand.run("fedrs", {"fedrs": {"alpha": ALPHA}}, rounds=1)
    w = {key: leaf.numpy() for key, leaf in ran.outcome.params.items()}
    wanted = hand.loss(w, hand.PUBLIC_X, hand.PUBLIC_Y)
    assert ran.outcome.rows[0]["test_loss"] == pytest.approx(wanted, rel=1e-10)
    for row in federation.run("fedrs").rows:
        assert (row["bytes_up"], row["bytes_down"]) == (4 * 53 * 4, 4 * 53 * 4)


def test_single_precision() -> None:
    """No tensor of the loss is promoted."""
    out = federation.run("fedrs", {"fedrs": {"form": "soft"}})
    assert all(leaf.dtype == torch.float32 for leaf in out.params.values())


def test_only_one_changes_the_logits() -> None:
    with pytest.raises(RecipeError, match="logits of the local loss"):
        hand.run("fedlc+fedrs")
