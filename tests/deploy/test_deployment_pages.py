"""docs/first_deployment.md and the first part of docs/operating.md, followed word by word on two
machines.

Each machine is a network namespace with a home folder of its own. The second reaches the first and
nothing else; what the first sends elsewhere is counted. The package is installed from its wheel.
Two commands of the pages are not run: `pip` (tests/test_package.py installs the wheel), and `scp`,
in whose place files are copied between the home folders.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.test_new_method import built, install, ran
from tests.pipelines.small import ROOT
from tests.test_package import copy_of_checkout

DOCS = ROOT / "docs"
GIVE_UP_S = 3600.0  # seconds; never reached where the pages are right
FIRST, SECOND = MACHINES = "first", "second"
ADDRESSES = {FIRST: "192.0.2.7", SECOND: "198.51.100.12"}  # of the pages
NOT_RUN = ("python3.11 -m venv", "pip install")
SCP = """\
#!/usr/bin/env bash
set -euo pipefail
places=()
for place in "$@"; do
  case $place in
    [0-9]*:*) places+=("$HOMES/${place%%:*}/${place#*:}") ;;
    *) places+=("$place") ;;
  esac
done
exec cp "${places[@]}"
"""
NONIID = """\
#!{python}
import sys
from fedml_noniid.__main__ import main
sys.exit(main())
"""
HEARD = "heard"  # file of all packets between the machines
LISTENER = """\
import os
import socket
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
line.bind(("second", 0))
while True:
    os.write(1, line.recv(1 << 17))
"""
SLOW = "rate 128kbit burst 16kb latency 1s"  # a round takes seconds, so the run lasts


class Block(NamedTuple):
    """A block of a page, as its first line says."""

    machine: str  # or "both"
    lines: list[str]

    def on(self, machine: str) -> list[str]:
        """The commands for a machine."""
        assert self.machine in (machine, "both"), self
        return [line for line in self.lines if not line.startswith(NOT_RUN)]


def blocks() -> Iterator[Block]:
    """Those of the pages' steps, from the top."""
    operating, _, rest = (DOCS / "operating.md").read_text().partition("\n## What happens when")
    assert rest
    steps = (DOCS / "first_deployment.md").read_text() + operating
    for code in re.findall(r"^```sh\n(.*?)^```", steps, flags=re.DOTALL | re.MULTILINE):
        where, *lines = code.splitlines()
        yield Block(re.split("[:,]", where.removeprefix("# "))[0], lines)


