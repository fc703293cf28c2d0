"""Finds losses by name: cross-entropy, those of regression and of several labels, a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.losses import IGNORED, CrossEntropy, Loss, Metrics, fraction_of
from fedml_noniid.core.losses import Classification as Classification
from fedml_noniid.core.options import Positive, Range, check_options
from fedml_noniid.own_code import find


class Elementwise(Loss):
    """A mean over the C outputs, each with a target of its own."""

    classes = False

    def elements(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each output, [..., B, C]."""
        raise NotImplementedError

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Of `elements` by the outputs, [..., B, C]."""
        raise NotImplementedError

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.elements(outputs, y).mean(-1)

    def gradient(self, outputs: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        slope, n, c = self.derivative(outputs, y), y.shape[-2], y.shape[-1]
        if mask is None:
            fraction = slope.new_full((), 1 / n) / c
        else:
            fraction = fraction_of(mask, slope.dtype).unsqueeze(-1) / c
        return slope * fraction, self.values(outputs, y)


class Regression(Elementwise):
    """Targets are numbers. The metrics are R^2 (the mean over the targets, as in scikit-learn),
    the mean absolute error and the root of the mean squared error.

    R^2 is NaN where a target is constant.
    """

    metrics = ("r2", "mae", "rmse")
    statistics_range = Range()

    def n_statistics(self, n_outputs: int) -> int:
        return 4 * n_outputs

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        """By target: sums of squared and of absolute errors, the mean, the sum of squares around
        it; [4 t]."""
        error, y = predictions.double() - y.double(), y.double()
        mean = y.mean(0)
        parts = error.square().sum(0), error.abs().sum(0), mean, (y - mean).square().sum(0)
        return torch.cat(parts)

    def scores(self, statistics: Tensor, n: Tensor) -> Metrics:
        squared, absolute, mean, around = statistics.view(len(n), 4, -1).unbind(1)  # [M, t]
        some, total = n.unsqueeze(1), n.sum()
        overall = (some * mean).sum(0) / total
        spread = (around + some * (mean - overall).square()).sum(0)  # [t], Chan et al. 1979
        r2 = 1 - squared.sum(0) / torch.where(spread > 0, spread, torch.nan)
        every = total * statistics.shape[1] / 4
        return {
            "r2": r2.mean(),
            "mae": absolute.sum() / every,
            "rmse": (squared.sum() / every).sqrt(),
        }


class MSE(Regression):
    """(f - y)^2."""

    def elements(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs, y, reduction="none")

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 2 * (outputs - y)


@dataclass(frozen=True)
class Huber(Regression):
    """(f - y)^2 / 2 up to a distance of delta, and delta (|f - y| - delta / 2) beyond
    (Huber 1964)."""

    delta: Positive = 1.0  # in the unit of the targets

    def elements(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs, y, reduction="none", delta=self.delta)

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).clamp(-self.delta, self.delta)


class MultiLabel(Elementwise):
    """Targets are 0 or 1 for each label, which a sample has if its logit is above 0. The metrics
    are macro-F1, over the labels that a sample has or is said to have, and micro-F1."""

    metrics = ("macro_f1", "micro_f1")

    def refused(self, y: Tensor, vocabulary: int | None = None) -> str:
        why = "" if bool(((y == 0) | (y == 1)).all()) else "a target is neither 0 nor 1"
        return super().refused(y, vocabulary) or why

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def n_statistics(self, n_outputs: int) -> int:
        return 3 * n_outputs

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        """By label: hits, samples that are said to have it, samples that have it; [3 C]."""
        said, true = predictions > 0, y > 0
        return torch.cat([hits.double().sum(0) for hits in (said & true, said, true)])

    def scores(self, statistics: Tensor, n: Tensor) -> Metrics:
        hits, said, true = statistics.sum(0).view(3, -1)
        occurring = said + true
        f1 = 2 * hits / torch.where(occurring > 0, occurring, torch.nan)  # [C]
        return {"macro_f1": f1.nanmean(), "micro_f1": 2 * hits.sum() / occurring.sum()}

    def of_all(self, predictions: Tensor, y: Tensor) -> Metrics:
        """`auc`: the mean over the labels that some samples have and others have not; NaN if there
        is none."""
        from sklearn.metrics import roc_auc_score

        has = y > 0
        mixed = has.any(0) & ~has.all(0)  # [C]
        areas = [roc_auc_score(has[:, c], predictions[:, c]) for c in mixed.nonzero().flatten()]
        return {"auc": torch.tensor(areas, dtype=torch.float64).mean()}


class BCE(MultiLabel):
    """Binary cross-entropy of a logit: -y log p - (1 - y) log(1 - p)."""

    def elements(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none")

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.sigmoid() - y


class NextToken(Loss):
    """-log p of the next token, the mean over a batch's tokens, as in transformers (`labels=`).

    Logits [..., B, T, V] of position t meet the label of t + 1. A label is the number of a token,
    or IGNORED. The metrics are over all tokens: the fraction of those that have the largest logit,
    and the perplexity exp(mean of -log p). `values` are the means of the samples.
    """

    classes = False
    per_target = False
    metrics = ("token_accuracy", "perplexity")

    def refused(self, y: Tensor, vocabulary: int | None = None) -> str:
        if vocabulary == 0:
            return "the network gives [B, n_classes]; allowed: [B, T, V], logits of each next token"
        allowed = "whole numbers from 0" if vocabulary is None else f"0 to {vocabulary - 1}"
        most = torch.inf if vocabulary is None else vocabulary - 1
        wrong = y[(y != y.round()) | (y > most) | ((y < 0) & (y != IGNORED))].flatten()
        return (
            f"a target is {wrong[0]:g}; allowed: tokens, {allowed}, or -100" if len(wrong) else ""
        )

    def constant(self, y: Tensor, value: float) -> Tensor:
        return y.new_full((*y[:, 1:].shape, 2), value)

    def tokens(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(-log p of the labels, which of them count), both [..., B, T - 1]."""
        labels = y[..., 1:]
        counted = labels != IGNORED
        log_p = outputs[..., :-1, :].log_softmax(-1)
        log_p = log_p.gather(-1, labels.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
        return torch.where(counted, -log_p, 0), counted.to(log_p.dtype)

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses, counted = self.tokens(outputs, y)
        return losses.sum(-1) / counted.sum(-1).clamp(min=1)

    def mean(self, outputs: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        losses, counted = self.tokens(outputs, y)
        if mask is not None:
            counted = counted * mask.unsqueeze(-1).to(counted.dtype)
        return (losses * counted).sum((-2, -1)) / counted.sum((-2, -1)).clamp(min=1)

    def predictions(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Hits and -log p of the labels, [n, T - 1, 2]."""
        hits = outputs[:, :-1].argmax(-1) == y[:, 1:]
        losses, _ = self.tokens(outputs, y)
        return torch.stack([hits.to(losses.dtype), losses], -1)

    def answers(self, outputs: Tensor) -> Tensor:
        """The token with the largest logit behind each position, [n, T]."""
        return outputs.argmax(-1)

    def n_statistics(self, n_outputs: int) -> int:
        return 3

    def statistics(self, predictions: Tensor, y: Tensor) -> Tensor:
        """Hits, the sum of -log p, tokens that count."""
        counted = (y[:, 1:] != IGNORED).double()
        sums = (predictions.double() * counted.unsqueeze(-1)).sum((0, 1))
        return torch.cat([sums, counted.sum().view(1)])

    def scores(self, statistics: Tensor, n: Tensor) -> Metrics:
        hits, losses, counted = statistics.sum(0)
        return {"token_accuracy": hits / counted, "perplexity": (losses / counted).exp()}


LOSSES: Mapping[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "mse": MSE,
    "huber": Huber,
    "bce": BCE,
    "next_token": NextToken,
}


def loss_of(setting: object) -> Loss:
    """A loss by name, or by `name` with its options; one of your own as package.module:name.

    UserError.
    """
    options = dict(setting) if isinstance(setting, Mapping) else {"name": setting}
    kind = find("loss", options.pop("name", setting), LOSSES, Loss)
    check_options(kind, options)
    return kind(**options)
