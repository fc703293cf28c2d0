"""A component that does not declare what it takes, or does not claim what it owns, is told what to
add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import (
    OWNS,
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Public,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.plugins.core.optimizers import Optimizer
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.trees import Params, Tree
from fedml_noniid.plugins.recipes import METHODS
from tests import federation

SETTING = Setting(n_clients=6, cohort=4, n_public=15)
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def run(kind: type[Component], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setitem(METHODS, kind.name, kind)
    federation.run(kind.name, rounds=1, **options)


def made(hook: str, does: Callable[..., Any], **more: Any) -> type[Component]:
    """A component whose hook does this."""
    return dataclass(frozen=True)(type("Made", (Component,), {"name": "made", hook: does, **more}))


@dataclass(frozen=True)
class ReadsOwn(Component):
    """Reads the whole local set."""

    name: ClassVar[str] = "reads"

    def report(self, trace: Trace, client: Client) -> Answer:
        return Answer({"counts": client.local_set.class_counts(3)})


@dataclass(frozen=True)
class ReadsPublic(Component):
    """Reads the public split on the client."""

    name: ClassVar[str] = "reads"

    def prepare(self, client: Client) -> Tree:
        return {"mean": client.public.mean(lambda batch: {"x": batch.x})["x"]}


@dataclass(frozen=True)
class ReadsPublicOnTheServer(Component):
    """Reads the public split on the server."""

    name: ClassVar[str] = "reads"

    def step(self, server: Server) -> Change:
        return Change(metrics={"mean": server.public.x.mean()})


@dataclass(frozen=True)
class ReadsFeatures(Component):
    """Reads the features of the last epoch."""

    name: ClassVar[str] = "reads"

    def report(self, trace: Trace, client: Client) -> Answer:
        return Answer({"z": trace.features.clone()})


@pytest.mark.parametrize(
    "use",
    [iter, len, lambda own: own[0], lambda own: own.n],
    ids=["iter", "len", "item", "attribute"],
)
def test_what_is_absent_says_why_in_every_use(use: Callable[[Any], object]) -> None:
    with pytest.raises(RecipeError, match=r"Needs\(local_set=True\)"):
        use(Client.local_set)


READS = [
    (ReadsOwn, Needs(local_set=True), r"client\.local_set .*Needs\(local_set=True\)"),
    (ReadsPublic, Needs(public=Public.UNLABELLED), r"client\.public .*Needs\(public=\.\.\.\)"),
    (
        ReadsPublicOnTheServer,
        Needs(public=Public.UNLABELLED),
        r"server\.public .*Needs\(public=\.\.\.\)",
    ),
    (ReadsFeatures, Needs(last_epoch=True), r"trace\.features .*Needs\(last_epoch=True\)"),
]


@ENGINES
@pytest.mark.parametrize(
    ("kind", "needs", "words"), READS, ids=[kind.__name__ for kind, *_ in READS]
)
def test_what_is_read_must_be_declared(
    kind: type[Component], needs: Needs, words: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(kind, monkeypatch, engine=engine)
    run(type("Declares", (kind,), {"needs": needs}), monkeypatch, engine=engine)


@ENGINES
@pytest.mark.parametrize(
    ("kind", "needs", "words"), READS, ids=[kind.__name__ for kind, *_ in READS]
)
def test_what_another_component_declares_does_not_help(
    kind: type[Component], needs: Needs, words: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = Needs(local_set=True, public=Public.LABELLED, last_epoch=True)
    declares = dataclass(frozen=True)(
        type("Declares", (Component,), {"name": "declares", "needs": everything})
    )
    monkeypatch.setitem(METHODS, "declares", declares)
    monkeypatch.setitem(METHODS, kind.name, kind)
    with pytest.raises(RecipeError, match=words):
        federation.run(f"declares+{kind.name}", rounds=1, engine=engine)


@dataclass(frozen=True)
class Logits(Component):
    name: ClassVar[str] = "made"

    def logits(self, logits: Tensor, w: Params, client: Client) -> Tensor:
        return 2 * logits


@dataclass(frozen=True)
class Refine(Component):
    name: ClassVar[str] = "made"

    def refine(self, server: Server) -> Asks:
        return server.replies
        yield Ask("none", ())


@dataclass(frozen=True)
class Average(Component):
    name: ClassVar[str] = "made"

    def average(self, server: Server) -> Params:
        return server.params


@dataclass(frozen=True)
class Learn(Component):
    name: ClassVar[str] = "made"

    def learn(self, server: Server) -> Change:
        return Change(params=server.params)


@dataclass(frozen=True)
class Finish(Component):
    name: ClassVar[str] = "made"

    def finish(self, server: Server) -> Asks:
        return Change(params=server.params)
        yield Ask("none", ())


OWNERS: dict[str, type[Component]] = {
    "logits": Logits,
    "refine": Refine,
    "average": Average,
    "learn": Learn,
    "finish": Finish,
}


@pytest.mark.parametrize("hook", OWNS)
def test_overriding_what_only_one_may_own_is_refused_when_composed(hook: str) -> None:
    kind, claim = OWNERS[hook], OWNS[hook]
    with pytest.raises(
        RecipeError, match=rf"'made' changes the {claim.value[0]} .*add {claim} to `exclusive`"
    ):
        Algorithm.compose([kind()], SETTING)
    Algorithm.compose([type("Claims", (kind,), {"exclusive": frozenset({claim})})()], SETTING)


@dataclass(frozen=True)
class BringsAnOptimizer(Component):
    name: ClassVar[str] = "made"

    def optimizer(self, given: Optimizer) -> Optimizer:
        return given


@dataclass(frozen=True)
class StartsWarm(Component):
    name: ClassVar[str] = "made"

    def warm_start(self, client: Client) -> Tree:
        return client.task.optimizer.init(client.params)


@dataclass(frozen=True)
class Steps(Component):
    name: ClassVar[str] = "made"

    def step(self, server: Server) -> Change:
        return Change(params=server.params)


@dataclass(frozen=True)
class Evaluates(Component):
    name: ClassVar[str] = "made"

    def step(self, server: Server) -> Change:
        return Change(evaluated=server.params)


RESULTS = [
    (BringsAnOptimizer, Exclusive.OPTIMIZER),
    (StartsWarm, Exclusive.OPTIMIZER_MEMORY),
    (Steps, Exclusive.SERVER_STEP),
    (Evaluates, Exclusive.SERVER_STEP),
]


@ENGINES
@pytest.mark.parametrize(("kind", "claim"), RESULTS, ids=[kind.__name__ for kind, _ in RESULTS])
def test_a_result_that_is_not_claimed_is_refused_in_the_first_round(
    kind: type[Component], claim: Exclusive, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option may decide about these, so composing can't tell."""
    Algorithm.compose([kind()], SETTING)
    with pytest.raises(
        RecipeError, match=rf"'made' changes the {claim.value[0]} .*add {claim} to `exclusive`"
    ):
        run(kind, monkeypatch, engine=engine)
    run(type("Claims", (kind,), {"exclusive": frozenset({claim})}), monkeypatch, engine=engine)


def test_what_is_asked_must_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(self: Component, server: Server) -> Any:
        yield Ask("whatever", server.cohort, server.params, server.buffers)

    with pytest.raises(RecipeError, match="made asks 'whatever' but does not answer it"):
        run(made("survey", survey), monkeypatch)


def test_a_component_sees_its_own_messages_memory_and_state_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[set[str], ...]] = []

    @dataclass(frozen=True)
    class Looks(Component):
        name: ClassVar[str] = "looks"

        def init_client(self, client: Client) -> Tree:
            return {"mine": torch.zeros(())}

        def broadcast(self, server: Server) -> Tree:
            return {"down": torch.zeros(())}

        def report(self, trace: Trace, client: Client) -> Answer:
            seen.append(
                (set(client.shared), set(client.each), set(client.memory), set(client.prepared))
            )
            return Answer({"up": torch.zeros(())})

        def step(self, server: Server) -> Change:
            seen.append((set(server.state), set(server.replies.upload)))
            return Change()

    monkeypatch.setitem(METHODS, "looks", Looks)
    federation.run("looks+scaffold+rfedavg", rounds=1)
    assert seen[-1] == (set(), {"up"})
    assert all(found == ({"down"}, set(), {"mine"}, set()) for found in seen[:-1])
