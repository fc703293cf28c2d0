"""The vectorized engine: chunks, padding, order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.component import Ask
from plugins.core.trees import flatten, n_bytes
from plugins.data.batches import Order, padded
from plugins.engines.vectorized import Vectorized
from tests import federation

RECIPES = ["fedavg", "scaffold+fnr", "rfedavg", "ccn+fednlr"]


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_of_any_size_give_the_same_result(recipe: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other chunks pad to other lengths, so up to rounding."""
    whole = federation.simulation(recipe, dtype=torch.float64, batch_norm=True, engine="vectorized", cohort=5)
    out = whole.run()
    monkeypatch.setattr(Vectorized, "chunk_size", lambda self, ask: size)
    parts = federation.simulation(recipe, dtype=torch.float64, batch_norm=True, engine="vectorized", cohort=5)
    again = parts.run()
    for part in ("params", "evaluated", "buffers"):
        close(getattr(again, part), getattr(out, part))
    close(flatten(parts.engine.clients.memory), flatten(whole.engine.clients.memory))
    assert [row["bytes_up"] for row in again.rows] == [row["bytes_up"] for row in out.rows]


def test_a_memory_bound_of_one_client_is_kept_by_going_one_by_one() -> None:
    simulation = federation.simulation("fedavg", engine="vectorized")
    assert isinstance(simulation.engine, Vectorized)
    ask = Ask("train", (0, 1, 2, 3), simulation.server.params, simulation.server.buffers, {}, {})
    simulation.engine.memory_mb = 0
    assert simulation.engine.chunk_size(ask) == 1
    simulation.engine.memory_mb = 1
    one = simulation.engine.chunk_size(ask)
    simulation.engine.memory_mb = 8
    assert simulation.engine.chunk_size(ask) == pytest.approx(8 * one, rel=0.01)
    assert one * n_bytes(simulation.server.params) <= 1 << 20, "the models of a chunk fit into the bound"


def test_a_tight_bound_gives_the_same_result() -> None:
    """Through `memory_mb` itself."""
    bounded = federation.simulation("scaffold", dtype=torch.float64, engine="vectorized")
    assert isinstance(bounded.engine, Vectorized)
    bounded.engine.memory_mb = 0
    close(bounded.run().params, federation.run("scaffold", dtype=torch.float64, engine="vectorized").params)


def test_replies_come_back_in_the_order_of_the_ask() -> None:
    """Though the engine sorts by length: clients 1, 3, 4, 5 have 4, 12, 2 and 9 samples."""
    replies = []
    for engine in ("sequential", "vectorized"):
        simulation = federation.simulation("ccn", dtype=torch.float64, engine=engine)
        ask = Ask("train", (1, 3, 4, 5), simulation.server.params, simulation.server.buffers, {"ccn": {}}, {"ccn": {}})
        replies.append(simulation.engine.answer(ask, 1))
    a, b = replies
    assert a.clients == b.clients == (1, 3, 4, 5)
    assert a.n.tolist() == b.n.tolist() == [4, 12, 2, 9]
    assert a.steps.tolist() == b.steps.tolist() == [2.0, 6.0, 2.0, 6.0]
    close(b.params, a.params)
    torch.testing.assert_close(b.loss, a.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(b.upload["ccn"]["z"], a.upload["ccn"]["z"], rtol=1e-6, atol=0)


def test_padding_marks_what_is_real() -> None:
    """Two clients, 3 and 1 samples in batches of 2."""
    orders = [Order(np.array([5, 6, 7]), (2, 1)), Order(np.array([9]), (1,))]
    index, mask = padded(orders)
    assert index.tolist() == [[[5, 6], [7, 0]], [[9, 0], [0, 0]]]
    assert mask.tolist() == [[[True, True], [True, False]], [[True, False], [False, False]]]


def test_a_client_alone_equals_itself_among_longer_ones() -> None:
    """Client 0 takes 2 steps of one sample; beside client 3 it is padded to 6 steps of 4."""
    simulation = federation.simulation("fedavg", dtype=torch.float64, batch_norm=True, engine="vectorized")
    server = simulation.server
    alone = simulation.engine.answer(Ask("train", (0,), server.params, server.buffers, {}, {}), 1)
    among = simulation.engine.answer(Ask("train", (0, 3), server.params, server.buffers, {}, {}), 1)
    assert alone.steps.tolist() == [2.0]
    assert among.steps.tolist() == [2.0, 6.0]
    close({k: leaf[0] for k, leaf in among.params.items()}, {k: leaf[0] for k, leaf in alone.params.items()})
    close({k: leaf[0] for k, leaf in among.buffers.items()}, {k: leaf[0] for k, leaf in alone.buffers.items()})