@dataclass
class Machine:
    """A network namespace with a home folder."""

    name: str
    namespace: str
    home: Path
    env: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The working folder, once the page has made it."""
        place = self.home / "federation"
        return place if place.is_dir() else self.home

    def command(self, code: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "bash", "-euo", "pipefail", "-c", code]

    def run(self, code: str) -> str:
        """What a block prints."""
        done = subprocess.run(
            self.command(code),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {code}\n{done.stdout}{done.stderr}"
        return done.stdout


@dataclass
class Terminal:
    """A terminal in which one command runs, and runs again."""

    machine: Machine
    command: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes[-1]

    @property
    def _shown(self) -> Path:
        return self.machine.home / re.sub(r"\W+", "-", self.command)

    @property
    def said(self) -> str:
        """All that it shows."""
        return self._shown.read_text()

    def start(self) -> None:
        with self._shown.open("a") as shown:
            process = subprocess.Popen(
                self.machine.command(self.command),
                cwd=self.machine.folder,
                env=self.machine.env,
                stdout=shown,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)

    def signal(self, number: signal.Signals) -> None:
        """To its processes, as Ctrl-C does."""
        os.killpg(self.process.pid, number)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def network(namespaces: Mapping[str, str], world: str) -> None:
    """A line between the machines, and one from the first to a router that drops everything."""

    def line(a: str, b: str, addresses: tuple[str, str], names: tuple[str, str]) -> None:
        ip("link", "add", names[0], "netns", a, "type", "veth", "peer", names[1], "netns", b)
        for at, own, other, name in ((a, *addresses, names[0]), (b, *addresses[::-1], names[1])):
            ip("-n", at, "address", "add", f"{own}/32", "dev", name)
            ip("-n", at, "link", "set", name, "up")
            ip("-n", at, "route", "add", f"{other}/32", "dev", name)

    for namespace in (*namespaces.values(), world):
        ip("netns", "add", namespace)
        for which in ("all", "default"):  # else it sends packets unasked
            setting = f"net.ipv6.conf.{which}.disable_ipv6=1"
            ip("netns", "exec", namespace, "sysctl", "-q", "-w", setting)
        ip("-n", namespace, "link", "set", "lo", "up")
    places = ADDRESSES[FIRST], ADDRESSES[SECOND]
    line(namespaces[FIRST], namespaces[SECOND], places, (SECOND, FIRST))
    tc = ("tc", "qdisc", "add", "dev", FIRST, "root", "tbf", *SLOW.split())
    ip("netns", "exec", namespaces[SECOND], *tc)
    line(namespaces[FIRST], world, (ADDRESSES[FIRST], "203.0.113.1"), ("world", FIRST))
    ip("-n", namespaces[FIRST], "route", "add", "default", "via", "203.0.113.1", "dev", "world")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "sysctl", "openssl"))):
        pytest.skip("network namespaces need root, ip, tc, sysctl and openssl")
    namespaces = {name: f"noniid-{os.getpid()}-{k}" for k, name in enumerate(MACHINES)}
    world = f"noniid-{os.getpid()}-world"
    found: dict[str, Machine] = {}
    with ExitStack() as stack:
        for name in (*namespaces.values(), world):
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
        try:
            network(namespaces, world)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.cmd}: {error.stderr}")
        ear = ["ip", "netns", "exec", namespaces[FIRST], sys.executable, "-c", LISTENER]
        with (tmp_path / HEARD).open("wb") as heard:
            listener = subprocess.Popen(ear, stdout=heard)
        stack.callback(listener.wait)
        stack.callback(listener.kill)  # first
        tools = installed(tmp_path)
        for name in MACHINES:
            home = tmp_path / "homes" / ADDRESSES[name]
            home.mkdir(parents=True)
            env = {
                "HOME": str(home),
                "HOMES": str(home.parent),
                "LANG": "C.UTF-8",
                "PATH": f"{tools}:{os.environ['PATH']}",
            }
            found[name] = Machine(name, namespaces[name], home, env)
        yield found


def installed(folder: Path) -> Path:
    """The folder of `python`, with this package's wheel and its dependencies, `noniid` and
    `scp`."""
    ran([sys.executable, "-m", "venv", "--without-pip", str(folder / "environment")], folder)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, ""]))
    install(built(copy_of_checkout(folder / "checkout")), site)
    shutil.rmtree(folder / "checkout")
    place = folder / "environment" / "bin"
    for name, text in (("noniid", NONIID.format(python=place / "python")), ("scp", SCP)):
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    return place


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Those of the deployment, whose processes end with the test."""
    every: list[Terminal] = []
    yield every
    for process in (process for terminal in every for process in terminal.processes):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(GIVE_UP_S)
