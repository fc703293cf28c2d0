"""An experiment on data of very many owners: evaluation and report are in array code too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.owners import write_study
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.training import trained
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import report
from tests.pipelines.small import run_stages
from tests.work import calls, peak_bytes

FEW, MANY = 2_000, 10_000


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Experiments with few and with many owners, evaluated."""
    folders = [tmp_path_factory.mktemp("owners") for _ in (FEW, MANY)]
    for folder, owners in zip(folders, (FEW, MANY), strict=True):
        write_study(folder, owners, 2)
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
