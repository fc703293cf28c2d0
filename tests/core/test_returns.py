"""What a hook returns with another shape, dtype or structure is refused, in both engines.

Otherwise a tensor is broadcast, cast or dropped without a word, and another method trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Change,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    OwnModel,
    Replies,
)
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import identity
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, tree_map
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.core.test_enforcement import ENGINES
from tests.core.test_foreign_methods import SURVEY as ASKS
from tests.core.test_foreign_methods import WAYS, made, owned
from tests.walks import thinned

MODELS = Needs(replies=Replies.MODELS)
Wrong = Callable[[Params], Any]


def first(change: Callable[[Tensor], Tensor]) -> Wrong:
    """Changes the first tensor of a tree."""

    def wrong(tree: Params) -> Params:
        name = next(iter(tree))
        return {**tree, name: change(tree[name])}

    return wrong


# Fewer rows fit the others by accident, if a tensor has one row; the other dtype fits vmap's stack.
WRONG: dict[str, Wrong] = {
    "rows": first(lambda leaf: leaf[:-1]),
    "one row": first(lambda leaf: leaf[:1]),
    "one number": first(lambda leaf: leaf.sum()),
    "axis": first(lambda leaf: leaf.unsqueeze(0)),
    "dtype": first(lambda leaf: leaf.double()),
    "integers": first(lambda leaf: leaf.long()),
    "device": first(lambda leaf: leaf.to("meta")),
    "names": lambda tree: {**tree, "other": next(iter(tree.values()))},
}
LAID = {"h": torch.zeros(4), "g": torch.zeros(2, 3)}  # a memory, and a state


def asking(ask: Callable[[Any], Ask]) -> Any:
    def survey(self: Any, server: Any) -> Any:
        yield ask(server)

    return survey


def refining(field: str, wrong: Wrong) -> Any:
    def refine(self: Any, server: Any) -> Any:
        yield Ask("look", server.cohort)
        return replace(server.replies, **{field: wrong(getattr(server.replies, field))})

    return refine


def rates(client: Any) -> Params:
    return {name: leaf.new_ones(leaf.shape[:1]) for name, leaf in client.params.items()}


LAST = {"exchanges": lambda self, setting: Exchanges(finish=1)}
INIT = {
    "init_client": lambda self, client: LAID,
    "init_server": lambda self, server: LAID,
}
HOOKS: dict[tuple[str, str], tuple[Callable[[Wrong], Any], Exclusive | None, dict[str, Any]]] = {
    ("warm_start", ""): (
        lambda wrong: lambda self, client: {"params": wrong(client.params)},
        Exclusive.START,
        {},
    ),
    ("gradient_point", ""): (
        lambda wrong: lambda self, w, g, client: wrong(w),
        Exclusive.GRADIENT_POINT,
        {},
    ),
    ("gradient_term", ""): (lambda wrong: lambda self, w, client: wrong(w), None, {}),
    ("update_factor", ""): (lambda wrong: lambda self, client: wrong(rates(client)), None, {}),
    ("own_model", ""): (
        lambda wrong: lambda self, v, w, client: OwnModel(wrong(v)),
        Exclusive.OWN_MODEL,
        {"init_client": lambda self, client: {"v": client.params}},
    ),
    ("leaving", ""): (lambda wrong: lambda self, delta, client: wrong(delta), Exclusive.UPDATE, {}),
    ("report", "memory"): (
        lambda wrong: lambda self, trace, client: Answer(memory=wrong(LAID)),
        None,
        INIT,
    ),
    ("answer", "memory"): (
        lambda wrong: lambda self, client: Answer(memory=wrong(LAID)),
        None,
        INIT
        | {
            "exchanges": ASKS["exchanges"],
            "survey": asking(lambda server: Ask("look", server.cohort, server.params)),
        },
    ),
    ("refine", "deltas"): (lambda wrong: refining("deltas", wrong), Exclusive.REFINEMENT, ASKS),
    ("refine", "buffers"): (lambda wrong: refining("buffers", wrong), Exclusive.REFINEMENT, ASKS),
    ("average", ""): (
        lambda wrong: (
            lambda self, server: wrong(tree_map(lambda leaf: leaf.mean(0), server.replies.deltas))
        ),
        Exclusive.AVERAGE,
        {"needs": MODELS},
    ),
    **{
        ("step", field): (
            lambda wrong, field=field, of=of: (
                lambda self, server: Change(**{field: wrong(getattr(server, of))})
            ),
            Exclusive.SERVER_STEP,
            INIT,
        )
        for field, of in (
            ("params", "params"),
            ("evaluated", "params"),
            ("buffers", "buffers"),
            ("state", "state"),
        )
    },
    **{
        ("learn", of): (
            lambda wrong, of=of: lambda self, server: Change(**{of: wrong(getattr(server, of))}),
            Exclusive.SERVER_LEARNING,
            {},
        )
        for of in ("params", "buffers")
    },
    ("finish", "params"): (
        lambda wrong: lambda self, server: Change(params=wrong(server.params)),
        Exclusive.CLASSIFIER,
        LAST,
    ),
    ("survey", "Ask"): (
        lambda wrong: asking(lambda server: Ask("look", server.cohort, wrong(server.params))),
        None,
        ASKS,
    ),
}


def run(
    hook: str,
    does: Any,
    claim: Exclusive | None,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    **how: Any,
) -> Any:
    kind = made(**{hook: does, **({} if claim is None else owned(claim)), **more})
    monkeypatch.setitem(METHODS, "made", kind)
    return federation.run("made", rounds=2, batch_norm=True, **how)


@pytest.mark.parametrize(
    ("hook", "field", "wrong", "engine"),
    thinned(
        (
            (*hook, wrong, engine)
            for hook in HOOKS
            for wrong in WRONG
            for engine in ("sequential", "vectorized")
        ),
        every=5,
    ),
)
def test_a_wrong_tensor_is_refused_with_method_and_hook(
    hook: str, field: str, wrong: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, claim, more = HOOKS[hook, field]
    with pytest.raises(RecipeError, match=f"^'made': {hook} (returned|yielded) .*; allowed: "):
        run(hook, does(WRONG[wrong]), claim, more, monkeypatch, engine=engine)


def twice(tree: Params) -> Params:
    return {f"{name}s": leaf for name, leaf in tree.items()}


A_CHANGE, AN_ANSWER = "None; allowed: a Change", "None; allowed: an Answer"
ANY = ".*; allowed: "
# (hook, what it does, what is said, what else the component has)
REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    (
        "penalty",
        lambda self, w, out, *_: out.logits.sum(1),
        r"a tensor of shape \[\d\], fl.*one",
        {},
    ),
    ("penalty", lambda self, w, out, batch, client: 0.5, "float 0.5; allowed: a tensor", {}),
    ("penalty", lambda self, w, out, batch, client: torch.tensor(1), ANY, {}),
    ("gradient_term", lambda self, w, client: twice(w), "{'fc1.weights': .*names, shapes", {}),
    ("gradient_term", lambda self, w, client: [*w.values()], "list .*; allowed: a dict", {}),
    ("update_factor", lambda self, client: twice(client.params), "{'fc1.wei.*names of param", {}),
    ("prepare", lambda self, client: None, "None; allowed: a dict of tensors", {}),
    ("report", lambda self, trace, client: {"w": trace.params}, "{'w': .*allowed: an Answer", {}),
    ("report", lambda *_: Answer(upload={"n": 3}), "Answer of {'upload': {'n': int 3}}; all", {}),
    ("report", lambda _, trace, client: Answer(memory={"h": trace.steps}), ".*`init_client`", {}),
    ("report", lambda self, trace, client: None, AN_ANSWER, {}),
    ("report", lambda self, trace, client: Answer(params=trace.params), ANY, {}),
    ("broadcast", lambda self, server: None, "None; allowed: a dict of tensors", {}),
    ("broadcast", lambda self, server: {"a": torch.eye(2).to_sparse()}, ANY, {}),
    ("broadcast", lambda self, server: {"a": torch.ones(2, requires_grad=True)}, ANY, {}),
    ("message", lambda self, server: {"a": torch.ones(len(server.cohort) - 1)}, ANY, {}),
    (
        "weigh",
        lambda self, server: server.replies.n[:2],
        r"a tensor of shape \[2\], int64.*num",
        {},
    ),
    *(
        (
            "choose",
            lambda self, server, clients=clients: clients,
            ".*: a tuple of ascen",
            owned(Exclusive.COHORT),
        )
        for clients in ((), (1, 0), (0, 9), (0, 1, 2, 3, 4), [0, 1])
    ),
    ("step", lambda self, server: {"m": server.update}, "{'m': .*; allowed: a Change", {}),
    ("step", lambda self, server: Change({"m": server.update}), "Change of {'state': .*`init", {}),
    ("step", lambda self, server: None, A_CHANGE, {}),
    ("step", lambda self, server: Change(params={}), ANY, owned(Exclusive.SERVER_STEP)),
    # What the hook can't change was dropped.
    ("survey", lambda self, server: Change(buffers=server.buffers), ANY, {}),
    ("survey", lambda self, server: Change(evaluated=server.params), ANY, {}),
    ("survey", lambda self, server: Change(metrics={"a": torch.ones(())}), ANY, {}),
    (
        "learn",
        lambda self, server: Change(evaluated=server.params),
        ANY,
        owned(Exclusive.SERVER_LEARNING),
    ),
    (
        "finish",
        lambda self, server: Change(params=server.params, buffers=server.buffers),
        ANY,
        owned(Exclusive.CLASSIFIER) | LAST,
    ),
    # Weights go by the samples of training. `average` and `weigh` may change them.
    *(
        ("refine", refining(field, wrong), ANY, owned(Exclusive.REFINEMENT) | ASKS)
        for field, wrong in (
            ("distinct", lambda _: torch.tensor([0, 99])),
            ("distinct", lambda _: [0]),
            ("n", lambda n: 2 * n),
            ("n", lambda n: n.tolist()),
        )
    ),
    *(
        ("survey", asking(ask), ANY, ASKS)
        for ask in (
            lambda server: Ask("train", server.cohort, server.params),
            lambda server: Ask("look", (), server.params),
            lambda server: Ask("look", (1, 0), server.params),
            lambda server: Ask("look", (0, 99), server.params),
            lambda server: Ask("look", (0, 1), server.params, each={"a": torch.ones(3)}),
            lambda server: Ask("look", (0, 1), server.params, shared={"a": 1}),
        )
    ),
]


@pytest.mark.parametrize(
    ("number", "how"), thinned((n, how) for n in range(len(REFUSED)) for how in WAYS)
)
def test_what_a_hook_may_not_return_is_refused(
    number: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, does, words, more = REFUSED[number]
    with pytest.raises(RecipeError, match=f"^'made': {hook} (returned|yielded) {words}"):
        run(hook, does, None, more, monkeypatch, **how)


@ENGINES
def test_a_model_in_answer_to_an_ask_before_round_1_is_refused(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no w_t from which it could differ."""
    survey = asking(lambda server: Ask("look", server.cohort, server.params, server.buffers))
    answer = {**ASKS, "answer": lambda self, client: Answer(params=client.params)}
    with pytest.raises(Exception, match=r"made\.look: a client returned a model; allowed: in the"):
        run("survey", survey, None, answer, monkeypatch, engine=engine)


