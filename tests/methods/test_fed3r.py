"""Fed3R (Fanì et al. 2024): ridge regression by hand, and without a bias by scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from torch import nn

from fedml_noniid.core.component import Change
from fedml_noniid.core.options import RecipeError
from fedml_noniid.engines.federation import Federation
from fedml_noniid.models import build, name_of
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.methods import by_hand as hand

LAM = 0.3
PLAIN = {"normalise": False, "temperature": 1.0}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"penalise_bias": False, **PLAIN},
    {"normalise": False, "temperature": 0.5},
    {"penalise_bias": False, "normalise": True, "temperature": 1.0},
]


def with_ones(w: hand.Tree, of: hand.Array) -> hand.Array:
    z = hand.hidden(w, hand.X[of])
    return np.hstack([z, np.ones((len(z), 1))])


def ridge(
    w: hand.Tree,
    clients: Any = hand.CLIENTS,
    penalise_bias: bool = True,
    normalise: bool = True,
    temperature: float = 0.1,
) -> hand.Tree:
    """The model with the classifier that the clients' samples give together."""
    z, y = with_ones(w, np.concatenate(clients)), np.eye(2)[hand.Y[np.concatenate(clients)]]
    penalty = LAM * np.diag([1.0, 1.0, float(penalise_bias)])
    beta = np.linalg.inv(z.T @ z + penalty) @ z.T @ y
    if normalise:
        beta = beta / np.sqrt((beta[:2] ** 2).sum(0))
    beta = beta / temperature
    return w | {"fc2.weight": beta[:2].T, "fc2.bias": beta[2]}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_classifier_is_ridge_regression_on_the_features(
    engine: str, options: dict[str, Any]
) -> None:
    """No other parameter moves, in no round, though the local step size is 0.5."""
    ran = hand.run("fed3r", {"fed3r": {"lam": LAM, **options}}, engine=engine)
    hand.same(ran.outcome.params, ridge(hand.W0, **options))
    wanted = hand.loss(ridge(hand.W0, **options), hand.PUBLIC_X, hand.PUBLIC_Y)
    assert [row["test_loss"] for row in ran.outcome.rows] == pytest.approx([wanted] * 2, rel=1e-9)


def test_fine_tuning_begins_at_the_ridge_classifier(engine: str) -> None:
    """Then it is FedAvg, of all layers; `linear_probe` leaves the first one alone."""
    options = {"lam": LAM, "fine_tune": True, **PLAIN}
    for recipe, moved in (("fed3r", hand.W0.keys()), ("fed3r+linear_probe", PROBED)):
        ran = hand.run(recipe, {"fed3r": options}, engine=engine)
        w = ridge(hand.W0, **PLAIN)
        for _, _, batches in ran.rounds():
            found = [hand.descend(w, of, direction(moved)) for of in batches]
            w = hand.average(np.array(hand.SIZES) / 6, found)
        hand.same(ran.outcome.params, w)


PROBED = ("fc2.weight", "fc2.bias")


def direction(moved: Any) -> Any:
    """The gradient of some parameters, and 0 for all others."""
    return lambda w, x, y: {
        key: g if key in moved else np.zeros_like(g) for key, g in hand.gradient(w, x, y).items()
    }


def test_a_client_that_is_absent_is_no_part_of_the_solution(engine: str) -> None:
    of = hand.federation()
    of = Federation.from_indices(
        of.train,
        list(hand.CLIENTS),
        of.test,
        absent=lambda t, exchange, asked: asked[:1] if t == 0 else (),
    )
    ran = hand.run("fed3r", {"fed3r": {"lam": LAM}}, engine=engine, of=of)
    hand.same(ran.outcome.params, ridge(hand.W0, hand.CLIENTS[1:]))


def no_bias(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(*input_shape, n_classes, bias=False))


def test_a_classifier_without_a_bias_gets_none(engine: str) -> None:
    """A user's own network. Its ridge regression, here scikit-learn's, has no column of ones."""
    network = build(name_of(no_bias), (2,), 2)
    ran = hand.run("fed3r", {"fed3r": {"lam": LAM, **PLAIN}}, engine=engine, network=network)
    (weight,) = ran.outcome.params.values()
    wanted = Ridge(alpha=LAM, fit_intercept=False).fit(hand.X, np.eye(2)[hand.Y])
    np.testing.assert_allclose(weight, wanted.coef_, rtol=0, atol=1e-9)


# The contract of an exchange that replaces w_0
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "owned", "words"),
    [((0, 1), True, "round 0 only"), ((0,), False, "changes the classifier without owning it")],
)
def test_w_0_alone_may_be_replaced_and_by_its_owner_alone(
    rounds: tuple[int, ...], owned: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed3r = METHODS["fed3r"]

    def survey(self: Any, server: Any) -> Any:
        return Change(params=server.params) if server.round in rounds else None

    members: dict[str, Any] = {"name": "fed3r", "__module__": fed3r.__module__, "survey": survey}
    if not owned:
        members["exclusive"] = frozenset()
    monkeypatch.setitem(METHODS, "fed3r", type("Fed3R", (fed3r,), members))
    with pytest.raises(RecipeError, match=words):
        federation.run("fed3r", rounds=1)
