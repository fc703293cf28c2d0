"""Finds the blocks of a user's module, if it is a row of blocks that we have: those are faster.

torch.fx follows a pass. What it finds is a guess: it counts only if a step of training is the same
in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedml_noniid.core.trees import Params
from fedml_noniid.models.layers import (
    BatchNorm,
    Block,
    Conv,
    Flatten,
    GlobalAverage,
    Linear,
    MaxPool,
    ReLU,
    Weighted,
)
from fedml_noniid.models.own import OwnNetwork
from fedml_noniid.models.stacked import Stacked

RELUS = F.relu, torch.relu, torch.relu_, "relu", "relu_"
POOLS = F.max_pool2d, torch.max_pool2d
FLATTENS = torch.flatten, "flatten"


@dataclass(frozen=True, eq=False)
class OwnRow(Stacked):
    """A user's module as a row of our blocks."""

    own: OwnNetwork

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """Draws as the module does."""
        return self.own.init(generator)


def row_of(network: OwnNetwork) -> OwnRow | None:
    """The network as blocks; None if it is no row of them."""
    if network.seeded or not network.head:
        return None
    try:
        module = network.untouched()
        module.train()
        graph = fx.symbolic_trace(module)
        *blocks, head = _blocks(network, [*graph.graph.nodes], dict(graph.named_modules()))
    except Exception:  # of many kinds, the module's too: then it runs as it is
        return None
    if not isinstance(head, Linear) or head.name != network.head:
        return None
    return OwnRow(
        network.name,
        tuple(blocks),
        head,
        network,
        tokens=network.tokens,
        frozen=network.frozen,
    )


def _blocks(
    network: OwnNetwork, nodes: Sequence[fx.Node], modules: dict[str, nn.Module]
) -> list[Block]:
    """The blocks of the nodes of a pass. ValueError if a node has another input than the node
    before it, or is none of our blocks."""
    blocks: list[Block] = []
    layer = ""  # the last one with a weight
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before]:
            raise ValueError("no row")
        part = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(part, nn.Linear | nn.Conv2d):
            layer = str(node.target)
        if node.op != "output" and not isinstance(part, nn.Identity):
            dropout = network.dropouts.get(str(node.target))
            block = _block(node, part, layer) if dropout is None else dropout.block()
            blocks.append(block)
    names = [block.name for block in blocks if isinstance(block, Weighted)]
    if len({*names}) < len(names):  # written-out gradients would not be summed
        raise ValueError("a layer twice")
    return blocks


def _block(node: fx.Node, part: nn.Module | None, layer: str) -> Block:
    """The block of a module or a function. ValueError if there is none."""
    kind, function = type(part), node.target if part is None else None
    if isinstance(part, nn.Linear):
        return Linear(layer, part.in_features, part.out_features)
    if isinstance(part, nn.Conv2d):
        padding, stride, bias = part.padding[0], part.stride[0], part.bias is not None
        sizes = part.in_channels, part.out_channels, part.kernel_size[0]
        return Conv(layer, *sizes, int(padding), stride, bias)
    if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.momentum is not None:
        return BatchNorm(str(node.target), part.num_features, part.momentum, part.eps)
    if kind is nn.ReLU or function in RELUS:
        return ReLU(layer)
    if kind is nn.Flatten or function in FLATTENS:
        return Flatten()
    if kind is nn.AdaptiveAvgPool2d:
        return GlobalAverage()
    size = part.kernel_size if isinstance(part, nn.MaxPool2d) else node.args[1:] and node.args[1]
    if (kind is nn.MaxPool2d or function in POOLS) and isinstance(size, int):
        return MaxPool(size)
    raise ValueError("another block")
