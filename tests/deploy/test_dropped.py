"""A defence drops answers of silos: the memories of server and silos stay together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.trees import Tree
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines.hashing import weights_sha256
from tests.deploy import world
from tests.recipe_table import settings as table

N = len(world.SIZES)
Drop = Callable[[int, Ask], Collection[int]]  # the clients whose answers are dropped in a round


class Exchange(NamedTuple):
    ask: Ask
    kept: dict[int, Tree]  # by client
    before: list[str]  # the silos' memories


def setup(recipe: str, rounds: int) -> tuple[ServerRun, list[Silo]]:
    terms = world.terms(recipe, table(recipe), rounds=rounds)
    return ServerRun(terms, world.shards_of()[0]), world.silos_of(terms)


def over_the_wire(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


def memories(silos: list[Silo]) -> list[str]:
    return [weights_sha256(wire.flatten(silo.engine.clients.memory.whole())) for silo in silos]


def run(recipe: str, drop: Drop, rounds: int) -> tuple[ServerRun, list[Silo], list[Exchange]]:
    server, silos = setup(recipe, rounds)
    exchanges = []
    while (down := server.down).ask is not None:
        before = memories(silos)
        answers = [silo.answer(over_the_wire(down)) for silo in silos]
        ups = {k: wire.up(k, down.exchange, answer) for k, answer in enumerate(answers)}
        replies, dropped = server.open(over_the_wire(ups)), drop(down.round, down.ask)
        kept = {k: reply for k, reply in replies.items() if k not in dropped}
        exchanges.append(Exchange(down.ask, kept, before))
        server.feed(kept)
    for silo in silos:  # the last message asks nothing, and says who was counted
        silo.answer(over_the_wire(server.down))
    return server, silos, exchanges


def one(round_: int, ask: Ask) -> Collection[int]:
    """Silo 0 in the first round, 2 in the others; the first one of a refinement."""
    if ask.job == "train":
        return {0} if round_ == 1 else {2}
    return ask.to[:1] if wire.name(ask) == "fnr.refine" and len(ask.to) > 1 else ()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recipe", ["scaffold", "scaffold+fnr"])
def test_scaffolds_c_is_the_mean_of_all_c_i(recipe: str) -> None:
    """All begin at 0, and c moves by (1/N) sum over S of c_i's change (line 17)."""
    server, silos, _ = run(recipe, one, rounds=3)
    memory = [silo.engine.clients.memory.whole()["scaffold"]["c_i"] for silo in silos]
    for key, leaf in server.loop.state.slices["scaffold"]["c"].items():
        assert leaf.abs().max() > 1e-3, "the example moves"
        close(leaf, torch.cat([c_i[key] for c_i in memory]).mean(0))


@pytest.mark.parametrize("recipe", ["scaffold", "feddyn", "feddc", "moon"])
def test_a_silo_that_was_dropped_goes_back_to_the_memory_from_before(recipe: str) -> None:
    """To the bit; the others' memories move."""
    _, silos, exchanges = run(recipe, lambda t, _: {1} if t == 2 else (), rounds=2)
    pairs = zip(exchanges[-1].before, memories(silos), strict=True)
    assert [before == after for before, after in pairs] == [False, True, False]


def test_a_message_that_comes_twice_is_answered_alike_twice() -> None:
    """FedML may send one twice; the memory moves once."""
    server, (silo, *_) = setup("scaffold", rounds=1)
    # Over the wire: the next answer's update lies in the memory of this one's.
    first, second = (over_the_wire(silo.answer(over_the_wire(server.down))) for _ in range(2))
    assert weights_sha256(wire.flatten(first)) == weights_sha256(wire.flatten(second))
    c_i = silo.engine.clients.memory.whole()["scaffold"]["c_i"]  # which was 0
    dc = first["upload"]["scaffold"]["dc"]
    assert all(torch.equal(leaf, c_i[key][0]) for key, leaf in dc.items())


def test_nothing_is_left_of_a_training_that_does_not_count() -> None:
    """A refinement goes on from the training of its round, so that of a dropped one is thrown
    away."""
    server, silos = setup("fnr", rounds=1)
    ups = {k: wire.up(k, 0, silo.answer(server.down)) for k, silo in enumerate(silos)}
    down = server.feed({k: reply for k, reply in server.open(ups).items() if k != 1})
    assert down.counted == {0: 0, 2: 0}
    for silo in silos:
        silo.answer(down)
    assert [bool(silo.engine.clients.trained) for silo in silos] == [True, False, True]


def test_a_dropped_refinement_counts_as_the_model_of_phase_1() -> None:
    """w = w_t + sum n_k/n (w_k - w_t), where w_k is refined if that came through.

    floor(3 * 0.7) = 2 are asked, one is dropped.
    """

    def refinement(round_: int, ask: Ask) -> Collection[int]:
        return () if ask.job == "train" else one(round_, ask)

    server, _, (train, refine) = run("fnr", refinement, rounds=1)
    (passed,) = refine.kept
    n = torch.tensor(world.SIZES, dtype=torch.float64)
    for key, leaf in server.loop.state.params.items():
        deltas = [(refine.kept if k == passed else train.kept)[k]["deltas"][key] for k in range(N)]
        moved = torch.tensordot((n / n.sum()).float(), torch.stack(deltas), dims=1)
        close(leaf, train.ask.params[key] + moved)
    refined = server.loop.outcome.tensors["fnr/refined"]
    assert refined[0].tolist() == [k == passed for k in range(N)]
