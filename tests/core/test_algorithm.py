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
    Change,
    Component,
    Needs,
    Replies,
    Reply,
    Server,
    Setting,
)
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.sums import weighted_mean, weighted_sum
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import row_norms
from fedml_noniid.models.networks import mlp
from fedml_noniid.plugins.registry import METHODS, build
from tests.recipe_table import (
    PAIRS,
    PAPERS,
    PARAMETERS,
    REPORTED,
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
class Uniform(Component):
    """Uniform weights."""

    name: ClassVar[str] = "uniform"

    weights: Literal["size", "uniform"] = "uniform"


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


def test_factors_multiply_the_weights_and_the_core_divides_by_the_sum() -> None:
    """Uniform, then factors 1, 1/2, 1/4: weights 4/7, 2/7, 1/7. 10 + (4 + 4 + 5) / 7."""
    for order in permutations((Uniform(), Halves())):
        assert round_of(*order)[1].state.params["w"].item() == pytest.approx(10 + 13 / 7)


@pytest.mark.parametrize(
    ("part", "words"),
    [("replies", "from `refine`"), ("weights", "from `average`"), ("base", "from `average`")],
)
def test_what_a_round_has_not_reached_is_absent_and_says_so(part: str, words: str) -> None:
    with pytest.raises(RecipeError, match=rf"server\.{part} is there {words}"):
        getattr(server(), part).sum()


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


def test_the_models_of_clients_have_their_own_buffers() -> None:
    """w_t = 10 plus each update."""
    replies = reply(Ask("train", (0, 2, 5)))
    now = replace(server(), start=WEIGHTS, replies=replies)
    models = [(w["w"].item(), buffers["mean"].item()) for w, buffers in now.client_models()]
    assert models == [(11.0, 4.0), (12.0, 8.0), (15.0, 0.0)]
