"""Certificates for mutual TLS: the operator's authority (CA), a kit for each process, and the list
of revoked ones."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.certificates import (
    BROKEN,
    COMMAND,
    key_of,
    list_of,
    name,
    now,
    read,
    read_certificate,
)
from fedml_noniid.data.files import remove_abandoned, replace_folder, write_whole

Key = ec.EllipticCurvePrivateKey
CA_DAYS, LIST_DAYS = 7300, 3650  # of the CA, until the list's next update
KIT_DAYS = 14  # a kit that was stolen is of no use after that, also if nobody revokes it
CLOCK_SKEW = datetime.timedelta(minutes=5)  # clocks differ
RESTORE = "restore the ca folder from a copy, or make new kits for everybody in another folder"
USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def make(folder: Path, silos: int, days: int = KIT_DAYS) -> str:
    """Makes the CA and the kits of the server and of all silos; what exists stays as it is.

    Raises UserError.

    Like the other commands, it returns the text for the operator.
    """
    with _exclusive_ownership(folder, new=True):
        if not (folder / "ca").exists():
            if ranks := _ranks(folder):
                raise UserError(
                    f"{folder / 'ca'}: is missing, but kit {folder / str(ranks[0])} exists; "
                    f"{RESTORE}"
                )
            replace_folder(folder / "ca", _new_ca(), private=True)
        ca = _CA.read(folder)
        for rank in range(silos + 1):
            if not (folder / str(rank)).exists():
                _issue(folder, ca, rank, days)
    return (
        f"the CA, the server's kit and the kits of silos 1 to {silos} are in {folder}\n"
        f"{folder / '0'} goes to the server, {folder}/<rank> to silo-<rank>; "
        f"{folder / 'ca'} stays here, it makes kits\n"
    )


def renew(folder: Path, rank: int, days: int = KIT_DAYS) -> str:
    """Replaces the kit of `rank` by one with a new key and certificate. The old certificate stays
    valid to its last day, so the process goes on while the kit travels.

    Raises UserError.
    """
    with _exclusive_ownership(folder):
        ca = _CA.read(folder)
        old = _recorded(folder, rank)[-1]
        _issue(folder, ca, rank, days)
    return (
        f"{folder / str(rank)} goes to {name(rank)}, which takes it at its next connection\n"
        f"its old certificate is valid until {old.not_valid_after_utc:%Y-%m-%d}; a stolen "
        "one must be revoked before it is renewed\n"
    )


def revoke(folder: Path, rank: int) -> str:
    """Puts all valid certificates of `rank` on the list, in folder/ca and in folder/0: the present
    one, those that were renewed, and those of kits that are not here any more.

    Raises UserError.

    Only the server reads the list. After the theft of a server's kit, all need kits of a new CA.
    """
    with _exclusive_ownership(folder):
        ca = _CA.read(folder)
        revoked = list(ca.crl)
        for certificate in _recorded(folder, rank):
            if certificate.not_valid_after_utc > now() and not ca.lists(certificate):
                builder = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
                revoked.append(builder.revocation_date(now()).build())
        crl = _sign_list(ca.certificate.subject, ca.key, revoked)
        # The server's kit may be on the server only.
        lists = [folder / kit / "crl.pem" for kit in ("ca", "0") if (folder / kit).is_dir()]
        for path in lists:
            write_whole(path, crl, private=True)
    return (
        f"all certificates of {name(rank)} are revoked\n"
        f"the server's list is {lists[-1]}; copy it into the server's kit if that is on another "
        "machine\n"
    )


def show(folder: Path) -> str:
    """A line for each kit. Raises UserError."""
    with _exclusive_ownership(folder):
        ca, lines = _CA.read(folder), []
        for rank in _ranks(folder):
            certificate = _recorded(folder, rank)[-1]
            state = "revoked" if ca.lists(certificate) else "not revoked"
            lines.append(
                f"{rank:4}  {name(rank):10}  {certificate.serial_number:040x}  "
                f"until {certificate.not_valid_after_utc:%Y-%m-%d}  {state}\n"
            )
    return "".join(lines)


@dataclass(frozen=True)
class _CA:
    certificate: x509.Certificate
    key: Key
    crl: x509.CertificateRevocationList

    @staticmethod
    def read(folder: Path) -> _CA:
        """The CA of the kits in `folder`, checked. Raises UserError."""
        crt_path, key_path, crl_path = (
            folder / "ca" / file for file in ("ca.crt", "ca.key", "crl.pem")
        )
        certificate = read_certificate(crt_path, RESTORE)
        key = key_of(certificate, key_path, read(key_path, RESTORE, private=True), RESTORE)
        if not isinstance(key, Key):
            raise UserError(f"{key_path}: is not an elliptic-curve key; {RESTORE}")
        return _CA(
            certificate, key, list_of(certificate, crl_path, read(crl_path, RESTORE), RESTORE)
        )

    def lists(self, certificate: x509.Certificate) -> bool:
        """Says whether the certificate is revoked."""
        return (
            self.crl.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None
        )


def _new_ca() -> dict[str, bytes]:
    """The files of a new CA."""
    key, own = new_key(), subject("federation CA")
    certificate = certificate_of(
        key,
        own,
        key,
        own,
        CA_DAYS,
        x509.BasicConstraints(ca=True, path_length=0),
        _usage("key_cert_sign", "crl_sign"),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    )
    return {
        "ca.crt": certificate,
        "ca.key": private_pem(key),
        "crl.pem": _sign_list(own, key, ()),
    }


def _new_kit(ca: _CA, rank: int, days: int) -> dict[str, bytes]:
    """The files of a new kit. UserError if it would outlive the CA."""
    end = ca.certificate.not_valid_after_utc
    if now() + datetime.timedelta(days=days) > end:
        raise UserError(
            f"days = {days}: the CA ends before that, on {end:%Y-%m-%d}; use less, or a new CA"
        )
    key = new_key()
    # The server is a client too: the operator's `status` asks with the server's kit.
    server = [ExtendedKeyUsageOID.SERVER_AUTH] if rank == 0 else []
    certificate = certificate_of(
        key,
        subject(name(rank)),
        ca.key,
        ca.certificate.subject,
        days,
        x509.BasicConstraints(ca=False, path_length=None),
        _usage("digital_signature"),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *server]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()),
        x509.SubjectAlternativeName([x509.DNSName(name(rank))]),
    )
    files = {
        "ca.crt": ca.certificate.public_bytes(Encoding.PEM),
        "own.crt": certificate,
        "own.key": private_pem(key),
    }
    return files | ({"crl.pem": ca.crl.public_bytes(Encoding.PEM)} if rank == 0 else {})


def _issue(folder: Path, ca: _CA, rank: int, days: int) -> None:
    """Makes a kit of `rank` in place of an earlier one. Raises UserError.

    Its certificate is recorded first: nothing may be valid that `revoke` does not know.
    """
    kit, record = _new_kit(ca, rank, days), _record(folder, rank)
    known = _recorded(folder, rank) if record.exists() else []
    valid = [certificate for certificate in known if certificate.not_valid_after_utc > now()]
    old = b"".join(certificate.public_bytes(Encoding.PEM) for certificate in valid)
    write_whole(record, old + kit["own.crt"], private=True)
    replace_folder(folder / str(rank), kit, private=True)


def _record(folder: Path, rank: int) -> Path:
    """The file with the certificates that `rank` has had, the newest one last."""
    return folder / "ca" / f"{rank}.pem"


def _recorded(folder: Path, rank: int) -> list[x509.Certificate]:
    """The certificates of a rank that has had a kit. Raises UserError.

    After a kill, the kit of the newest one may never have been written.
    """
    path = _record(folder, rank)
    if not path.exists():
        most = max((int(path.stem) for path in path.parent.glob("[0-9]*.pem")), default=0)
        raise UserError(path=("--rank",), value=rank, allowed=f"a rank with a kit, 0 to {most}")
    try:
        return x509.load_pem_x509_certificates(read(path, RESTORE))
    except BROKEN:
        raise UserError(f"{path}: is damaged; {RESTORE}") from None


def _ranks(folder: Path) -> list[int]:
    """The ranks that have a kit."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def subject(text: str) -> x509.Name:
    """The name of a certificate's owner."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*granted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in granted for usage in USAGES})


def certificate_of(
    key: Key,
    owner: x509.Name,
    ca_key: Key,
    ca: x509.Name,
    days: int,
    *extensions: x509.ExtensionType,
) -> bytes:
    """The certificate of `key` with a new serial number, for so many days from now, as PEM."""
    moment = now()
    builder = x509.CertificateBuilder(
        issuer_name=ca,
        subject_name=owner,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=moment - CLOCK_SKEW,
        not_valid_after=moment + datetime.timedelta(days=days),
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical)
    return builder.sign(ca_key, SHA256()).public_bytes(Encoding.PEM)


def _sign_list(ca: x509.Name, key: Key, revoked: Sequence[x509.RevokedCertificate]) -> bytes:
    """The list as PEM."""
    moment, issuer = now(), x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    until = moment + datetime.timedelta(days=LIST_DAYS)
    builder = x509.CertificateRevocationListBuilder(ca, moment - CLOCK_SKEW, until)
    # The list only grows, so its length is a number that only grows.
    for extension in (issuer, x509.CRLNumber(len(revoked))):
        builder = builder.add_extension(extension, critical=False)
    for certificate in revoked:
        builder = builder.add_revoked_certificate(certificate)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def new_key() -> Key:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: Key) -> bytes:
    """The private key as PEM, without a password."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@contextmanager
def _exclusive_ownership(folder: Path, new: bool = False) -> Iterator[None]:
    """Keeps other commands off `folder`: two at a time could lose a revocation.

    `new` makes it if it is missing.
    """
    try:
        if new:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            remove_abandoned(folder, ("ca", "[0-9]*"))  # with private keys
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        remedy = f"`{COMMAND} make` makes it" if missing else "use a folder that is writable"
        raise UserError(f"{folder}: can't be used ({error.strerror or error}); {remedy}") from None
