"""Skews that are fixed when data are dealt: who sees what, the partition's file, and the same run
in every runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

import fedml_noniid as nd
from fedml_noniid.contract.checks import close
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.drift import drift
from fedml_noniid.data.indices import INDICES, Indices, read_indices
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.skew import CLEAN, Skew
from fedml_noniid.engines.run import Outcome
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.partitioning import Partition, partition_of
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting import report
from fedml_noniid.pipelines.stages.partition import partitions
from fedml_noniid.pipelines.verbs import scenarios
from tests import federation

LABEL_NOISE: dict[str, Any] = {"label_noise": {"rate": 0.4, "form": "level"}}
ROTATION: dict[str, Any] = {"rotation": {"degrees": [0, 90, 180, 270]}}
MIXED: dict[str, Any] = {"drift": {"at": 2, "swap": [[1, 7], [3, 4], []]}}
RECURRENT: dict[str, Any] = {
    "drift": {"kind": "recurrent", "at": 2, "every": 1, "swap": [[1, 7], [3, 4]]}
}
NEUTRAL: dict[str, Any] = {
    "label_noise": {"rate": 0, "kind": "pair"},
    "rotation": {"degrees": [0, 0]},
}
SKEWS = pytest.mark.parametrize(
    "skews", [LABEL_NOISE, ROTATION, LABEL_NOISE | ROTATION], ids=lambda of: "+".join(of)
)


def settings(skews: dict[str, Any], recipe: str = "fedavg", **train: Any) -> Config:
    """Five clients with two rounds on digits."""
    content = {
        "experiment": "skews",
        "data": {"name": "digits", "validation": 0.1, "public": 40},
        "scenario_names": ["s"],
        "scenarios": {"s": {"partition": "dirichlet", "clients": 5, "alpha": 1.0, **skews}},
        "recipe_names": [recipe],
        "recipes": {recipe: {}},
        "seeds": [3],
        "train": {
            "model": "mlp",
            "rounds": 2,
            "epochs": 1,
            "batch_size": 32,
            "lr": 0.1,
            "device": "cpu",
            **train,
        },
        "deploy": {"recipe": recipe, "scenario": "s", "seed": 3, "silos": 5},
    }
    return config.checked(content, "params.yaml")


def partitioned(data: Dataset, of: Config) -> Partition:
    return partition_of(data, of.data, of.scenarios["s"], "s", 3)


def item(data: Dataset, skews: dict[str, Any], recipe: str = "fedavg", **train: Any) -> Item:
    of = settings(skews, recipe, **train)
    return Item.from_parts(of, Unit("s", recipe, 3), data, partitioned(data, of).indices)


def run(data: Dataset, skews: dict[str, Any], recipe: str = "fedavg", **train: Any) -> Outcome:
    return item(data, skews, recipe, **train).simulation().run()


# who sees what
# --------------------------------------------------------------------------------------------------


def test_seen_by_hand() -> None:
    """Client 0 holds 3 and 1, turned by a quarter; client 1 holds 0 as it is; position 2 is
    nobody's."""
    x, y = torch.arange(16).reshape(4, 1, 2, 2), torch.tensor([5, 6, 7, 8])
    before = x.clone(), y.clone()
    skew = Skew([np.array([1, 2]), np.array([3])], np.array([1, 0]))
    seen, labels = skew.applied([np.array([3, 1]), np.array([0])], x, y)
    assert labels.tolist() == [3, 2, 7, 1]
    assert seen.flatten(1).tolist() == [
        [0, 1, 2, 3],
        [5, 7, 4, 6],
        [8, 9, 10, 11],
        [13, 15, 12, 14],
    ]
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]), "the data set stays as it is"
    assert CLEAN.applied([np.array([3, 1]), np.array([0])], x, y) == (x, y)


@SKEWS
def test_only_the_clients_training_samples_change(digits: Dataset, skews: dict[str, Any]) -> None:
    clean, own = item(digits, {}).simulation(), item(digits, skews).simulation()
    a, b = clean.engine.clients, own.engine.clients
    for client, positions in b.indices.items():
        assert np.array_equal(positions, a.indices[client]), "the same samples"
        turns = client % 4 if "rotation" in skews else 0
        assert torch.equal(b.train.x[positions], torch.rot90(a.train.x[positions], turns, (2, 3)))
        wrong = (b.train.y[positions] != a.train.y[positions]).float().mean().item()
        rate = 0.1 * client if "label_noise" in skews else 0.0
        assert wrong == pytest.approx(rate, abs=4 * (rate * (1 - rate) / len(positions)) ** 0.5)
    for part in ("test", "validation"):
        one, other = (getattr(of.loop.federation, part) for of in (clean, own))
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
    assert torch.equal(a.public.x, b.public.x) and torch.equal(a.public.y, b.public.y)


