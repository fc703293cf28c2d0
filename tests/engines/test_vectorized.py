"""The vectorized engine: chunks, padding, order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.trees import n_bytes, tree_map
from fedml_noniid.engines import vectorized
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.simulation import AUTO, choose_engine, mean_parallel_clients
from fedml_noniid.engines.vectorized import Vectorized, chunks
from fedml_noniid.models import build
from tests import federation


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("scaffold+fnr", 1), ("scaffold+fnr", 3), ("rfedavg", 2), ("ccn+fednlr", 2)],
)
def test_chunks_of_any_size_give_the_same_result(recipe: str, size: int) -> None:
    """Other chunks pad to other lengths, so up to rounding."""
    how = {"dtype": torch.float64, "batch_norm": True, "engine": "vectorized", "cohort": 5}
    whole = federation.simulation(recipe, **how)
    out = whole.run()
    parts = federation.simulation(recipe, **how, clients_at_once=size)
    again = parts.run()
    for part in ("params", "evaluated", "buffers"):
        close(getattr(again, part), getattr(out, part))
    close(
        flatten(parts.engine.clients.memory.whole()), flatten(whole.engine.clients.memory.whole())
    )
    assert [row["bytes_up"] for row in again.rows] == [row["bytes_up"] for row in out.rows]


def test_the_size_of_the_model_bounds_the_clients_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight copies of a client's model; twice that with a model of its own."""
    copy = n_bytes(federation.simulation("fedavg").loop.state.params)
    monkeypatch.setattr(vectorized, "MODEL_BYTES", 33 * copy)
    for recipe, at_once in (("fedavg", 4), ("ditto", 2)):
        engine = federation.simulation(recipe, engine="vectorized").engine
        assert isinstance(engine, Vectorized) and engine.at_once == at_once


@pytest.mark.parametrize("size", [2, 4])
def test_memory_that_is_used_again_leaves_no_trace(size: int) -> None:
    """Not even NaN.

    Gradients lie where those of the last chunk did, of this round or the one before.
    """
    used, fresh = (
        federation.simulation("fedavg", engine="vectorized", clients_at_once=size) for _ in range(2)
    )
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
def test_a_gradient_can_be_taken_of_what_training_leaves(engine: str, size: int) -> None:
    """Though the steps run in torch's inference mode.

    Some clients have fewer steps than their chunk.
    """
    simulation = federation.simulation("fednova", engine=engine, clients_at_once=size)
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
    dense, cnn = build("mlp", (6,), 3), build("cnn", (1, 8, 8), 3)
    assert choose_engine("auto", dense, 2.0)[0] == "vectorized", "two are enough"
    engine, why = choose_engine("auto", dense, 1.2)
    assert engine == "sequential" and "1.2 clients" in why
    assert choose_engine("auto", cnn, 10.0)[0] == "sequential"
    for asked in ("sequential", "vectorized"):
        assert choose_engine(asked, dense, 1.2)[0] == choose_engine(asked, cnn, 1.2)[0] == asked


def test_the_page_has_the_engines_that_auto_takes() -> None:
    page = Path("docs/performance.md").read_text().split("## Which engine runs")[1].split("##")[0]
    rows = [row.split("|")[2].strip() for row in page.splitlines() if row.startswith("| ")][1:]
    assert rows == [engine for engine, _ in AUTO.values()]
