"""Splits off the personal part of a model, which is what `Needs.personal` says.

It is {"params": ..., "buffers": ...}. `split_personal` takes it out of w_0. So no model that is
sent, averaged or stored by the server has it. Each client has its personal in its memory, under
PERSONAL, and begins with that of w_0. Local training trains both parts together. Other methods see
the shared part only. Their passes take the personal part from `client.task`; after local training,
that is the trained one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from fedml_noniid.core.component import BODY, HEAD, MODEL_OF, MODELS, NORMS, Client
from fedml_noniid.core.data import Samples
from fedml_noniid.core.losses import CROSS_ENTROPY, Loss
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.task import Network, Task
from fedml_noniid.core.training import Step
from fedml_noniid.core.trees import Params, Tree, leading, row
from fedml_noniid.data.reading import Read
from fedml_noniid.data.streams import key
from fedml_noniid.engines.evaluation import Evaluation, evaluate, outputs_of
from fedml_noniid.models.model import Model
from fedml_noniid.models.modules import nearest

PERSONAL = "own"  # among the names of methods in a client's memory


def split_personal(
    network: Model, parts: Collection[str], params: Params, buffers: Params
) -> tuple[Params, Params, Tree]:
    """(shared parameters, shared buffers, personal part); `parts`: as in `Needs.personal`.

    No personal part: {}. RecipeError for a pattern that names nothing.
    """
    names = {*params, *buffers}
    kept = {name for part in sorted(parts) for name in _names(network, part, names)}

    def split(tree: Params) -> tuple[Params, Params]:
        return without(tree, kept), {name: leaf for name, leaf in tree.items() if name in kept}

    (shared, of_params), (others, of_buffers) = split(params), split(buffers)
    return shared, others, {"params": of_params, "buffers": of_buffers} if kept else {}


def _names(network: Model, part: str, names: set[str]) -> set[str]:
    """The parameters and buffers of a part."""
    if part == NORMS:
        return {name for name in names if name.rpartition(".")[0] in network.norms}
    head = {*network.layers[-1].parameters}
    if part in (HEAD, BODY):
        return head & names if part == HEAD else names - head
    matching = {name for name in names if fnmatchcase(name, part)}
    if not matching:
        raise RecipeError(
            f"clients can't keep {part!r}: {network.name!r} trains no such parameter or buffer",
            allowed=f"a pattern of {nearest(part, names)}",
        )
    return matching


def personalized(client: Client, memory: Tree) -> Client:
    """The client whose passes take its personal part."""
    return (
        replace(client, task=replace(client.task, personal=memory[PERSONAL]))
        if PERSONAL in memory
        else client
    )


def joined(params: Params, buffers: Params, memory: Tree) -> tuple[Params, Params]:
    """The received model with the client's personal part, as it trains."""
    personal = memory.get(PERSONAL, {})
    return params | personal.get("params", {}), buffers | personal.get("buffers", {})


def parted(
    memory: Tree, params: Params, buffers: Params, state: Tree
) -> tuple[Tree, tuple[Params, Params, Tree]]:
    """(memory with the trained personal part, and without it: parameters, buffers, the optimiser's
    state)."""
    names = {name for tree in memory[PERSONAL].values() for name in tree}
    trained = {"params": params, "buffers": buffers}
    personal = {
        part: {name: trained[part][name] for name in tree}
        for part, tree in memory[PERSONAL].items()
    }
    return memory | {PERSONAL: personal}, (
        without(params, names),
        without(buffers, names),
        without(state, names),
    )


@dataclass(frozen=True, kw_only=True)
class Alternating(Step):
    """Takes the step of another form, and keeps the parameters that rest: some steps train the
    client's own part alone, the others all the rest."""

    step: Step
    task: Task
    flags: Tensor  # [S, ...] bool: whether a step trains the client's own part

    def __call__(
        self, grads: Params, params: Params, state: Tree, s: int = 0, out: Params | None = None
    ) -> tuple[Params, Tree]:
        """As `Step`; nothing is changed in place."""
        moved, after = self.step(grads, params, state, s)
        return self._kept(s, params, moved, params), self._kept(s, params, after, state)

    def _kept(self, s: int, params: Params, new: Tree, old: Tree) -> Tree:
        """The tree `new`, with the leaves as in `old` of the parameters that rest. What is of no
        parameter, such as Adam's count of steps, is new."""
        kept: Tree = {}
        for name, leaf in new.items():
            if isinstance(leaf, dict):
                kept[name] = self._kept(s, params, leaf, old[name])
            elif name in params:
                own = name in self.task.personal["params"]
                moves = self.flags[s] if own else ~self.flags[s]
                kept[name] = torch.where(leading(moves, leaf), leaf, old[name])
            else:
                kept[name] = leaf
        return kept


def over(base: Tree, top: Tree) -> Tree:
    """The tree `base` with the leaves that `top` has."""
    return {
        name: over(leaf, top.get(name, {})) if isinstance(leaf, dict) else top.get(name, leaf)
        for name, leaf in base.items()
    }


def without(tree: Tree, names: set[str]) -> Tree:
    """The tree without the leaves of these names, at any depth."""
    return {
        name: without(leaf, names) if isinstance(leaf, dict) else leaf
        for name, leaf in tree.items()
        if name not in names
    }


class ClientModels(NamedTuple):
    """Holds the clients' models: one shared part, and the personal parts."""

    network: Network
    params: Params
    buffers: Params
    personal: Tree  # as in `client_model`
    seed: int  # noise of the test samples is drawn from it and the client
    loss: Loss = CROSS_ENTROPY

    def evaluate(self, client: int, samples: Samples) -> Evaluation:
        """A client's model on samples."""
        model = client_model(self.params, self.buffers, self.personal, client)
        read = noise_of(samples, client, self.seed)
        return evaluate(self.network, *model, samples, read=read, loss=self.loss)

    def outputs(self, client: int, samples: Samples) -> Tensor:
        """The logits of a client's model on samples, [n, C]."""
        model = client_model(self.params, self.buffers, self.personal, client)
        return outputs_of(self.network, *model, samples, noise_of(samples, client, self.seed))


def client_model(
    params: Params, buffers: Params, personal: Tree, client: int
) -> tuple[Params, Params]:
    """The model with a client's personal part.

    `personal`: of all clients, leaves [N, ...]; or MODELS, leaves [K, ...], and MODEL_OF, [N].
    """
    kept = [row({part: personal.get(part, {}) for part in ("params", "buffers")}, client)]
    if MODEL_OF in personal:
        kept = [row(personal[MODELS], int(personal[MODEL_OF][client])), *kept]
    for mine in kept:  # a file of weights has no name for a model without buffers
        params, buffers = params | mine.get("params", {}), buffers | mine.get("buffers", {})
    return params, buffers


def noise_of(samples: Samples, client: int, seed: int) -> Read | None:
    """How a client reads its test samples; None: as they are."""
    if samples.noise is None:
        return None
    return Read(torch.tensor(key(seed, "noisy test", client), device=samples.x.device))
