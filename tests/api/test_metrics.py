"""Metrics of a user's own: measured where accuracy is, by clients, in files, tables and MLflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedml_noniid as nd

DATA = nd.load("digits")
HOW: dict[str, Any] = {"clients": 4, "alpha": 0.1, "validation": 0.1}
SPLIT = nd.partition(DATA, "dirichlet", **HOW)
QUIET: dict[str, Any] = {"rounds": 3, "progress": False}


def margin(outputs: Tensor, labels: Tensor, *, scale: float = 1.0) -> Tensor:
    """The mean of the true class's output less the largest other one."""
    true = outputs.gather(1, labels[:, None])[:, 0]
    others = outputs.scatter(1, labels[:, None], -torch.inf)
    return scale * (true - others.max(1).values).mean()


def several(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    if len(labels.unique()) < 4:
        raise ValueError("too few classes")
    outputs.zero_()  # a copy: another metric sees them as they were
    return {"size": np.float32(len(labels)), "undefined": float("nan")}


def by_hand(result: nd.Result, test: Any) -> float:
    """The margin of the final model on test samples, in float64 from the predictor's logits."""
    logits = result.model()(DATA.dataset.test_x[test]).double().detach()
    return float(margin(logits, DATA.dataset.test_y[test]))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_numbers_are_those_of_the_model(engine: str) -> None:
    """And the weights do not depend on metrics."""
    metrics = {several: {}, margin: {"scale": 2.0}}
    how = {**QUIET, "engine": engine, "evaluate_every": 2}
    result = nd.run("fedavg", SPLIT, metrics=metrics, **how)
    assert result.sha256 == nd.run("fedavg", SPLIT, **how).sha256
    last = result.rounds["test_margin"].tolist()
    assert last[2] == pytest.approx(2 * by_hand(result, slice(None)), rel=1e-4)
    assert last[2] == result.metrics["metric/margin"][0]
    assert np.isnan(last).tolist() == np.isnan(result.rounds["test_accuracy"]).tolist()
    assert result.rounds["validation_size"][2] == len(SPLIT.indices.validation)
    assert result.rounds["test_undefined"].isna().all()
    clients, tests = result.clients, SPLIT.indices.test_clients
    wanted = [2 * by_hand(result, torch.from_numpy(own)) for own in tests]
    assert clients["metric/margin"].tolist() == pytest.approx(wanted, rel=1e-4)
    few = [len(DATA.dataset.test_y[own].unique()) < 4 for own in tests]
    assert True in few, "the function fails on a client, whose cell is empty"
    assert clients["metric/size"].isna().tolist() == few


def test_drifted_labels_and_clients_models() -> None:
    """With drift it is the mean over the clients' labels; of their own models, over their tests."""
    how = {**QUIET, "partition": "iid", "clients": 4, "drift": {"at": 2, "swap": [[0, 1], []]}}
    result = nd.run("fedavg", DATA, metrics=[several, margin], **how)
    logits, y = result.model()(DATA.dataset.test_x).detach(), DATA.dataset.test_y
    swapped = torch.where(y == 0, 1, torch.where(y == 1, 0, y))
    wanted = (margin(logits, y) + margin(logits, swapped)).item() / 2
    assert result.metrics["metric/margin"][0] == pytest.approx(wanted, rel=1e-5)

    own = nd.run("fedper", SPLIT, metrics=[margin], **QUIET)
    assert own.rounds["test_margin"].isna().all()
    mean = np.average(own.clients["metric/margin"], weights=own.clients["test_samples"])
    assert own.metrics["metric/margin"][0] == pytest.approx(mean)
