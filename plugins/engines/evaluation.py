"""Evaluates one model on a whole data set, in batches, with one copy to the host at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.task import Network
from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.data.reading import Read

BATCH = 1000  # samples of a pass


class Evaluation(NamedTuple):
    """Says how good a model is on a data set."""

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
    batch_size: int = BATCH,
    read: Read | None = None,
) -> Evaluation:
    """Eval mode, every sample once: as it is, or as `read` returns it."""
    predicted, loss = _passes(network, params, buffers, samples, batch_size, read)
    return _scored(network, predicted.cpu(), samples.y.cpu(), loss.item())


def pooled(
    network: Network, found: Sequence[Evaluation | None], samples: Sequence[Samples]
) -> Evaluation | None:
    """The evaluations of several models as one, over all samples together; None if there are none.

    `found[k]` is that of model k on `samples[k]`; None where these are none.
    """
    known = [(one, of.y.cpu()) for one, of in zip(found, samples, strict=True) if one is not None]
    if not known:
        return None
    predicted, y = (
        torch.cat([one.predictions for one, _ in known]),
        torch.cat([labels for _, labels in known]),
    )
    loss = sum(one.loss * len(labels) for one, labels in known) / len(y)
    return _scored(network, predicted, y, loss)


def _scored(network: Network, predicted: Tensor, y: Tensor, loss: float) -> Evaluation:
    hits = (predicted == y).double()
    counts = torch.bincount(y, minlength=network.n_classes)
    per_class = torch.bincount(y, weights=hits, minlength=network.n_classes) / counts
    return Evaluation(hits.mean().item(), loss, per_class, predicted)


@torch.no_grad()
def scores(
    network: Network, params: Params, buffers: Params, samples: Samples
) -> tuple[Tensor, Tensor]:
    """(accuracy, mean cross-entropy) as in `evaluate`, 0-d float64.

    They stay on the device: the host does not wait.
    """
    predicted, loss = _passes(network, params, buffers, samples, BATCH, None)
    return (predicted == samples.y).double().mean(), loss


@torch.no_grad()
def totals(
    network: Network, params: Params, buffers: Params, samples: Samples, read: Read | None = None
) -> tuple[Tensor, Tensor]:
    """(hits, cross-entropy), summed over the samples, 0-d float64.

    They stay on the device, as in `scores`.
    """
    predicted, loss = _passes(network, params, buffers, samples, BATCH, read)
    return (predicted == samples.y).double().sum(), loss * len(samples.y)


@torch.no_grad()
def outputs(
    network: Network, params: Params, buffers: Params, samples: Samples, read: Read | None = None
) -> Tensor:
    """The logits of all samples in eval mode, [n, C], on the device."""
    found = _batches(network, params, buffers, samples, BATCH, read)
    return torch.cat([logits for logits, _ in found])


def _passes(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    batch_size: int,
    read: Read | None,
) -> tuple[Tensor, Tensor]:
    """(predictions [n], mean cross-entropy 0-d float64), on the device."""
    predictions, losses = [], []
    for logits, y in _batches(network, params, buffers, samples, batch_size, read):
        predictions.append(logits.argmax(1))
        losses.append(F.cross_entropy(logits, y, reduction="sum"))
    return torch.cat(predictions), torch.stack(losses).double().sum() / len(samples.y)


def _batches(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    batch_size: int,
    read: Read | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [B, C], labels [B]) of each pass, on the device."""
    positions = torch.arange(len(samples.y), device=samples.y.device)
    parts = (torch.split(leaf, batch_size) for leaf in (samples.x, samples.y, positions))
    model = replace(cast("Any", network), plain=True)
    for step, (x, y, index) in enumerate(zip(*parts, strict=True)):
        inputs = x if read is None else read(samples, index, step)
        yield model(params, buffers, inputs, False).logits, y
