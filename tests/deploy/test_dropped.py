"""A defence drops answers of silos: every recipe goes on, and the memories of server and silos stay
together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.trees import Tree
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.wire import Down
from tests.deploy import world
from tests.recipe_table import PARAMETERS
from tests.recipe_table import settings as table

N = len(world.SIZES)
Drop = Callable[
    [int, Ask], Collection[int]
]  # (round, Ask) -> the clients whose answers are dropped


@dataclass
class Said:
    """One exchange."""

    round: int
    ask: Ask
    sent: dict[int, Tree]  # by client, dropped or not
    kept: dict[int, Tree]
    before: list[Tree]  # the silos' memories


@dataclass
class Ran:
    server_run: ServerRun
    silos: list[Silo]
    said: list[Said]

    def state(self, name: str) -> Tree:
        return self.server_run.loop.state.slices[name]

    def memory(self, name: str) -> Tree:
        """Of all silos, leaves [N, ...]."""
        found = [silo.engine.clients.memory.whole()[name] for silo in self.silos]
        return {
            key: {p: torch.cat([m[key][p] for m in found]) for p in found[0][key]}
            for key in found[0]
        }


def nobody(round_: int, ask: Ask) -> tuple[int, ...]:
    return ()


def setup(
    recipe: str, methods: dict, cohort: int = 0, rounds: int = 3
) -> tuple[ServerRun, list[Silo]]:
    terms = world.terms(recipe, methods, False, cohort, rounds)
    return ServerRun(terms, world.shards_of()[0]), world.silos_of(terms)


def over_the_wire(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


def upload(client: int, silo: Silo, down: Down) -> wire.Up:
    return over_the_wire(wire.up(client, down.exchange, silo.answer(over_the_wire(down))))


def memories(silos: list[Silo]) -> list[Tree]:
    return [pickle.loads(pickle.dumps(silo.engine.clients.memory.whole())) for silo in silos]


def run(recipe: str, methods: dict, drop: Drop = nobody, cohort: int = 0, rounds: int = 3) -> Ran:
    server_run, silos = setup(recipe, methods, cohort, rounds)
    said, down = [], server_run.down
    while down.ask is not None:
        before = memories(silos)
        ups = {k: upload(k, silo, down) for k, silo in enumerate(silos)}
        sent = server_run.open(ups)
        kept = {k: reply for k, reply in sent.items() if k not in drop(down.round, down.ask)}
        said.append(Said(down.round, down.ask, sent, kept, before))
        down = server_run.feed(kept)
    for silo in silos:
        silo.answer(over_the_wire(down))  # the last message asks nothing, and says who was counted
    return Ran(server_run, silos, said)


def plan(**dropped: dict[int, Collection[int]]) -> Drop:
    """What is dropped by job and round."""
    return lambda round_, ask: dropped.get(ask.job, {}).get(round_, ())


# Silo 0 is dropped in the first round, 2 in the second and the last.
TRAINING = plan(train={1: {0}, 2: {2}, 3: {2}})


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def refined(method: str) -> dict:
    return {method: PARAMETERS[method], "fnr": PARAMETERS["fnr"]}


def with_and_without_fnr(method: str) -> list:
    alone, both = {method: PARAMETERS[method]}, refined(method)
    return [
        pytest.param(method, alone, TRAINING, 0, id="training"),
        pytest.param(method, alone, plan(train={1: {0, 1}, 2: {1, 2}}), 2, id="some rest"),
        pytest.param(f"{method}+fnr", both, TRAINING, 0, id="fnr-training"),
        pytest.param(f"{method}+fnr", both, drop_one_refined, 0, id="fnr-refinement"),
        pytest.param(
            f"{method}+fnr",
            both,
            lambda t, ask: drop_one_refined(t, ask) or TRAINING(t, ask),
            0,
            id="fnr-both",
        ),
    ]


def drop_one_refined(round_: int, ask: Ask) -> tuple[int, ...]:
    return ask.to[:1] if wire.name(ask) == "fnr.refine" and len(ask.to) > 1 else ()


def leave_one(drop: Drop) -> Drop:
    """The same, but one silo that was asked is left."""
    return lambda t, ask: sorted(set(ask.to) & set(drop(t, ask)))[: len(ask.to) - 1]


@pytest.mark.parametrize(("recipe", "methods", "drop", "cohort"), with_and_without_fnr("scaffold"))
def test_scaffolds_c_is_the_mean_of_all_c_i(
    recipe: str, methods: dict, drop: Drop, cohort: int
) -> None:
    """All begin at 0, and c moves by (1/N) sum over S of c_i's change (line 17)."""
    ran = run(recipe, methods, leave_one(drop), cohort)
    c, c_i = ran.state("scaffold")["c"], ran.memory("scaffold")["c_i"]
    for key, leaf in c.items():
        assert leaf.abs().max() > 1e-3, "the example moves"
        close(leaf, c_i[key].mean(0))


