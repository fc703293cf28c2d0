"""docs/deploying.md, followed word by word on four machines.

Each machine is a network namespace with a home folder of its own. The silos' machines reach the
server's and nothing else; the office's reaches nothing. The package is installed from its wheel.
Two commands of the page are not run: `pip` (tests/test_package.py installs the wheel), and `scp`,
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

PAGE = ROOT / "docs" / "deploying.md"
GIVE_UP_S = 3600.0  # seconds; never reached where the page is right
OFFICE, SERVER, SILO_1, SILO_2 = MACHINES = "office", "server", "silo 1", "silo 2"
ADDRESSES = {SERVER: "192.0.2.7", SILO_1: "198.51.100.11", SILO_2: "198.51.100.12"}  # of the page
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
HEARD = "heard"  # file of all packets between the server and silo 1
LISTENER = """\
import os
import socket
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
line.bind(("silo1", 0))
while True:
    os.write(1, line.recv(1 << 17))
"""
SLOW = "rate 128kbit burst 16kb latency 1s"  # a round takes seconds, so the run lasts


class Block(NamedTuple):
    """A block of the page, as its first line says."""

    where: str
    code: str

    def on(self, machine: str) -> str:
        """The commands for a machine: the second silo's rank is another one."""
        if self.where == "each silo; the second one: rank=2":
            assert self.code.startswith("rank=1\n") and machine in (SILO_1, SILO_2)
            return self.code.replace("rank=1", f"rank={machine[-1]}", 1)
        assert self.where in (machine, "every machine"), self
        return self.code


def blocks() -> Iterator[Block]:
    """Those of the page's steps, from the top."""
    steps = (
        PAGE.read_text().partition("## Step by step\n")[2].partition("\n## What happens when")[0]
    )
    assert steps
    for found in re.findall(r"^```sh\n(.*?)^```", steps, flags=re.DOTALL | re.MULTILINE):
        where, _, code = found.partition("\n")
        yield Block(where.removeprefix("# "), code)


