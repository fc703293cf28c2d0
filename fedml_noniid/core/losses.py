"""Defines what a loss is, with the metrics of its models, and cross-entropy.

The outputs of a network are [..., B, C], those of a language model [..., B, T, V]. A loss has one
value for each sample, [..., B]. The first metric of a loss is the main one. It is higher where a
model is better.
`fedml_noniid/losses.py` has the other losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.data import cross_entropies, log_softmax, masked_mean
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Range

IGNORED = -100  # the label of a token that does not count, as in torch and transformers
Metrics = dict[str, Tensor]  # 0-d float64 by name


@dataclass(frozen=True)
class Loss:
    """Compares the outputs of a network with the targets of its samples.

    A loss of your own is a subclass of `Classification`, `Regression`, `MultiLabel` or `NextToken`,
    with `values`.
    """

    # Whether a target is the number of a class, int64 [...]; otherwise it is float [..., C].
    classes: ClassVar[bool]
    metrics: ClassVar[tuple[str, ...]]  # of `scores`, the main one first
    # Whether each column of the targets stands for itself, with metrics of its own.
    per_target: ClassVar[bool] = True
    statistics_range: ClassVar[Range] = Range(0)
    # Whether `gradient` is there. A subclass with other values needs a gradient of its own.
    written: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.written = bool({"gradient", "derivative"} & vars(cls).keys())

    @property
    def metric(self) -> str:
        """The main metric."""
        return self.metrics[0]

    def refused(self, y: Tensor, vocabulary: int | None = None) -> str:
        """What is wrong with the targets, or with the outputs for them; "" if nothing is.
        `vocabulary`: that of the network; None: it is not known yet."""
        return "the network gives [B, T, V]; allowed: loss next_token" if vocabulary else ""

    def check(self, y: Tensor, vocabulary: int | None = None) -> None:
        """UserError for targets or outputs that this loss does not take; as `refused`."""
        name = type(self).__name__
        if y.is_floating_point() == self.classes:
            raise UserError(
                f"loss {name}: the targets are {'numbers, not ' if self.classes else ''}classes",
                allowed="mse, huber, bce or next_token; classes are whole numbers or text (of "
                "one-hot rows: y.argmax(1))"
                if self.classes
                else "cross_entropy, or float targets",
            )
        if why := self.refused(y, vocabulary):
            raise UserError(f"loss {name}: {why}")

    def constant(self, y: Tensor, value: float) -> Tensor:
        """The predictions of a model that answers everything with `value`."""
        return torch.full_like(y, value)

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample, [..., B, C] and [..., B(, C)] -> [..., B]."""
        raise NotImplementedError

    def mean(self, outputs: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """The mean over the samples of a batch, [..., B, C] -> [...]; `mask` [..., B]."""
        return masked_mean(self.values(outputs, y), mask, outputs.ndim - 2)

    def gradient(self, outputs: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(gradient of `mean` by the outputs, `values`): with autograd's bits, and faster."""
        raise NotImplementedError

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The sum over samples, [n, C] -> 0-d."""
        return self.values(outputs, y).sum()

    def predictions(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What metrics take of the outputs, [n, C] -> [n(, C)]."""
        return outputs

    def n_statistics(self, n_outputs: int) -> int:
        """k."""
        raise NotImplementedError

    def answers(self, outputs: Tensor) -> Tensor:
        """What a user is told, [n, C]: probabilities, or the outputs as they are."""
        return outputs

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        """What `scores` takes of some samples, [k] float64."""
        raise NotImplementedError

    def scores(self, statistics: Tensor, n: Tensor) -> Metrics:
        """The metrics over M sets of samples together: `statistics` [M, k], numbers of samples
        `n` [M]. NaN where a metric is not defined."""
        raise NotImplementedError

    def of_sums(self, sums: Tensor, n: Tensor) -> Metrics:
        """The metrics and the mean `loss` over M sets: statistics and summed loss [M, k + 1]."""
        return self.scores(sums[:, :-1], n.double()) | {"loss": sums[:, -1].sum() / n.sum()}

    def of_one(self, predictions: Tensor, y: Tensor) -> Metrics:
        """The metrics of one set of samples, as `scores` has them."""
        return self.scores(
            self.statistics(predictions, y).unsqueeze(0),
            torch.full((1,), len(y), dtype=torch.float64, device=y.device),
        )

    def of_all(self, predictions: Tensor, y: Tensor) -> Metrics:
        """Further metrics, which need all predictions at once."""
        return {}


class Classification(Loss):
    """The outputs are logits of classes; the metric is the accuracy."""

    classes = True
    metrics = ("accuracy",)

    def predictions(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(1)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def n_statistics(self, n_outputs: int) -> int:
        return 1

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Hits."""
        return (predictions == y).double().sum().view(1)

    def scores(self, statistics: Tensor, n: Tensor) -> Metrics:
        return {"accuracy": statistics[:, 0].sum() / n.sum()}

    # In fewer launches than above: these run in each round.

    def of_sums(self, sums: Tensor, n: Tensor) -> Metrics:
        return dict(zip(("accuracy", "loss"), sums.sum(0) / n.sum(), strict=True))

    def of_one(self, predictions: Tensor, y: Tensor) -> Metrics:
        return {"accuracy": (predictions == y).double().mean()}


class CrossEntropy(Classification):
    """-log p_y."""

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropies(outputs, y)

    def total(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="sum")

    def gradient(self, outputs: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_p, target = log_softmax(outputs), y.reshape(1, -1)
        losses = log_p.gather(0, target).neg_().reshape(y.shape)
        grad = torch.zeros_like(log_p)
        if mask is None:
            grad.scatter_(0, target, -1 / y.shape[-1])
        else:
            grad.scatter_(0, target, -fraction_of(mask, log_p.dtype).reshape(1, -1))
        grad = torch._log_softmax_backward_data(grad, log_p, 0, log_p.dtype)
        return grad.t().reshape(outputs.shape), losses


def fraction_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The fraction of each sample in the mean of its batch, [..., B]."""
    mask = mask.to(dtype)
    return mask / mask.sum(-1, keepdim=True).clamp(min=1)


CROSS_ENTROPY = CrossEntropy()
