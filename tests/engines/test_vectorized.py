"""The vectorized engine: chunks, padding, order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.component import (
    Ask,
)
from fedml_noniid.plugins.core.trees import n_bytes, tree_map
from fedml_noniid.plugins.data.batches import Order, padded
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.simulation import choose_engine, mean_parallel_clients
from fedml_noniid.plugins.engines.vectorized import Vectorized, chunks
from fedml_noniid.plugins.models import build
from tests import federation


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", ["fedavg", "scaffold+fnr", "rfedavg", "ccn+fednlr"])
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
    close(
        flatten(parts.engine.clients.memory.whole()), flatten(whole.engine.clients.memory.whole())
    )
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
    assert mean_parallel_clients(np.array([2, 2, 9]), 3) == pytest.approx(13 / 11)
    assert mean_parallel_clients(np.array([2, 2, 9]), 1) == pytest.approx(
        (13 / 3) / (2 * 5 / 9 + 3)
    )
    assert mean_parallel_clients(np.array([4] * 50), 10) == pytest.approx(40 / (4 * (1 - 0.8**50)))


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


def test_a_dense_network_with_a_projection_takes_several_clients_trees() -> None:
    model = build("mlp", (6,), federation.N_CLASSES, {"hidden": 5, "projection": 4})
    assert model.dense
    options = {"dtype": torch.float64, "model": model}
    vectorized, alone = (
        federation.run("moon", engine=engine, **options) for engine in ("vectorized", "sequential")
    )
    close(vectorized.params, alone.params)


def test_padding_marks_what_is_real() -> None:
    """Two clients, 3 and 1 samples in batches of 2."""
    orders = [Order(np.array([5, 6, 7]), (2, 1)), Order(np.array([9]), (1,))]
    index, mask = padded(orders)
    assert index.tolist() == [[[5, 6], [7, 0]], [[9, 0], [0, 0]]]
    assert mask.tolist() == [[[True, True], [True, False]], [[True, False], [False, False]]]
