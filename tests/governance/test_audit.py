"""Two logs that exchange seals: any tampering with one is found, kills are none."""

from __future__ import annotations

import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import Lines
from fedml_noniid.governance import audit

EXCHANGES = 6


class Logs:
    """The logs of a server and of silo 1, and of what they said to each other."""

    def __init__(self, folder: Path, kits: Path) -> None:
        self.kits, self.ca = kits, kits / "ca" / "ca.crt"
        self.server, self.silo = folder / "audit-0.jsonl", folder / "audit-1.jsonl"
        folder.mkdir()
        server, silo = self.opened(0), self.opened(1)
        for exchange in range(EXCHANGES):
            self.talk(server, silo, exchange)

    def opened(self, rank: int) -> audit.Log:
        path = (self.server, self.silo)[rank]
        return audit.Log(path, Kit.read(self.kits / str(rank), rank), study="s")

    @staticmethod
    def talk(server: audit.Log, silo: audit.Log, exchange: int) -> None:
        ends = (server, "server", "Task"), (silo, "silo-1", "Answer")
        for (log, name, message), (other, peer, _) in (ends, ends[::-1]):
            facts = {"message": message, "head": {"exchange": exchange}, "exchange": exchange}
            facts["sha256"] = f"{exchange}{name}"
            log.write(audit.SENT, peer=peer, **facts)
            other.write(audit.ARRIVED, peer=name, **facts, seal=log.seal())
        silo.write("noted", exchange=exchange)

    def verify(self) -> str:
        """What `noniid audit verify` says of the silo's log. Raises UserError."""
        return audit.verify(self.silo, self.ca, self.server)

    @property
    def lines(self) -> list[bytes]:
        return self.silo.read_bytes().splitlines(keepends=True)

    @lines.setter
    def lines(self, lines: list[bytes]) -> None:
        self.silo.write_bytes(b"".join(lines))

    def again(self, bodies: list[dict]) -> None:
        """Writes the silo's log anew, as the holder of its kit could: chained and signed."""
        self.silo.unlink()
        made = self.opened(1)
        self.silo.write_bytes(b"")
        assert not list(made._file.read())
        made._n, made._prev, made._log = 0, audit.NONE, bodies[0]["log"]
        for body in bodies:
            kept = {k: v for k, v in body.items() if k not in ("n", "log", "prev", "kind", "at")}
            made.write(body["kind"], **kept)

    def bodies(self) -> list[dict]:
        return [line.body for line in audit.chained(self.silo, Lines(self.silo).read())]


@pytest.fixture
def logs(tmp_path, kits):
    return Logs(tmp_path / "logs", kits)


def test_what_was_not_tampered_with_is_whole(logs: Logs) -> None:
    assert logs.verify() == (
        f"{logs.silo}: 19 lines of silo-1, each as it was signed\n"
        f"{logs.server}: 13 lines of server agree with it\n"
    )
    assert audit.verify(logs.server, logs.ca, logs.silo)
    assert "show only with --against" in audit.verify(logs.silo, logs.ca)


def edited(n: int, old: bytes, new: bytes) -> Callable[[Logs], None]:
    """Changes the line at `n`, from 0, by a pattern."""

    def tamper(logs: Logs) -> None:
        lines = logs.lines
        lines[n], found = re.subn(old, new, lines[n], count=1)
        assert found == 1
        logs.lines = lines

    return tamper


def only(*numbers: int) -> Callable[[Logs], None]:
    """Keeps these lines, from 0, in this order."""

    def tamper(logs: Logs) -> None:
        logs.lines = [logs.lines[n] for n in numbers]

    return tamper


def the_servers_log(logs: Logs) -> None:
    logs.silo.write_bytes(logs.server.read_bytes())


def a_log_begun_anew(logs: Logs) -> None:
    logs.silo.unlink()
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)


def an_older_copy(logs: Logs) -> None:
    old = logs.silo.read_bytes()
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)
    logs.silo.write_bytes(old)


def written_anew_by_its_own_process_with_another_upload(logs: Logs) -> None:
    bodies = logs.bodies()
    bodies[5]["sha256"] = "f00d"
    logs.again(bodies)


def written_anew_with_another_key(logs: Logs) -> None:
    bodies = logs.bodies()
    authority.renew(logs.kits, 1)  # its holder has the old certificate, and a key of his own
    logs.again(bodies)


def of_another_federation(logs: Logs) -> None:
    bodies = logs.bodies()
    shutil.rmtree(logs.kits)
    authority.make(logs.kits, 1)
    certificate = (logs.kits / "1" / "own.crt").read_text()
    logs.again([body | {"certificate": certificate} for body in bodies])


