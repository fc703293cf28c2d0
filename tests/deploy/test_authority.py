"""The operator's commands: what they make, revoke and show, also after a kill and against a damaged
CA."""

from __future__ import annotations

import datetime
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority
from fedml_noniid.credentials.authority import make, renew, revoke
from fedml_noniid.credentials.certificates import Admission, Kit, name
from tests.files import contents

CA_FILES = {"ca.crt", "ca.key", "crl.pem"}
SILO_FILES = {"ca.crt", "own.crt", "own.key"}
RECORDS = {"0.pem", "1.pem", "2.pem"}
FILES = {"ca": CA_FILES | RECORDS, "0": SILO_FILES | {"crl.pem"}, "1": SILO_FILES, "2": SILO_FILES}
DAY = datetime.timedelta(days=1)


class KilledError(BaseException):
    """Stands for the end of the process."""


def names(folder: Path) -> dict[str, set[str]]:
    """The files of every folder."""
    return {path.name: {file.name for file in path.iterdir()} for path in folder.iterdir()}


def certificate(kits: Path, rank: int | str, file: str = "own.crt") -> x509.Certificate:
    return x509.load_pem_x509_certificate((kits / str(rank) / file).read_bytes())


def listed(path: Path) -> set[int]:
    return {revoked.serial_number for revoked in x509.load_pem_x509_crl(path.read_bytes())}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


# Making


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_certificate_says_for_whom_and_for_what(all_kits: Path, rank: int) -> None:
    found, ca = certificate(all_kits, rank), certificate(all_kits, "ca", "ca.crt")
    found.verify_directly_issued_by(ca)
    cn = "server" if rank == 0 else f"silo-{rank}"
    assert found.subject.rfc4514_string() == f"CN={cn}" == f"CN={name(rank)}"
    of = found.extensions.get_extension_for_class
    assert list(of(x509.SubjectAlternativeName).value) == [x509.DNSName(cn)]
    server = {ExtendedKeyUsageOID.SERVER_AUTH} if rank == 0 else set()
    assert set(of(x509.ExtendedKeyUsage).value) == server | {ExtendedKeyUsageOID.CLIENT_AUTH}
    basic, usage = of(x509.BasicConstraints), of(x509.KeyUsage).value
    assert basic.critical and not basic.value.ca
    assert usage.digital_signature and not usage.key_cert_sign and not usage.crl_sign
    assert DAY / 480 < now() - found.not_valid_before_utc < DAY / 24  # 3 minutes to an hour
    assert 13 * DAY < found.not_valid_after_utc - now() <= 14 * DAY


def test_the_ca_signs_only(all_kits: Path) -> None:
    of = certificate(all_kits, "ca", "ca.crt").extensions.get_extension_for_class
    basic, usage = of(x509.BasicConstraints), of(x509.KeyUsage).value
    assert basic.critical and basic.value.ca and basic.value.path_length == 0
    assert usage.key_cert_sign and usage.crl_sign and not usage.digital_signature
    assert listed(all_kits / "ca" / "crl.pem") == set()


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
    assert names(kits) == FILES


def test_making_again_adds_what_is_missing_and_keeps_the_rest(kits: Path) -> None:
    revoke(kits, 1)
    before = contents(kits)
    make(kits, 4)
    assert before.items() <= contents(kits).items()
    assert names(kits).keys() - FILES.keys() == {"3", "4"}
    Kit.read(kits / "4", 4)
    shutil.rmtree(kits / "0")
    make(kits, 1)
    assert listed(kits / "0" / "crl.pem") == {certificate(kits, 1).serial_number}


@pytest.mark.parametrize(
    ("damaged", "by", "words"),
    [
        ("ca.key", None, r"ca/ca\.key: can't be read"),
        ("crl.pem", None, r"ca/crl\.pem: can't be read"),
        ("ca.crt", b"no", r"ca/ca\.crt: is not a certificate"),
        ("crl.pem", b"no", r"ca/crl\.pem: is not a list"),
        ("ca.key", "foreign", r"ca/ca\.key: does not belong"),
        ("ca.key", 0o644, r"ca/ca\.key: others can read .*chmod 600"),
        ("", None, r"ca: is missing, but kit .*/0 exists"),
    ],
)
def test_a_damaged_ca_is_refused_and_nothing_is_written(
    kits: Path, others_kits: Path, damaged: str, by: Any, words: str
) -> None:
    path = kits / "ca" / damaged
    if isinstance(by, int):
        path.chmod(by)
    elif by:
        path.write_bytes((others_kits / "ca" / damaged).read_bytes() if by == "foreign" else by)
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(kits)
    with pytest.raises(UserError, match=words):
        make(kits, 3)
    with pytest.raises(UserError, match=r"ca/c"):  # names the file
        revoke(kits, 1)
    assert contents(kits) == before


