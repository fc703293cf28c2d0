"""IFCA (Ghosh et al. 2020) and CFL (Sattler et al. 2020) against arithmetic by hand."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import fedml_noniid as nd
from fedml_noniid.plugins.baselines.cfl import bipartition
from tests.methods import by_hand as hand


def flat(tree: hand.Tree) -> hand.Array:
    return np.concatenate([leaf.ravel() for leaf in tree.values()])


@pytest.mark.parametrize("cohort", [2, 3])
def test_ifca_is_algorithm_1(engine: str, cohort: int) -> None:
    """Each client takes argmin_j F_k(theta_j); theta_j <- sum_k n_k w_k / sum_k n_k of its own."""
    how: dict[str, Any] = {"engine": engine, "cohort": cohort, "rounds": 4, "seed": 1}
    ran = hand.run("ifca", {"ifca": {"clusters": 3}}, **how)
    (ask, _), *_ = ran.exchanges
    theta = [ask.params, *(hand.row(ask.shared["ifca"]["params"], j) for j in range(2))]
    theta = [hand.arrays(model) for model in theta]
    for name, w in hand.W0.items():
        assert np.array_equal(theta[0][name], w)
        for model in theta[1:]:
            assert not np.array_equal(flat(model), flat(hand.W0))
            assert np.array_equal(np.sort(model[name], None), np.sort(w, None)), "other places"
    model_of, seen = np.zeros(3, int), set()
    for _, clients, batches in ran.rounds():
        for k in clients:
            x, y = hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]
            model_of[k] = np.argmin([hand.loss(model, x, y) for model in theta])
        ends = {
            k: hand.descend(theta[model_of[k]], of) for k, of in zip(clients, batches, strict=True)
        }
        for j in range(3):
            if mine := [k for k in clients if model_of[k] == j]:
                theta[j] = hand.average(hand.shares(mine), [ends[k] for k in mine])
        seen |= {*model_of.tolist()}
    assert len(seen) > 1, "the example has more than one cluster"
    state = ran.state("ifca")
    assert state["model_of"].tolist() == model_of.tolist()
    for j in range(3):
        hand.same(hand.row(state["models"]["params"], j), theta[j], 1e-9)
    assert ran.jobs()[:2] == [("ifca.choose", ran.jobs()[0][1]), ("train", ran.jobs()[0][1])]
    recorded = ran.outcome.tensors["ifca/model_of"]
    assert recorded[-1].tolist() == model_of.tolist()
    assert ran.outcome.rows[-1]["ifca_clusters"] == len({*model_of.tolist()})
    own = hand.row(ran.outcome.models["models"]["params"], int(model_of[0]))
    hand.same(own, theta[model_of[0]], 1e-9)


def split_by_hand(deltas: list[hand.Array]) -> list[int]:
    """Of all ways to make two parts, the one with the smallest largest cosine between them; the
    numbers that are not with the first."""
    cosine = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a in deltas] for b in deltas]
    ways = [way for way in product([0], *[[0, 1]] * (len(deltas) - 1)) if any(way)]

    def across(way: tuple[int, ...]) -> float:
        pairs = product(range(len(way)), repeat=2)
        return max(float(cosine[i][j]) for i, j in pairs if way[i] != way[j])

    return [k for k, part in enumerate(min(ways, key=across)) if part]


@pytest.mark.parametrize(
    ("eps1", "eps2", "splits"), [(9.0, 0.0, True), (9.0, 9.0, False), (0.0, 0.0, False)]
)
def test_cfl_splits_where_the_norms_say_so(
    engine: str, eps1: float, eps2: float, splits: bool
) -> None:
    """In round 2, and then each part by itself."""
    settings = {"eps1": eps1, "eps2": eps2, "first": 2, "clusters": 2}
    ran = hand.run("cfl", {"cfl": settings}, engine=engine, rounds=4)
    theta, model_of = [hand.W0, hand.W0], np.zeros(3, int)
    for t, clients, batches in ran.rounds():
        starts = [theta[j] for j in model_of]
        ends = [hand.descend(w, of) for w, of in zip(starts, batches, strict=True)]
        if t == 2 and splits:
            moved = [flat(hand.each(np.subtract, a, b)) for a, b in zip(ends, starts, strict=True)]
            model_of[split_by_hand(moved)] = 1
        for j in set(model_of.tolist()):
            mine = [k for k in clients if model_of[k] == j]
            theta[j] = hand.average(hand.shares(mine), [ends[k] for k in mine])
    state = ran.state("cfl")
    assert state["model_of"].tolist() == model_of.tolist()
    assert len(set(model_of.tolist())) == 1 + splits
    for j in set(model_of.tolist()):
        hand.same(hand.row(state["models"]["params"], j), theta[j], 1e-9)


def test_the_file_of_weights_has_each_model_once() -> None:
    """And FedBN's norms, which stay with a client, by client."""
    rotation = {"degrees": [0, 180]}
    split = nd.partition(nd.load("digits"), "iid", clients=4, rotation=rotation)
    options: dict[str, Any] = {"model_options": {"batch_norm": True}, "rounds": 3}
    result = nd.run("fedbn+ifca", split, seeds=[0], **options)
    files = result.files[0]
    weights, record = load(files.run["model.safetensors"]), json.loads(files.run["run.json"])
    assert weights["own/models/params/fc1.weight"].shape[0] == 2
    model_of = weights["own/model_of"].tolist()
    assert len(model_of) == len(weights["own/params/bn1.weight"]) == 4
    for k, j in enumerate(model_of):
        state = result.model(client=k).state_dict()
        assert torch.equal(state["fc1.weight"], weights["own/models/params/fc1.weight"][j])
        assert torch.equal(state["bn1.weight"], weights["own/params/bn1.weight"][k])
    measured = json.loads(files.evaluation["metrics.json"])
    assert measured["accuracy"] == pytest.approx(record["final"]["test_accuracy"], abs=1e-9)
    assert "a new client takes" in record["tags"]["own_models"]


@hypothesis.settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=2, max_size=6))
def test_the_bipartition_is_the_best_of_all(rows: list[list[int]]) -> None:
    """No other one has a smaller largest cosine between its parts."""
    deltas = [np.array(row) + np.array([0.3, 0.2, 0.1]) for row in rows]
    unit = torch.tensor(np.array([of / np.linalg.norm(of) for of in deltas]))
    alpha = unit @ unit.T
    second = bipartition(alpha)
    if not second.any():  # the largest cosine between any two parts is the same
        return
    wanted = np.isin(np.arange(len(rows)), split_by_hand(deltas))
    across = [float(alpha[part][:, ~part].max()) for part in (second, torch.from_numpy(wanted))]
    assert across[0] == pytest.approx(across[1])
