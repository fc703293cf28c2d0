"""Measures the final model of an item: accuracy per class and per client, traffic, the papers' own
measures.

Where one class is frequent, a constant answer has a high accuracy too. So the accuracy of a
constant answer, balanced accuracy, macro-F1 and the number of classes that the model names stand
beside it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.data.dataset import normalised
from fedml_noniid.data.owners import client_names, order_of
from fedml_noniid.data.statistics import class_counts
from fedml_noniid.data.types import Floats, Ints
from fedml_noniid.engines.attackers import triggered
from fedml_noniid.engines.evaluation import Evaluation, outputs_of, pooled
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.engines.metrics import by_client, measured, views_of
from fedml_noniid.engines.personal import ClientModels, without
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.models.model import Model
from fedml_noniid.pipelines.experiment import counts
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.results import METRIC

CONFUSION, UNSEEN = "confusion.csv", "unseen.csv"
LAST = 5  # last rounds, for their mean and spread


class Measured(NamedTuple):
    """How good the final model of an item is. An accuracy without samples is NaN."""

    # Columns by title: of each class, or of each target where these are no classes.
    per_class: Mapping[str, Sequence[object]]
    per_client: Mapping[str, Sequence[object]]
    metrics: Mapping[str, float]
    hashes: Mapping[str, str]  # SHA-256 by name; they follow the metrics in metrics.json
    # Columns by title: a row per true class, a column per predicted one; empty without classes.
    confusion: Mapping[str, Sequence[object]] = {}
    unseen: Mapping[str, Sequence[object]] = {}  # a row per owner that takes no part

    def files(self) -> dict[str, bytes]:
        """The files of the item's folder in evaluation/."""
        confusion = {CONFUSION: _table(self.confusion).encode()} if self.confusion else {}
        unseen = {UNSEEN: _table(self.unseen).encode()} if self.unseen else {}
        return (
            confusion
            | unseen
            | {
                f"per_{next(iter(self.per_class))}.csv": _table(self.per_class).encode(),
                "per_client.csv": _table(self.per_client).encode(),
                "metrics.json": (
                    json.dumps({**self.metrics, **self.hashes}, indent=2) + "\n"
                ).encode(),
            }
        )


