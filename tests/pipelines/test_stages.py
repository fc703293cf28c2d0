"""The stages one by one: what they write, that a stopped run goes on to the same bits, and how bad
input is refused."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedml_noniid.core.randomness import fold, normal
from fedml_noniid.data.indices import INDICES, read_indices
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.streams import key
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.pipelines.experiment import cache, config, progress, resume
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stage
from fedml_noniid.pipelines.tracking import live
from fedml_noniid.plugins.fnr.algorithm import FNR
from tests.files import contents
from tests.pipelines.small import PARAMS, run_stages

# One item, in this process.
ONE = PARAMS.replace("[fedavg, scaffold+fnr]", "[scaffold+fnr]").replace(
    "every: 1}", "every: 1, processes: 1}"
)
UNIT = Unit("skewed", "scaffold+fnr", 0)
# One client, and nobody's test samples.
CUT = b'{"clients": [[0]], "validation": [], "public": [], "test_clients": []}'
RUN, EVALUATION, PARTITION = (
    "runs/skewed-scaffold+fnr-0",
    "evaluation/skewed-scaffold+fnr-0",
    "partitions/skewed-0",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the stages up to the evaluation have run for one item."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "params.yaml").write_text(ONE)
    run_stages(folder, ("prepare", "partition", "train", "evaluate"))
    return folder


@pytest.fixture
def workplace(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` to change."""
    return Path(shutil.copytree(made, tmp_path / "workplace"))


def forget(folder: Path, *names: str) -> None:
    """Removes outputs and the store of finished work."""
    for name in (*names, cache.STORE):
        shutil.rmtree(folder / name)


def test_train_writes_rounds_weights_and_what_made_them(made: Path) -> None:
    """Defaults too, which params.yaml leaves out: those of the method, the network, the partition,
    the optimiser. What differs from run to run is in the store alone."""
    rows = table(made / RUN / "rounds.csv")
    record = json.loads((made / RUN / "run.json").read_text())
    about = {"recipe": "scaffold+fnr", "scenario": "skewed", "seed": 0, "rounds": 3}
    assert about.items() <= record.items() and len(rows) == 3
    assert record["weights_sha256"] == weights_sha256(load_file(made / RUN / "model.safetensors"))
    assert record["final"]["test_accuracy"] == float(rows[-1]["test_accuracy"])
    used = {
        "fnr.p": 0.5,  # the only one that is written
        **{f"fnr.{field.name}": field.default for field in fields(FNR) if field.name != "p"},
        "train.lr": 0.1,
        "train.model_options": {"hidden": 64, "batch_norm": False, "projection": 0},
        "train.momentum": 0.0,
        "scenario.min_size": 10,
        "scenario.cohort": 4,
        "data.normalise": "channel",
    }
    assert used.items() <= record["params"].items()
    indices = (made / PARTITION / INDICES).read_bytes()
    known = {"partition_hash": hashlib.sha256(indices).hexdigest(), "numpy": np.__version__}
    assert known.items() <= record["tags"].items()
    kept = cache.made(made, record["tags"]["fingerprint"])
    assert len(kept["seconds"]) == 3 and kept["tags"]["python"] == platform.python_version()
    texts = [
        file.read_text()
        for name in (RUN, EVALUATION)
        for file in (made / name).iterdir()
        if file.suffix in (".json", ".csv")
    ]
    assert not any(word in text for word in ("seconds", "git_commit", "cores") for text in texts)


def test_train_keeps_what_the_methods_measure(made: Path) -> None:
    """Of three rounds with four clients and ten classes; what only clients know is not asked
    for."""
    found = load_file(made / RUN / "recorded.safetensors")
    assert found["fnr/F"].shape == found["fnr/delta"].shape == (3, 4, 10)
    assert found["fnr/refined"].sum(1).tolist() == [2, 2, 2]
    assert found["round/bytes_up"].sum(1).tolist() == [
        float(r["bytes_up"]) for r in table(made / RUN / "rounds.csv")
    ]
    assert not any(key.startswith("fnr/refine.") for key in found)
    tags = json.loads((made / RUN / "run.json").read_text())["tags"]
    assert (tags["public"], tags["leak"], tags["federated"]) == ("labelled", "none", "yes")


