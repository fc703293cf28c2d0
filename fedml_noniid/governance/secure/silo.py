"""A silo's half of secure sums: it answers a question with its counts and a key, and later adds its
masked vector to the sum over a set that the server names.

Sums may be subtracted from each other. So a silo adds an answer to two sets at most. The second one
is a part of the first, smaller by at least `least` silos, and larger than half of it (`admits`).
Then no combination of sums tells more than sums over `least` silos or more:
- Two sets that are complete and share a silo: that silo has added its answer to both. So one is a
  part of the other, and what is left of the larger one has `least` silos or more.
- No set has two others within it. Both would be larger than half of it, so they would share a
  silo. That silo would have added its answer three times. For the same reason no set lies within
  two others.
- So the complete sets fall into groups without a common silo: one set, or a set and its part. All
  combinations of their sums are combinations of the sums over the part and over the rest. Each of
  these has `least` silos or more.
A set that was begun and never completed tells nothing, since its masks stay. It takes one of the
two places of the silos that have added to it.

All of this is about one answer of each silo, and about silos that keep the rule. A server that lies
may ask all silos for another answer, and add it up over other sets. It can't ask the silos of one
sum different questions (parameters, buffers, shared tensors), or choose the weights' total: each
silo signs both, and checks the others. Rows of `each` differ from silo to silo, so they are not
compared; feddyn_authors alone has some and works with sums.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.credentials import certificates
from fedml_noniid.data.files import opened, writing
from fedml_noniid.deploy import outliers, wire
from fedml_noniid.deploy.settings import Terms
from fedml_noniid.deploy.wire import Down, Up
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.streaming import Weighing
from fedml_noniid.governance.secure import liars, masks, vectors
from fedml_noniid.privacy.chained import ChainedLines

SUM = "sum"  # the job of adding up
CHECK = "check"  # the job of showing that one has added what one said, see `liars`
COUNTS = ("n", "steps", "loss")  # of a reply; the server sees them
REMEDY = (
    "it says which sums this silo has been part of; restore both files from a backup, or move them "
    "away and start a new run with another seed"
)
CERTIFICATE_BYTES = 2048  # of a certificate as DER, with zeros behind it
# What a silo sends beside its counts.
ANNOUNCED = {"key": 32, "signature": masks.SIGNATURE_BYTES, "certificate": CERTIFICATE_BYTES}


class _Made(NamedTuple):
    """What a silo holds between its two answers."""

    exchange: int
    job: str
    question: str  # as from `question_of`
    own: str  # what this silo alone was asked
    answer: str  # the SHA-256 of what is added up
    leaves: Params  # the whole reply
    levels: Tensor  # of its tensors, as from `vectors.levels`
    key: X25519PrivateKey
    added: tuple[masks.Request, Tensor] | None = None  # the sum, and the levels that are there


class SecureSilo:
    """Stands between a silo and its connection: `answered` in place of the silo's own."""

    def __init__(
        self,
        answered: Callable[[Down], Up],
        terms: Terms,
        rank: int,
        kit: Path,
        names: tuple[str, str],
        path: Path,
    ) -> None:
        """`kit`: the folder with this silo's certificates. `names`: the run and the SHA-256 of the
        study. `path`: the file with the sets that this silo has added to. It survives restarts and
        runs. Raises UserError."""
        self._inner, self._terms, self._names = answered, terms, names
        self._sets = Sets(path, f"rank {rank}")
        self._rank, self._folder, self._kit = rank, kit, certificates.Kit.read(kit, rank)
        self._made: _Made | None = None

    def answered(self, down: Down) -> Up:
        """The upload to a message. Raises UserError if this silo does not add its numbers."""
        (client,) = down.question.to
        if (down.question.job, down.question.owner) == (SUM, ""):
            return {"client": client, "exchange": down.exchange, "leaves": self._added(down)}
        if (down.question.job, down.question.owner) == (CHECK, ""):
            return {"client": client, "exchange": down.exchange, "leaves": self._checked(down)}
        question, own = question_of(down), _own_question(down)
        key, made = X25519PrivateKey.generate(), self._made
        if made is None or (made.question, made.own) != (question, own):
            up = self._inner(down)
            leaves = up["leaves"]
            answer = up.get("sha256") or wire.digest(vectors.added(leaves))
            asked = down.exchange, down.question.job, question, own
            made = _Made(*asked, answer, leaves, vectors.levels(leaves), key)
        self._made = made = made._replace(exchange=down.exchange, key=key, added=None)
        public, n = key.public_key().public_bytes_raw(), int(made.leaves["n"])
        with suppress(UserError):  # while the operator replaces it
            self._kit = certificates.Kit.read(self._folder, self._rank)
        private = load_pem_private_key(self._kit.key, password=None)
        assert isinstance(private, EllipticCurvePrivateKey), "kits have keys of this kind"
        announcement = masks.Announcement(self._exchange(down), question, client, n, public)
        signed = masks.signature(private, announcement)
        certificate = x509.load_pem_x509_certificate(self._kit.certificate)
        der = certificate.public_bytes(Encoding.DER).ljust(CERTIFICATE_BYTES, b"\0")
        announced = dict(zip(ANNOUNCED, (public, signed, der), strict=True))
        sent = {key: made.leaves[key] for key in COUNTS}
        sent |= {
            f"secure/{key}": torch.frombuffer(bytearray(value), dtype=torch.uint8)
            for key, value in announced.items()
        }
        norms = outliers.norms(vectors.added(made.leaves))
        sent["secure/norms"] = torch.tensor([*norms.values()], dtype=torch.float64)
        sent["secure/levels"], earlier = made.levels, self._sets.earlier(made.answer)
        of_each = [sum(k in clients for clients in earlier) for k in range(self._terms.silos)]
        sent["secure/sets"] = torch.tensor(of_each, dtype=torch.uint8)
        return {"client": client, "exchange": down.exchange, "leaves": sent}

    def _exchange(self, down: Down) -> masks.Exchange:
        return masks.Exchange(*self._names, down.exchange)

    def _added(self, down: Down) -> Params:
        """The masked vector for the sum over a set. Raises UserError."""
        (client,), made = down.question.to, self._made
        if made is None or made.exchange != down.exchange:
            raise UserError("this process has made no key for this sum: it has come again")
        request = self._request(down, made)
        own = made.key.public_key().public_bytes_raw()
        rows = zip(request.keys, request.samples, strict=True)
        mine = own, made.leaves["n"].item()
        if dict(zip(request.clients, rows, strict=True)).get(client) != mine:
            raise UserError(
                "the sum is over a set without this silo, or with another key or n of it"
            )
        there = down.question.shared["levels"].bool()
        self._sets.add(made.answer, request.clients, self._terms.secure_sums)
        self._made = made._replace(added=(request, there))
        return self._masked(made, client, request, there)

    def _masked(self, made: _Made, client: int, request: masks.Request, there: Tensor) -> Params:
        """The masked vector; the same for the same request."""
        by = Weighing.from_recipe(self._terms.algorithm, made.job)
        total, silos = sum(request.samples), len(request.clients)
        vector = vectors.packed(made.leaves, made.levels, by, total, there, silos)
        masks.mask(vector, made.key, client, request)
        return {SUM: vector}

    def _checked(self, down: Down) -> Params:
        """The masked vector of the last sum again, and the signed sums over the streams of its
        masks, once. Raises UserError."""
        (client,), made = down.question.to, self._made
        if made is None or made.exchange != down.exchange or made.added is None:
            raise UserError("this process has added nothing to that sum, or has shown it already")
        wire.fit(flatten(down.question.shared), {"nonce": liars.NONCE}, CHECK)
        self._made = made._replace(added=None)
        (request, there), nonce = made.added, _bytes(down.question.shared["nonce"])
        parts = vectors.parts(made.leaves, there)
        length = sum(size for _, size in parts)
        streams = masks.streams(made.key, client, request, length)
        sums = torch.stack([liars.signed_sums(stream, parts, nonce) for stream in streams])
        return {CHECK: sums} | self._masked(made, client, request, there)

    def _request(self, down: Down, made: _Made) -> masks.Request:
        """The sum that is asked for. UserError unless it is one over enough silos of this
        federation, which have all signed the question of this silo, with these levels."""
        shared, (me,) = down.question.shared, down.question.to
        named = shared.get("clients")
        silos = named.numel() if isinstance(named, Tensor) else 0
        wire.fit(flatten(shared), requested(silos, len(made.levels)), "sum")
        clients = tuple(shared["clients"].tolist())
        least, most = self._terms.secure_sums, self._terms.silos
        if [*clients] != sorted({*clients} & {*range(most)}) or len(clients) < least:
            raise UserError(
                f"sum over the silos {list(clients)}; allowed: {least} or more of {most}, each "
                "once, ascending"
            )
        if not shared["levels"].gather(1, made.levels.long().unsqueeze(1)).all():
            raise UserError("the sum leaves out numbers of this silo: their level is missing")
        exchange, samples = self._exchange(down), tuple(shared["n"].tolist())
        keys, ca = tuple(map(_bytes, shared["key"])), x509.load_pem_x509_certificate(self._kit.ca)
        rows = zip(clients, samples, keys, shared["signature"], shared["certificate"], strict=True)
        for client, n, key, signed, certificate in rows:
            if not 1 <= n <= (most := self._terms.limits[client]):
                raise UserError(f"{wire.silo(client)}: n = {n}; allowed: 1 to {most}")
            if client != me:
                announced = masks.Announcement(exchange, made.question, client, n, key)
                public = certified(ca, client, _bytes(certificate))
                masks.check_signature(public, announced, _bytes(signed))
        levels = _bytes(shared["levels"])
        return masks.Request(exchange, down.step, made.question, levels, clients, samples, keys)


