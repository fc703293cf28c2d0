"""Tries a foreign method before it runs, in every runtime: vmap must take its client's hooks.

Without this, a method that reads a value (`.item()`, `if` on a tensor) would run on silos and fail
beside other clients. A method that changes in place what it is given would train something else
without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import TRAIN
from fedml_noniid.plugins.core.component import Ask, Client, Component, overrides
from fedml_noniid.plugins.core.data import Pass
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.randomness import noised
from fedml_noniid.plugins.engines.clients import Clients
from fedml_noniid.plugins.engines.vectorized import Vectorized
from fedml_noniid.plugins.models.model import Model

OURS = "fedml_noniid."  # modules whose methods the tests of this repository hold to the contract
HOOKS = (
    "warm_start",
    "prepare",
    "gradient_point",
    "logits",
    "penalty",
    "gradient_term",
    "update_factor",
    "own_model",
    "report",
    "answer",
)


class Preflight:
    """Tries each job of a recipe once."""

    def __init__(self, clients: Clients) -> None:
        """`clients`: read, and never changed."""
        self.clients = clients
        components = clients.algorithm.components
        foreign = any(not type(c).__module__.startswith(OURS) for c in components)
        self._needed = foreign and cast("Model", clients.task.network).vmappable
        self._tried: set[tuple[str, str]] = set()
        self._sent: Ask | None = None  # the last one with a model

    def __call__(self, ask: Ask, round_: int) -> None:
        """RecipeError names the method and the hook that vmap can't take, or that changes a tensor
        in place."""
        if not self._needed or not (ask.owner or ask.job == TRAIN):
            return
        self._sent = ask if ask.params or self._sent is None else self._sent
        if (ask.owner, ask.job) in self._tried:
            return
        self._tried.add((ask.owner, ask.job))
        clients, algorithm = copy.copy(self.clients), self.clients.algorithm
        clients.algorithm = replace(
            algorithm, components=tuple(map(_watched, algorithm.components))
        )
        clients.graphs, clients.noised = None, noised  # vmap can't take a silo's own
        clients.trained = dict.fromkeys(ask.to[:1], (self._sent.params, self._sent.buffers))
        Vectorized(clients).try_out(ask, round_)


def _watched(c: Component) -> Component:
    """The component, with hooks that refuse to change in place what they are given."""
    kind = type(c)
    made = type(
        kind.__name__,
        (kind,),
        {hook: _watching(kind, hook) for hook in HOOKS if overrides(c, hook)},
    )
    found: Component = made(**{field.name: getattr(c, field.name) for field in fields(c)})
    return found


def _watching(kind: type[Component], hook: str) -> Callable[..., Any]:
    def watched(self: Component, *args: Any) -> Any:
        given = [_bare(leaf) for leaf in _tensors(args)]
        before = [leaf._version for leaf in given]
        found = getattr(kind, hook)(self, *args)
        if before != [leaf._version for leaf in given]:
            raise RecipeError(
                f"{self.name!r}: {hook} changes a tensor in place that it is given; allowed: "
                "operations that make a "
                "new tensor, such as `a + b` for `a.add_(b)`"
            )
        return found

    return watched


def _bare(leaf: Tensor) -> Tensor:
    """The tensor inside the wrappers of vmap: only it counts changes."""
    while torch._C._functorch.is_functorch_wrapped_tensor(leaf):
        leaf = torch._C._functorch.get_unwrapped(leaf)
    return leaf


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a hook's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Client | Pass):
        yield from _tensors(tuple(vars(value).values()))
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
