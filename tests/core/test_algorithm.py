"""Composition and the round as a generator of Asks."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import combinations, permutations
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
)
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.sums import weighted_mean, weighted_sum
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Tree, add, row_norms, scale, tree_map
from fedml_noniid.models.networks import mlp
from fedml_noniid.plugins.registry import METHODS, build
from tests.recipe_table import (
    PAIRS,
    PAPERS,
    PARAMETERS,
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


REFUSED: dict[str, str] = UNSOUND | {
    "centralised+fedprox": "no clients",
    "fed3r+scaffold": "no local step",
    "fed3r+fedproto": "no local step",
    "fedbabu+linear_probe": "be averaged",
    "fedper+fedbabu": "keeps the classifier on the clients",
    "fedbn+feddf": "keeps the batch norms on the clients",
    "ditto+fedbn": "tested with one",
    "fedala+scaffold": "a client's way",
    "fedrep+fednova": "a client's way",
    "dpsgd+fedsam": "without that noise",
    "dpsgd+fedrs": "without that noise",
    "dpsgd+ditto": "without that noise",
    "dpfedavg+ccn": "bounded update",
    "dpfedavg+ccvr": "bounded update",
    "dpfedavg+qfedavg": "bounded update",
}


@pytest.mark.parametrize(("pair", "words"), REFUSED.items())
def test_what_can_not_be_combined_is_refused_with_the_reason(pair: str, words: str) -> None:
    a, b = pair.split("+")
    for recipe in (pair, f"{b}+{a}"):
        with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*{words}"):
            build(recipe, {}, SETTING)


def test_every_pair_is_composed_or_refused_in_words() -> None:
    """Two that own one thing are always refused."""
    setting = SETTING._replace(n_clients=9, cohort=6)  # Krum and others need some
    exclusive = {name: build(name, {}, setting).components[0].exclusive for name in METHODS}
    refused: dict[tuple[str, str], str] = {}
    for a, b in combinations(METHODS, 2):
        try:
            assert {c.name for c in build(f"{a}+{b}", {}, setting).components} == {a, b}
        except RecipeError as error:
            refused[a, b] = str(error)
    for (a, b), words in refused.items():
        assert re.match(rf"^(?=.*'{a}')(?=.*'{b}').*can't be combined: .*drop one", words)
    owners = {pair for pair in combinations(METHODS, 2) if exclusive[pair[0]] & exclusive[pair[1]]}
    assert owners <= refused.keys()


def test_every_other_pair_with_a_paper_composes() -> None:
    """And so do the combinations that the papers report."""
    assert {*PARAMETERS, "centralised"} == set(METHODS)
    for recipe in (*PAIRS, *REPORTED):
        found = build(recipe, settings(recipe), SETTING)
        assert found.name == "+".join(sorted(recipe.split("+")))
    assert set(REPORTED) <= {*PAIRS, *PAPERS}


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