def test_evaluate_measures_the_model_that_was_trained(made: Path) -> None:
    metrics = json.loads((made / EVALUATION / "metrics.json").read_text())
    rows = table(made / RUN / "rounds.csv")
    accuracy = float(rows[-1]["test_accuracy"])
    up, down = (sum(float(row[key]) for row in rows) for key in ("bytes_up", "bytes_down"))
    # Three models per client and round by FNR-FL's count of SCAFFOLD: 64 * 64 + 64 + 64 * 10 + 10
    # floats each.
    counted = 3 * 4 * 3 * 4810 * 4 / 2**20
    wanted = {
        "accuracy": accuracy,
        "bytes_up": up,
        "traffic_mib": (up + down) / 2**20,
        "rho": accuracy * 1e4 / ((up + down) / 2**20),
        "traffic_mib_as_fnr_counts": counted,
        "rho_as_fnr_counts": accuracy * 1e4 / counted,
    }
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)
    assert "delta_bytes_as_rfedavg_counts" not in metrics
    assert (
        metrics["weights_sha256"]
        == json.loads((made / RUN / "run.json").read_text())["weights_sha256"]
    )
    classes = table(made / EVALUATION / "per_class.csv")
    known = {row["class"]: float(row["accuracy"]) for row in classes}
    assert accuracy == pytest.approx(
        sum(int(row["samples"]) * known[row["class"]] for row in classes) / 360
    )
    # A client is measured on its own mixture of classes.
    held = table(made / PARTITION / "clients.csv")
    for row, client in zip(table(made / EVALUATION / "per_client.csv"), held, strict=True):
        mixed = sum(int(client[label]) * right for label, right in known.items())
        assert float(row["accuracy"]) == pytest.approx(mixed / int(client["samples"]))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which stages have run for a scenario with noise, and training with
    augmentation."""
    folder = tmp_path_factory.mktemp("noisy")
    text = ONE.replace("alpha: 0.5", "alpha: 0.5, noise: {sigma: 0.6}").replace(
        "device: cpu", "device: cpu, augment: true"
    )
    (folder / "params.yaml").write_text(text)
    run_stages(folder, ("prepare", "partition", "train", "evaluate"))
    return folder


def test_noise_reaches_the_training_and_the_test(noisy: Path) -> None:
    """1 is 16 in raw values, and 16 / std after normalisation.

    The test of client 3 by an independent evaluation: the noise is added to the images between 0
    and 1 before they are normalised.
    """
    item = Item.load(Workspace.from_environment(noisy, {}), config.load(noisy), UNIT)
    clients = item.simulation().engine.clients
    noise, level = clients.train.noise, 0.6 * 16 / item.data.std[0]
    assert clients.local.augment and noise is not None
    std = noise.std[noise.row[item.indices.clients[3]]]
    assert torch.allclose(std, torch.full_like(std, level))
    model = load_file(noisy / RUN / "model.safetensors")
    # One batch: the test set has 360 samples. Keyed by seed and client; step 0; the second of a
    # batch's keys.
    drawn = fold(fold(torch.tensor(key(0, "noisy test", 3)), 0), 1)
    x = item.data.test_x / 16 + 0.6 * normal(drawn, 360, 1, 8, 8)
    h = (16 * x - item.data.mean[0]) / item.data.std[0]
    h = torch.relu(h.flatten(1) @ model["params/fc1.weight"].T + model["params/fc1.bias"])
    logits = h @ model["params/fc2.weight"].T + model["params/fc2.bias"]
    hits = (logits.argmax(1) == item.data.test_y).double().mean().item()
    row = table(noisy / EVALUATION / "per_client.csv")[3]
    assert float(row["accuracy_noisy"]) == pytest.approx(hits, abs=1.5 / 360), (
        "but for a tie that rounding decides"
    )


def test_a_client_is_measured_on_test_samples_of_its_own_too(made: Path) -> None:
    """Each test sample lies with one client, so the clients' hits add up to those of the test
    set."""
    parts = read_indices(made / PARTITION / INDICES).test_clients
    assert sorted(i for part in parts for i in part) == list(range(360))
    metrics = json.loads((made / EVALUATION / "metrics.json").read_text())
    rows = table(made / EVALUATION / "per_client.csv")
    assert [int(row["test_samples"]) for row in rows] == [len(part) for part in parts]
    accuracies = [float(row["test_accuracy"]) for row in rows]
    hits = sum(len(part) * x for part, x in zip(parts, accuracies, strict=True))
    assert hits == pytest.approx(360 * metrics["accuracy"])
    # As `numpy.percentile`: of four, 0.3 of the way from the lowest to the next.
    lowest, second = sorted(accuracies)[:2]
    wanted = {
        "client_test_worst": lowest,
        "client_test_percentile10": lowest + 0.3 * (second - lowest),
        "client_test_variance": statistics.pvariance(accuracies),
    }
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)
    assert {"client_worst", "client_percentile10", "client_variance"} <= metrics.keys()


def test_a_client_without_test_samples_has_an_empty_cell(workplace: Path) -> None:
    left = [0, 2]
    path = workplace / PARTITION / INDICES
    indices = read_indices(path)
    parts = [part if k in left else part[:0] for k, part in enumerate(indices.test_clients)]
    path.write_bytes(replace(indices, test_clients=Ragged.from_lists(parts)).content)
    receipt = json.loads((path.parent / cache.RECEIPT).read_text())
    receipt["files"][path.name] = cache.sha256(path)
    (path.parent / cache.RECEIPT).write_text(json.dumps(receipt))
    forget(workplace, "evaluation")
    run_stages(workplace, ("evaluate",))
    rows = table(workplace / EVALUATION / "per_client.csv")
    assert [k for k, row in enumerate(rows) if row["test_accuracy"]] == left
    metrics = json.loads((workplace / EVALUATION / "metrics.json").read_text())
    accuracies = [float(rows[k]["test_accuracy"]) for k in left]
    assert metrics["client_test_worst"] == min(accuracies)


class StopError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("after", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    expected = contents(workplace / RUN)
    forget(workplace, "runs")

    def stop(said: progress.RoundReport) -> None:
        if said.done == after:
            raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(progress, "report", stop)
        with pytest.raises(StopError):
            run_stages(workplace, ("train",))
    assert not (workplace / RUN).exists(), "nothing is written before the end"
    run_stages(workplace, ("train",))
    assert contents(workplace / RUN) == expected
    assert list((workplace / resume.RESUME).iterdir()) == []


def refused(capsys: pytest.CaptureFixture[str], folder: Path, name: str) -> str:
    """The one line that a stage ends with; its exit code has to be 2."""
    capsys.readouterr()
    assert stage.main([name, "--root", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def flipped(content: bytes) -> bytes:
    """One client would train on another sample."""
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


@pytest.mark.parametrize("damage", [None, flipped, lambda _: CUT])
def test_a_missing_or_damaged_partition_is_refused(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytes], bytes] | None,
) -> None:
    path = workplace / PARTITION / INDICES
    content = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage(content))
    forget(workplace, "runs")
    assert f"{path}: is missing or was changed; `dvc repro` makes it again" in refused(
        capsys, workplace, "train"
    )
    assert not (workplace / "runs").exists()


def test_what_diverges_is_named_and_all_others_are_trained(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.Live, "_record", lambda *_: None)  # of MLflow, which takes seconds
    text = ONE.replace("[scaffold+fnr]", "[high, fedavg, higher]")
    high = (
        "  high: {recipe: fedprox, fedprox: {mu: 1.0e+30}}\n  higher: {recipe: fedprox, "
        "fedprox: {mu: 1.0e+35}}\n"
    )
    (workplace / "params.yaml").write_text(text.replace("recipes:\n", f"recipes:\n{high}"))
    capsys.readouterr()
    for _ in range(2):  # the second time it is known
        assert stage.main(["train", "--root", str(workplace)]) == 2
        said = capsys.readouterr()
        first, second = said.err.splitlines()
        for line, item in ((first, "skewed-high-0"), (second, "skewed-higher-0")):
            assert line.startswith(f"error: {item}: ") and "round 1" in line and "client" in line
        assert [path.name for path in (workplace / "runs").iterdir()] == ["skewed-fedavg-0"]
    assert "3 known" in said.out
    assert not list((workplace / resume.RESUME).iterdir())
    run_stages(workplace, ("evaluate",))
    assert [path.name for path in (workplace / "evaluation").iterdir()] == ["skewed-fedavg-0"]


def test_a_model_is_evaluated_with_the_settings_that_it_was_trained_with(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(workplace, "evaluation")
    (workplace / "params.yaml").write_text(ONE.replace("p: 0.5", "p: 0.25"))
    assert f"{UNIT.key}: was trained with other settings" in refused(capsys, workplace, "evaluate")
    assert not (workplace / EVALUATION).exists()


def test_data_that_change_during_a_run_are_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another command in the same folder: the store would have them under a wrong name."""
    load = Item.load

    def late(place: Workspace, *of: Any) -> Item:
        found, path = load(place, *of), place.dataset("digits")
        path.write_bytes(flipped(path.read_bytes()))
        return found

    forget(workplace, "runs")
    monkeypatch.setattr(Item, "load", late)
    assert f"{UNIT.key}: its code, data or partition are not those" in refused(
        capsys, workplace, "train"
    )
    assert not (workplace / RUN).exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("name", "damage"),
    [("model.safetensors", cut), (cache.RECEIPT, Path.unlink)],
)
def test_a_damaged_run_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    """By the evaluation and by the report; the training makes it whole again, and trains
    nothing."""
    whole = contents(workplace / RUN)
    damage(workplace / RUN / name)
    shutil.rmtree(workplace / EVALUATION)
    assert f"{RUN}/{name}" in refused(capsys, workplace, "evaluate")
    assert not (workplace / EVALUATION).exists()
    assert f"{RUN}/{name}" in refused(capsys, workplace, "report")
    assert not (workplace / "report").exists()
    if not (workplace / RUN / cache.RECEIPT).exists():  # it may be a folder of the user
        assert f"{RUN}: not written by noniid" in refused(capsys, workplace, "train")
        shutil.rmtree(workplace / RUN)
    assert stage.main(["train", "--root", str(workplace)]) == 0
    assert "training: 1 known" in capsys.readouterr().out
    assert contents(workplace / RUN) == whole


