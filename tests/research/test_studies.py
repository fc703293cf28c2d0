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
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.partitions import partition
from fedml_noniid.data.splits import hold_out
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
    path = folder / studies.PAPER_FILES / "ccn" / "params.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return studies.of_paper("ccn", size, folder)


def test_size_paper_is_what_stands_there(tmp_path: Path) -> None:
    found = at(tmp_path, "paper")
    assert list(found) == ["first", "second"]
    first = found["first"]
    assert first.what == "the first one" and first.content["train"]["rounds"] == 9
    assert first.content["scenario_names"] == ["even", "uneven"] and first.content[
        "recipe_names"
    ] == ["fedavg", "pull"]
    assert first.content["experiment"] == "ccn-first-paper"
    assert not {"what", "like", "smoke", "small", "paper"} & set(first.content)
    assert first.folder == Path("research/built/ccn/paper/studies/first")


def test_a_size_is_laid_over_key_by_key(tmp_path: Path) -> None:
    small = at(tmp_path, "small")["first"].content
    assert small["train"] == {
        "model": "mlp",
        "model_options": {"hidden": 8},
        "rounds": 4,
        "epochs": 2,
        "batch_size": 50,
        "lr": 0.1,
        "momentum": 0.9,
    }
    assert small["scenario_names"] == ["uneven"] and list(small["scenarios"]) == ["even", "uneven"]
    smoke = at(tmp_path, "smoke")["first"].content
    assert smoke["train"]["model_options"] == {"hidden": 2} and smoke["train"]["epochs"] == 2
    assert smoke["scenarios"]["uneven"] == {"partition": "dirichlet", "clients": 3, "alpha": 0.5}


def test_null_takes_a_key_away(tmp_path: Path) -> None:
    content = at(tmp_path, "smoke")["first"].content
    assert "momentum" not in content["train"]
    assert content["data"] == {
        "name": "digits",
        "validation": 0.1,
        "public": 5,
        "normalise": "half",
    }


def test_like_takes_over_settings_and_sizes_but_for_whole_lists(tmp_path: Path) -> None:
    paper = at(tmp_path, "paper")["second"]
    assert paper.what == "the first one" and paper.content["train"] == {
        **at(tmp_path, "paper")["first"].content["train"],
        "lr": 0.2,
    }
    assert paper.content["recipe_names"] == ["fedavg"] and list(paper.content["recipes"]) == [
        "fedavg"
    ]
    smoke = at(tmp_path, "smoke")["second"].content
    assert smoke["seeds"] == [7] and smoke["train"]["rounds"] == 2
    assert smoke["train"]["model_options"] == {"hidden": 2} and smoke["train"]["lr"] == 0.2
    assert smoke["scenarios"]["even"]["clients"] == 2
    assert "normalise" not in smoke["data"], "its null takes away what the other study has"


@pytest.mark.parametrize("paper", studies.PAPERS)
def test_every_smoke_study_s_data_can_be_dealt(paper: str, tmp_path: Path) -> None:
    """On every seed: what a scenario asks of the samples is known to be possible only when they are
    dealt."""
    data: dict[Path, Dataset] = {}
    for one in studies.of_paper(paper, "smoke", ROOT).values():
        (tmp_path / config.FILE).write_text(one.yaml(tmp_path))
        settings = config.load(tmp_path)
        if one.data_folder not in data:
            data[one.data_folder] = datasets.load(
                settings.data.name, tmp_path, **settings.data.options
            )
        of = data[one.data_folder]
        labels = of.train_y.numpy()
        for seed in settings.seeds:
            split = hold_out(labels, settings.data.validation, settings.data.public, seed)
            for name in settings.scenario_names:
                scenario = settings.scenarios[name]
                clients = partition(
                    scenario.partition,
                    labels,
                    split.train,
                    scenario.clients,
                    seed,
                    of.train_owner,
                    "the data",
                    **scenario.options,
                )
                assert len(clients) == scenario.clients, f"{one.name}, {name}"


def test_data_are_shared_by_studies_with_the_same_reader_s_settings(tmp_path: Path) -> None:
    """The held-out splits are cut later; another size of images is another file."""
    text = SETTINGS.replace("train: {lr: 0.2}", "data: {validation: 0.3, public: 0}")
    paper = at(tmp_path, "paper", text)
    assert paper["first"].data_folder == paper["second"].data_folder
    assert at(tmp_path, "smoke")["first"].data_folder != paper["first"].data_folder


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


def test_unknown_papers_and_sizes_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="paper 'cnn' is unknown"):
        studies.of_paper("cnn", "smoke", tmp_path)
    with pytest.raises(UserError, match="size 'smok' is unknown"):
        studies.of_paper("ccn", "smok", tmp_path)
    # A root without studies of its own, as outside the checkout, has those of the package.
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


