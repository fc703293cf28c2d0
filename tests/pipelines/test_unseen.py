"""Scenarios in which some owners take no part: nothing of them reaches what is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import fedml_noniid as nd
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.search import choosing
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting import report
from fedml_noniid.pipelines.stages.tune import samples_of
from fedml_noniid.pipelines.verbs import fits
from tests.pipelines.small import run_stages

TRAIN: dict[str, Any] = {"model": "mlp", "rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.3}
CONTENT: dict[str, Any] = {
    "experiment": "unseen",
    "data": {
        "name": "table",
        "root": ".",
        "file": "wards.csv",
        "label": "ill",
        "owner": "ward",
        "one_hot": ["sex"],
        "missing": "median",
        "validation": 0,
        "public": 0,
    },
    "scenario_names": ["all", "new"],
    "scenarios": {
        "all": {"partition": "natural", "clients": 4},
        "new": {"partition": "natural", "clients": 3, "unseen": ["ward d"]},
    },
    "recipe_names": ["fedavg", "fedper"],
    "recipes": {"fedavg": {}, "fedper": {}},
    "seeds": [0, 1],
    "train": {**TRAIN, "device": "cpu"},
    "machine": {"processes": 1},
}


def wards(n: int = 30) -> pd.DataFrame:
    """Four wards. Ward d alone has a class, a category, a hole, and values on another scale."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(20, 80, 4 * n).astype(float)})
    frame["sex"], frame["ward"] = rng.choice(["f", "m"], 4 * n), [f"ward {x}" for x in "abcd"] * n
    frame["ill"] = np.where(frame.age > 50, "yes", "no")
    frame.loc[3::4, "age"] *= 1000.0
    frame.loc[3, ["age", "sex"]] = np.nan, "other"
    frame.loc[[3, 7], "ill"] = "perhaps"
    frame.loc[11, "ill"] = "never"
    return frame


