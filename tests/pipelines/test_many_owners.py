"""An experiment on data of very many owners: evaluation and report are in array code too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import report
from tests.pipelines.small import run_stages
from tests.work import calls, peak_bytes

FEW, MANY = 500, 3_000


def write_study(folder: Path, owners: int) -> None:
    """Writes arrays with so many owners of one to five samples, and the settings of an experiment
    on them."""
    rng = np.random.default_rng(owners)
    owner = rng.permutation(np.repeat(np.arange(owners), rng.integers(1, 6, owners)))
    (folder / "raw").mkdir()
    for part, client in (("train", owner), ("test", rng.integers(0, owners, 4_000))):
        y = rng.integers(0, 10, len(client))
        x = rng.normal(size=(len(client), 8)).astype(np.float32)
        np.savez(folder / "raw" / f"{part}.npz", x=x, y=y, client=client)
    settings = {
        "experiment": "owners",
        "data": {"name": "arrays", "root": "raw", "validation": 0, "public": 0},
        "scenario_names": ["owners"],
        "scenarios": {
            "owners": {"partition": "natural", "clients": owners, "participation": 100 / owners}
        },
        "recipe_names": ["fedavg", "fedprox"],
        "recipes": {"fedavg": {}, "fedprox": {"fedprox": {"mu": 0.1}}},
        "seeds": [0],
        "train": {
            "model": "logistic_regression",
            "rounds": 2,
            "epochs": 1,
            "batch_size": 10,
            "lr": 0.1,
            "device": "cpu",
            "threads": 1,
        },
    }
    (folder / config.FILE).write_text(yaml.safe_dump(settings, sort_keys=False))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Experiments with few and with many owners, evaluated."""
    folders = [tmp_path_factory.mktemp("owners") for _ in (FEW, MANY)]
    for folder, owners in zip(folders, (FEW, MANY), strict=True):
        write_study(folder, owners)
        run_stages(folder, ("prepare", "partition", "train", "evaluate"))
    return folders


def test_evaluation_has_no_python_for_each_client(studies: list[Path]) -> None:
    found = []
    for folder in studies:
        place = Workspace.from_environment(folder, {})
        settings = config.load(folder)
        item = Item.load(place, settings, settings.units()[0])
        made = trained(item, item.simulation(), "none")

        def files(item: Item = item, made: object = made) -> None:
            measure(item, made.tensors, made.rows).files()

        files()
        found.append((calls(files), peak_bytes(files)))
    (few, small), (many, large) = found
    assert many < few + (MANY - FEW) / 100
    assert large - small < 1000 * (MANY - FEW)


def test_the_report_has_little_python_for_each_client(studies: list[Path]) -> None:
    """A line of each table of clients is read. Nothing is drawn or held for each."""
    places = [Workspace.from_environment(folder, {}) for folder in studies]
    report.run(places[0])
    few, many = (calls(lambda place=place: report.run(place)) for place in places)
    assert many < few + 10 * (MANY - FEW)
