"""The vectorized engine: chunks, padding, order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.component import (
    Answer,
    Ask,
    Change,
    Client,
    Component,
    Server,
    Trace,
)
from fedml_noniid.plugins.core.trees import n_bytes, tree_map
from fedml_noniid.plugins.data.batches import Order, padded
from fedml_noniid.plugins.engines.packing import flatten, stack
from fedml_noniid.plugins.engines.simulation import choose_engine, mean_parallel_clients
from fedml_noniid.plugins.engines.vectorized import Vectorized, chunks
from fedml_noniid.plugins.models import build
from fedml_noniid.plugins.recipes import METHODS
from tests import federation

RECIPES = ["fedavg", "scaffold+fnr", "rfedavg", "ccn+fednlr"]


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_of_any_size_give_the_same_result(
    recipe: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other chunks pad to other lengths, so up to rounding."""
    whole = federation.simulation(
        recipe, dtype=torch.float64, batch_norm=True, engine="vectorized", cohort=5
    )
    out = whole.run()
    monkeypatch.setattr(Vectorized, "chunk_size", lambda self, ask: size)
    parts = federation.simulation(
        recipe, dtype=torch.float64, batch_norm=True, engine="vectorized", cohort=5
    )
    again = parts.run()
    for part in ("params", "evaluated", "buffers"):
        close(getattr(again, part), getattr(out, part))
    close(flatten(parts.engine.clients.memory), flatten(whole.engine.clients.memory))
    assert [row["bytes_up"] for row in again.rows] == [row["bytes_up"] for row in out.rows]


def test_a_memory_bound_of_one_client_is_kept_by_going_one_by_one() -> None:
    simulation = federation.simulation("fedavg", engine="vectorized")
    assert isinstance(simulation.engine, Vectorized)
    ask = Ask("train", (0, 1, 2, 3), simulation.loop.state.params, simulation.loop.state.buffers)
    simulation.engine.memory_mb = 0
    assert simulation.engine.chunk_size(ask) == 1
    simulation.engine.memory_mb = 1
    one = simulation.engine.chunk_size(ask)
    simulation.engine.memory_mb = 8
    assert simulation.engine.chunk_size(ask) == pytest.approx(8 * one, rel=0.01)
    assert one * n_bytes(simulation.loop.state.params) <= 1 << 20, (
        "the models of a chunk fit into the bound"
    )