def certified(ca: x509.Certificate, client: int, padded: bytes) -> EllipticCurvePublicKey:
    """The key of a silo's certificate. UserError unless it is one of this federation."""
    length = 4 + int.from_bytes(padded[2:4], "big")  # DER: 30 82, then two bytes of length
    with suppress(*certificates.BROKEN):
        certificate = x509.load_der_x509_certificate(padded[:length])
        certificate.verify_directly_issued_by(ca)
        key, named = certificate.public_key(), certificates.common_name(certificate)
        fits = named == certificates.name(client + 1)
        is_valid = certificates.now() <= certificate.not_valid_after_utc
        if fits and is_valid and isinstance(key, EllipticCurvePublicKey):
            return key
    raise UserError(f"{wire.silo(client)} has no valid certificate of this federation")


def requested(silos: int, tensors: int) -> Params:
    """The structure of a request for a sum over so many silos, of so many tensors."""
    rows = {key: torch.zeros(silos, size, dtype=torch.uint8) for key, size in ANNOUNCED.items()}
    return rows | {
        "levels": torch.zeros(tensors, vectors.LEVELS, dtype=torch.uint8),
        **dict.fromkeys(("clients", "n"), torch.zeros(silos, dtype=torch.int64)),
    }


def admits(earlier: Sequence[Set[int]], now: Set[int], least: int) -> bool:
    """Says whether a silo that has added its answer to the sets `earlier` may add it to the set
    `now`; `least`: the silos of a sum."""
    if not earlier or now in earlier:
        return True
    first, *others = earlier
    is_part = now < first and len(first) - len(now) >= least and 2 * len(now) > len(first)
    return is_part and not others


