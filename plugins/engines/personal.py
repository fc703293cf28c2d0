"""Splits off the personal part of a model: the batch norms, with `Needs(personal_norms=True)`.

It is {"params": ..., "buffers": ...}. `split_personal` takes it out of w_0. So no model that is
sent, averaged or stored by the server has it. Each client has its personal in its memory, under
PERSONAL, and begins with that of w_0. Local training trains both parts together. Other methods see
the shared part only. Their passes take the personal part from `client.task`; after local training,
that is the trained one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from fedml_noniid.plugins.core.component import Client
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.task import Network
from fedml_noniid.plugins.core.trees import Params, Tree, row
from fedml_noniid.plugins.data.reading import Read
from fedml_noniid.plugins.data.streams import key
from fedml_noniid.plugins.engines.evaluation import Evaluation, evaluate

PERSONAL = "own"  # among the names of methods in a client's memory


def split_personal(
    params: Params, buffers: Params, norms: Collection[str]
) -> tuple[Params, Params, Tree]:
    """(shared parameters, shared buffers, personal part): the batch norms `norms` are personal.

    No personal part: {}.
    """

    def split(tree: Params) -> tuple[Params, Params]:
        personal = {name: leaf for name, leaf in tree.items() if name.rpartition(".")[0] in norms}
        return without(tree, {*personal}), personal

    (shared, of_params), (others, of_buffers) = split(params), split(buffers)
    personal = {"params": of_params, "buffers": of_buffers}
    return shared, others, personal if of_buffers else {}


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
    """Holds the clients' models: one shared part, and the personal parts, leaves [N, ...]."""

    network: Network
    params: Params
    buffers: Params
    personal: Tree
    seed: int  # noise of the test samples is drawn from it and the client

    def evaluate(self, client: int, samples: Samples) -> Evaluation:
        """A client's model on samples."""
        model = client_model(self.params, self.buffers, self.personal, client)
        read = noise_of(samples, client, self.seed)
        return evaluate(self.network, *model, samples, read=read)


def client_model(
    params: Params, buffers: Params, personal: Tree, client: int
) -> tuple[Params, Params]:
    """The model with a client's personal part; `personal`: of all clients, leaves [N, ...]."""
    mine = row(personal, client)
    return params | mine["params"], buffers | mine["buffers"]


def noise_of(samples: Samples, client: int, seed: int) -> Read | None:
    """How a client reads its test samples; None: as they are."""
    if samples.noise is None:
        return None
    return Read(torch.tensor(key(seed, "noisy test", client), device=samples.x.device))
