"""Says which model a client receives where a component keeps several: see `component.MODELS`."""

from __future__ import annotations

from torch import Tensor

from fedml_noniid.core.component import MODELS, Ask
from fedml_noniid.core.trees import Tree, row, tree_map


def received(ask: Ask, position: int) -> Ask:
    """Returns the Ask as the client at this position receives it: about its own model."""
    if MODELS not in ask.each:
        return ask
    number = int(ask.each[MODELS][position])
    # A copy: matrix products round differently at the addresses of rows.
    model: Tree = tree_map(lambda leaf: leaf[number].clone(), ask.shared[MODELS])
    shared, each = (
        {name: tree for name, tree in trees.items() if name != MODELS}
        for trees in (ask.shared, ask.each)
    )
    return ask._replace(**model, shared=shared, each=each)


def received_models(ask: Ask, positions: Tensor | slice) -> Tree:
    """Returns "model", leaves [M, ...], of the clients at these positions; {} if all receive that
    of the Ask."""
    if MODELS not in ask.each:
        return {}
    return {"model": row(ask.shared[MODELS], ask.each[MODELS][positions])}
