"""Measures the final model of an item: accuracy per class and per client, traffic, the papers' own measures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedml_noniid.pipelines.experiment import counts
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.data.reading import Read
from fedml_noniid.plugins.data.statistics import class_counts
from fedml_noniid.plugins.data.streams import key
from fedml_noniid.plugins.data.types import Floats
from fedml_noniid.plugins.engines.evaluation import Evaluation, evaluate
from fedml_noniid.plugins.engines.hashing import weights_sha256

LAST = 5  # last rounds, for their mean and spread


class Measured(NamedTuple):
    """How good the final model of an item is. An accuracy without samples is NaN."""

    per_class: Mapping[str, Sequence[object]]  # columns by title
    per_client: Mapping[str, Sequence[object]]
    metrics: Mapping[str, float | str]

    def files(self) -> dict[str, bytes]:
        """The files of the item's folder in evaluation/."""
        return {
            "per_class.csv": _table(self.per_class).encode(),
            "per_client.csv": _table(self.per_client).encode(),
            "metrics.json": (json.dumps(self.metrics, indent=2) + "\n").encode(),
        }


def measure(item: Item, tensors: Params, rows: Sequence[Mapping[str, float]]) -> Measured:
    """Measures the model on the whole test set and sums up the rounds.

    `tensors`: the content of model.safetensors, on the item's device. `rows`: of rounds.csv.
    """
    params, buffers = final_model(tensors)
    found = evaluate(item.network, params, buffers, item.test)
    noisy = _noisy(item, params, buffers)

    n_classes = len(item.data.classes)
    per_class = found.per_class_accuracy.numpy()
    samples = class_counts(item.data.train_y.numpy(), item.indices.clients, n_classes)  # [N, C]
    # A client's accuracy: the mean over classes, weighted by its own mixture. A class without test samples has none.
    measured = ~np.isnan(per_class)
    held = samples * measured
    per_client = np.where(measured, per_class, 0) @ held.T / np.maximum(held.sum(1), 1)
    per_client = np.where(held.sum(1) > 0, per_client, np.nan)

    # The accuracy on the client's own test samples. Some clients have none.
    owned = item.indices.test_clients
    hits = (found.predictions == item.data.test_y).numpy()
    own = np.array([hits[positions].mean() if len(positions) else np.nan for positions in owned])

    accuracies = np.array([row["test_accuracy"] for row in rows])
    seen = accuracies[~np.isnan(accuracies)]
    metrics = {
        "accuracy": found.accuracy, "loss": found.loss,
        "accuracy_best": seen.max(),
        "accuracy_last5_mean": seen[-LAST:].mean(), "accuracy_last5_std": seen[-LAST:].std(),
        **_spread("client", per_client), **_spread("client_test", own),
        "bytes_up": sum(row["bytes_up"] for row in rows), "bytes_down": sum(row["bytes_down"] for row in rows),
    }  # fmt: skip
    if noisy:
        # The copies have equal size, so their mean is the mean over all their samples.
        metrics |= {f"{key}_noisy": np.mean([getattr(copy, key) for copy in noisy]) for key in ("accuracy", "loss")}
    sent = [leaf for key, leaf in params.items() if key not in item.network.frozen]
    model_bytes = sum(leaf.nbytes for leaf in (*sent, *buffers.values()))
    metrics |= _efficiency(item, rows, found.accuracy, model_bytes)
    tested = torch.bincount(item.data.test_y, minlength=n_classes).tolist()
    per_client_columns: dict[str, Sequence[object]] = {
        "client": range(len(samples)), "samples": samples.sum(1).tolist(), "accuracy": per_client.tolist(),
        "test_samples": [len(positions) for positions in owned], "test_accuracy": own.tolist(),
    }  # fmt: skip
    if noisy:
        per_client_columns["accuracy_noisy"] = [copy.accuracy for copy in noisy]
    return Measured(
        {"class": item.data.classes, "samples": tested, "accuracy": per_class.tolist()},
        per_client_columns,
        {name: float(value) for name, value in metrics.items()} | {"weights_sha256": weights_sha256(tensors)},
    )


def final_model(tensors: Params) -> tuple[Params, Params]:
    """(parameters, buffers) of the evaluated model in the content of model.safetensors, by the network's names."""
    part = "evaluated/" if any(name.startswith("evaluated/") for name in tensors) else "params/"
    params, buffers = (
        {name.removeprefix(prefix): leaf for name, leaf in tensors.items() if name.startswith(prefix)}
        for prefix in (part, "buffers/")
    )
    return params, buffers


def _spread(name: str, accuracy: Floats) -> dict[str, float]:
    """Worst, 10th percentile and variance over the clients that have an accuracy. Empty if no client has one."""
    known = accuracy[~np.isnan(accuracy)]
    if not len(known):
        return {}
    return {
        f"{name}_worst": known.min(), f"{name}_percentile10": np.percentile(known, 10), f"{name}_variance": known.var(),
    }  # fmt: skip


def _efficiency(item: Item, rows: Sequence[Mapping[str, float]], accuracy: float, model_bytes: int) -> dict[str, float]:
    """FNR-FL's rho, by the bytes sent and by the paper's count. The size of delta as rFedAvg counts it."""
    settings, unit = item.settings, item.unit
    recipe, cohort = settings.composition(unit.recipe), settings.scenarios[unit.scenario].cohort
    mib = sum(row["bytes_up"] + row["bytes_down"] for row in rows) / counts.MIB
    as_fnr = counts.fnr_mib(recipe, model_bytes, cohort * len(rows))
    found = {
        "traffic_mib": mib,
        "rho": counts.rho(accuracy, mib) if mib else None,
        "traffic_mib_as_fnr_counts": as_fnr,
        "rho_as_fnr_counts": None if as_fnr is None else counts.rho(accuracy, as_fnr),
        "delta_bytes_as_rfedavg_counts": counts.delta_bytes(recipe, item.network.feature_size, cohort),
    }
    return {key: value for key, value in found.items() if value is not None}


def _noisy(item: Item, params: Params, buffers: Params) -> list[Evaluation]:
    """The model on one copy of the test set per client, as that client sees images. Empty if all see the same."""
    turns = item.indices.skew.turns
    if item.noise is None and turns is None:
        return []
    found: dict[int, Evaluation] = {}
    # Without noise, clients with the same angle have the same copy.
    copies = turns.tolist() if turns is not None and item.noise is None else range(len(item.indices.clients))
    for client, copy in enumerate(copies):
        if copy not in found:
            drawn = torch.tensor(key(item.unit.seed, "noisy test", client), device=item.device)
            found[copy] = evaluate(item.network, params, buffers, item.test_of(client), read=Read(drawn))
    return [found[copy] for copy in copies]


def _table(columns: Mapping[str, Iterable[object]]) -> str:
    """CSV text of columns by title. The cell of an unknown number is empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(["" if cell != cell else cell for cell in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()
