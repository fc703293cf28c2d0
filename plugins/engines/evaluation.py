"""Evaluation of one model on a whole data set, batched on the device, with one copy to the host at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.core.component import Samples
from plugins.core.reading import Read
from plugins.core.task import Network, Pass
from plugins.core.trees import Params


class Evaluation(NamedTuple):
    """How good a model is on a data set."""

    accuracy: float
    loss: float  # mean cross-entropy
    per_class_accuracy: Tensor  # [C] float64 on the CPU; NaN for a class without samples
    predictions: Tensor  # [n] int64 on the CPU


@torch.no_grad()
def evaluate(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    batch_size: int = 1000,
    read: Read | None = None,
) -> Evaluation:
    """Eval mode, every sample once; as it is, or as `read` sees it."""
    predictions, losses = [], []
    positions = torch.arange(len(samples.y), device=samples.y.device)
    parts = (torch.split(leaf, batch_size) for leaf in (samples.x, samples.y, positions))
    for step, (x, y, index) in enumerate(zip(*parts, strict=True)):
        seen = x if read is None else read(samples.x, samples.noise, index, step)
        run = Pass(params, buffers, train=False, plain=True)
        logits = network.classify(run, network.encode(run, seen))
        predictions.append(logits.argmax(1))
        losses.append(F.cross_entropy(logits, y, reduction="sum"))
    predicted, y = torch.cat(predictions).cpu(), samples.y.cpu()
    hits = (predicted == y).double()
    counts = torch.bincount(y, minlength=network.n_classes)
    per_class = torch.bincount(y, weights=hits, minlength=network.n_classes) / counts
    loss = torch.stack(losses).double().sum().item() / len(y)
    return Evaluation(hits.mean().item(), loss, per_class, predicted)