def moves(ran: Ran) -> dict[str, torch.Tensor]:
    """sum over rounds of w_k - w_t, where the server counted the training, [N, ...]."""
    found = {key: torch.zeros(N, *leaf.shape) for key, leaf in ran.said[0].ask.params.items()}
    for said in ran.said:
        if said.ask.job == "train":
            for k, reply in said.kept.items():
                for key, total in found.items():
                    total[k] += reply["deltas"][key]
    return found


@pytest.mark.parametrize(("recipe", "methods", "drop", "cohort"), with_and_without_fnr("feddyn"))
def test_feddyns_h_is_the_mean_of_all_g_k(
    recipe: str, methods: dict, drop: Drop, cohort: int
) -> None:
    """g_k = -alpha sum (w_k - w_t) and h = -(alpha/N) sum over k of the same, over what was
    counted."""
    ran = run(recipe, methods, leave_one(drop), cohort)
    alpha = methods["feddyn"]["alpha"]
    h, g = ran.state("feddyn")["h"], ran.memory("feddyn")["g"]
    for key, total in moves(ran).items():
        assert total.abs().max() > 1e-3, "the example moves"
        close(g[key], -alpha * total)
        close(h[key], -alpha * total.mean(0))


@pytest.mark.parametrize(("recipe", "methods", "drop", "cohort"), with_and_without_fnr("feddc"))
def test_feddcs_means_are_those_of_all_drifts(
    recipe: str, methods: dict, drop: Drop, cohort: int
) -> None:
    """h_k = sum (w_k - w_t) over what was counted; the server has the means of all h_k and
    Delta_k."""
    ran = run(recipe, methods, leave_one(drop), cohort)
    state, memory = ran.state("feddc"), ran.memory("feddc")
    for key, total in moves(ran).items():
        close(memory["h"][key], total)
        close(state["h"][key], total.mean(0))
        close(state["Delta"][key], memory["Delta"][key].mean(0))


@pytest.mark.parametrize("recipe", ["scaffold", "feddyn", "feddc", "moon"])
def test_a_silo_that_was_dropped_goes_back_to_the_memory_from_before(recipe: str) -> None:
    """To the bit; the others' memories move."""
    ran = run(recipe, table(recipe), plan(train={2: {1}}), rounds=2)
    before, after = ran.said[-1].before, memories(ran.silos)

    def same(k: int) -> bool:
        a, b = (
            torch.cat([leaf.flatten() for leaf in wire.flatten(of[k]).values()])
            for of in (before, after)
        )
        return torch.equal(a, b)

    assert [same(k) for k in range(N)] == [False, True, False]


