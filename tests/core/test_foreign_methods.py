"""A method of someone else with a mistake is refused by method and hook, in every engine.

It never runs as FedAvg.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    Answer,
    Ask,
    Change,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Replies,
    Setting,
)
from fedml_noniid.core.contract import HOOKS
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import tree_map, zeros_like
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.walks import thinned

WAYS = (
    {"engine": "sequential"},
    {"engine": "sequential", "workers": 2},
    {"engine": "vectorized"},
)


def made(**members: Any) -> type[Component]:
    """A method with these members, in a module that is not ours."""
    return dataclass(frozen=True)(
        type("Made", (Component,), {"name": "made", "__module__": "someone", **members})
    )


def run(kind: type[Component], monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    monkeypatch.setitem(METHODS, kind.name, kind)
    federation.run(kind.name, rounds=2, **how)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            {"penalti": lambda self, w, out, batch, client: None},
            "'penalti' is no hook.*did you mean 'penalty'",
        ),
        (
            {"raport": lambda self, trace, client: Answer()},
            "'raport' is no hook.*did you mean 'report'",
        ),
        ({"need": Needs(local_set=True)}, "'need' is no hook.*did you mean 'needs'"),
        (
            {"gradient_terms": property(lambda self: {})},
            "'gradient_terms' is no hook.*did you mean 'gradient_term'",
        ),
        ({}, "'stepp' is no hook.*did you mean 'step'"),
        ({"weights": "unifrom"}, "weights = 'unifrom' is refused; allowed: size, uniform"),
        ({"needs": Needs}, "needs = .* is refused"),
        ({"exclusive": frozenset({"average"})}, "exclusive = .* is refused"),
    ],
    ids=["hook", "other hook", "variable", "property", "parent", "weights", "needs", "exclusive"],
)
def test_a_misspelt_name_is_refused(members: dict[str, Any], words: str) -> None:
    kind = made(**members)
    if not members:  # the mistake is that of a parent
        kind = type("Made", (made(stepp=lambda self, server: Change()),), {"name": "made"})
    with pytest.raises(RecipeError, match=f"^'made': {words}"):
        Algorithm.compose([kind()], Setting(6, 4))


def test_what_a_component_uses_itself_is_no_hook_and_allowed() -> None:
    def report(self: Any, trace: Any, client: Any) -> Answer:
        return Answer(
            upload=next(self.reported(leaf) for leaf in ({},))
        )  # read by a function inside

    kind = made(report=report, reported=lambda self, leaf: leaf, _penalti=1)
    Algorithm.compose([kind()], Setting(6, 4))


def reading(self: Any, w: Any, out: Any, batch: Any, client: Any) -> Any:
    return out.logits.sum() * out.logits.sum().item()


def branching(self: Any, w: Any, out: Any, batch: Any, client: Any) -> Any:
    return out.logits.sum() if out.logits.sum() > 0 else None


def spoilt(tree: Any) -> None:
    """Changes a tree in place."""
    next(iter(tree.values())).add_(1)


@pytest.mark.parametrize(
    ("does", "words"), [(reading, r"item\(\)"), (branching, "control flow")], ids=["read", "branch"]
)
def test_what_vmap_cant_take_is_named(
    does: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"^'made': penalty failed, .*methods\.py, line \d+: RuntimeError: vmap: .*{words}"
    with pytest.raises(RecipeError, match=said):
        run(made(penalty=does), monkeypatch, engine="vectorized")


def survey_in_place(self: Any, server: Any) -> Any:
    reply = yield Ask("count", server.cohort, server.params)
    reply.n.add_(1)


def memory_in_place(self: Any, trace: Any, client: Any) -> Any:
    tree_map(lambda kept, new: kept.copy_(new), client.memory["w"], trace.params)
    return Answer()


def owned(claim: Exclusive) -> dict[str, Any]:
    return {"exclusive": frozenset({claim})}


def scaled(tree: Any) -> Any:
    """Half of it, in place."""
    return {name: leaf.mul_(0.5) for name, leaf in tree.items()}


SURVEY: dict[str, Any] = {
    "exchanges": lambda self, setting: Exchanges(begin=1, round=1),
    "answer": lambda self, client: Answer(),
    "needs": Needs(replies=Replies.MODELS),
}
IN_PLACE: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("step", lambda self, server: spoilt(server.params), {}),
    ("step", lambda self, server: server.params.update(zeros_like(server.params)), {}),
    ("survey", survey_in_place, SURVEY),
    ("init_client", lambda self, client: spoilt(client.params), {}),
    ("leaving", lambda self, delta, client: spoilt(delta), owned(Exclusive.UPDATE)),
    (
        "gradient_point",
        lambda self, w, g, client: spoilt(client.params),
        owned(Exclusive.GRADIENT_POINT),
    ),
    ("prepare", lambda self, client: spoilt(client.params), {}),
    ("report", memory_in_place, {"init_client": lambda self, client: {"w": client.params}}),
    (
        "sample_gradients",
        lambda self, grads, batch, client: scaled(grads),
        owned(Exclusive.SAMPLE_GRADIENTS),
    ),
]


@pytest.mark.parametrize(
    ("hook", "does", "more", "how"), thinned((*case, how) for case in IN_PLACE for how in WAYS)
)
def test_a_change_in_place_is_refused(
    hook: str,
    does: Callable[..., Any],
    more: dict[str, Any],
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of the server, of a reply that comes later, and in the first hook of all."""
    line = does.__code__.co_firstlineno
    words = f"^'made': {hook} changes in place .*methods\\.py, from line {line};"
    with pytest.raises(RecipeError, match=words):
        run(made(**{hook: does}, **more), monkeypatch, **how)