# statistics and file
# --------------------------------------------------------------------------------------------------


def test_the_table_of_clients_and_the_words_of_a_report(digits: Dataset, tmp_path: Path) -> None:
    """Classes may be called as the columns beside them are."""
    of = settings(LABEL_NOISE | ROTATION | MIXED)
    workspace = Workspace.from_environment(tmp_path, {})
    names = ("noise", "1", "degrees", "3", "4", "drifting", "client", "7", "entropy", "samples")
    data = replace(digits, classes=names)
    data.save(workspace.dataset("digits"))
    partitions(workspace, of)
    made = partitioned(data, of)
    labels = made.indices.skew.labels
    assert labels is not None
    wrong = [
        float((digits.train_y.numpy()[positions] != own).mean())
        for positions, own in zip(made.indices.clients, labels, strict=True)
    ]
    table = results.table(workspace.partition("s", 3) / "clients.csv")
    assert [float(row["label_noise"]) for row in table] == pytest.approx(wrong, abs=1e-6)
    assert [row["rotation"] for row in table] == ["0", "90", "180", "270", "0"]
    assert [row["drift"] for row in table] == ["2", "2", "0", "2", "2"]
    wanted = {"label_noise_mean": pytest.approx(sum(wrong) / 5), "label_noise_max": max(wrong)}
    wanted |= {"rotations": 4, "drifting": 4}
    statistics = results.record(workspace.partition("s", 3) / "statistics.json")
    assert {key: made.statistics[key] for key in wanted} == wanted and statistics["drifting"] == 4
    noise = "label_noise (rate 0.4, form level, kind symmetric)"
    turned = "rotation (degrees [0, 90, 180, 270])"
    drifts = "drift (at 2, swap [[1, 7], [3, 4], []], kind sudden)"
    about = report._about(tmp_path, of.scenarios["s"], "s-3")
    assert noise in about and turned in about and drifts in about
    described = f"dirichlet (alpha 1.0), {noise}, {turned}, {drifts}"
    assert scenarios.described(of.scenarios["s"]) == described
    options = {"alpha": 1.0, "seed": 3, "validation": 0.1, "public": 40}
    split = nd.partition(
        nd.load("digits"), "dirichlet", 5, **options, **LABEL_NOISE, **ROTATION, **MIXED
    )
    assert split.indices.content == made.indices.content, "from Python as from a file"
    with pytest.raises(UserError, match="drift: labels change until round 2; allowed: until 1"):
        nd.run("fedavg", split, rounds=1)


@pytest.mark.parametrize("skews", [{}, LABEL_NOISE | ROTATION | MIXED], ids="+".join)
def test_the_file_holds_the_skews(digits: Dataset, tmp_path: Path, skews: dict[str, Any]) -> None:
    wanted = partitioned(digits, settings(skews)).indices
    path = tmp_path / INDICES
    path.write_bytes(wanted.content)
    found = read_indices(path)
    assert found.content == wanted.content
    for one in ("clients", "test_clients"):
        pairs = zip(getattr(found, one), getattr(wanted, one), strict=True)
        assert all((part == before).all() for part, before in pairs)
    assert (found.skew.labels is None) is ("label_noise" not in skews)
    assert (found.skew.turns is None) is ("rotation" not in skews)
    drifts = None if found.skew.drift is None else found.skew.drift.clients.tolist()
    assert drifts == ([[1, 2, 0, 1, 2]] if "drift" in skews else None)
    plain = partitioned(digits, settings({})).indices
    assert replace(found, skew=CLEAN).content == plain.content


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("labels", [1], "labels: not one for each sample of each client"),
        ("labels", [[1, 2]], "labels: not one for each sample of each client"),
        ("labels", [0.5, 1], "labels: float64, expected int64"),
        ("clients", [[0, 1]], "clients: no lists"),
        ("clients.offsets", [0, 2, 1], "clients: the offsets do not divide 2 positions"),
        ("clients.offsets", [0, 3, 2], "clients: the offsets do not divide 2 positions"),
        ("clients.offsets", [0, 2], "1 clients, but 2 test_clients"),
        ("test_clients.offsets", None, "not a readable partition"),
        ("quarter_turns", [1], "2 clients, but 1 quarter_turns"),
        ("drift.clients", [[1]], "drift: not one concept for each round and client"),
        ("drift.rounds", [2, 3], "drift: not one concept for each round and client"),
        ("drift.clients", [[1, 2]], "drift: names a concept that it lacks"),
        ("drift.concepts", None, "not a readable partition"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    clients = Ragged.from_lists([np.arange(2), np.arange(0)])
    skew = Skew(drift=drift("sudden", 2, None, [[0, 1]], 2, 2))
    held = load(Indices(clients, np.arange(0), np.arange(0), clients, skew).content)
    held.pop(key, None)
    if value is not None:
        held[key] = np.array(value)
    (tmp_path / INDICES).write_bytes(save(held))
    with pytest.raises(UserError, match=message) as error:
        read_indices(tmp_path / INDICES)
    assert "\n" not in str(error.value)


# the same in every runtime
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skews", "recipe"),
    [(LABEL_NOISE | ROTATION, "scaffold+fnr"), (MIXED, "fedavg"), (RECURRENT, "centralised")],
)
def test_engines_agree(digits: Dataset, skews: dict[str, Any], recipe: str) -> None:
    engines = ("sequential", "vectorized")
    a, b = (run(digits, skews, recipe, engine=engine, rounds=3) for engine in engines)
    close(b.params, a.params, 1e-4)
    scores = [[row["test_accuracy"] for row in one.rows] for one in (a, b)]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    assert not federation.equal_models(a, run(digits, {}, recipe, engine=engines[0], rounds=3))


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [("fedavg", "vectorized"), ("scaffold+fnr", "sequential"), ("centralised", "vectorized")],
)
def test_neutral_values_equal_none_to_the_bit(digits: Dataset, recipe: str, engine: str) -> None:
    assert federation.equal(
        run(digits, NEUTRAL, recipe, engine=engine), run(digits, {}, recipe, engine=engine)
    )


