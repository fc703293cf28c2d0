"""Checks that an engine did the work: compares its final weights with those of the bare loop."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.harness import Job

# Fraction of the bare loop's distance from the start. Another order of sums can flip a ReLU or a
# maximum, and the difference then grows.
DISTANCE = 0.1
# fraction of the bare loop's decrease of the loss, for engines that shuffle by themselves
LOSS = 0.25

Weights = Mapping[str, Tensor]


@torch.no_grad()
def loss(job: Job, weights: Weights) -> float:
    """Mean cross-entropy over all samples in batches of 100.

    Batch norms use the batch's statistics, as in training.
    """
    module = job.module()
    module.load_state_dict(dict(weights), strict=False)
    batches = zip(torch.split(job.x, 100), torch.split(job.y, 100), strict=True)
    return sum(F.cross_entropy(module(x), y, reduction="sum").item() for x, y in batches) / len(
        job.y
    )


def distance(a: Weights, b: Weights) -> float:
    """Euclidean distance of two models' weights, over the weights in `b`."""
    return math.sqrt(sum((a[key].double() - b[key].double()).square().sum().item() for key in b))


def complaint(job: Job, bare: Weights, weights: Weights, same_order: bool) -> str:
    """The reason why the engine did not do the work, or "".

    `same_order`: whether it keeps the order of batches.
    """
    if not weights.keys() >= job.weights.keys():
        return "did not do the work: weights are missing"
    if same_order:
        off = distance(weights, bare) / distance(job.weights, bare)
        return (
            ""
            if off <= DISTANCE
            else f"did not do the work: its weights are off by {off:.0%} of the way"
        )
    before, best, reached = (loss(job, model) for model in (job.weights, bare, weights))
    off = abs(reached - best) / abs(before - best)
    return (
        ""
        if off <= LOSS
        else f"did not do the work: final loss {reached:.4f}, the bare loop's {best:.4f}"
    )
