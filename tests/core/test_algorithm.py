"""Composition and the round as a generator of Asks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from fedml_noniid.core.algorithm import Algorithm, RoundResult, State
from fedml_noniid.core.component import (
    Ask,
    Asks,
    Change,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Public,
    Replies,
    Reply,
    Server,
    Setting,
    overrides,
)
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.sums import weighted_mean, weighted_sum
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Tree, add, row_norms, scale, tree_map
from fedml_noniid.models.networks import mlp
from fedml_noniid.plugins.registry import METHODS, build
from tests.recipe_table import (
    BASES,
    PAIRS,
    PAPERS,
    PRIVATE,
    READINGS,
    REPORTED,
    UNSOUND,
    settings,
)

SETTING = Setting(n_clients=4, cohort=3, optimizer="sgd", lr=0.1, n_public=10)


@dataclass(frozen=True)
class Halves(Component):
    """Weights client k by 2^-k."""

    name: ClassVar[str] = "halves"

    def weigh(self, server: Server) -> Tensor:
        return torch.tensor([0.5**k for k in range(len(server.replies.clients))])


@dataclass(frozen=True)
class Counts(Component):
    """Counts rounds, and what it was shown."""

    name: ClassVar[str] = "counts"

    def init_server(self, server: Server) -> Tree:
        return {"rounds": torch.zeros(())}

    def step(self, server: Server) -> Change:
        return Change(
            {"rounds": server.state["rounds"] + 1}, metrics={"round": torch.tensor(server.round)}
        )


@dataclass(frozen=True)
class Doubles(Component):
    """Moves the server twice as far."""

    name: ClassVar[str] = "doubles"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP, Exclusive.DRIFT})

    def step(self, server: Server) -> Change:
        return Change(params=add(server.params, scale(2, server.update)))


@dataclass(frozen=True)
class Uniform(Component):
    """Uniform weights."""

    name: ClassVar[str] = "uniform"

    weights: Literal["size", "uniform"] = "uniform"


@dataclass(frozen=True)
class Inquires(Component):
    """Asks once at each point where it may."""

    name: ClassVar[str] = "asks"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.REFINEMENT, Exclusive.CLASSIFIER}
    )
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(begin=1, round=2, finish=1)

    def init_server(self, server: Server) -> Tree:
        return {"seen": torch.zeros(1)}

    def refine(self, server: Server) -> Asks:
        yield Ask("trained", server.cohort[:1])
        return replace(server.replies, deltas=tree_map(torch.zeros_like, server.replies.deltas))

    def survey(self, server: Server) -> Asks:
        yield Ask("surveyed", server.cohort, server.params)
        return Change({"seen": torch.ones(1) + server.round})

    def finish(self, server: Server) -> Asks:
        yield Ask("finished", server.cohort, server.params)
        return Change(params=scale(3, server.params))


WEIGHTS, BUFFERS = {"w": torch.tensor([10.0])}, {"mean": torch.tensor([0.0])}
TASK = Task(mlp((2,), 2), SGD(0.1))


def server(round_: int = 1, cohort: tuple[int, ...] = (0, 2, 5)) -> Server:
    return Server(TASK, WEIGHTS, BUFFERS, round_, 6, cohort=cohort, keys=torch.tensor(0))


def reply(ask: Ask) -> Reply:
    """Clients 0, 2, 5 with 1, 2 and 1 samples move by 1, 2 and 5."""
    m = len(ask.to)
    moved = {"w": torch.tensor([[1.0], [2.0], [5.0]])} if ask.job == "train" else {}
    buffers = {"mean": torch.tensor([[4.0], [8.0], [0.0]])} if ask.job == "train" else {}
    return Reply(
        ask.to, moved, buffers, {}, torch.tensor([1, 2, 1])[:m], torch.ones(m), torch.zeros(m)
    )


def play(
    asks: Generator[Ask, Reply, Any], answer: Callable[[Ask], Reply] = reply
) -> tuple[list[Ask], Any]:
    """(what was asked, what came out)."""
    said: list[Ask] = []
    try:
        ask = next(asks)
        while True:
            said.append(ask)
            ask = asks.send(answer(ask))
    except StopIteration as stop:
        return said, stop.value


def started(*components: Component) -> tuple[Algorithm, State]:
    algorithm = Algorithm.compose(components, SETTING)
    return algorithm, algorithm.init(server(0))


def round_of(*components: Component) -> tuple[list[Ask], RoundResult]:
    algorithm, state = started(*components)
    return play(algorithm.round(state, server()))


def test_fedavg_is_the_empty_set() -> None:
    """10 + 1/4 * 1 + 2/4 * 2 + 1/4 * 5 = 12.5; buffers 1/4 * 4 + 2/4 * 8 = 5."""
    said, done = round_of()
    assert [(ask.job, ask.to) for ask in said] == [("train", (0, 2, 5))]
    assert said[0].params == WEIGHTS and said[0].buffers == BUFFERS
    assert done.state.params["w"].tolist() == [12.5] and done.evaluated is None
    assert done.state.buffers["mean"].tolist() == [5.0]
    assert Algorithm().name == "fedavg"


def test_one_uniform_component_makes_the_weights_uniform() -> None:
    """10 + (1 + 2 + 5) / 3; buffers likewise."""
    _, done = round_of(Uniform(), Counts())
    assert done.state.params["w"].item() == pytest.approx(10 + 8 / 3)
    assert done.state.buffers["mean"].item() == pytest.approx(4.0)


def test_factors_multiply_the_weights_and_the_core_divides_by_the_sum() -> None:
    """Uniform, then factors 1, 1/2, 1/4: weights 4/7, 2/7, 1/7. 10 + (4 + 4 + 5) / 7."""
    for order in permutations((Uniform(), Halves())):
        assert round_of(*order)[1].state.params["w"].item() == pytest.approx(10 + 13 / 7)


def test_the_owner_of_the_servers_step_says_where_it_ends() -> None:
    """10 + 2 * 2.5; every other component still sees w_t and the update."""
    _, done = round_of(Doubles(), Counts())
    assert done.state.params["w"].tolist() == [15.0]
    assert done.state.slices["counts"]["rounds"] == 1 and done.metrics["counts"] == {"round": 1}


def test_what_learns_goes_on_from_the_new_model_which_is_then_the_evaluated_one() -> None:
    @dataclass(frozen=True)
    class Averages(Doubles):
        def step(self, server: Server) -> Change:
            return super().step(server)._replace(evaluated=server.start)

    @dataclass(frozen=True)
    class Learns(Component):
        name: ClassVar[str] = "learns"
        exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_LEARNING})

        def init_server(self, server: Server) -> Tree:
            return {"learned": torch.zeros(1)}

        def learn(self, server: Server) -> Change:
            return Change(
                {"learned": torch.ones(1)}, scale(2, server.params), scale(2, server.buffers)
            )

    _, done = round_of(Averages(), Learns())
    assert done.state.params["w"].tolist() == [30.0] and done.evaluated is None
    assert done.state.buffers["mean"].tolist() == [10.0]
    assert done.state.slices["learns"]["learned"].tolist() == [1.0]


def test_a_component_may_ask_at_every_point() -> None:
    algorithm, state = started(Inquires())
    said, state = play(algorithm.begin(state, server(0)))
    assert [(ask.owner, ask.job) for ask in said] == [("asks", "surveyed")] and said[
        0
    ].params is state.params
    assert state.slices["asks"]["seen"].tolist() == [1.0], "round 0"
    said, done = play(algorithm.round(state, server()))
    assert [(ask.owner, ask.job, ask.to) for ask in said] == [
        ("", "train", (0, 2, 5)),
        ("asks", "trained", (0,)),
        ("asks", "surveyed", (0, 2, 5)),
    ]
    assert done.state.params["w"].tolist() == [10.0], (
        "the update is over the replies as `refine` left them"
    )
    assert done.trained["w"].tolist() == [[1.0], [2.0], [5.0]], (
        "and those of training are still there"
    )
    assert said[2].params is done.state.params, "`survey` sees the new model"
    assert done.state.slices["asks"]["seen"].tolist() == [2.0]
    said, final = play(algorithm.finish(done.state, server()))
    assert [ask.job for ask in said] == ["finished"] and final.params["w"].tolist() == [30.0]
    assert algorithm.exchanges == Exchanges(begin=1, round=3, finish=1)


@pytest.mark.parametrize(
    ("part", "words"),
    [("replies", "from `refine`"), ("weights", "from `average`"), ("base", "from `average`")],
)
def test_what_a_round_has_not_reached_is_absent_and_says_so(part: str, words: str) -> None:
    with pytest.raises(RecipeError, match=rf"server\.{part} is there {words}"):
        getattr(server(), part).sum()


UNSHARED = {
    (kept, other)
    for kept in ("fedper", "fedrep")
    for other in ("fedbabu", "fed3r", "fedrs", "fedgen", "ccvr")
}
NOTHING_LEFT = [{"linear_probe", other} for other in ("fedbabu", "fedper", "fedrep")]


def test_every_pair_is_composed_or_refused_with_a_reason() -> None:
    alone = {name: build(name, {}, SETTING).components[0] for name in METHODS}
    for a, b in permutations(METHODS, 2):
        if "fedproto" in (a, b) and not any(alone[one].needs.pooled for one in (a, b)):
            words = "takes no local step" if "fed3r" in (a, b) else "averages no model"
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*{words}"):
                build(f"{a}+{b}", {}, SETTING)
            continue
        shared = alone[a].exclusive & alone[b].exclusive
        if alone[a].needs.pooled or alone[b].needs.pooled:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*no clients"):
                build(f"{a}+{b}", {}, SETTING)
        elif alone[a].needs.no_training or alone[b].needs.no_training:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*no local step"):
                build(f"{a}+{b}", {}, SETTING)
        elif {a, b} in NOTHING_LEFT:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*be averaged"):
                build(f"{a}+{b}", {}, SETTING)
        elif any(
            alone[one].needs.personal
            and (alone[other].needs.whole_models or (one, other) in UNSHARED)
            for one, other in ((a, b), (b, a))
        ):
            with pytest.raises(
                RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*keeps the [a-z ]+ on the clients"
            ):
                build(f"{a}+{b}", {}, SETTING)
        elif any(
            alone[one].needs.personal and overrides(alone[other], "own_model")
            for one, other in ((a, b), (b, a))
        ):
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*tested with one"):
                build(f"{a}+{b}", {}, SETTING)
        elif any(
            (alone[one].needs.personal_first and alone[other].needs.steps)
            or (
                Exclusive.START in alone[one].exclusive
                and (Exclusive.DRIFT in alone[other].exclusive or alone[other].needs.steps)
            )
            for one, other in ((a, b), (b, a))
        ):
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*a client's way"):
                build(f"{a}+{b}", {}, SETTING)
        elif "dpsgd" in (a, b) and any(
            needs.local_set or needs.last_epoch or needs.gradient or own
            for needs, own in (
                (alone[one].needs, overrides(alone[one], "own_model")) for one in (a, b)
            )
        ):
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*without that noise"):
                build(f"{a}+{b}", {}, SETTING)
        elif "dpfedavg" in (a, b) and any(
            alone[one].needs.replies > Replies.SUMS
            or overrides(alone[one], "answer")
            or overrides(alone[one], "weigh")
            for one in (a, b)
        ):
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*bounded update"):
                build(f"{a}+{b}", {}, SETTING)
        elif shared:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*both own") as error:
                build(f"{a}+{b}", {}, SETTING)
            assert all(word in str(error.value) for claim in shared for word in claim.value)
        else:
            assert {c.name for c in build(f"{a}+{b}", {}, SETTING).components} == {a, b}


@pytest.mark.parametrize(("pair", "words"), UNSOUND.items())
def test_unsound_pairs_are_refused(pair: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(pair, {}, SETTING)


def test_every_other_pair_with_a_paper_composes() -> None:
    """And so do the combinations that the papers report."""
    assert {*PAPERS, *BASES, *READINGS, *PRIVATE, "centralised"} == set(METHODS)
    for recipe in (*PAIRS, *REPORTED):
        found = build(recipe, settings(recipe), SETTING)
        assert found.name == "+".join(sorted(recipe.split("+")))
    assert set(REPORTED) <= {*PAIRS, *PAPERS}


def test_the_needs_of_a_recipe_are_those_of_its_components_together() -> None:
    @dataclass(frozen=True)
    class Own(Component):
        name: ClassVar[str] = "own"
        needs: ClassVar[Needs] = Needs(local_set=True, public=Public.UNLABELLED, shared=0.25)

    @dataclass(frozen=True)
    class Last(Component):
        name: ClassVar[str] = "last"
        needs: ClassVar[Needs] = Needs(
            public=Public.LABELLED, last_epoch=True, fixed_classifier=True, shared=0.5
        )

    together = Needs(True, Public.LABELLED, True, False, 0.5, True)
    assert Algorithm.compose([Own(), Last()], SETTING).needs == together
    assert Algorithm().needs == Needs()


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Needs(pooled=True), "may not leave their silos"),
        (Needs(public=Public.TEST_SET), "trains on the test set"),
    ],
)
def test_what_only_a_simulation_may_do_is_refused_on_real_silos(needs: Needs, words: str) -> None:
    leaking = dataclass(frozen=True)(
        type("Leaking", (Component,), {"name": "leaking", "needs": needs})
    )
    Algorithm.compose([leaking()], SETTING)
    with pytest.raises(RecipeError, match=rf"'leaking' .*{words}"):
        Algorithm.compose([leaking()], SETTING._replace(deployed=True))


@pytest.mark.parametrize(
    ("needs", "reads"),
    [
        (Replies.SUMS, lambda server: server.replies.upload["z"] + 1),
        (Replies.SUMS, lambda server: 2 * server.replies.upload["z"][0]),
        (Replies.SUMS, lambda server: row_norms(server.replies.deltas)),
        (Replies.SUMS, lambda server: weighted_sum(server.weights, server.trained)),
        (Replies.SUMS, lambda server: weighted_sum(None, server.trained)),
        (Replies.SUMS, lambda server: weighted_sum(server.omega, server.replies.upload)),
        (Replies.SCALARS, lambda server: server.replies.deltas["w"].norm()),
        (Replies.SCALARS, lambda server: [*server.client_models()]),
        (Replies.SCALARS, lambda server: torch.stack([server.replies.deltas["w"]])),
        (Replies.SCALARS, lambda server: torch.ones(3) @ server.trained["w"]),
    ],
)
def test_a_method_sees_of_the_replies_what_it_declares(needs: Replies, reads: Any) -> None:
    @dataclass(frozen=True)
    class Reads(Component):
        name: ClassVar[str] = "reads"

        declared: Replies = Replies.SUMS

        @property
        def needs(self) -> Needs:
            return Needs(replies=self.declared, unweighted=True)

        def step(self, server: Server) -> Change:
            assert weighted_sum(None, server.replies.upload)["z"].item() == 6
            assert weighted_mean(server.omega, server.trained)["w"].item() == 2.5
            reads(server)
            return Change()

    def answer(ask: Ask) -> Reply:
        return replace(reply(ask), upload={"reads": {"z": torch.tensor([1.0, 2.0, 3.0])}})

    for declared in Replies:
        algorithm, state = started(Reads(declared))
        if declared > needs:
            play(algorithm.round(state, server()), answer)
        else:
            with pytest.raises(
                RecipeError, match=r"declares that it needs sums(, and measures .*)?; allowed: "
            ):
                play(algorithm.round(state, server()), answer)


def test_who_replaces_models_needs_them() -> None:
    @dataclass(frozen=True)
    class Refines(Inquires):
        needs: ClassVar[Needs] = Needs(replies=Replies.SCALARS)

    with pytest.raises(RecipeError, match=r"replaces clients' models in `refine`; allowed: with"):
        Algorithm.compose([Refines()], SETTING)
