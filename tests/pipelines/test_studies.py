"""Studies: what a size and `like` make of them, and that what was trained once is not trained again."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import config, results, studies, study, tracking, train, workers
from plugins.core.errors import UserError
from plugins.data import datasets
from plugins.data.dataset import Dataset
from plugins.data.partitions import partition
from plugins.data.splits import hold_out
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

SETTINGS = """\
study_names: [second, first]
studies:
  first:
    what: the first one
    data: {name: digits, validation: 0.1, public: 5, size: [16, 16], normalise: half}
    scenarios: {even: {partition: iid, clients: 4}, uneven: {partition: dirichlet, clients: 4, alpha: 0.5}}
    recipes: {fedavg: {}, pull: {recipe: fedprox, fedprox: {mu: 0.5}}}
    seeds: [0, 1, 2]
    train: {model: mlp, model_options: {hidden: 8}, rounds: 9, epochs: 2, batch_size: 50, lr: 0.1, momentum: 0.9}
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
    path = folder / "pipelines" / "ccn" / "params.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return studies.of_paper("ccn", size, folder)


def test_size_paper_is_what_stands_there(tmp_path: Path) -> None:
    found = at(tmp_path, "paper")
    assert list(found) == ["second", "first"]
    first = found["first"]
    assert first.what == "the first one" and first.content["train"]["rounds"] == 9
    assert first.content["scenario_names"] == ["even", "uneven"] and first.content["recipe_names"] == ["fedavg", "pull"]
    assert first.content["experiment"] == "ccn-first-paper"
    assert first.content["deploy"] == {"recipe": "fedavg", "scenario": "even", "seed": 0}
    assert not {"what", "like", "smoke", "small", "paper"} & set(first.content)
    assert first.folder == Path("papers/ccn/paper/studies/first")


def test_a_size_is_laid_over_key_by_key(tmp_path: Path) -> None:
    small = at(tmp_path, "small")["first"].content
    assert small["train"] == {
        "model": "mlp", "model_options": {"hidden": 8}, "rounds": 4, "epochs": 2, "batch_size": 50, "lr": 0.1,
        "momentum": 0.9,
    }  # fmt: skip
    assert small["scenario_names"] == ["uneven"] and list(small["scenarios"]) == ["even", "uneven"]
    assert small["deploy"] == {"recipe": "fedavg", "scenario": "uneven", "seed": 1}
    smoke = at(tmp_path, "smoke")["first"].content
    assert smoke["train"]["model_options"] == {"hidden": 2} and smoke["train"]["epochs"] == 2
    assert smoke["scenarios"]["uneven"] == {"partition": "dirichlet", "clients": 3, "alpha": 0.5}


def test_null_takes_a_key_away(tmp_path: Path) -> None:
    content = at(tmp_path, "smoke")["first"].content
    assert "momentum" not in content["train"]
    assert content["data"] == {"name": "digits", "validation": 0.1, "public": 5, "normalise": "half"}


def test_like_takes_over_settings_and_sizes_but_for_whole_lists(tmp_path: Path) -> None:
    paper = at(tmp_path, "paper")["second"]
    assert paper.what == "the first one" and paper.content["train"] == {
        **at(tmp_path, "paper")["first"].content["train"],
        "lr": 0.2,
    }
    assert paper.content["recipe_names"] == ["fedavg"] and list(paper.content["recipes"]) == ["fedavg"]
    smoke = at(tmp_path, "smoke")["second"].content
    assert smoke["seeds"] == [7] and smoke["train"]["rounds"] == 2
    assert smoke["train"]["model_options"] == {"hidden": 2} and smoke["train"]["lr"] == 0.2
    assert smoke["scenarios"]["even"]["clients"] == 2


def test_a_size_s_null_holds_for_what_is_like_it(tmp_path: Path) -> None:
    """`size: null` is the first study's, `normalise: null` the second's own, which the first's smoke does not name."""
    content = at(tmp_path, "smoke")["second"].content
    assert content["data"] == {"name": "digits", "validation": 0.1, "public": 5}
    assert "momentum" not in content["train"]
    assert at(tmp_path, "paper")["second"].content["data"]["size"] == [16, 16]


def test_every_study_is_a_whole_experiment(tmp_path: Path) -> None:
    """Its params.yaml is read by the pipeline, and raw data are looked for in the repository."""
    for size in studies.SIZES:
        for one in at(tmp_path, size).values():
            folder = tmp_path / one.folder
            folder.mkdir(parents=True)
            (folder / "params.yaml").write_text(one.yaml(tmp_path))
            settings = config.load(folder / "params.yaml")
            assert (folder / settings.data.root).resolve() == tmp_path / "data" / "raw"


