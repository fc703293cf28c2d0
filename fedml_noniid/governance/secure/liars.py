"""Finds the silo that has added more to a sum than it said, without a look at any silo's numbers.

Beside its counts, a silo says the norms of the parts of its answer. A sum that is far longer than
these norms allow has an addend that was not as its silo said. Then the server draws a nonce, which
makes random signs. It asks each silo for its masked numbers again, whose SHA-256 it has kept, and
for their masks' share in the signed sums. The sum of a silo's masked numbers with these signs
is the same sum over its numbers, and over each stream of its masks. Of a stream, two silos know
that sum. So the server takes the sums over a silo's streams off:
- Two silos that differ about their stream: the one that differs from more silos has lied.
- What is left is the signed sum of the silo's own numbers. `SUMS` of them show how long they are.

So the server learns `SUMS` random signed sums of each level of each part of an answer. A silo tells
them once of a sum. The server chooses the nonce, but no nonce makes the signs of single numbers
zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

SUMS = 8  # with other signs each
NONCE = torch.zeros(32, dtype=torch.uint8)  # what one is like
# The server asks if a sum is so many times longer than the silos' norms allow. A silo has lied if
# its numbers are so many times longer than its own norm. The mean square of 8 signed sums of an
# honest silo is beyond 2.5^2 times the square of the norm with a probability of 4e-8.
TOO_LONG, LIED = 4.0, 2.5
PIECE = 1 << 15  # numbers
HALF = (1 << 32) - 1
# [256, SUMS]: the signs that a random byte stands for.
SIGNS = 1 - 2 * ((np.arange(256)[:, None] >> np.arange(SUMS)) & 1)


def signed_sums(numbers: Tensor, parts: Sequence[tuple[object, int]], nonce: bytes) -> Tensor:
    """The sums of the numbers of each part with random signs, modulo 2^64: int64 [P, SUMS].

    `numbers`: int64 [L]. `parts`: to which part so many numbers belong, from the first to the last.
    """
    sums = {part: np.zeros(SUMS, dtype=np.int64) for part, _ in parts}
    cipher = Cipher(algorithms.ChaCha20(nonce, bytes(16)), mode=None).encryptor()
    rows = torch.split(numbers, [size for _, size in parts])
    for (part, _), row in zip(parts, rows, strict=True):
        for piece in torch.split(row, PIECE):
            drawn = np.frombuffer(cipher.update(bytes(len(piece))), dtype=np.uint8)
            values = piece.numpy()
            # By drawn byte: the sums of both halves, exact in float64.
            high, low = (np.bincount(drawn, half, 256) for half in (values >> 32, values & HALF))
            sums[part] += ((high.astype(np.int64) << 32) + low.astype(np.int64)) @ SIGNS
    return torch.from_numpy(np.array([*sums.values()], dtype=np.int64).reshape(-1, SUMS))


def disputed(clients: Sequence[int], shown: Mapping[int, Tensor]) -> list[int]:
    """Those that differ from most others about their common streams; nobody if all agree.

    `clients`: of the sum. `shown`: by client that has answered, its signed sums over each stream,
    int64 [M, P, SUMS]; its own row is 0.
    """
    differs = Counter[int]()
    for (i, client), (j, other) in combinations(enumerate(clients), 2):
        if {client, other} <= {*shown} and not torch.equal(shown[client][j], shown[other][i]):
            differs.update((client, other))
    most = max(differs.values(), default=0)
    return [client for client in clients if differs[client] == most > 0]


def own(masked: Tensor, streams: Tensor, position: int) -> Tensor:
    """A silo's signed sums over its own numbers, int64 [P, SUMS]: those over its masked numbers,
    without those over its streams [M, P, SUMS]. `position`: among the silos of the sum."""
    signs = torch.ones(len(streams), 1, 1, dtype=torch.int64)
    signs[:position] = -1  # a silo subtracts the stream that it shares with an earlier one
    return masked - (signs * streams).sum(0)


def has_lied(sums: Tensor, norms: Iterable[float]) -> bool:
    """Whether the numbers of a part are far longer than the silo said.

    `sums`: its own, int64 [P, SUMS]. `norms`: of each part, in the same integers.
    """
    lengths = sums.double().square().mean(1).sqrt().tolist()
    return any(length > LIED * norm for length, norm in zip(lengths, norms, strict=True))
