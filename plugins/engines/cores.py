"""More threads for passes over all clients' models, while the other processes of a run wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_THREADED_NUMBERS = (
    1 << 20
)  # numbers; a pass over fewer numbers can be faster than waking up a thread

_waiting = 1


def lend(cores: int) -> None:
    """From now on this process may use `cores` cores inside `all_cores`; 1: only its own."""
    global _waiting
    _waiting = cores


@contextmanager
def all_cores(leaf: Tensor) -> Iterator[None]:
    """Only for work with the same bits for any number of threads: elementwise operations, or many
    short sums."""
    own = torch.get_num_threads()
    if own >= _waiting or leaf.numel() < MIN_THREADED_NUMBERS:
        yield
        return
    torch.set_num_threads(_waiting)
    try:
        yield
    finally:
        torch.set_num_threads(own)
