"""Adds a cohort's updates up while its clients train, where one model in memory has to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Replies, overrides
from fedml_noniid.plugins.core.sums import Growing
from fedml_noniid.plugins.core.trees import Tree, n_bytes, tree_map
from fedml_noniid.plugins.engines.callbacks import Callback
from fedml_noniid.plugins.engines.plan import Start

ADDED = ("deltas", "buffers", "upload")  # parts of a reply


def possible(start: Start, callbacks: Iterable[Callback]) -> bool:
    """Whether the updates of this run may be added up as they come: nobody reads single ones.

    The result has the same bits.
    """
    reads = any(_reads(callback) for callback in callbacks)
    return _only_sums(start.algorithm) and not start.plan.observing and not reads


def reason(start: Start) -> str:
    """Why updates that may be added up as they come are; "" if they are held."""
    plan = start.plan
    size = plan.cohort * (n_bytes(start.params) + n_bytes(start.buffers)) >> 20
    if size < plan.memory_mb:
        return ""
    return f"{size} MB of updates in a round, more than machine.memory_mb = {plan.memory_mb}"


def _only_sums(of: Algorithm) -> bool:
    weighed = any(overrides(c, "weigh") for c in of.components)
    return of.needs.replies == Replies.SUMS and of.exchanges.round == 1 and not weighed


def _reads(callback: Callback) -> bool:
    """Whether a callback may read single updates."""
    hooks = ("on_exchange", "measure")
    return any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)


class Sums:
    """The sums of the clients' answers to training."""

    def __init__(
        self, algorithm: Algorithm, n: Tensor, positions: Sequence[int] | None = None
    ) -> None:
        """`n` [M]: the samples of each client of the cohort. `positions`: in the cohort, of the
        clients whose answers come here; all if None."""
        self._positions = range(len(n)) if positions is None else positions
        self.omega = (torch.ones_like(n) if algorithm.uniform else n).double()
        self.unweighted = {c.name for c in algorithm.components if c.needs.unweighted}
        self.parts: Tree = {}

    def take(self, position: int, answer: Tree) -> Tree:
        """Adds the model and uploads of a client, by its position among those that come here.
        Returns the rest of its answer."""
        at = self._positions[position]
        given = {key: answer[key] for key in ADDED}
        self.parts = self.parts or self._empty(given)
        tree_map(lambda sums, leaf: sums.put(at, leaf), self.parts, given)
        return {key: of for key, of in answer.items() if key not in ADDED}

    def _empty(self, given: Tree) -> Tree:
        """The sums of no client yet, in the structure of a client's answer."""
        ones = torch.ones_like(self.omega)
        uploads = {
            name: growing(of, ones if name in self.unweighted else self.omega)
            for name, of in given["upload"].items()
        }
        return growing(given | {"upload": {}}, self.omega) | {"upload": uploads}

    def state(self) -> Tree:
        """What another process absorbs; a tensor's part has the name "" below its own."""
        found: Tree = tree_map(lambda sums: {"": sums.state()}, self.parts)
        return found

    def absorb(self, state: Tree) -> None:
        """Adds what another process has added up."""
        self.parts = self._absorbed(self.parts, state)

    def _absorbed(self, mine: Any, state: Tree) -> Any:
        if "" not in state:
            return {key: self._absorbed((mine or {}).get(key), of) for key, of in state.items()}
        part = state[""]
        sums = mine or Growing(part["shape"].tolist(), part["norms"].dtype, part["omega"])
        sums.absorb(part)
        return sums


def growing(tree: Tree, omega: Tensor) -> Tree:
    """Sums by weights [M] of leaves such as those of one client."""
    found: Tree = tree_map(lambda leaf: Growing(leaf.shape, leaf.dtype, omega), tree)
    return found
