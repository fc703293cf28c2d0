"""The features of single clients' samples in a trained model, which rFedAvg's figure 1 draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from fedml_noniid.data import datasets
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES, read_indices
from fedml_noniid.data.types import Ints
from fedml_noniid.models import build as build_network
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.figures import Values
from research.runs import Measured

MOST = 300  # samples of a client


class Shown(NamedTuple):
    """One client's samples with their features."""

    client: int
    label: Ints  # [n]
    phi: Values  # [n, d]


def of_clients(
    measured: Measured, address: Mapping[str, Any], run: ItemResult, classes: Sequence[int]
) -> list[Shown]:
    """For each class of `classes`, the client with most samples of it, and that client's training
    samples of `classes`.

    No client is taken twice. At most MOST samples of a client are taken, evenly spaced, so they
    keep the client's mixture. `phi` is the input of the classifier in the run's final model, in
    eval mode. UserError if the data are not prepared and their own files can't be read.
    """
    folder = measured.folder(str(address["study"]))
    settings = config.load(folder)
    data = _data(measured, str(address["study"]), settings.data)
    labels = data.train_y.numpy()
    indices = read_indices(folder / "partitions" / f"{run.scenario}-{run.seed}" / INDICES).clients
    parts = [positions[np.isin(labels[positions], classes)] for positions in indices]
    train = settings.train
    network = build_network(
        train.model,
        tuple(data.train_x.shape[1:]),
        len(data.classes),
        train.model_options,
        data.embedding,
    )
    tensors = load_file(folder / "runs" / run.key / "model.safetensors")
    params, buffers = (_of(tensors, kind) for kind in ("params/", "buffers/"))
    shown = []
    for client in chosen(
        [np.bincount(labels[part], minlength=len(data.classes)) for part in parts], classes
    ):
        part = parts[client][:: -(-len(parts[client]) // MOST)]
        x = replace(data, train_x=data.train_x[torch.from_numpy(part)]).normalised("train")
        with torch.no_grad():
            phi = network(params, buffers, x, False).features
        shown.append(Shown(client, labels[part], phi.double().numpy()))
    return shown


def chosen(counts: Sequence[Ints], classes: Sequence[int]) -> list[int]:
    """For each class in turn, the client with most samples of it among those not taken yet.

    The first wins a tie.
    """
    taken: list[int] = []
    for c in classes:
        left = [client for client in range(len(counts)) if client not in taken]
        taken.append(max(left, key=lambda client: int(counts[client][c])))
    return taken


def discrepancy(shown: Sequence[Shown]) -> float:
    """Equation 2, the distance between the mean features of two clients, averaged over all
    pairs."""
    means = [features.phi.mean(0) for features in shown]
    pairs = [(a, b) for i, a in enumerate(means) for b in means[i + 1 :]]
    return float(np.mean([np.linalg.norm(a - b) for a, b in pairs]))


def _data(measured: Measured, study: str, settings: config.DataSettings) -> Dataset:
    """The study's prepared data.

    If they are missing, they are prepared again from the data set's own files.
    """
    path = measured.root / measured.studies[study].data_folder / f"{settings.name}.safetensors"
    if not path.is_file():
        datasets.load(
            settings.name, measured.folder(study) / settings.root, **settings.options
        ).save(path)
    return Dataset.read(path)


def _of(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(kind): leaf for key, leaf in tensors.items() if key.startswith(kind)}
