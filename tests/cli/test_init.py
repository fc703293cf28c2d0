"""`noniid init`: settings that fit the data, nothing half-written, and a run outside the
checkout."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from fedml_noniid.cli.app import main
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.stages import tune
from fedml_noniid.pipelines.verbs import choose, init
from tests.files import contents
from tests.pipelines.own_files import write_own_files
from tests.pipelines.small import ROOT, environment, run_stages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, without git and DVC, whose programs take two seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "_called", lambda command, place: str(place.resolve()))
    made = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(Repo, "init", lambda root, **_: Path(root, ".dvc").mkdir() or made)
    (tmp_path / ".dvc").mkdir()
    write_own_files(tmp_path)
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
    assert main(["init", *force]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {'/'.join(name.split('/')[:2])}: not written by noniid")
    assert (folder / name).read_bytes() == b"mine" and not (folder / "params.yaml").exists()


TABLE = "--data patients.csv --label diagnosis --set data.one_hot=[sex]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("digits", "dirichlet", 20, "mlp", "sgd")),
        (
            "--data cifar10 --set scenario.partition=iid --set scenario.clients=5",
            ("cifar10", "iid", 5, "cnn", "sgd"),
        ),
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
            f"{TABLE} --set data.features=[age] --set train.model=logistic_regression",
            ("table", "dirichlet", 2, "logistic_regression", "sgd"),
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
    assert not rest or rest[0] == "One decision for each, to change as you like:"
    assert contents(folder) == before and not (folder / "study").exists()


def test_the_columns_that_need_a_decision_come_with_a_command_to_paste(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names with blanks, quotes and commas; the command has all that was given, and makes the
    study."""
    frame = pd.read_csv(folder / "patients.csv")
    frame.insert(0, "patient's id", [f"p{i}" for i in range(len(frame))])
    frame["height, cm"] = [None if i % 9 == 0 else i % 7 for i in range(len(frame))]
    frame['"day"'] = "2024-02-03"
    frame["note"] = ["late" if i % 5 == 0 else None for i in range(len(frame))]
    frame.to_csv(folder / "patients.csv", index=False)
    given = ["--methods", "fedavg,fnr", "--set", "seeds=[1]"]
    assert main(["init", "study", *TABLE.split(), *given, "--deploy", "--force"]) == 2
    said = capsys.readouterr()
    *errors, intro, command = said.err.splitlines()
    assert len(errors) == 6 and all("patients.csv: column " in line for line in errors)
    assert intro == "One decision for each, to change as you like:" and said.out == ""
    assert not (folder / "study").exists()
    name, *words = shlex.split(command)
    assert name == "noniid" and {"--deploy", "--force"} < {*words}
    (folder / "study" / ".dvc").mkdir(parents=True)
    assert main(words) == 0, capsys.readouterr().err
    settings = config.load(folder / "study")
    assert settings.data.options == {
        "file": "patients.csv",
        "label": "diagnosis",
        "missing": "median",
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
    folders = ("partitions", tune.FOLDER, choose.FOLDER)
    written = "".join(f"{folder}/written\n" for folder in folders)
    ignored = subprocess.run(
        ["git", "check-ignore", "--stdin"], cwd=study, input=written, capture_output=True, text=True
    )
    assert ignored.stdout == written, "`git add .` adds no output"
    assert not (study / ".git").exists() and (study / ".dvc" / "config").read_text() == init.DVC


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_questions_fill_in_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a terminal: data, columns of text, class and client, methods."""
    answers = "patients.csv\n\ndiagnosis\nhospital\nfedavg, fnr\n"
    monkeypatch.setattr(sys, "stdin", Terminal(answers))
    assert main(["init", "--set", "data.drop=[sex]"]) == 0
    settings = config.load(folder)
    own = {"file": "patients.csv", "label": "diagnosis", "owner": "hospital", "drop": ["sex"]}
    assert settings.data.options == own and settings.recipe_names == ["fedavg", "fnr"]
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert main(["init", "study"]) == 130 and not (folder / "study").exists(), "answers end early"


@pytest.mark.slow  # DVC, all stages, and FedML's processes: a minute
def test_an_experiment_outside_the_checkout_runs(tmp_path: Path) -> None:
    """`noniid` as a program, in a folder of its own: partition, run, table; then nothing is left to
    do."""
    write_own_files(tmp_path)
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

    few = ("--set", "train.rounds=2", "--set", "seeds=[0]")
    noniid("init", *TABLE.split(), "--owner", "hospital", "--methods", "fedavg,scaffold+fnr", *few)
    said = noniid("partition")
    assert (
        "| label distance" in said
        and "Heat maps: partitions/natural-0/" in said
        and said.rpartition("\n\n")[2].startswith("natural: your clients are ")
        and "stage 'train'" not in said
    )
    said = noniid("run")
    assert "scaffold+fnr" in said.partition("method ")[2]
    assert "dvc.lock is the certificate" in said and len(said.splitlines()) <= 30
    assert noniid("table") in said
    assert "natural: 4 clients" in noniid("table", "--details")
    again = noniid("run")
    assert "All stages are up to date." in again and "Running stage" not in again


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
    assert per_target["target"].tolist() == ["age"]
    assert per_target["r2"].item() == pytest.approx(rounds["test_r2"].iloc[-1], rel=1e-6)
    report = (folder / "report" / "report.md").read_text()
    assert "last round, R²" in report and "r2-dirichlet.png" in report
    for file in folder.glob("r*/**/*"):
        text = file.read_text() if file.suffix in (".csv", ".md", ".txt", ".json") else ""
        assert "accuracy" not in text.replace("balanced_accuracy", "").replace(
            "majority_accuracy", ""
        ), file
    words = "init labels --data patients.csv --target sick,old --set data.one_hot=[sex,hospital]"
    table = pd.read_csv(folder / "patients.csv")
    table["sick"], table["old"] = (table.pop("diagnosis") == "ill") * 1, (table.pop("age") > 40) * 1
    table.to_csv(folder / "patients.csv", index=False)
    (folder / "labels" / ".dvc").mkdir(parents=True)
    assert main(words.split()) == 0, capsys.readouterr().err
    assert config.load(folder / "labels").train.loss == "bce"
    with_classes = [*words.split(), "--force", "--methods", "fedrs"]
    assert main(with_classes) == 2
    assert "'fedrs' needs targets that are classes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "train.rounds=5", "--set", "train.rounds=7"],
            "--set train.rounds is there twice",
        ),
        (["--set", "train.rounds=5", "--set", "train={epochs: 1}"], "--set train is there twice"),
        (["--set", "train={a: 5}", "--set", "train.rounds=5"], "--set train.rounds is there twice"),
        (["--set", "train={rounds: 5, rounds: 7}"], "--set train = "),
        (["--methods", "fedavg", "--set", "recipe_names=[fnr]"], "recipe_names is there twice, by"),
        (["--methods", "fedavg,fedavg"], "fedavg is named twice"),
        (["--methods", "fedavg", "--methods", "fnr"], "--methods is there twice; allowed: once"),
        (["--data", "digits", "--data", "mnist"], "--data is there twice; allowed: once"),
    ],
)
def test_nothing_is_said_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["init", "made", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not (folder / "made").exists()


def lab(path: Path) -> None:
    """Two columns decide: `crp`, of which some cells are below the limit, and `ward`."""
    rows = ["crp,ward,note,y"]
    for i in range(200):
        crp = {3: "<0.6", 7: "n/a", 11: "not done"}.get(i % 50, f"{i % 90}.5")
        rows.append(f"{crp},{'' if i % 20 == 1 else 'ab'[i % 2]},text {i},{i % 2}")
    path.write_text("\n".join(rows))


def test_the_proposed_command_keeps_a_column_of_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab(folder / "lab.csv")
    command = ["init", "made", "--data", "lab.csv", "--label", "y", "--set", "data.drop=[note]"]
    assert main(command) == 2
    proposed = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert proposed[:6] == ["noniid", *command[:5]]
    settings = [word for word in proposed if word.startswith("data.")]
    assert settings == [
        "data.drop=[note]",
        "data.one_hot=[ward]",
        "data.na=[<0.6, not done]",
        "data.missing=median",
    ]
    assert main(proposed[1:]) == 0
    notes = capsys.readouterr().out
    assert "column 'crp': 12 cells without a value are filled with the median" in notes


@pytest.mark.parametrize("cell", ["{}.5 mg", "$ {}.5", "{}.5 %", '"{},5"', "1 {}00"])
def test_no_command_drops_numbers_that_are_written_in_another_way(
    folder: Path, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    lines = [f"{cell.format(100 + i)},{i % 7},{i % 2}" for i in range(200)]
    (folder / "t.csv").write_text("\n".join(["dose,b,y", *lines]))
    assert main(["init", "made", "--data", "t.csv", "--label", "y"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    advice = "need ',' as `decimal`" if "," in cell else "write numbers with a point, without units"
    assert "column 'dose'" in line and advice in line


def test_a_table_of_german_excel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how it reads the file, and the stages read it so."""
    table = pd.DataFrame({"größe": np.arange(60) / 8, "y": np.where(np.arange(60) % 2, "ja", "nö")})
    text = table.to_csv(sep=";", decimal=",", index=False)
    (folder / "t.csv").write_text(text, encoding="cp1252")
    words = ["init", "--data", "t.csv", "--label", "y", "--methods", "fedavg"]
    assert main(words) == 2 and "`encoding` may be cp1252" in capsys.readouterr().err
    assert main([*words, "--set", "data.encoding=cp1252"]) == 0
    read = "CSV read with separator ';', decimal ',', encoding cp1252, as German Excel writes it"
    assert f"note: {read}\n" in capsys.readouterr().out
    run_stages(folder, ("prepare",))
    data = Dataset.read(folder / "data" / "table.safetensors")
    assert data.notes[0] == read and data.classes == ("ja", "nö")
    assert data.train_x.max() == 59 / 8


@pytest.mark.parametrize("links", [("made", "made2"), ("t.csv", "u.csv")])
def test_a_loop_of_links_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], links: tuple[str, str]
) -> None:
    for first, second in (links, links[::-1]):
        (folder / first).symlink_to(second)
    data = links[0] if links[0].endswith(".csv") else "digits"
    assert main(["init", "made", "--data", data, "--label", "y"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Symlink loop" in line and "allowed: a path that ends at a file or a folder" in line
