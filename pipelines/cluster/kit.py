"""The kit of a cluster: the certificate that all its processes show each other.

A kit has a CA of its own. The CA signs this one certificate, and its key is not kept. So a process
with the kit belongs to the cluster, and no other does. dask checks the CA of a certificate, not the
name.
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from distributed import Security

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import replace_folder

FILES = CA, CERTIFICATE, KEY = "ca.crt", "cluster.crt", "cluster.key"
AUTHORITY = "noniid cluster CA"
CLOCK_SKEW = datetime.timedelta(minutes=5)  # clocks differ
MAKE = "`noniid cluster kit` makes one"
# What is raised for content that is damaged, or of another kit. ssl.SSLError is an OSError.
BROKEN = (OSError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature)
OTHERS = 0o077  # rights of the group and of all others


def make(folder: Path, days: int) -> None:
    """Writes a new kit into `folder`, which must be new or empty. Raises UserError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not empty; allowed: a new folder for each kit")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _signed(AUTHORITY, ca_key, ca_key, days, is_ca=True)
    own = _signed("noniid cluster", key, ca_key, days, is_ca=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    replace_folder(folder, {CA: ca, CERTIFICATE: own, KEY: private}, private=True)


def security(folder: Path) -> Security:
    """What dask needs for mutual TLS with this kit, checked. Raises UserError."""
    paths = [folder / name for name in FILES]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: is missing; {MAKE}")
    ca, certificate, key = paths
    if key.stat().st_mode & OTHERS:
        raise UserError(f"{key}: others can read this key; run `chmod 600 {key}`")
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        authority = x509.load_pem_x509_certificate(ca.read_bytes())
        found.verify_directly_issued_by(authority)
        ssl.create_default_context().load_cert_chain(certificate, key)
    except BROKEN as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{folder}: is not a whole kit ({reason}); {MAKE}") from None
    if found.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise UserError(f"{certificate}: expired on {found.not_valid_after_utc:%Y-%m-%d}; {MAKE}")
    # TLS would trust every certificate in the file; only the one that was checked goes on.
    pem = authority.public_bytes(Encoding.PEM).decode()
    own = {f"tls_{role}_cert": str(certificate) for role in ("client", "scheduler", "worker")}
    keys = {f"tls_{role}_key": str(key) for role in ("client", "scheduler", "worker")}
    return Security(
        require_encryption=True,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        tls_ca_file=pem,
        **own,
        **keys,
    )


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    days: int,
    is_ca: bool,
) -> bytes:
    """The certificate of `key` for so many days from now, as PEM."""
    moment = datetime.datetime.now(datetime.UTC)
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (AUTHORITY, name)
    )
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=moment - CLOCK_SKEW,
        not_valid_after=moment + datetime.timedelta(days=days),
    )
    constraints = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    return (
        builder.add_extension(constraints, critical=True)
        .sign(by, SHA256())
        .public_bytes(Encoding.PEM)
    )
