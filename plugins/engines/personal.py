"""Splits off the personal part of a model: the batch norms, with `Needs(personal_norms=True)`.

It is {"params": ..., "buffers": ...}. `split_personal` takes it out of w_0. So no model that is
sent, averaged or stored by the server has it. Each client has its own in its memory, under
PERSONAL, and begins with that of w_0. Local training trains both parts together. Other methods see
the shared part only. Their passes take the personal part from `client.task`; after local training,
that is the trained one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedml_noniid.plugins.core.component import Client
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.task import Network
from fedml_noniid.plugins.core.trees import Params, Tree, row
from fedml_noniid.plugins.data.reading import Read
from fedml_noniid.plugins.data.streams import key
from fedml_noniid.plugins.engines.evaluation import Evaluation, evaluate

PERSONAL = "own"  # among the names of methods in a client's memory


def split_personal(params: Params, buffers: Params) -> tuple[Params, Params, Tree]:
    """(shared parameters, shared buffers, own part): own are the layers that have buffers.

    No own part: {}.
    """
    norms = {name.rpartition(".")[0] for name in buffers}
    own = {name: leaf for name, leaf in params.items() if name.rpartition(".")[0] in norms}
    shared = {name: leaf for name, leaf in params.items() if name not in own}
    return shared, {}, {"params": own, "buffers": buffers} if buffers else {}


def personalized(client: Client, memory: Tree) -> Client:
    """The client whose passes take its own part."""
    return (
        replace(client, task=replace(client.task, personal=memory[PERSONAL]))
        if PERSONAL in memory
        else client
    )


def joined(params: Params, buffers: Params, memory: Tree) -> tuple[Params, Params]:
    """The received model with the client's own part, as it trains."""
    own = memory.get(PERSONAL, {})
    return params | own.get("params", {}), buffers | own.get("buffers", {})


def parted(
    memory: Tree, params: Params, buffers: Params, state: Tree
) -> tuple[Tree, tuple[Params, Params, Tree]]:
    """(memory with the trained own part, and without it: parameters, buffers, the optimiser's
    state)."""
    names = {name for tree in memory[PERSONAL].values() for name in tree}
    trained = {"params": params, "buffers": buffers}
    own = {
        part: {name: trained[part][name] for name in tree}
        for part, tree in memory[PERSONAL].items()
    }
    return memory | {PERSONAL: own}, (
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


def evaluate_clients(
    network: Network,
    params: Params,
    buffers: Params,
    own: Tree,
    tests: Sequence[Samples],
    seed: int,
) -> list[Evaluation | None]:
    """Each client's model, the given one with its own part, on `tests` of the same client; None
    without samples.

    `own`: the clients' own parts, leaves [N, ...]. Noise of the test samples is drawn from `seed`
    and the client.
    """
    return [
        evaluate_client(network, params, buffers, own, samples, client, seed)
        if len(samples.y)
        else None
        for client, samples in enumerate(tests)
    ]


def evaluate_client(
    network: Network,
    params: Params,
    buffers: Params,
    own: Tree,
    samples: Samples,
    client: int,
    seed: int,
) -> Evaluation:
    """The model with a client's own part on samples; as in `evaluate_clients`."""
    return evaluate(
        network,
        *client_model(params, buffers, own, client),
        samples,
        read=noise_of(samples, client, seed),
    )


def client_model(params: Params, buffers: Params, own: Tree, client: int) -> tuple[Params, Params]:
    """The model with a client's own part; `own`: as in `evaluate_clients`."""
    mine = row(own, client)
    return params | mine["params"], buffers | mine["buffers"]


def noise_of(samples: Samples, client: int, seed: int) -> Read | None:
    """How a client reads its test samples; None: as they are."""
    if samples.noise is None:
        return None
    return Read(torch.tensor(key(seed, "noisy test", client), device=samples.x.device))
