"""Evaluation of one model on a data set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.core.task import Output
from fedml_noniid.engines import evaluation
from fedml_noniid.engines.evaluation import AccuracyByClient, evaluate, largest, pooled, scores
from fedml_noniid.models import build

NETWORK = build("logistic_regression", (2,), 3)
# Logits are (x1, x2, 0): predicted are 0, 0, 1, 2.
PARAMS = {
    "fc.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
    "fc.bias": torch.zeros(3),
}
X = torch.tensor([[2.0, 0.0], [1.0, 0.5], [0.0, 3.0], [-1.0, -1.0]])


def test_accuracy_loss_and_classes_by_hand() -> None:
    """Labels 0, 1, 1, 0: right, wrong, right, wrong; class 0 has 1 of 2, class 1 has 1 of 2, class
    2 has no sample."""
    found = evaluate(NETWORK, PARAMS, {}, Samples(X, torch.tensor([0, 1, 1, 0])))
    assert (found.predictions.tolist(), found.accuracy) == ([0, 0, 1, 2], 0.5)
    of_classes = found.per_class_accuracy.tolist()
    assert of_classes == pytest.approx([0.5, 0.5, math.nan], nan_ok=True)
    logits = np.array([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 3.0, 0.0], [-1.0, -1.0, 0.0]])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), [0, 1, 1, 0]]
    assert found.loss == pytest.approx(losses.mean(), rel=1e-6)


def test_accuracy_by_client_by_hand() -> None:
    """Right, wrong, right, wrong: the first two samples are of one client, none of the next, the
    third of the last, the fourth of nobody."""
    y = torch.tensor([0, 1, 1, 0])
    positions = {"a": np.array([1, 0]), "b": np.arange(0), "c": np.array([2])}
    by_client = AccuracyByClient.from_positions(positions, y)
    columns = scores(NETWORK, PARAMS, {}, Samples(X, y), by_client=by_client)
    accuracies = {"a": 0.5, "b": math.nan, "c": 1.0}
    wanted = {f"client_accuracy/{name}": share for name, share in accuracies.items()}
    wanted |= {"accuracy": 0.5, "loss": evaluate(NETWORK, PARAMS, {}, Samples(X, y)).loss}
    found = {name: value.item() for name, value in columns.items()}
    assert found == pytest.approx(wanted, nan_ok=True)


def test_several_models_are_one_over_all_samples_together() -> None:
    """Of 3 samples, of none, and of 1: as one model on the 4."""
    y = torch.tensor([0, 1, 1, 0])
    parts = [Samples(X[:3], y[:3]), Samples(X[:0], y[:0]), Samples(X[3:], y[3:])]
    each = [evaluate(NETWORK, PARAMS, {}, of) if len(of.y) else None for of in parts]
    found, whole = pooled(NETWORK, each, parts), evaluate(NETWORK, PARAMS, {}, Samples(X, y))
    assert found is not None and found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.accuracy == whole.accuracy and found.predictions.equal(whole.predictions)
    assert pooled(NETWORK, each[1:2], parts[1:2]) is None


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_batch_size_does_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is a mean over samples, not over batches."""
    samples = Samples(X, torch.tensor([0, 1, 1, 0]))
    whole = evaluate(NETWORK, PARAMS, {}, samples)
    monkeypatch.setattr(evaluation, "BATCH", size)
    found = evaluate(NETWORK, PARAMS, {}, samples)
    assert found.predictions.equal(whole.predictions)
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_largest_size_is_that_of_all_features_and_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def size(features: list[list[float]], logits: list[float]) -> float:
        return largest(NETWORK, Output(torch.tensor(features), torch.tensor([logits]), {})).item()

    assert size([[-5.0, 2.0]], [1.0, 4.0]) == 5.0
    assert size([[3.0, 2.0]], [1.0, 4.0]) == size([[]], [1.0, -4.0]) == 4.0
    assert math.isnan(size([[math.nan, 2.0]], [1.0, math.inf]))
    monkeypatch.setattr(evaluation, "BATCH", 2)
    sizes: list[torch.Tensor] = []
    scores(NETWORK, PARAMS, {}, Samples(X, torch.tensor([0, 1, 1, 0])), sizes=sizes)
    assert sizes == [2.0, 3.0]  # the features are X
