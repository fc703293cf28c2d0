"""Two logs that exchange seals: any tampering with one is found, kills are none."""

from __future__ import annotations

import json
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

    def opened(self, rank: int, kit: int | None = None) -> audit.Log:
        path = (self.server, self.silo)[rank]
        used = rank if kit is None else kit
        return audit.Log(path, Kit.read(self.kits / str(used), used), study="s")

    @staticmethod
    def talk(server: audit.Log, silo: audit.Log, exchange: int) -> None:
        for sender, name, receiver, other in (
            (server, "server", silo, "silo-1"),
            (silo, "silo-1", server, "server"),
        ):
            said = {"message": "Task" if sender is server else "Answer"}
            said |= {"head": {"exchange": exchange}, "sha256": f"{exchange}{name}"}
            sender.write(audit.SENT, peer=other, exchange=exchange, **said)
            seal = sender.seal()
            receiver.write(audit.ARRIVED, peer=name, exchange=exchange, **said, seal=seal)
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

    def again(self, bodies: list[dict], kit: int = 1) -> None:
        """Writes the silo's log anew, as the holder of a kit could: chained and signed."""
        log = bodies[0]["log"]
        self.silo.unlink()
        made = self.opened(1, kit)
        self.silo.write_bytes(b"")
        made._n, made._prev, made._log = 0, audit.NONE, log
        assert not [*made._file.read()]
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


def one_bit_of_a_signature(logs: Logs) -> None:
    at = logs.lines[5].index(b'"signature":"') + 40
    edited(5, b"(?<=.{%d})." % at, b"B" if logs.lines[5][at] == ord("A") else b"A")(logs)


def truncated_in_a_line(logs: Logs) -> None:
    logs.silo.write_bytes(b"".join(logs.lines[:-3]) + logs.lines[-3][:20])


def inserted(logs: Logs) -> None:
    line = json.dumps({"n": 5, "log": "x", "at": "", "kind": "sent", "prev": "0" * 64})
    logs.lines = [*logs.lines[:5], line.encode() + b"\n", *logs.lines[5:]]


def an_empty_line(logs: Logs) -> None:
    logs.lines = [*logs.lines[:5], b"\n", *logs.lines[5:]]


def another_silos_log(logs: Logs) -> None:
    logs.silo.unlink()
    logs.opened(1, kit=2)


def the_servers_log(logs: Logs) -> None:
    logs.silo.write_bytes(logs.server.read_bytes())


def a_log_begun_anew(logs: Logs) -> None:
    logs.silo.unlink()
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)


def an_older_copy(logs: Logs) -> None:
    old = logs.silo.read_bytes()
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)
    logs.silo.write_bytes(old)


def written_anew_by_its_own_process_without_a_line(logs: Logs) -> None:
    bodies = logs.bodies()
    logs.again(bodies[:5] + bodies[6:])


def written_anew_by_its_own_process_with_another_upload(logs: Logs) -> None:
    bodies = logs.bodies()
    bodies[5]["sha256"] = "f00d"
    logs.again(bodies)


def written_anew_with_another_key(logs: Logs) -> None:
    bodies = logs.bodies()
    authority.renew(logs.kits, 1)  # its holder has the old certificate, and a key of his own
    logs.again(bodies, kit=1)


def of_another_federation(logs: Logs) -> None:
    kits = logs.kits.parent / "foreign"
    authority.make(kits, 1)
    ours, logs.kits = logs.kits, kits
    certificate = (kits / "1" / "own.crt").read_text()
    logs.again([body | {"certificate": certificate} for body in logs.bodies()])
    logs.kits = ours


TAMPERINGS = {
    edited(
        4, b'"exchange":1', b'"exchange":2'
    ): r"audit-1.jsonl: line 6: does not follow|line 5: is not signed",
    edited(7, b'"at":"20', b'"at":"19'): "line 9: does not follow|line 8: is not signed",
    one_bit_of_a_signature: "line 6: is not signed by the process|line 6: is no line",
    edited(3, b'{"n"', b'{ "n"'): "line 4: is no line|line 5: does not follow",
    edited(3, b',"prev"', b',"sha256":"f00d","prev"'): "line 5: does not follow",
    only(*range(5), *range(6, 19)): r"line 6: does not follow the line before: .*\(it has n = 6\)",
    only(*range(1, 19)): r"line 1: does not follow .*\(it has n = 1\)",
    only(*range(16)): "had signed 18 lines; .* ends with line 16: lines were removed",
    truncated_in_a_line: "had signed 18 lines; .* ends with line 16: lines were removed",
    inserted: "line 6: is no line of an audit log",
    only(*range(5), *range(4, 19)): r"line 6: does not follow .*\(it has n = 4\)",
    only(*range(4), 5, 4, *range(6, 19)): r"line 5: does not follow .*\(it has n = 5\)",
    only(): "has no whole line",
    an_empty_line: "line 6: is no line of an audit log",
    another_silos_log: "audit-1.jsonl: is the log of silo-2",
    the_servers_log: "audit-1.jsonl: is the log of server",
    a_log_begun_anew: "line 3: silo-1 wrote the log .*; .*audit-1.jsonl is another one",
    an_older_copy: "had signed 22 lines; .* ends with line 19: lines were removed",
    written_anew_by_its_own_process_without_a_line: "line .: silo-1 had signed another line",
    written_anew_by_its_own_process_with_another_upload: "silo-1 had signed another line 6",
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
    server = logs.opened(0)
    seal = audit.Seal(logs.bodies()[0]["log"], 30, "0" * 64, "AAAA")
    said = {"message": "Answer", "head": {"exchange": 9}, "sha256": "f00d"}
    server.write(audit.ARRIVED, peer="silo-1", **said, seal=seal)
    server.write("noted", peer="silo-1", seal=[1, {}], certificate=3)
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


@pytest.mark.parametrize(
    ("source", "rank", "who"), [("foreign", 1, "a stranger"), ("kits", 2, "silo-2")]
)
def test_a_process_does_not_go_on_with_a_log_of_another(
    logs: Logs, tmp_path: Path, source: str, rank: int, who: str
) -> None:
    """Each line is signed, by a key of another CA or of another silo."""
    authority.make(tmp_path / "foreign", 1)
    place = logs.kits if source == "kits" else tmp_path / source
    logs.silo.unlink()
    audit.Log(logs.silo, Kit.read(place / str(rank), rank))
    before = logs.silo.read_bytes()
    with pytest.raises(UserError, match=f"is the log of {who}, and this is silo-1; move it away"):
        logs.opened(1)
    assert logs.silo.read_bytes() == before


def test_a_log_is_not_kept_in_memory(logs: Logs) -> None:
    """The other side decides how long it grows. Here: 40 lines of 250 kB."""
    log = logs.opened(1)
    for exchange in range(40):
        log.write(audit.ANSWERS, exchange=exchange % 2, peer="x" * 250_000)
    tracemalloc.start()
    again = logs.opened(1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again.answers == {(audit.ANSWERS, 0): 20, (audit.ANSWERS, 1): 20}
    assert most < 5_000_000 < logs.silo.stat().st_size / 2


def test_a_renewed_certificate_goes_on_with_the_log(tmp_path: Path, kits: Path) -> None:
    logs = Logs(tmp_path / "logs", Path(shutil.copytree(kits, tmp_path / "kits")))
    authority.renew(logs.kits, 1)
    Logs.talk(logs.opened(0), logs.opened(1), EXCHANGES)
    assert "23 lines of silo-1" in logs.verify()