def measure(item: Item, tensors: Params, rows: Sequence[Mapping[str, float]]) -> Measured:
    """Measures the model on the whole test set and sums up the rounds.

    After a concept drift, each client has labels of its own: accuracies and loss are then means
    over the clients. Where the clients keep a part of the model to themselves, each client's own
    model is measured. Accuracy and loss are then those on the clients' own test samples, over all
    of them together; all else is on the test set as the client sees it.

    `majority_accuracy`: of always naming the most frequent class of the model's training data, on
    the samples of `accuracy`. `classes_named`: by the model on the whole test set; of clients' own
    models, the most of any. Balanced accuracy and macro-F1 are fractions, on the samples of
    `accuracy`.

    With a loss without classes, the metrics are those of the loss: see `_targets`.

    `tensors`: the content of model.safetensors, on the item's device. `rows`: of rounds.csv.
    """
    if not item.loss.classes:
        return _targets(item, tensors, rows)
    item = item.ended(int(rows[-1]["round"]))
    models = models_of(item, tensors)
    views = _tested(item, models)
    noisy = _noisy(item, models, [view.seen for view in views] if models.personal else [])

    n_classes, n_clients = len(item.data.classes), len(item.indices.clients)
    shares = [len(view.clients) / n_clients for view in views]
    measures = [(view.seen.accuracy, view.seen.loss, view.per_class) for view in views]
    accuracy, loss, per_class = (
        sum(share * value for share, value in zip(shares, values, strict=True))
        for values in zip(*measures, strict=True)
    )
    samples = class_counts(item.data.train_y.numpy(), item.indices.clients, n_classes)  # [N, C]
    frequent = _frequent(item, bool(models.personal))
    confusions = [_confusion(view.y, view.seen.predictions, n_classes) for view in views]
    confusion = confusions[0]  # whole numbers where all clients see the same labels
    if len(views) > 1:
        confusion = np.average(confusions, axis=0, weights=shares)
    majority = [(view.y == frequent[view.clients[0]]).double().mean().item() for view in views]
    by_class = np.average(
        [(right, *_by_class(matrix)) for right, matrix in zip(majority, confusions, strict=True)],
        axis=0,
        weights=shares,
    )
    owned = item.indices.test_clients
    per_client, on_own_tests = np.empty(n_clients), np.empty(n_clients)
    for view in views:
        # A client's accuracy: the mean over classes, weighted by its own mixture, without classes
        # that have no test.
        measured = ~np.isnan(view.per_class)
        counted = samples * measured
        mixed = np.where(measured, view.per_class, 0) @ counted.T / np.maximum(counted.sum(1), 1)
        per_client[view.clients] = np.where(counted.sum(1) > 0, mixed, np.nan)[view.clients]
        # The accuracy on the client's own test samples. Some clients have none.
        hits = (view.seen.predictions == view.y).numpy()
        n_hits = np.bincount(owned.holder, hits[owned.flat], n_clients)
        own_accuracy = n_hits / np.where(owned.sizes, owned.sizes, np.nan)
        on_own_tests[view.clients] = own_accuracy[view.clients]

    if models.personal:
        tests = [
            seen._replace(y=item.labelled(seen.y, k)) for k, seen in enumerate(item.client_tests())
        ]
        scored = [models.evaluate(k, test) if len(test.y) else None for k, test in enumerate(tests)]
        on_own_tests = np.array(
            [np.nan if scores is None else scores.accuracy for scores in scored]
        )
        if (whole := pooled(item.network, scored, tests)) is not None:
            accuracy, loss = whole.accuracy, whole.loss
            y = torch.cat([seen.y for seen in tests]).cpu()
            constant = np.repeat(frequent, [len(seen.y) for seen in tests])
            confusion = _confusion(y, whole.predictions, n_classes)
            by_class = np.array([(y.numpy() == constant).mean(), *_by_class(confusion)])

    own_metrics, own_by_client = _own_metrics(item, models)
    own_metrics |= _backdoor(item, models)
    metrics = {
        "accuracy": accuracy,
        "loss": loss,
        "majority_accuracy": by_class[0],
        "balanced_accuracy": by_class[1],
        "macro_f1": by_class[2],
        "classes_named": max(len(np.unique(view.seen.predictions)) for view in views),
        **_course("accuracy", rows),
        **_spread("client", per_client),
        **_spread("client_test", on_own_tests),
        **_bytes(rows),
        **{f"{METRIC}{name}": value for name, value in own_metrics.items()},
    }
    if noisy:
        # The copies have equal size, so their mean is the mean over all their samples.
        metrics |= {
            f"{key}_noisy": np.mean([getattr(copy, key) for copy in noisy])
            for key in ("accuracy", "loss")
        }
    own_parts = (name for part in models.personal.values() for name in part)
    sent = without(models.params | models.buffers, {*item.network.frozen, *own_parts})
    model_bytes = sum(leaf.nbytes for leaf in sent.values())
    metrics |= _efficiency(item, rows, accuracy, model_bytes)
    tested = torch.bincount(item.data.test_y, minlength=n_classes).tolist()
    per_client_columns: dict[str, Sequence[object]] = {
        "client": range(len(samples)),
        "samples": samples.sum(1).tolist(),
        "accuracy": per_client.tolist(),
        "test_samples": owned.sizes.tolist(),
        "test_accuracy": on_own_tests.tolist(),
        **{f"{METRIC}{name}": values for name, values in own_by_client.items()},
    }
    if noisy:
        per_client_columns["accuracy_noisy"] = [copy.accuracy for copy in noisy]
    return Measured(
        {"class": item.data.classes, "samples": tested, "accuracy": per_class.tolist()},
        _with_owners(item, per_client_columns),
        {name: float(value) for name, value in metrics.items()},
        _hashes(tensors, [view.seen.predictions for view in views]),
        {"class": item.data.classes}
        | {f"as {name}": confusion[:, c].tolist() for c, name in enumerate(item.data.classes)},
        _unseen(item, tensors),
    )


