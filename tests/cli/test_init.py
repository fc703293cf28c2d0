"""`noniid init`: settings that fit the data, nothing half-written, and a run outside the
checkout."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from ruamel.yaml import YAML

from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.tools import init
from tests.pipelines.small import ROOT, environment

ROWS = 240


def patients(folder: Path) -> None:
    """Two numbers, five hospitals, two classes."""
    rng = np.random.default_rng(0)
    age, hospital = rng.normal(50, 10, ROWS), rng.choice(list("ABCDE"), ROWS)
    ill = np.where(age + rng.normal(0, 5, ROWS) > 50, "ill", "well")
    table = pd.DataFrame(
        {"age": age, "pressure": rng.normal(120, 9, ROWS), "hospital": hospital, "diagnosis": ill}
    )
    table.to_csv(folder / "patients.csv", index=False)


def reviews(folder: Path) -> None:
    """A text of four words, and a class in the column that is called label."""
    rng = np.random.default_rng(0)
    words = [
        " ".join(rng.choice(["good", "bad", "film", "book", "long", "short"], 4))
        for _ in range(ROWS)
    ]
    table = pd.DataFrame({"words": words, "label": [int("good" in text) for text in words]})
    table.to_csv(folder / "reviews.csv", index=False)


def photos(folder: Path) -> None:
    """Grey images of 28 x 28 pixels, two classes."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 10)):
        for name in ("cat", "dog"):
            (folder / "photos" / part / name).mkdir(parents=True)
            for k in range(count):
                picture = Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8))
                picture.save(folder / "photos" / part / name / f"{k}.png")


def signals(folder: Path) -> None:
    """Samples of eight numbers, each with an owner."""
    rng = np.random.default_rng(0)
    (folder / "signals").mkdir()
    for part, n in (("train", 200), ("test", 40)):
        y = np.arange(n) % 3
        np.savez(
            folder / "signals" / f"{part}.npz",
            x=rng.normal(y[:, None], 1, (n, 8)),
            y=y,
            client=np.arange(n) % 6,
        )


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; outside any git repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "name", ["runs/events.out.tfevents.1", "partitions/disk/x", "evaluation/a.csv", "report/a.tex"]
)
def test_a_folder_whose_files_the_stages_would_remove_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, force: list[str]
) -> None:
    """TensorBoard's default folder is runs/ too."""
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    assert main(["init", "--yes", *force]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"error: {'/'.join(name.split('/')[:2])}: not written by noniid")
        and said.count("\n") == 1
    )
    assert content(folder) == {name: b"mine"}


def train(settings: config.Config) -> tuple[str, str]:
    return settings.train.model, settings.train.optimizer


