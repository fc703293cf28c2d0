"""Fed3R (Fanì et al. 2024): ridge regression by hand and by scikit-learn, of five partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from torch import nn

from fedml_noniid.core.component import Change
from fedml_noniid.core.data import Samples
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import Params
from fedml_noniid.data.partitions import partition
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models import build, name_of
from fedml_noniid.plugins.registry import METHODS
from fedml_noniid.simulate import simulate
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


def test_a_client_sends_its_sums_once(engine: str) -> None:
    """A_k = z' z with its upper triangle, b_k = z' y, of 2 features and the 1 of the bias."""
    ran = hand.run("fed3r", {"fed3r": {"lam": LAM}}, engine=engine)
    everybody = (0, 1, 2)
    assert ran.jobs() == [("fed3r.sums", everybody), ("train", everybody), ("train", everybody)]
    (_, sums), *trained = ran.exchanges
    assert sums.deltas == {} and sums.upload.keys() == {"fed3r"}
    for k, of in enumerate(hand.CLIENTS):
        z = with_ones(hand.W0, of)
        found = {name: leaf[k].numpy() for name, leaf in sums.upload["fed3r"].items()}
        assert found.keys() == {"A", "b"}
        np.testing.assert_allclose(found["A"], (z.T @ z)[np.triu_indices(3)], rtol=1e-12)
        np.testing.assert_allclose(found["b"], z.T @ np.eye(2)[hand.Y[of]], rtol=1e-12)
    for _, reply in trained:
        assert not any(leaf.any() for leaf in reply.deltas.values())
        assert not reply.steps.any() and not reply.upload["fed3r"]


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


# Five partitions of the same samples, and scikit-learn
# --------------------------------------------------------------------------------------------------

ALPHA, D = 2.0, 40
PARTITIONS: dict[str, Mapping[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.1},
    "iid_unbalanced": {},
    "quantity": {"beta": 0.5},
    "by_classes": {"classes": [[client % 10] for client in range(20)]},
}


def digits(dtype: torch.dtype) -> Samples:
    """The features [n, 40] of a layer with random weights, as float32 has them.

    Sums of pixels themselves, which are whole numbers / 16, would have no rounding to test.
    """
    x, y = load_digits(return_X_y=True)
    weight = torch.randn(64, D, generator=torch.Generator().manual_seed(0))
    z = torch.relu(torch.tensor(x / 64, dtype=torch.float32) @ weight)
    return Samples(z.to(dtype), torch.tensor(y))


def solved(
    name: str, dtype: torch.dtype, engine: str = "sequential", clients: int = 20, **options: Any
) -> Params:
    """Fed3R's classifier on the features of all digits, which a partition gives to clients."""
    data = digits(dtype)
    y = data.y.numpy()
    parts = partition(name, y, np.arange(len(y)), clients, 1, **PARTITIONS[name])
    assert sum(map(len, parts)) == len(y), "a partition of all samples"
    plan = Plan(
        build("logistic_regression", (D,), 10),
        LocalTraining(lr=0.1, epochs=1, batch_size=32),
        rounds=1,
        cohort=clients,
        seed=0,
        engine=engine,
    )
    given = {"fed3r": {"lam": ALPHA, **options}}
    return simulate("fed3r", given, Federation.from_indices(data, parts, data), plan).run().params


def scikit_learn(penalise_bias: bool) -> tuple[Any, Any]:
    """(coefficients [C, d], intercepts [C]) of the pooled samples, in float64."""
    x, y = digits(torch.float64)[:2]
    one_hot = np.eye(10)[y.numpy()]
    if not penalise_bias:
        model = Ridge(alpha=ALPHA, fit_intercept=True, solver="cholesky").fit(x.numpy(), one_hot)
        return model.coef_, model.intercept_
    with_one = np.hstack([x.numpy(), np.ones((len(x), 1))])
    model = Ridge(alpha=ALPHA, fit_intercept=False, solver="cholesky").fit(with_one, one_hot)
    return model.coef_[:, :D], model.coef_[:, D]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalise_bias", [True, False])
def test_each_partition_gives_scikit_learns_ridge(dtype: torch.dtype, penalise_bias: bool) -> None:
    """To 1e-6 of the largest number. The sums differ by rounding (1e-13 here), which leaves float32
    the same bits."""
    weight, bias = scikit_learn(penalise_bias)
    options = {"penalise_bias": penalise_bias, **PLAIN}
    found = [solved(name, dtype, **options) for name in PARTITIONS]
    found.append(solved("dirichlet", dtype, "vectorized", clients=7, **options))
    for params in found:
        for name, wanted in (("fc.weight", weight), ("fc.bias", bias)):
            assert params[name].dtype is dtype
            atol = 1e-6 * np.abs(wanted).max()
            np.testing.assert_allclose(params[name].double(), wanted, rtol=0, atol=atol)
            atol = 1e-11 if dtype is torch.float64 else 0
            torch.testing.assert_close(params[name], found[0][name], rtol=0, atol=atol)


def no_bias(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(*input_shape, n_classes, bias=False))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_classifier_without_a_bias_gets_none(engine: str) -> None:
    """A user's own network. Its ridge regression has no column of ones."""
    data = digits(torch.float64)
    plan = Plan(
        build(name_of(no_bias), (D,), 10),
        LocalTraining(lr=0.1, epochs=1, batch_size=32),
        rounds=1,
        cohort=3,
        seed=0,
        engine=engine,
    )
    parts = [np.arange(k, len(data.y), 3) for k in range(3)]
    given = {"fed3r": {"lam": ALPHA, **PLAIN}}
    (weight,) = (
        simulate("fed3r", given, Federation.from_indices(data, parts, data), plan)
        .run()
        .params.values()
    )
    wanted = Ridge(alpha=ALPHA, fit_intercept=False).fit(data.x.numpy(), np.eye(10)[data.y.numpy()])
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
