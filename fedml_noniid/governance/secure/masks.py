"""Masks that hide one silo's numbers, and cancel in the sum over a set of silos.

Each two silos of a set share a secret: X25519 of two keys that serve one exchange. HKDF makes a
seed of it, and ChaCha20 makes the seed a stream of 64-bit integers. One silo adds the stream, the
other subtracts it, modulo 2^64. So a masked vector tells nothing by itself, and the sum over the
whole set is that of the numbers, to the bit.

The seed is bound to all of a request: run, study, exchange, attempt, question, levels, silos, their
numbers of samples and their keys. So no stream serves twice, and the masks of silos that were asked
different questions do not cancel. A silo signs its key, its number of samples and the question with
the key of its certificate. So a server can't put in keys or numbers of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.errors import UserError

PIECE = 1 << 15  # numbers: their 256 kB of stream stay in the cache
ZEROS = bytes(8 * PIECE)
SIGNATURE_BYTES = 64
SIGN, SEED = b"noniid secure sum, key 2", b"noniid secure sum, seed 2"


class Exchange(NamedTuple):
    """What one key of a silo is for."""

    run: str
    study: str  # its SHA-256
    number: int


class Announcement(NamedTuple):
    """What a silo signs before a sum."""

    exchange: Exchange
    question: str  # what it was asked, see `silo.question_of`
    client: int
    n: int  # its samples
    key: bytes  # 32 bytes of X25519

    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        numbers = (self.question, self.client, self.n)
        return _digest(SIGN, *_fields(self.exchange), *map(_text, numbers), self.key)


class Request(NamedTuple):
    """A sum that the server asks for."""

    exchange: Exchange
    attempt: int  # at a sum of this exchange, from 0
    question: str  # what all silos of the set were asked
    levels: bytes  # which there are, see `vectors.together`
    clients: tuple[int, ...]  # the set, ascending
    samples: tuple[int, ...]  # of the same clients
    keys: tuple[bytes, ...]  # of the same clients

    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        numbers = (self.attempt, self.question, *self.clients, *self.samples)
        fields = (*_fields(self.exchange), *map(_text, numbers), self.levels, *self.keys)
        return _digest(SEED, *fields)


def signature(key: ec.EllipticCurvePrivateKey, announced: Announcement) -> bytes:
    """Signs an announcement with the key of the silo's certificate: 64 bytes."""
    signed = key.sign(announced.digest(), ec.ECDSA(SHA256()))
    return b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(signed))


def check_signature(key: ec.EllipticCurvePublicKey, announced: Announcement, signed: bytes) -> None:
    """Checks that the holder of `key` has signed an announcement. Raises UserError."""
    try:
        numbers = (int.from_bytes(half, "big") for half in (signed[:32], signed[32:]))
        key.verify(encode_dss_signature(*numbers), announced.digest(), ec.ECDSA(SHA256()))
    except InvalidSignature:
        client = announced.client
        raise UserError(
            f"silo {client} (rank {client + 1}) has not signed this key with n = {announced.n} for "
            "this question"
        ) from None


def mask(numbers: Tensor, own: X25519PrivateKey, client: int, request: Request) -> None:
    """Adds the masks of `client` for a set of which it is one to `numbers`, int64 [L], in place.

    UserError if a key is none.
    """
    for other, seed in _seeds(own, client, request):
        _add_stream(numbers.numpy(), seed, np.add if client < other else np.subtract)


def streams(own: X25519PrivateKey, client: int, request: Request, length: int) -> Iterator[Tensor]:
    """The streams that `client` shares with each silo of a set, int64 [L] each; its own is 0."""
    seeds = dict(_seeds(own, client, request))
    for other in request.clients:
        stream = torch.zeros(length, dtype=torch.int64)
        if other in seeds:
            _add_stream(stream.numpy(), seeds[other], np.add)
        yield stream


def _seeds(own: X25519PrivateKey, client: int, request: Request) -> Iterator[tuple[int, bytes]]:
    """(another silo of a set, the seed that `client` shares with it)."""
    info = request.digest()
    for other, public in zip(request.clients, request.keys, strict=True):
        if other != client:
            secret = shared(own, other, public)
            yield other, HKDF(SHA256(), 32, salt=None, info=info).derive(secret)


def shared(own: X25519PrivateKey, other: int, public: bytes) -> bytes:
    """The secret that a silo shares with another one. UserError if the other one's key is none."""
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # not 32 bytes, or a point that gives everybody the same secret
        raise UserError(f"the key of silo {other} (rank {other + 1}) is none") from None


def _add_stream(values: NDArray[np.int64], seed: bytes, put: np.ufunc) -> None:
    """values += or -= the stream of a seed, which must serve once: its nonce is 0."""
    cipher = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    stream = np.empty(PIECE, dtype="<i8")
    into = stream.data.cast("B")
    for at in range(0, len(values), PIECE):
        part = values[at : at + PIECE]
        size = 8 * len(part)
        cipher.update_into(memoryview(ZEROS)[:size], into[:size])
        put(part, stream[: len(part)], out=part)


def _fields(exchange: Exchange) -> tuple[bytes, ...]:
    return _text(exchange.run), _text(exchange.study), _text(exchange.number)


def _text(value: object) -> bytes:
    return str(value).encode()


def _digest(*fields: bytes) -> bytes:
    """SHA-256 of fields: other ones, or the same bytes cut elsewhere, have another."""
    made = hashlib.sha256()
    for field in fields:
        made.update(len(field).to_bytes(8, "little") + field)
    return made.digest()
