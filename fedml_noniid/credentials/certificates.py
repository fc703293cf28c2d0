"""Certificates for mutual TLS: the kit of a process, and which certificates the server admits."""

from __future__ import annotations

import datetime
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from fedml_noniid.core.errors import UserError, shown

SERVER = "server"
COMMAND = "noniid deploy kits"
MAX_CACHED_CERTIFICATES = 1000  # parsed certificates that a server remembers
LOG = logging.getLogger(__name__)

AGAIN = "ask the operator for this kit again"
COPY_LIST = "copy crl.pem from the operator's ca folder"
# What the library raises for content that is damaged, foreign, encrypted, or of a kind that it does
# not know.
BROKEN = (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion)


def issued(pem: bytes, ca: x509.Certificate) -> x509.Certificate | None:
    """The certificate in PEM; None if it is damaged, or the CA has not signed it."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.verify_directly_issued_by(ca)
        return certificate
    except BROKEN:
        return None


def name(rank: int) -> str:
    """The name in the certificate of a process: the CN and the only DNS name."""
    return SERVER if rank == 0 else f"silo-{rank}"


@dataclass(frozen=True)
class Kit:
    """What a process needs for mutual TLS, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    @property
    def last(self) -> datetime.datetime:
        """The last moment of its certificate."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    @staticmethod
    def read(folder: Path, rank: int) -> Kit:
        """The kit in `folder`, checked for the process of `rank`. Raises UserError."""
        ca_path, path, key_path = (folder / file for file in ("ca.crt", "own.crt", "own.key"))
        ca, certificate, key = kit_of(ca_path, path, key_path, AGAIN)
        if (holder := common_name(certificate)) != name(rank):
            raise UserError(
                f"{path}: belongs to {shown(holder)}, but this process is {name(rank)!r}; "
                f"use the kit of rank {rank}"
            )
        check_dates(ca_path, ca, f"ask the operator for kits of a new CA ({COMMAND} make)")
        check_dates(path, certificate, f"ask the operator for a new kit ({COMMAND} renew)")
        # Nothing that was not checked is passed on: TLS would trust every certificate in ca.crt.
        return Kit(ca.public_bytes(Encoding.PEM), certificate.public_bytes(Encoding.PEM), key)


class Admission:
    """Says, at every call, whether the server admits a certificate.

    TLS asks only when a connection begins.
    """

    def __init__(self, ca: bytes, crl: Path) -> None:
        """`ca`: from a kit.

        `crl`: the list of revoked certificates. Raises UserError if the list is bad.
        """
        self._ca, self._crl = x509.load_pem_x509_certificate(ca), crl
        self._content, self._warned = read(crl, COPY_LIST), False
        self._serials = self._listed(self._content)
        self._peer = functools.lru_cache(maxsize=MAX_CACHED_CERTIFICATES)(self._parsed)

    def refusal(self, pem: bytes, moment: datetime.datetime | None = None) -> str:
        """Why the certificate is refused at this moment; "" if it is admitted."""
        peer = self._peer(pem)
        if peer is None:
            return "certificate is not one of this federation"
        who, serial, until = peer
        if serial in self._revoked():
            return f"certificate of {who} is revoked"
        return (
            f"certificate of {who} expired on {until:%Y-%m-%d}" if (moment or now()) > until else ""
        )

    def last_moment(self, pem: bytes) -> str:
        """Until when an admitted certificate is valid."""
        peer = self._peer(pem)
        assert peer is not None, "the certificate is admitted"
        return f"{peer[2]:%Y-%m-%d %H:%M} UTC"

    def _parsed(self, pem: bytes) -> tuple[str, int, datetime.datetime] | None:
        """(name, serial number, last moment) of a certificate; None if the CA has not signed it."""
        certificate = issued(pem, self._ca)
        if certificate is None:
            return None
        return common_name(certificate), certificate.serial_number, certificate.not_valid_after_utc

    def _revoked(self) -> frozenset[int]:
        """The serial numbers on the list as it is now; a bad file leaves the last good list."""
        try:
            content = read(self._crl, COPY_LIST)
            if content != self._content:
                serials = self._listed(content)
                if not self._serials <= serials:  # they only grow
                    raise UserError(f"{self._crl}: is older than the list before it; {COPY_LIST}")
                self._serials, self._content = serials, content
            self._warned = False
        except UserError as error:
            if not self._warned:
                LOG.warning("%s; until then the last good list counts", error)
            self._warned = True
        return self._serials

    def _listed(self, content: bytes) -> frozenset[int]:
        """The serial numbers on a list. Raises UserError."""
        crl = list_of(self._ca, self._crl, content, COPY_LIST)
        return frozenset(revoked.serial_number for revoked in crl)


def now() -> datetime.datetime:
    """This moment, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def read(path: Path, remedy: str, private: bool = False) -> bytes:
    """The content of a file.

    UserError if it can't be read, or is `private` and others can read it.
    """
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error}); {remedy}") from None
    if private and mode & 0o077:
        raise UserError(
            f"{path}: others can read this key (mode {mode & 0o777:o}); run `chmod 600 {path}`"
        )
    return content


