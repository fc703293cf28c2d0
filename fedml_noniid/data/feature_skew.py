"""Measures feature skew: how much the samples of a class differ between clients.

The measures take at most MAX_SAMPLES samples, evenly spaced in each client's list, as the client
sees them: in its noise, turned, with its wrong labels. Of more than MAX_SAMPLES / MIN_PER_CLIENT
clients they take that many, evenly spaced. Numbers have six digits, so that they don't
depend on how a machine adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.data.dataset import Dataset, normalised
from fedml_noniid.data.noise import per_sample
from fedml_noniid.data.reading import Read
from fedml_noniid.data.skew import Skew
from fedml_noniid.data.streams import key
from fedml_noniid.data.types import Floats, Ints

MAX_SAMPLES = 6000  # samples, of all clients together
MIN_PER_CLIENT = 2  # samples of a client that are taken, if it has them


def measured(
    data: Dataset, clients: Sequence[Ints], skew: Skew, noise: Tensor | None, seed: int
) -> dict[str, float]:
    """`feature_shift`, `feature_spread` and `class_clarity` of the clients' training samples;
    nothing for text.

    `noise`: the standard deviations of the clients' noise in normalised units, [N, ...].
    """
    if not data.std:
        return {}
    x, y, client = sampled(data, clients, skew, noise, seed)
    measures = {
        "feature_shift": shift(x, y, client),
        "feature_spread": spread(x, y, client),
        "class_clarity": clarity(x, y),
    }
    return {name: float(f"{value:.6g}") for name, value in measures.items()}


def shift(x: Floats, y: Ints, client: Ints) -> float:
    """The share of the variance inside classes that lies between clients: 0 if a class looks alike
    everywhere, to 1.

    (SSB - df_B MSW) / (SSB + SSW), summed over classes and features: epsilon squared of a one-way
    analysis of variance (Kelley 1935), which takes off what clients differ by chance. Below 0 it is
    0. `x` [n, d], `y` and `client` [n].
    """
    counts, within = _scatter(x, y, client)
    total = float(_scatter(x, y, np.zeros_like(client))[1].sum())
    groups, n_classes = np.count_nonzero(counts), np.count_nonzero(counts.sum(0))
    df_between, df_within = groups - n_classes, len(x) - groups
    if df_within == 0 or total == 0:
        return 0.0
    between = total - float(within.sum())
    return max(0.0, (between - df_between * float(within.sum()) / df_within) / total)


def spread(x: Floats, y: Ints, client: Ints) -> float:
    """How unequally the clients' samples of a class scatter: the standard deviation of r_k over
    clients.

    r_k is the deviation of client k's samples from its own class means, divided by that of all
    clients' samples of these classes. Clients count by their degrees of freedom; those without any
    are left out. As `shift`.
    """
    counts, squares = _scatter(x, y, client)
    freedom = np.maximum(counts - 1, 0)
    of_class = squares.sum(0) / np.maximum(freedom.sum(0), 1)  # [C]
    expected, weight = freedom @ of_class, freedom.sum(1)  # [N] each
    counted = (expected > 0) & (weight > 0)
    if not counted.any():
        return 0.0
    r = np.sqrt(squares.sum(1)[counted] / expected[counted])
    weight = weight[counted] / weight[counted].sum()
    return float(np.sqrt((weight * (r - (weight * r).sum()) ** 2).sum()))


def _scatter(x: Floats, y: Ints, client: Ints) -> tuple[Ints, Floats]:
    """Samples per client and class, and the sum of their squared distances to their mean, [N, C]
    each."""
    counts = np.zeros((client.max() + 1, y.max() + 1), np.int64)
    squares = np.zeros(counts.shape)
    for k, c in {*zip(client.tolist(), y.tolist(), strict=True)}:
        part = x[(client == k) & (y == c)]
        counts[k, c], squares[k, c] = len(part), ((part - part.mean(0)) ** 2).sum()
    return counts, squares


def clarity(x: Floats, y: Ints) -> float:
    """The share of samples that are nearest to the mean of their own class: 1 if the means tell the
    classes apart."""
    classes = np.unique(y)
    means = np.stack([x[y == c].mean(0) for c in classes])  # [C, d]
    distance = (means**2).sum(1) - 2 * x @ means.T  # [n, C], less the squared length of x
    return float((classes[distance.argmin(1)] == y).mean())


def sampled(
    data: Dataset, clients: Sequence[Ints], skew: Skew, noise: Tensor | None, seed: int
) -> tuple[Floats, Ints, Ints]:
    """(samples [n, d] in normalised units, labels [n], clients [n]) of the samples that are
    taken."""
    n_taken = min(len(clients), MAX_SAMPLES // MIN_PER_CLIENT)
    taken = np.linspace(0, len(clients) - 1, n_taken).astype(np.int64)
    most = MAX_SAMPLES // n_taken
    sizes = [min(most, len(clients[k])) for k in taken]
    positions = np.concatenate(
        [
            clients[k][np.linspace(0, len(clients[k]) - 1, size).astype(np.int64)]
            for k, size in zip(taken, sizes, strict=True)
        ]
    )
    owner = np.repeat(np.arange(n_taken), sizes)
    classes = torch.from_numpy(data.strata.train)
    raw, labels = skew.applied(clients, data.train_x, classes)
    x = normalised(raw[positions], data.mean, data.std)
    y = labels[positions]
    if noise is not None:
        parts = np.split(np.arange(len(positions)), np.cumsum(sizes)[:-1])
        samples = Samples(x, y, per_sample(noise[taken], parts, x))
        # The name of the stream decides the draws: it stays.
        x = Read(torch.tensor(key(seed, "unlikeness")))(samples, torch.arange(len(x)), 0)
    return x.flatten(1).double().numpy(), y.numpy(), owner