@pytest.mark.parametrize("paper", studies.PAPERS)
def test_every_smoke_study_s_data_can_be_dealt(paper: str, tmp_path: Path) -> None:
    """On every seed: what a scenario asks of the samples is known to be possible only when they are dealt."""
    data: dict[Path, Dataset] = {}
    for one in studies.of_paper(paper, "smoke", ROOT).values():
        (tmp_path / config.FILE).write_text(one.yaml(tmp_path))
        settings = config.load(tmp_path / config.FILE)
        if one.data_folder not in data:
            data[one.data_folder] = datasets.load(settings.data.name, tmp_path, **settings.data.options)
        of = data[one.data_folder]
        labels = of.train_y.numpy()
        for seed in settings.seeds:
            split = hold_out(labels, settings.data.validation, settings.data.public, seed)
            for name in settings.scenario_names:
                scenario = settings.scenarios[name]
                clients = partition(
                    scenario.partition, labels, split.train, scenario.clients, seed, of.train_owner, "the data",
                    **scenario.options,
                )  # fmt: skip
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
        ("study_names: [second, first]", "study_names: [first]", "every study once; not in both are second"),
        ("study_names: [second, first]", "study_names: [second, first, first]", "once; not in both are none"),
        ("study_names: [second, first]\n", "", "the key 'study_names' is missing"),
        ("like: first", "like: frist", "study 'frist' is unknown (did you mean 'first'?)"),
        ("like: first", "like: second", "study 'second' is like itself"),
        ("what: the first one", "like: second", "is like itself, by way of"),
        ("studies:", "studies: {", "is not YAML"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        at(tmp_path, "paper", SETTINGS.replace(old, new))
    assert "params.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_papers_and_sizes_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="paper 'cnn' is unknown"):
        studies.of_paper("cnn", "smoke", tmp_path)
    with pytest.raises(UserError, match="size 'smok' is unknown"):
        studies.of_paper("ccn", "smok", tmp_path)
    with pytest.raises(UserError, match=re.escape("params.yaml: can't be read (No such file")):
        studies.of_paper("ccn", "smoke", tmp_path)


TINY = """\
study_names: [tiny]
studies:
  tiny:
    data: {name: digits, validation: 0, public: 0}
    scenarios: {even: {partition: iid, clients: 2}}
    recipes: {fedavg: {}, pull: {recipe: fedprox, fedprox: {mu: 0.5}}}
    seeds: [0, 1]
    train: {model: mlp, model_options: {hidden: 4}, rounds: 1, epochs: 1, batch_size: 200, lr: 0.1, device: cpu}
"""
KEYS = ["even-fedavg-0", "even-pull-0", "even-fedavg-1", "even-pull-1"]  # seed by seed
Trained = list[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database, whose making takes seconds."""
    root = tmp_path_factory.mktemp("store")
    tracking.uri(root)
    return root


@pytest.fixture
def repository(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one, with the parameters of a study."""
    shutil.copytree(store / "mlruns", tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    monkeypatch.setenv(workers.VARIABLE, "1")
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The items that are trained, as they come."""
    real: Callable[[Namespace], None] = train.train
    seen: Trained = []

    def note(options: Namespace) -> None:
        seen.append(f"{options.scenario}-{options.recipe}-{options.seed}")
        real(options)

    monkeypatch.setattr(train, "train", note)
    return seen


def execute(root: Path, text: str = TINY, size: str = "paper") -> int:
    at(root, size, text)
    return study.main(["--paper", "ccn", "--study", "tiny", "--size", size])


def found(root: Path, size: str = "paper") -> dict[str, Any]:
    """SHA-256 of the final weights of each run that has been evaluated too."""
    runs = results.read(root / "papers" / "ccn" / size / "studies" / "tiny")
    return {run.key: run.tags["weights_sha256"] for run in runs if run.evaluation}


def test_what_is_settled_of_a_paper(repository: Path, trained: Trained) -> None:
    """Four items of one study, two of another on one seed, none of one that this size does not run."""
    at(repository, "paper", TINY.replace("[tiny]", "[tiny, single, never]") + """\
  single: {like: tiny, seeds: [0]}
  never: {like: tiny, scenario_names: []}
""")  # fmt: skip
    of = studies.of_paper("ccn", "paper", repository).values()
    assert [one.n_items for one in of] == [4, 2, 0]
    assert study.settled(repository, of) == (0, 6)
    assert study.main(["--paper", "ccn", "--study", "single", "--size", "paper"]) == 0
    assert study.settled(repository, of) == (2, 6)


def test_a_second_time_nothing_is_trained_and_the_results_are_the_same(repository: Path, trained: Trained) -> None:
    assert execute(repository) == 0
    assert trained == KEYS
    before = found(repository)
    assert sorted(before) == sorted(KEYS) and len(set(before.values())) == 4
    shutil.rmtree(repository / "papers")
    assert execute(repository) == 0
    assert trained == KEYS and found(repository) == before
    assert not (repository / "papers/ccn/paper/studies/tiny/data").exists(), "a link while it runs"


def test_a_study_that_is_killed_in_the_middle_goes_on(
    repository: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes while the third item is trained; the two before it are not trained again."""
    goes_well = train.train

    def killed(options: Namespace) -> None:
        if len(trained) == 2:
            raise KeyboardInterrupt
        goes_well(options)

    monkeypatch.setattr(train, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(repository)
    assert trained == KEYS[:2] and sorted(found(repository)) == KEYS[:2], "a part of a study is a table already"
    assert Path.cwd() == repository
    monkeypatch.setattr(train, "train", goes_well)
    assert execute(repository) == 0
    assert trained == KEYS and sorted(found(repository)) == sorted(KEYS)


def test_what_is_half_kept_is_trained_again(
    repository: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between training and keeping leaves nothing under the item's fingerprint."""
    whole = study.replace_folder

    def killed(folder: Path, files: dict[str, bytes]) -> None:
        if folder.parent.name == study.KEPT:
            raise KeyboardInterrupt
        whole(folder, files)

    monkeypatch.setattr(study, "replace_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(repository)
    assert not (repository / study.KEPT).exists()
    monkeypatch.setattr(study, "replace_folder", whole)
    assert execute(repository) == 0
    assert trained == [KEYS[0], *KEYS]


def test_an_item_of_changed_settings_is_trained_and_no_other(repository: Path, trained: Trained) -> None:
    execute(repository)
    before = found(repository)
    trained.clear()
    execute(repository, TINY.replace("mu: 0.5", "mu: 5"))
    after = found(repository)
    assert trained == ["even-pull-0", "even-pull-1"]
    assert all((before[key] == after[key]) == ("fedavg" in key) for key in KEYS)
    trained.clear()
    execute(repository)
    assert trained == [] and found(repository) == before, "the way back is kept"


def test_what_a_study_no_longer_has_goes_from_its_folder(repository: Path, trained: Trained) -> None:
    execute(repository)
    execute(repository, TINY.replace("seeds: [0, 1]", "seeds: [1]"))
    assert sorted(found(repository)) == ["even-fedavg-1", "even-pull-1"] and trained == KEYS
    partitions = repository / "papers/ccn/paper/studies/tiny/partitions"
    assert [path.name for path in partitions.iterdir()] == ["even-1"]


def test_two_sizes_with_the_same_settings_train_once(repository: Path, trained: Trained) -> None:
    execute(repository)
    execute(repository, size="small")
    assert trained == KEYS and found(repository, "small") == found(repository)


def test_divergence_is_an_outcome_that_is_kept(repository: Path, trained: Trained) -> None:
    wild = TINY.replace("lr: 0.1", "lr: 1.0e+30").replace("seeds: [0, 1]", "seeds: [0]")
    for _ in range(2):
        assert execute(repository, wild) == 0
        said = json.loads((repository / "papers/ccn/paper/studies/tiny" / studies.DIVERGED).read_text())
        assert sorted(said) == ["even-fedavg-0", "even-pull-0"] and "not finite" in said["even-fedavg-0"]
        assert found(repository) == {}
    assert trained == ["even-fedavg-0", "even-pull-0"]


def test_without_its_data_a_small_study_is_skipped_and_others_fail(
    repository: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = TINY.replace("name: digits", "name: image_folder")
    assert execute(repository, absent, "small") == 0
    reason = (repository / "papers/ccn/small/studies/tiny" / studies.SKIPPED).read_text()
    assert len(reason.splitlines()) == 1 and "data/raw/train: there is no such folder" in reason
    for size in ("smoke", "paper"):
        assert execute(repository, absent, size) == 2
        assert "data/raw/train: there is no such folder" in capsys.readouterr().err
    assert trained == []


def test_data_are_read_once(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    load = study.datasets.load

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(study.datasets, "load", counted)
    for text in (TINY, TINY.replace("validation: 0,", "validation: 0.1,")):
        assert execute(repository, text) == 0
    assert len(calls) == 1


def test_an_unknown_study_is_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at(repository, "paper", TINY)
    assert study.main(["--paper", "ccn", "--study", "tinny", "--size", "smoke"]) == 2
    assert "study of ccn 'tinny' is unknown (did you mean 'tiny'?)" in capsys.readouterr().err
