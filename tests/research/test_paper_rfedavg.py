"""rFedAvg's figures: numbers worked out by hand, and features of what was trained."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from safetensors.torch import load_file

from fedml_noniid.data.indices import INDICES, read_indices
from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.workspace import Workspace
from research import study
from research.papers.rfedavg.features import Shown, chosen, discrepancy, of_clients
from research.report import write
from research.runs import Measured
from research.studies import of_paper
from research.targets import Built, of_targets
from tests.pipelines.small import ROOT
from tests.research import by_hand
from tests.research.by_hand import is_picture, run


def cells(built: Built) -> list[list[str]]:
    return list(csv.reader(io.StringIO(built.files["csv"].decode())))[1:]


THREE = """
study_names: [s]
studies:
  s:
    data: {name: digits}
    scenarios: {a: {clients: 2}, b: {clients: 2}}
    recipes: {fedavg: , rfedavg: , rfedavg_plus: }
"""


def made(root: Path, kind: str, spec: dict[str, Any]) -> Built:
    return by_hand.built(root, kind, spec, "rfedavg")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A paper with one study."""
    return by_hand.paper(tmp_path, params=THREE)


LINES = {"FedAvg": "fedavg", "rFedAvg": "rfedavg", "rFedAvg+": "rfedavg_plus"}


def test_rounds_to_a_level_and_times(root: Path) -> None:
    """FedAvg's mean curve is 10, 20, 30, 40 %: half of its best is 20 %."""
    for seed, curve in enumerate([(0.05, 0.2, 0.25, 0.35), (0.15, 0.2, 0.35, 0.45)]):
        run(root, "a", "fedavg", seed, curve, "s", seconds=1 + 2 * seed)
    run(root, "a", "rfedavg", 0, (0.05, 0.1, 0.15, 0.25), "s", seconds=8)
    run(root, "a", "rfedavg_plus", 0, (0.2, 0.41, 0.3, 0.5), "s", seconds=4)
    place = {"study": "s", "scenario": "a"}
    spec = {
        "lines": LINES,
        "baseline": "FedAvg",
        "levels": [0.5, 1.0],
        "rounds": [{"title": "r", **place}],
        "seconds": [{"title": "t", "bars": {"sim": place}}],
    }
    built = made(root, "efficiency", spec)
    assert cells(built) == [
        ["r", "20.0", "FedAvg", "2.0"],
        ["r", "20.0", "rFedAvg", "4.0"],
        ["r", "20.0", "rFedAvg+", "1.0"],
        ["r", "40.0", "FedAvg", "4.0"],
        ["r", "40.0", "rFedAvg", ""],
        ["r", "40.0", "rFedAvg+", "2.0"],
        ["t", "sim", "FedAvg", "2.0"],
        ["t", "sim", "rFedAvg", "8.0"],
        ["t", "sim", "rFedAvg+", "4.0"],
    ]
    assert built.sentences == (
        "r: 40.0 % are reached by FedAvg in round 4, rFedAvg does not, rFedAvg+ in round 2.",
        "t, sim: of rFedAvg's 8 s per round FedAvg takes 0.25, rFedAvg+ takes 0.50.",
    )
    assert is_picture(built) and built.missing == ()


