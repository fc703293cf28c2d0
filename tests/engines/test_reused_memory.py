"""Engines use the memory of updates again. What a method keeps of them stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Trace,
)
from fedml_noniid.core.trees import Tree, row, tree_map
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.core.test_foreign_methods import WAYS

COHORT = 4
# With equal clients, the vectorized engine has one chunk.
EQUAL = federation.federation(sizes=(5,) * 6)


def behind(tree: Tree) -> Tree:
    """Views that begin behind the first number of each leaf, so that they have other addresses."""
    return tree_map(lambda leaf: leaf.reshape(-1)[1:], tree)


@dataclass(frozen=True)
class Keeps(Component):
    """Keeps a round's deltas, and views of them, without a copy."""

    name: ClassVar[str] = "keeps"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)
    seen: ClassVar[list[dict[str, Tree]]] = []  # copies of what each round's `step` had

    def init_server(self, server: Server) -> Tree:
        stacked = tree_map(lambda leaf: leaf.expand(COHORT, *leaf.shape).clone(), server.params)
        return {"whole": stacked, "part": behind(stacked)}

    def report(self, trace: Trace, client: Client) -> Answer:
        return Answer(upload=behind(trace.params))

    def step(self, server: Server) -> Change:
        deltas = server.replies.deltas
        models = tree_map(lambda delta, w: delta + w, deltas, server.start)
        flat = tree_map(lambda leaf: leaf.reshape(COHORT, -1)[:, 1:], models)
        kept = {"whole": deltas, "part": behind(deltas)}
        noted = {"last": server.state, "now": kept, "sent": server.replies.upload, "w": flat}
        self.seen.append(tree_map(torch.clone, noted))
        return Change(kept, evaluated=row(deltas, 0))


@pytest.mark.parametrize("how", WAYS, ids=["sequential", "workers", "vectorized"])
def test_a_method_that_keeps_updates_sees_those_of_the_last_round(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "keeps", Keeps)
    Keeps.seen.clear()
    simulation = federation.simulation("keeps", data=EQUAL, cohort=COHORT, **how)
    evaluated: list[Tree] = []
    for _ in simulation.rounds():
        assert simulation.loop.evaluated is not None
        evaluated.append(simulation.loop.evaluated)
    for before, after in zip(Keeps.seen, Keeps.seen[1:], strict=False):
        torch.testing.assert_close(after["last"], before["now"], rtol=0, atol=0)
    for end, model in zip(Keeps.seen, evaluated, strict=True):
        torch.testing.assert_close(model, row(end["now"]["whole"], 0), rtol=0, atol=0)
        # Models become differences in place, behind the upload.
        torch.testing.assert_close(end["sent"], end["w"], rtol=0, atol=1e-6)
