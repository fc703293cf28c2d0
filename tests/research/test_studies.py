"""Studies: what a size and `like` make of them, and that what was trained once is not trained
again."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import datasets
from fedml_noniid.pipelines.experiment import cache, config, results
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.stages import train
from fedml_noniid.pipelines.tracking.store import Store
from research import studies, study
from research.__main__ import main
from research.estimate import estimate
from research.runs import Measured
from tests.pipelines.small import ROOT
from tests.research import by_hand

SETTINGS = """\
studies:
  first:
    what: the first one
    data: {name: digits, validation: 0.1, public: 5, size: [16, 16], normalise: half}
    scenarios:
      {even: {partition: iid, clients: 4}, uneven: {partition: dirichlet, clients: 4, alpha: 0.5}}
    recipes: {fedavg: {}, pull: {recipe: fedprox, fedprox: {mu: 0.5}}}
    seeds: [0, 1, 2]
    train:
      {model: mlp, model_options: {hidden: 8}, rounds: 9, epochs: 2, batch_size: 50, lr: 0.1,
       momentum: 0.9}
    small: {scenario_names: [uneven], seeds: [1], train: {rounds: 4}}
    smoke:
      data: {size: null}
      scenarios: {even: {clients: 2}, uneven: {clients: 3}}
      train: {rounds: 1, model_options: {hidden: 2}, momentum: null}
  second:
    like: first
    recipes: {fedavg: {}}
    train: {lr: 0.2}
    smoke: {seeds: [7], data: {normalise: null}, train: {rounds: 2}}
"""


def at(folder: Path, size: str, text: str = SETTINGS) -> dict[str, studies.Study]:
    """The studies of these settings at a size."""
    path = folder / studies.PAPER_FILES / "ccn" / "params.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return studies.of_paper("ccn", size, folder)


PAPER = {
    "model": "mlp",
    "model_options": {"hidden": 8},
    "rounds": 9,
    "epochs": 2,
    "batch_size": 50,
    "lr": 0.1,
    "momentum": 0.9,
}
SMOKE = {"model": "mlp", "model_options": {"hidden": 2}, "rounds": 1, "epochs": 2, "batch_size": 50}
EVEN = {"partition": "iid", "clients": 4}
UNEVEN = {"partition": "dirichlet", "clients": 4, "alpha": 0.5}
DATA = {"name": "digits", "validation": 0.1, "public": 5, "size": [16, 16], "normalise": "half"}


@pytest.mark.parametrize(
    ("size", "study", "section", "wanted"),
    [
        # Size paper is what stands there; `like` takes it over but for whole lists.
        ("paper", "first", "train", PAPER),
        ("paper", "first", "recipe_names", ["fedavg", "pull"]),
        ("paper", "second", "train", PAPER | {"lr": 0.2}),
        ("paper", "second", "recipe_names", ["fedavg"]),
        ("paper", "second", "recipes", {"fedavg": {}}),
        # A size is laid over key by key, and so is that of the other study.
        ("small", "first", "train", PAPER | {"rounds": 4}),
        ("small", "first", "scenario_names", ["uneven"]),
        ("smoke", "first", "train", SMOKE | {"lr": 0.1}),
        ("smoke", "second", "train", SMOKE | {"lr": 0.2, "rounds": 2}),
        ("smoke", "second", "seeds", [7]),
        (
            "smoke",
            "second",
            "scenarios",
            {"even": EVEN | {"clients": 2}, "uneven": UNEVEN | {"clients": 3}},
        ),
        # null takes a key away, also one that the other study has.
        ("smoke", "first", "data", {key: DATA[key] for key in DATA if key != "size"}),
        ("smoke", "second", "data", {key: DATA[key] for key in ("name", "validation", "public")}),
    ],
)
def test_what_a_size_and_like_make_of_a_section(
    tmp_path: Path, size: str, study: str, section: str, wanted: object
) -> None:
    found = at(tmp_path, size)
    assert list(found) == ["first", "second"] and found[study].what == "the first one"
    assert found[study].content[section] == wanted
    assert found[study].content["experiment"] == f"ccn-{study}-{size}"
    assert not {"what", "like", "smoke", "small", "paper"} & set(found[study].content)


def test_data_are_shared_by_studies_with_the_same_reader_s_settings(tmp_path: Path) -> None:
    """The held-out splits are cut later; another size of images is another file."""
    text = SETTINGS.replace("train: {lr: 0.2}", "data: {validation: 0.3, public: 0}")
    paper, smoke = at(tmp_path, "paper", text), at(tmp_path, "smoke")
    assert paper["first"].data_folder == paper["second"].data_folder
    assert smoke["first"].data_folder != paper["first"].data_folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("like: first", "like: frist", "study 'frist' is unknown (did you mean 'first'?)"),
        ("like: first", "like: second", "study 'second' is like itself"),
        ("what: the first one", "like: second", "is like itself, by way of"),
        ("studies:", "studies: {", "is not YAML"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        at(tmp_path, "paper", SETTINGS.replace(old, new))
    assert "params.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_root_without_studies_of_its_own_has_those_of_the_package(tmp_path: Path) -> None:
    assert studies.of_paper("ccn", "smoke", tmp_path) == studies.of_paper("ccn", "smoke", ROOT)
    (tmp_path / studies.PAPER_FILES / "ccn").mkdir(parents=True)
    with pytest.raises(UserError, match=re.escape("params.yaml: can't be read (No such file")):
        studies.of_paper("ccn", "smoke", tmp_path)


TINY = """\
studies:
  tiny:
    data: {name: digits, validation: 0, public: 0}
    scenarios: {even: {partition: iid, clients: 2}}
    recipes: {fedavg: {}, pull: {recipe: fedprox, fedprox: {mu: 0.5}}}
    seeds: [0, 1]
    train:
      {model: mlp, model_options: {hidden: 4}, rounds: 1, epochs: 1, batch_size: 200, lr: 0.1,
       device: cpu}
