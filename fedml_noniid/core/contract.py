"""Holds components to the contract: the names that they define, and the values that their hooks
return.

Every hook of every component is called by `call`, in all runtimes. So a mistake in a method is an
error that names the method and the hook, and never another method without a word.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    MODEL_OF,
    MODELS,
    START,
    Answer,
    Ask,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    OwnModel,
    Reply,
    Server,
    Weights,
    overrides,
)
from fedml_noniid.core.data import Pass
from fedml_noniid.core.errors import UserError, closest, shown
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.trees import Tree, row, tree_map


def _is_plain(leaf: Any) -> bool:
    """Whether a value is a tensor that an engine can stack, sum and store."""
    dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_meta
    return dense and not leaf.requires_grad


def tree(value: Any, fits: Callable[[Any], bool] = _is_plain) -> bool:
    """Whether a value is a tree: a dict of names, with tensors or trees."""
    return isinstance(value, dict) and all(
        isinstance(key, str) and (tree(leaf, fits) if isinstance(leaf, dict) else fits(leaf))
        for key, leaf in value.items()
    )


def _named(value: Any) -> bool:
    """Whether a value is a dict of tensors, in a step: quick, and also inside of autograd."""
    return isinstance(value, dict) and all(isinstance(leaf, Tensor) for leaf in value.values())


def _alike(value: Any, like: Any, rows: tuple[int, ...] = ()) -> bool:
    """Whether a value has the names, shapes, dtypes and devices of a tree; `rows`: axes before
    these shapes."""
    if isinstance(like, dict):
        same = isinstance(value, dict) and value.keys() == like.keys()
        return same and all(_alike(leaf, like[name], rows) for name, leaf in value.items())
    kind = _is_plain(value) and (value.dtype, value.device) == (like.dtype, like.device)
    return kind and value.shape == rows + like.shape


def _part(value: Any, like: Any) -> bool:
    """Whether a value is like a tree, of which it may lack names."""
    return isinstance(value, dict) and _alike(
        value, {name: leaf for name, leaf in like.items() if name in value}
    )


def _models(params: Any, buffers: Any, like: Any) -> bool:
    """Whether these are parameters and buffers like those of `like`, or empty."""
    return (not params or _alike(params, like.params)) and (
        not buffers or _alike(buffers, like.buffers)
    )


def _rows(value: Any, m: int) -> bool:
    """Whether a value is a tree of tensors with a row for each of `m` clients."""
    return tree(value, lambda leaf: _is_plain(leaf) and leaf.shape[:1] == (m,))


def _changes(change: Change, server: Any, fields: Iterable[str]) -> bool:
    """Whether nothing but these fields is filled in, in the structure of what the server has."""
    params, buffers = server.params, server.buffers
    models = (change.params, params), (change.evaluated, params), (change.buffers, buffers)
    filled = {name for name, part in change._asdict().items() if part is not None and part != {}}
    return (
        filled <= {*fields}
        and all(model is None or _alike(model, like) for model, like in models)
        and _part(change.state, server.state)
        and tree(change.metrics)
    )


def _surveys(change: Change, server: Any) -> bool:
    return _changes(change, server, ("state", "params") if server.round == 0 else ("state",))


def _refines(reply: Reply, server: Any) -> bool:
    clients, n, rows = server.replies.clients, server.replies.n, (len(server.replies.clients),)
    # Numbers are compared only where the tensor is another one: a GPU's host would wait for them.
    same = reply.n is n or (_alike(reply.n, n) and torch.equal(reply.n, n))
    same = same and reply.clients == clients and _alike(reply.deltas, server.start, rows)
    if (distinct := reply.distinct) is not None:
        same = same and isinstance(distinct, Tensor) and distinct.dtype == torch.int64
        same = same and {*distinct.flatten().tolist()} <= {*range(len(clients))}
    return same and _alike(reply.buffers, server.buffers, rows) and tree(reply.upload)


def _answers(answer: Answer, client: Any, returns_model: bool) -> bool:
    return (
        tree(answer.upload)
        and tree(answer.metrics)
        and _part(answer.memory, client.memory)
        and (returns_model or not (answer.params or answer.buffers))
        and _models(answer.params, answer.buffers, client)
    )


def is_sound(ask: Any, server: Any) -> bool:
    """Whether what a hook yields is an Ask that an engine can answer."""
    return (
        isinstance(ask, Ask)
        and isinstance(ask.job, str)
        and [*ask.to] == sorted({*ask.to} & {*range(server.n_clients)}) != []
        and _models(ask.params, ask.buffers, server)
        and tree(ask.shared)
        and _rows(ask.each, len(ask.to))
    )


class Returns(NamedTuple):
    """What a hook may return."""

    description: str
    kind: type
    fits: Callable[..., bool]  # (value, the hook's arguments)
    nothing: bool = True  # whether None is allowed
    # Of a foreign method, also checked where it is not too slow: see `call`.
    whole: Callable[..., bool] = lambda *_: True


A_TREE = Returns(
    "a dict of tensors (dense, detached), which may nest",
    dict,
    lambda result, *_: tree(result),
    nothing=False,
)
LIKE = "with the names, shapes and dtypes of"
A_CHANGE = f"a Change of {{}}, tensors {LIKE} the server's, with state that `init_server` made"
AN_ANSWER = Returns(
    f"an Answer of upload, metrics, and memory {LIKE} that `init_client` made",
    Answer,
    lambda result, _, client: _answers(result, client, False),
    nothing=False,
)
HOOKS = {
    "init_client": A_TREE,
    "optimizer": Returns("an Optimizer, or None", Optimizer, lambda *_: True),
    "warm_start": Returns(
        f"an optimiser's state, and in 'params' tensors {LIKE} parameters, or None",
        dict,
        lambda result, *_: tree(result),
        whole=lambda result, client: _part(
            result, client.task.optimizer.init(client.params) | {START: client.params}
        ),
    ),
    "prepare": A_TREE,
    "gradient_point": Returns(
        f"a dict of tensors {LIKE} parameters, or None",
        dict,
        lambda result, w, *_: _named(result) and result.keys() <= w.keys(),
        whole=lambda result, w, *_: _part(result, w),
    ),
    "logits": Returns(
        "logits of the shape that it is given, or None",
        Tensor,
        lambda result, logits, *_: result.shape == logits.shape and result.is_floating_point(),
    ),
    "penalty": Returns(
        "a tensor without axes (one number, not an integer), or None",
        Tensor,
        lambda result, *_: result.ndim == 0 and result.is_floating_point(),
    ),
    "sample_gradients": Returns(
        f"a dict of tensors {LIKE} all parameters",
        dict,
        lambda result, grads, *_: _named(result) and result.keys() == grads.keys(),
        nothing=False,
        whole=lambda result, grads, *_: _alike(result, row(grads, 0)),
    ),
    "gradient_term": Returns(
        f"a dict of tensors {LIKE} parameters, or None",
        dict,
        lambda result, w, _: _named(result) and result.keys() <= w.keys(),
        whole=lambda result, w, _: _part(result, w),
    ),
    "update_factor": Returns(
        "a dict with names of parameters, a number of their dtype for each of their rows, or None",
        dict,
        lambda result, client: _part(
            result,
            {
                name: leaf.new_empty(leaf.shape[:1])
                for name, leaf in (client.task.personal.get("params", {}) | client.params).items()
            },
        ),
    ),
    "own_model": Returns(
        f"an OwnModel of tensors {LIKE} all parameters of w, or None",
        OwnModel,
        lambda result, v, w, _: _named(result.params) and result.params.keys() == w.keys(),
        whole=lambda result, v, w, _: _alike(tree_map(Tensor.detach, result.params), w),
    ),
    "leaving": Returns(
        f"a dict of tensors {LIKE} all parameters, or None",
        dict,
        lambda result, delta, _: _alike(result, delta),
    ),
    "report": AN_ANSWER,
    "answer": Returns(
        f"an Answer of upload, metrics, and params, buffers and memory {LIKE} the client's",
        Answer,
        lambda result, client: _answers(result, client, True),
        nothing=False,
    ),
    "init_server": A_TREE,
    "choose": Returns(
        "a tuple of ascending ids of clients, one or more, at most as many as in server.cohort; or "
        "None",
        tuple,
        lambda result, server: (
            [*result] == sorted({*result} & {*range(server.n_clients)})
            and 1 <= len(result) <= len(server.cohort)
        ),
    ),
    "assign": Returns(
        A_CHANGE.format("state") + ", or None", Change, partial(_changes, fields=("state",))
    ),
    "broadcast": A_TREE,
    "message": A_TREE._replace(
        description="a dict of tensors with a row for each client of server.cohort",
        fits=lambda result, server: _rows(result, len(server.cohort)),
    ),
    "refine": Returns(
        "a Reply with the clients and n of server.replies, and deltas and buffers of their shapes; "
        "or None",
        Reply,
        _refines,
    ),
    "weigh": Returns(
        "a tensor with a number for each client, or None",
        Tensor,
        lambda result, server: _is_plain(result) and result.shape == server.replies.n.shape,
    ),
    "average": Returns(
        f"a dict of tensors {LIKE} all parameters, or these and all buffers, or None",
        dict,
        lambda result, server: (
            _alike(result, server.start) or _alike(result, server.start | server.buffers)
        ),
    ),
    "step": Returns(
        A_CHANGE.format("state, params, buffers and evaluated, and of metrics"),
        Change,
        partial(_changes, fields=("state", "params", "buffers", "evaluated", "metrics")),
        nothing=False,
    ),
    "learn": Returns(
        A_CHANGE.format("state, params and buffers") + ", or None",
        Change,
        partial(_changes, fields=("state", "params", "buffers")),
    ),
    "survey": Returns(
        A_CHANGE.format("state, and params in round 0 only") + ", or None", Change, _surveys
    ),
    "finish": Returns(
        A_CHANGE.format("params") + ", or None", Change, partial(_changes, fields=("params",))
    ),
}


OURS = "fedml_noniid."  # modules whose methods the tests of this repository hold to the contract
# Hooks of each step: of a foreign method, their first call in a run is watched. Of the others, all
# calls are.
IN_STEPS = (
    "gradient_point",
    "logits",
    "penalty",
    "sample_gradients",
    "gradient_term",
    "own_model",
)
watched: set[tuple[type, str]] = set()  # (method, hook of a step) of the last composed recipe
# What a hook does, without a word in a run, and what is allowed instead. The method would train
# something else, or never the same again.
IN_PLACE = (
    "changes in place what it is given",
    "a new tensor or dict, such as `a + b` for `a.add_(b)`",
)
DRAWN = (
    "draws from torch's global generator",
    "functions of core.randomness with `client.key`, `batch.key` or `server.key`",
)


def call(c: Component, hook: str, *args: Any) -> Any:
    """The checked result of a hook, or its generator of Asks.

    RecipeError names method, hook and mistake.
    """
    watch = is_foreign(c) and (type(c), hook) not in watched and overrides(c, hook)
    if watch and hook in IN_STEPS:
        watched.add((type(c), hook))
    try:
        with watching(c, hook, *args) if watch else nullcontext():
            result = getattr(c, hook)(*args)
    except Exception as error:  # of any kind: the code is the method's
        raise failure(c, hook, error) from error
    return result if isinstance(result, Generator) else checked(c, hook, result, *args, whole=watch)


def is_foreign(c: Component) -> bool:
    """Whether a method is of another package."""
    return not type(c).__module__.startswith(OURS)


@contextmanager
def watching(c: Component, hook: str, *args: Any) -> Iterator[None]:
    """Inside, a hook runs. RecipeError if it changes a tensor or a dict of `args` in place, or
    draws what no key repeats."""
    leaves = [*_tensors(args)]  # kept: without a reference, torch may make another object of each
    before = [(id(leaf), leaf._version) for leaf in leaves]
    generator = torch.get_rng_state()
    try:
        yield
    finally:  # also where a generator of Asks ends, by StopIteration
        changed = before != [(id(leaf), leaf._version) for leaf in _tensors(args)]
        if changed or not torch.equal(generator, torch.get_rng_state()):
            mistake, allowed = IN_PLACE if changed else DRAWN
            code = inspect.unwrap(getattr(type(c), hook)).__code__
            raise RecipeError(
                f"{c.name!r}: {hook} {mistake}, {code.co_filename}, from line "
                f"{code.co_firstlineno}; allowed: {allowed}"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a hook's arguments, inside the wrappers of vmap: these count no changes."""
    if isinstance(value, Tensor):
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        yield value
    parts = vars(value) if isinstance(value, Client | Pass | Server | Reply) else value
    parts = tuple(parts.values()) if isinstance(parts, dict) else parts
    for part in parts if isinstance(parts, tuple) else ():
        yield from _tensors(part)


