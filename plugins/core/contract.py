"""Holds components to the contract: the names that they define, and the values that their hooks
return.

Every hook of every component is called by `call`, in all runtimes. So a mistake in a method is an
error that names the method and the hook, and never another method without a word.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Generator, Iterator
from types import CodeType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fedml_noniid.plugins.core.component import (
    Answer,
    Change,
    Component,
    Exclusive,
    Needs,
    OwnModel,
    Reply,
    Weights,
)
from fedml_noniid.plugins.core.errors import UserError, nearest, shown
from fedml_noniid.plugins.core.optimizers import Optimizer
from fedml_noniid.plugins.core.options import RecipeError


def tree(found: Any) -> bool:
    """Whether a value is a tree: a dict of names, with tensors or trees."""
    return isinstance(found, dict) and all(
        isinstance(key, str) and (isinstance(leaf, Tensor) or tree(leaf))
        for key, leaf in found.items()
    )


def _params(found: Any, like: Any) -> bool:
    """Whether a value is a tree with names of the parameters `like`."""
    return tree(found) and found.keys() <= like.keys()


def _changes(found: Change, server: Any) -> bool:
    trees = (
        found.state,
        found.params or {},
        found.buffers or {},
        found.evaluated or {},
        found.metrics,
    )
    return all(map(tree, trees)) and found.state.keys() <= server.state.keys()


def _surveys(found: Change, server: Any) -> bool:
    return _changes(found, server) and (server.round == 0 or found.params is None)


def _answers(found: Answer, client: Any) -> bool:
    return all(map(tree, found)) and found.memory.keys() <= client.memory.keys()


class Returns(NamedTuple):
    """What a hook may return."""

    words: str
    kind: type
    fits: Callable[..., bool]  # (value, the hook's arguments)
    nothing: bool = True  # whether None is allowed


A_TREE = Returns(
    "a dict of tensors, which may nest", dict, lambda found, *_: tree(found), nothing=False
)
A_CHANGE = "a Change of dicts of tensors, with state that `init_server` made"
AN_ANSWER = Returns(
    "an Answer of dicts of tensors, with memory that `init_client` made",
    Answer,
    lambda found, *args: _answers(found, args[-1]),
    nothing=False,
)
HOOKS = {
    "init_client": A_TREE,
    "optimizer": Returns("an Optimizer, or None", Optimizer, lambda *_: True),
    "warm_start": A_TREE._replace(words="a dict of tensors, or None", nothing=True),
    "prepare": A_TREE,
    "gradient_point": Returns(
        "a dict of tensors with names of parameters, or None",
        dict,
        lambda found, w, *_: _params(found, w),
    ),
    "logits": Returns(
        "logits of the shape that it is given, or None",
        Tensor,
        lambda found, logits, *_: found.shape == logits.shape,
    ),
    "penalty": Returns(
        "a tensor without axes (one number), or None", Tensor, lambda found, *_: found.ndim == 0
    ),
    "sample_gradients": Returns(
        "a dict of tensors with the names of all parameters",
        dict,
        lambda found, grads, *_: tree(found) and found.keys() == grads.keys(),
        nothing=False,
    ),
    "gradient_term": Returns(
        "a dict of tensors with names of parameters, or None",
        dict,
        lambda found, w, _: _params(found, w),
    ),
    "update_factor": Returns(
        "a dict of tensors with names of parameters, or None",
        dict,
        lambda found, client: _params(
            found, client.task.personal.get("params", {}) | client.params
        ),
    ),
    "own_model": Returns(
        "an OwnModel with the names of all parameters of w, or None",
        OwnModel,
        lambda found, v, w, _: tree(found.params) and found.params.keys() == w.keys(),
    ),
    "leaving": Returns(
        "a dict of tensors with the names of all parameters, or None",
        dict,
        lambda found, delta, _: tree(found) and found.keys() == delta.keys(),
    ),
    "report": AN_ANSWER,
    "answer": AN_ANSWER,
    "init_server": A_TREE,
    "broadcast": A_TREE,
    "message": A_TREE,
    "refine": Returns("a Reply, or None", Reply, lambda *_: True),
    "weigh": Returns(
        "a tensor with a number for each client, or None",
        Tensor,
        lambda found, server: found.shape == server.replies.n.shape,
    ),
    "average": Returns(
        "a dict of tensors with the names of all parameters, or None",
        dict,
        lambda found, server: tree(found) and found.keys() == server.start.keys(),
    ),
    "step": Returns(A_CHANGE, Change, _changes, nothing=False),
    "learn": Returns(f"{A_CHANGE}, or None", Change, _changes),
    "survey": Returns(f"{A_CHANGE}, and with params in round 0 only, or None", Change, _surveys),
    "finish": Returns(f"{A_CHANGE}, or None", Change, _changes),
}


def call(c: Component, hook: str, *args: Any) -> Any:
    """The checked result of a hook, or its generator of Asks.

    RecipeError names method, hook and mistake.
    """
    try:
        found = getattr(c, hook)(*args)
    except Exception as error:  # of any kind: the code is the method's
        raise failure(c, hook, error) from error
    return found if isinstance(found, Generator) else checked(c, hook, found, *args)


def checked(c: Component, hook: str, found: Any, *args: Any) -> Any:
    """What a hook returned. RecipeError if it may not return that."""
    allowed = HOOKS[hook]
    if found is None and allowed.nothing:
        return found
    if not isinstance(found, allowed.kind) or not allowed.fits(found, *args):
        raise RecipeError(
            f"{c.name!r}: {hook} returned {_described(found)}; allowed: {allowed.words}"
        )
    return found


def failure(c: Component, hook: str, error: Exception) -> Exception:
    """An error in a hook as one line.

    An error in our own words, and a lack of memory, stays as it is.
    """
    if isinstance(error, UserError | MemoryError | torch.OutOfMemoryError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = next((f for f in traceback.extract_tb(error.__traceback__)[::-1] if f.name == hook), last)
    words = " ".join(str(error).split())[:200]
    return RecipeError(
        f"{c.name!r}: {hook} failed, {at.filename}, line {at.lineno}: {type(error).__name__}: "
        f"{words}"
    )


def _described(found: Any) -> str:
    """A value in words: types, names and shapes, not the numbers."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, dict):
        return (
            "{" + ", ".join(f"{key!r}: {_described(value)}" for key, value in found.items()) + "}"
        )
    if isinstance(found, Answer | Change):
        given = {
            key: part for key, part in found._asdict().items() if part is not None and part != {}
        }
        return f"{type(found).__name__} of {_described(given)}"
    return "None" if found is None else f"{type(found).__name__} {shown(found)}"


