"""Watches what the hooks of a foreign method do with the tensors that they are given.

A method that changes one in place would train something else without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Client, Component, Reply, Server, overrides
from fedml_noniid.plugins.core.contract import checked
from fedml_noniid.plugins.core.data import Pass
from fedml_noniid.plugins.core.options import RecipeError

OURS = "fedml_noniid."  # modules whose methods the tests of this repository hold to the contract
# Hooks that run once in a round, or less often: they are watched in all rounds.
OF_ROUNDS = (
    "init_server",
    "init_client",
    "broadcast",
    "message",
    "leaving",
    "refine",
    "weigh",
    "average",
    "step",
    "learn",
    "survey",
    "finish",
)


def is_foreign(c: Component) -> bool:
    """Whether a method is of another package."""
    return not type(c).__module__.startswith(OURS)


def watched(algorithm: Algorithm, hooks: Collection[str] = OF_ROUNDS) -> Algorithm:
    """The algorithm; these hooks of foreign methods refuse to change in place what they are
    given."""
    components = algorithm.components
    if not any(map(is_foreign, components)):
        return algorithm
    made = (_watched(c, hooks) if is_foreign(c) else c for c in components)
    return replace(algorithm, components=tuple(made))


def _watched(c: Component, hooks: Collection[str]) -> Component:
    kind = type(c)
    brought = {hook: _watching(kind, hook) for hook in hooks if overrides(c, hook)}
    made = type(kind.__name__, (kind,), brought | {"__module__": kind.__module__})
    found: Component = made(**{field.name: getattr(c, field.name) for field in fields(c)})
    return found


def _watching(kind: type[Component], hook: str) -> Callable[..., Any]:
    function = getattr(kind, hook)

    def unchanged(name: str, given: Any, run: Callable[..., Any], *args: Any) -> Any:
        leaves = [*map(_bare, _tensors(given))]
        before = [(id(leaf), leaf._version) for leaf in leaves]
        found = run(*args)
        if before != [(id(leaf), leaf._version) for leaf in map(_bare, _tensors(given))]:
            code = inspect.unwrap(function).__code__
            raise RecipeError(
                f"{name!r}: {hook} changes in place what it is given, {code.co_filename}, from "
                f"line {code.co_firstlineno}; allowed: a new tensor or dict, such as `a + b` for "
                "`a.add_(b)`"
            )
        return found

    def exchanging(self: Component, args: Any, asks: Generator[Any, Any, Any]) -> Any:
        # Between two Asks, the engine may take the memory of earlier replies again.
        reply = None
        while True:
            ask, end = unchanged(self.name, (args, reply), _next, asks, reply)
            if end is not None:
                return end.value
            reply = yield ask

    def watched(self: Component, *args: Any) -> Any:
        found = unchanged(self.name, args, function, self, *args)
        if isinstance(found, Generator):
            return exchanging(self, args, found)
        return checked(self, hook, found, *args, once=True)

    return watched


def _next(asks: Generator[Any, Any, Any], reply: Any) -> tuple[Any, StopIteration | None]:
    """The next Ask, or the end."""
    try:
        return asks.send(reply), None
    except StopIteration as end:
        return None, end


def _bare(leaf: Tensor) -> Tensor:
    """The tensor inside the wrappers of vmap: only it counts changes."""
    while torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        leaf = torch._C._functorch.get_unwrapped(leaf)
    return leaf


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a hook's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Client | Pass | Server | Reply):
        yield from _tensors(tuple(vars(value).values()))
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