@ENGINES
def test_a_server_step_sets_the_running_statistics(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the old ones, half of the clients' mean. In round 1 that is worked out by hand from
    FedAvg's, which has the mean."""

    def halves(self: Any, server: Any) -> Change:
        means = weighted_mean(server.omega, server.replies.buffers)
        return Change(buffers={n: 0.5 * (server.buffers[n] + means[n]) for n in means})

    monkeypatch.setitem(METHODS, "made", made(step=halves, **owned(Exclusive.SERVER_STEP)))
    how: dict[str, Any] = {"batch_norm": True, "engine": engine}
    start = federation.simulation("fedavg", **how).loop.state.buffers
    mean = federation.run("fedavg", rounds=1, **how)
    half = federation.run("made", rounds=1, **how)
    assert any(not torch.equal(leaf, start[name]) for name, leaf in mean.buffers.items())
    for name, leaf in half.buffers.items():
        assert torch.equal(leaf, 0.5 * (start[name] + mean.buffers[name]))
    for name, leaf in half.params.items():
        assert torch.equal(leaf, mean.params[name])


def test_finish_that_nobody_would_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"'made' has `finish`.*Exchanges\(finish=1\)"):
        run("finish", lambda *_: Change(), Exclusive.CLASSIFIER, {}, monkeypatch)


def test_a_shared_base_class_does_not_merge_its_children() -> None:
    """They have random numbers of their own; a variant of a method has those of the method."""
    base = type("Base", (Component,), {"name": ""})
    a, b = (type(name, (base,), {"name": name.lower()}) for name in ("A", "B"))
    variant = type("C", (a,), {"name": "c"})
    assert identity(a()) != identity(b())
    assert identity(variant()) == identity(a())
