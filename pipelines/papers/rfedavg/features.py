"""The features that a trained model gives to samples of single clients: what rFedAvg's figure 1 draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from pipelines.experiment import config
from pipelines.experiment.results import Result
from pipelines.papers.targets.measured import Measured
from pipelines.reporting.figures import Values
from plugins.data import datasets
from plugins.data.dataset import Dataset
from plugins.data.indices import read_indices
from plugins.data.types import Ints
from plugins.models import build as build_network

MOST = 300  # samples of a client


class Shown(NamedTuple):
    """What one client's samples look like to the model."""

    client: int
    label: Ints  # [n]
    phi: Values  # [n, d]


def of_clients(measured: Measured, address: Mapping[str, Any], run: Result, classes: Sequence[int]) -> list[Shown]:
    """For each of `classes` the client with most samples of it, no client twice: its training samples of `classes`.

    At most MOST of a client, evenly spaced, so that their mixture is the client's. `phi` is the input of the classifier
    of the run's final model, in eval mode. UserError for data that are neither prepared nor there to be read.
    """
    folder = measured.folder(str(address["study"]))
    settings = config.load(folder)
    data = _data(measured, str(address["study"]), settings.data)
    labels = data.train_y.numpy()
    held = read_indices(folder / "partitions" / f"{run.scenario}-{run.seed}" / "indices.json").clients
    parts = [positions[np.isin(labels[positions], classes)] for positions in held]
    train = settings.train
    network = build_network(
        train.model, tuple(data.train_x.shape[1:]), len(data.classes), train.model_options, data.embedding
    )
    tensors = load_file(folder / "runs" / run.key / "model.safetensors")
    params, buffers = (_of(tensors, kind) for kind in ("params/", "buffers/"))
    found = []
    for client in chosen([np.bincount(labels[part], minlength=len(data.classes)) for part in parts], classes):
        part = parts[client][:: -(-len(parts[client]) // MOST)]
        x = replace(data, train_x=data.train_x[torch.from_numpy(part)]).normalised("train")
        with torch.no_grad():
            phi = network(params, buffers, x, False).features
        found.append(Shown(client, labels[part], phi.double().numpy()))
    return found


def chosen(counts: Sequence[Ints], classes: Sequence[int]) -> list[int]:
    """The client with most samples of each class in turn, of those not taken yet, the first where several have."""
    taken: list[int] = []
    for c in classes:
        left = [client for client in range(len(counts)) if client not in taken]
        taken.append(max(left, key=lambda client: int(counts[client][c])))
    return taken


def discrepancy(shown: Sequence[Shown]) -> float:
    """Equation 2 between two clients' samples, averaged over the pairs: how far their mean features are apart."""
    means = [one.phi.mean(0) for one in shown]
    pairs = [(a, b) for i, a in enumerate(means) for b in means[i + 1 :]]
    return float(np.mean([np.linalg.norm(a - b) for a, b in pairs]))


def _data(measured: Measured, study: str, settings: config.DataSettings) -> Dataset:
    """The study's data, from the data set's own files where they are not prepared any more."""
    path = measured.root / measured.studies[study].data_folder / f"{settings.name}.safetensors"
    if not path.is_file():
        datasets.load(settings.name, measured.folder(study) / settings.root, **settings.options).save(path)
    return Dataset.read(path)


def _of(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(kind): leaf for key, leaf in tensors.items() if key.startswith(kind)}
