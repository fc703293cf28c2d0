"""Evaluates one model on a whole data set, in batches, with one copy to the host at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.losses import CROSS_ENTROPY, Classification, Loss, Metrics
from fedml_noniid.core.task import Network, Output
from fedml_noniid.core.trees import Params
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.reading import Read
from fedml_noniid.data.types import Ints
from fedml_noniid.metrics import metric_of

BATCH = 1000  # samples of a pass
CLIENT_ACCURACY = "client_accuracy/"  # begins the columns of rounds.csv by client
LOGITS = 1 << 24  # of tokens, at most in a pass of several samples


def check_measured(loss: Loss, vocabulary: int | None = None, **targets: Tensor | None) -> None:
    """UserError unless a loss takes the targets of each part of the data, and its main metric is
    defined there, whatever a model predicts. None for a part that there is not. `vocabulary`: as
    in `Loss.check`."""
    for part, y in targets.items():
        if y is None:
            continue
        loss.check(y, vocabulary)
        if isinstance(loss, Classification):  # the accuracy is defined on all labels
            continue
        constants = [loss.constant(y, value) for value in (0, 1)]
        if loss.per_target:
            try:  # now, not after training
                loss.of_one(constants[0][:, :1], y[:, :1])
            except Exception as error:  # of any kind: the code may be the user's
                raise UserError(
                    f"loss {type(loss).__name__} can't score a single target "
                    f"({type(error).__name__}: {error})",
                    allowed="per_target = False in its class, where targets belong together",
                ) from None
        if any(loss.of_one(constant, y)[loss.metric].isnan() for constant in constants):
            raise UserError(
                f"{metric_of(loss.metric).label} of the {len(y)} {part} samples is not defined",
                allowed="samples that differ in each target, or have some label",
            )


class Evaluation(NamedTuple):
    """Says how good a model is on a data set."""

    metrics: Mapping[str, float]  # of the loss, by name
    loss: float  # the mean
    # [C] float64 on the CPU, NaN for a class without samples; empty where there are no classes
    per_class_accuracy: Tensor
    predictions: Tensor  # [n] int64 on the CPU; of other losses, as in `Loss.predictions`

    @property
    def accuracy(self) -> float:
        """The fraction of hits. KeyError where there are no classes."""
        return self.metrics["accuracy"]


@torch.no_grad()
def evaluate(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    read: Read | None = None,
    loss: Loss = CROSS_ENTROPY,
) -> Evaluation:
    """Eval mode, every sample once: as it is, or as `read` returns it."""
    predicted, mean = _passes(network, (params, buffers), samples, read, loss)
    return _scored(network, loss, predicted.cpu(), samples.y.cpu(), mean.item())


def pooled(
    network: Network,
    evaluations: Sequence[Evaluation | None],
    samples: Sequence[Samples],
    loss: Loss = CROSS_ENTROPY,
) -> Evaluation | None:
    """The evaluations of several models as one, over all samples together; None if there are none.

    `evaluations[k]` is that of model k on `samples[k]`; None where these are none.
    """
    known = [
        (evaluation, of_k.y.cpu())
        for evaluation, of_k in zip(evaluations, samples, strict=True)
        if evaluation
    ]
    if not known:
        return None
    predicted, y = (
        torch.cat([evaluation.predictions for evaluation, _ in known]),
        torch.cat([targets for _, targets in known]),
    )
    mean = sum(evaluation.loss * len(targets) for evaluation, targets in known) / len(y)
    return _scored(network, loss, predicted, y, mean)


def _scored(network: Network, loss: Loss, predicted: Tensor, y: Tensor, mean: float) -> Evaluation:
    metrics = loss.of_one(predicted, y) | loss.of_all(predicted, y)
    numbers = {name: value.item() for name, value in metrics.items()}
    if not loss.classes:
        return Evaluation(numbers, mean, torch.zeros(0, dtype=torch.float64), predicted)
    counts = torch.bincount(y, minlength=network.n_classes)
    hits = (predicted == y).double()
    # `bincount` with weights has no deterministic kernel on a GPU.
    per_class = hits.new_zeros(network.n_classes).index_add_(0, y, hits) / counts
    return Evaluation(numbers, mean, per_class, predicted)


class AccuracyByClient(NamedTuple):
    """Divides the hits on a test set among the clients that own its samples."""

    names: tuple[str, ...]  # [N]
    holder: Tensor  # [n], the client of each sample; N for a sample of nobody
    sizes: Tensor  # [N] float64, the clients' numbers of samples

    @staticmethod
    def from_positions(positions: Mapping[str, Ints], y: Tensor) -> AccuracyByClient:
        """`positions`: of the clients' samples, by name; `y`: the labels of the test set."""
        lists = Ragged.from_lists([*positions.values()])
        holder = torch.full((len(y),), len(lists))
        holder[torch.from_numpy(lists.flat)] = torch.from_numpy(lists.holder)
        sizes = torch.from_numpy(lists.sizes).double()
        return AccuracyByClient((*positions,), holder.to(y.device), sizes.to(y.device))

    def of_hits(self, hits: Tensor) -> Tensor:
        """The accuracies [N] of the hits [n]; NaN for a client without samples."""
        # `bincount` with weights has no deterministic kernel on a GPU.
        sums = self.sizes.new_zeros(len(self.names) + 1).index_add_(0, self.holder, hits.double())
        return sums[:-1] / self.sizes

    def columns(self, accuracies: Tensor) -> dict[str, Tensor]:
        """Columns of rounds.csv; `accuracies`: [N]."""
        names = (f"{CLIENT_ACCURACY}{name}" for name in self.names)
        return dict(zip(names, accuracies.unbind(), strict=True))