@pytest.mark.parametrize(
    ("make", "words", "expected", "network"),
    [
        (None, "", ("digits", "dirichlet", 20), ("mlp", "sgd")),
        (None, "--data cifar10 --partition iid --clients 5", ("cifar10", "iid", 5), ("cnn", "sgd")),
        (
            None,
            "--data made_tweets --methods fedavg,scaffold",
            ("made_tweets", "dirichlet", 20),
            ("lstm", "sgd"),
        ),
        (
            patients,
            "--table patients.csv --label diagnosis --owner hospital --methods fedavg,scaffold+fnr",
            ("table", "natural", 5),
            ("mlp", "sgd"),
        ),
        (
            patients,
            "--table patients.csv --label diagnosis --owner hospital --alpha 0.1 --clients 4",
            ("table", "dirichlet", 4),
            ("mlp", "sgd"),
        ),
        (
            patients,
            "--table patients.csv --label diagnosis --one-hot hospital",
            ("table", "dirichlet", 3),
            ("mlp", "sgd"),
        ),
        (
            patients,
            (
                "--table patients.csv --label diagnosis --features age,pressure --model "
                "logistic_regression"
            ),
            ("table", "dirichlet", 3),
            ("logistic_regression", "sgd"),
        ),
        (
            reviews,
            "--text reviews.csv --text-column words",
            ("text", "dirichlet", 3),
            ("lstm", "rmsprop"),
        ),
        (photos, "--images photos", ("image_folder", "dirichlet", 2), ("cnn", "sgd")),
        (signals, "--arrays signals", ("arrays", "natural", 6), ("mlp", "sgd")),
    ],
)
def test_the_settings_fit_the_data_and_pass_the_check(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None] | None,
    words: str,
    expected: tuple[str, str, int],
    network: tuple[str, str],
) -> None:
    """git and DVC take two seconds: they are for the tests below."""
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    (folder / ".dvc").mkdir()
    if make is not None:
        make(folder)
    assert main(["init", "--yes", *words.split()]) == 0, capsys.readouterr().err
    settings = config.load(folder)
    (scenario,) = settings.scenarios.values()
    assert (settings.data.name, scenario.partition, scenario.clients) == expected
    assert train(settings) == network
    assert main(["check"]) == 0
    text = (folder / "params.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 120 and text.count("#") >= 8, "it teaches"
    assert "noniid run" in capsys.readouterr().out


def test_lists_of_names_are_given_at_once_or_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column's name may have a comma."""
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    (folder / ".dvc").mkdir()
    patients(folder)
    table = pd.read_csv(folder / "patients.csv").rename(columns={"hospital": "town, land"})
    table.assign(sex="f", ward="w").to_csv(folder / "patients.csv", index=False)
    given = [
        "--one-hot",
        "town, land",
        "--one-hot",
        "sex,ward",
        "--methods",
        "fedavg",
        "--methods",
        "fedprox,scaffold",
    ]
    assert main(["init", "--yes", "--table", "patients.csv", "--label", "diagnosis", *given]) == 0
    settings = config.load(folder)
    assert settings.data.options["one_hot"] == ["town, land", "sex", "ward"]
    assert settings.recipe_names == ["fedavg", "fedprox", "scaffold"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--table no.csv --label x", "no.csv: there is no such file"),
        ("--images nowhere", "nowhere: there is no such folder"),
        (
            "--table patients.csv",
            "--label is missing; allowed: a column of patients.csv: age, pressure, hospital, ",
        ),
        (
            "--table patients.csv --label diagnosys",
            "--label 'diagnosys' is unknown (did you mean 'diagnosis'?)",
        ),
        (
            "--table patients.csv --label diagnosis --owner hospitl",
            "--owner 'hospitl' is unknown (did you mean",
        ),
        (
            "--table patients.csv --label diagnosis",
            "column 'hospital' is 'C' in row 1; allowed: numbers",
        ),
        (
            "--table patients.csv --label diagnosis --owner hospital --clients 9",
            "clients = 9 is refused",
        ),
        (
            "--table patients.csv --text patients.csv",
            "--table and --text exclude each other; allowed: one of",
        ),
        ("--label diagnosis", "--label = 'diagnosis' is refused; allowed: with --table or --text"),
        (
            "--table patients.csv --text-column age",
            "--text-column = 'age' is refused; allowed: with --text",
        ),
        ("--data digits --one-hot a", "--one-hot = 'a' is refused; allowed: with --table"),
        ("--table patients.csv --label diagnosis --features aeg", "aeg"),
        ("--data digts", "data set 'digts' is unknown (did you mean 'digits'?)"),
        ("--data table", "data set 'table' is unknown; allowed: digits, mnist"),
        ("--methods fedavg,fnrr", "method 'fnrr' is unknown (did you mean 'fnr'?)"),
        ("--methods fedavg,fedavg", "recipe_names: fedavg is named twice; allowed: once"),
        ("--methods scaffold+feddyn,fedavg", "'feddyn' and 'scaffold' can't be combined"),
        ("--partition dirchlet", "partition 'dirchlet' is unknown (did you mean 'dirichlet'?)"),
        (
            "--partition natural",
            "partition 'natural' needs owners, which the data do not name; allowed: iid",
        ),
        ("--partition shards", "shards: classes_per_client is missing; it has no default"),
        ("--partition iid --alpha 1", "alpha"),
        ("--alpha -1", "alpha = -1.0 is refused; allowed: a number above 0"),
        ("--model mpl", "model 'mpl' is unknown (did you mean 'mlp'?)"),
        (
            "--model lstm",
            "model 'lstm' does not take data set 'digits'; allowed: logistic_regression",
        ),
        ("--rounds 0", "invalid value for '--rounds': Input should be greater than or equal to 1"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    patients(folder)
    before = content(folder)
    assert main(["init", "study", "--yes", *words.split()]) == 2
    out, err = capsys.readouterr()
    line, *rest = err.splitlines()
    assert line.startswith("error: ") and said in line and out == ""
    assert not rest or rest[0] == "One decision for each, to change as you like:"
    assert content(folder) == before and not (folder / "study").exists()


def test_the_columns_that_need_a_decision_come_with_a_command_to_paste(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names with blanks, quotes and commas; the command makes the study, and the pasted words are
    taken as they are."""
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    (folder / ".dvc").mkdir()
    patients(folder)
    frame = pd.read_csv(folder / "patients.csv")
    frame.insert(0, "patient's id", [f"p{i}" for i in range(ROWS)])
    frame["height, cm"] = [None if i % 9 == 0 else i % 7 for i in range(ROWS)]
    frame['"day"'] = "2024-02-03"
    frame.to_csv(folder / "patients.csv", index=False)
    assert (
        main(["init", "--table", "patients.csv", "--label", "diagnosis", "--yes", "--seeds", "1"])
        == 2
    )
    said = capsys.readouterr()
    *errors, intro, command = said.err.splitlines()
    assert (
        said.out == ""
        and len(errors) == 4
        and all(line.startswith("error: patients.csv: column ") for line in errors)
    )
    assert (
        intro == "One decision for each, to change as you like:"
        and not (folder / "params.yaml").exists()
    )
    name, *words = shlex.split(command)
    assert name == "noniid" and main(words) == 0, capsys.readouterr().err
    assert config.load(folder).data.options == {
        "file": "patients.csv",
        "label": "diagnosis",
        "missing": "median",
        "one_hot": ["hospital"],
        "drop": ["patient's id", '"day"'],
    }
    assert (
        "filled with the median of the training rows of all clients together"
        in capsys.readouterr().out
    )
    assert main(["check"]) == 0


@pytest.mark.parametrize("deploy", [False, True])
def test_a_study_has_a_deployment_only_if_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deploy: bool
) -> None:
    """Neither section nor stage, nor the section among what stage `plan` reads."""
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    (folder / ".dvc").mkdir()
    assert main(["init", "--yes", *(["--deploy"] if deploy else [])]) == 0
    stages = YAML(typ="safe", pure=True).load(folder / "dvc.yaml")["stages"]
    assert ("deploy" in stages) is ("deploy" in stages["plan"]["params"]) is deploy
    assert list(stages)[:6] == ["plan", "prepare", "partition", "train", "evaluate", "report"]
    assert (config.load(folder).deploy is not None) is deploy and main(["check"]) == 0
    capsys.readouterr()
    if not deploy:
        assert main(["run", "deploy"]) == 2
        assert "has no stage deploy; `noniid init --deploy`" in capsys.readouterr().err


def test_nothing_is_replaced_unless_it_is_forced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a git repository of one's own: its .gitignore keeps its lines, and DVC's folder is the
    subfolder's."""
    subprocess.run(["git", "init", "--quiet"], check=True)
    study = folder / "study"
    study.mkdir()
    (study / ".gitignore").write_text("mine\n/runs/\n")
    (study / "params.yaml").write_text("mine: 1\n")
    before = content(study)
    assert main(["init", "study", "--yes"]) == 2
    assert (
        "params.yaml: exists; allowed: another folder, or --force to replace it"
        in capsys.readouterr().err
    )
    assert content(study) == before
    assert main(["init", "study", "--yes", "--force", "--clients", "7"]) == 0, (
        capsys.readouterr().err
    )
    assert config.load(study).scenarios["dirichlet"].clients == 7
    lines = (study / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["mine", "/runs/"] and "/data/" in lines and lines.count("/runs/") == 1
    assert not (study / ".git").exists() and (study / ".dvc" / "config").read_text() == init.DVC


def test_questions_fill_in_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers of a terminal: data, file, column of the class, column of the client, methods,
    rounds, seeds."""
    patients(folder)
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    (folder / ".dvc").mkdir()
    answers = "table\npatients.csv\ndiagnosis\nhospital\nfedavg, fnr\n\n2\n"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answers))
    assert main(["init"]) == 0, capsys.readouterr().err
    settings = config.load(folder)
    assert settings.data.options == {
        "file": "patients.csv",
        "label": "diagnosis",
        "owner": "hospital",
    }
    assert (settings.recipe_names, settings.train.rounds, settings.seeds) == (
        ["fedavg", "fnr"],
        20,
        [0, 1],
    )


def test_answers_that_end_early_write_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert main(["init", "study"]) == 130
    assert not (folder / "study").exists()


@pytest.mark.slow  # DVC, all stages, and FedML's processes: a minute
def test_an_experiment_outside_the_checkout_runs(tmp_path: Path) -> None:
    """`noniid` as a program, in a folder of its own: partition, run, table; then nothing is left to
    do."""
    patients(tmp_path)
    more: dict[str, Any] = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def noniid(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedml_noniid", *words],
            cwd=tmp_path,
            env=environment() | more,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=550,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    own = ("--table", "patients.csv", "--label", "diagnosis", "--owner", "hospital")
    noniid(
        "init", "--yes", *own, "--methods", "fedavg,scaffold+fnr", "--rounds", "2", "--seeds", "1"
    )
    said = noniid("partition")
    assert (
        "| label distance" in said
        and "Heat maps: partitions/natural-0/" in said
        and "stage 'train'" not in said
    )
    said = noniid("run")
    assert (
        "scaffold+fnr" in said.partition("natural: 5 clients")[2]
        and "dvc.lock is the certificate" in said
    )
    assert noniid("table") in said
    again = noniid("run")
    assert all(f"Stage '{name}' didn't change" in again for name in ("prepare", "train", "report"))