def check_kind(c: Component) -> None:
    """RecipeError for a public name that is no hook, for example a misspelt one, and for values of
    a wrong kind."""
    for name in _unknown(type(c)):
        raise RecipeError(
            f"{c.name!r}: {name!r} is no hook and no hyper-parameter, and nothing in the class "
            "uses it"
            f"{nearest(name, _public(Component))}; the name of a helper begins with _"
        )
    if c.weights not in get_args(Weights):
        allowed = ", ".join(get_args(Weights))
        raise RecipeError(
            f"{c.name!r}: weights = {shown(c.weights)} is refused; allowed: {allowed}"
        )
    if not isinstance(c.needs, Needs):
        raise RecipeError(f"{c.name!r}: needs = {shown(c.needs)} is refused; allowed: Needs(...)")
    if not all(isinstance(claim, Exclusive) for claim in c.exclusive):
        raise RecipeError(
            f"{c.name!r}: exclusive = {shown(c.exclusive)} is refused; allowed: a set of Exclusive"
        )


def _public(kind: type) -> set[str]:
    return {
        name
        for name in (*vars(kind), *vars(kind).get("__annotations__", ()))
        if not name.startswith("_")
    }


def _unknown(kind: type) -> tuple[str, ...]:
    """The public names of a component that no runtime reads: no hooks, no fields, and not used by
    its functions."""
    parents = [parent for parent in kind.__mro__ if parent not in (Component, object)]
    used = {name for parent in parents for value in vars(parent).values() for name in _names(value)}
    known = used | _public(Component) | {field.name for field in dataclasses.fields(kind)}
    return tuple(sorted({name for parent in parents for name in _public(parent)} - known))


def _names(value: Any) -> Iterator[str]:
    """The attributes that a function, method or property reads, with those of the functions inside
    it."""
    inner = (getattr(value, part, None) for part in ("fget", "func", "__func__"))
    todo: list[Any] = [getattr(found, "__code__", None) for found in (value, *inner)]
    while todo:
        if isinstance(code := todo.pop(), CodeType):
            yield from code.co_names
            todo += code.co_consts