def _unseen(item: Item, tensors: Params) -> dict[str, Sequence[object]]:
    """The model on all samples of each owner that takes no part; empty if all do.

    `majority_accuracy`: of naming the owner's own largest class.
    """
    data = item.data
    if data.unseen_x is None or data.unseen_y is None or data.unseen_owner is None:
        return {}
    model = model_of_new_site(tensors, item.indices.clients.sizes.tolist())
    x, y = normalised(data.unseen_x.to(item.device), data.mean, data.std), data.unseen_y
    outputs = outputs_of(item.network, *model, Samples(x, y.to(item.device))).cpu()
    owners = [data.unseen_owner == number for number in range(len(data.unseen_names))]
    return {
        "owner": data.unseen_names,
        "samples": [int(rows.sum()) for rows in owners],
        "majority_accuracy": [share_of_largest(y[rows]) for rows in owners],
        "accuracy": [share_of_right(outputs[rows], y[rows]) for rows in owners],
    }


def model_of_new_site(tensors: Params, sizes: Sequence[int]) -> tuple[Params, Params]:
    """(parameters, buffers) that a site gets which took no part: the common model.

    Of parts that clients keep to themselves, it gets the mean over the clients, by their `sizes`.
    `tensors`: as in `measure`.
    """
    (params, buffers), parts = final_model(tensors), personal_parts(tensors)
    # Whole models stay on the clients, or are those of clusters, beside the common one.
    if "models" in parts or params.keys() <= parts.get("params", {}).keys():
        return params, buffers
    shares = torch.tensor(sizes, dtype=torch.float64)
    shares /= shares.sum()
    mean = {
        part: {
            name: torch.tensordot(shares.to(leaf.device), leaf.double(), 1).to(leaf.dtype)
            for name, leaf in tree.items()
        }
        for part, tree in parts.items()
    }
    return params | mean.get("params", {}), buffers | mean.get("buffers", {})


def share_of_right(outputs: Tensor, y: Tensor) -> float:
    """The accuracy of outputs [n, C]; such that are not finite count as wrong. NaN for none."""
    right = (outputs.argmax(1) == y) & outputs.isfinite().all(1)
    return float(right.double().mean())


def share_of_largest(y: Tensor) -> float:
    """The share of the most frequent class of `y` [n]. NaN for none."""
    _, sizes = np.unique(y.numpy(), return_counts=True)
    return float(sizes.max()) / len(y) if len(y) else np.nan