def test_a_parameters_points_lie_where_their_runs_say(root: Path) -> None:
    """The means of the last five of six rounds; FedAvg has no lambda and is a level line."""
    for seed, last in enumerate((0.3, 0.5)):
        run(root, "a", "fedavg", seed, (0.9, *[last] * 5), "s", params={"scenario.clients": 50})
    run(root, "a", "rfedavg", 0, (0.9, 0.1, 0.2, 0.3, 0.4, 0.5), "s", params={"rfedavg.lam": 1e-5})
    run(root, "b", "rfedavg", 0, (0.9, 0.2, 0.2, 0.2, 0.2, 0.2), "s", params={"rfedavg.lam": 1e-3})
    points = [
        {"study": "s", "scenario": "a"},
        {"study": "s", "scenario": "b", "recipes": {"rFedAvg": "rfedavg"}},
    ]
    panel = {"title": "p", "x": "lambda", "key": "{method}.lam", "log": True, "points": points}
    spec = {
        "statistic": "last5",
        "lines": {"FedAvg": "fedavg", "rFedAvg": "rfedavg"},
        "panels": [panel],
    }
    built = made(root, "parameter-study", spec)
    found = {(row[1], row[2]): row[3:] for row in cells(built)}
    assert set(found) == {("FedAvg", ""), ("rFedAvg", "1e-05"), ("rFedAvg", "0.001")}
    mean, std, n = map(float, found["FedAvg", ""])
    assert (mean, std, n) == pytest.approx((40, statistics.stdev([30, 50]), 2))
    assert float(found["rFedAvg", "1e-05"][0]) == pytest.approx(30) and found["rFedAvg", "1e-05"][
        1:
    ] == ["", "1"]
    assert built.sentences == (
        "p, rFedAvg: highest at 1e-05 (30.00 %), lowest at 0.001 (20.00 %).",
    )
    assert is_picture(built) and built.missing == ()
    # One that is wanted and not there.
    spec["lines"] = {"rFedAvg+": "rfedavg_plus"}
    nothing = made(root, "parameter-study", spec)
    assert nothing.files == {} and nothing.missing == ("p, rFedAvg+, s a",)


def test_the_worst_client_is_that_of_the_first_seed_and_the_sentence_is_of_all(
    root: Path,
) -> None:
    worst = [("fedavg", 0, [0.5, "", 0.25]), ("fedavg", 1, [0.75, 0.5, 0.35])]
    for recipe, seed, clients in (*worst, ("rfedavg_plus", 0, [0.5, 1.0, 0.75])):
        metrics = {"client_test_worst": clients[-1] if recipe == "fedavg" else 0.5}
        run(root, "a", recipe, seed, [0.5], "s", metrics=metrics)
        lines = [f"{client},1,0.5,1,{value}" for client, value in enumerate(clients)]
        place = by_hand.folder(root, "s") / "evaluation" / f"a-{recipe}-{seed}"
        head = "client,samples,accuracy,test_samples,test_accuracy"
        (place / "per_client.csv").write_text("\n".join([head, *lines]) + "\n")
    panels = [
        {"title": "p", "study": "s", "scenario": "a"},
        {"title": "q", "study": "s", "scenario": "b"},
    ]
    spec = {"lines": {"FedAvg": "fedavg", "rFedAvg+": "rfedavg_plus"}, "panels": panels}
    built = made(root, "fairness", spec)
    assert [row[1:] for row in cells(built)] == [
        ["FedAvg", "1", "50.0"],
        ["FedAvg", "2", ""],
        ["FedAvg", "3", "25.0"],
        ["rFedAvg+", "1", "50.0"],
        ["rFedAvg+", "2", "100.0"],
        ["rFedAvg+", "3", "75.0"],
    ]
    # Mean 30, deviation |35 - 25| / sqrt(2).
    assert built.sentences == ("p: the worst client has FedAvg 30.00 % ± 7.07, rFedAvg+ 50.00 %.",)
    assert is_picture(built) and built.missing == ("q, FedAvg", "q, rFedAvg+")


def test_what_a_size_does_not_run_is_no_picture_and_not_missing(tmp_path: Path) -> None:
    params = THREE.replace("fedavg: , rfedavg: , rfedavg_plus: ", "other: ")
    root = by_hand.paper(tmp_path, params=params)
    place = {"title": "p", "study": "s", "scenario": "a"}
    spec = {
        "lines": LINES,
        "baseline": "FedAvg",
        "levels": [1],
        "rounds": [place],
        "statistic": "last5",
        "classes": [0],
        "seconds": [{"title": "t", "bars": {"x": place}}],
        "rows": {"IID": place | {"recipe": "fedavg"}},
        "panels": [place | {"points": [place], "x": "x", "key": "x"}],
    }
    for kind in ("efficiency", "parameter-study", "fairness", "features"):
        built = made(root, kind, spec)
        assert (built.files, built.sentences, built.missing) == (
            {},
            (),
            ("not run at this size",),
        ), kind