def found(place: Workspace, size: str = "paper", name: str = "tiny") -> dict[str, Any]:
    """SHA-256 of the final weights of each run that has been evaluated too."""
    return weights(place.root / "research" / "built" / "ccn" / size / "studies" / name)


def weights(folder: Path) -> dict[str, Any]:
    return {run.key: run.tags["weights_sha256"] for run in results.read(folder) if run.evaluation}


def test_a_second_time_nothing_is_trained_and_the_results_are_the_same(
    place: Workspace, trained: Trained
) -> None:
    execute(place)
    assert trained == KEYS
    before = found(place)
    assert sorted(before) == sorted(KEYS) and len(set(before.values())) == 4
    for _ in range(2):
        execute(place)
        assert trained == KEYS and found(place) == before
        shutil.rmtree(place.root / "research")


def test_items_that_studies_and_the_experiment_share_are_trained_once(
    place: Workspace, trained: Trained
) -> None:
    """Another study has one of the two seeds; the experiment in params.yaml has the settings of the
    first."""
    text = TINY + "  other: {like: tiny, seeds: [1]}\n"
    folder = execute(place, text)
    execute(place, text, name="other")
    assert trained == KEYS
    both = found(place)
    assert found(place, name="other") == {key: both[key] for key in KEYS if key.endswith("-1")}
    content = dict(at(place.root, "paper", text)["tiny"].content)
    (place.root / config.FILE).write_text(yaml.safe_dump(content))
    for stage in ("prepare", "partition", "train", "evaluate"):
        assert stages.main([stage, "--root", str(place.root)]) == 0
    assert trained == KEYS and weights(place.root) == both
    # How long they took is known from the store, for both.
    seconds = {run.key: run.seconds for run in results.read(place.root)}
    assert seconds == {run.key: run.seconds for run in results.read(folder, place.repository)}
    assert all(took is not None and len(took) == 1 and took[0] > 0 for took in seconds.values())


def test_an_item_of_changed_settings_is_trained_and_no_other(
    place: Workspace, trained: Trained
) -> None:
    execute(place)
    before = found(place)
    trained.clear()
    execute(place, TINY.replace("mu: 0.5", "mu: 5"))
    after = found(place)
    assert trained == ["even-pull-0", "even-pull-1"]
    assert all((before[key] == after[key]) == ("fedavg" in key) for key in KEYS)
    trained.clear()
    execute(place)
    assert trained == [] and found(place) == before, "the way back is kept"


def test_divergence_is_an_outcome_that_is_kept(place: Workspace, trained: Trained) -> None:
    """The pull to the old weights is so strong that it overshoots to infinity; the study's other
    items have models."""
    wild = TINY.replace("mu: 0.5", "mu: 1.0e+30")
    for _ in range(2):
        folder = execute(place, wild)
        said = json.loads((folder / studies.DIVERGED).read_text())
        assert (
            sorted(said) == ["even-pull-0", "even-pull-1"] and "not finite" in said["even-pull-0"]
        )
        assert sorted(found(place)) == ["even-fedavg-0", "even-fedavg-1"]
        assert not (folder / "runs" / "even-pull-0").exists()
        shutil.rmtree(folder)
    assert trained == KEYS, "the second time the reason comes from the store"
    assert len(list((place.repository / cache.STORE).glob(f"*/{cache.DIVERGED}"))) == 2


def test_a_study_without_its_data_fails(place: Workspace, trained: Trained) -> None:
    absent = TINY.replace("name: digits", "name: image_folder")
    with pytest.raises(UserError, match="data/raw/train: there is no such folder"):
        execute(place, absent)
    assert trained == []