@dataclass
class Machine:
    """A network namespace with a home folder."""

    name: str
    namespace: str
    home: Path
    env: Mapping[str, str]
    processes: list[subprocess.Popen] = field(default_factory=list)

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

    def start(self, code: str) -> None:
        """Starts a process in a terminal of its own."""
        with (self.home / "terminal").open("a") as terminal:
            process = subprocess.Popen(
                self.command(code),
                cwd=self.folder,
                env=self.env,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.processes.append(process)

    def signal(self, number: signal.Signals) -> None:
        """To the terminal's processes, as Ctrl-C does."""
        os.killpg(self.processes[-1].pid, number)

    @property
    def said(self) -> str:
        """All that its terminal shows."""
        return (self.home / "terminal").read_text()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def network(namespaces: Mapping[str, str], world: str) -> None:
    """Lines from the silos to the server, and from silo 2 to a router that drops everything."""

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
    for silo, to in ((SILO_1, "silo1"), (SILO_2, "silo2")):
        places = ADDRESSES[SERVER], ADDRESSES[silo]
        line(namespaces[SERVER], namespaces[silo], places, (to, "server"))
        tc = ("tc", "qdisc", "add", "dev", "server", "root", "tbf", *SLOW.split())
        ip("netns", "exec", namespaces[silo], *tc)
    line(namespaces[SILO_2], world, (ADDRESSES[SILO_2], "203.0.113.1"), ("world", "silo2"))
    ip("-n", namespaces[SILO_2], "route", "add", "default", "via", "203.0.113.1", "dev", "world")


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
        ear = ["ip", "netns", "exec", namespaces[SERVER], sys.executable, "-c", LISTENER]
        with (tmp_path / HEARD).open("wb") as heard:
            listener = subprocess.Popen(ear, stdout=heard)
        stack.callback(listener.wait)
        stack.callback(listener.kill)  # first
        tools = installed(tmp_path)
        for name in MACHINES:
            home = tmp_path / "homes" / ADDRESSES.get(name, name)
            home.mkdir(parents=True)
            env = {
                "HOME": str(home),
                "HOMES": str(home.parent),
                "LANG": "C.UTF-8",
                "PATH": f"{tools}:{os.environ['PATH']}",
            }
            found[name] = Machine(name, namespaces[name], home, env)
        yield found
        for machine in found.values():
            for process in machine.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


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


@pytest.mark.slow
@pytest.mark.timeout(GIVE_UP_S)
def test_an_operator_who_follows_the_page_succeeds(machines: dict[str, Machine]) -> None:
    office, server, *silos = machines.values()
    page = blocks()

    def follow(*who: Machine) -> list[str]:
        block = next(page)
        return [machine.run(block.on(machine.name)) for machine in who]

    def until(true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not true():
            said = "".join(f"{m.name}:\n{m.said}\n" for m in (server, *silos))
            running = [m.processes[-1] for m in (server, *silos)]
            assert {process.poll() for process in running} <= {None, 0}, said
            assert time.monotonic() < end, f"waited for {what} in vain\n{said}"
            time.sleep(0.2)

    def rounds() -> int:
        table = server.home / "federation" / "run" / "rounds.csv"
        return len(table.read_text().splitlines()) - 1 if table.exists() else 0

    def goes_on() -> None:
        """A silo that was killed may have sent its answer of the present round."""
        done = rounds()
        until(lambda: rounds() > done + 1, "two more rounds")

    def departures() -> int:
        """How often silo 1 has left, as far as the server knows."""
        log = server.home / "federation" / "run" / "fedml-0.log"
        return log.read_text().count("silo 0 (rank 1) has left")

    def serial() -> str:
        """Of the certificate that the server shows to silo 1."""
        asking = f"openssl s_client -connect {ADDRESSES[SERVER]}:8890 </dev/null 2>/dev/null"
        shown = "openssl x509 -noout -serial 2>/dev/null"  # of nothing, while the server changes it
        return silos[0].run(f"({asking} || true) | {shown} || true")

    assert "pip install" in next(page).on(OFFICE)
    follow(*machines.values())  # folders
    follow(office)  # kits
    follow(office)  # the server's data
    follow(*silos)  # the silos' data
    follow(office)  # the study
    follow(server)  # its policy
    for said in follow(*silos):  # theirs
        assert "policy.yaml admits it" in said
    begin, join = next(page), next(page)
    server.start(begin.on(SERVER))
    for silo in silos:
        silo.start(join.on(silo.name))
    goes_on()
    (status,) = follow(server)
    assert json.loads(status)["there"] == [0, 1]
    assert {*json.loads(status)["kits"]} == {"server", "silo-1", "silo-2"}

    # A day in operation
    silos[0].signal(signal.SIGKILL)
    silos[0].processes[-1].wait()
    silos[0].start(join.on(SILO_1))
    goes_on()
    before = departures()
    silos[0].run("ip link set server down")  # nobody is told
    until(lambda: departures() > before, "the server's notice")
    silos[0].run(f"ip link set server up && ip route add {ADDRESSES[SERVER]}/32 dev server")
    goes_on()
    server.signal(signal.SIGINT)
    assert server.processes[-1].wait(GIVE_UP_S) == 6, server.said
    follow(server)  # the back-up
    shutil.rmtree(server.folder)
    follow(server)
    server.start(begin.on(SERVER))
    goes_on()

    # Rotation
    old = serial()
    assert old
    follow(office)
    until(lambda: serial() not in ("", old), "the server's new certificate")
    goes_on()
    follow(office)  # a theft at silo 2
    until(lambda: "certificate of silo-2 is revoked" in silos[1].said, "the silo's line")
    follow(office)  # it takes the new kit
    goes_on()

    # The end
    for silo in silos:
        silo.run("tc qdisc del dev server root")
    for machine in (server, *silos):
        assert machine.processes[-1].wait(GIVE_UP_S) == 0, machine.said
    deployed = re.findall(r"^weights ([0-9a-f]{64}) in run/model.safetensors$", server.said, re.M)
    follow(office)  # logs go to the silos
    for silo, said in zip(silos, follow(*silos), strict=True):
        assert "agree with it" in said
        answered = re.findall(r"the same SHA-256 [0-9a-f]{64}$", said, re.M)
        assert len(answered) >= rounds() == 100, silo.name
    (simulated,) = follow(office)
    assert [simulated.strip()] == deployed
    assert next(page, None) is None, "every block of the page was followed"
    heard = (office.home.parents[1] / HEARD).read_bytes()
    assert b"server" in heard, "the one name that TLS sends in the open"
    assert len(heard) > rounds() * 4 * 4810 * 4, "w and c, both ways"
    for word in (b"silo-1", b'"exchange"', b"deltas", b"scaffold"):
        assert word not in heard, word
    packets = "/sys/class/net/world/statistics/tx_packets"
    assert silos[1].run(f"cat {packets}") == "0\n", "nobody has asked another host than the server"