TAMPERINGS = {
    edited(
        4, b'"exchange":1', b'"exchange":2'
    ): r"audit-1.jsonl: line 6: does not follow|line 5: is not signed",
    edited(3, b'{"n"', b'{ "n"'): "line 4: is no line|line 5: does not follow",
    edited(3, b',"prev"', b',"sha256":"f00d","prev"'): "line 5: does not follow",
    only(*range(5), *range(6, 19)): r"line 6: does not follow the line before: .*\(it has n = 6\)",
    only(*range(16)): "silo-1 had signed line 18 .* another line there or none: lines were removed",
    only(*range(4), 5, 4, *range(6, 19)): r"line 5: does not follow .*\(it has n = 5\)",
    only(): "has no whole line",
    the_servers_log: "audit-1.jsonl: is the log of server",
    a_log_begun_anew: "line 3: silo-1 had signed line 3 of the log .* another line there or none",
    an_older_copy: "silo-1 had signed line 22 .* another line there or none: lines were removed",
    written_anew_by_its_own_process_with_another_upload: "had signed line 6 .* has another line",
    written_anew_with_another_key: "line 1: is not signed by the process",
    of_another_federation: "line 1: has the certificate of a stranger",
}


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda one: one.__name__)
def test_tampering_is_found_and_the_line_is_named(
    tmp_path: Path, kits: Path, tamper: Callable[[Logs], None]
) -> None:
    logs = Logs(tmp_path / "logs", Path(shutil.copytree(kits, tmp_path / "kits")))
    tamper(logs)
    with pytest.raises(UserError, match=TAMPERINGS[tamper]):
        logs.verify()


def test_the_other_side_can_not_accuse_without_a_signature(logs: Logs) -> None:
    """The server writes down a seal that the silo never made, and a message that it never sent."""
    seal = audit.Seal(logs.bodies()[0]["log"], 30, "0" * 64, "AAAA")
    said = {"message": "Answer", "head": {"exchange": 9}, "sha256": "f00d"}
    logs.opened(0).write(audit.ARRIVED, peer="silo-1", **said, seal=seal)
    with pytest.raises(UserError) as error:
        logs.verify()
    assert str(error.value).splitlines() == [
        f"{logs.server}: line 15: has a seal that silo-1 has not signed",
        f"{logs.server}: line 15: got 'Answer' {{'exchange': 9}}; {logs.silo} has not sent it",
    ]


def test_a_line_that_a_kill_has_cut_is_no_tampering(logs: Logs) -> None:
    """Nor does the log go on behind it."""
    whole, bodies = logs.silo.read_bytes(), logs.bodies()
    logs.silo.write_bytes(whole + whole.splitlines()[-1][:50])
    assert "its last 50 bytes are a line that a kill has cut" in logs.verify()
    again = logs.opened(1)
    assert logs.bodies()[:19] == bodies and logs.bodies()[19]["cut_bytes"] == 50
    Logs.talk(logs.opened(0), again, EXCHANGES)
    assert "23 lines of silo-1" in logs.verify()


@pytest.mark.parametrize(
    ("n", "words"), [(4, "line 6: does not follow"), (18, "line 19: is not signed by the process")]
)
def test_a_process_does_not_go_on_with_a_damaged_log(logs: Logs, n: int, words: str) -> None:
    """No line follows the last one, whose chain would show the change."""
    edited(n, rb'"exchange":\d', b'"exchange":9')(logs)
    with pytest.raises(UserError, match=rf"audit-1\.jsonl: {words}"):
        logs.opened(1)


@pytest.mark.parametrize(("rank", "who"), [(1, "a stranger"), (2, "silo-2")])
def test_a_process_does_not_go_on_with_a_log_of_another(
    logs: Logs, tmp_path: Path, rank: int, who: str
) -> None:
    """Each line is signed, by a key of another CA or of another silo."""
    authority.make(tmp_path / "foreign", 1)
    folder = tmp_path / "foreign" if who == "a stranger" else logs.kits
    logs.silo.unlink()
    audit.Log(logs.silo, Kit.read(folder / str(rank), rank))
    with pytest.raises(UserError, match=f"is the log of {who}, and this is silo-1; move it away"):
        logs.opened(1)


def test_a_log_is_not_kept_in_memory(logs: Logs) -> None:
    """The other side decides how long it grows. Here: 40 lines of 250 kB."""
    log = logs.opened(1)
    for exchange in range(40):
        log.write(audit.ANSWERS, exchange=exchange % 2, peer="x" * 250_000)
    tracemalloc.start()
    answers = logs.opened(1).answers
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answers == {(audit.ANSWERS, 0): 20, (audit.ANSWERS, 1): 20} and most < 5_000_000


def test_a_renewed_certificate_goes_on_with_the_log(tmp_path: Path, kits: Path) -> None:
    logs = Logs(tmp_path / "logs", Path(shutil.copytree(kits, tmp_path / "kits")))
    authority.renew(logs.kits, 1)
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)
    assert "23 lines of silo-1" in logs.verify()


def test_a_seal_is_given_once_its_lines_are_on_the_disk(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power would show as lines that were removed."""
    log, synced = logs.opened(1), []
    monkeypatch.setattr(Lines, "sync", lambda _: synced.append(log._n))
    for _ in range(2):
        log.write("noted")
        log.seal()
        log.seal()
    assert synced == [log._n - 1, log._n]
