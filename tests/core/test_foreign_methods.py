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
from tests.models.test_own import own
from tests.walks import thinned

WAYS = (
    {"engine": "sequential"},
    {"engine": "sequential", "workers": 2},
    {"engine": "vectorized"},
)
ENGINES = pytest.mark.parametrize("how", WAYS, ids=["sequential", "workers", "vectorized"])


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


def twice(w: Any) -> Any:
    return {f"{name}s": leaf for name, leaf in w.items()}


# hook, what it does, and what is said of it
RETURNS: list[tuple[str, Callable[..., Any], str]] = [
    (
        "penalty",
        lambda self, w, out, batch, client: out.logits.sum(1),
        r"a tensor of shape \[\d\], float32, cpu.*; .*one number",
    ),
    ("penalty", lambda self, w, out, batch, client: 0.5, "float 0.5; allowed: a tensor"),
    ("gradient_term", lambda self, w, client: twice(w), "{'fc1.weights': .*names, shapes"),
    ("gradient_term", lambda self, w, client: list(w.values()), "list .*; allowed: a dict"),
    (
        "update_factor",
        lambda self, client: twice(client.params),
        "{'fc1.weights': .*names of parameters",
    ),
    ("prepare", lambda self, client: None, "None; allowed: a dict of tensors"),
    ("report", lambda self, trace, client: {"w": trace.params}, "{'w': .*; allowed: an Answer"),
    (
        "report",
        lambda self, trace, client: Answer(upload={"n": 3}),
        "Answer of {'upload': {'n': int 3}}; allowed",
    ),
    (
        "report",
        lambda self, trace, client: Answer(memory={"h": trace.loss}),
        "Answer of .*that `init_client` made",
    ),
    ("report", lambda self, trace, client: None, "None; allowed: an Answer"),
    ("broadcast", lambda self, server: None, "None; allowed: a dict of tensors"),
    (
        "weigh",
        lambda self, server: server.replies.n[:2],
        r"a tensor of shape \[2\], int64, cpu; .*number for each client",
    ),
    ("step", lambda self, server: {"m": server.update}, "{'m': .*; allowed: a Change"),
    (
        "step",
        lambda self, server: Change({"m": server.update}),
        "Change of {'state': .*that `init_server` made",
    ),
    ("step", lambda self, server: None, "None; allowed: a Change"),
]


@pytest.mark.parametrize(
    ("hook", "does", "words", "how"), thinned((*case, how) for case in RETURNS for how in WAYS)
)
def test_a_wrong_return_is_refused(
    hook: str,
    does: Callable[..., Any],
    words: str,
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RecipeError, match=f"^'made': {hook} returned {words}"):
        run(made(**{hook: does}), monkeypatch, **how)


def reading(self: Any, w: Any, out: Any, batch: Any, client: Any) -> Any:
    return out.logits.sum() * out.logits.sum().item()


def branching(self: Any, w: Any, out: Any, batch: Any, client: Any) -> Any:
    return out.logits.sum() if out.logits.sum() > 0 else None


def in_place(self: Any, w: Any, client: Any) -> Any:
    return {name: leaf.mul_(0.5) for name, leaf in w.items()}


def point_in_place(self: Any, w: Any, g: Any, client: Any) -> Any:
    next(iter(client.params.values())).add_(1)
    return w


def in_place_of_the_sent(self: Any, client: Any) -> Any:
    next(iter(client.params.values())).add_(1)
    return {}


def in_place_of_the_memory(self: Any, trace: Any, client: Any) -> Any:
    tree_map(lambda kept, new: kept.copy_(new), client.memory["w"], trace.params)
    return Answer()


@pytest.mark.parametrize(
    ("does", "words"), [(reading, r"item\(\)"), (branching, "control flow")], ids=["read", "branch"]
)
def test_what_vmap_cant_take_is_named(
    does: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = rf"^'made': penalty failed, .*methods\.py, line \d+: RuntimeError: vmap: .*{words}"
    with pytest.raises(RecipeError, match=said):
        run(made(penalty=does), monkeypatch, engine="vectorized")


def step_in_place(self: Any, server: Any) -> Change:
    next(iter(server.params.values())).add_(0.01)
    return Change()


def step_with_another_model(self: Any, server: Any) -> Change:
    server.params.update(zeros_like(server.params))
    return Change()


def survey_in_place(self: Any, server: Any) -> Any:
    reply = yield Ask("count", server.cohort, server.params)
    reply.n.add_(1)


def leaving_in_place(self: Any, delta: Any, client: Any) -> None:
    next(iter(delta.values())).mul_(0.5)


def gathered_in_place(self: Any, grads: Any, batch: Any, client: Any) -> Any:
    return {name: leaf.mul_(0.5).sum(0) for name, leaf in grads.items()}


def exchanges(self: Any, setting: Any) -> Any:
    return Component.exchanges(self, setting)._replace(begin=1, round=1)


def init_in_place(self: Any, client: Any) -> Any:
    return in_place_of_the_sent(self, client)


IN_PLACE: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("step", step_in_place, {}),
    ("step", step_with_another_model, {}),
    (
        "survey",
        survey_in_place,
        {
            "exchanges": exchanges,
            "answer": lambda self, client: Answer(),
            "needs": Needs(replies=Replies.MODELS),
        },
    ),
    ("init_client", init_in_place, {}),
    ("leaving", leaving_in_place, {"exclusive": frozenset({Exclusive.UPDATE})}),
    ("gradient_point", point_in_place, {"exclusive": frozenset({Exclusive.GRADIENT_POINT})}),
    ("prepare", in_place_of_the_sent, {}),
    (
        "report",
        in_place_of_the_memory,
        {"init_client": lambda self, client: {"w": zeros_like(client.params)}},
    ),
    (
        "sample_gradients",
        gathered_in_place,
        {"exclusive": frozenset({Exclusive.SAMPLE_GRADIENTS})},
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
        kind = made(**{hook: does, "exclusive": frozenset({Exclusive.UPDATE})})
        with pytest.raises(RecipeError, match=f"'made': {hook} draws from torch's global gen"):
            run(kind, monkeypatch, engine="sequential")


def test_an_error_comes_back_from_a_worker_where_dask_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pickles have tracebacks and causes, here too deep for one."""
    tblib = pytest.importorskip("tblib.pickling_support", reason="dask brings it: [cluster]")
    monkeypatch.setitem(copyreg.dispatch_table, RecipeError, tblib.pickle_exception)
    kind = made(leaving=leaving_in_place, exclusive=frozenset({Exclusive.UPDATE}))
    with pytest.raises(RecipeError, match="leaving changes in place"):
        run(kind, monkeypatch, engine="sequential", workers=2)


def test_a_change_in_place_is_refused_with_a_network_that_vmap_cant_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = own("Recurrent")
    assert not model.vmappable
    with pytest.raises(RecipeError, match=r"^'made': gradient_term changes in place"):
        run(made(gradient_term=in_place), monkeypatch, model=model)


@ENGINES
def test_an_ask_named_train_is_refused(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def survey(self: Any, server: Any) -> Any:
        yield Ask("train", server.cohort, server.params)

    with pytest.raises(RecipeError, match=r"^'made': survey yielded .*not 'train'"):
        run(made(survey=survey), monkeypatch, **how)


@ENGINES
def test_an_error_in_a_hook_names_method_hook_and_line(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        RecipeError, match=r"^'made': step failed, .*foreign_methods\.py, line \d+: KeyError: 'x'"
    ):
        run(made(step=lambda self, server: server.state["x"]), monkeypatch, **how)


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
