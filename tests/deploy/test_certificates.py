"""Certificates: what a process refuses in its kit, and whom the server admits."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import certificates
from fedml_noniid.credentials.authority import revoke
from fedml_noniid.credentials.certificates import Admission, Kit

FILES = ["ca.crt", "own.crt", "own.key"]


# Kits


def _password(kit: Path) -> None:
    key = serialization.load_pem_private_key((kit / "own.key").read_bytes(), None)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = key.private_bytes(encoding, form, serialization.BestAvailableEncryption(b"x"))
    (kit / "own.key").write_bytes(locked)


def _copy(file: str, source: str) -> Callable[[Path], object]:
    """Overwrites a file of the kit; `source` is seen from the folder of both federations."""
    return lambda kit: (kit / file).write_bytes((kit.parents[1] / source / file).read_bytes())


def _other_ca(kit: Path) -> None:
    _copy("own.crt", "foreign/1")(kit)
    _copy("own.key", "foreign/1")(kit)


def _rank_2(kit: Path) -> None:
    _copy("own.crt", "kits/2")(kit)
    _copy("own.key", "kits/2")(kit)


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        *((lambda kit, file=file: (kit / file).unlink(), file, "can't be read") for file in FILES),
        *(
            (lambda kit, file=file: (kit / file).write_bytes(b"\xff"), file, "PEM")
            for file in FILES
        ),
        (_other_ca, "own.crt", "is not signed by the CA"),
        (_copy("ca.crt", "foreign/1"), "own.crt", "is not signed by the CA"),
        (_copy("own.key", "foreign/1"), "own.key", "does not belong"),
        (_copy("own.key", "kits/2"), "own.key", "does not belong"),
        (_rank_2, "own.crt", "belongs to 'silo-2', but this process is 'silo-1'"),
        (_password, "own.key", "password"),
        (lambda kit: (kit / "own.key").chmod(0o640), "own.key", "mode 640.*chmod 600"),
        (lambda kit: (kit / "own.key").chmod(0o604), "own.key", "mode 604.*chmod 600"),
    ],
)
def test_a_bad_kit_is_refused_in_one_line(
    kits: Path, foreign: Path, damage: Callable[..., object], file: str, words: str
) -> None:
    Kit.read(kits / "1", 1)
    damage(kits / "1")
    with pytest.raises(UserError, match=words) as caught:
        Kit.read(kits / "1", 1)
    assert str(caught.value).startswith(str(kits / "1" / file)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (datetime.timedelta(days=15), r"own\.crt expired on \d{4}-\d\d-\d\d; .*kits renew"),
        (datetime.timedelta(days=7301), r"ca\.crt expired on \d{4}-\d\d-\d\d; .*kits make"),
        (datetime.timedelta(minutes=-10), r"ca\.crt is valid from .*clock"),
        (datetime.timedelta(minutes=-4), ""),  # clocks may differ
        (datetime.timedelta(days=13), ""),
    ],
)
def test_a_kit_is_valid_for_its_days(
    kits: Path, monkeypatch: pytest.MonkeyPatch, moment: datetime.timedelta, words: str
) -> None:
    seen = datetime.datetime.now(datetime.UTC) + moment
    monkeypatch.setattr(certificates, "now", lambda: seen)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        Kit.read(kits / "1", 1)


def test_a_kit_passes_on_no_second_ca(kits: Path, foreign: Path) -> None:
    mine, theirs = (place / "1" / "ca.crt" for place in (kits, foreign))
    expected = mine.read_bytes()
    mine.write_bytes(expected + theirs.read_bytes())
    assert Kit.read(kits / "1", 1).ca == expected


# Admission


@pytest.fixture
def admission(kits: Path) -> Admission:
    return Admission((kits / "0" / "ca.crt").read_bytes(), kits / "0" / "crl.pem")


def pem(kits: Path, rank: int) -> bytes:
    return (kits / str(rank) / "own.crt").read_bytes()


def test_an_admitted_silo_is_refused_once_it_has_expired(
    kits: Path, foreign: Path, admission: Admission
) -> None:
    last = x509.load_pem_x509_certificate(pem(kits, 1)).not_valid_after_utc
    assert admission.refusal(pem(kits, 1)) == admission.refusal(pem(kits, 1), last) == ""
    late = admission.refusal(pem(kits, 1), last + datetime.timedelta(seconds=1))
    assert late == f"certificate of silo-1 expired on {last.date()}"
    for stranger in (pem(foreign, 1), b"no", b""):
        assert "not one of this federation" in admission.refusal(stranger)


@pytest.mark.parametrize("damaged", ["garbage", "empty", "missing", "foreign", "older"])
def test_a_bad_list_never_replaces_a_good_one(
    kits: Path, foreign: Path, admission: Admission, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = kits / "0" / "crl.pem"
    bad = {
        "garbage": b"-----BEGIN X509 CRL-----\nno",
        "empty": b"",
        "foreign": (foreign / "0" / "crl.pem").read_bytes(),
        "older": path.read_bytes(),
    }
    revoke(kits, 2)
    good = path.read_bytes()
    assert admission.refusal(pem(kits, 2)) != ""
    path.unlink()
    if damaged != "missing":
        path.write_bytes(bad[damaged])
    for _ in range(3):
        assert admission.refusal(pem(kits, 2)) == "certificate of silo-2 is revoked"
        assert admission.refusal(pem(kits, 1)) == ""
    assert len(caplog.records) == 1 and str(path) in caplog.text
    path.write_bytes(good)
    revoke(kits, 1)
    assert admission.refusal(pem(kits, 1)) == "certificate of silo-1 is revoked"


@pytest.mark.parametrize("content", [None, b"no", b"", "foreign"])
def test_a_bad_list_at_the_start_is_an_error(
    kits: Path, foreign: Path, content: bytes | str | None
) -> None:
    path, ca = kits / "0" / "crl.pem", (kits / "0" / "ca.crt").read_bytes()
    path.unlink()
    if content is not None:
        other = (foreign / "0" / "crl.pem").read_bytes()
        path.write_bytes(other if isinstance(content, str) else content)
    with pytest.raises(UserError, match=r"0/crl\.pem: "):
        Admission(ca, path)


def test_memory_of_known_certificates_is_bounded(kits: Path, admission: Admission) -> None:
    for k in range(1100):
        admission.refusal(b"%d" % k)
    assert admission._peer.cache_info().currsize == 1000
