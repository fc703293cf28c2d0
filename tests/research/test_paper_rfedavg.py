"""rFedAvg's figure 1: features of what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from safetensors.torch import load_file

from fedml_noniid.data.indices import INDICES, read_indices
from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.workspace import Workspace
from research import study
from research.papers.rfedavg import figures
from research.papers.rfedavg.features import Shown, chosen, discrepancy, of_clients
from research.report import build
from research.runs import Measured
from research.studies import of_paper
from research.targets import of_targets
from tests.pipelines.small import ROOT
from tests.research.by_hand import is_picture, rows


def test_the_client_with_most_of_a_class_is_shown_and_none_twice() -> None:
    """Client 1 has most of class 0, then of class 1 too; class 2 goes to the first of two that have
    as many."""
    counts = [np.array(c) for c in ([5, 0, 1], [9, 9, 0], [8, 4, 7], [0, 3, 7], [0, 0, 7])]
    assert chosen(counts, [0, 1, 2]) == [1, 2, 3]


def test_the_discrepancy_of_three_clients() -> None:
    """Means (0, 0), (3, 4) and (0, 4): 5, 4 and 3 apart."""
    phi = [np.array([[-1.0, 0], [1, 0]]), np.array([[3.0, 4]]), np.array([[0.0, 3], [0, 5]])]
    shown = [Shown(0, np.zeros(len(one), dtype=np.int64), one) for one in phi]
    assert discrepancy(shown) == pytest.approx(4)


def test_figure_1_has_the_features_of_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One method of cifar-silo at size smoke, one round. A slow walk has t-SNE."""
    monkeypatch.setattr(figures, "_embedded", lambda phi: phi[:, :2])
    folder = tmp_path / "research" / "papers" / "rfedavg"
    shutil.copytree(ROOT / "research" / "papers" / "rfedavg", folder)
    content = read_yaml(folder / "params.yaml")
    smoke = content["studies"]["cifar-silo"]["smoke"]
    smoke |= {"recipe_names": ["fedavg"], "scenario_names": ["sim10"]}
    smoke["train"]["rounds"] = 1
    (folder / "params.yaml").write_text(json.dumps(content))  # JSON is YAML
    plan = of_paper("rfedavg", "smoke", tmp_path)["cifar-silo"]
    study.execute(Workspace.from_environment(tmp_path, {}), plan)
    measured = Measured("rfedavg", "smoke", tmp_path)
    built = build(of_targets("rfedavg", tmp_path)["rf-fig1"], measured)
    where = {"study": "cifar-silo", "scenario": "sim10", "recipe": "fedavg"}
    (only,) = measured.group(where).runs

    # The features by hand: the paper's CNN on 8x8 digits, pixels of 0 to 16 on [-1, 1].
    weights = load_file(measured.folder("cifar-silo") / "runs" / only.key / "model.safetensors")
    w = {key.removeprefix("params/"): leaf for key, leaf in weights.items()}
    indices = read_indices(measured.folder("cifar-silo") / "partitions" / "sim10-0" / INDICES)
    prepared = load_file(next((tmp_path / "data" / "papers").glob("digits-*/digits.safetensors")))
    shown = of_clients(measured, where, only, [0, 1, 2])
    assert len({one.client for one in shown}) == 3
    for c, one in enumerate(shown):
        mine = [i for i in indices.clients[one.client] if prepared["train_y"][i] in (0, 1, 2)]
        assert len(mine) <= 300 and one.label.tolist() == prepared["train_y"][mine].tolist()
        assert np.bincount(one.label, minlength=3).argmax() == c  # a majority of its class
        x = prepared["train_x"][mine].float() / 8 - 1
        for name in ("conv1", "conv2"):
            x = F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=2)
            x = F.max_pool2d(x.relu(), 2)
        phi = F.linear(x.flatten(1), w["fc1.weight"], w["fc1.bias"]).relu()
        assert np.allclose(one.phi, phi.numpy(), atol=1e-5)
    drawn = [line["class"] for line in rows(built)]
    assert drawn == [str(label) for one in shown for label in one.label] and is_picture(built)