FRAME = wards()
OTHERS, OWN = FRAME[FRAME.ward != "ward d"], FRAME[FRAME.ward == "ward d"]
TABLE: dict[str, Any] = {"label": "ill", "owner": "ward", "one_hot": ["sex"], "missing": "median"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all stages have run."""
    folder = tmp_path_factory.mktemp("unseen")
    FRAME.to_csv(folder / "wards.csv", index=False)
    (folder / "params.yaml").write_text(yaml.safe_dump(CONTENT))
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    return folder


@pytest.fixture(scope="module")
def alone() -> nd.Results:
    """Runs on a table in which the ward never was."""
    data = nd.from_frame(OTHERS, **TABLE)
    how = {"partition": "natural", "clients": 3, "seeds": [0, 1], "progress": False, **TRAIN}
    return nd.sweep(["fedavg", "fedper"], data, **how)


def test_the_runs_are_those_of_a_table_without_the_owner(folder: Path, alone: nd.Results) -> None:
    for recipe in ("fedavg", "fedper"):
        for seed in (0, 1):
            run = results.record(folder / f"runs/new-{recipe}-{seed}/run.json")
            assert run["weights_sha256"] == alone[recipe].sha256[seed]


def test_python_leaves_out_the_same(folder: Path, tmp_path: Path) -> None:
    data = nd.from_frame(FRAME, **TABLE)
    how = {"partition": "natural", "clients": 3, "seeds": [0, 1], "progress": False, **TRAIN}
    result = nd.run("fedavg", data, unseen=["ward d"], folder=tmp_path, **how)
    split = nd.partition(data, "natural", clients=3, unseen=["ward d"])
    of_split = nd.run("fedavg", split, seeds=[0], progress=False, **TRAIN)
    again = nd.results(tmp_path, data)["fedavg"]
    for seed in (0, 1):
        run = results.record(folder / f"runs/new-fedavg-{seed}/run.json")
        assert run["weights_sha256"] == result.sha256[seed]
        by_stage = pd.read_csv(folder / f"evaluation/new-fedavg-{seed}/unseen.csv")
        mine = result.unseen[result.unseen.seed == seed].drop(columns="seed")
        pd.testing.assert_frame_equal(mine.reset_index(drop=True), by_stage)
    assert of_split.sha256[0] == result.sha256[0] == again.sha256[0]
    assert again.predict(OWN).tolist() == result.predict(OWN).tolist()
    assert "unseen" in result.settings.scenarios["natural"].model_dump()


def test_the_model_is_tested_on_all_rows_of_the_site(folder: Path, alone: nd.Results) -> None:
    """Two classes that only this site has are wrong, and are not one class."""
    for seed in (0, 1):
        (line,) = results.table(folder / f"evaluation/new-fedavg-{seed}/unseen.csv")
        right = alone["fedavg"].predict(OWN, seed) == OWN.ill.to_numpy()
        assert float(line["accuracy"]) == pytest.approx(right.mean()) and not right[:3].any()
        assert (line["owner"], line["samples"]) == ("ward d", "30")
        share = OWN.ill.value_counts().max() / 30
        assert float(line["majority_accuracy"]) == pytest.approx(share)


def test_the_report_has_the_site_beside_where_it_took_part(folder: Path) -> None:
    text = (folder / "report" / "report.md").read_text()
    part = text.split("### Sites that took no part")[1]
    runs = {run.key: run for run in results.read(folder)}

    def mean(values: list[float]) -> str:
        return f"{100 * np.mean(values):.2f}"

    for recipe in ("fedavg", "fedper"):
        new, took_part = ([runs[f"{name}-{recipe}-{k}"] for k in (0, 1)] for name in ("new", "all"))
        site = new[0].unseen["ward d"]
        cells = [
            *("ward d", "30", recipe, mean([site.majority])),
            mean([run.unseen["ward d"].accuracy for run in new]),
            mean([run.tested[-1] for run in new]),
            mean([run.sites["ward d"].score for run in took_part]),
        ]
        assert f"| {' | '.join(cells)} |" in part
    assert "Sites that took no part" in (folder / "report" / "report.html").read_text()
    _, _, (whole, new_scenario) = report.summarized(folder)
    assert not report.section(whole, [whole, new_scenario])["unseen"]


def test_choose_judges_on_the_same_data(folder: Path) -> None:
    """Its folder is below that of the table."""
    settings = config.load(folder)
    data = settings.data.model_copy(update={"validation": 0.2})
    only = {"data": data, "scenario_names": ["new"], "recipe_names": ["fedper"]}
    place = replace(Workspace.from_environment(folder, {}), root=folder / "choose")
    sizes = samples_of(place, choosing(settings.model_copy(update=only)))
    dataset = WHOLE.without(["ward d"]).dataset
    assert sizes == (round(0.2 * len(dataset.train_y)), len(dataset.test_y))


def test_a_number_draws_the_same_owners_for_each_seed(folder: Path) -> None:
    data = nd.from_frame(FRAME, **TABLE)
    first, second = (data.without(n).dataset.unseen_names for n in (1, 2))
    assert {*first} < {*second} and len(second) == 2 and list(second) == sorted(second)
    assert data.without(2).dataset.checksum == data.without([*second][::-1]).dataset.checksum


def test_other_scenarios_are_made_as_before(folder: Path) -> None:
    """The key is no part of a scenario that lacks it, and no stage makes other data for it."""
    assert "unseen" not in config.load(folder).scenarios["all"].resolved
    names = {path.name for path in (folder / "partitions/all-0").iterdir()}
    assert "dataset.safetensors" not in names


def test_silos_and_workers_of_a_cluster_get_data_without_the_owner(folder: Path) -> None:
    place, settings = Workspace.from_environment(folder, {}), config.load(folder)
    for scenario, wanted in (("all", 120), ("new", 90)):
        data = Dataset.read(place.dataset_of(settings, scenario, 0))
        assert len(data.train_y) + len(data.test_y) == wanted
        assert ("ward d" in data.owner_names) == (scenario == "all")


DATA, WHOLE = (nd.from_frame(frame, **TABLE) for frame in (OTHERS, FRAME))
HOW: dict[str, Any] = {"partition": "natural", "clients": 2, "progress": False, "rounds": 1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nd.run("fedavg", DATA, unseen=["ward x"], **HOW), "did you mean 'ward"),
        (lambda: nd.run("fedavg", DATA, unseen=2, **HOW), "unseen = 2 is refused; allowed: 1 to 1"),
        (lambda: nd.run("fedavg", DATA, unseen=0, **HOW), "unseen = 0 is refused"),
        (lambda: nd.run("fedavg", DATA, unseen=[], **HOW), "unseen = [] is refused"),
        (lambda: nd.run("fedavg", DATA, unseen="ward a", **HOW), "a number of owners, or a list"),
        (lambda: WHOLE.without(["ward a"] * 2), "unseen: owner 'ward a' is named twice"),
        (
            lambda: nd.run("fedavg", nd.load("digits"), unseen=1, **HOW),
            "allowed: classes with owners, in a table",
        ),
        (lambda: nd.embed(WHOLE, "mlp").without(1), "allowed: classes with owners, in a table"),
        (lambda: nd.sweep(["fedavg"], DATA, over={"unseen": [1]}, **HOW), "over: unseen"),
        (lambda: nd.choose(DATA, unseen=["a"], **HOW), "choose: unseen: owner 'a' is unknown"),
        (
            lambda: nd.run("fedavg", nd.partition(DATA, "natural", clients=3), unseen=1, rounds=1),
            "unseen is given twice",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(nd.UserError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unseen": ["ward e"]}, "params.yaml: scenarios.new.unseen: owner 'ward e' is unknown"),
        ({"unseen": 3}, "params.yaml: scenarios.new.unseen = 3 is refused; allowed: 1 to 2"),
        ({"unseen": 1.5}, "scenarios.new.unseen = 1.5 is refused"),
        ({"clients": 4}, "clients = 4 is refused; allowed: 1 to 3"),
    ],
)
def test_check_finds_mistakes_before_a_stage_runs(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    scenarios = CONTENT["scenarios"] | {"new": CONTENT["scenarios"]["new"] | changes}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(CONTENT | {"scenarios": scenarios}))
    (tmp_path / "wards.csv").write_bytes((folder / "wards.csv").read_bytes())
    with pytest.raises(nd.UserError) as error:
        fits.checked(Workspace.from_environment(tmp_path, {}))
    assert words in str(error.value)
