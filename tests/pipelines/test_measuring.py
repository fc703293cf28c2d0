"""Measures of a model beside its accuracy, by hand, by scikit-learn and on data with a rare
class."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedml_noniid as nd
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import _by_class, _confusion, final_model
from fedml_noniid.pipelines.experiment.workspace import Workspace
from tests.pipelines.small import run_stages

KEY = "natural-fedavg-0"


def test_measures_by_hand() -> None:
    """Class 0: 3 of 4 right, 4 named.

    Class 1: 1 of 2 right, 2 named. Class 2: 0 of 1, 1 named. 3: no sample.
    """
    rows = [[3, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    confusion = _confusion(*torch.tensor([[0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 2, 1, 0, 1]]), 4)
    assert confusion.tolist() == rows
    balanced, f1 = (3 / 4 + 1 / 2 + 0) / 3, (2 * 3 / 8 + 2 * 1 / 4 + 0) / 3
    assert _by_class(confusion) == pytest.approx((balanced, f1))
    # A class that is named but has no sample counts in F1 alone.
    assert _by_class(np.array([[1, 1], [0, 0]])) == pytest.approx((1 / 2, (2 / 3 + 0) / 2))


def write_table(path: Path) -> None:
    """100 samples, of which 3 are ill; the measured value says nothing of that."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["value", "site", "ill"])
        lines.writerows(
            [f"{rng.normal():.3f}", "ab"[i % 2], "no" if i % 33 else "yes"] for i in range(1, 401)
        )


PARAMS = """\
experiment: rare
data: {name: table, root: ., file: rare.csv, label: ill, owner: site, validation: 0, public: 0}
scenario_names: [natural]
scenarios: {natural: {partition: natural, clients: 2}}
recipe_names: [fedavg, fedprox]
recipes: {fedavg: {}, fedprox: {}}
seeds: [0]
train: {model: mlp, rounds: 2, epochs: 1, batch_size: 32, lr: 0.1, device: cpu}
machine: {processes: 1}
deploy: {recipe: fedavg, scenario: natural, silos: 2, rounds: 1}
"""


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all stages have run on a table with a label that 97 % have."""
    folder = tmp_path_factory.mktemp("rare")
    write_table(folder / "rare.csv")
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    return folder


def test_the_evaluation_shows_a_constant_answer(rare: Path) -> None:
    """Against a pass of the model that is made here."""
    metrics = json.loads((rare / "evaluation" / KEY / "metrics.json").read_text())
    item = Item.load(
        Workspace.from_environment(rare, {}), config.load(rare), Unit("natural", "fedavg", 0)
    )
    params, buffers = final_model(load_file(rare / "runs" / KEY / "model.safetensors"))
    predicted, y = evaluate(item.network, params, buffers, item.test).predictions, item.test.y
    share = np.bincount(y).max() / len(y)
    assert predicted.unique().numel() == 1 and share > 0.9, "the data of this test"
    wanted = {
        "classes_named": 1,
        "majority_accuracy": share,
        "accuracy": share,
        "balanced_accuracy": 0.5,
        # The frequent class alone is named: its F1 is 2 s / (s + 1), that of the other is 0.
        "macro_f1": share / (share + 1),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    confusion = (rare / "evaluation" / KEY / "confusion.csv").read_text().splitlines()
    samples = dict(zip(item.data.classes, np.bincount(y), strict=True))
    named = item.data.classes[int(predicted[0])]
    assert confusion[0].split(",") == ["class", *(f"as {name}" for name in samples)]
    assert confusion[1:] == [
        ",".join([name, *(str(count if other == named else 0) for other in samples)])
        for name, count in samples.items()
    ]
    page = (rare / "report" / "report.md").read_text()
    assert "WARNING, ONE CLASS: the model names one class for all test samples: fedavg (" in page
    assert "No method can be recommended" in page and "has the best mean" not in page
    assert "| majority class |" in page


def test_the_summary_in_python_has_the_same(rare: Path) -> None:
    metrics = json.loads((rare / "evaluation" / KEY / "metrics.json").read_text())
    data = nd.load("table", root=str(rare), file="rare.csv", label="ill", owner="site")
    result = nd.run(
        "fedavg",
        data,
        partition="natural",
        clients=2,
        rounds=2,
        epochs=1,
        seeds=[0],
        progress=False,
    )
    names = ["majority_accuracy", "balanced_accuracy", "macro_f1", "classes_named"]
    assert result.metrics[names].iloc[0].to_dict() == {name: metrics[name] for name in names}
    row = result.summary.iloc[0]
    assert row["note"] == "ONE CLASS on seed 0; no better than the majority class"
    assert result.summary["rank"].isna().all()
