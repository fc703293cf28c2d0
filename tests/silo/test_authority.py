"""The operator's commands: what they make, revoke and show, also after a kill and against a damaged
CA."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedml_noniid.cli.app import main
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import authority
from fedml_noniid.plugins.silo.authority import make, renew, revoke
from fedml_noniid.plugins.silo.certificates import Admission, Kit, name

CA_FILES = {"ca.crt", "ca.key", "crl.pem"}
SERVER_FILES = {"ca.crt", "own.crt", "own.key", "crl.pem"}
SILO_FILES = {"ca.crt", "own.crt", "own.key"}
DAY = datetime.timedelta(days=1)


class KilledError(BaseException):
    """Stands for the end of the process."""


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def certificate(kits: Path, rank: int | str, file: str = "own.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate((kits / str(rank) / file).read_bytes())


def listed(path: Path) -> set[int]:
    return {revoked.serial_number for revoked in x509.load_pem_x509_crl(path.read_bytes())}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Making


@pytest.mark.parametrize(
    ("rank", "cn", "purposes"),
    [
        (0, "server", {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        (1, "silo-1", {ExtendedKeyUsageOID.CLIENT_AUTH}),
        (2, "silo-2", {ExtendedKeyUsageOID.CLIENT_AUTH}),
    ],
)
def test_a_certificate_says_for_whom_and_for_what(
    kits: Path, rank: int, cn: str, purposes: set[x509.ObjectIdentifier]
) -> None:
    found, ca = certificate(kits, rank), certificate(kits, "ca", "ca.crt")
    found.verify_directly_issued_by(ca)
    assert [part.value for part in found.subject] == [cn] == [name(rank)]
    assert found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    extensions = found.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(cn)]
    assert set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == purposes
    basic = extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and not basic.value.ca
    usage = extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature and not usage.key_cert_sign and not usage.crl_sign
    theirs = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    assert (
        extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        == theirs
    )
    key = found.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    assert 4 * 60 < (now() - found.not_valid_before_utc).total_seconds() < 10 * 60
    assert 364 * DAY < found.not_valid_after_utc - now() <= 365 * DAY


def test_the_ca_signs_certificates_and_lists_only(kits: Path) -> None:
    extensions = certificate(kits, "ca", "ca.crt").extensions
    basic = extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and basic.value.ca and basic.value.path_length == 0
    usage = extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign and usage.crl_sign and not usage.digital_signature
    assert listed(kits / "ca" / "crl.pem") == set()


def test_only_the_owner_reads_from_creation_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    os_open = os.open

    def spy(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        number = os_open(path, flags, *rest, **named)
        if flags & os.O_CREAT:
            modes.append(stat.S_IMODE(os.fstat(number).st_mode))
        return number

    monkeypatch.setattr(os, "open", spy)
    mask = os.umask(0)
    try:
        make(tmp_path / "kits", 2)
        renew(tmp_path / "kits", 1)
        revoke(tmp_path / "kits", 2)
    finally:
        os.umask(mask)
    # 3 + 4 + 3 + 3 files; the new kit of silo 1; two lists, each written twice.
    assert modes == [0o600] * (13 + 3 + 4)
    paths = [tmp_path / "kits", *(tmp_path / "kits").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    held = {
        path.name: {file.name for file in path.iterdir()} for path in (tmp_path / "kits").iterdir()
    }
    assert held == {"ca": CA_FILES, "0": SERVER_FILES, "1": SILO_FILES, "2": SILO_FILES}


def test_making_again_adds_what_is_missing_and_keeps_the_rest(kits: Path) -> None:
    revoke(kits, 1)
    before = content(kits)
    make(kits, 4)
    after = content(kits)
    assert {path: after[path] for path in before} == before
    assert {path.split("/")[0] for path in after} - {path.split("/")[0] for path in before} == {
        "3",
        "4",
    }
    Kit.read(kits / "4", 4)
    shutil.rmtree(kits / "0")
    make(kits, 1)
    assert listed(kits / "0" / "crl.pem") == {certificate(kits, 1).serial_number}


def _swap_key(kits: Path, foreign: Path) -> None:
    shutil.copy(foreign / "ca" / "ca.key", kits / "ca" / "ca.key")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda kits, foreign: (kits / "ca" / "ca.key").unlink(), r"ca/ca\.key: can't be read"),
        (lambda kits, foreign: (kits / "ca" / "crl.pem").unlink(), r"ca/crl\.pem: can't be read"),
        (
            lambda kits, foreign: (kits / "ca" / "ca.crt").write_text("no"),
            r"ca/ca\.crt: is not a certificate",
        ),
        (
            lambda kits, foreign: (kits / "ca" / "crl.pem").write_text("no"),
            r"ca/crl\.pem: is not a list",
        ),
        (_swap_key, r"ca/ca\.key: does not belong"),
        (
            lambda kits, foreign: (kits / "ca" / "ca.key").chmod(0o644),
            r"ca/ca\.key: others can read .*chmod 600",
        ),
        (lambda kits, foreign: shutil.rmtree(kits / "ca"), r"ca: is missing, but kit .*/0 exists"),
    ],
)
def test_a_damaged_ca_is_refused_and_nothing_is_written(
    kits: Path, foreign: Path, damage: Callable[..., object], words: str
) -> None:
    damage(kits, foreign)
    before = content(kits)
    with pytest.raises(UserError, match=words):
        make(kits, 3)
    with pytest.raises(UserError, match=r"ca/c"):  # names the file
        revoke(kits, 1)
    assert content(kits) == before


def test_a_kit_never_outlives_the_ca(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(kits)
    late = now() + 7000 * DAY  # the CA has 300 days left
    monkeypatch.setattr(authority, "now", lambda: late)
    with pytest.raises(UserError, match="days = 301: the CA ends before that"):
        renew(kits, 1, 301)
    assert content(kits) == before
    renew(kits, 1, 299)


def test_a_kill_at_any_moment_leaves_whole_kits_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits, left, fsync = tmp_path / "kits", 0, os.fsync

    def dying(number: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        fsync(number)

    monkeypatch.setattr(os, "fsync", dying)
    for at in range(16):  # 3 + 4 + 3 files, and each folder and its name
        shutil.rmtree(kits, ignore_errors=True)
        left = at
        with pytest.raises(KilledError):
            make(kits, 1)
        whole = {"ca": CA_FILES, "0": SERVER_FILES, "1": SILO_FILES}
        assert all(
            {file.name for file in path.iterdir()} == whole[path.name] for path in kits.iterdir()
        )
        before, left = content(kits), 16
        make(kits, 1)
        assert before.items() <= content(kits).items()
        Kit.read(kits / "0", 0)
        Kit.read(kits / "1", 1)
    for at in range(8):  # two lists and their names, three files and their folder
        left, old = at, certificate(kits, 1).serial_number
        with pytest.raises(KilledError):
            renew(kits, 1)
        assert Kit.read(kits / "1", 1) and certificate(kits, 1).serial_number == old
        left = 9
        renew(kits, 1)
        Kit.read(kits / "1", 1)
        assert old in listed(kits / "ca" / "crl.pem")
        assert listed(kits / "0" / "crl.pem") == listed(kits / "ca" / "crl.pem")


# Revoking and renewing


@pytest.mark.parametrize("rank", [0, 1])
def test_renewing_makes_a_new_key_and_revokes_the_old_certificate(kits: Path, rank: int) -> None:
    before, old = content(kits), certificate(kits, rank)
    renew(kits, rank, 30)
    kit, new = Kit.read(kits / str(rank), rank), certificate(kits, rank)
    assert kit.key != before[f"{rank}/own.key"] and new.public_key() != old.public_key()
    assert 29 * DAY < new.not_valid_after_utc - now() <= 30 * DAY
    for place in ("ca", "0"):
        assert listed(kits / place / "crl.pem") == {old.serial_number}
    admission = Admission(kit.ca, kits / "0" / "crl.pem")
    assert admission.refusal(kit.certificate) == ""
    assert admission.refusal(before[f"{rank}/own.crt"]) == f"certificate of {name(rank)} is revoked"
    other = {path: found for path, found in content(kits).items() if path.split("/")[0] == "2"}
    assert other.items() <= before.items()


def test_revoking_twice_lists_once_and_mends_the_servers_list(kits: Path) -> None:
    empty = (kits / "0" / "crl.pem").read_bytes()
    revoke(kits, 2)
    (kits / "0" / "crl.pem").write_bytes(empty)
    revoke(kits, 2)
    for place in ("ca", "0"):
        crl = x509.load_pem_x509_crl((kits / place / "crl.pem").read_bytes())
        assert [revoked.serial_number for revoked in crl] == [certificate(kits, 2).serial_number]
        key = certificate(kits, "ca", "ca.crt").public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey) and crl.is_signature_valid(key)
        assert crl.next_update_utc is not None and crl.next_update_utc - now() > 3640 * DAY


def test_commands_at_the_same_time_lose_no_revocation(kits: Path) -> None:
    make(kits, 8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(revoke, kits), range(1, 9)))
    assert listed(kits / "0" / "crl.pem") == {
        certificate(kits, rank).serial_number for rank in range(1, 9)
    }


def test_revoking_without_the_servers_kit_writes_the_cas_list(kits: Path) -> None:
    shutil.rmtree(kits / "0")
    revoke(kits, 1)
    assert listed(kits / "ca" / "crl.pem") == {certificate(kits, 1).serial_number}
    assert not (kits / "0").exists()


@pytest.mark.parametrize("command", [renew, revoke])
def test_a_rank_without_a_kit_of_this_ca_is_refused(
    kits: Path, foreign: Path, command: Callable[[Path, int], None]
) -> None:
    with pytest.raises(UserError, match=r"7/own\.crt: can't be read"):
        command(kits, 7)
    shutil.copy(foreign / "1" / "own.crt", kits / "1" / "own.crt")
    with pytest.raises(UserError, match=r"1/own\.crt: is not signed by the CA"):
        command(kits, 1)
    assert listed(kits / "ca" / "crl.pem") == set()


# TLS, as OpenSSL sees it


def _context(kit: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(kit / "ca.crt")
    context.load_cert_chain(kit / "own.crt", kit / "own.key")
    return context


def handshake(server: Path, client: Path) -> None:
    """Mutual TLS 1.3 in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = _context(client, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
        to_client, to_server, server_hostname="server"
    )
    answering = _context(server, ssl.PROTOCOL_TLS_SERVER).wrap_bio(
        to_server, to_client, server_side=True
    )
    for _ in range(3):
        for end in (asking, answering):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    answering.write(b"welcome")
    assert asking.read() == b"welcome"


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        ("kits/0", "kits/1", ""),
        ("kits/0", "kits/0", ""),  # the operator's `status`
        ("kits/0", "foreign/1", "verify failed"),
        ("foreign/0", "kits/1", "verify failed"),
        ("kits/2", "kits/1", "verify failed"),  # a silo that poses as the server
    ],
)
def test_tls_connects_the_server_and_its_silos_only(
    kits: Path, foreign: Path, server: str, client: str, words: str
) -> None:
    ends = kits.parent / server, kits.parent / client
    if not words:
        handshake(*ends)
        return
    with pytest.raises(ssl.SSLError, match=words):
        handshake(*ends)


