"""`noniid run`: one at a time, checked first, what is out of date alone, with the exit code of its
stage, and a table before MLflow is written.

DVC is the true one; the stages are stood in for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from dvc.repo import Repo
from dvc.stage import run as running
from ruamel.yaml import YAML

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.tracking import verbs
from fedml_noniid.pipelines.verbs import repro
from tests.files import contents
from tests.pipelines import small

PARAMS = small.PARAMS[: small.PARAMS.index("deploy:")]
COMMAND = "python -m fedml_noniid.pipelines.stages"
DVC_YAML = {
    "plan": {"cmd": f"{COMMAND} plan", "params": ["seeds", "train"], "outs": ["plan"]},
    "train": {"cmd": f"{COMMAND} train", "deps": ["plan/train.json"], "outs": ["trained"]},
    "report": {"cmd": f"{COMMAND} report", "deps": ["trained"], "outs": ["report"]},
}
SUMMARY = "scenario,recipe,final_mean,traffic_total_bytes_mean\nskew,fedavg,0.5,0\n"
# Of a library of DVC, in a call of DVC.
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")


class Stages:
    """Stand in for all stages but plan, and note which ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, list[str]()
        self.raised: BaseException | None = None  # by train
        self._run = stages.run

    def __call__(self, stage: str, place: Workspace) -> None:
        self.ran.append(stage)
        if stage == "plan":
            self._run(stage, place)
            return
        if self.raised is not None:
            raise self.raised
        texts = {"trained/model": (self.folder / "plan" / "train.json").read_text()}
        if stage == "report":
            texts = {"report/answer.txt": "the answer\n", "report/table.txt": "the table\n"}
            texts |= {"report/summary.csv": SUMMARY}
        for name, text in texts.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with settings and three stages. MLflow, which takes seconds, is away."""
    for name in ("DVC_ROOT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "bring_up_to_date", lambda place: None)
    Repo.init(str(tmp_path), no_scm=True)
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / "dvc.yaml").write_text(json.dumps({"stages": DVC_YAML}))
    return tmp_path


@pytest.fixture
def done(place: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    standing_in = Stages(place)
    monkeypatch.setattr(stages, "run", standing_in)
    return standing_in


def without_grpc(text: str) -> str:
    """What was written, without gRPC's line on a fork, if another test has started gRPC here."""
    return "".join(line for line in text.splitlines(True) if "fork_posix.cc" not in line)