"""
KEYS = ["even-fedavg-0", "even-pull-0", "even-fedavg-1", "even-pull-1"]  # seed by seed
Trained = list[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An empty MLflow database, whose making takes seconds."""
    made = Store(tmp_path_factory.mktemp("store"), None)
    made.client()
    return made


@pytest.fixture
def place(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """An empty repository on a machine with one core, so that items come one at a time."""
    folder = Store(tmp_path, None).folder
    shutil.copytree(store.folder, folder)
    (folder / ".place").write_text(str(folder))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    return Workspace.from_environment(tmp_path, {})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The items that are trained, as they come."""
    real = train.trained
    seen: Trained = []

    def note(item: Item, *rest: Any) -> dict[str, bytes]:
        seen.append(item.unit.key)
        return real(item, *rest)

    monkeypatch.setattr(train, "trained", note)
    return seen


def execute(place: Workspace, text: str = TINY, size: str = "paper", name: str = "tiny") -> Path:
    """Runs a study; returns its folder."""
    one = at(place.root, size, text)[name]
    study.execute(place, one)
    return place.root / one.folder


def weights(folder: Path) -> dict[str, Any]:
    """SHA-256 of the final weights of each run that has been evaluated too."""
    return {run.key: run.tags["weights_sha256"] for run in results.read(folder) if run.evaluation}


def test_what_was_trained_once_is_not_trained_again(
    place: Workspace, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor read: not by the same study, not by another one with one of the two seeds, not by the
    experiment in params.yaml with the settings of the first. An item of changed settings is
    trained, and the way back is kept."""
    read, load = [], datasets.load
    monkeypatch.setattr(
        datasets, "load", lambda *args, **kw: read.append(args) or load(*args, **kw)
    )
    text = TINY + "  other: {like: tiny, seeds: [1]}\n"
    folder = execute(place, text)
    assert trained == KEYS
    before = weights(folder)
    assert sorted(before) == sorted(KEYS) and len(set(before.values())) == 4
    shutil.rmtree(place.root / "research")
    other = execute(place, text, name="other")
    assert weights(other) == {key: before[key] for key in KEYS if key.endswith("-1")}
    assert weights(execute(place, text)) == before and trained == KEYS
    after = weights(execute(place, TINY.replace("mu: 0.5", "mu: 5")))
    assert trained == [*KEYS, "even-pull-0", "even-pull-1"]
    assert all((before[key] == after[key]) == ("fedavg" in key) for key in KEYS)
    assert weights(execute(place, text)) == before and len(trained) == 6
    assert len(read) == 1
    content = dict(at(place.root, "paper", text)["tiny"].content)
    (place.root / config.FILE).write_text(yaml.safe_dump(content))
    for stage in ("prepare", "partition", "train", "evaluate"):
        assert stages.main([stage, "--root", str(place.root)]) == 0
    assert len(trained) == 6 and weights(place.root) == before
    # How long they took is known from the store, for both.
    seconds = {run.key: run.seconds for run in results.read(place.root)}
    assert seconds == {run.key: run.seconds for run in results.read(folder, place.repository)}
    assert all(took is not None and len(took) == 1 and took[0] > 0 for took in seconds.values())
    monkeypatch.setattr(study, "preparing", lambda _: {"digits": "a mended reader"})
    execute(place, text)
    assert len(read) == 3, "for the stage prepare, and for the mended reader"


def test_divergence_is_an_outcome_that_is_kept(place: Workspace, trained: Trained) -> None:
    """The pull to the old weights is so strong that it overshoots to infinity; the study's other
    items have models."""
    wild = TINY.replace("mu: 0.5", "mu: 1.0e+30").replace("seeds: [0, 1]", "seeds: [0]")
    for _ in range(2):
        folder = execute(place, wild)
        said = json.loads((folder / studies.DIVERGED).read_text())
        assert [*said] == ["even-pull-0"] and "not finite" in said["even-pull-0"]
        assert [*weights(folder)] == ["even-fedavg-0"]
        assert not (folder / "runs" / "even-pull-0").exists()
        shutil.rmtree(folder)
    assert trained == KEYS[:2], "the second time the reason comes from the store"
    assert len(list((place.repository / cache.STORE).glob(f"*/{cache.DIVERGED}"))) == 1


TARGET = """\
ccn-tab9:
  kind: table
  title: A table
  protocol: []
  statistic: final
  columns: {Even: {scenario: even}}
  rows: {A: {study: tiny, recipe: fedavg}, B: {study: tiny, recipe: pull}}
ccn-tab8:
  kind: settings
  title: Settings
  protocol: []
  rows: {A: {study: tiny}}
  columns: {E: {path: train.epochs}, B: {path: train.batch_size}}
"""


def test_a_target_and_its_paper_by_the_command_line(
    place: Workspace,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`build` runs what the target needs and prints it, `run` takes that and runs the rest. A table
    of settings needs the file of settings only."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    at(place.root, "smoke", TINY + "  rest: {like: tiny, seeds: [2], recipes: {fedavg: {}}}\n")
    files = place.root / studies.PAPER_FILES / "ccn"
    (files / "targets.yaml").write_text(TARGET)
    (files / "reported.yaml").write_text("{}")
    root = ["--root", str(place.root)]
    assert main(["papers", "build", "ccn-tab8", *root]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0 trainings (0 more have ended)") and "What was run" not in said
    assert re.search(r"\| A +\| 1 +\| 200 +\|", said) and not (place.root / "data").exists()
    assert main(["papers", "build", "ccn-tab9", *root]) == 0
    said = capsys.readouterr().out
    assert trained == KEYS and "# ccn-tab9: A table" in said and "| B |" in said
    built = place.root / "research" / "built"
    single = built / "single" / "ccn-tab9-smoke"
    assert {"ccn-tab9.md", "report.html"} <= {path.name for path in single.iterdir()}
    assert main(["papers", "run", "ccn", *root]) == 0
    assert trained[4:] == ["even-fedavg-2"]
    page = built / "ccn" / "smoke" / "report" / "ccn-tab9.md"
    assert page.read_text() == (single / "ccn-tab9.md").read_text()


def test_a_heat_map_needs_the_partitions_only(place: Workspace, trained: Trained) -> None:
    one = at(place.root, "smoke", TINY)["tiny"]
    study.execute(place, one, is_trained=False)
    folder = place.root / one.folder
    assert {path.name for path in (folder / "partitions").iterdir()} == {"even-0", "even-1"}
    assert trained == [] and not (folder / "runs").exists()


def test_an_estimate_is_of_similar_runs_and_of_the_same_settings(tmp_path: Path) -> None:
    """24 items. `near a` took 2 x 900 s and `near b` 2 x 2700 s: two more seeds of each are like
    them, the other 18 take the mean of both, which is an hour."""
    by_hand.paper(tmp_path)
    one = studies.of_paper("ccn", "smoke", tmp_path)["one"]

    def estimated() -> str:
        return estimate(Measured("ccn", "smoke", tmp_path), ["one"])

    assert estimated().startswith("24 trainings (0 more have ended), about 0.02 hours")
    for recipe, seconds in (("a", 900), ("b", 2700)):
        by_hand.run(tmp_path, "near", recipe, 0, [0.5, 0.5], seconds=seconds)
    rounds = tmp_path / one.folder / "runs" / "near-a-0" / "rounds.csv"
    rounds.write_text(rounds.read_text() + "\n" * 2**20)
    assert estimated().startswith("24 trainings (0 more"), "none has ended with these settings"
    (tmp_path / one.folder / config.FILE).write_text(one.yaml(tmp_path))
    # Two at 0.5 h and 1 MiB, two at 1.5 h, 18 at 1 h and 0.5 MiB.
    words = "22 trainings (2 more have ended), about 22 hours in one process and 11.0"
    assert estimated().startswith(words) and "; 0 of them without" in estimated()
    rounds.with_name("run.json").write_text("{")
    assert estimated().startswith("24 trainings (0 more have ended)"), "it is made again"


def test_size_paper_does_not_begin_without_its_word_vectors(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["papers", "build", "rf-tab1", "--size", "paper", "--root", str(tmp_path)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "rfedavg sent140-silo: " in error and "data/raw/glove.6B.300d.txt is missing" in error
    assert trained == [] and not list(tmp_path.iterdir())
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "glove.6B.300d.txt").touch()
    assert main([*command, "--dry-run"]) == 0
    items = (3 + 3) * 6 * 3 + 2 * 6 * 3
    assert capsys.readouterr().out.startswith(f"{items} trainings (0 more have ended)")
    assert trained == [] and [path.name for path in tmp_path.iterdir()] == ["data"]
