"""Concept drift: who has which labels in which round, by hand; the same run in every runtime;
honest tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.drift import drift
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.evaluation import CLIENT_ACCURACY, evaluate
from fedml_noniid.engines.hashing import model_tensors
from fedml_noniid.engines.run import Checkpointing, Outcome
from fedml_noniid.pipelines.experiment import check
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.provenance import of_training
from tests import federation
from tests.data.test_skew import MIXED, RECURRENT, item, settings

SUDDEN: dict[str, Any] = {"drift": {"at": 2, "swap": [[1, 7]]}}


def drifting(data: Dataset, skews: dict[str, Any], recipe: str = "fedavg", **train: Any) -> Item:
    return item(data, skews, recipe, rounds=3, **train)


def ran(data: Dataset, skews: dict[str, Any], recipe: str = "fedavg", **train: Any) -> Outcome:
    return drifting(data, skews, recipe, **train).simulation().run()


# who has which labels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "every", "wanted"),
    [
        ("sudden", None, {0: [0, 0, 0, 0], 2: [0, 0, 0, 0], 3: [1, 2, 0, 1], 9: [1, 2, 0, 1]}),
        (
            "incremental",
            2,
            {2: [0, 0, 0, 0], 3: [1, 0, 0, 1], 4: [1, 0, 0, 1], 5: [1, 2, 0, 1], 9: [1, 2, 0, 1]},
        ),
        (
            "recurrent",
            2,
            {2: [0, 0, 0, 0], 3: [1, 2, 0, 1], 4: [1, 2, 0, 1], 5: [0, 0, 0, 0], 9: [0, 0, 0, 0]},
        ),
    ],
)
def test_concepts_by_hand(kind: str, every: int | None, wanted: dict[int, list[int]]) -> None:
    """Four clients: the first and the last swap 1 and 2, the second swaps 0 and 3, the third keeps
    its labels."""
    found = drift(kind, 3, every, [[1, 2], [0, 3], []], 4, 4)
    assert {round_: found.concept(round_).tolist() for round_ in wanted} == wanted
    assert found.concepts[:3].tolist() == [[0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0]]
    assert found.first() == [3, 5 if kind == "incremental" else 3, 0, 3]


def test_labels_by_hand() -> None:
    """Position 1 is nobody's. Client 0 swaps 1 and 2 in round 3, client 1 keeps its labels."""
    found = drift("sudden", 3, None, [[1, 2], []], 2, 4)
    y = torch.tensor([1, 1, 2, 0, 2, 3])
    held = found.per_sample([np.array([4, 0]), np.array([2, 3])], 6)
    assert [held.labels(y, round_).tolist() for round_ in (2, 3)] == [
        y.tolist(),
        [2, 1, 2, 0, 1, 3],
    ]
    for client, wanted in enumerate(([2, 2, 1, 0, 1, 3], y.tolist())):
        assert found.labels(y, client, 3).tolist() == wanted
        assert found.only(client).labels(y, 0, 3).tolist() == wanted
    assert [(share, of.tolist()) for share, of in found.views(y, 2)] == [(1.0, y.tolist())]
    assert [(share, of.tolist()) for share, of in found.views(y, 3)] == [
        (0.5, y.tolist()),
        (0.5, [2, 2, 1, 0, 1, 3]),
    ]


# the file and the words
# --------------------------------------------------------------------------------------------------


def test_the_fingerprint_has_the_drift() -> None:
    unit = Unit("s", "fedavg", 3)
    assert len({of_training(settings(one), unit) for one in ({}, SUDDEN, MIXED, RECURRENT)}) == 4


# the same in every runtime
# --------------------------------------------------------------------------------------------------


def saved(folder: Path) -> Checkpointing:
    return Checkpointing(Checkpoints(folder / "checkpoint", ""))


