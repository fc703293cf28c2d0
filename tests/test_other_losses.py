"""Runs whose targets are no classes: every method, all runtimes, against torch's own training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

import fedml_noniid as nd
from fedml_noniid.contract import silos
from fedml_noniid.contract.checks import close
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.losses import Classification
from fedml_noniid.core.options import RecipeError
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings as silo_settings
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.losses import MSE, Regression, loss_of
from fedml_noniid.models import build
from fedml_noniid.plugins.registry import METHODS
from fedml_noniid.processes import loopback
from tests import federation
from tests.recipe_table import ALONE, settings
from tests.walks import thinned

TARGETS, FEATURES = 2, 6


def targets(of: Samples, labels: bool = False) -> Samples:
    """The samples with targets [n, t] that depend on them."""
    x = of.x.flatten(1)[:, :FEATURES].double()
    weights = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(1)).double()
    y = torch.tanh(x @ weights) + 0.3 * x[:, :1]
    return of._replace(y=(y > 0.2).to(of.x.dtype) if labels else y.to(of.x.dtype))


def small(dtype: torch.dtype = torch.float32, labels: bool = False) -> federation.Federation:
    of = federation.federation(dtype)
    assert of.public is not None
    train, test, public = (targets(one, labels) for one in (of.train, of.test, of.public))
    return replace(of, train=train, test=test, public=public)


def mlp(batch_norm: bool = False) -> Any:
    return build("mlp", (FEATURES,), TARGETS, {"hidden": 5, "batch_norm": batch_norm})


def run(recipe: str, of: Any, loss: object = "mse", methods: Any = None, **how: Any) -> Any:
    methods = settings(recipe) if methods is None else methods
    batch_norm = how.pop("batch_norm", False) and federation.takes_norms(recipe, methods)
    return federation.run(recipe, methods, data=of, model=mlp(batch_norm), loss=loss, **how)


@pytest.mark.parametrize("entry", thinned(ALONE, 2, 4))
def test_each_method_runs_in_both_engines_or_says_that_it_needs_classes(entry: str) -> None:
    recipe, methods = ALONE[entry]
    needs = METHODS[recipe](**methods.get(recipe, {})).needs if recipe in METHODS else None
    go = partial(run, recipe, small(torch.float64), methods=methods, rounds=2, batch_norm=True)
    if needs is not None and needs.classes:
        with pytest.raises(RecipeError, match=f"'{recipe}' needs targets that are classes"):
            go()
        return
    alone, beside = go(observing=True), go(observing=True, engine="vectorized")
    for part in ("params", "evaluated", "buffers"):
        close(getattr(beside, part), getattr(alone, part), 1e-8)
    (last, other) = alone.rows[-1], beside.rows[-1]
    assert last.keys() == other.keys() and not any("accuracy" in name for name in last)
    for name in ("test_r2", "test_mae", "test_rmse", "test_loss"):
        assert last[name] == pytest.approx(other[name], rel=1e-8) and np.isfinite(last[name])


@pytest.mark.parametrize(
    ("recipe", "loss"),
    thinned(product(["fedavg", "fedprox+scaffold", "moon"], ["mse", "bce"]), every=2),
)
def test_neutral_padding_and_processes(recipe: str, loss: str, tmp_path: Path) -> None:
    """The written-out gradient and autograd's have the same bits, as have two processes, also those
    of a resumed run."""
    of = small(labels=loss == "bce")
    one, two = (run(recipe, of, loss, workers=workers) for workers in (1, 2))
    assert federation.equal(one, two)
    if recipe == "moon":  # takes autograd
        neutral = run(recipe, of, loss, {"moon": {"mu": 0.0}})
        assert federation.equal_models(neutral, run("fedavg", of, loss))
    path = tmp_path / "checkpoint"
    options = {"data": of, "model": mlp(), "loss": loss, "checkpoint": path}
    begun = federation.simulation(recipe, settings(recipe), **options)
    next(begun.rounds())
    again = federation.simulation(recipe, settings(recipe), **options)
    assert again.start_round == 1 and federation.equal(again.run(), one)


class Absolute(Regression):
    """A user's own: trained by autograd."""

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).abs().mean(-1)


class Smoothed(Classification):
    """A user's own, of classes."""

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        log_p = torch.log_softmax(outputs, -1)
        return -0.9 * log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1) - 0.1 * log_p.mean(-1)


