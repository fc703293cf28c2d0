"""Composition and the round as a generator of Asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from plugins.core.algorithm import Algorithm
from plugins.core.component import (
    CLAIMS,
    Ask,
    Asks,
    Component,
    Desk,
    Exchanges,
    RecipeError,
    Reply,
    Server,
    Setting,
    Stage,
    Update,
)
from plugins.core.optimizers import SGD
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, scale, tree_map
from plugins.models.networks import mlp
from plugins.recipes import METHODS, build
from tests.recipe_table import BASES, PAIRS, PAPERS, REPORTED, UNSOUND

SETTING = Setting(n_clients=4, cohort=3, n_classes=2, feature_size=2, optimizer="sgd", lr=0.1, n_public=10)


@dataclass(frozen=True)
class Adds(Component):
    """Adds to the direction."""

    name: ClassVar[str] = "adds"
    claims: ClassVar[frozenset[str]] = frozenset({"sum"})

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        return tree_map(lambda d: d + 1, direction), state


@dataclass(frozen=True)
class Doubles(Component):
    """Multiplies the direction."""

    name: ClassVar[str] = "a_doubles"  # alphabetically before "adds"
    stage: ClassVar[Stage] = Stage.SCALE

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        return scale(2, direction), state


@dataclass(frozen=True)
class AlsoAdds(Component):
    """Owns the same thing as `Adds`."""

    name: ClassVar[str] = "also"
    claims: ClassVar[frozenset[str]] = frozenset({"sum", "difference"})


@dataclass(frozen=True)
class Inquires(Component):
    """Asks once at each point where it may."""

    name: ClassVar[str] = "asks"

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=1, round=2, finish=1)

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        yield Ask("asks.begin", clients, {}, {}, {}, {})
        return server

    def after_train(self, server: Server, replies: Reply) -> Asks:
        yield Ask("asks.trained", replies.clients[:1], {}, {}, {}, {})
        return replies._replace(params=tree_map(torch.zeros_like, replies.params))

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        yield Ask("asks.stepped", update.replies.clients, server.params, {}, {}, {})
        return server._replace(state=server.state | {"asks": {"seen": torch.ones(1)}})

    def finish(self, server: Server, clients: tuple[int, ...], desk: Desk) -> Asks:
        yield Ask("asks.finish", clients, {}, {}, {}, {})
        return server


DESK = Desk(Task(mlp((2,), 2), SGD(0.1)), None, torch.tensor(0), (2,))
SERVER = Server({"w": torch.tensor([10.0])}, {"mean": torch.tensor([0.0])}, {})


def reply(ask: Ask) -> Reply:
    """Clients 0, 2, 5 with 1, 2 and 1 samples end at 11, 12 and 15."""
    m = len(ask.to)
    trained = {"w": torch.tensor([[11.0], [12.0], [15.0]])} if ask.job == "train" else {}
    buffers = {"mean": torch.tensor([[4.0], [8.0], [0.0]])} if ask.job == "train" else {}
    return Reply(ask.to, trained, buffers, {}, torch.tensor([1, 2, 1])[:m], torch.ones(m), torch.zeros(m), {})


def play(asks: Asks, answer: Callable[[Ask], Reply] = reply) -> tuple[list[Ask], object]:
    """(what was asked, what came out)."""
    said: list[Ask] = []
    try:
        ask = next(asks)
        while True:
            said.append(ask)
            ask = asks.send(answer(ask))
    except StopIteration as stop:
        return said, stop.value


def round_of(*components: Component) -> tuple[list[Ask], Server, Params]:
    algorithm = Algorithm.compose(components)
    server = SERVER._replace(state={c.name: {} for c in components})
    said, out = play(algorithm.round(server, (0, 2, 5), DESK))
    after, evaluated, *_ = out  # type: ignore[misc]  # what `round` returns
    return said, after, evaluated


def test_fedavg_is_the_empty_set() -> None:
    """10 + 1/4 * 1 + 2/4 * 2 + 1/4 * 5 = 12.5; buffers 1/4 * 4 + 2/4 * 8 = 5."""
    said, server, evaluated = round_of()
    assert [(ask.job, ask.to) for ask in said] == [("train", (0, 2, 5))]
    assert server.params["w"].tolist() == evaluated["w"].tolist() == [12.5]
    assert server.buffers["mean"].tolist() == [5.0]
    assert Algorithm().name == "fedavg"


def test_stages_add_then_multiply() -> None:
    """(2.5 + 1) * 2 = 7, although "a_doubles" sorts before "adds"."""
    for order in permutations((Adds(), Doubles())):
        assert round_of(*order)[1].params["w"].tolist() == [17.0]


def test_one_uniform_component_makes_the_weights_uniform() -> None:
    """10 + (1 + 2 + 5) / 3; buffers likewise."""

    @dataclass(frozen=True)
    class Uniform(Component):
        name: ClassVar[str] = "uniform"
        weighting: ClassVar[str] = "uniform"

    _, server, _ = round_of(Uniform(), Adds())
    assert server.params["w"].item() == pytest.approx(10 + 8 / 3 + 1)
    assert server.buffers["mean"].item() == pytest.approx(4.0)


def test_the_evaluated_model_is_the_plain_average_where_a_component_says_so() -> None:
    @dataclass(frozen=True)
    class Averages(Doubles):
        evaluates_average: ClassVar[bool] = True

    _, server, evaluated = round_of(Averages())
    assert server.params["w"].tolist() == [15.0]
    assert evaluated["w"].tolist() == [12.5]


def test_a_component_may_ask_at_every_point() -> None:
    algorithm = Algorithm.compose([Inquires()])
    server = SERVER._replace(state={"asks": {}})
    assert [ask.job for ask in play(algorithm.begin(server, (0, 1)))[0]] == ["asks.begin"]
    said, after, _ = round_of(Inquires())
    assert [(ask.job, ask.to) for ask in said] == [
        ("train", (0, 2, 5)), ("asks.trained", (0,)), ("asks.stepped", (0, 2, 5)),
    ]  # fmt: skip
    assert after.params["w"].tolist() == [0.0], "the average is over the replies as `after_train` left them"
    assert said[2].params is after.params, "`after_step` sees the new model"
    assert after.state["asks"]["seen"].tolist() == [1.0]
    assert [ask.job for ask in play(algorithm.finish(after, after.params, (0, 1), DESK))[0]] == ["asks.finish"]
    assert algorithm.exchanges(3) == Exchanges(begin=1, round=3, finish=1)


def test_what_finishes_goes_on_from_the_evaluated_model() -> None:
    """Also a component that asks nobody; without one, sent and evaluated model stay what they are."""

    @dataclass(frozen=True)
    class Triples(Component):
        name: ClassVar[str] = "triples"

        def finish(self, server: Server, clients: tuple[int, ...], desk: Desk) -> Asks:
            return server._replace(params=scale(3, server.params))
            yield

    evaluated = {"w": torch.tensor([7.0])}
    said, (server, final) = play(Algorithm.compose([Triples()]).finish(SERVER, evaluated, (0, 1), DESK))  # type: ignore[misc]  # what `finish` returns
    assert said == [] and server.params is final and final["w"].tolist() == [21.0]
    _, (server, final) = play(Algorithm.compose([Adds()]).finish(SERVER, evaluated, (0, 1), DESK))  # type: ignore[misc]  # what `finish` returns
    assert server is SERVER and final is evaluated


def test_a_round_changes_nothing_that_was_passed_in() -> None:
    round_of(Adds(), Doubles())
    assert SERVER.params["w"].tolist() == [10.0]
    assert SERVER.buffers["mean"].tolist() == [0.0]
    assert SERVER.state == {}


def test_models_are_there_from_average_on_only_where_a_component_reads_them() -> None:
    seen: list[Params] = []

    @dataclass(frozen=True)
    class Looks(Component):
        name: ClassVar[str] = "looks"

        def measure(self, state: Tree, update: Update) -> Tree:
            seen.append(update.replies.params)
            assert update.deltas["w"].tolist() == [[1.0], [2.0], [5.0]]
            return {}

    @dataclass(frozen=True)
    class Reads(Component):
        name: ClassVar[str] = "reads"
        reads_models: ClassVar[bool] = True

    round_of(Looks())
    round_of(Looks(), Reads())
    assert seen[0] == {}
    assert seen[1]["w"].tolist() == [[11.0], [12.0], [15.0]]


def test_two_claims_on_one_thing_are_refused_with_both_names_and_the_reason() -> None:
    with pytest.raises(RecipeError) as error:
        Algorithm.compose([AlsoAdds(), Adds()])
    message = str(error.value)
    assert "'adds'" in message
    assert "'also'" in message
    assert "sum" in message
    assert "difference" not in message
    assert "\n" not in message


@pytest.mark.parametrize("pair", ["rfedavg+rfedavg_plus", "rfedavg_plus+rfedavg"])
def test_two_feature_regularisers_are_refused(pair: str) -> None:
    with pytest.raises(RecipeError, match=r"'rfedavg' and 'rfedavg_plus'.*feature distribution regulariser"):
        build(pair, {}, SETTING)


def test_a_component_twice_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"names 'adds' twice"):
        Algorithm.compose([Adds(), Adds()])


@pytest.mark.parametrize("recipe", ["scaffold+fnr+ccn", "fednnnn+fednlr+fedprox", "rfedavg_plus+ccn"])
def test_a_recipe_is_a_set(recipe: str) -> None:
    algorithms = [build("+".join(order), {}, SETTING) for order in permutations(recipe.split("+"))]
    assert all(algorithm == algorithms[0] for algorithm in algorithms)
    assert algorithms[0].name == "+".join(sorted(recipe.split("+")))


def test_every_pair_is_composed_or_refused_with_a_reason() -> None:
    alone = {name: build(name, {}, SETTING).components[0] for name in METHODS}
    assert {claim for c in alone.values() for claim in c.claims} <= set(CLAIMS), "each claim has its reason"
    for a, b in permutations(METHODS, 2):
        shared = alone[a].claims & alone[b].claims
        if alone[a].pools or alone[b].pools:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*no clients"):
                build(f"{a}+{b}", {}, SETTING)
        elif shared:
            with pytest.raises(RecipeError, match=rf"^(?=.*'{a}')(?=.*'{b}').*both own") as error:
                build(f"{a}+{b}", {}, SETTING)
            assert all(claim in str(error.value) and CLAIMS[claim] in str(error.value) for claim in shared)
        else:
            assert {c.name for c in build(f"{a}+{b}", {}, SETTING).components} == {a, b}


@pytest.mark.parametrize(("pair", "words"), UNSOUND.items())
def test_unsound_pairs_are_refused(pair: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        build(pair, {}, SETTING)


def test_every_other_pair_with_a_paper_composes() -> None:
    """And so do the combinations that the papers report."""
    assert set(PAPERS) | set(BASES) | {"centralised"} == set(METHODS)
    for recipe in (*PAIRS, *REPORTED):
        assert build(recipe, {}, SETTING).name == "+".join(sorted(recipe.split("+")))
    assert set(REPORTED) <= {*PAIRS, *PAPERS}


def test_a_job_belongs_to_the_component_that_it_names() -> None:
    algorithm = build("fnr+rfedavg_plus", {"fnr": {"epochs": 3, "batch_size": 7}}, SETTING)
    assert algorithm.owner("fnr.refine").name == "fnr"
    assert algorithm.public_steps("train") is None
    assert algorithm.public_steps("rfedavg_plus.map") is None
    steps = algorithm.public_steps("fnr.refine")
    assert steps is not None
    assert (steps.epochs, steps.batch_size) == (3, 7)
    assert algorithm.passes == {"own", "public"}


def test_weights_stay_in_float64_and_sum_to_one() -> None:
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Looks(Component):
        name: ClassVar[str] = "looks"

        def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
            seen.append(update.weights)
            return direction, state

    round_of(Looks())
    assert seen[0].dtype == torch.float64
    assert seen[0].tolist() == [0.25, 0.5, 0.25]
