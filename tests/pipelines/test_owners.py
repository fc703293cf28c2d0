"""Clients of named owners keep their names from the table to the report, in one order for all
seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedml_noniid.pipelines.experiment import results
from tests.pipelines.small import run_stages

PARAMS = """\
experiment: sites
data: {name: table, root: ., file: sites.csv, label: ill, owner: site, validation: 0, public: 0}
scenario_names: [natural]
scenarios: {natural: {partition: natural, clients: 3}}
recipe_names: [fedavg]
recipes: {fedavg: {}}
seeds: [0, 1, 2]
train: {model: mlp, rounds: 1, epochs: 1, batch_size: 32, lr: 0.1, device: cpu}
machine: {processes: 1}
"""
NAMES = ["Klinik 2", "Klinik 10", "Köln | <b>"]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all stages have run on a table of three sites.

    The labels of the last site say the opposite of its values.
    """
    folder = tmp_path_factory.mktemp("sites")
    value, site = np.random.default_rng(0).normal(size=300).round(3), np.arange(300) % 3
    frame = {"value": value, "site": np.array(NAMES)[site], "ill": (value > 0) != (site == 2)}
    pd.DataFrame(frame).to_csv(folder / "sites.csv", index=False)
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    return folder


@pytest.mark.parametrize("file", ["partitions/*/clients.csv", "evaluation/*/per_client.csv"])
def test_lines_are_in_the_order_of_the_names(sites: Path, file: str) -> None:
    """Whatever number a site's client has."""
    tables = [results.table(path) for path in sorted(sites.glob(file))]
    assert [[line["owner"] for line in table] for table in tables] == [NAMES] * 3
    numbers = {tuple(line["client"] for line in table) for table in tables}
    assert len(numbers) > 1 and all({*one} == {"0", "1", "2"} for one in numbers)


def test_the_report_has_the_accuracy_of_each_site(sites: Path) -> None:
    """The short answer has the worst site alone."""
    scores = [
        100 * np.mean([run.sites[name].score for run in results.read(sites)]) for name in NAMES
    ]
    report = {name: (sites / "report" / name).read_text() for name in ("report.md", "answer.txt")}
    for name, score in zip(NAMES, scores, strict=True):
        cells = name.replace("|", r"\|"), "80", "20", "3", f"{score:.2f}"
        assert f"\n| {' | '.join(cells)} |\n" in report["report.md"]
    assert "| client | samples | tests | seeds | fedavg |" in report["report.md"]
    assert "<b>" not in (sites / "report" / "report.html").read_text()
    assert f"{NAMES[2]}: {scores[2]:.2f}" in report["answer.txt"] and scores[2] < 50
