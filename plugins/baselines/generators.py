"""Parts that FedGen and FedFTG share: a conditional generator, its diversity loss, and labels drawn
by counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.component import Answer, Client, Component, Needs, Trace
from fedml_noniid.core.data import one_hot
from fedml_noniid.core.options import Range
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import Params


@dataclass(frozen=True)
class LabelCounts(Component):
    """Sends each client's label counts, by which the server draws labels."""

    needs: ClassVar[Needs] = Needs(local_set=True, classes=True)
    ranges: ClassVar[Mapping[str, Range]] = {"counts": Range(0, whole=True)}

    def report(self, trace: Trace, client: Client) -> Answer:
        """n_k^y, [C]."""
        counts = client.local_set.class_counts(client.task.network.n_classes)
        return Answer({"counts": counts.to(next(iter(trace.params.values())).dtype)})


def init(
    key: Tensor, noise_dim: int, n_classes: int, hidden: int, n_out: int, like: Tensor
) -> Params:
    """The weights of `generate`, as `torch.nn.Linear` draws them: uniform in +-1/sqrt(inputs)."""
    shapes = {
        "w1": (hidden, noise_dim + n_classes),
        "b1": (hidden,),
        "w2": (n_out, hidden),
        "b2": (n_out,),
    }
    bounds = {"w1": noise_dim + n_classes, "b1": noise_dim + n_classes, "w2": hidden, "b2": hidden}
    return {
        name: (2 * uniform(fold(key, i), *shape, dtype=like.dtype) - 1) / math.sqrt(bounds[name])
        for i, (name, shape) in enumerate(shapes.items())
    }


def generate(
    generator: Params, eps: Tensor, y: Tensor, n_classes: int, slope: float = 0.0
) -> Tensor:
    """W2 a(W1 [eps, onehot(y)] + b1) + b2, where a is the ReLU with `slope` below 0; [B, noise],
    [B] -> [B, n_out]."""
    inputs = torch.cat([eps, one_hot(y, n_classes, eps.dtype)], dim=1)
    h = F.leaky_relu(F.linear(inputs, generator["w1"], generator["b1"]), slope)
    return F.linear(h, generator["w2"], generator["b2"])


def diversity(eps: Tensor, out: Tensor) -> Tensor:
    """exp(-mean over pairs (i, j) of mean (eps_i - eps_j)^2 times mean |out_i - out_j|)."""
    eps_apart = (eps[:, None] - eps).square().mean(2)  # [B, B]
    out_apart = (out[:, None] - out).abs().mean(2)
    return torch.exp(-(eps_apart * out_apart).mean())


def draw_labels(key: Tensor, counts: Tensor, n: int) -> Tensor:
    """`n` labels with p(y) proportional to sum_k n_k^y; counts [M, C]."""
    # As whole numbers: a GPU adds up floats in no fixed order.
    up_to = counts.sum(0, dtype=torch.int64).cumsum(0).double()  # [C]
    drawn = torch.searchsorted(up_to, uniform(key, n, dtype=torch.float64) * up_to[-1], right=True)
    return drawn.clamp(max=len(up_to) - 1)  # silos may say that they have nothing


def label_weights(counts: Tensor) -> Tensor:
    """alpha_k^y = n_k^y / sum_i n_i^y, [M, C]; 0 for a label that no client has."""
    return counts / counts.sum(0).clamp(min=1)
