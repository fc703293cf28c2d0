"""What a client sees in place of the training samples that it holds: wrong labels, turned images.

The partition fixes it and writes it into its file. So a simulation and a silo see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.data.drift import Drift
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.rotation import turned
from fedml_noniid.data.types import Ints


@dataclass(frozen=True, eq=False)
class Skew:
    """The changes to the clients' samples. Nobody else's samples change."""

    # each client's labels of its samples, in the order of its positions
    labels: Sequence[Ints] | None = None
    turns: Ints | None = None  # quarter turns of each client's images, counter-clockwise, [N]
    drift: Drift | None = None  # how their labels change with the round

    def applied(self, clients: Sequence[Ints], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The training set as its holders see it before any drift.

        `clients`: positions in `x` [n, ...], `y` [n].

        No position is in two clients. Positions that no client holds stay as they are.
        """
        if self.labels is not None:
            y = y.index_put((_index(clients, y),), _index(self.labels, y))
        if self.turns is not None:
            lists = Ragged.from_lists(clients)
            of_sample = np.repeat(self.turns, lists.sizes)
            for quarters in range(1, 4):
                index = torch.from_numpy(lists.flat[of_sample == quarters]).to(x.device)
                if len(index):
                    x = x.index_put((index,), turned(x[index], quarters))
        return x, y

    def tests(self, clients: Sequence[Ints], x: Tensor, y: Tensor) -> list[Samples]:
        """Each client's own test samples as it sees them, with the true labels.

        `clients`: positions in `x`, `y`.
        """
        turns = [0] * len(clients) if self.turns is None else self.turns.tolist()
        indices = [torch.from_numpy(mine).to(y.device) for mine in clients]
        return [
            Samples(turned(x[index], turn), y[index])
            for index, turn in zip(indices, turns, strict=True)
        ]


CLEAN = Skew()


def _index(parts: Sequence[Ints], like: Tensor) -> Tensor:
    """All numbers in one tensor on the device of `like`, int64."""
    return torch.from_numpy(Ragged.from_lists(parts).flat).to(like.device)