def _course(metric: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The best of all rounds, and mean and deviation of the last ones."""
    values = np.array([row[f"test_{metric}"] for row in rows])
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    return {
        f"{metric}_best": known.max(),
        f"{metric}_last5_mean": known[-LAST:].mean(),
        f"{metric}_last5_std": known[-LAST:].std(),
    }


def _bytes(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(row[key] for row in rows) for key in ("bytes_up", "bytes_down")}


def _targets(item: Item, tensors: Params, rows: Sequence[Mapping[str, float]]) -> Measured:
    """As `measure`, with the metrics of a loss without classes: over all test samples, by target
    (or label), and by client on its own test samples.

    Where the clients keep a part of the model to themselves: all on the clients' own test samples,
    each by its client's model.
    """
    models, loss = models_of(item, tensors), item.loss
    owned, tests = item.indices.test_clients, item.client_tests()
    known = np.flatnonzero(owned.sizes).tolist()
    if models.personal:
        scored = {k: models.evaluate(k, tests[k]) for k in known}
        y = torch.cat([item.test.y[:0], *(tests[k].y for k in known)]).cpu()
        evaluation = pooled(
            item.network, [scored[k] for k in known], [tests[k] for k in known], loss
        )
        whole = evaluation or Evaluation({}, np.nan, y[:0], y)
        by_client = {k: scores.metrics[loss.metric] for k, scores in scored.items()}
    else:
        y = item.test.y.cpu()
        whole = models.evaluate(0, item.test)
        by_client = {
            k: _scores(item, whole.predictions[owned[k]], y[owned[k]])[loss.metric] for k in known
        }
    of_clients = np.array([by_client.get(k, np.nan) for k in range(len(owned))])
    names: Sequence[str] = item.data.classes if loss.per_target else ["all"]
    columns_of = [[t] for t in range(len(names))] if loss.per_target else [slice(None)]
    by_target = [_scores(item, whole.predictions[:, t], y[:, t]) for t in columns_of]
    own_metrics, own_by_client = _own_metrics(item, models)
    metrics = {
        **whole.metrics,
        "loss": whole.loss,
        **_course(loss.metric, rows),
        **_spread("client_test", of_clients),
        **_bytes(rows),
        **{f"{METRIC}{name}": value for name, value in own_metrics.items()},
    }
    if noisy := [] if models.personal else _noisy(item, models, []):
        metrics |= {
            f"{loss.metric}_noisy": float(np.mean([copy.metrics[loss.metric] for copy in noisy])),
            "loss_noisy": float(np.mean([copy.loss for copy in noisy])),
        }
    metrics["traffic_mib"] = (metrics["bytes_up"] + metrics["bytes_down"]) / counts.MIB
    columns: dict[str, Sequence[object]] = {"target": names}
    columns["samples"] = [len(y)] * len(by_target)
    columns |= {key: [scores[key] for scores in by_target] for key in by_target[0]}
    per_client: dict[str, Sequence[object]] = {
        "client": range(len(owned)),
        "samples": item.indices.clients.sizes.tolist(),
        "test_samples": owned.sizes.tolist(),
        f"test_{loss.metric}": of_clients.tolist(),
        **{f"{METRIC}{name}": values for name, values in own_by_client.items()},
    }
    return Measured(
        columns,
        _with_owners(item, per_client),
        {name: float(value) for name, value in metrics.items() if not np.isnan(value)},
        _hashes(tensors, [whole.predictions]),
    )


def _with_owners(
    item: Item, columns: Mapping[str, Sequence[object]]
) -> Mapping[str, Sequence[object]]:
    """The columns of per_client.csv with the owners' names, in the order of these; as they are
    where clients have no names."""
    owners = client_names(item.data, item.indices.clients)
    if not owners:
        return columns
    order, named = order_of(owners), {"client": columns["client"], "owner": owners, **columns}
    return {title: [column[k] for k in order] for title, column in named.items()}


def _hashes(tensors: Params, predictions: Sequence[Tensor]) -> dict[str, str]:
    """SHA-256 of the weights, and of the predictions on the test set, which two models may share.

    `predictions`: of each view of the test set.
    """
    by_view = {str(number): predicted for number, predicted in enumerate(predictions)}
    return {
        "weights_sha256": weights_sha256(tensors),
        "predictions_sha256": weights_sha256(by_view),
    }


def _scores(item: Item, predictions: Tensor, y: Tensor) -> dict[str, float]:
    """The metrics of some samples, or targets."""
    scores = item.loss.of_one(predictions, y) | item.loss.of_all(predictions, y)
    return {name: value.item() for name, value in scores.items()}


class _View(NamedTuple):
    """The model on the test set as some clients label it. Classes are the true ones."""

    clients: Ints
    seen: Evaluation
    y: Tensor  # their labels [n]
    per_class: Floats  # [C]


def _tested(item: Item, models: ClientModels) -> list[_View]:
    """A view for each way in which clients see the test set after the last round.

    With one model: one for each way in which they label it. With models of their own: one for each
    client, of its model on the test set as it sees it.
    """
    drift, views = item.indices.skew.drift, list[_View]()
    n_clients, n_classes = len(item.indices.clients), len(item.data.classes)
    concept = np.zeros(n_clients, np.int64) if drift is None else drift.concept(item.last_round)
    ways = np.arange(n_clients) if models.personal else concept
    for clients in (np.flatnonzero(ways == way) for way in np.unique(ways)):
        first = int(clients[0])
        common = item.test._replace(y=item.labelled(item.test.y, first))
        test = item.test_of(first) if models.personal else common
        seen = models.evaluate(first, test)
        # Of each class, its label.
        label = np.arange(n_classes) if drift is None else drift.concepts[concept[first]]
        views.append(_View(clients, seen, test.y.cpu(), seen.per_class_accuracy.numpy()[label]))
    return views


def _own_metrics(
    item: Item, models: ClientModels
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """(number by name, numbers of the clients by name) of the user's metrics.

    One model: on the test set, and on each client's own test samples. Models of their own: on the
    clients' own test samples together, and on each client's.
    """
    metrics = item.settings.train_of(item.unit.recipe).built_metrics()
    if not metrics:
        return {}, {}
    clients = range(len(item.indices.clients))
    if models.personal:
        tests = item.client_tests()
        tested = [
            (models.outputs(k, tests[k]), item.labelled(tests[k].y, k))
            for k in clients
            if len(tests[k].y)
        ]
        logits, y = map(torch.cat, zip(*tested, strict=True))
        numbers = measured(metrics, logits, [(1.0, y)])
        rest = iter(tested)
        own = [next(rest) if len(tests[k].y) else (logits[:0], y[:0]) for k in clients]
    else:
        logits = models.outputs(0, item.test)
        views = views_of(item.indices.skew.drift, item.test.y, item.last_round)
        numbers = measured(metrics, logits, views)
        rows = [torch.from_numpy(part).to(item.device) for part in item.indices.test_clients]
        own = [(logits[rows[k]], item.labelled(item.test.y[rows[k]], k)) for k in clients]
    return numbers, by_client(metrics, numbers, own)


def _backdoor(item: Item, models: ClientModels) -> dict[str, float]:
    """How often models name the backdoor's target on test samples of other classes with the
    trigger; empty without a backdoor.

    Of clients' own models: the mean over the honest clients, each as it sees the test set.
    """
    if item.attackers is None or item.attackers.kind != "backdoor":
        return {}
    target, like = item.attackers.options["target"], item.data.normalised("train", item.device)
    own, rates = bool(models.personal), []
    honest = {*range(len(item.indices.clients))} - {*item.attackers.clients}
    for k in honest if own else {0}:
        test = item.test_of(k) if own else item.test
        other = test.y != target
        test = test._replace(x=triggered(test.x[other], like), y=test.y[other], noise=None)
        seen = models.evaluate(k, test)
        rates.append((seen.predictions == target).double().mean().item())
    return {"backdoor_rate": float(np.mean(rates))}  # beside the user's metrics


def _frequent(item: Item, by_client: bool) -> Ints:
    """The most frequent class of the training data by client [N], as clients label it after the
    last round.

    `by_client`: whether it is that of the client's data, or of all clients' data. Label noise is
    left out.
    """
    clients, drift = item.indices.clients, item.indices.skew.drift
    counts = class_counts(item.data.train_y.numpy(), clients, len(item.data.classes))  # [N, C]
    if drift is not None:
        concept = drift.concept(item.last_round)
        truth = np.argsort(drift.concepts, axis=1)  # [K, C], the class of each label
        counts = np.take_along_axis(counts, truth[concept], axis=1)
    most: Ints = (counts if by_client else np.broadcast_to(counts.sum(0), counts.shape)).argmax(1)
    return most


def _confusion(y: Tensor, predictions: Tensor, n_classes: int) -> Ints:
    """Counts samples [C, C] by label (row) and prediction (column); both are [n]."""
    cells = (y * n_classes + predictions).numpy()
    return np.bincount(cells, minlength=n_classes**2).reshape(n_classes, n_classes)


def _by_class(confusion: Ints) -> tuple[float, float]:
    """(balanced accuracy, macro-F1) of a confusion matrix.

    Balanced accuracy is the mean over the classes with samples. Macro-F1 is the mean over the
    classes with samples or predictions.
    """
    hits, samples, named = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    known, seen = samples > 0, samples + named > 0
    f1 = 2 * hits[seen] / (samples + named)[seen]
    return (hits[known] / samples[known]).mean(), f1.mean()


def models_of(item: Item, tensors: Params) -> ClientModels:
    """The clients' models of the content of model.safetensors: all the same, if they keep no
    parts."""
    parts, seed = personal_parts(tensors), item.unit.seed
    return ClientModels(item.network, *final_model(tensors), parts, seed, item.loss)


def personal_parts(tensors: Params) -> Tree:
    """The clients' own parts in the content of model.safetensors, for `client_model`; empty if they
    keep none."""
    parts: Tree = {}
    for name, leaf in tensors.items():
        own, *path, last = name.split("/")
        if own == "own":
            reduce(lambda tree, part: tree.setdefault(part, {}), path, parts)[last] = leaf
    return parts


def final_model(tensors: Params) -> tuple[Params, Params]:
    """(parameters, buffers) of the evaluated model in the content of model.safetensors, by the
    network's names."""
    part = "evaluated/" if any(name.startswith("evaluated/") for name in tensors) else "params/"
    params, buffers = (
        {
            name.removeprefix(prefix): leaf
            for name, leaf in tensors.items()
            if name.startswith(prefix)
        }
        for prefix in (part, "buffers/")
    )
    return params, buffers


def with_frozen(tensors: Params, network: Model, seed: int, run: Mapping[str, Any]) -> Params:
    """The content of model.safetensors with the frozen parameters that it lacks (`save: trained`).

    These are made as for the run, whose run.json is `run`. UserError if they are others now.
    """
    lacking = sorted(name for name in network.frozen if f"params/{name}" not in tensors)
    if not lacking:
        return tensors
    first, _ = initial_model(network, seed, torch.zeros(()))
    parts = {"params", "evaluated"} & {key.partition("/")[0] for key in tensors}
    # Copies: whoever gets the model may train it on.
    base = {f"{part}/{name}": first[name].clone() for part in parts for name in lacking}
    whole = tensors | base
    if weights_sha256(whole) != run["weights_sha256"]:
        raise UserError(
            f"model.safetensors of {run['scenario']}-{run['recipe']}-{seed} has what was trained "
            f"(save = 'trained'), and the {len(lacking)} frozen parameters of model "
            f"{network.name!r}, such as {lacking[0]}, are not those of the run",
            allowed="the base from which the run started",
        )
    return whole


def _spread(name: str, accuracy: Floats) -> dict[str, float]:
    """Worst, 10th percentile and variance over the clients that have an accuracy.

    Empty if no client has one.
    """
    known = accuracy[~np.isnan(accuracy)]
    if not len(known):
        return {}
    return {
        f"{name}_worst": known.min(),
        f"{name}_percentile10": np.percentile(known, 10),
        f"{name}_variance": known.var(),
    }


def _efficiency(
    item: Item, rows: Sequence[Mapping[str, float]], accuracy: float, model_bytes: int
) -> dict[str, float]:
    """FNR-FL's rho, by the bytes sent and by the paper's count.

    The size of delta as rFedAvg counts it.
    """
    settings, unit = item.settings, item.unit
    recipe, cohort = settings.composition(unit.recipe), settings.scenarios[unit.scenario].cohort
    mib = sum(row["bytes_up"] + row["bytes_down"] for row in rows) / counts.MIB
    as_fnr = counts.fnr_mib(recipe, model_bytes, cohort * len(rows))
    numbers = {
        "traffic_mib": mib,
        "rho": counts.rho(accuracy, mib) if mib else None,
        "traffic_mib_as_fnr_counts": as_fnr,
        "rho_as_fnr_counts": None if as_fnr is None else counts.rho(accuracy, as_fnr),
        "delta_bytes_as_rfedavg_counts": counts.delta_bytes(
            recipe, item.network.feature_size, cohort
        ),
    }
    return {key: value for key, value in numbers.items() if value is not None}


def _noisy(
    item: Item, models: ClientModels, personal: Sequence[Evaluation]
) -> Sequence[Evaluation]:
    """The model on one copy of the test set per client, as that client sees images.

    Empty if all see the same.

    `personal`: the same of the clients' own models, if they have any.
    """
    turns, drift = item.indices.skew.turns, item.indices.skew.drift
    if item.noise is None and turns is None:
        return []
    if personal:
        return personal
    evaluations: dict[tuple[int, int], Evaluation] = {}
    # Without noise, clients with the same angle and the same labels have the same copy.
    images = (
        turns.tolist()
        if turns is not None and item.noise is None
        else range(len(item.indices.clients))
    )
    labels = [0] * len(images) if drift is None else drift.concept(item.last_round).tolist()
    copies = list(zip(images, labels, strict=True))
    for client, copy in enumerate(copies):
        if copy not in evaluations:
            evaluations[copy] = models.evaluate(client, item.test_of(client))
    return [evaluations[copy] for copy in copies]


def _table(columns: Mapping[str, Iterable[object]]) -> str:
    """CSV text of columns by title. The cell of an unknown number is empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    cells = [["" if cell != cell else cell for cell in column] for column in columns.values()]
    table.writerows(zip(*cells, strict=True))
    return text.getvalue()
