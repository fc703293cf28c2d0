"""The API computes what the stages of an experiment compute: the same settings give the same
files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest

import fedml_noniid as nd
from fedml_noniid.data.indices import INDICES
from fedml_noniid.data.readers.frames import exactly
from fedml_noniid.pipelines.experiment.cache import RECEIPT
from fedml_noniid.pipelines.reporting import method_table
from tests.pipelines.small import run_stages

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy"
)  # of mlflow's own use of SQLAlchemy
SEEDS = [0, 1]
TRAIN = {
    "model": "mlp",
    "rounds": 3,
    "epochs": 1,
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 0.1,
    "device": "cpu",
}
HELD_OUT = {"validation": 0.1, "public": 50}
# The names are those that the API gives.
SCENARIOS = {
    "dirichlet": {
        "partition": "dirichlet",
        "clients": 4,
        "alpha": 0.5,
        "label_noise": {"rate": 0.2},
        "rotation": {"degrees": [0, 90]},
    },
    "similarity": {
        "partition": "similarity",
        "clients": 6,
        "s": 0.3,
        "participation": 0.5,
        "noise": {"sigma": 0.4},
        "availability": {"rate": 0.2},
    },
}
RECIPES = {"fedavg": {}, "scaffold+fnr": {"fnr": {"p": 0.5}}}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment of these settings, as `dvc repro` runs it."""
    folder = tmp_path_factory.mktemp("experiment")
    settings = {
        "experiment": "same",
        "data": {"name": "digits", "root": "data/raw", **HELD_OUT},
        "scenario_names": list(SCENARIOS),
        "scenarios": SCENARIOS,
        "recipe_names": list(RECIPES),
        "recipes": RECIPES,
        "seeds": SEEDS,
        "train": TRAIN,
        "machine": {"processes": 1},
        "deploy": {"recipe": "fedavg", "scenario": "dirichlet", "silos": 2},
    }
    (folder / "params.yaml").write_text(json.dumps(settings))  # JSON is YAML
    run_stages(folder, ("prepare", "partition", "train", "evaluate"))
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_same_partitions(stages: Path, scenario: str) -> None:
    of_run = ("participation", "availability")
    given = {key: value for key, value in SCENARIOS[scenario].items() if key not in of_run}
    for seed in SEEDS:
        split = nd.partition(nd.load("digits"), **given, **HELD_OUT, seed=seed)
        folder = stages / "partitions" / f"{scenario}-{seed}"
        assert split.indices.content == (folder / INDICES).read_bytes()
        statistics = json.loads((folder / "statistics.json").read_text())
        assert split.statistics.to_dict() == statistics
        table = pd.read_csv(folder / "clients.csv", index_col="client")
        assert (split.table == table[list(split.table)]).all(axis=None)


@pytest.mark.parametrize(("scenario", "processes"), [("dirichlet", 1), ("similarity", 2)])
def test_the_same_files(stages: Path, tmp_path: Path, scenario: str, processes: int) -> None:
    """All bytes of a training and an evaluation; only run.json has no fingerprint."""
    given = {**SCENARIOS[scenario], **HELD_OUT, **TRAIN, "seeds": SEEDS, "processes": processes}
    for recipe, methods in RECIPES.items():
        nd.run(recipe, nd.load("digits"), **given, **methods, folder=tmp_path)
    for path in tmp_path.glob("*/*/*"):
        theirs = stages / path.relative_to(tmp_path)
        if path.name == "run.json":
            mine, wanted = (json.loads(file.read_text()) for file in (path, theirs))
            assert mine["tags"].pop("fingerprint") == "" != wanted["tags"].pop("fingerprint")
            assert mine == wanted
        elif path.name not in ("seconds.json", RECEIPT):
            assert path.read_bytes() == theirs.read_bytes(), path
    assert len([*tmp_path.glob("*/*/*")]) == len(RECIPES) * len(SEEDS) * 11


def test_the_same_tables(stages: Path) -> None:
    """The data frames hold the numbers of the files, and a sweep those of its runs."""
    split = nd.partition(nd.load("digits"), **SCENARIOS["dirichlet"], **HELD_OUT)
    how = {**TRAIN, "seeds": SEEDS}
    results = nd.sweep(RECIPES, split, over={"lr": [how.pop("lr")]}, **how)
    for result, seed in itertools.product(results, SEEDS):
        key = f"dirichlet-{result.recipe}-{seed}"
        for path, frame in (
            (f"runs/{key}/rounds.csv", result.rounds),
            (f"evaluation/{key}/per_client.csv", result.clients),
            (f"evaluation/{key}/per_class.csv", result.classes),
        ):
            table = pd.read_csv(stages / path, **exactly())
            own = frame[frame["seed"] == seed].reset_index(drop=True)
            assert own[list(table)].astype(table.dtypes).equals(table), path
        run = json.loads((stages / "runs" / key / "run.json").read_text())
        assert result.sha256[seed] == run["weights_sha256"]
        metrics = json.loads((stages / "evaluation" / key / "metrics.json").read_text())
        row = result.metrics.set_index("seed").loc[seed].to_dict()
        assert row == {name: x for name, x in metrics.items() if not name.endswith("_sha256")}
    by_command = method_table.from_results(stages).cells
    shown = [cell[0:1] + cell[2:] for cell in by_command if cell.setting == "dirichlet"]
    assert [cell[0:1] + cell[2:] for cell in results.table().cells] == shown