def refused(done: Stages, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line with which `noniid run` ends before DVC runs."""
    assert main(["run"]) == 2 and not done.ran
    (line,) = without_grpc(capfd.readouterr().err).splitlines()
    return line.removeprefix("error: ")


def lock(place: Path, hashes: Mapping[str, str]) -> None:
    """Writes a dvc.lock of one stage with these outputs."""
    outs = [{"path": path, "md5": md5} for path, md5 in {"report": "0", **hashes}.items()]
    with (place / "dvc.lock").open("w") as file:
        YAML().dump(
            {"stages": {"all": {"deps": [{"path": "plugins", "md5": "code"}], "outs": outs}}}, file
        )


def test_only_what_is_out_of_date_runs(
    place: Path, done: Stages, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train"]) == 0
    assert done.ran == ["plan", "train"]
    assert "the answer" not in capfd.readouterr().out, "it is of all stages"
    assert main(["run"]) == 0
    assert done.ran == ["plan", "train", "report"]
    written, locked = capfd.readouterr(), (place / "dvc.lock").read_text()
    assert "\nthe answer\n" in written.out and not without_grpc(written.err)
    assert "the table" not in written.out
    with Repo(str(place)) as repository:
        assert repository.status() == {}, "the lock is that of dvc repro"
    assert main(["run", "--details"]) == 0
    assert done.ran == ["plan", "train", "report"], "a second time nothing"
    details = capfd.readouterr().out
    assert "\nthe table\n" in details and "the answer" not in details
    (place / "params.yaml").write_text(PARAMS.replace("lr: 0.1", "lr: 0.2"))
    assert main(["run"]) == 0
    assert done.ran[3:] == ["plan", "train", "report"]
    (place / "params.yaml").write_text(PARAMS)
    assert main(["run"]) == 0
    assert done.ran[6:] == ["plan"], "DVC's cache has the outputs of these settings"
    assert (place / "dvc.lock").read_text() == locked


def test_the_table_comes_before_mlflow(
    place: Path, done: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is refused does not take the table away."""
    shown = place / "shown"

    def refuse(_: Workspace) -> None:
        raise UserError("no store" if shown.exists() else "too early")

    monkeypatch.setattr(verbs, "bring_up_to_date", refuse)
    with pytest.raises(UserError, match="no store"):
        repro.repro(Workspace.from_environment(place, {}), None, shown.write_text)


def test_outputs_that_were_deleted_come_from_dvc_s_cache(place: Path, done: Stages) -> None:
    assert main(["run"]) == 0
    for folder in ("trained", "report"):
        for path in (place / folder).iterdir():
            path.unlink()
        (place / folder).rmdir()
    assert main(["run"]) == 0
    assert done.ran == ["plan", "train", "report"]
    assert (place / "report" / "table.txt").read_text() == "the table\n"


def test_commands_that_are_not_ours_are_started(place: Path, done: Stages) -> None:
    """With this environment's programs."""
    own = {"cmd": "python -c 'import fedml_noniid, sys; open(sys.argv[1], \"w\")' mine"}
    (place / "dvc.yaml").write_text(
        json.dumps({"stages": DVC_YAML | {"own": own | {"deps": ["report"], "outs": ["mine"]}}})
    )
    assert main(["run"]) == 0
    assert done.ran == ["plan", "train", "report"] and (place / "mine").exists()


@pytest.mark.parametrize(
    "name", ["runs/events.out", "plan/thesis.tex", "dvc.yaml", ".dvc", "W", "L"]
)
def test_what_is_refused_before_dvc_runs(
    place: Path,
    done: Stages,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """Files that DVC removes or takes for results; a folder that is no experiment; one that can't
    be written (W), and one in which another command runs (L)."""
    path, held = place / name, place / repro.LOCK
    said = f"{path}: is missing; `noniid init` makes the folder of an experiment"
    if name == "W":  # DVC shows an exception of Python. Root, who may run this, writes everywhere
        monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
        said = f"{place}: can't be written; choose a folder that is writable"
    elif name == "L":
        held.parent.mkdir(exist_ok=True)
        said = f"another `noniid` command runs in {place}; wait for its end, or stop it"
    elif path.exists():
        path.rename(place / "away")
    else:
        path.parent.mkdir()
        path.write_text("mine")
        said = f"{path}: not written by noniid"
    with held.open("w") if name == "L" else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert refused(done, capfd).startswith(said)
    assert path.exists() is ("/" in name)


ABSENT = PARAMS.replace(
    "participation: 1.0", "participation: 1.0, availability: {file: absent.csv}"
)
TABLE = PARAMS.replace(
    "name: digits, root: data/raw", "name: table, root: ., file: a.csv, label: y"
)
ROWS = "".join(f"{i}.5,{i % 2}\n" for i in range(300))


@pytest.mark.parametrize(
    ("params", "name", "before", "after"),
    [
        (TABLE, "a.csv", f"x,y\n{ROWS}", f"x,y\n1,1\n{ROWS}"),
        (ABSENT, "absent.csv", "round,exchange,client\n1,0,3\n", "round,exchange,client\n"),
    ],
    ids=["own data", "missing clients"],
)
def test_own_files_are_looked_at_every_time(
    place: Path, done: Stages, params: str, name: str, before: str, after: str
) -> None:
    """DVC does not see them."""
    (place / "params.yaml").write_text(params)
    (place / name).write_text(before)
    assert main(["run"]) == 0
    assert main(["run"]) == 0
    assert done.ran.count("train") == 1
    planned = contents(place / "plan")
    (place / name).write_text(after)
    assert main(["run"]) == 0
    assert contents(place / "plan") != planned


def test_nothing_runs_before_the_settings_are_right(
    place: Path, done: Stages, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if they were right the last time, and if the time of the file is older."""
    assert main(["run", "train"]) == 0
    (place / "params.yaml").write_text(PARAMS.replace("lr: 0.1", "lr: 0"))
    os.utime(place / "params.yaml", (0, 0))
    assert main(["run"]) == 2
    assert done.ran == ["plan", "train"]
    (line,) = without_grpc(capfd.readouterr().err).splitlines()
    assert line.startswith("error: params.yaml: train.lr = 0 is refused")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("no data"), 2, "error: no data\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from here\n"),
    ],
    ids=["bad input", "interrupted"],
)
def test_a_failure_is_that_of_its_stage(
    place: Path,
    done: Stages,
    capfd: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    line: str,
) -> None:
    """Said once, without DVC's own lines. The next run goes on at that stage."""
    done.raised = raised
    path = [*sys.path]
    assert main(["run"]) == code
    written = capfd.readouterr()
    assert without_grpc(written.err) == line and "the answer" not in written.out
    assert sys.path[: len(path)] == path and running.cmd_run.__module__ == "dvc.stage.run"
    done.raised = None
    assert main(["run"]) == 0
    assert done.ran == ["plan", "train", "train", "report"]


def test_what_dvc_refuses_is_one_line(
    place: Path, done: Stages, capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"cmd": "exit 7", "deps": ["report"]}
    (place / "dvc.yaml").write_text(json.dumps({"stages": DVC_YAML | {"own": own}}))
    assert main(["run"]) == 2
    (line,) = without_grpc(capfd.readouterr().err).splitlines()
    assert line.startswith(f"error: {place}/dvc.yaml: DVC: ") and "exit 7, exited with 7" in line


@pytest.mark.parametrize(
    ("committed", "now", "said"),
    [
        (None, {"runs": "1"}, "commit it"),
        ({"runs": "1"}, {"runs": "1"}, "the same bits"),
        (
            {"plan/machine.json": "a", "runs": "1"},
            {"plan/machine.json": "b", "runs": "2"},
            "kind of machine",
        ),
        ({"plan": "a", "runs": "1"}, {"plan": "b", "runs": "2"}, "settings or code"),
        (
            {"plan": "a", "runs": "1", "report": "1"},
            {"plan": "a", "runs": "2", "report": "1"},
            "WARNING",
        ),
    ],
)
def test_the_lock_is_compared_with_the_committed_one(
    place: Path, committed: Mapping[str, str] | None, now: Mapping[str, str], said: str
) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    if committed is not None:
        lock(place, committed)
        subprocess.run(["git", "add", "dvc.lock"], check=True)
        subprocess.run(["git", *small.NAMED, "commit", "--quiet", "--message", "lock"], check=True)
    lock(place, now)
    (place / "plan").mkdir()
    (place / repro.KIND).write_text(json.dumps({"device": "cpu", "torch": "2.0"}))
    found = repro.certificate(place)
    assert said in found and "\n" not in found
    assert "(device cpu, torch 2.0)" in found or said != "kind of machine"
    assert "of runs." in found or said != "WARNING", found
