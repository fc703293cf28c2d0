"""Streams of random numbers: keyed, repeatable, apart from each other."""

from __future__ import annotations

import zlib

import numpy as np

from fedml_noniid.data.streams import Streams


def test_many_streams_are_philoxs_own() -> None:
    """Of the keys (first number of the seed sequence, k), whatever was drawn from the others, and
    how much."""
    many = Streams(5, "batches", 3)
    sequence = np.random.SeedSequence(entropy=5, spawn_key=(zlib.crc32(b"batches"), 3))
    first = sequence.generate_state(2, np.uint64)[0]
    for k in (7, 0, 2**40, 7):
        wanted = np.random.Generator(np.random.Philox(key=np.array([first, k], dtype=np.uint64)))
        found = many(k)
        assert found.permutation(50).tolist() == wanted.permutation(50).tolist()
        found.integers(0, 9, size=k % 5, dtype=np.uint32)  # leaves half a number behind