def test_the_client_with_most_of_a_class_is_shown_and_none_twice() -> None:
    """Client 1 has most of class 0, then of class 1 too; class 2 goes to the first of two that have
    as many."""
    counts = [np.array(c) for c in ([5, 0, 1], [9, 9, 0], [8, 4, 7], [0, 3, 7], [0, 0, 7])]
    assert chosen(counts, [0, 1, 2]) == [1, 2, 3]


def test_the_discrepancy_of_three_clients() -> None:
    """Means (0, 0), (3, 4) and (0, 4): 5, 4 and 3 apart."""
    phi = [np.array([[-1.0, 0], [1, 0]]), np.array([[3.0, 4]]), np.array([[0.0, 3], [0, 5]])]
    assert discrepancy(
        [Shown(0, np.zeros(len(one), dtype=np.int64), one) for one in phi]
    ) == pytest.approx(4)


# From data to a report


def test_figure_1_has_the_features_of_what_was_trained(tmp_path: Path) -> None:
    """Two methods of cifar-silo at size smoke."""
    folder = tmp_path / "research" / "papers" / "rfedavg"
    shutil.copytree(ROOT / "research" / "papers" / "rfedavg", folder)
    content = read_yaml(folder / "params.yaml")
    smoke = content["studies"]["cifar-silo"]["smoke"]
    smoke |= {"recipe_names": ["fedavg", "rfedavg_plus"], "scenario_names": ["sim10"]}
    (folder / "params.yaml").write_text(json.dumps(content))  # JSON is YAML
    study.execute(
        Workspace.from_environment(tmp_path, {}),
        of_paper("rfedavg", "smoke", tmp_path)["cifar-silo"],
    )
    target = of_targets("rfedavg", tmp_path)["rf-fig1"]
    place = write("rfedavg", "smoke", tmp_path, {"rf-fig1": target}, Path("report"))
    measured = Measured("rfedavg", "smoke", tmp_path)
    where = {"study": "cifar-silo", "scenario": "sim10", "recipe": "fedavg"}
    (only,) = measured.group(where).runs

    # The features by hand: the paper's CNN on 8x8 digits, pixels of 0 to 16 on [-1, 1].
    weights = load_file(measured.folder("cifar-silo") / "runs" / only.key / "model.safetensors")
    w = {key.removeprefix("params/"): leaf for key, leaf in weights.items()}
    indices = read_indices(measured.folder("cifar-silo") / "partitions" / "sim10-0" / INDICES)
    shown = of_clients(measured, where, only, [0, 1, 2])
    assert len({one.client for one in shown}) == 3
    prepared = load_file(next((tmp_path / "data" / "papers").glob("digits-*/digits.safetensors")))
    for c, one in enumerate(shown):
        mine = [i for i in indices.clients[one.client] if prepared["train_y"][i] in (0, 1, 2)]
        assert len(mine) <= 300 and one.label.tolist() == prepared["train_y"][mine].tolist()
        assert np.bincount(one.label, minlength=3).argmax() == c  # a majority of its class
        x = prepared["train_x"][mine].float()
        x = x / 8 - 1
        for name in ("conv1", "conv2"):
            x = F.max_pool2d(
                F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=2).relu(), 2
            )
        phi = F.linear(x.flatten(1), w["fc1.weight"], w["fc1.bias"]).relu()
        assert np.allclose(one.phi, phi.numpy(), atol=1e-5)
    drawn = table(place / "rf-fig1.csv")
    assert sum(line["row"] == "non-IID" for line in drawn) == sum(len(one.label) for one in shown)
    assert {line["class"] for line in drawn} == {"0", "1", "2"}
    assert all(math.isfinite(float(line["x"]) + float(line["y"])) for line in drawn)
    assert (place / "rf-fig1.png").stat().st_size < 200_000
