"""The operator's commands: what they make, revoke and show, also after a kill and against a damaged
CA."""

from __future__ import annotations

import datetime
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority
from fedml_noniid.credentials.authority import make, renew, revoke
from fedml_noniid.credentials.certificates import Admission, Kit
from tests.files import contents

DAY = datetime.timedelta(days=1)


class KilledError(BaseException):
    """Stands for the end of the process."""


def certificate(kits: Path, rank: int | str, file: str = "own.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate((kits / str(rank) / file).read_bytes())


def listed(path: Path) -> set[int]:
    return {revoked.serial_number for revoked in x509.load_pem_x509_crl(path.read_bytes())}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Making


@pytest.mark.parametrize("rank", [0, 1, "ca"])
def test_a_certificate_says_for_whom_and_for_what(all_kits: Path, rank: int | str) -> None:
    is_ca = rank == "ca"
    made = certificate(all_kits, rank, "ca.crt" if is_ca else "own.crt")
    made.verify_directly_issued_by(certificate(all_kits, "ca", "ca.crt"))
    extension = made.extensions.get_extension_for_class
    basic, usage = extension(x509.BasicConstraints), extension(x509.KeyUsage).value
    assert basic.critical and basic.value.ca == is_ca
    signs = (usage.key_cert_sign, usage.crl_sign, not usage.digital_signature)
    assert signs == (is_ca,) * 3
    assert DAY / 480 < now() - made.not_valid_before_utc < DAY / 24  # 3 minutes to an hour
    if not is_ca:
        cn = "server" if rank == 0 else "silo-1"
        assert made.subject.rfc4514_string() == f"CN={cn}"
        assert list(extension(x509.SubjectAlternativeName).value) == [x509.DNSName(cn)]
        server = {ExtendedKeyUsageOID.SERVER_AUTH} if rank == 0 else set()
        usages = set(extension(x509.ExtendedKeyUsage).value)
        assert usages == server | {ExtendedKeyUsageOID.CLIENT_AUTH}
        assert 13 * DAY < made.not_valid_after_utc - now() <= 14 * DAY


def test_only_the_owner_reads_whatever_the_mask_is(tmp_path: Path) -> None:
    kits, mask = tmp_path / "kits", os.umask(0)
    try:
        make(kits, 2)
        renew(kits, 1)
        revoke(kits, 2)
    finally:
        os.umask(mask)
    for path in [kits, *kits.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_making_again_adds_what_is_missing_and_keeps_the_rest(kits: Path) -> None:
    revoke(kits, 1)
    before = contents(kits)
    make(kits, 3)
    assert before.items() <= contents(kits).items()
    Kit.read(kits / "3", 3)
    shutil.rmtree(kits / "0")
    make(kits, 1)
    assert listed(kits / "0" / "crl.pem") == {certificate(kits, 1).serial_number}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda ca, _: (ca / "ca.key").unlink(), r"ca/ca\.key: can't be read"),
        (lambda ca, _: (ca / "ca.crt").write_bytes(b"no"), r"ca/ca\.crt: is not a certificate"),
        (lambda ca, _: (ca / "crl.pem").write_bytes(b"no"), r"ca/crl\.pem: is not a list"),
        (lambda ca, other: shutil.copy(other / "ca.key", ca), r"ca/ca\.key: does not belong"),
        (lambda ca, _: (ca / "ca.key").chmod(0o644), r"ca/ca\.key: others can read .*chmod 600"),
        (lambda ca, _: shutil.rmtree(ca), r"ca: is missing, but kit .*/0 exists"),
    ],
)
def test_a_damaged_ca_is_refused_and_nothing_is_written(
    kits: Path, others_kits: Path, damage: Callable[[Path, Path], object], words: str
) -> None:
    damage(kits / "ca", others_kits / "ca")
    before = contents(kits)
    with pytest.raises(UserError, match=words):
        make(kits, 3)
    with pytest.raises(UserError, match=r"ca/c"):  # names the file
        revoke(kits, 1)
    assert contents(kits) == before


