"""The kit of a cluster: the certificate that all its processes show each other.

A kit has a CA of its own. The CA signs this one certificate, and its key is not kept. So a process
with the kit belongs to the cluster, and no other does. dask checks the CA of a certificate, not the
name.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from distributed import Security

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials.authority import certificate_of, new_key, private_pem, subject
from fedml_noniid.credentials.certificates import check_dates, kit_of
from fedml_noniid.data.files import replace_folder

FILES = CA, CERTIFICATE, KEY = "ca.crt", "cluster.crt", "cluster.key"
MAKE = "`noniid cluster kit` makes one"


def make(folder: Path, days: int) -> None:
    """Writes a new kit into `folder`, which must be new or empty. Raises UserError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not empty; allowed: a new folder for each kit")
    ca_key, key, ca = new_key(), new_key(), subject("noniid cluster CA")
    constraints = [
        x509.BasicConstraints(ca=True, path_length=0),
        x509.BasicConstraints(False, None),
    ]
    files = {
        CA: certificate_of(ca_key, ca, ca_key, ca, days, constraints[0]),
        CERTIFICATE: certificate_of(
            key, subject("noniid cluster"), ca_key, ca, days, constraints[1]
        ),
        KEY: private_pem(key),
    }
    replace_folder(folder, files, private=True)


def security(folder: Path) -> Security:
    """What dask needs for mutual TLS with this kit, checked. Raises UserError."""
    ca_path, path, key_path = (folder / name for name in FILES)
    ca, certificate, _ = kit_of(ca_path, path, key_path, MAKE)
    check_dates(path, certificate, MAKE)
    own = {f"tls_{role}_cert": str(path) for role in ("client", "scheduler", "worker")}
    keys = {f"tls_{role}_key": str(key_path) for role in ("client", "scheduler", "worker")}
    return Security(
        require_encryption=True,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        # TLS would trust every certificate in the file; only the one that was checked goes on.
        tls_ca_file=ca.public_bytes(Encoding.PEM).decode(),
        **own,
        **keys,
    )
