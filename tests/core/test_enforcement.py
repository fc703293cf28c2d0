"""A component that does not declare what it takes, or does not claim what it owns, is told what to
add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    OWNS,
    Answer,
    Ask,
    Change,
    Client,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Public,
    Replies,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import Tree, add
from fedml_noniid.plugins.registry import METHODS
from tests import federation

SETTING = Setting(n_clients=6, cohort=4, n_public=15)
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def run(kind: type[Component], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setitem(METHODS, kind.name, kind)
    federation.run(kind.name, rounds=1, **options)


def made(hook: str, does: Callable[..., Any], **more: Any) -> type[Component]:
    """A component whose hook does this."""
    return dataclass(frozen=True)(type("Made", (Component,), {"name": "made", hook: does, **more}))


@pytest.mark.parametrize(
    "use",
    [iter, len, lambda own: own[0], lambda own: own.n],
    ids=["iter", "len", "item", "attribute"],
)
def test_what_is_absent_says_why_in_every_use(use: Callable[[Any], object]) -> None:
    with pytest.raises(RecipeError, match=r"Needs\(local_set=True\)"):
        use(Client.local_set)


def reads_local_set(self: Component, trace: Trace, client: Client) -> Answer:
    return Answer({"counts": client.local_set.class_counts(3)})


def reads_public(self: Component, client: Client) -> Tree:
    return {"mean": client.public.mean(lambda batch: {"x": batch.x})["x"]}


def reads_public_on_the_server(self: Component, server: Server) -> Change:
    return Change(metrics={"mean": server.public.x.mean()})


def reads_gradient(self: Component, w: Tree, g: Tree, client: Client) -> Tree:
    return add(w, g)


PUBLIC = Needs(public=Public.UNLABELLED)
# What a hook reads, the need that allows it, and what is said without it.
READS = [
    (
        "report",
        reads_local_set,
        Needs(local_set=True),
        r"client\.local_set .*Needs\(local_set=True\)",
    ),
    ("prepare", reads_public, PUBLIC, r"client\.public .*Needs\(public=\.\.\.\)"),
    ("step", reads_public_on_the_server, PUBLIC, r"server\.public .*Needs\(public=\.\.\.\)"),
    (
        "report",
        lambda _, trace, client: Answer({"x": trace.loss}),
        Needs(loss=True),
        r"trace\.loss .*Needs\(loss=True\)",
    ),
    ("gradient_point", reads_gradient, Needs(gradient=True), r"^g .*Needs\(gradient=True\)"),
]


@ENGINES
@pytest.mark.parametrize(
    ("hook", "does", "needs", "words"), READS, ids=[does.__name__ for _, does, *_ in READS]
)
def test_what_is_read_must_be_declared(
    hook: str,
    does: Callable[..., Any],
    needs: Needs,
    words: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the component itself: what another one declares does not help."""
    everything = Needs(local_set=True, public=Public.LABELLED, gradient=True, loss=True)
    declares = type("Declares", (Component,), {"name": "declares", "needs": everything})
    monkeypatch.setitem(METHODS, "declares", dataclass(frozen=True)(declares))
    owned = frozenset({OWNS[hook]} if hook in OWNS else ())
    monkeypatch.setitem(METHODS, "made", made(hook, does, exclusive=owned))
    with pytest.raises(RecipeError, match=words):
        federation.run("declares+made", rounds=1, engine=engine)
    run(made(hook, does, needs=needs, exclusive=owned), monkeypatch, engine=engine)


def asked_for_nothing(found: Any) -> Any:
    """A hook that may ask and asks nothing."""
    return found
    yield


# Hooks whose results only one component may own.
OWNERS: dict[str, Callable[..., Any]] = {
    "gradient_point": lambda self, w, g, client: w,
    "logits": lambda self, logits, w, client: 2 * logits,
    "assign": lambda self, server: None,
    "choose": lambda self, server: server.cohort,
    "refine": lambda self, server: asked_for_nothing(server.replies),
    "leaving": lambda self, delta, client: delta,
    "average": lambda self, server: server.params,
    "learn": lambda self, server: Change(params=server.params),
    "finish": lambda self, server: asked_for_nothing(Change(params=server.params)),
    "own_model": lambda self, v, w, client: None,
}


@pytest.mark.parametrize("hook", OWNS)
def test_overriding_what_only_one_may_own_is_refused_when_composed(hook: str) -> None:
    does, owned = OWNERS[hook], OWNS[hook]
    words = rf"'made' changes the {owned.value[0]} .*add {owned} to `exclusive`"
    with pytest.raises(RecipeError, match=words):
        Algorithm.compose([made(hook, does)()], SETTING)
    models = Needs(replies=Replies.MODELS)
    counted = {"exchanges": lambda self, setting: Exchanges(finish=1)}
    kind = made(hook, does, exclusive=frozenset({owned}), needs=models, **counted)
    Algorithm.compose([kind()], SETTING)


RESULTS: list[tuple[str, Callable[..., Any], Exclusive]] = [
    ("optimizer", lambda self, given: given, Exclusive.OPTIMIZER),
    (
        "warm_start",
        lambda self, client: client.task.optimizer.init(client.params),
        Exclusive.OPTIMIZER_MEMORY,
    ),
    ("warm_start", lambda self, client: {"params": client.params}, Exclusive.START),
    ("step", lambda self, server: Change(params=server.params), Exclusive.SERVER_STEP),
    ("step", lambda self, server: Change(evaluated=server.params), Exclusive.SERVER_STEP),
]


@pytest.mark.parametrize(("hook", "does", "owned"), RESULTS)
def test_a_result_of_another_owner_is_refused_in_the_first_round(
    hook: str, does: Callable[..., Any], owned: Exclusive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option may decide about these, so composing can't tell."""
    Algorithm.compose([made(hook, does)()], SETTING)
    words = rf"'made' changes the {owned.value[0]} .*add {owned} to `exclusive`"
    with pytest.raises(RecipeError, match=words):
        run(made(hook, does), monkeypatch)
    run(made(hook, does, exclusive=frozenset({owned})), monkeypatch)


def test_what_is_asked_must_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def survey(self: Component, server: Server) -> Any:
        yield Ask("whatever", server.cohort, server.params, server.buffers)

    with pytest.raises(RecipeError, match="made asks 'whatever' but does not answer it"):
        run(made("survey", survey), monkeypatch)


@ENGINES
def test_without_a_model_of_its_own_a_client_is_tested_with_w(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = frozenset({Exclusive.OWN_MODEL})
    kind = made("own_model", lambda self, v, w, client: None, exclusive=owned)
    monkeypatch.setitem(METHODS, "made", kind)
    out = federation.run("made", engine=engine)
    for name, leaf in out.params.items():
        assert torch.equal(out.personal["params"][name], leaf.expand(6, *leaf.shape))