def without_client_accuracy(outcome: Outcome) -> Outcome:
    """As a run on labels that drift records it: its rounds have no accuracy by client."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(CLIENT_ACCURACY)}
        for row in outcome.rows
    ]
    assert all(len(less) < len(row) for less, row in zip(rows, outcome.rows, strict=True))
    return outcome._replace(rows=rows)


def swapped(of: Item) -> Item:
    """The item with 1 and 7 swapped in its data: in the samples of the clients, in validation and
    test."""
    label = torch.tensor([0, 7, 2, 3, 4, 5, 6, 1, 8, 9])
    held = np.concatenate([*of.indices.clients, of.indices.validation])
    y = of.data.train_y.clone()
    y[held] = label[y[held]]
    return replace(of, data=replace(of.data, train_y=y, test_y=label[of.data.test_y]))


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [("fedavg", "vectorized"), ("scaffold+fnr", "sequential"), ("fedlc", "vectorized")],
)
def test_a_drift_is_a_change_of_the_data_between_two_rounds(
    digits: Dataset, tmp_path: Path, recipe: str, engine: str
) -> None:
    """Round 1 on the first labels; rounds 2 and 3, from its checkpoint, on data with swapped
    labels."""
    item(digits, {}, recipe, engine=engine, rounds=1).simulation([saved(tmp_path)]).run()
    wanted = (
        swapped(drifting(digits, {}, recipe, engine=engine)).simulation([saved(tmp_path)]).run()
    )
    found = ran(digits, SUDDEN, recipe, engine=engine)
    assert federation.equal(found, without_client_accuracy(wanted))
    assert not federation.equal_models(found, ran(digits, {}, recipe, engine=engine))


def test_processes_end_with_the_same_bits(digits: Dataset) -> None:
    one, two = (
        drifting(digits, MIXED, engine="sequential").simulation(workers=n).run() for n in (1, 2)
    )
    assert federation.equal(one, two)


def test_a_resumed_run_ends_with_the_same_bits(digits: Dataset, tmp_path: Path) -> None:
    of, whole = drifting(digits, RECURRENT, "scaffold"), ran(digits, RECURRENT, "scaffold")
    for done in range(2):  # killed after every round
        simulation = of.simulation([saved(tmp_path)])
        assert simulation.start_round == done
        next(simulation.rounds())
    assert federation.equal(of.simulation([saved(tmp_path)]).run(), whole)


def test_a_drift_that_is_not_there_yet_changes_no_bit(digits: Dataset) -> None:
    """The last round before the drift: the same rows and weights as without it, but for the
    accuracies by client."""
    plain, later = (
        ran(digits, skews, "scaffold+fnr") for skews in ({}, {"drift": {"at": 4, "swap": [[1, 7]]}})
    )
    assert federation.equal(without_client_accuracy(plain), later)


# what is tested
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skews", [MIXED, RECURRENT], ids=["mixed", "back"])
def test_a_model_is_tested_with_each_clients_labels(digits: Dataset, skews: dict[str, Any]) -> None:
    """Accuracy and loss of the last round, of evaluation, by class and by client: each from single
    evaluations."""
    of = drifting(digits, skews)
    outcome = of.simulation().run()
    found = measure(
        of, model_tensors(outcome.params, outcome.evaluated, outcome.buffers), outcome.rows
    )
    assert of.indices.skew.drift is not None
    own = []
    for client in range(5):
        pair = skews["drift"]["swap"][client % len(skews["drift"]["swap"])]
        label = np.arange(10)
        if skews is not RECURRENT:  # whose first labels are back in round 3
            label[pair] = pair[::-1]
        y = torch.from_numpy(label)[digits.test_y]
        own.append(evaluate(of.network, outcome.params, outcome.buffers, of.test._replace(y=y)))
        hits = (own[-1].predictions == y).numpy()
        positions = of.indices.test_clients[client]
        assert found.per_client["test_accuracy"][client] == pytest.approx(hits[positions].mean())
        by_class = np.array([hits[digits.test_y == c].mean() for c in range(10)])
        counts = np.bincount(digits.train_y[of.indices.clients[client]], minlength=10)
        accuracy = pytest.approx(by_class @ counts / counts.sum())
        assert found.per_client["accuracy"][client] == accuracy
    for key in ("accuracy", "loss"):
        mean = pytest.approx(np.mean([getattr(one, key) for one in own]))
        assert found.metrics[key] == mean and outcome.rows[-1][f"test_{key}"] == mean
    shares = np.array(found.per_class["samples"]) / len(digits.test_y)
    of_classes = (np.array(found.per_class["accuracy"]) * shares).sum()
    assert of_classes == pytest.approx(found.metrics["accuracy"])


# what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "last"),
    [
        ({"at": 3, "swap": [[1, 7]]}, 3),
        ({"at": 1, "every": 2, "kind": "recurrent", "swap": [[1, 7]]}, 3),
        ({"at": 1, "every": 1, "kind": "incremental", "swap": [[1, 7], [], [3, 4]]}, 3),
    ],
)
def test_a_drift_after_the_last_round_is_refused(given: dict[str, Any], last: int) -> None:
    check.check(settings({"drift": given}, rounds=3))
    with pytest.raises(UserError, match=rf"scenarios.s.drift: .* round {last}; allowed: until 2"):
        check.check(settings({"drift": given}, rounds=2))


NAMED = ("ant", "bee", "cow", "3", "elk")


@pytest.mark.parametrize("skews", [{}, {"drift": {"at": 2, "swap": [["cow", 3]]}}])
def test_classes_are_named_as_the_data_name_them(skews: dict[str, Any]) -> None:
    """A position is no name: the class in place 2 is `cow`, and `3` is the name of one."""
    data = nd.from_arrays(
        np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 5, classes=NAMED
    )
    named = [["elk"], ["ant", 3], ["bee", "cow"]]
    split = nd.partition(data, "by_classes", clients=3, classes=named, **skews)
    y = data.dataset.train_y.numpy()
    for client, numbers in zip(split.indices.clients, ([4], [0, 3], [1, 2]), strict=True):
        assert sorted(set(y[client].tolist())) == numbers
    if skews:
        swapped = split.indices.skew.drift
        assert swapped is not None
        assert swapped.labels(torch.arange(5), 0, 2).tolist() == [0, 1, 3, 2, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": [[0], ["cow"]]}, r"classes\[0\] = '0' is unknown; allowed: ant, bee, cow, 3"),
        ({"classes": [["Cow"], ["bee"]]}, r"classes\[0\] = 'Cow' is unknown \(did you mean 'cow'"),
        ({"classes": [["bee"], ["3", 3]]}, r"classes\[1\] = \['3', 3\] is refused; allowed: each"),
        ({"classes": [[True], ["bee"]]}, r"classes\[0\]\[0\] = True is refused; allowed: the name"),
        ({"drift": [0, "ant"]}, "drift.swap = '0' is unknown; allowed: ant, bee"),
        ({"drift": ["3", 3]}, "allowed: pairs of two"),
    ],
)
def test_what_is_no_name_of_a_class_is_refused(options: dict[str, Any], words: str) -> None:
    data = nd.from_arrays(np.zeros((200, 3)) + np.eye(200, 3), np.arange(200) % 5, classes=NAMED)
    name = "by_classes" if "classes" in options else "iid"
    if name == "iid":
        options = {"drift": {"at": 2, "swap": [options["drift"]]}}
    with pytest.raises(UserError, match=words):
        nd.partition(data, name, clients=2, **options)
