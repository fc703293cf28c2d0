"""Masks hide a silo's numbers and cancel in the sum of a set."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedml_noniid.core.errors import UserError
from fedml_noniid.governance.secure import masks
from fedml_noniid.governance.secure.masks import PIECE, Announcement, Exchange, Request

EXCHANGE = Exchange("a4b38af3faee982c", "f" * 64, 7)


def parties(silos: int, attempt: int = 0) -> tuple[list[X25519PrivateKey], Request]:
    own = [X25519PrivateKey.from_private_bytes(bytes([k + 1]) * 32) for k in range(silos)]
    keys = tuple(key.public_key().public_bytes_raw() for key in own)
    clients, samples = tuple(range(silos)), tuple(range(40, 40 + silos))
    return own, Request(EXCHANGE, attempt, "question", b"\1\0", clients, samples, keys)


def masked(own: list[X25519PrivateKey], request: Request, numbers: torch.Tensor) -> torch.Tensor:
    found = numbers.clone()
    for k, row in enumerate(found):
        masks.mask(row, own[k], k, request)
    return found


@pytest.mark.parametrize("silos", [2, 4, 12])
def test_the_sum_of_a_set_is_that_of_the_numbers(silos: int) -> None:
    """Also beyond a piece of the stream, and where sums pass 2^63."""
    own, request = parties(silos)
    generator = torch.Generator().manual_seed(silos)
    numbers = torch.randint(-(2**62), 2**62, (silos, PIECE + 5), generator=generator)
    hidden = masked(own, request, numbers)
    assert torch.equal(hidden.sum(0), numbers.sum(0))
    for k in range(silos):  # the sum without one silo is that of nothing
        assert not (hidden.sum(0) - hidden[k] == numbers.sum(0) - numbers[k]).any()


def test_masked_numbers_look_random() -> None:
    """Of zeros: each of the 64 bits is set in half of the numbers, to five standard deviations."""
    own, request = parties(3)
    found = masked(own, request, torch.zeros(3, 4096, dtype=torch.int64))
    for row in found:
        bits = (row[:, None] >> torch.arange(64)) & 1
        assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / 4096**0.5


def test_no_stream_serves_twice() -> None:
    """Another attempt, question, set, run, study, exchange, n or key of anyone has other masks."""
    own, request = parties(3)
    other = X25519PrivateKey.from_private_bytes(bytes([9]) * 32).public_key().public_bytes_raw()
    changes = [{"run": "b"}, {"study": "e"}, {"number": 8}, {"run": EXCHANGE.run + "f"}]
    requests = [
        request,
        request._replace(attempt=1),
        request._replace(question="questions"),
        request._replace(samples=(40, 41, 43)),
        request._replace(levels=b"\0\1"),
        request._replace(keys=(*request.keys[:2], other)),
        request._replace(clients=(0, 1), samples=(40, 41), keys=request.keys[:2]),
        *(request._replace(exchange=EXCHANGE._replace(**change)) for change in changes),
    ]
    rows = torch.zeros(len(requests), 64, dtype=torch.int64)
    for row, changed in zip(rows, requests, strict=True):
        masks.mask(row, own[0], 0, changed)
    assert all(column.unique().numel() == len(requests) for column in rows.T)


@pytest.mark.parametrize("key", [bytes(32), bytes([1]) + bytes(31), b"short"])
def test_a_key_that_gives_everybody_the_same_secret_is_refused(key: bytes) -> None:
    own, request = parties(2)
    with pytest.raises(UserError, match=r"the key of silo 1 \(rank 2\) is none"):
        masks.mask(torch.zeros(2, dtype=torch.int64), own[0], 0, request._replace(keys=(b"", key)))


def test_a_key_that_the_silo_has_not_signed_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    announced = Announcement(EXCHANGE, "question", 1, 70, b"k" * 32)
    signed = masks.signature(key, announced)
    masks.check_signature(key.public_key(), announced, signed)
    for change in (
        {"client": 2},
        {"key": b"j" * 32},
        {"n": 71},
        {"question": "another"},
        {"exchange": EXCHANGE._replace(number=8)},
        {"exchange": EXCHANGE._replace(run="b")},
    ):
        with pytest.raises(UserError, match=r"has not signed this key with n = 7[01]"):
            masks.check_signature(key.public_key(), announced._replace(**change), signed)


# For `parties(2)` and silo 0, by an implementation from the RFCs 7748 (X25519), 5869 (HKDF) and
# 8439 (ChaCha20). Other releases and other programs have
# to make the same masks.
VECTOR = ["9cb4e625481f0bcc", "1aa93a4d1dd128ce", "68c57b259704b977", "bcd28e75ccc8d597"]


def test_masks_are_those_of_the_committed_vector() -> None:
    own, request = parties(2)
    found = torch.zeros(4, dtype=torch.int64)
    masks.mask(found, own[0], 0, request)
    assert [f"{x % 2**64:016x}" for x in found.tolist()] == VECTOR