def test_an_operator_who_follows_the_pages_succeeds(
    machines: dict[str, Machine], terminals: list[Terminal]
) -> None:
    first, second = machines.values()
    page = blocks()

    def follow(*who: Machine) -> list[str]:
        block = next(page)
        return [machine.run("\n".join(block.on(machine.name))) for machine in who]

    def until(true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not true():
            said = "".join(f"{one.command}:\n{one.said}\n" for one in terminals)
            assert {one.process.poll() for one in terminals} <= {None, 0}, said
            assert time.monotonic() < end, f"waited for {what} in vain\n{said}"
            time.sleep(0.2)

    def rounds() -> int:
        table = first.home / "federation" / "run" / "rounds.csv"
        return len(table.read_text().splitlines()) - 1 if table.exists() else 0

    def goes_on() -> None:
        """A silo that was killed may have sent its answer of the present round."""
        done = rounds()
        until(lambda: rounds() > done + 1, "two more rounds")

    def departures() -> int:
        """How often silo 2 has left, as far as the server knows."""
        log = first.home / "federation" / "run" / "fedml-0.log"
        return log.read_text().count("silo 1 (rank 2) has left")

    def serial() -> str:
        """Of the certificate that the server shows to silo 2."""
        asking = f"openssl s_client -connect {ADDRESSES[FIRST]}:8890 </dev/null 2>/dev/null"
        shown = "openssl x509 -noout -serial 2>/dev/null"  # of nothing, while the server changes it
        return second.run(f"({asking} || true) | {shown} || true")

    follow(first, second)  # folders
    follow(first, second)  # the program that writes data files
    follow(first)  # kits, data, study, policy
    *decide, join = next(page).on(SECOND)
    assert "policy.yaml admits it" in second.run("\n".join(decide))
    begin, join_first = next(page).on(FIRST)
    server, silo_1, silo_2 = (
        Terminal(*pair) for pair in ((first, begin), (first, join_first), (second, join))
    )
    terminals += [server, silo_1, silo_2]
    for terminal in terminals:
        terminal.start()
    goes_on()

    # A day in operation
    (status,) = follow(first)
    assert json.loads(status)["there"] == [0, 1]
    assert {*json.loads(status)["kits"]} == {"server", "silo-1", "silo-2"}
    silo_2.signal(signal.SIGKILL)
    silo_2.process.wait()
    silo_2.start()
    goes_on()
    before = departures()
    second.run(f"ip link set {FIRST} down")  # nobody is told
    until(lambda: departures() > before, "the server's notice")
    second.run(f"ip link set {FIRST} up && ip route add {ADDRESSES[FIRST]}/32 dev {FIRST}")
    goes_on()
    for terminal in (server, silo_1):
        terminal.signal(signal.SIGINT)
        assert terminal.process.wait(GIVE_UP_S) == 6, terminal.said
    follow(first)  # the back-up
    shutil.rmtree(first.folder)
    follow(first)
    server.start()
    silo_1.start()
    goes_on()

    # Rotation
    old = serial()
    assert old
    follow(first)
    until(lambda: serial() not in ("", old), "the server's new certificate")
    goes_on()
    follow(first)  # a theft at silo 2
    until(lambda: "certificate of silo-2 is revoked" in silo_2.said, "the silo's line")
    follow(first)  # it takes the new kit
    goes_on()

    # The end
    second.run(f"tc qdisc del dev {FIRST} root")
    for terminal in terminals:
        assert terminal.process.wait(GIVE_UP_S) == 0, terminal.said
    deployed = re.findall(r"^weights ([0-9a-f]{64}) in run/model.safetensors$", server.said, re.M)
    said = [*follow(first), *follow(second)]
    again = [len(re.findall(r"the same SHA-256 [0-9a-f]{64}$", one, re.M)) for one in said]
    assert all("agree with it" in one for one in said)
    assert again[1] >= rounds() == 100
    assert again[0] > 0 and "not compared" in said[0], "the back-up has no files of replay"
    (simulated,) = follow(first)
    assert [simulated.strip()] == deployed
    assert next(page, None) is None, "every block of the pages was followed"
    heard = (first.home.parents[1] / HEARD).read_bytes()
    assert b"server" in heard, "the one name that TLS sends in the open"
    assert len(heard) > rounds() * 4 * 4810 * 4, "w and c, both ways"
    for word in (b"silo-2", b'"exchange"', b"deltas", b"scaffold"):
        assert word not in heard, word
    packets = "/sys/class/net/world/statistics/tx_packets"
    assert first.run(f"cat {packets}") == "0\n", "nobody has asked another host than the server"