def read_certificate(path: Path, remedy: str) -> x509.Certificate:
    """The certificate in a file. Raises UserError."""
    content = read(path, remedy)
    with _unless_broken(f"{path}: is not a certificate in PEM format; {remedy}"):
        return x509.load_pem_x509_certificate(content)


def key_of(
    certificate: x509.Certificate, path: Path, content: bytes, remedy: str
) -> PrivateKeyTypes:
    """The private key in `content`, read from `path`.

    UserError if it is damaged, or of another certificate.
    """
    with _unless_broken(f"{path}: is not a private key in PEM format without a password; {remedy}"):
        key = load_pem_private_key(content, password=None)
        belongs = key.public_key() == certificate.public_key()
    if not belongs:
        raise UserError(f"{path}: does not belong to the certificate beside it; {remedy}")
    return key


def check_issued(
    path: Path, certificate: x509.Certificate, ca: x509.Certificate, remedy: str
) -> None:
    """UserError if `ca` has not signed the certificate."""
    with _unless_broken(f"{path}: is not signed by the CA of these kits; {remedy}"):
        certificate.verify_directly_issued_by(ca)


def list_of(
    ca: x509.Certificate, path: Path, content: bytes, remedy: str
) -> x509.CertificateRevocationList:
    """The list of revoked certificates in `content`, read from `path`.

    UserError if it is damaged, or not of `ca`.
    """
    with _unless_broken(f"{path}: is not a list of revoked certificates in PEM format; {remedy}"):
        crl = x509.load_pem_x509_crl(content)
        signed = crl.issuer == ca.subject and crl.is_signature_valid(
            ca.public_key()  # type: ignore[arg-type]  # the call checks the kind of the key, and raises TypeError
        )
    if not signed:
        raise UserError(f"{path}: is not signed by this CA; {remedy}")
    return crl


@contextmanager
def _unless_broken(message: str) -> Iterator[None]:
    """UserError with this message if the library refuses the content."""
    try:
        yield
    except BROKEN:
        raise UserError(message) from None


def kit_of(
    ca_path: Path, path: Path, key_path: Path, remedy: str
) -> tuple[x509.Certificate, x509.Certificate, bytes]:
    """(CA, certificate, its key as PEM) in files that belong together. Raises UserError."""
    ca, certificate = read_certificate(ca_path, remedy), read_certificate(path, remedy)
    key = read(key_path, remedy, private=True)
    key_of(certificate, key_path, key, remedy)
    check_issued(path, certificate, ca, remedy)
    return ca, certificate, key


def check_dates(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    """UserError if the certificate is not valid now."""
    first, last, moment = certificate.not_valid_before_utc, certificate.not_valid_after_utc, now()
    if moment > last:
        raise UserError(f"{path} expired on {last:%Y-%m-%d}; {remedy}")
    if moment < first:
        raise UserError(
            f"{path} is valid from {first:%Y-%m-%d %H:%M} UTC, now is {moment:%Y-%m-%d %H:%M}; "
            "set the clock"
        )


def common_name(certificate: x509.Certificate) -> str:
    """The CN, or "" without one."""
    return next(
        (
            str(part.value)
            for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ),
        "",
    )