@pytest.mark.parametrize("own", [Absolute, Smoothed])
def test_a_users_own_loss(own: type) -> None:
    name, of = f"{own.__module__}:{own.__qualname__}", federation.federation()
    how: dict[str, Any] = {"data": of}
    if own is Absolute:
        how = {"data": small(), "model": mlp()}
    found = [
        federation.run("scaffold", {}, loss=given, engine=engine, **how)
        for given in (name, own)
        for engine in ("sequential", "vectorized")
    ]
    assert federation.equal(found[0], found[2])
    close(found[1].params, found[0].params, 1e-4)
    metric = loss_of(name).metric
    assert found[0].rows[-1][f"test_{metric}"] > found[0].rows[0][f"test_{metric}"] - 0.1


def parts(labels: bool = False) -> Parts:
    """Those of the contract's silos, with targets."""
    of = silos.parts()
    assert of.validation is not None and of.public is not None and of.tests is not None
    held = {"validation": targets(of.validation, labels), "public": targets(of.public, labels)}
    return replace(
        of,
        train=targets(of.train, labels),
        test=targets(of.test, labels),
        tests=[targets(one, labels) for one in of.tests],
        n_classes=TARGETS,
        **held,
    )


@pytest.mark.parametrize(
    ("recipe", "loss"),
    [("scaffold", "mse"), ("qfedavg", "bce"), ("fedbn", "mse"), ("fedper", {"name": "huber"})],
    ids=str,
)
def test_silos_have_the_bits_and_metrics_of_the_simulation(recipe: str, loss: object) -> None:
    data = parts(labels=loss == "bce")
    deployment = silos.deployment(recipe, settings(recipe), loss=loss)
    server_shard, *_ = silos.shards_of(data)
    network = deployment.network((1, 4, 4), TARGETS, None)
    terms = silo_settings.terms(deployment, recipe, network)
    server = ServerRun(terms, server_shard)
    outcome = silos.talk(server, silos.silos_of(terms, data))
    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers, outcome.personal)
    if recipe != "fedbn" and recipe != "fedper":  # their clients' parts are on the silos
        assert weights_sha256(tensors) == loopback.simulate(deployment, data)
    row = outcome.rows[-1]
    metric = "macro_f1" if loss == "bce" else "r2"
    assert np.isfinite(row[f"test_{metric}"]) and row[f"sent_{metric}"] == row[f"test_{metric}"]
    plain = silos.deployment(recipe, settings(recipe))
    assert silo_settings.terms(plain, recipe, network).fingerprint != terms.fingerprint


def test_clients_with_models_of_their_own_are_scored_together() -> None:
    """R^2 over all clients' samples at once, though each silo sends sums of its own."""
    of = small(torch.float64)
    made = federation.simulation(
        "fedper", {}, data=of, model=mlp(), loss="mse", dtype=torch.float64, cohort=6
    )
    outcome = made.run()
    answers, y = [], []
    for k in range(len(of.clients)):
        params = outcome.params | {n: leaf[k] for n, leaf in outcome.personal["params"].items()}
        found = evaluate(
            mlp(), params, {}, of.test, loss=MSE()
        )  # no tests of its own: the whole set
        answers.append(found.predictions)
        y.append(of.test.y)
    wanted = sk.r2_score(torch.cat(y), torch.cat(answers))
    assert outcome.rows[-1]["test_r2"] == pytest.approx(wanted, rel=1e-9)


def test_targets_that_do_not_fit_are_refused() -> None:
    for loss, of, message in (
        ("mse", federation.federation(), "the targets are classes; allowed: cross_entropy"),
        ("cross_entropy", small(), "the targets are numbers, not classes; allowed: mse, huber"),
        ("bce", small(), "loss BCE: a target is neither 0 nor 1"),
    ):
        with pytest.raises(UserError, match=message):
            run("fedavg", of, loss)
    for given, message in (
        ("mse2", r"loss 'mse2' is unknown \(did you mean 'mse'"),
        ({"name": "huber", "delta": -1}, "delta = -1 is refused; allowed: a number above 0"),
        ({"delta": 1}, "loss {'delta': 1} is unknown"),
        ("nowhere.Loss", "loss 'nowhere.Loss' can't be imported"),
    ):
        with pytest.raises(UserError, match=message):
            loss_of(given)


def test_a_part_on_which_no_model_has_a_metric_is_refused_before_training() -> None:
    """R^2 needs targets that differ: a validation split of one sample; a test set of equal ones."""
    x = np.random.default_rng(0).normal(size=(60, 2))
    how: dict[str, Any] = {"partition": "iid", "clients": 2, "rounds": 2, "loss": "mse"}
    how |= {"model": "logistic_regression", "progress": False}
    for y, fraction, words in ((x[:9, 0], 0.02, "1 validation"), (np.ones(9), 0.1, "9 test")):
        data = nd.from_arrays(x, x[:, 0], x[:9], y)
        with pytest.raises(UserError, match=f"R² of the {words} samples is not defined"):
            nd.run("fedavg", data, validation=fraction, **how)