def test_plain_progress_is_a_line_per_item_with_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b goes on from its first of four rounds.

    In 4 s it has done a quarter of itself, and 2.5 items are left: 40 s.

    In 6 s it has done three quarters, and 2 items are left: 16 s.
    """
    now = [0.0]
    monkeypatch.setattr(progress, "EVERY_S", 3)
    monkeypatch.setattr(progress, "SHORT_S", 1)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Display("small, training", 4) as display:
        display.done("a", "88.00 %", known=True)
        now[0] = 4
        display.show(progress.RoundReport("b", 2, 4, 0.5))
        now[0] = 6
        display.done("b", "90.00 %", known=False)
        display.done("c", "91.00 %", known=False)  # at once after a line
        now[0] = 8
        display.done("d", "92.00 %", known=False)
    assert capsys.readouterr().out.splitlines() == [
        "small, training: 1 of 4 done; b in round 2 of 4, accuracy 50.00 %, 40 s left",
        "small, training: 2 of 4: b 90.00 %, 16 s left",
        "small, training: 4 of 4: d 92.00 %",
        "small, training: 1 known, 3 made in 8 s",
    ]


def test_the_repository_is_the_one_that_dvc_names_if_this_is_its_copy(tmp_path: Path) -> None:
    copy = tmp_path / ".dvc" / "tmp" / "exps" / "tmp1"
    place = Workspace.from_environment(
        copy, {"DVC_ROOT": str(tmp_path), "DVC_EXP_NAME": "slow-tuna", "MLFLOW_TRACKING_URI": ""}
    )
    assert (place.root, place.repository) == (copy, tmp_path)
    assert place.tags == {"dvc_experiment": "slow-tuna"} and place.tracking_uri is None
    assert Workspace.from_environment(copy, {"DVC_ROOT": "/elsewhere"}).repository == copy
    assert Workspace.from_environment(copy, {}).repository == copy
