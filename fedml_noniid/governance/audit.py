"""The audit log of one process: JSON lines, each with the hash of the one before, each signed with
the key of the process's certificate.

Line n is `{"n": n, "log": ..., "at": ..., "kind": ..., ..., "prev": ..., "signature": ...}`. `log`
is drawn when the file is begun. `prev` is the SHA-256 of the line before, without its signature.
The signature is over log, n and the SHA-256 of the line without it: together they are a `Seal`.
Silo and server send each other the seals of their last lines, and write down what they get. So
nobody can take lines from the end of a log, or write a log anew, without the other one's log
showing it: `verify`. One log alone does not show that whole lines at its end are missing.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedml_noniid.core.errors import Mistake, UserError, shown
from fedml_noniid.credentials import certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import Lines
from fedml_noniid.data.yaml_files import json_of

FILE = "audit-{}.jsonl"  # of a rank
CONTEXT = "noniid audit 1"  # before what is signed
SIGNED = re.compile(rb'(\{.*),"signature":"([\w+/=]+)"\}', re.ASCII)
START = "start"  # the kind of a process's first line: it has the certificate
ANSWERS = "answers"  # of a line before an answer is computed
ADDS = "adds"  # of a line before an answer is added to a sum
SENT, ARRIVED = "sent", "arrived"  # of a message
KEYS = {"n": int, "log": str, "kind": str, "exchange": int, "round": int, "run": str}
UNSIGNED = "is not signed by the process that wrote the log"
MAX_SHOWN = 300  # characters of a message's head
STRANGER = "a stranger"  # a certificate that the CA has not signed
NONE = "0" * 64  # in place of the hash of the line before the first


class Seal(NamedTuple):
    """The end of a log, signed by its process."""

    log: str
    n: int
    head: str  # SHA-256 of line n, hexadecimal
    signature: str

    def signed_by(self, certificate: str) -> bool:
        """Whether the key of a certificate, in PEM, has made the signature."""
        try:
            key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
            if isinstance(key, ec.EllipticCurvePublicKey):
                made = base64.b64decode(self.signature)
                key.verify(made, _signed(*self[:3]), ec.ECDSA(SHA256()))
                return True
        except (*certificates.BROKEN, InvalidSignature):
            pass
        return False


def seal_of(value: object) -> Seal | None:
    """The seal in a line or a message; None if it is none."""
    if isinstance(value, list | tuple) and [type(part) for part in value] == [str, int, str, str]:
        return Seal(*value)
    return None


class Line(NamedTuple):
    """A line as it lies in a file."""

    body: dict[str, Any]
    seal: Seal


class Log:
    """Writes the log of one process. Threads may share it."""

    def __init__(self, path: Path, kit: Kit, **facts: object) -> None:
        """Goes on with the file, or begins it; `facts`: of the first line of this process.

        A line that a kill has cut is removed. UserError if the file is damaged or not ours. Whole
        lines that are missing at its end are not seen.
        """
        key = load_pem_private_key(kit.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "kits have no other"
        self.path, self._file = path, Lines(path)
        self._key, self._lock = key, threading.Lock()
        self.answers = Counter[object]()  # (kind, exchange) -> lines before this process
        self.rounds = dict[object, int]()  # run -> its last round with an answer
        self._log, self._n, self._prev = secrets.token_hex(8), 0, NONE
        self._seal: Seal | None = None
        self._synced = True
        certificate = ""
        for line in chained(path, self._file.read()):  # the other side decides how long it grows
            if line.body["kind"] == START:
                certificate = str(line.body.get("certificate"))
            if (kind := line.body["kind"]) in (ANSWERS, ADDS):
                self.answers[kind, line.body.get("exchange")] += 1
            if kind == ANSWERS:
                self.rounds[line.body.get("run")] = line.body.get("round", 0)
            self._seal = line.seal
        if self._seal is not None:  # the chain binds all lines before it
            ca = x509.load_pem_x509_certificate(kit.ca)
            own, holder = (_holder(pem, ca) for pem in (kit.certificate.decode(), certificate))
            if holder != own:
                raise UserError(f"{path}: is the log of {holder}, and this is {own}; move it away")
            self._log, self._n, self._prev = self._seal.log, self._seal.n + 1, self._seal.head
            if not self._seal.signed_by(certificate):
                raise UserError(f"{path}: line {self._n}: {UNSIGNED}")
        cut = {"cut_bytes": self._file.cut} if self._file.cut else {}
        self.write(START, certificate=kit.certificate.decode(), **facts, **cut)

    def write(self, kind: str, **facts: object) -> dict[str, Any]:
        """Appends a line, which survives a kill of this process."""
        with self._lock:
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            body = {"n": self._n, "log": self._log, "at": at, "kind": kind, **facts}
            raw = json.dumps(body | {"prev": self._prev}, separators=(",", ":")).encode()
            head = _sha(raw)
            made = self._key.sign(_signed(self._log, self._n, head), ec.ECDSA(SHA256()))
            self._seal = Seal(self._log, self._n, head, base64.b64encode(made).decode())
            self._file.add(
                raw[:-1] + f',"signature":"{self._seal.signature}"}}'.encode(), sync=False
            )
            self._n, self._prev = self._n + 1, head
            self._synced = False
            return body

    def seal(self) -> Seal:
        """The seal of the last line; all lines are on the disk."""
        with self._lock:
            assert self._seal is not None, "there is a first line"
            if not self._synced:
                self._file.sync()
                self._synced = True
            return self._seal


def chained(path: Path, lines: Iterable[bytes]) -> Iterator[Line]:
    """The lines of the log in a file, each checked against the one before, without signatures.

    UserError names the first line that is wrong, counted from 1.
    """
    log, prev = "", NONE
    for n, raw in enumerate(lines):
        source, signed = f"{path}: line {n + 1}", SIGNED.fullmatch(raw)
        try:
            body = json_of(_body(raw)) if signed else None
        except ValueError:
            body = None
        if signed is None or not _is_line(body):
            raise UserError(f"{source}: is no line of an audit log; it was changed")
        log = log or body["log"]
        if body.get("prev") != prev or (body["n"], body["log"]) != (n, log):
            raise UserError(
                f"{source}: does not follow the line before: lines were changed, added, removed or "
                f"moved (it has n = {shown(body['n'])})"
            )
        prev = _sha(_body(raw))
        yield Line(body, Seal(log, n, prev, signed[2].decode()))


def _is_line(body: Any) -> TypeGuard[dict[str, Any]]:
    """Says whether JSON has the keys of every line, and no key of a wrong type."""
    return (
        isinstance(body, dict)
        and {"n", "log", "kind"} <= {*body}
        and all(type(body.get(key, kind())) is kind for key, kind in KEYS.items())
    )


class Checked(NamedTuple):
    """A log whose chain and signatures are right."""

    path: Path
    name: str  # in the certificate of its process
    lines: list[Line]
    certificates: list[str]  # by line
    half_line: int  # bytes behind the last whole line: a kill has cut it

    @staticmethod
    def from_log(path: Path, ca: x509.Certificate) -> Checked:
        """Reads a log. UserError names the first line that is wrong."""
        content = certificates.read(path, "name the file audit-<rank>.jsonl")
        *whole, rest = content.split(b"\n")
        name, certificate, signers = "", "", list[str]()
        lines = list(chained(path, whole))
        for line in lines:
            source = f"{path}: line {line.seal.n + 1}"
            if line.body["kind"] == START:
                certificate = str(line.body.get("certificate"))
                who = _holder(certificate, ca)
                name = name or who
                if who == STRANGER or who != name:
                    raise UserError(f"{source}: has the certificate of {who}")
            if not line.seal.signed_by(certificate):
                raise UserError(f"{source}: {UNSIGNED}")
            signers.append(certificate)
        if not lines:
            raise UserError(f"{path}: has no whole line")
        if (rank := re.fullmatch(r"audit-(\d+)\.jsonl", path.name)) and name != certificates.name(
            int(rank[1])
        ):
            raise UserError(f"{path}: is the log of {name}")
        return Checked(path, name, lines, signers, len(rest))

    def against(self, other: Checked) -> Iterator[str]:
        """What the other side's log shows to be wrong with this one."""
        heard = 0
        for line in other.lines:
            seal = seal_of(line.body.get("seal"))
            if seal and line.body.get("peer") == self.name:
                heard += 1
                yield from self._refuted(seal, f"{other.path}: line {line.seal.n + 1}")
        for line in other.alone(ARRIVED, self):
            source = f"{other.path}: line {line.seal.n + 1}"
            got = f"{line.body.get('message')!r} {line.body.get('head')!r}"[:MAX_SHOWN]
            yield f"{source}: got {got}; {self.path} has not sent it"
        if not heard:
            yield f"{other.path}: knows nothing of {self.name}"

    def alone(self, kind: str, other: Checked) -> list[Line]:
        """The messages that were sent to the other side, or have arrived from it, and that its log
        does not have, with the same head and tensors."""
        pair = ARRIVED if kind == SENT else SENT
        known = Counter(_message(line, pair, self.name) for line in other.lines)
        unmatched = []
        for line in self.lines:
            if message := _message(line, kind, other.name):
                known[message] -= 1
                unmatched += [line] * (known[message] < 0)
        return unmatched

    def _refuted(self, seal: Seal, source: str) -> Iterator[str]:
        """What a seal of this log's process, which the other one has written down, shows."""
        known = seal.n if 0 <= seal.n < len(self.lines) else -1
        if not seal.signed_by(self.certificates[known]):
            yield f"{source}: has a seal that {self.name} has not signed"
        elif seal[:3] != self.lines[known].seal[:3]:
            yield (
                f"{source}: {self.name} had signed line {seal.n + 1} of the log {seal.log}; "
                f"{self.path} has another line there or none: lines were removed or written anew"
            )


