"""Adds a cohort's updates up while its clients train, where one model in memory has to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN, Algorithm
from fedml_noniid.core.component import Replies, overrides
from fedml_noniid.core.sums import Growing
from fedml_noniid.core.trees import Params, Tree, n_bytes, tree_map
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.packing import flatten, unflatten
from fedml_noniid.engines.plan import Start

ADDED = ("deltas", "buffers", "upload")  # parts of a reply


def reason(start: Start, callbacks: Iterable[Callback]) -> str:
    """Why the updates of this run are added up as they come, with the same bits; "" if they are
    held, as they are few or somebody may read single ones."""
    plan = start.plan
    if plan.observing or reader(start.algorithm, callbacks):
        return ""
    size = plan.cohort * (n_bytes(start.params) + n_bytes(start.buffers)) >> 20
    if size < plan.memory_mb:
        return ""
    return f"{size} MB of updates in a round, more than machine.memory_mb = {plan.memory_mb}"


def reader(algorithm: Algorithm, callbacks: Iterable[Callback]) -> str:
    """Who may read updates of single clients; "" if nobody does."""
    for c in algorithm.components:
        if (
            c.needs.replies != Replies.SUMS
            or overrides(c, "weigh")
            or c.exchanges(algorithm.setting).round
        ):
            return f"method {c.name!r}"
    for callback in callbacks:
        hooks = ("on_exchange", "measure")
        if any(getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks):
            return f"callback {type(callback).__name__}"
    return ""


class Weighing(NamedTuple):
    """Says by which weights the replies to a job are added up: n_k, or 1."""

    uniform: bool
    unweighted: frozenset[str]  # components whose uploads are added up without weights

    @staticmethod
    def from_recipe(algorithm: Algorithm, job: str) -> Weighing:
        """Of a recipe; answers to other jobs than training have no weights."""
        names = frozenset(c.name for c in algorithm.components if c.needs.unweighted)
        return Weighing(algorithm.uniform or job != TRAIN, names)

    def omega(self, key: str, n: Tensor) -> Tensor:
        """The weights [M], float64, of the tensor `key` of clients with `n` [M] samples."""
        return (torch.ones_like(n) if self.ones(key) else n).double()

    def ones(self, key: str) -> bool:
        """Whether the tensor `key` of a reply has the weight 1."""
        part, _, name = key.partition("/")
        return self.uniform or (part == "upload" and name.partition("/")[0] in self.unweighted)


class Sums:
    """The sums of the clients' answers to training."""

    def __init__(self, algorithm: Algorithm, n: Tensor) -> None:
        """`n` [M]: the samples of each client of the cohort."""
        self._by, self._n = Weighing.from_recipe(algorithm, TRAIN), n
        self.parts: Tree = {}

    def take(self, position: int, answer: Tree) -> Tree:
        """Adds the model and uploads of a client, by its position in the cohort. Returns the rest
        of its answer."""
        added = {key: answer[key] for key in ADDED}
        self.parts = self.parts or self._empty(added)
        tree_map(lambda sums, leaf: sums.put(position, leaf), self.parts, added)
        return {key: tree for key, tree in answer.items() if key not in ADDED}

    def _empty(self, added: Tree) -> Tree:
        """The sums of no client yet, in the structure of a client's answer."""
        made = {
            key: Growing(leaf.shape, leaf.dtype, self._by.omega(key, self._n))
            for key, leaf in flatten(added).items()
        }
        return unflatten(cast("Params", made), added)  # it stands in place of tensors

    def state(self) -> Tree:
        """What another process absorbs; a tensor's part has the name "" below its own."""
        states: Tree = tree_map(lambda sums: {"": sums.state()}, self.parts)
        return states

    def absorb(self, state: Tree) -> None:
        """Adds what another process has added up."""
        self.parts = self._absorbed(self.parts, state)

    def _absorbed(self, mine: Any, state: Tree) -> Any:
        if "" not in state:
            return {key: self._absorbed((mine or {}).get(key), tree) for key, tree in state.items()}
        part = state[""]
        sums = mine or Growing(part["shape"].tolist(), part["norms"].dtype, part["omega"])
        sums.absorb(part)
        return sums
