"""Local privacy: all that leaves a silo is clipped as one vector, and gets Gaussian noise that only
the silo can draw.

An answer x, all its tensors together, becomes x min(1, C / ||x||) + sigma z. FedML's `dp_args` give
both numbers: sigma is that of its Gaussian mechanism for `epsilon`, `delta` and `sensitivity`, and
C = `sensitivity` / 2, so that any two answers of a silo are at most `sensitivity` apart. One
release, the answer to one question, is (epsilon, delta)-private.

z is not drawn from torch's generator as FedML's is. That one keeps 32 bits of its seed, so the
server tries all seeds and takes the noise off. z is expanded from 256 secret bits of the silo. The
key of a tensor's noise depends on run, settings, silo, C, sigma, question, answer and name. The
question is all of the server's message: round, exchange, model and the rest.
- A question that is asked again, after a restart or on purpose, has the same answer and the same
  noise. So the noise can't be averaged away, and a restart is no further release.
- A question that differs in one bit has other noise. So the noise does not cancel where two answers
  are subtracted.
- Another C or sigma has other noise. Two answers with the same z and two sigmas would give x back.
- The answer counts too: a server may ask one question after different histories (of SCAFFOLD's c_i,
  or before a refinement). It then sees whether the two answers are equal, and nothing else of their
  difference.

The sum is rounded once, from float64. Nothing else guards the low bits of floating-point numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.options import Range
from fedml_noniid.core.randomness import Noised
from fedml_noniid.core.trees import Params
from fedml_noniid.data.files import write_whole

KEY_BYTES = 32  # bytes of a key


def secret(path: Path | None) -> bytes:
    """The secret in a file that only its owner may read; it is made if there is none.

    Raises UserError.

    None: one that only this process knows.
    """
    if path is None:
        return secrets.token_bytes(KEY_BYTES)
    if not path.exists():
        write_whole(path, secrets.token_bytes(KEY_BYTES), private=True)
    try:
        mode, content = path.lstat().st_mode, path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: the secret of a silo's noise can't be read ({error.strerror})"
        ) from None
    if not stat.S_ISREG(mode) or mode & 0o077 or len(content) != KEY_BYTES:
        raise UserError(
            f"{path}: is not the secret of a silo's noise ({len(content)} bytes, mode "
            f"{stat.S_IMODE(mode):o}); allowed: a file of {KEY_BYTES} bytes with mode 600; "
            "restore it, or delete it and begin a new run"
        )
    return content


def derived(key: bytes, *fields: bytes) -> bytes:
    """The key that belongs to these fields.

    Other fields, or the same bytes cut elsewhere, have another.
    """
    made = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"noniid noise 1")
    for field in fields:
        made.update(len(field).to_bytes(8, "little") + field)
    return made.digest()


def gaussian(key: bytes, shape: Sequence[int]) -> Tensor:
    """Independent standard normal numbers, float64. `key` must be used for nothing else.

    Box and Muller: sqrt(-2 ln u) (cos, sin)(2 pi v) with u in (0, 1] and v in [0, 1), both
    multiples of 2^-53. So the largest number is sqrt(2 * 53 ln 2) = 8.57. A normal number is beyond
    it with a probability of 1e-17.
    """
    n = math.prod(shape)
    half = -(-n // 2)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(16 * half))
    u, v = (np.frombuffer(stream, "<u8") >> 11).reshape(2, half) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(u + 2.0**-53)), 2 * np.pi * v
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(pairs[:n]).reshape(tuple(shape))


def run_key(path: Path | None, run: str, terms: str, silo: int) -> bytes:
    """The key of a silo in a run, of the secret in the file `path`. Raises UserError.

    `terms`: the fingerprint of the study's settings. A server may give two runs one name.
    """
    return derived(secret(path), run.encode(), terms.encode(), str(silo).encode())


def noised_with(key: Callable[[], bytes]) -> Noised:
    """As `core.randomness.noised`, with noise that only the holder of `key` can draw.

    It depends on the counter, the standard deviation and the tensors that get it. So training that
    is repeated has the same noise, and any other sum or deviation has another.
    """

    def noised(tree: Params, std: float, counter: Tensor) -> Params:
        at = int(counter).to_bytes(8, "little", signed=True)
        made = derived(key(), b"training", at, float(std).hex().encode(), *_content(tree))
        return {
            name: (
                leaf + std * gaussian(derived(made, name.encode()), leaf.shape).to(leaf.device)
            ).to(leaf.dtype)
            for name, leaf in tree.items()
        }

    return noised


@dataclass(frozen=True)
class Noise:
    """The noise of one silo in one run."""

    key: bytes
    clip: float  # C
    sigma: float

    @staticmethod
    def from_key(key: bytes, sensitivity: float, sigma: float) -> Noise:
        """With a `run_key`."""
        return Noise(key, sensitivity / 2, sigma)

    def digest(self, head: Sequence[object], tensors: Params) -> bytes:
        """256 bits that stand for C, sigma, these values and named tensors."""
        scaled = json.dumps([self.clip, self.sigma, *head])
        return derived(self.key, scaled.encode(), *_content(tensors))

    def release(self, question: bytes, answer: Params, digest: bytes = b"") -> str:
        """Names the answer to a question in the ledger; it tells nothing of the noise. `digest`: of
        the answer, if it is known."""
        return derived(self.key, b"release", question, digest or self.digest([], answer)).hex()

    def protect(
        self,
        answer: Params,
        question: bytes,
        known: Params,
        allowed: Callable[[str], Range],
        digest: bytes = b"",
    ) -> Params:
        """The tensors of an answer, clipped and in noise. `question`: the digest of what was asked;
        `digest`: of the answer, if it is known.

        `known`: values from which tensors count as changes. The server knows them. What comes out
        is moved into the range that is `allowed` for its name, and rounded if it counts something.
        Neither costs privacy. UserError for a number that is not finite, since it has no norm: the
        server may have sent it, in `known`.
        """
        start = {
            name: known[name].double() if name in known else leaf.new_zeros(())
            for name, leaf in answer.items()
        }
        moved = {name: leaf.double() - start[name] for name, leaf in answer.items()}
        for name, leaf in moved.items():
            if not leaf.isfinite().all():
                raise NonFiniteError(
                    f"{name}: is not finite, so it can't be clipped; nothing leaves"
                )
        length = math.sqrt(sum(leaf.square().sum().item() for leaf in moved.values()))
        factor = min(1.0, self.clip / length) if length else 1.0
        key, protected = derived(self.key, question, digest or self.digest([], answer)), {}
        for name, leaf in moved.items():
            limit, like = allowed(name), answer[name]
            noise = self.sigma * gaussian(derived(key, name.encode()), leaf.shape)
            value = (start[name] + factor * leaf + noise).clamp(limit.low, limit.high)
            counts = limit.whole or not like.is_floating_point()
            protected[name] = (value.round() if counts else value).to(like.dtype)
        return protected


def _content(tensors: Params) -> Iterator[bytes]:
    """Names, types, shapes and bytes."""
    for name, leaf in tensors.items():
        yield from (name.encode(), f"{leaf.dtype} {list(leaf.shape)}".encode())
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()