@pytest.mark.parametrize("size", [2, 4])
def test_memory_that_is_used_again_leaves_no_trace(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even NaN.

    Gradients lie where those of the last chunk did, of this round or the one before.
    """
    monkeypatch.setattr(Vectorized, "chunk_size", lambda self, ask: size)
    used, fresh = (federation.simulation("fedavg", engine="vectorized") for _ in range(2))
    ask = Ask("train", (0, 1, 3, 5), used.loop.state.params, used.loop.state.buffers)
    spoiled = ask._replace(
        params=tree_map(lambda leaf: torch.full_like(leaf, math.nan), ask.params)
    )
    used.engine.answer(spoiled, 1)
    assert isinstance(used.engine, Vectorized)
    before = {name: leaf.data_ptr() for name, leaf in used.engine._gradient.items()}
    found, wanted = (simulation.engine.answer(ask, 1).deltas for simulation in (used, fresh))
    assert all(
        torch.equal(found[name], leaf) and leaf.isfinite().all() for name, leaf in wanted.items()
    )
    assert before == {name: leaf.data_ptr() for name, leaf in used.engine._gradient.items()} != {}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gradient_can_be_taken_of_what_training_leaves(
    engine: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the steps run in torch's inference mode.

    Some clients have fewer steps than their chunk.
    """
    monkeypatch.setattr(Vectorized, "chunk_size", lambda self, ask: size)
    simulation = federation.simulation("fednova", engine=engine)
    state = simulation.loop.state
    ask = Ask("train", (0, 1, 3, 5), state.params, state.buffers, {"fednova": {}}, {"fednova": {}})
    reply = simulation.engine.answer(ask, 1)
    left = [
        *flatten({"deltas": reply.deltas, "upload": reply.upload}).values(),
        reply.loss,
        reply.steps,
    ]
    assert not any(leaf.is_inference() for leaf in left)


def test_replies_come_back_in_the_order_of_the_ask() -> None:
    """Though the engine sorts by length: clients 1, 3, 4, 5 have 4, 12, 2 and 9 samples."""
    replies = []
    for engine in ("sequential", "vectorized"):
        simulation = federation.simulation("ccn", dtype=torch.float64, engine=engine)
        ask = Ask(
            "train",
            (1, 3, 4, 5),
            simulation.loop.state.params,
            simulation.loop.state.buffers,
            {"ccn": {}},
            {"ccn": {}},
        )
        replies.append(simulation.engine.answer(ask, 1))
    a, b = replies
    assert a.clients == b.clients == (1, 3, 4, 5)
    assert a.n.tolist() == b.n.tolist() == [4, 12, 2, 9]
    assert a.steps.tolist() == b.steps.tolist() == [2.0, 6.0, 2.0, 6.0]
    close(b.deltas, a.deltas)
    torch.testing.assert_close(b.loss, a.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(b.upload["ccn"]["z"], a.upload["ccn"]["z"], rtol=1e-6, atol=0)


@dataclass(frozen=True)
class Sends(Component):
    """Sends the client's model beside the model. Made in 2026 for a test."""

    name: ClassVar[str] = "sends"

    def report(self, trace: Trace, client: Client) -> Answer:
        return Answer({"w": trace.params})

    def step(self, server: Server) -> Change:
        sent, deltas = server.replies.upload["w"], server.replies.deltas
        return Change(
            metrics={"start": {key: (leaf - deltas[key])[0] for key, leaf in sent.items()}}
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_is_sent_of_a_model_stays_when_the_models_become_differences(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "sends", Sends)
    simulation = federation.simulation(
        "sends", dtype=torch.float64, engine=engine, rounds=1, cohort=1
    )
    start = simulation.loop.state.params
    found = simulation.run().tensors
    close({key: found[f"sends/start/{key}"][0] for key in start}, start)


def test_chunks_are_of_similar_lengths_and_no_larger_than_asked() -> None:
    """Steps 1, 2 | 3, 5, 6, 6 | 13; of at most three: 1, 2 | 3, 5, 6 | 6 | 13."""
    lengths = [6, 1, 13, 5, 2, 3, 6]
    assert chunks(lengths, 9) == [[1, 4], [5, 3, 0, 6], [2]]
    assert chunks(lengths, 3) == [[1, 4], [5, 3, 0], [6], [2]]
    assert chunks(lengths, 9, math.inf) == [[1, 4, 5, 3, 0, 6, 2]]


def test_how_many_clients_move_at_a_time() -> None:
    """All of 2, 2 and 9 steps: 13 steps in 2 + 9.

    One of them: 13 / 3 on average, and 2 * (1 - (2/3)^2) + 9 / 3.

    The share of a group of two of which somebody is drawn is 5/9, as if they were drawn one by one.
    """
    assert mean_parallel_clients([2, 2, 9], 3) == pytest.approx(13 / 11)
    assert mean_parallel_clients([2, 2, 9], 1) == pytest.approx((13 / 3) / (2 * 5 / 9 + 3))
    assert mean_parallel_clients([4] * 50, 10) == pytest.approx(40 / (4 * (1 - 0.8**50)))


def test_the_choice_of_an_engine() -> None:
    """By whether a model is dense and how many clients move at a time."""
    cpu, dense = torch.device("cpu"), build("mlp", (6,), 3)
    assert choose_engine("auto", dense, cpu, 10.0)[0] == "vectorized"
    assert choose_engine("auto", dense, cpu, 1.2) == (
        "sequential",
        "a dense model on a CPU, but side by side only 1.2 clients move at a time",
    )
    assert choose_engine("auto", build("cnn", (1, 8, 8), 3), cpu, 10.0)[0] == "sequential"
    assert choose_engine("auto", dense, torch.device("cuda"), 1.2)[0] == "vectorized"
    assert choose_engine("sequential", dense, cpu, 10.0) == ("sequential", "as asked")


@pytest.mark.parametrize("kind", ["logistic_regression", "mlp", "batch_norm", "projection"])
@pytest.mark.parametrize("train", [True, False])
def test_a_dense_network_takes_several_clients_trees(kind: str, train: bool) -> None:
    """Outputs, buffers and gradients are those of each client by itself, whose batch is padded or
    not."""
    options = {"batch_norm": {"batch_norm": True}, "projection": {"projection": 4}}.get(kind, {})
    made = build(
        "logistic_regression" if kind == "logistic_regression" else "mlp", (1, 4, 2), 3, options
    )
    assert made.dense
    generator = torch.Generator().manual_seed(0)
    models = [
        tree_map(torch.Tensor.double, {"p": p, "b": b})
        for p, b in (made.init(generator) for _ in range(3))
    ]
    x = torch.randn(3, 5, 1, 4, 2, generator=generator, dtype=torch.float64)
    mask = (
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool() if train else None
    )
    stacked = stack(models)
    params = {key: leaf.requires_grad_() for key, leaf in stacked["p"].items()}
    out = made(params, stacked["b"], x, train, mask, axes=1)
    weights = torch.randn(out.logits.shape, generator=generator, dtype=torch.float64)
    weights = weights if mask is None else weights * mask.unsqueeze(-1)
    grads = torch.autograd.grad((out.logits * weights).sum(), list(params.values()))
    for k, model in enumerate(models):
        n = 5 if mask is None else int(mask[k].sum())
        own = {key: leaf.requires_grad_() for key, leaf in model["p"].items()}
        alone = made(own, model["b"], x[k, :n], train)
        torch.testing.assert_close(out.logits[k, :n], alone.logits, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.features[k, :n], alone.features, rtol=1e-10, atol=1e-12)
        close({key: leaf[k] for key, leaf in out.buffers.items()}, alone.buffers)
        wanted = torch.autograd.grad((alone.logits * weights[k, :n]).sum(), list(own.values()))
        for found, one in zip(grads, wanted, strict=True):
            torch.testing.assert_close(found[k], one, rtol=1e-9, atol=1e-11)


def test_padding_marks_what_is_real() -> None:
    """Two clients, 3 and 1 samples in batches of 2."""
    orders = [Order(np.array([5, 6, 7]), (2, 1)), Order(np.array([9]), (1,))]
    index, mask = padded(orders)
    assert index.tolist() == [[[5, 6], [7, 0]], [[9, 0], [0, 0]]]
    assert mask.tolist() == [[[True, True], [True, False]], [[True, False], [False, False]]]
