"""Tries a foreign method before it runs, in every runtime: vmap must take its client's hooks.

Without this, a method that reads a value (`.item()`, `if` on a tensor) would run on silos and fail
beside other clients. The hooks that run in each step are watched here, as `engines.watching` says.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

from fedml_noniid.plugins.core.algorithm import TRAIN
from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.randomness import noised
from fedml_noniid.plugins.core.trees import row
from fedml_noniid.plugins.engines.clients import Clients
from fedml_noniid.plugins.engines.sequential import Sequential
from fedml_noniid.plugins.engines.vectorized import Vectorized
from fedml_noniid.plugins.engines.watching import is_foreign, watched
from fedml_noniid.plugins.models.model import Model

HOOKS = (
    "warm_start",
    "prepare",
    "gradient_point",
    "logits",
    "penalty",
    "sample_gradients",
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
        self._needed = any(map(is_foreign, clients.algorithm.components))
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
        clients: Any = copy.copy(self.clients)
        clients.algorithm = watched(clients.algorithm, HOOKS)
        clients.noised = noised  # vmap can't take a silo's own
        few = ask._replace(to=ask.to[:2], each=row(ask.each, slice(2)))
        clients.trained = dict.fromkeys(few.to, (self._sent.params, self._sent.buffers))
        if cast("Model", clients.task.network).vmappable:
            Vectorized(clients).try_out(few, round_)
            return
        clients.steps = lambda client, _: self.clients.steps(client, round_).first
        clients.memory = SimpleNamespace(row=clients.memory.row, put_row=lambda *_: None)
        Sequential(clients).answer(few, round_)
