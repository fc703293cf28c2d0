"""docs/first_deployment.md and the first part of docs/operating.md, followed word by word.

Each machine is a home folder. The package is installed from its wheel. Two commands of the pages
are not run: `pip` (tests/test_package.py installs the wheel), and `scp`, in whose place files are
copied between the home folders. There are more rounds, so that the run lasts.
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
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_new_method import ran
from tests.deploy.federation_server import address
from tests.pipelines.small import ROOT
from tests.test_package import built_by, copy_of_checkout

DOCS = ROOT / "docs"
GIVE_UP_S = 3600.0  # seconds; never reached where the pages are right
ROUNDS = 1000  # as many as a policy admits
FIRST, SECOND = "192.0.2.7", "198.51.100.12"  # of the pages
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


def blocks() -> Iterator[list[str]]:
    """The commands of the pages' steps, from the top."""
    operating, _, rest = (DOCS / "operating.md").read_text().partition("\n## What happens when")
    assert rest
    steps = (DOCS / "first_deployment.md").read_text() + operating
    for change in ((f"{FIRST}:8890", address()), ("rounds: 100", f"rounds: {ROUNDS}")):
        assert change[0] in steps
        steps = steps.replace(*change)
    steps = steps.replace('"rounds": 100', f'"rounds": {ROUNDS}')
    for code in re.findall(r"^```sh\n(.*?)^```", steps, flags=re.DOTALL | re.MULTILINE):
        yield [line for line in code.splitlines()[1:] if not line.startswith(NOT_RUN)]


class Machine:
    """A home folder."""

    def __init__(self, home: Path, tools: Path) -> None:
        self.home, homes = home, str(home.parent)
        home.mkdir(parents=True)
        path = f"{tools}:{os.environ['PATH']}"
        self.env = {"HOME": str(home), "HOMES": homes, "LANG": "C.UTF-8", "PATH": path}
        self.shown: dict[str, Path] = {}  # command -> all that its terminal shows
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, command: str, output: object) -> subprocess.Popen[bytes]:
        """Begins a command in the working folder, once the page has made it."""
        folder = self.home / "federation"
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder if folder.is_dir() else self.home,
            env=self.env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, lines: list[str]) -> str:
        """What a block prints."""
        process = self.start("\n".join(lines), subprocess.PIPE)
        output = process.communicate()[0].decode()
        assert process.returncode == 0, f"{lines}\n{output}"
        return output

    def terminal(self, command: str) -> None:
        """Runs a command in its terminal, also again."""
        path = self.shown.setdefault(command, self.home / f"{len(self.shown)}.txt")
        with path.open("a") as shown:
            self.processes[command] = self.start(command, shown)

    def end(self, command: str, number: signal.Signals | None = None) -> int:
        """The exit code of a terminal's command, after a signal to its processes, as by Ctrl-C."""
        process = self.processes[command]
        if number is not None:
            os.killpg(process.pid, number)
        return process.wait(GIVE_UP_S)


def installed(folder: Path) -> Path:
    """The folder of `python`, with this package's wheel and its dependencies, `noniid` and
    `scp`."""
    ran([sys.executable, "-m", "venv", "--without-pip", str(folder / "environment")], folder)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, ""]))
    wheel = built_by("build_wheel", copy_of_checkout(folder / "checkout"), folder / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    tools = folder / "environment" / "bin"
    for name, text in (("noniid", NONIID.format(python=tools / "python")), ("scp", SCP)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tools


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """The first and the second; their processes end with the test."""
    tools = installed(tmp_path)
    machines = [Machine(tmp_path / "homes" / place, tools) for place in (FIRST, SECOND)]
    yield machines
    for process in (process for machine in machines for process in machine.processes.values()):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(GIVE_UP_S)
def test_an_operator_who_follows_the_pages_succeeds(machines: list[Machine]) -> None:
    (first, second), page = machines, blocks()

    def until(true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while not true():
            codes = [p.poll() for machine in machines for p in machine.processes.values()]
            assert {*codes} <= {None, 0} and time.monotonic() < end, f"{what}: {codes}"
            time.sleep(0.2)

    def rounds() -> int:
        table = first.home / "federation" / "run" / "rounds.csv"
        return len(table.read_text().splitlines()) - 1 if table.exists() else 0

    def goes_on() -> None:
        """A silo that was killed may have sent its answer of the present round."""
        done = rounds()
        until(lambda: rounds() > done + 1, "two more rounds")

    for _ in range(2):  # folders; the program that writes data files
        lines = next(page)
        for machine in machines:
            machine.run(lines)
    first.run(next(page))  # kits, data, study, policy
    *decide, join = next(page)
    assert "policy.yaml admits it" in second.run(decide)
    server, join_first = next(page)
    first.terminal(server)
    first.terminal(join_first)
    second.terminal(join)
    goes_on()

    # A day in operation
    status = json.loads(first.run(next(page)))
    assert status["there"] == [0, 1] and {*status["kits"]} == {"server", "silo-1", "silo-2"}
    second.end(join, signal.SIGKILL)
    second.terminal(join)
    goes_on()
    assert [first.end(command, signal.SIGINT) for command in (server, join_first)] == [6, 6]
    first.run(next(page))  # the back-up
    shutil.rmtree(first.home / "federation")
    first.run(next(page))
    first.terminal(server)
    first.terminal(join_first)
    goes_on()

    # Rotation
    first.run(next(page))
    goes_on()
    first.run(next(page))  # a theft at silo 2
    said = "certificate of silo-2 is revoked"
    until(lambda: said in second.shown[join].read_text(), "the silo's line")
    first.run(next(page))  # it takes the new kit

    # The end
    assert [first.end(server), first.end(join_first), second.end(join)] == [0, 0, 0]
    verified = [first.run(next(page)), second.run(next(page))]
    again = [len(re.findall(r"the same SHA-256 [0-9a-f]{64}$", text, re.M)) for text in verified]
    assert all("agree with it" in text for text in verified) and all(again)
    said = first.shown[server].read_text()
    (deployed,) = re.findall(r"^weights (\w{64}) in run/model", said, re.M)
    assert first.run(next(page)).strip() == deployed, "the simulation's"
    assert next(page, None) is None, "every block of the pages was followed"
