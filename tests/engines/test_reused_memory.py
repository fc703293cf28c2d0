"""Engines use the memory of updates again. What a method keeps of them stays as it was."""

from __future__ import annotations

from dataclasses import dataclass, field
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

COHORT = 4
OF = federation.federation(
    sizes=(5,) * 6
)  # with equal clients, the vectorized engine has one chunk
ENGINES = pytest.mark.parametrize(
    "how",
    [{"engine": "sequential"}, {"engine": "sequential", "workers": 2}, {"engine": "vectorized"}],
    ids=["sequential", "workers", "vectorized"],
)


@dataclass
class Seen:
    """Copies of what each round's `step` was given."""

    deltas: list[Tree] = field(default_factory=list)
    last: list[Tree] = field(default_factory=list)
    uploads: list[tuple[Tree, Tree]] = field(
        default_factory=list
    )  # w_k: as uploaded, and from its delta


def clone(tree: Tree) -> Tree:
    return tree_map(torch.clone, tree)


def behind(tree: Tree) -> Tree:
    """Views that begin behind the first number of each leaf, so that they have other addresses."""
    return tree_map(lambda leaf: leaf.reshape(-1)[1:], tree)


def keeper() -> tuple[type[Component], Seen]:
    """A method that keeps a round's deltas, and views of them, without a copy."""
    seen = Seen()

    @dataclass(frozen=True)
    class Keeps(Component):
        name: ClassVar[str] = "keeps"
        exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})
        needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)

        def init_server(self, server: Server) -> Tree:
            stacked = tree_map(lambda leaf: leaf.expand(COHORT, *leaf.shape).clone(), server.params)
            return {"last": {"whole": stacked, "part": behind(stacked)}}

        def report(self, trace: Trace, client: Client) -> Answer:
            return Answer(upload=behind(trace.params))

        def step(self, server: Server) -> Change:
            deltas = server.replies.deltas
            models = tree_map(lambda delta, w: delta + w, deltas, server.start)
            flat = tree_map(lambda leaf: leaf.reshape(COHORT, -1)[:, 1:], models)
            seen.uploads.append((clone(server.replies.upload), flat))
            seen.last.append(clone(server.state["last"]))
            seen.deltas.append(clone(deltas))
            kept = {"whole": deltas, "part": behind(deltas)}
            first = next(iter(deltas.values()))
            return Change({"last": kept}, evaluated=row(deltas, 0), metrics={"first": first})

    return Keeps, seen


@ENGINES
def test_a_method_that_keeps_updates_sees_those_of_the_last_round(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, seen = keeper()
    monkeypatch.setitem(METHODS, "keeps", kind)
    simulation = federation.simulation("keeps", of=OF, cohort=COHORT, **how)
    evaluated: list[tuple[Tree, Tree]] = []
    for _ in simulation.rounds():
        found = simulation.loop.evaluated
        assert found is not None
        evaluated.append((found, clone(found)))
    for before, given in zip(seen.deltas, seen.last[1:], strict=False):
        tree_map(assert_same, {"whole": before, "part": behind(before)}, given)
    for now, was in evaluated:
        tree_map(assert_same, was, now)
    for uploaded, model in seen.uploads:  # models become differences in place, behind the upload
        tree_map(lambda a, b: assert_same(a, b, atol=1e-6), uploaded, model)
    name = next(iter(seen.deltas[0]))
    assert_same(
        torch.stack([delta[name] for delta in seen.deltas]),
        simulation.outcome.tensors["keeps/first"],
    )


def assert_same(a: torch.Tensor, b: torch.Tensor, atol: float = 0.0) -> torch.Tensor:
    torch.testing.assert_close(b, a, rtol=0, atol=atol)
    return a
