"""More threads for passes over all clients' models, where the other processes of a run wait for them to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MANY = 1 << 20  # numbers; a pass over fewer takes less time than waking up a thread may

_waiting = 1


def lend(cores: int) -> None:
    """From now on this process may use so many cores wherever it says `all_cores`; 1: none but its own."""
    global _waiting
    _waiting = cores


@contextmanager
def all_cores(leaf: Tensor) -> Iterator[None]:
    """Only for what has the same bits with any number of threads: element by element, or many short sums."""
    own = torch.get_num_threads()
    if own >= _waiting or leaf.numel() < MANY:
        yield
        return
    torch.set_num_threads(_waiting)
    try:
        yield
    finally:
        torch.set_num_threads(own)
