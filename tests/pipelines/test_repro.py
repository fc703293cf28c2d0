"""`noniid run`: one at a time, checked first, with the exit code of its stage, and a table.

DVC is a script here.
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
from ruamel.yaml import YAML

from fedml_noniid.cli.app import main
from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.tools import repro, warm
from tests.pipelines.small import NAMED, PARAMS

CALLS = "calls"
# mlflow's own use of SQLAlchemy, in a process that is forked from this one.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


@pytest.fixture
def place(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without warm processes and MLflow, which take seconds."""
    monkeypatch.setattr(warm, "processes", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(warm, "sync", lambda place: 0)
    return experiment


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with settings and a `dvc` that notes its arguments."""
    program = tmp_path / "bin" / "dvc"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {CALLS}\n[ -f ended ] && cp ended "$NONIID_STAGE_ENDED"\nexit '
        "$(cat code)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(
        sys, "executable", str(program.with_name("python"))
    )  # whose programs come first
    for name in ("DVC_ROOT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / "code").write_text("0")
    (tmp_path / "dvc.yaml").write_text("stages: {deploy: {}}\n")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "table.txt").write_text("the table\n")
    (tmp_path / "report" / "summary.csv").write_text(
        "scenario,recipe,final_mean,traffic_total_bytes_mean\nskew,fedavg,0.5,0\n"
    )
    lock(tmp_path, {"runs": "1"})
    return tmp_path


def lock(place: Path, hashes: Mapping[str, str]) -> None:
    """Writes a dvc.lock of one stage with these outputs."""
    outs = [{"path": path, "md5": md5} for path, md5 in {"report": "0", **hashes}.items()]
    with (place / "dvc.lock").open("w") as file:
        YAML().dump(
            {"stages": {"all": {"deps": [{"path": "plugins", "md5": "code"}], "outs": outs}}}, file
        )


def calls(place: Path) -> list[str]:
    return (place / CALLS).read_text().splitlines() if (place / CALLS).exists() else []


@pytest.mark.parametrize("name", ["runs/events.out", "plan/thesis.tex"])
def test_what_is_not_ours_is_refused_before_dvc_runs(
    place: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """DVC removes such files, or takes them for results."""
    (place / name).parent.mkdir()
    (place / name).write_text("mine")
    assert main(["run"]) == 2
    assert not calls(place) and (place / name).read_text() == "mine"
    said = capfd.readouterr().err
    assert (
        said.startswith(f"error: {place / name}: not written by noniid") and said.count("\n") == 1
    )


def test_a_folder_that_can_not_be_written_is_refused_before_dvc_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """DVC shows an exception of Python. Root, who may run this, writes everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    assert main(["run"]) == 2
    assert not calls(place)
    said = f"error: {place}: can't be written; choose a folder that is writable\n"
    assert capfd.readouterr().err == said


def test_it_shows_the_table(experiment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train"]) == 0
    assert "the table" not in capfd.readouterr().out, "it is of all stages"
    assert main(["run"]) == 0
    assert calls(experiment) == ["repro train", "repro"]
    assert "\nthe table\n" in capfd.readouterr().out


@pytest.mark.parametrize("ended", [0, 1])
def test_the_table_comes_before_mlflow(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ended: int
) -> None:
    """A store that fails does not take the table away. Its exit code stays."""
    shown: list[str] = []
    monkeypatch.setattr(warm, "sync", lambda _: shown.append(capfd.readouterr().out) or ended)
    assert main(["run"]) == ended
    assert "\nthe table\n" in shown[0] and "dvc.lock" in shown[0]
    assert "the table" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("stage", "expected"),
    [("2", 2), ("1", 1), ("130", 130), ("", 2), ("0", 2)],
    ids=["bad input", "a crash", "interrupted", "no stage ran", "DVC fails behind a stage"],
)
def test_a_failure_has_the_stage_s_exit_code(
    place: Path, capfd: pytest.CaptureFixture[str], stage: str, expected: int
) -> None:
    """DVC's own is always 255. A code that an earlier run left does not count."""
    (place / ".dvc" / "tmp").mkdir()
    (place / repro.STAGE_ENDED).write_text("7")
    (place / "code").write_text("255")
    if stage:
        (place / "ended").write_text(stage)
    assert main(["run"]) == expected
    assert "the table" not in capfd.readouterr().out


def test_a_stage_leaves_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params.yaml").write_text("seeds: [0]\n")
    monkeypatch.setenv(edge.ENDED, str(tmp_path / "ended"))
    assert stages.main(["--root", str(tmp_path), "prepare"]) == 2
    assert (tmp_path / "ended").read_text() == "2"
    monkeypatch.setattr(stages, "run", lambda stage, place: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stages.main(["--root", str(tmp_path), "prepare"])
    assert (tmp_path / "ended").read_text() == "1"


def test_nothing_runs_before_the_settings_are_right(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if they were right the last time, and if the time of the file is older."""
    assert main(["run", "train"]) == 0
    (place / "params.yaml").write_text(PARAMS.replace("lr: 0.1", "lr: 0"))
    os.utime(place / "params.yaml", (0, 0))
    assert main(["run"]) == 2
    assert calls(place) == ["repro train"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: params.yaml: train.lr = 0 is refused")


ABSENT = PARAMS.replace(
    "participation: 1.0", "participation: 1.0, availability: {file: absent.csv}"
)
TABLE = PARAMS.replace(
    "name: digits, root: data/raw", "name: table, root: ., file: a.csv, label: y"
)


def own_table(place: Path) -> None:
    """The file of TABLE: one feature, two classes."""
    (place / "a.csv").write_text("x,y\n" + "".join(f"{i}.5,{i % 2}\n" for i in range(300)))


PLAN = "repro --force --single-item plan"


@pytest.mark.parametrize(
    ("params", "stages", "expected"),
    [
        (PARAMS, "stages: {deploy: {}, plan: {cmd: x}}", []),
        (TABLE, "stages: {deploy: {}, plan: {cmd: x}}", [PLAN]),
        (ABSENT, "stages: {deploy: {}, plan: {cmd: x}}", [PLAN]),
        (TABLE, "stages: {deploy: {}, plan: {always_changed: true}}", []),
    ],
    ids=["no own file", "own data", "missing clients", "DVC always plans"],
)
def test_own_files_are_looked_at_every_time(
    place: Path, params: str, stages: str, expected: list[str]
) -> None:
    """DVC does not see them, so the stage `plan` runs, also if nothing else has changed."""
    (place / "params.yaml").write_text(params)
    (place / "dvc.yaml").write_text(stages)
    own_table(place)
    (place / "absent.csv").write_text("round,exchange,client\n1,0,3\n")
    for times in (1, 2):
        assert main(["run", "train"]) == 0
        assert calls(place) == [*expected, "repro train"] * times


def test_two_at_once_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / repro.LOCK
    path.parent.mkdir()
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["run"]) == 2
    assert calls(place) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: another `noniid` command runs in {place}; wait for its end, or stop it"
    assert main(["run", "train"]) == 0, "it is over"


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml", ".dvc"])
def test_a_folder_that_is_no_experiment_is_refused(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / name).rename(place / "away")
    assert main(["run"]) == 2
    assert calls(place) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == f"error: {place / name}: is missing; `noniid init` makes the folder of an experiment"
    )


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
        subprocess.run(["git", *NAMED, "commit", "--quiet", "--message", "lock"], check=True)
    lock(place, now)
    (place / "plan").mkdir()
    (place / repro.KIND).write_text(json.dumps({"device": "cpu", "torch": "2.0"}))
    found = repro.certificate(place)
    assert said in found and "\n" not in found
    assert "(device cpu, torch 2.0)" in found or said != "kind of machine"
    assert "of runs." in found or said != "WARNING", found