def verify(path: Path, ca: Path, against: Path | None = None) -> str:
    """What was checked, in words, once a log is found to be whole.

    UserError with all that is wrong. `against`: the log of the other side. It shows what one log
    can't: lines that are missing at the end, and those that its own process wrote anew. A message
    that was sent and is not in the other log is said, and is no error: a connection may break.
    """
    authority = certificates.read_certificate(ca, certificates.AGAIN)
    mine = Checked.from_log(path, authority)
    said = f"{path}: {len(mine.lines)} lines of {mine.name}, each as it was signed\n"
    if mine.half_line:
        said += (
            f"its last {mine.half_line} bytes are a line that a kill has cut; it does not count\n"
        )
    if against is None:
        return said + "lines removed from its end show only with --against\n"
    other = Checked.from_log(against, authority)
    if differences := [*mine.against(other), *other.against(mine)]:
        raise UserError.from_mistakes(map(Mistake, differences))
    said += f"{against}: {len(other.lines)} lines of {other.name} agree with it\n"
    for log, peer in ((mine, other), (other, mine)):
        if sent := log.alone(SENT, peer):
            numbers = ", ".join(str(line.seal.n + 1) for line in sent)
            said += (
                f"not confirmed: {peer.path} has not got what {log.path} has sent in lines "
                f"{numbers}: a connection may have broken, or the message was refused\n"
            )
    return said


def _holder(certificate: str, ca: x509.Certificate) -> str:
    """The name in a certificate, or STRANGER."""
    issued_one = certificates.issued(certificate.encode(errors="replace"), ca)
    return STRANGER if issued_one is None else certificates.common_name(issued_one)


def _message(line: Line, kind: str, peer: str) -> str:
    """Name, head and SHA-256 of a message to or from a process; "" if the line is about another."""
    if (line.body["kind"], line.body.get("peer")) != (kind, peer):
        return ""
    return json.dumps([line.body.get(key) for key in ("message", "head", "sha256")], sort_keys=True)


def _body(raw: bytes) -> bytes:
    """A line without its signature."""
    signed = SIGNED.fullmatch(raw)
    return signed[1] + b"}" if signed else raw


def _signed(log: str, n: int, head: str) -> bytes:
    return f"{CONTEXT} {log} {n} {head}".encode()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
