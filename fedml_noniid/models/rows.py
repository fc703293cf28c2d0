"""Finds the blocks of a user's module, if it is a row of blocks that we have: those are faster.

torch.fx follows a pass. What it finds counts only if a step of training is the same in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from fedml_noniid.core.trees import Params
from fedml_noniid.models.layers import (
    BatchNorm,
    Block,
    Conv,
    Dropout,
    Flatten,
    GlobalAverage,
    Linear,
    MaxPool,
    Output,
    ReLU,
    Residual,
)
from fedml_noniid.models.own import OwnNetwork
from fedml_noniid.models.stacked import Stacked

RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")


# The defaults of functions.
FLATTEN = {"start_dim": 0, "end_dim": -1}
POOL = {
    "kernel_size": 0,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


class NoRowError(Exception):
    """A module that is no row of our blocks."""


@dataclass(frozen=True, eq=False)
class OwnRow(Stacked):
    """A user's module as a row of our blocks."""

    own: OwnNetwork

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """Draws as the module does."""
        return self.own.init(generator)


class Sum(NamedTuple):
    """A function of the sum of two rows that begin at the same place."""

    function: fx.Node
    sides: tuple[Sequence[fx.Node | Sum], Sequence[fx.Node | Sum]]


def row_of(network: OwnNetwork) -> OwnRow | None:
    """The network as blocks; None if it is no row of them."""
    if network.seeded or not network.head:
        return None
    try:
        module = network.untouched()
        module.train()
        graph = fx.symbolic_trace(module)
        first, *_, last = graph.graph.nodes
        (end,) = last.all_input_nodes
        dropouts = {name: dropout.block() for name, dropout in network.dropouts.items()}
        finder = _Finder(dict(graph.named_modules()), dropouts)
        *blocks, head = finder.blocks(_chain(end, first))
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


def _chain(end: fx.Node, start: fx.Node) -> list[fx.Node | Sum]:
    """The nodes behind `start` up to `end`, one after the other."""
    chain: list[fx.Node | Sum] = []
    node = end
    while node is not start:
        (before,) = _inputs(node)
        users = 1
        if before.target in SUMS and len(before.all_input_nodes) == 2:
            left, right = before.all_input_nodes
            fork = _fork(left, right)
            chain.append(Sum(node, (_chain(left, fork), _chain(right, fork))))
            node, users = fork, 2
        else:
            chain.append(node)
            node = before
        if node is not start and len(node.users) != users:
            raise NoRowError
    return chain[::-1]


def _inputs(node: fx.Node) -> list[fx.Node]:
    if node.op == "get_attr":
        raise NoRowError
    return list(node.all_input_nodes)


def _fork(left: fx.Node, right: fx.Node) -> fx.Node:
    """Where two rows begin."""
    passed = set(_back(left))
    return next(node for node in _back(right) if node in passed)


def _back(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those before it, across sums by their first side."""
    yield node
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node


@dataclass
class _Finder:
    """Turns nodes into blocks."""

    modules: Mapping[str, nn.Module]
    dropouts: Mapping[str, Dropout]
    layer: str = ""  # the last one with a weight
    used: set[str] = field(default_factory=set)

    def blocks(self, nodes: Sequence[fx.Node | Sum]) -> list[Block]:
        """NoRowError for a node that is none of our blocks."""
        made: list[Block] = []
        for node in nodes:
            if isinstance(node, Sum):
                made.append(self._residual(node))
                continue
            block = self._block(node)
            again = isinstance(block, Flatten) and made and _is_flat(made[-1])
            if block is not None and not again:
                made.append(block)
        return made

    def _residual(self, node: Sum) -> Residual:
        """The row with more layers is the body."""
        sides = sorted(node.sides, key=len)
        shortcut = self.blocks(sides[0])
        beside = (*shortcut, Output(self.layer)) if shortcut else ()
        body = self.blocks(sides[1])
        if not isinstance(self._block(node.function), ReLU):
            raise NoRowError
        return Residual(self.layer, tuple(body), beside)

    def _block(self, node: fx.Node) -> Block | None:
        """None for what changes nothing."""
        if node.op == "call_module":
            return self._of_module(str(node.target))
        if node.target in RELUS:
            return ReLU(self.layer)
        if node.target in (torch.flatten, "flatten"):
            if _arguments(node, FLATTEN) == {**FLATTEN, "start_dim": 1}:
                return Flatten()
        elif node.target in (F.max_pool2d, torch.max_pool2d):
            arguments = _arguments(node, POOL)
            size = arguments["kernel_size"]
            same = {**POOL, "kernel_size": size, "stride": size}
            if (
                isinstance(size, int)
                and {**arguments, "stride": arguments["stride"] or size} == same
            ):
                return MaxPool(size)
        raise NoRowError

    def _of_module(self, path: str) -> Block | None:
        part = self.modules[path]
        if list(part.parameters()):
            if path in self.used:
                raise NoRowError
            self.used.add(path)
        if type(part) is nn.Linear and part.bias is not None:
            self.layer = path
            return Linear(path, part.in_features, part.out_features)
        if type(part) is nn.Conv2d:
            self.layer = path
            return _conv(path, part)
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.affine:
            assert part.momentum is not None, "`refused` has looked"
            return BatchNorm(path, part.num_features, part.momentum, part.eps)
        if type(part) is nn.ReLU:
            return ReLU(self.layer)
        if path in self.dropouts:
            return self.dropouts[path] if self.dropouts[path].p else None
        if type(part) is nn.MaxPool2d:
            size = part.kernel_size
            plain = (part.stride, part.padding, part.dilation) == (size, 0, 1)
            if isinstance(size, int) and plain and not part.ceil_mode:
                return MaxPool(size)
        if type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
            return Flatten()
        if type(part) is nn.AdaptiveAvgPool2d and part.output_size in (1, (1, 1)):
            return GlobalAverage()
        if type(part) is nn.Identity:
            return None
        raise NoRowError


def _arguments(node: fx.Node, defaults: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a function behind its input, by name."""
    return {**defaults, **dict(zip(defaults, node.args[1:], strict=False)), **node.kwargs}


def _is_flat(block: Block) -> bool:
    return isinstance(block, GlobalAverage | Flatten | Linear)


def _conv(path: str, part: nn.Conv2d) -> Conv:
    """NoRowError unless height and width are treated alike, and all channels together."""
    if part.groups > 1 or part.padding_mode != "zeros" or isinstance(part.padding, str):
        raise NoRowError
    pairs = part.kernel_size, part.stride, part.padding
    if part.dilation != (1, 1) or any(len({*pair}) > 1 for pair in pairs):
        raise NoRowError
    return Conv(
        path,
        part.in_channels,
        part.out_channels,
        part.kernel_size[0],
        int(part.padding[0]),
        part.stride[0],
        part.bias is not None,
    )
