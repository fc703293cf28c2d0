"""Where a method needs sums, the order in which clients' answers are added up changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedml_noniid.core.component import Ask, Replies, Reply, Setting
from fedml_noniid.core.trees import row
from fedml_noniid.plugins import registry
from tests import federation
from tests.recipe_table import EVERY
from tests.walks import thinned

SETTING = Setting(n_clients=7, cohort=4, n_public=10)
ORDERS = 6
ADDED = {
    name: entry
    for name, entry in EVERY.items()
    if registry.build(*entry, SETTING).needs.replies == Replies.SUMS
}


class Shuffled:
    """An engine whose answers come in another order."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine, self.clients = engine, engine.clients
        self.generator = torch.Generator().manual_seed(seed)

    def answer(self, ask: Ask, round_: int) -> Reply:
        reply = self.engine.answer(ask, round_)
        order = torch.randperm(len(reply.clients), generator=self.generator)
        parts = {key: leaves for key, leaves in vars(reply).items() if key != "clients"}
        assert parts.pop("distinct") is None, "a method that needs sums has no buckets"
        return Reply(tuple(reply.clients[i] for i in order.tolist()), **row(parts, order))


@pytest.mark.parametrize("entry", thinned(ADDED, 0, 4))
def test_any_order_gives_the_same_bits(entry: str) -> None:
    recipe, methods = ADDED[entry]
    expected = federation.run(recipe, methods, batch_norm=True, rounds=2)
    for seed in range(ORDERS if recipe in ("fedavg", "scaffold") else 2):
        simulation = federation.simulation(recipe, methods, batch_norm=True, rounds=2)
        simulation.engine = Shuffled(simulation.engine, seed)
        assert federation.equal_models(simulation.run(), expected)


def test_what_needs_more_than_sums_is_not_claimed() -> None:
    assert "scaffold" in ADDED and "ccn" not in ADDED and "fnr" not in ADDED
