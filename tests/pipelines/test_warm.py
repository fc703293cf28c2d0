"""The warm processes of `noniid run`: a stage in them is as in its own process, and nothing of it
outlives its command.

Stages are stood in for by a function; the last tests run the true ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.stages.handover import WARM
from fedml_noniid.pipelines.tools import warm
from tests.pipelines.small import ROOT, environment

CODE = [ROOT / "fedml_noniid" / "plugins", ROOT / "fedml_noniid" / "pipelines"]
COMMAND = (sys.executable, "-m", "fedml_noniid.pipelines.stages")
# As the command: without a warm process it says so, in place of running a stage.
ASK = (
    "import sys; from fedml_noniid.pipelines.stages.handover import handed_over; "
    "print(handed_over(['plan']))"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an experiment. All code is old."""
    monkeypatch.setattr(warm, "EDITED_S", 0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("DVC_ROOT", raising=False)
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


Serve = Callable[[Callable[[list[str]], int]], contextlib.AbstractContextManager[None]]


@pytest.fixture
def serve(place: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Warm processes whose stages are a function."""

    @contextlib.contextmanager
    def processes(stage: Callable[[list[str]], int]) -> Iterator[None]:
        monkeypatch.setattr(stages, "main", stage)
        with warm.processes(place, CODE, deploys=False, eager=False):
            yield

    return processes


def start(place: Path, *command: str, **named: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command or (*COMMAND, "plan"),
        cwd=place,
        env=os.environ | named,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def written(path: Path) -> str:
    until = time.monotonic() + 120
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < until, path
        time.sleep(0.01)
    return path.read_text().strip()


def waiting(_: list[str]) -> int:
    """A stage that works for a minute, in two processes, and says which."""

    def work() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        Path("pids").write_text(f"{os.getpid()} {child}\n")
        time.sleep(60)

    return edge.guarded(work)


def test_a_stage_has_all_that_its_command_has(serve: Serve, place: Path) -> None:
    def stage(arguments: list[str]) -> int:
        facts = (arguments, os.getcwd(), os.environ["DVC_X"], sys.stdin.read())
        sys.stdout.write(f"{facts}\n")
        sys.stderr.write(f"{len(os.listdir('/proc/self/task'))} threads\n")
        return 7

    with serve(stage):
        process = start(place, DVC_X="x")
        out, err = process.communicate("typed", timeout=60)
    assert (process.returncode, err) == (7, "1 threads\n")
    assert out == f"{(['plan'], str(place), 'x', 'typed')}\n"


def raising(_: list[str]) -> int:
    raise RuntimeError("of the stage")


def test_a_stage_that_fails(serve: Serve, place: Path) -> None:
    with serve(raising):
        process = start(place)
        assert process.communicate(timeout=60)[1].endswith("RuntimeError: of the stage\n")
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("whom", "number", "code", "words"),
    [
        ("command", signal.SIGINT, 130, "interrupted; the same command goes on from here\n"),
        ("command", signal.SIGTERM, -signal.SIGTERM, ""),
        ("command", signal.SIGKILL, -signal.SIGKILL, ""),
        ("stage", signal.SIGKILL, -signal.SIGKILL, ""),
        ("stage", signal.SIGINT, 130, "interrupted; the same command goes on from here\n"),
        (
            "server",
            signal.SIGKILL,
            1,
            "error: plan: its process has ended with `noniid run`; the same command goes on\n",
        ),
    ],
)
def test_a_signal_ends_command_and_stage(
    serve: Serve, place: Path, whom: str, number: int, code: int, words: str
) -> None:
    with serve(waiting):
        process = start(place)
        stage, child = map(int, written(place / "pids").split())
        parent = int(Path(f"/proc/{stage}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill({"command": process.pid, "stage": stage, "server": parent}[whom], number)
        assert process.wait(timeout=30) == code and ended(stage)
        if (whom, number) == ("command", signal.SIGKILL):
            assert ended(child), "nobody else ends the processes of the stage"
        else:  # a true one ends with its parent
            os.kill(child, signal.SIGKILL)
        assert process.communicate(timeout=30) == ("", words)


def test_nothing_is_left_when_noniid_run_is_killed(place: Path, tmp_path: Path) -> None:
    """The command ends in one line, and there are no processes and no folder any more."""
    code = (
        "import os, sys, time; from pathlib import Path; import tests.pipelines.test_warm as t\n"
        "t.stages.main = t.waiting; t.warm.EDITED_S = 0\n"
        f"with t.warm.processes(Path({str(place)!r}), t.CODE, deploys=False, eager=False):\n"
        f"    Path({str(tmp_path / 'folder')!r}).write_text(os.environ[t.WARM] + chr(10)); "
        "time.sleep(60)\n"
    )
    run = start(ROOT, sys.executable, "-c", code)
    folder = Path(written(tmp_path / "folder"))
    assert folder.stat().st_mode & 0o777 == 0o700 and [path.name for path in folder.iterdir()] == [
        "other"
    ]
    process = start(place, **{WARM: str(folder)})
    stage, child = map(int, written(place / "pids").split())
    run.kill()
    run.communicate()
    assert "error: plan: its process has ended" in process.communicate(timeout=30)[
        1
    ] and process.returncode in (1, -9)
    assert ended(stage) and ended(child)
    until = time.monotonic() + 10
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not folder.exists()


def nobody(_: list[str]) -> int:
    raise AssertionError("handed over")


@pytest.mark.parametrize("what", ["folder", "copy", "environment", "edited", "stage", "nothing"])
def test_every_doubt_runs_the_stage_cold(
    serve: Serve, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("")
    monkeypatch.setitem(globals(), "CODE", [other])
    with serve(nobody if what != "nothing" else lambda _: 0):
        if what == "edited":
            (other / "a.py").write_text("x")
        changed = {"copy": {"DVC_ROOT": str(other)}, "environment": {"OMP_NUM_THREADS": "77"}}.get(
            what, {}
        )
        code = ASK.replace("plan", "unknown") if what == "stage" else ASK
        process = start(other if what == "folder" else place, sys.executable, "-c", code, **changed)
        said = process.communicate(timeout=60)
    assert said == ("0\n" if what == "nothing" else "None\n", "")


def test_a_socket_that_nobody_serves_is_no_error(place: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "other"))
    for folder in (tmp_path, tmp_path / "gone"):
        assert start(place, sys.executable, "-c", ASK, **{WARM: str(folder)}).communicate() == (
            "None\n",
            "",
        )


def test_the_command_imports_little_before_it_knows() -> None:
    code = (
        "import sys; import fedml_noniid.pipelines.stages.handover; print(len(sys.modules), "
        "'pydantic' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert int(said[0]) < 120 and said[1] == "False"


def test_what_is_imported_is_there() -> None:
    """An import that fails costs the stages time, and nobody sees it."""
    for name in itertools.chain(*warm.MODULES.values(), *warm.SILOS.values()):
        assert importlib.util.find_spec(name.partition(":")[0]), name


@pytest.mark.slow  # it imports all: mlflow, fedml
def test_imports_leave_no_thread_that_ran_torch_and_no_gpu(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the process that forks: as many threads as NumPy and pyarrow start, and CUDA
    untouched."""
    code = (
        "import os, sys; from fedml_noniid.pipelines.tools import warm, fits\n"
        "for names in (*warm.MODULES.values(), *warm.SILOS.values()):\n"
        "    for name in names: warm._import(name)\n"
        "import torch\n"
        "names = sorted(open(f'/proc/self/task/{t}/comm').read().strip() for t in "
        "os.listdir('/proc/self/task'))\n"
        "print(torch.cuda.is_initialized(), len(names), 'fedml' in sys.modules, "
        "file=sys.__stdout__)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=place,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[0] == "False" and said[2] == "True"
    assert int(said[1]) <= 1 + (os.cpu_count() or 1) + 3, "torch's own threads are as many again"


def noniid(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fedml_noniid", *arguments)


@pytest.fixture
def study(place: Path) -> Path:
    """A small experiment with all stages."""
    few = ("scenario.clients=3", "train.rounds=2", "seeds=[0]")
    words = ("--methods", "fedavg,scaffold", *(word for one in few for word in ("--set", one)))
    done = start(place, *noniid("init", "--data", "digits", *words, "--deploy"))
    assert done.communicate(timeout=120)[1] == "" and done.returncode == 0
    return place


def in_session(session: int) -> dict[int, str]:
    """The processes of a session: id -> command line."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,sid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return {
        int(row[0]): row[2] for row in rows if int(row[1]) == session and "<defunct>" not in row[2]
    }


@pytest.mark.slow
def test_the_lock_is_that_of_cold_stages(study: Path, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    shutil.copytree(study, cold, symlinks=True)
    for folder, command in ((study, noniid("run")), (cold, ("dvc", "repro"))):
        run = start(folder, *command, PATH=environment()["PATH"])
        said = run.communicate(timeout=300)
        assert run.returncode == 0, said
    assert (study / "dvc.lock").read_bytes() == (cold / "dvc.lock").read_bytes()


# `noniid run`, of which the stage that NONIID_SLOW names says that it has begun, and waits.
SLOW = """
import os, sys, time
from pathlib import Path
from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.tools import warm

true, warm.EDITED_S = stages.main, 0

def slow(arguments):
    if arguments == [os.environ["NONIID_SLOW"]]:
        Path(f".begun-{arguments[0]}").write_text(f"{os.getpid()}\\n")
        time.sleep(60)
    return true(arguments)

stages.main = slow
sys.exit(main(["run"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_in_every_stage_goes_on(study: Path, number: int) -> None:
    for stage in stages.STAGES:
        run = start(study, sys.executable, "-c", SLOW, NONIID_SLOW=stage)
        at_work = int(written(study / f".begun-{stage}"))
        (command,) = [
            pid
            for pid, words in in_session(run.pid).items()
            if words.endswith(f"-m fedml_noniid.pipelines.stages {stage}") and "sh -c" not in words
        ]
        os.kill(command, number)
        said = run.communicate(timeout=120)
        assert run.returncode != 0 and "Traceback" not in said[1], (stage, said)
        assert ended(at_work) and in_session(run.pid) == {}, stage
    run = start(study, *noniid("run"))
    said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    before = (study / "dvc.lock").read_bytes()
    assert json.loads((study / "deploy" / "result.json").read_text())["recipe"] == "fedavg"
    again = start(study, *noniid("run"))
    assert (
        again.communicate(timeout=300)
        and again.returncode == 0
        and (study / "dvc.lock").read_bytes() == before
    )
    assert in_session(run.pid) == in_session(again.pid) == {}