def test_a_kit_never_outlives_the_ca(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = now() + 7000 * DAY  # the CA has 300 days left
    monkeypatch.setattr(authority, "now", lambda: late)
    with pytest.raises(UserError, match="days = 301: the CA ends before that"):
        renew(kits, 1, 301)
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
    for at in range(0, 20, 2):  # 3 + 1 + 4 + 1 + 3 files, and each folder and its name
        shutil.rmtree(kits, ignore_errors=True)
        left = at
        with pytest.raises(KilledError):
            make(kits, 1)
        before, left = contents(kits), 20
        make(kits, 1)
        # A certificate whose kit was not written is followed by that of the kit.
        assert all(contents(kits)[path].startswith(was) for path, was in before.items())
        assert Kit.read(kits / "0", 0) and Kit.read(kits / "1", 1)
    for at in range(6):  # the old certificates, three files, and the folder of each
        left, old = at, Kit.read(kits / "1", 1)
        with pytest.raises(KilledError):
            renew(kits, 1)
        left = 7
        assert Kit.read(kits / "1", 1) == old
        renew(kits, 1)
        assert Kit.read(kits / "1", 1) != old


# Revoking and renewing


def test_certificates_that_were_renewed_are_revoked_too(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thief may have an old kit, which is valid to its last day."""
    pems = [contents(kits)["1/own.crt"]]
    for days in (1, 20):
        renew(kits, 1, days)
        pems.append(contents(kits)["1/own.crt"])
    revoke(kits, 1)
    admission = Admission((kits / "0" / "ca.crt").read_bytes(), kits / "0" / "crl.pem")
    assert all(map(admission.refusal, pems)) and not admission.refusal(contents(kits)["2/own.crt"])
    late = now() + 15 * DAY  # two of them have expired
    monkeypatch.setattr(authority, "now", lambda: late)
    renew(kits, 1)
    assert (kits / "ca" / "1.pem").read_bytes() == pems[2] + (kits / "1" / "own.crt").read_bytes()
    (kits / "ca" / "1.pem").write_bytes(b"no")
    with pytest.raises(UserError, match=r"ca/1\.pem: is damaged"):
        revoke(kits, 1)


def test_kits_that_were_moved_away_are_revoked_too(kits: Path, tmp_path: Path) -> None:
    """One of silo 2 was made again by mistake; that of silo 1 is not here."""
    moved = {rank: contents(kits)[f"{rank}/own.crt"] for rank in (1, 2)}
    for rank in (1, 2):
        (kits / str(rank)).rename(tmp_path / f"moved-{rank}")
    revoke(kits, 1)
    make(kits, 2)
    revoke(kits, 2)
    admission = Admission((kits / "0" / "ca.crt").read_bytes(), kits / "0" / "crl.pem")
    new = [contents(kits)[f"{rank}/own.crt"] for rank in (1, 2)]
    refusals = [bool(admission.refusal(pem)) for pem in (*moved.values(), *new)]
    assert refusals == [True, True, False, True]


def test_revoking_twice_lists_once_and_mends_the_servers_list(kits: Path) -> None:
    path = kits / "0" / "crl.pem"
    empty = path.read_bytes()
    revoke(kits, 2)
    path.write_bytes(empty)
    revoke(kits, 2)
    crl = x509.load_pem_x509_crl(path.read_bytes())
    assert [revoked.serial_number for revoked in crl] == [certificate(kits, 2).serial_number]
    assert crl.next_update_utc is not None and crl.next_update_utc - now() > 3640 * DAY


def test_commands_at_the_same_time_lose_no_revocation(kits: Path) -> None:
    make(kits, 8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(revoke, kits), range(1, 9)))
    serials = {certificate(kits, rank).serial_number for rank in range(1, 9)}
    assert listed(kits / "0" / "crl.pem") == serials


@pytest.mark.parametrize("command", [renew, revoke])
def test_a_rank_without_a_kit_is_refused(kits: Path, command) -> None:
    with pytest.raises(UserError, match="--rank = 7 is refused; allowed: a rank with a kit, 0 to"):
        command(kits, 7)


# The command line


def test_the_command_line_makes_renews_revokes_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits = tmp_path / "kits"
    commands = ("make --silos 2 --days 20", "renew --rank 1 --days 40", "revoke --rank 2", "show")
    for line in commands:
        capsys.readouterr()
        assert main(["deploy", "kits", *line.split(), "--out", str(kits)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["0", "server"], ["1", "silo-1"], ["2", "silo-2"]]
    days = [(certificate(kits, rank).not_valid_after_utc - now()).days for rank in range(3)]
    assert days == [19, 39, 19] and [row[5:] for row in rows] == [["not", "revoked"]] * 2 + [
        ["revoked"]
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("make --silos 0 --out kits", "invalid value for '--silos'"),
        ("show --out nowhere", "nowhere: can't be used (No such file or directory); `noniid deplo"),
        ("make --silos 1 --out /dev/null/kits", "/dev/null/kits: can't be used"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "kits", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line
