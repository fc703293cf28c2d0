"""The API computes what the stages of an experiment compute: the same settings give the same
files."""

from __future__ import annotations

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
    given = {
        key: value
        for key, value in SCENARIOS[scenario].items()
        if key not in ("participation", "availability")
    }
    for seed in SEEDS:
        split, folder = (
            nd.partition(nd.load("digits"), **given, **HELD_OUT, seed=seed),
            stages / "partitions",
        )
        assert split.indices.content == (folder / f"{scenario}-{seed}" / INDICES).read_bytes()
        statistics = json.loads((folder / f"{scenario}-{seed}" / "statistics.json").read_text())
        assert split.statistics.to_dict() == statistics
        table = pd.read_csv(folder / f"{scenario}-{seed}" / "clients.csv", index_col="client")
        assert (split.table == table[list(split.table)]).all(axis=None)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_files(stages: Path, tmp_path: Path, scenario: str, processes: int) -> None:
    """All bytes of a training and an evaluation; only run.json has no fingerprint."""
    given = {**SCENARIOS[scenario], **HELD_OUT, **TRAIN, "seeds": SEEDS, "processes": processes}
    for recipe, methods in RECIPES.items():
        nd.run(recipe, nd.load("digits"), **given, **methods, folder=tmp_path)
        for seed in SEEDS:
            key = f"{scenario}-{recipe}-{seed}"
            for part in ("runs", "evaluation"):
                for path in (tmp_path / part / key).iterdir():
                    if path.name not in ("run.json", "seconds.json", RECEIPT):
                        wanted = (stages / part / key / path.name).read_bytes()
                        assert path.read_bytes() == wanted, path
            ours, theirs = (
                json.loads((at / "runs" / key / "run.json").read_text())
                for at in (tmp_path, stages)
            )
            assert ours["tags"].pop("fingerprint") == "" != theirs["tags"].pop("fingerprint")
            assert ours == theirs
            assert len(list((tmp_path / "runs" / key).iterdir())) == 6


def test_the_same_tables(stages: Path) -> None:
    """The data frames hold the numbers of the files, and a sweep those of its runs."""
    split = nd.partition(nd.load("digits"), **SCENARIOS["dirichlet"], **HELD_OUT)
    results = nd.sweep(
        RECIPES,
        split,
        over={"lr": [0.1]},
        seeds=SEEDS,
        **{k: v for k, v in TRAIN.items() if k != "lr"},
    )
    for result in results:
        for seed in SEEDS:
            key = f"dirichlet-{result.recipe}-{seed}"
            rounds = pd.read_csv(stages / "runs" / key / "rounds.csv", **exactly())
            ours = result.rounds[result.rounds["seed"] == seed].reset_index(drop=True)
            pd.testing.assert_frame_equal(ours[list(rounds)], rounds, check_exact=True)
            for name, frame in (("per_client", result.clients), ("per_class", result.classes)):
                table = pd.read_csv(stages / "evaluation" / key / f"{name}.csv", **exactly())
                own = frame[frame["seed"] == seed].reset_index(drop=True)
                assert own[list(table)].astype(table.dtypes).equals(table)
            run = json.loads((stages / "runs" / key / "run.json").read_text())
            assert result.sha256[seed] == run["weights_sha256"]
            metrics = json.loads((stages / "evaluation" / key / "metrics.json").read_text())
            row = result.metrics.set_index("seed").loc[seed]
            assert row.to_dict() == {
                name: value for name, value in metrics.items() if not name.endswith("_sha256")
            }
    by_command = method_table.from_results(stages).cells
    shown = [cell[0:1] + cell[2:] for cell in by_command if cell.setting == "dirichlet"]
    assert [cell[0:1] + cell[2:] for cell in results.table().cells] == shown