# The command line


def test_the_command_line_makes_renews_revokes_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "kits")]
    assert main(["deploy", "kits", "make", *out, "--silos", "2", "--days", "20"]) == 0
    old = certificate(tmp_path / "kits", 1)
    assert 19 * DAY < old.not_valid_after_utc - now() <= 20 * DAY
    assert main(["deploy", "kits", "renew", *out, "--rank", "1", "--days", "40"]) == 0
    assert main(["deploy", "kits", "revoke", *out, "--rank", "2"]) == 0
    new, gone = (certificate(tmp_path / "kits", rank) for rank in (1, 2))
    assert listed(tmp_path / "kits" / "0" / "crl.pem") == {old.serial_number, gone.serial_number}
    capsys.readouterr()
    assert main(["deploy", "kits", "show", *out]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["0", "server"], ["1", "silo-1"], ["2", "silo-2"]]
    assert [int(row[2], 16) for row in rows[1:]] == [new.serial_number, gone.serial_number]
    assert [str(new.not_valid_after_utc.date()) in row for row in rows] == [False, True, False]
    assert [" ".join(row[5:]) for row in rows] == ["not revoked", "not revoked", "revoked"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["make", "--silos", "0"], "silos = 0; allowed: 1 or more"),
        (["make", "--silos", "3", "--days", "0"], "days = 0; allowed: 1 to 3650"),
        (["renew", "--rank", "1", "--days", "3651"], "days = 3651; allowed: 1 to 3650"),
        (["revoke", "--rank", "-1"], "-1/own.crt: can't be read"),
        (["revoke", "--rank", "3"], "3/own.crt: can't be read"),
        (["show", "--out", "/dev/null"], "/dev/null: can't be used"),
        (["make", "--silos", "1", "--out", "/dev/null/kits"], "/dev/null/kits: can't be used"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    kits: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(kits)
    command, *rest = arguments
    out = [] if "--out" in rest else ["--out", str(kits)]
    assert main(["deploy", "kits", command, *out, *rest]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err.startswith("error: ")
        and said.err.count("\n") == 1
        and words in said.err
    )
    assert content(kits) == before