@torch.no_grad()
def scores(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    loss: Loss = CROSS_ENTROPY,
    by_client: AccuracyByClient | None = None,
    sizes: list[Tensor] | None = None,
) -> Metrics:
    """The metrics and the mean `loss` as in `evaluate`, and the columns of `by_client`; 0-d
    float64.

    They stay on the device: the host does not wait. `sizes` gets the `largest` of each pass.
    """
    predicted, mean = _passes(network, (params, buffers), samples, None, loss, sizes)
    metrics = loss.of_one(predicted, samples.y) | {"loss": mean}
    if by_client is None:
        return metrics
    return metrics | by_client.columns(by_client.of_hits(predicted == samples.y))


@torch.no_grad()
def totals(
    network: Network,
    params: Params,
    buffers: Params,
    samples: Samples,
    read: Read | None = None,
    loss: Loss = CROSS_ENTROPY,
) -> list[Tensor]:
    """The k statistics of the loss and its sum over the samples, 0-d float64.

    They stay on the device, as in `scores`.
    """
    predicted, mean = _passes(network, (params, buffers), samples, read, loss)
    return [*loss.statistics(predicted, samples.y).unbind(), mean * len(samples.y)]


def largest(network: Network, output: Output) -> Tensor:
    """The largest size of a feature or a logit, 0-d; NaN if there is one."""
    # Without a linear classifier, d is 0 and the features are NaN.
    parts = output.features[:, : network.feature_size], output.logits
    leaves = [leaf for leaf in parts if leaf.numel()]
    return torch.stack([end for leaf in leaves for end in leaf.aminmax()]).abs().max()


def _passes(
    network: Network,
    model: tuple[Params, Params],
    samples: Samples,
    read: Read | None,
    loss: Loss,
    sizes: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(predictions [n, ...], mean loss 0-d float64), on the device."""
    predictions, losses = [], []
    for output, y in _batches(network, model, samples, read):
        predictions.append(loss.predictions(output.logits, y))
        losses.append(loss.total(output.logits, y))
        if sizes is not None:
            sizes.append(largest(network, output))
    return torch.cat(predictions), torch.stack(losses).double().sum() / len(samples.y)


@torch.no_grad()
def outputs_of(
    network: Network, params: Params, buffers: Params, samples: Samples, read: Read | None = None
) -> Tensor:
    """The outputs for all samples in eval mode, [n, C], on the device."""
    batches = _batches(network, (params, buffers), samples, read)
    return torch.cat([output.logits for output, _ in batches])


def _batches(
    network: Network,
    model: tuple[Params, Params],
    samples: Samples,
    read: Read | None,
) -> Iterator[tuple[Output, Tensor]]:
    """(output, targets [B, ...]) of each pass, on the device."""
    positions = torch.arange(len(samples.y), device=samples.y.device)
    plain = replace(cast("Any", network), plain=True)
    # Logits of tokens are many.
    size = max(1, min(BATCH, LOGITS // (plain.n_classes * plain.vocabulary or 1)))
    parts = (torch.split(leaf, size) for leaf in (samples.x, samples.y, positions))
    for step, (x, y, index) in enumerate(zip(*parts, strict=True)):
        inputs = x if read is None else read(samples, index, step)
        yield plain(*model, inputs, False), y