# --------------------------------------------------------------------------------------------------
# what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skews", "message"),
    [
        ({"label_noise": {"rate": 1.2}}, "scenarios.s.label_noise.rate = 1.2 is refused"),
        ({"label_noise": {}}, "scenarios.s.label_noise.rate is missing"),
        (
            {"label_noise": {"rate": 0.1, "kind": "pairs"}},
            "kind = 'pairs' is unknown (did you mean 'pair'?); allowed: ",
        ),
        (
            {"rotation": {"degrees": []}},
            "rotation.degrees = [] is refused; allowed: at least 1 of them",
        ),
        (
            {"rotation": {"degrees": [0] * 6}},
            "degrees = [0, 0, 0, 0, 0, 0] is refused; allowed: at most one per client",
        ),
        ({"drift": {"swap": [[1, 7]]}}, "scenarios.s.drift.at is missing"),
        ({"drift": {"at": 0, "swap": [[1, 7]]}}, "scenarios.s.drift.at = 0 is refused"),
        (
            {"drift": {"at": 2, "swap": []}},
            "drift.swap = [] is refused; allowed: pairs of two classes such as [[1, 2], ",
        ),
        (
            {"drift": {"at": 2, "swap": [[1, 1]]}},
            "drift.swap = [[1, 1]] is refused; allowed: pairs",
        ),
        (
            {"drift": {"at": 2, "swap": [[1, 7]] * 6}},
            "is refused; allowed: at most one per client, 5",
        ),
        (
            {"drift": {"at": 2, "swap": [[1, 7]], "kind": "suden"}},
            "drift.kind = 'suden' is unknown (did you mean 'sudden'?); allo",
        ),
        (
            {"drift": {"at": 2, "swap": [[1, 7]], "every": 3}},
            "drift.every = 3 is refused; allowed: null; a sudden drift has no second round",
        ),
        (
            {"drift": {"at": 2, "swap": [[1, 7]], "kind": "recurrent"}},
            "drift.every = null is refused; allowed: a number of rounds",
        ),
        (
            {"rotaton": {"degrees": [0]}},
            "scenarios.s.rotaton is unknown (did you mean 'rotation'?)",
        ),
    ],
)
def test_one_line_per_mistake(skews: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        settings(skews)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.zeros(60, 7),
            "rotation is refused for samples of shape [7], as they are no images; leave it out",
        ),
        (
            torch.zeros(60, 9, dtype=torch.int32),
            "rotation is refused for samples of shape [9]",
        ),  # text
        (
            torch.zeros(60, 1, 4, 6),
            "degrees = [0, 90, 180, 270] is refused; allowed: 0, 180 for images of 4 x 6 pixels",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused(x: torch.Tensor, message: str) -> None:
    y = torch.arange(60) % 2
    data = Dataset.from_raw("made", Raw(x, y, x, y, ("a", "b"), unit=1.0))
    scenario = config.Scenario.model_validate({"partition": "iid", "clients": 5, **ROTATION})
    with pytest.raises(UserError) as error:
        partition_of(data, settings({}).data, scenario, "s", 0)
    assert str(error.value).startswith(("scenarios.s: rotation", "scenarios.s.rotation"))
    assert message in str(error.value) and "\n" not in str(error.value)
