"""`noniid init`: settings that fit the data, nothing half-written, and a run outside the
checkout."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.stages import tune
from fedml_noniid.pipelines.verbs import choose, init
from tests.files import contents
from tests.pipelines.own_files import write_own_files
from tests.pipelines.small import run_stages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, without git and DVC, whose programs take two seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    made = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(Repo, "init", lambda root, **_: Path(root, ".dvc").mkdir() or made)
    (tmp_path / ".dvc").mkdir()
    write_own_files(tmp_path)
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "force"), [("runs/events.out.tfevents.1", []), ("report/a.tex", ["--force"])]
)
def test_a_folder_whose_files_the_stages_would_remove_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, force: list[str]
) -> None:
    """TensorBoard's default folder is runs/ too."""
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    assert main(["init", *force]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {'/'.join(name.split('/')[:2])}: not written by noniid")
    assert (folder / name).read_bytes() == b"mine" and not (folder / "params.yaml").exists()


TABLE = "--data patients.csv --label diagnosis --set data.one_hot=[sex]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("digits", "dirichlet", 20, "mlp", "sgd")),
        ("--data made_tweets", ("made_tweets", "natural", 40, "lstm", "rmsprop")),
        (
            f"{TABLE} --owner hospital --methods fedavg,scaffold+fnr",
            ("table", "natural", 4, "mlp", "sgd"),
        ),
        (
            f"{TABLE} --owner hospital --set scenario.alpha=0.1 --set scenario.clients=3",
            ("table", "dirichlet", 3, "mlp", "sgd"),
        ),
        (
            "--data reviews.csv --text review --label mood",
            ("text", "dirichlet", 2, "lstm", "rmsprop"),
        ),
        ("--data photos", ("image_folder", "dirichlet", 2, "cnn", "sgd")),
        ("--data signals", ("arrays", "natural", 4, "mlp", "sgd")),
    ],
)
def test_the_settings_fit_the_data_and_pass_the_check(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    expected: tuple[str, str, int, str, str],
) -> None:
    assert main(["init", *words.split()]) == 0, capsys.readouterr().err
    settings = config.load(folder)
    (scenario,) = settings.scenarios.values()
    found = (settings.data.name, scenario.partition, scenario.clients)
    assert (*found, settings.train.model, settings.train.optimizer) == expected
    assert main(["check"]) == 0
    text = (folder / "params.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 120 and text.count("#") >= 8, "it teaches"


def test_every_setting_of_the_file_can_be_given(folder: Path) -> None:
    """Keys in keys, of all sections."""
    given = (
        "seeds=[4]",
        "train.lr.start=0.2",
        "train.lr.decay=cosine",
        "recipes.fedprox.fedprox.mu=0.3",
        "scenario.noise.sigma=0.1",
        "machine.processes=2",
        "deploy.rounds=3",
        "data.validation=0.2",
        "experiment=mine",
    )
    assert main(["init", *(word for one in given for word in ("--set", one))]) == 0
    found = config.load(folder)
    assert (found.experiment, found.seeds, found.data.validation) == ("mine", [4], 0.2)
    assert found.recipes["fedprox"].settings == {"fedprox": {"mu": 0.3}}
    assert found.scenarios["dirichlet"].noise and found.machine.processes == 2
    assert found.deploy and (found.deploy.rounds, found.deploy.seed) == (3, 4)
    assert found.train.lr == {"start": 0.2, "decay": "cosine"}


def test_code_beside_the_study_is_named_like_ours(folder: Path) -> None:
    """A reader, a partition, a network and a metric; the scenario is called like its function."""
    (folder / "mine_of_init.py").write_text(
        "import numpy as np\nfrom torch import nn\n\n"
        "def read():\n    return np.eye(60)[:, :8], np.arange(60) % 3\n\n"
        "def cut(n_clients):\n    return np.array_split(np.arange(40), n_clients)\n\n"
        "def net(n_classes):\n    return nn.Linear(8, n_classes)\n\n"
        "def first(outputs, labels):\n    return outputs[0, 0]\n"
    )
    given = ("scenario.partition=mine_of_init:cut", "train.model=mine_of_init:net")
    given += ("train.metrics=[mine_of_init.first]",)
    words = [word for one in given for word in ("--set", one)]
    assert main(["init", "--data", "mine_of_init:read", "--methods", "fedavg", *words]) == 0
    found = config.load(folder)
    assert (found.data.name, found.data.root) == ("mine_of_init:read", ".")
    assert found.scenario_names == ["cut"]
    assert [*found.own_code("fedavg")] == ["mine_of_init.first", "mine_of_init:net"]


MISTAKES = {
    "--data nothing:read": "data set 'nothing:read' can't be imported, ModuleNotFoundError",
    "--data no.csv --label x": "no.csv: there is no such file",
    "--data nowhere": "--data = 'nowhere' is unknown; allowed: a file that ends in .csv, ",
    "--data digts": "--data = 'digts' is unknown (did you mean 'digits'?)",
    "--data table": "--data = 'table' is unknown",
    "--data femnist": "holds no *.json; make them",
    "--data patients.csv": "--label is missing; allowed: a column of patients.csv: age, sex, hospi",
    "--data patients.csv --label diagnosys": "'diagnosys' is unknown (did you mean 'diagnosis'?)",
    TABLE: "column 'hospital' is 'A' in row 1; allowed: numbers",
    f"{TABLE} --owner hospital --set scenario.clients=9": "clients = 9 is refused",
    '--data patients.csv --label diagnosis --set data={"one_hot":["sex"],"drop":null}': "is 'A' in",
    "--data patients.csv --target sex --set data.drop=[diagnosis,hospital]": "is a `label`",
    "--data patients.csv --label diagnosis --text nothing": "column 'nothing' is unknown",
    f"{TABLE} --set data.features=[aeg]": "aeg",
    "--label diagnosis": "label is unknown; allowed: size",
    "--set data.one_hot=[a]": "one_hot is unknown",
    "--methods fedavg,fnrr": "method 'fnrr' is unknown (did you mean 'fnr'?)",
    "--methods fedavg,fedavg": "recipe_names: fedavg is named twice; allowed: once",
    "--methods scaffold+feddyn,fedavg": "'feddyn' and 'scaffold' can't be combined",
    "--set scenario.partition=dirchlet": "'dirchlet' is unknown (did you mean 'dirichlet'?)",
    "--set scenario.partition=[1]": "partition [1] is unknown",
    "--set scenario.partition=natural": "'digits' doesn't say whose samples are whose",
    "--set scenario.partition=shards": "scenarios.shards.classes_per_client is missing",
    "--set scenario.alpha=-1": "alpha = -1 is refused; allowed: a number above 0",
    "--set train.model=mpl": "train.model = 'mpl' is unknown (did you mean 'mlp'?)",
    "--set train.model=lstm": "model 'lstm' takes text only",
    "--set train.rounds=0": "train.rounds = 0 is refused; allowed: a whole number from 1",
    "--set train.rounds": "--set = 'train.rounds' is refused; allowed: KEY=VALUE",
    "--set train.rounds=[": "--set train.rounds = '[' is refused; allowed: YAML",
    "--set train=5": "train = 5 is refused; allowed: train.KEY=VALUE",
    "--set trian.rounds=5": "trian is unknown (did you mean 'train'?)",
    "--set seeds=[a]": "seeds[0] = 'a' is refused",
    "--data loop.csv --label y": "Symlink loop",
    "--set train.rounds=5 --set train.rounds=7": "--set train.rounds is there twice",
    '--set train.rounds=5 --set train={"epochs":1}': "--set train is there twice",
    '--set train={"a":5} --set train.rounds=5': "--set train.rounds is there twice",
    '--set train={"rounds":5,"rounds":7}': "--set train = ",
    "--methods fedavg --set recipe_names=[fnr]": "recipe_names is there twice, by",
    "--methods fedavg --methods fnr": "--methods is there twice; allowed: once",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    before = contents(folder)
    assert main(["init", "study", *words.split()]) == 2
    out, err = capsys.readouterr()
    line, *rest = err.splitlines()
    assert line.startswith("error: ") and MISTAKES[words] in line and out == ""
    assert contents(folder) == before and not (folder / "study").exists()
    assert not rest or main(shlex.split(rest[1])[1:]) == 0  # the command to paste


def test_the_columns_that_need_a_decision_come_with_a_command_to_paste(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names with blanks, quotes and commas; a column of numbers with texts stays one of numbers.
    The command has all that was given, and makes the study."""
    frame = pd.read_csv(folder / "patients.csv")
    n = range(len(frame))
    frame.insert(0, "patient's id", [f"p{i}" for i in n])
    frame["height, cm"] = [None if i % 9 == 0 else i % 7 for i in n]
    frame['"day"'], frame["note"] = "2024-02-03", ["late" if i % 5 == 0 else None for i in n]
    frame["crp"] = [{3: "<0.6", 7: "n/a"}.get(i % 20, f"{i % 90}.5") for i in n]
    frame.to_csv(folder / "patients.csv", index=False)
    given = ["--methods", "fedavg,fnr", "--set", "seeds=[1]"]
    assert main(["init", "study", *TABLE.split(), *given, "--deploy", "--force"]) == 2
    said = capsys.readouterr()
    *errors, intro, command = said.err.splitlines()
    assert len(errors) == 7 and all("patients.csv: column " in line for line in errors)
    assert intro == "One decision for each, to change as you like:" and said.out == ""
    assert main(["init", "study", *TABLE.split(), "--set", "data.features=[note]"]) == 2
    assert "noniid init" not in capsys.readouterr().err and not (folder / "study").exists()
    name, *words = shlex.split(command)
    assert name == "noniid" and {"--deploy", "--force"} < {*words}
    (folder / "study" / ".dvc").mkdir(parents=True)
    assert main(words) == 0, capsys.readouterr().err
    settings = config.load(folder / "study")
    assert settings.data.options == {
        "file": "patients.csv",
        "label": "diagnosis",
        "missing": "median",
        "na": ["<0.6"],
        "one_hot": ["sex", "hospital"],
        "drop": ["patient's id", '"day"', "note"],  # and not in one_hot
    }
    assert (settings.recipe_names, settings.seeds) == (["fedavg", "fnr"], [1]) and settings.deploy
    assert "the median of the training rows of all clients together" in capsys.readouterr().out
    assert main(["check", "--root", "study"]) == 0


@pytest.mark.parametrize("deploy", [False, True])
def test_a_study_has_a_deployment_only_if_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], deploy: bool
) -> None:
    """Neither section nor stage, nor the section among what stage `plan` reads."""
    assert main(["init", *["--deploy"] * deploy]) == 0
    stages = YAML(typ="safe", pure=True).load(folder / "dvc.yaml")["stages"]
    assert ("deploy" in stages) is ("deploy" in stages["plan"]["params"]) is deploy
    assert list(stages)[:6] == ["plan", "prepare", "partition", "train", "evaluate", "report"]
    assert (config.load(folder).deploy is not None) is deploy and main(["check"]) == 0
    if not deploy:
        assert main(["run", "deploy"]) == 2
        assert "has no stage deploy; `noniid init --deploy`" in capsys.readouterr().err


def test_nothing_is_replaced_unless_it_is_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a git repository of one's own: its .gitignore keeps its lines, and DVC's folder is the
    subfolder's."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    study = tmp_path / "study"
    study.mkdir()
    (study / ".gitignore").write_text("mine\n/runs/\n")
    (study / "params.yaml").write_text("mine: 1\n")
    before = contents(study)
    assert main(["init", "study"]) == 2
    assert "params.yaml: exists; allowed: another folder, or --force" in capsys.readouterr().err
    assert contents(study) == before
    assert main(["init", "study", "--force", "--set", "scenario.clients=7"]) == 0
    assert config.load(study).scenarios["dirichlet"].clients == 7
    lines = (study / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["mine", "/runs/"] and "/data/" in lines and lines.count("/runs/") == 1
    paths = [f"{name}/written" for name in ("partitions", tune.FOLDER, choose.FOLDER)]
    ignored = subprocess.run(["git", "check-ignore", *paths], cwd=study, stdout=subprocess.PIPE)
    assert ignored.stdout.decode().split() == paths, "`git add .` adds no output"
    assert not (study / ".git").exists() and (study / ".dvc" / "config").read_text() == init.DVC


def test_a_study_of_a_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--target` chooses the loss; the stages and the report have its metrics, and no accuracy."""
    words = "init --data patients.csv --target age --set data.one_hot=[sex,hospital,diagnosis]"
    words += " --methods fedavg,fedprox --set train.rounds=2 --set seeds=[0,1]"
    assert main(words.split()) == 0, capsys.readouterr().err
    settings = config.load(folder)
    assert (settings.train.loss, settings.data.options["target"]) == ("mse", "age")
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    item = "dirichlet-fedavg-0"
    rounds = pd.read_csv(folder / "runs" / item / "rounds.csv")
    assert {"test_r2", "test_mae", "validation_r2", "sent_r2"} <= {*rounds.columns}
    per_target = pd.read_csv(folder / "evaluation" / item / "per_target.csv")
    assert per_target["r2"].item() == pytest.approx(rounds["test_r2"].iloc[-1], rel=1e-6)
    report = (folder / "report" / "report.md").read_text()
    assert "last round, R²" in report and "r2-dirichlet.png" in report
    for file in folder.glob("r*/**/*"):
        text = file.read_text() if file.suffix in (".csv", ".md", ".txt", ".json") else ""
        assert not re.search("(?<!balanced_)(?<!majority_)accuracy", text), file
    labels = "init labels --data patients.csv --target sick,old --set data.one_hot=[sex,hospital]"
    table = pd.read_csv(folder / "patients.csv")
    table["sick"], table["old"] = (table.pop("diagnosis") == "ill") * 1, (table.pop("age") > 40) * 1
    table.to_csv(folder / "patients.csv", index=False)
    (folder / "labels" / ".dvc").mkdir(parents=True)
    assert main(labels.split()) == 0, capsys.readouterr().err
    assert config.load(folder / "labels").train.loss == "bce"
    assert main([*labels.split(), "--force", "--methods", "fedrs"]) == 2
    assert "'fedrs' needs targets that are classes" in capsys.readouterr().err
