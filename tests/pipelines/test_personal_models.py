"""Where clients keep a part of the model to themselves: what is trained, measured and reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import balanced_accuracy_score, f1_score

from fedml_noniid.data.rotation import turned
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.models import build
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import final_model
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.workspace import Workspace
from tests.pipelines.small import PARAMS, run_stages

TEXT = (
    PARAMS.replace("[fedavg, scaffold+fnr]", "[fedavg, fedbn]")
    .replace("scaffold+fnr: {fnr: {p: 0.5}}", "fedbn: {}")
    .replace("every: 1}", "every: 1, processes: 1}")
    .replace("participation: 1.0", "participation: 0.5, SKEW")
    .replace("model: mlp", "model: mlp, model_options: {batch_norm: true, hidden: 16}")
)
SKEWS = {
    "rotation": "rotation: {degrees: [0, 90, 180]}",
    "drift": "drift: {at: 2, swap: [[0, 1], [2, 3]]}",
}


@pytest.fixture(scope="module", params=SKEWS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A skew, and a folder in which the stages have run on clients with it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "params.yaml").write_text(TEXT.replace("SKEW", SKEWS[request.param]))
    run_stages(folder, ("prepare", "partition", "train", "evaluate"))
    return request.param, folder


def test_every_number_is_of_the_clients_own_models(made: tuple[str, Path]) -> None:
    """Against passes of each client's network, put together here from the file of the weights."""
    skew, folder = made
    item = Item.load(
        Workspace.from_environment(folder, {}), config.load(folder), Unit("skewed", "fedbn", 0)
    )
    tensors = load_file(folder / "runs/skewed-fedbn-0/model.safetensors")
    net = build("mlp", (1, 8, 8), 10, {"batch_norm": True, "hidden": 16})
    hits, n, own, worst = 0.0, 0, [], []
    said: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    frequent = 0
    counts = np.stack(
        [
            np.bincount(item.data.train_y.numpy()[part], minlength=10)
            for part in item.indices.clients
        ]
    )
    for k, positions in enumerate(item.indices.test_clients):
        params, buffers = (
            {
                name.removeprefix(f"{part}/"): leaf
                for name, leaf in tensors.items()
                if name.startswith(f"{part}/")
            }
            | {
                name.removeprefix(f"own/{part}/"): leaf[k]
                for name, leaf in tensors.items()
                if f"own/{part}/" in name
            }
            for part in ("params", "buffers")
        )
        x, y, label = item.test.x, item.test.y, torch.arange(10)
        if skew == "rotation":
            x = turned(x, k % 3)
        if skew == "drift":
            pair = torch.tensor([[0, 1], [2, 3]][k % 2])
            label = label.index_put((pair,), pair.flip(0))
            y = label[y]
        predictions = evaluate(net, params, buffers, item.test._replace(x=x)).predictions
        right = (predictions == y).double()
        said, labels = [*said, predictions[positions].numpy()], [*labels, y[positions].numpy()]
        # Labels are those after the drift, which swaps two classes.
        trained = label[item.data.train_y[item.indices.clients[k]]].bincount()
        frequent += int((y[positions] == trained.argmax()).sum())
        own.append(right[positions].mean().item())
        hits, n = hits + right[positions].sum().item(), n + len(positions)
        by_class = np.array([right[item.test.y == c].mean().item() for c in range(10)])
        worst.append((by_class * counts[k]).sum() / counts[k].sum())
    metrics = json.loads((folder / "evaluation/skewed-fedbn-0/metrics.json").read_text())
    final = json.loads((folder / "runs/skewed-fedbn-0/run.json").read_text())["final"]
    assert "validation_accuracy" not in final
    assert metrics["accuracy"] == pytest.approx(final["test_accuracy"], rel=1e-12)
    assert metrics["loss"] == pytest.approx(final["test_loss"], rel=1e-6)
    found = table(folder / "evaluation/skewed-fedbn-0/per_client.csv")
    assert [float(row["test_accuracy"]) for row in found] == pytest.approx(own)
    assert [float(row["accuracy"]) for row in found] == pytest.approx(worst)
    y_, said_ = np.concatenate(labels), np.concatenate(said)
    wanted = {
        "accuracy": hits / n,
        "client_worst": min(worst),
        "majority_accuracy": frequent / n,
        "balanced_accuracy": balanced_accuracy_score(y_, said_),
        "macro_f1": f1_score(y_, said_, average="macro"),
    }
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)
    assert ("accuracy_noisy" in metrics) is (skew != "drift")
    shared = sum(leaf.nbytes for name, leaf in tensors.items() if "/fc" in name)
    assert metrics["bytes_up"] == metrics["bytes_down"] == 3 * 2 * shared, (
        "three rounds, two clients"
    )


def test_a_common_model_after_a_drift_is_measured_on_the_labels_of_each_client(
    made: tuple[str, Path],
) -> None:
    """Half of the clients swap 0 with 1, the others 2 with 3. The means are over the clients."""
    skew, folder = made
    item = Item.load(
        Workspace.from_environment(folder, {}), config.load(folder), Unit("skewed", "fedavg", 0)
    )
    params, buffers = final_model(load_file(folder / "runs/skewed-fedavg-0/model.safetensors"))
    net = build("mlp", (1, 8, 8), 10, {"batch_norm": True, "hidden": 16})
    said = evaluate(net, params, buffers, item.test).predictions
    swaps = [torch.arange(10), torch.arange(10)]
    if skew == "drift":
        swaps = [torch.tensor([1, 0, *range(2, 10)]), torch.tensor([0, 1, 3, 2, *range(4, 10)])]
    clients = item.indices.clients
    trained = torch.cat([swaps[k % 2][item.data.train_y[part]] for k, part in enumerate(clients)])
    seen = [swap[item.test.y] for swap in swaps]
    metrics = json.loads((folder / "evaluation/skewed-fedavg-0/metrics.json").read_text())
    expected = {
        "majority_accuracy": np.mean(
            [(y == trained.bincount().argmax()).double().mean() for y in seen]
        ),
        "balanced_accuracy": np.mean([balanced_accuracy_score(y, said) for y in seen]),
        "macro_f1": np.mean([f1_score(y, said, average="macro") for y in seen]),
        "classes_named": len(said.unique()),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
