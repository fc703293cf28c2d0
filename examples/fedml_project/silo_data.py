"""The data of each process: here digits of scikit-learn, sorted by class, so they are non-IID.

A real silo reads its own files here.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

TEST = 297  # samples of the server


def silos_of(labels: NDArray[np.int64], silos: int) -> list[NDArray[np.int64]]:
    """The positions of each silo in the training set, ascending, as in a simulation."""
    by_class = np.argsort(labels, kind="stable")
    return [np.sort(part) for part in np.array_split(by_class, silos)]


def arrays() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images [n, 1, 8, 8] from 0 to 1, and labels [n]; the last TEST of them are for the server."""
    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)


def loader(rank: int, silos: int, batch_size: int) -> tuple[str, DataLoader]:
    """(what the data are for, batches): rank 0 is the server.

    A silo's loader may shuffle. The pair reads it in the order of its data set.
    """
    x, y = arrays()
    n = len(y) - TEST
    rows = silos_of(y[:n], silos)[rank - 1] if rank else np.arange(n, len(y))
    data = TensorDataset(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]))
    return ("train" if rank else "test"), DataLoader(
        data, batch_size=batch_size, shuffle=bool(rank)
    )