def checked(c: Component, hook: str, result: Any, *args: Any, whole: bool = False) -> Any:
    """What a hook returned. RecipeError if it may not return that."""
    allowed = HOOKS[hook]
    if result is None and allowed.nothing:
        return result
    fits = isinstance(result, allowed.kind) and allowed.fits(result, *args)
    if not fits or (whole and not allowed.whole(result, *args)):
        raise RecipeError(
            f"{c.name!r}: {hook} returned {described(result)}; allowed: {allowed.description}"
        )
    return result


def failure(c: Component, hook: str, error: Exception) -> Exception:
    """An error in a hook as one line.

    An error in our own words, and a lack of memory, stays as it is.
    """
    if isinstance(error, UserError | MemoryError | torch.OutOfMemoryError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = next((f for f in traceback.extract_tb(error.__traceback__)[::-1] if f.name == hook), last)
    text = " ".join(str(error).split())[:200]
    return RecipeError(
        f"{c.name!r}: {hook} failed, {at.filename}, line {at.lineno}: {type(error).__name__}: "
        f"{text}"
    )


def described(returned: Any) -> str:
    """A value in words: types, names and shapes, not the numbers."""
    if isinstance(returned, Tensor):
        kind = f"{returned.dtype}, {returned.device}".removeprefix("torch.")
        kind += ", requires grad" * returned.requires_grad + ", sparse" * returned.is_sparse
        return f"a tensor of shape {list(returned.shape)}, {kind}"
    if isinstance(returned, dict):
        return (
            "{" + ", ".join(f"{key!r}: {described(value)}" for key, value in returned.items()) + "}"
        )
    if isinstance(returned, Reply) or hasattr(returned, "_asdict"):
        fields = vars(returned) if isinstance(returned, Reply) else returned._asdict()
        filled = {key: part for key, part in fields.items() if part is not None and part != {}}
        return f"{type(returned).__name__} of {described(filled)}"
    return "None" if returned is None else f"{type(returned).__name__} {shown(returned)}"


def check_kind(c: Component) -> None:
    """RecipeError for a public name that is no hook, for example a misspelt one, and for values of
    a wrong kind."""
    for name in _unknown(type(c)):
        raise RecipeError(
            f"{c.name!r}: {name!r} is no hook and no hyper-parameter, and nothing in the class "
            "uses it",
            allowed="hooks; the name of a helper begins with _",
            meant=closest(name, _public(Component)),
        )
    kinds = {  # of class variables and properties: what fits, and what is allowed
        "weights": (c.weights in get_args(Weights), ", ".join(get_args(Weights))),
        "needs": (isinstance(c.needs, Needs), "Needs(...)"),
        "packing": (isinstance(c.packing, Packing | None), "an object with `pack` and `unpack`"),
        "exclusive": (
            all(isinstance(claim, Exclusive) for claim in c.exclusive),
            "a set of Exclusive",
        ),
    }
    for name, (fits, allowed) in kinds.items():
        if not fits:
            value = shown(getattr(c, name))
            raise RecipeError(f"{c.name!r}: {name} = {value} is refused; allowed: {allowed}")


def check_models(c: Component, state: Tree, server: Server) -> None:
    """RecipeError if the first state of a component that owns RECEIVED lacks its models."""
    models, model_of = state.get(MODELS), state.get(MODEL_OF)
    like = {"params": server.params, "buffers": server.buffers}
    rows = next((leaf.shape[:1] for leaf in _tensors(models)), (0,))
    of_clients = torch.zeros(server.n_clients, dtype=torch.int64, device=server.keys.device)
    if not (rows > (0,) and _alike(models, like, rows) and _alike(model_of, of_clients)):
        raise RecipeError(
            f"{c.name!r}: init_server returned {described(state)}",
            allowed=f"with {MODELS!r}, params and buffers {LIKE} the server's behind an axis [K], "
            f"and {MODEL_OF!r}, an int64 for each of the {server.n_clients} clients",
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
    todo: list[Any] = [getattr(inner_code, "__code__", None) for inner_code in (value, *inner)]
    while todo:
        if isinstance(code := todo.pop(), CodeType):
            yield from code.co_names
            todo += code.co_consts