def test_a_message_that_comes_twice_is_answered_alike_twice() -> None:
    """FedML may send one twice; the memory moves once."""
    server_run, (silo, *_) = setup("scaffold", {})
    # Over the wire: the next answer's update lies in the memory of this one's.
    first, second = (over_the_wire(silo.answer(over_the_wire(server_run.down))) for _ in range(2))
    assert all(
        torch.equal(leaf, wire.flatten(second)[key]) for key, leaf in wire.flatten(first).items()
    )
    dc, c_i = (
        first["upload"]["scaffold"]["dc"],
        silo.engine.clients.memory.whole()["scaffold"]["c_i"],
    )
    assert all(torch.equal(leaf, c_i[key][0]) for key, leaf in dc.items())  # c_i was 0


def test_nothing_is_left_of_a_training_that_does_not_count() -> None:
    """A refinement goes on from the training of its round, so that of a dropped one is thrown
    away."""
    server_run, silos = setup("fnr", {"fnr": PARAMETERS["fnr"]})
    ups = {k: upload(k, silo, server_run.down) for k, silo in enumerate(silos)}
    replies = server_run.open(ups)
    del replies[1]
    down = server_run.feed(replies)
    assert down.counted == {0: 0, 2: 0}
    for silo in silos:
        silo.answer(down)
    assert [bool(silo.engine.clients.trained) for silo in silos] == [True, False, True]


def test_a_dropped_refinement_counts_as_the_model_of_phase_1() -> None:
    """w = w_t + sum n_k/n (w_k - w_t), where w_k is refined if that came through.

    floor(3 * 0.7) = 2 are asked, one is dropped.
    """
    ran = run("fnr", {"fnr": PARAMETERS["fnr"]}, drop_one_refined, rounds=1)
    train, refine = ran.said
    assert len(refine.ask.to) == 2
    dropped, (passed,) = refine.ask.to[0], refine.kept
    n = torch.tensor(world.SIZES, dtype=torch.float64)
    for key, leaf in ran.server_run.loop.state.params.items():
        deltas = [(refine.kept if k == passed else train.kept)[k]["deltas"][key] for k in range(N)]
        moved = torch.tensordot((n / n.sum()).float(), torch.stack(deltas), dims=1)
        close(leaf, train.ask.params[key] + moved)
        assert not torch.equal(
            refine.sent[dropped]["deltas"][key], train.sent[dropped]["deltas"][key]
        )
    tensors = ran.server_run.loop.outcome.tensors
    assert tensors["fnr/refined"][0].tolist() == [k == passed for k in range(N)]
    assert tensors["fnr/delta"][0].any(1).tolist() == [k == passed for k in range(N)]


def lowest(round_: int, ask: Ask) -> tuple[int, ...]:
    return ask.to[:1] if len(ask.to) > 1 else ()


def test_feddyns_alphas_stay_with_their_clients() -> None:
    """alpha_k = alpha / (n_k / mean n) over the sizes 17 and 70 that are known; alpha for the
    third."""
    ran = run("feddyn_authors", {"feddyn_authors": {"alpha": 0.3}}, plan(count={0: {1}}))
    close(
        ran.state("feddyn_authors")["alpha"], torch.tensor([0.3 * 43.5 / 17, 0.3, 0.3 * 43.5 / 70])
    )


def test_a_client_without_delta_0_has_the_mean_of_the_others() -> None:
    """Rather than 0, which would count as a mean feature of nothing."""
    ran = run("rfedavg", {"rfedavg": {"lam": 0.01}}, plan(map={0: {1}}), rounds=1)
    first, train = ran.said[:2]
    mapped = {k: reply["upload"]["rfedavg"]["delta"] for k, reply in first.kept.items()}
    others = train.ask.each["rfedavg"]["others"]  # [M, N - 1, d]
    assert torch.equal(others[0][1], mapped[2])
    close(others[0][0], (mapped[0] + mapped[2]) / 2)


def test_what_was_dropped_has_travelled_all_the_same() -> None:
    """Every silo sent a model in every round."""
    full, less = run("fedavg", {}), run("fedavg", {}, lowest)
    for key in ("bytes_up", "bytes_down"):
        assert [row[key] for row in full.server_run.loop.rows] == [
            row[key] for row in less.server_run.loop.rows
        ]