def test_a_kit_never_outlives_the_ca(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(kits)
    late = now() + 7000 * DAY  # the CA has 300 days left
    monkeypatch.setattr(authority, "now", lambda: late)
    with pytest.raises(UserError, match="days = 301: the CA ends before that"):
        renew(kits, 1, 301)
    assert contents(kits) == before
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
    for at in range(20):  # 3 + 1 + 4 + 1 + 3 files, and each folder and its name
        shutil.rmtree(kits, ignore_errors=True)
        left = at
        with pytest.raises(KilledError):
            make(kits, 1)
        found = names(kits)
        assert found.pop("ca", CA_FILES) - RECORDS == CA_FILES and found.items() <= FILES.items()
        before, left = contents(kits), 20
        make(kits, 1)
        # A certificate whose kit was not written is followed by that of the kit.
        assert all(contents(kits)[path].startswith(was) for path, was in before.items())
        assert Kit.read(kits / "0", 0) and Kit.read(kits / "1", 1)
    for at in range(6):  # the old certificates, three files, and the folder of each
        left, old = at, certificate(kits, 1).serial_number
        with pytest.raises(KilledError):
            renew(kits, 1)
        assert Kit.read(kits / "1", 1) and certificate(kits, 1).serial_number == old
        left = 7
        renew(kits, 1)
        assert Kit.read(kits / "1", 1) and certificate(kits, 1).serial_number != old


# Revoking and renewing


@pytest.mark.parametrize("rank", [0, 1])
def test_renewing_makes_a_new_key_and_both_certificates_are_admitted(kits: Path, rank: int) -> None:
    before, old = contents(kits), certificate(kits, rank)
    renew(kits, rank, 30)
    kit, new = Kit.read(kits / str(rank), rank), certificate(kits, rank)
    assert kit.key != before[f"{rank}/own.key"] and new.public_key() != old.public_key()
    assert 29 * DAY < new.not_valid_after_utc - now() <= 30 * DAY
    admission = Admission(kit.ca, kits / "0" / "crl.pem")
    assert admission.refusal(kit.certificate) == admission.refusal(before[f"{rank}/own.crt"]) == ""
    assert all(contents(kits)[path] == was for path, was in before.items() if path[0] == "2")


def test_certificates_that_were_renewed_are_revoked_too(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thief may have an old kit, which is valid to its last day."""
    pems = [contents(kits)["1/own.crt"]]
    for days in (1, 20):
        renew(kits, 1, days)
        pems.append(contents(kits)["1/own.crt"])
    other = contents(kits)["2/own.crt"]
    revoke(kits, 1)
    admission = Admission((kits / "0" / "ca.crt").read_bytes(), kits / "0" / "crl.pem")
    assert [bool(admission.refusal(pem)) for pem in (*pems, other)] == [True] * 3 + [False]
    late = now() + 15 * DAY  # two of them have expired
    monkeypatch.setattr(authority, "now", lambda: late)
    before = listed(kits / "ca" / "crl.pem")
    renew(kits, 1)
    revoke(kits, 1)
    assert len(listed(kits / "ca" / "crl.pem") - before) == 1
    assert (kits / "ca" / "1.pem").read_bytes() == pems[2] + (kits / "1" / "own.crt").read_bytes()
    (kits / "ca" / "1.pem").write_bytes(b"no")
    with pytest.raises(UserError, match=r"ca/1\.pem: is damaged"):
        revoke(kits, 1)


def test_kits_that_were_moved_away_are_revoked_too(kits: Path, tmp_path: Path) -> None:
    """One of silo 2 was made again by mistake; that of silo 1 is not here."""
    moved = {rank: contents(kits)[f"{rank}/own.crt"] for rank in (1, 2)}
    for rank in (1, 2):
        (kits / str(rank)).rename(tmp_path / f"moved-{rank}")
    assert f"list is {kits / '0' / 'crl.pem'};" in revoke(kits, 1)
    make(kits, 2)
    revoke(kits, 2)
    admission = Admission((kits / "0" / "ca.crt").read_bytes(), kits / "0" / "crl.pem")
    new = [contents(kits)[f"{rank}/own.crt"] for rank in (1, 2)]
    assert [bool(admission.refusal(pem)) for pem in (*moved.values(), *new)] == [True] * 2 + [
        False,
        True,
    ]
    shutil.rmtree(kits / "1")
    renew(kits, 1)
    assert admission.refusal(contents(kits)["1/own.crt"]) == ""


def test_revoking_twice_lists_once_and_mends_the_servers_list(kits: Path) -> None:
    empty = (kits / "0" / "crl.pem").read_bytes()
    revoke(kits, 2)
    (kits / "0" / "crl.pem").write_bytes(empty)
    revoke(kits, 2)
    assert (kits / "0" / "crl.pem").read_bytes() == (kits / "ca" / "crl.pem").read_bytes()
    crl = x509.load_pem_x509_crl((kits / "0" / "crl.pem").read_bytes())
    assert [revoked.serial_number for revoked in crl] == [certificate(kits, 2).serial_number]
    assert crl.next_update_utc is not None and crl.next_update_utc - now() > 3640 * DAY


def test_commands_at_the_same_time_lose_no_revocation(kits: Path) -> None:
    make(kits, 8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(revoke, kits), range(1, 9)))
    serials = {certificate(kits, rank).serial_number for rank in range(1, 9)}
    assert listed(kits / "0" / "crl.pem") == serials


def test_revoking_without_the_servers_kit_writes_the_cas_list(kits: Path) -> None:
    shutil.rmtree(kits / "0")
    assert f"list is {kits / 'ca' / 'crl.pem'};" in revoke(kits, 1)
    assert listed(kits / "ca" / "crl.pem") == {certificate(kits, 1).serial_number}
    assert not (kits / "0").exists()


@pytest.mark.parametrize("command", [renew, revoke])
def test_a_rank_without_a_kit_of_this_ca_is_refused(kits: Path, foreign: Path, command) -> None:
    for rank in (7, -1):
        allowed = "a rank with a kit, 0 to 2"
        with pytest.raises(UserError, match=f"--rank = {rank} is refused; allowed: {allowed}"):
            command(kits, rank)
    shutil.copy(foreign / "1" / "own.crt", kits / "1" / "own.crt")
    with pytest.raises(UserError, match=r"1/own\.crt: is not signed by the CA"):
        command(kits, 1)
    assert listed(kits / "ca" / "crl.pem") == set()


# The command line


def test_the_command_line_makes_renews_revokes_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits = tmp_path / "kits"
    for line in ("make --silos 2 --days 20", "renew --rank 1 --days 40", "revoke --rank 2"):
        assert main(["deploy", "kits", *line.split(), "--out", str(kits)]) == 0
    new, gone = (certificate(kits, rank) for rank in (1, 2))
    assert 39 * DAY < new.not_valid_after_utc - now() <= 40 * DAY
    assert 19 * DAY < gone.not_valid_after_utc - now() <= 20 * DAY
    capsys.readouterr()
    assert main(["deploy", "kits", "show", "--out", str(kits)]) == 0
    server, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert server[:2] == ["0", "server"] and server[5:] == ["not", "revoked"]
    for row, of, state in ((first, new, ["not", "revoked"]), (second, gone, ["revoked"])):
        assert int(row[2], 16) == of.serial_number and row[5:] == state
        assert row[4] == f"{of.not_valid_after_utc:%Y-%m-%d}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("make --silos 0", "invalid value for '--silos'"),
        ("make --silos 3 --days 0", "invalid value for '--days'"),
        ("renew --rank 1 --days 3651", "invalid value for '--days'"),
        ("show --out nowhere", "nowhere: can't be used (No such file or directory); `noniid deplo"),
        ("show --out /dev/null", "/dev/null: can't be used"),
        ("make --silos 1 --out /dev/null/kits", "/dev/null/kits: can't be used"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    kits: Path, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(kits)
    out = [] if "--out" in arguments else ["--out", str(kits)]
    assert main(["deploy", "kits", *arguments.split(), *out]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert words in said.err
    assert contents(kits) == before