def test_data_are_read_once_for_the_same_code(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load = datasets.load

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(datasets, "load", counted)
    for text in (TINY, TINY.replace("validation: 0,", "validation: 0.1,")):
        execute(place, text)
    assert len(calls) == 1
    monkeypatch.setattr(study, "preparing", lambda _: {"digits": "a mended reader"})
    execute(place, TINY)
    assert len(calls) == 2


TARGET = """\
ccn-tab9:
  kind: table
  title: A table
  protocol: []
  statistic: final
  columns: {Even: {scenario: even}}
  rows: {A: {study: tiny, recipe: fedavg}, B: {study: tiny, recipe: pull}}
"""


def test_a_target_and_its_paper_by_the_command_line(
    place: Workspace,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`build` runs what the target needs and prints it, `run` takes that and runs the rest."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    at(
        place.root,
        "smoke",
        TINY + "  rest: {like: tiny, seeds: [2]}\n",
    )
    files = place.root / studies.PAPER_FILES / "ccn"
    (files / "targets.yaml").write_text(TARGET)
    (files / "reported.yaml").write_text("{}")
    root = ["--root", str(place.root)]
    assert main(["papers", "build", "ccn-tab9", *root]) == 0
    said = capsys.readouterr().out
    assert trained == KEYS and "# ccn-tab9: A table" in said and "| B |" in said
    single = place.root / "research" / "built" / "single" / "ccn-tab9-smoke"
    assert {"ccn-tab9.md", "report.html"} <= {path.name for path in single.iterdir()}
    assert main(["papers", "run", "ccn", *root]) == 0
    assert trained[4:] == ["even-fedavg-2", "even-pull-2"]
    whole = place.root / "research" / "built" / "ccn" / "smoke"
    assert (whole / "report" / "ccn-tab9.md").read_text() == (single / "ccn-tab9.md").read_text()


def test_what_reads_no_run_trains_nothing(
    place: Workspace, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of settings needs the file of settings only, a heat map the partitions too."""
    at(place.root, "smoke", TINY)
    files = place.root / studies.PAPER_FILES / "ccn"
    (files / "reported.yaml").write_text("{}")
    (files / "targets.yaml").write_text(
        "ccn-tab9:\n  kind: settings\n  title: Settings\n  protocol: []\n"
        "  rows: {A: {study: tiny}}\n"
        "  columns: {E: {path: train.epochs}, B: {path: train.batch_size}}"
    )
    assert main(["papers", "build", "ccn-tab9", "--root", str(place.root)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("0 trainings (0 more have ended)") and "What was run" not in shown
    assert re.search(r"\| A +\| 1 +\| 200 +\|", shown) and not (place.root / "data").exists()
    one = studies.of_paper("ccn", "smoke", place.root)["tiny"]
    study.execute(place, one, is_trained=False)
    folder = place.root / one.folder
    assert [path.name for path in sorted((folder / "partitions").iterdir())] == ["even-0", "even-1"]
    assert trained == [] and not (folder / "runs").exists()


def test_an_estimate_is_of_similar_runs_and_of_the_same_settings(tmp_path: Path) -> None:
    """24 items. `near a` took 2 x 900 s and `near b` 2 x 2700 s: two more seeds of each are like
    them, the other 18 take the mean of both, which is an hour."""
    by_hand.paper(tmp_path)
    one = studies.of_paper("ccn", "smoke", tmp_path)["one"]
    assert estimated(tmp_path).startswith("24 trainings (0 more have ended), about 0.02 hours")
    for recipe, seconds in (("a", 900), ("b", 2700)):
        by_hand.run(tmp_path, "near", recipe, 0, [0.5, 0.5], seconds=seconds)
    rounds = tmp_path / one.folder / "runs" / "near-a-0" / "rounds.csv"
    rounds.write_text(rounds.read_text() + "\n" * 2**20)
    other = estimated(tmp_path)
    assert other.startswith("24 trainings (0 more"), "none has ended with these settings"
    (tmp_path / one.folder / config.FILE).write_text(one.yaml(tmp_path))
    left = estimated(tmp_path)
    # Two at 0.5 h and 1 MiB, two at 1.5 h, 18 at 1 h and 0.5 MiB.
    assert left.startswith(
        "22 trainings (2 more have ended), about 22 hours in one process and 11.0"
    )
    assert "; 0 of them without" in left and "; 0 of them without" in other
    rounds.with_name("run.json").write_text("{")
    assert estimated(tmp_path).startswith("24 trainings (0 more have ended)"), "it is made again"


def estimated(root: Path) -> str:
    return estimate(Measured("ccn", "smoke", root), ["one"])


def test_size_paper_does_not_begin_without_its_word_vectors(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["papers", "build", "rf-tab1", "--size", "paper", "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "rfedavg sent140-silo: " in error and "data/raw/glove.6B.300d.txt is missing" in error
    assert trained == [] and not list(tmp_path.iterdir())
    (tmp_path / "data" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "raw" / "glove.6B.300d.txt").touch()
    command = ["papers", "build", "rf-tab1", "--dry-run", "--root", str(tmp_path), "--size"]
    for size, items in (("paper", (3 + 3) * 6 * 3 + 2 * 6 * 3), ("smoke", (3 + 3) * 6 + 2 * 6)):
        assert main([*command, size]) == 0
        assert capsys.readouterr().out.startswith(f"{items} trainings (0 more have ended)")
    assert trained == [] and [path.name for path in tmp_path.iterdir()] == ["data"]