def test_a_draw_that_nothing_repeats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap takes none; one client at a time, it would be another one in each run."""

    def drawn(self: Any, w: Any, client: Any) -> Any:
        return tree_map(torch.rand_like, w)

    for hook, does in (("gradient_term", drawn), ("leaving", drawn)):
        kind = made(**{hook: does, **owned(Exclusive.UPDATE)})
        with pytest.raises(RecipeError, match=f"'made': {hook} draws from torch's global gen"):
            run(kind, monkeypatch, engine="sequential")


def test_an_error_comes_back_from_a_worker_where_dask_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pickles have tracebacks and causes, here too deep for one."""
    tblib = pytest.importorskip("tblib.pickling_support", reason="dask brings it: [cluster]")
    monkeypatch.setitem(copyreg.dispatch_table, RecipeError, tblib.pickle_exception)
    _, leaving, more = next(case for case in IN_PLACE if case[0] == "leaving")
    kind = made(leaving=leaving, **more)
    with pytest.raises(RecipeError, match="leaving changes in place"):
        run(kind, monkeypatch, engine="sequential", workers=2)


def test_an_error_in_a_hook_names_method_hook_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"^'made': step failed, .*foreign_methods\.py, line \d+: KeyError: 'x'"
    ):
        run(made(step=lambda self, server: server.state["x"]), monkeypatch)


def test_a_sound_foreign_method_has_the_bits_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks leave nothing behind."""
    for method in ("scaffold", "fnr", "rfedavg_plus"):
        ours = federation.run(method)
        foreign = type(METHODS[method].__name__, (METHODS[method],), {"__module__": "someone"})
        with monkeypatch.context() as patch:
            patch.setitem(METHODS, method, foreign)
            for how in ({"engine": "sequential"}, {"engine": "sequential", "workers": 2}):
                assert federation.equal(federation.run(method, **how), ours)


def test_every_hook_has_a_rule() -> None:
    """`check`, `exchanges`, `mechanism`, `packing` and the class variables are no hooks."""
    public = {name for name in vars(Component) if not name.startswith("_")}
    assert HOOKS.keys() == public - {
        "check",
        "exchanges",
        "mechanism",
        "packing",
        "needs",
        "exclusive",
        "weights",
        "ranges",
    }
