"""Counter-based randomness: each draw has its own key, so earlier draws never change it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def _sequence(seed: int, name: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(entropy=seed, spawn_key=(zlib.crc32(name.encode()), *counters))


def stream(seed: int, name: str, *counters: int) -> np.random.Generator:
    """The generator of one stream ("partition", "batches", ...), keyed by seed and counters such as
    (round, client).

    Two calls with the same key give the same numbers; different keys give independent ones
    (Philox).
    """
    return np.random.Generator(np.random.Philox(_sequence(seed, name, counters)))


class Streams:
    """Many streams that differ in one more counter, one at a time, at a tenth of the cost of
    `stream`.

    Each has a Philox key of its own: (a number made of seed, name and counters, `k`).
    """

    def __init__(self, seed: int, name: str, *counters: int) -> None:
        self._philox = np.random.Philox(_sequence(seed, name, counters))
        state: Any = self._philox.state
        # For so few numbers, NumPy reads lists in a third of the time of arrays.
        arrays = {name: array.tolist() for name, array in state["state"].items()}
        self._start: Any = state | {"state": arrays, "buffer": state["buffer"].tolist()}
        self._key: list[int] = arrays["key"]
        self._generator = np.random.Generator(self._philox)

    def __call__(self, k: int) -> np.random.Generator:
        """The k-th stream. It ends the streams given out before."""
        self._key[1] = k
        self._philox.state = self._start
        return self._generator


def torch_stream(seed: int, name: str, *counters: int) -> torch.Generator:
    """As `stream`, for torch: a CPU generator seeded from the key."""
    import torch  # the plan of an experiment does without it

    state = int(_sequence(seed, name, counters).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state)


def key(seed: int, name: str, *counters: int) -> int:
    """As `stream`: a key for `core.randomness`, a signed 64-bit number."""
    return int(_sequence(seed, name, counters).generate_state(1, np.uint64).view(np.int64)[0])