class Sets:
    """Remembers to which sets a silo has added an answer."""

    def __init__(self, path: Path, owner: str) -> None:
        """`path`: a file that grows by a line per sum. Processes may share it. Raises UserError if
        it was changed, or is of another `owner`."""
        self._lines = ChainedLines(path, "record of sums", owner, REMEDY)
        self.earlier("")

    def earlier(self, answer: str) -> list[set[int]]:
        """The sets, the first one first. Raises UserError."""
        with self._read(answer) as earlier:
            return earlier

    def add(self, answer: str, clients: Sequence[int], least: int) -> None:
        """Notes a set, on the disk. UserError if this answer may not be added to it."""
        with self._read(answer) as earlier:
            if not admits(earlier, {*clients}, least):
                raise UserError(
                    f"this silo has added this answer to sums over the silos "
                    f"{', '.join(map(str, map(sorted, earlier)))}; with one over {[*clients]} the "
                    f"server could see what fewer than {least} of them sent; allowed: the same "
                    f"silos, or once {least} or more fewer, if these are more than half"
                )
            if {*clients} not in earlier:
                self._lines.add({"answer": answer, "silos": sorted(clients)})
                self._lines.write_head()

    @contextmanager
    def _read(self, answer: str) -> Iterator[list[set[int]]]:
        """The sets of an answer. No other process reads or writes meanwhile."""
        path = self._lines.path
        with writing(path), opened(path, "ab", private=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = self._lines.read()
            yield [{*line["silos"]} for line in known if line["answer"] == answer]


def question_of(down: Down) -> str:
    """Says what all silos of a sum are asked."""
    ask = down.question
    common, known = (
        down._replace(ask=ask._replace(each={})),
        "" if flatten(ask.each) else down.sha256,
    )
    return f"{[down.round, ask.job, ask.owner]} {known or wire.digest(wire.tensors(common))}"


def _own_question(down: Down) -> str:
    """Says what one silo is asked beside that; equal questions have equal answers."""
    return f"{sorted(down.counted.items())} {weights_sha256(flatten(down.question.each))}"


def _bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()
