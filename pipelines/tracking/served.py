"""The code of a registered model: raw samples in, probabilities (or numbers) out.

MLflow copies this file beside each model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedml_noniid.data.dataset import normalised
from fedml_noniid.models import build
from fedml_noniid.models.model import Model

BATCH = 1000  # samples that go through the network at once


class Served(NamedTuple):
    """A network with its parameters and the normalisation of its data set."""

    network: Model
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    mean: tuple[float, ...]  # per channel; empty for text
    std: tuple[float, ...]
    answers: str = "softmax"  # of the outputs; sigmoid for several labels, "" for numbers

    def predict(self, samples: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Probabilities [n, C], or numbers, of samples [n, ...] as the data set's files have them,
        not normalised."""
        x = normalised(torch.from_numpy(np.asarray(samples)), self.mean, self.std)
        with torch.no_grad():
            logits = [
                self.network(self.params, self.buffers, part, False).logits
                for part in torch.split(x, BATCH)
            ]
        outputs = torch.cat(logits)
        if self.answers:
            outputs = outputs.softmax(1) if self.answers == "softmax" else outputs.sigmoid()
        answers: npt.NDArray[np.float32] = outputs.numpy()
        return answers


def _load_pyfunc(path: str) -> Served:
    """The model in the folder `path`; MLflow calls it."""
    about, leaves = (
        json.loads((Path(path) / "network.json").read_text()),
        load_file(Path(path) / "model.safetensors"),
    )
    trees: dict[str, dict[str, Tensor]] = {"params": {}, "buffers": {}, "evaluated": {}}
    for key, leaf in leaves.items():
        tree, _, name = key.partition("/")
        trees[tree][name] = leaf
    params = trees["evaluated"] or trees["params"]
    shape, embedding = tuple(about["shape"]), params.get("embedding.weight")
    network = build(about["model"], shape, len(about["classes"]), about["options"], embedding)
    mean, std = tuple(about["mean"]), tuple(about["std"])
    return Served(network, params, trees["buffers"], mean, std, about["answers"])
