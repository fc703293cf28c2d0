"""Metrics of a user's own: measured where accuracy is, by clients, in files, tables and MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedml_noniid as nd
from fedml_noniid.pipelines.experiment import config, provenance
from tests.own_package import forget
from tests.pipelines.small import PARAMS, run_stages

DATA = nd.load("digits")
HOW: dict[str, Any] = {"clients": 4, "alpha": 0.1, "validation": 0.1}
SPLIT = nd.partition(DATA, "dirichlet", **HOW)
QUIET: dict[str, Any] = {"rounds": 3, "progress": False}


def margin(outputs: Tensor, labels: Tensor, *, scale: float = 1.0) -> Tensor:
    """The mean of the true class's output less the largest other one."""
    true = outputs.gather(1, labels[:, None])[:, 0]
    others = outputs.scatter(1, labels[:, None], -torch.inf)
    return scale * (true - others.max(1).values).mean()


def several(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    if len(labels.unique()) < 4:
        raise ValueError("too few classes")
    outputs.zero_()  # a copy: another metric sees them as they were
    return {"size": np.float32(len(labels)), "undefined": float("nan")}


def by_hand(result: nd.Result, test: Any) -> float:
    """The margin of the final model on test samples, in float64 from the predictor's logits."""
    logits, y = (
        result.model()(DATA.dataset.test_x[test]).double().detach(),
        DATA.dataset.test_y[test],
    )
    rows = torch.arange(len(y))
    true = logits[rows, y].clone()
    logits[rows, y] = -torch.inf
    return float((true - logits.max(1).values).mean())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_numbers_are_those_of_the_model(engine: str) -> None:
    metrics = {several: {}, margin: {"scale": 2.0}}
    result = nd.run("fedavg", SPLIT, metrics=metrics, engine=engine, evaluate_every=2, **QUIET)
    every = slice(None)
    last = result.rounds["test_margin"].tolist()
    assert last[2] == pytest.approx(2 * by_hand(result, every), rel=1e-4)
    assert last[2] == result.metrics["metric/margin"][0]
    assert np.isnan(last).tolist() == np.isnan(result.rounds["test_accuracy"]).tolist()
    assert result.rounds["validation_size"][2] == len(SPLIT.indices.validation)
    assert result.rounds["test_undefined"].isna().all()
    clients = result.clients
    wanted = [2 * by_hand(result, torch.from_numpy(own)) for own in SPLIT.indices.test_clients]
    assert clients["metric/margin"].tolist() == pytest.approx(wanted, rel=1e-4)
    few = [len(DATA.dataset.test_y[own].unique()) < 4 for own in SPLIT.indices.test_clients]
    assert True in few, "the function fails on a client, whose cell is empty"
    assert clients["metric/size"].isna().tolist() == few


def test_weights_do_not_depend_on_metrics() -> None:
    plain = nd.run("scaffold", SPLIT, **QUIET)
    assert nd.run("scaffold", SPLIT, metrics=[margin], **QUIET).sha256 == plain.sha256


def test_drifted_labels_and_clients_models() -> None:
    """With drift it is the mean over the clients' labels; of their own models, over their tests."""
    drift = {"at": 2, "swap": [[0, 1], []]}
    result = nd.run(
        "fedavg", DATA, partition="iid", clients=4, drift=drift, metrics=[several, margin], **QUIET
    )
    logits = result.model()(DATA.dataset.test_x).detach()
    y = DATA.dataset.test_y
    swapped = torch.where(y == 0, 1, torch.where(y == 1, 0, y))
    wanted = (margin(logits, y) + margin(logits, swapped)).item() / 2
    assert result.metrics["metric/margin"][0] == pytest.approx(wanted, rel=1e-5)
    assert result.rounds["test_margin"][2] == result.metrics["metric/margin"][0]

    own = nd.run("fedper", SPLIT, metrics=[margin], **QUIET)
    found, sizes = own.clients["metric/margin"], own.clients["test_samples"]
    assert own.rounds["test_margin"].isna().all()
    assert own.metrics["metric/margin"][0] == pytest.approx((found * sizes).sum() / sizes.sum())


def fails(outputs: Tensor, labels: Tensor) -> float:
    return 1 / 0


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 1.0


def lists(outputs: Tensor, labels: Tensor) -> list[float]:
    return [1.0, 2.0]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({margin: {"scal": 2}}, r"run: metrics.*margin.scal is unknown .did you mean 'scale'.*"),
        (
            {margin: {"scale": "2"}},
            r"run: metrics.*margin.scale = '2' is refused; .*a number from -1e.38 to 1e.38",
        ),
        ([fails], r"run: metric 'fails' failed, .*test_metrics.py, line \d+: ZeroDivisionError.*"),
        ([accuracy], "run: metric 'accuracy': the name 'accuracy' is refused; allowed: letters.*"),
        ([lists], r"run: metric 'lists' returned \[1.0, 2.0\]; allowed: a finite number or NaN.*"),
        (["margin"], "run: metrics = 'margin' is unknown; allowed: a function of your own as .*"),
        (["nowhere:f1"], "run: metrics: metric 'nowhere:f1' can't be imported, ModuleNot.*"),
        ([5], r"run: metrics = \[5\] is refused; allowed: a list of metrics, or {metric: options}"),
    ],
)
def test_mistakes_are_one_line_before_round_1(metrics: Any, words: str) -> None:
    with pytest.raises(nd.UserError) as error:
        nd.run("fedavg", SPLIT, metrics=metrics, **QUIET)
    assert "\n" not in str(error.value)
    assert error.match(f"^{words}$")


@pytest.fixture
def study(tmp_path: Path) -> Callable[[], Path]:
    name = f"metrics_of_{tmp_path.name.replace('-', '_')}"
    text = "def top(outputs, labels, k: int = 2):\n    best = outputs.topk(k, 1).indices\n"
    text += "    return (best == labels[:, None]).any(1).float().mean()\n"
    (tmp_path / f"{name}.py").write_text(text)
    params = PARAMS.replace("device: cpu", f"device: cpu, metrics: {{{name}.top: {{k: 3}}}}")
    (tmp_path / "params.yaml").write_text(params)
    return lambda: tmp_path


def test_a_study_has_them_in_its_files_and_its_report(study: Callable[[], Path]) -> None:
    root = study()
    run_stages(root, ("prepare", "partition", "train", "evaluate", "report"))
    run = json.loads((root / "runs" / "skewed-fedavg-0" / "run.json").read_text())
    measured = json.loads((root / "evaluation" / "skewed-fedavg-0" / "metrics.json").read_text())
    assert run["final"]["test_top"] == measured["metric/top"] > measured["accuracy"]
    assert f"{measured['metric/top']:.4f}" in (root / "report" / "report.md").read_text()
    head, row = (root / "report" / "summary.csv").read_text().splitlines()[:2]
    assert "metric/top_mean" in head and row

    before = provenance.plan(config.load(root))
    (file,) = root.glob("metrics_of_*.py")
    file.write_text(file.read_text().replace("float()", "double()"))
    forget(file.stem)
    after = provenance.plan(config.load(root))
    assert config.load(root).own_extras, "`noniid run` asks the stage plan each time"
    changed = {stage for stage in after if after[stage] != before[stage]}
    assert changed == {"train", "deploy"}
