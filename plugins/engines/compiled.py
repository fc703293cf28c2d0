"""Runs steps of dense networks in C++: steps.cpp, compiled once per version of torch.

They have the bits of the steps in Python (tested). docs/performance.md says what they save, and
where they pay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fedml_noniid.plugins.core import native
from fedml_noniid.plugins.core.data import Pass
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params, rows_at
from fedml_noniid.plugins.models.layers import Flatten, Linear, ReLU
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.stacked import Stacked

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("steps.cpp")
SWITCH = native.SWITCH  # 1: compile for short runs too
FLAGS = ("-O2", "-ltorch_cpu", "-lc10")
# steps of a run: fewer don't save the time that the compiler takes (docs/performance.md)
MIN_PLANNED_STEPS = 50_000


@dataclass(frozen=True)
class Compiled:
    """Runs all steps of clients side by side in one call."""

    names: tuple[str, ...]  # weight and bias of each layer
    memory: Params  # of gradients, one chunk's after the other's

    def __call__(
        self, params: Params, steps: Pass, rate: float, out: Params | None
    ) -> tuple[Params, Tensor]:
        """(trained parameters, losses [S, M, B]) from `params` [M, ...] on, by plain SGD.

        `out`: memory that the trained parameters may take.
        """
        given = [params[name] for name in self.names]
        # Where some clients have fewer steps, `local` does not use `out`. The layout decides about
        # the last bits.
        into = out if out is not None and steps.live is None else {}
        trained = {
            name: into[name] if name in into else leaf.new_empty(leaf.shape)
            for name, leaf in params.items()
        }
        for name, leaf in params.items():
            if name not in self.memory or self.memory[name].shape != leaf.shape:
                self.memory[name] = leaf.new_empty(leaf.shape)
        grads, left = ([tree[name] for name in self.names] for tree in (self.memory, trained))
        y, x = rows_at(steps.samples.y, steps.index), steps.samples.x.flatten(1)
        run = cast("Callable[..., Tensor]", torch.ops.fedml_noniid.steps)
        return trained, run(
            given, x, steps.index, y, _fraction(steps, x), steps.live, rate, grads, left
        )


def _fraction(steps: Pass, like: Tensor) -> Tensor:
    """The weight of each sample's log p in its step's loss, [S, M, B]: -1 / the samples of the
    batch, 0 for padding."""
    if steps.mask is None:
        return like.new_full(steps.index.shape, -1 / steps.index.shape[-1])
    mask = steps.mask.to(like.dtype)
    return -(mask / mask.sum(-1, keepdim=True).clamp(min=1))


def layers_of(network: Model) -> tuple[str, ...] | None:
    """The names of all weights and biases, if the network is a row of linear layers with a ReLU
    between each two."""
    if not isinstance(network, Stacked) or network.precision != "float32":
        return None
    first, *blocks = *network.blocks, network.head
    linear = [block for block in blocks[::2] if isinstance(block, Linear)]
    if not isinstance(first, Flatten) or len(linear) < len(blocks[::2]):
        return None
    if not all(isinstance(block, ReLU) for block in blocks[1::2]):
        return None
    return tuple(name for block in linear for name in block.names)


def compiled_for(network: Model, memory: Params, planned: int) -> Compiled | None:
    """The compiled steps, if this network and this machine have any.

    `memory`: as in `Compiled`. `planned`: how many steps the run has. If they are few, the compiler
    is not called, but what it made before is used. UserError for an unknown value of the
    environment variable.
    """
    switch, names = os.environ.get(SWITCH, ""), layers_of(network)
    if switch not in ("", "0", "1"):
        raise UserError(
            f"environment variable {SWITCH}: {switch!r} is unknown; allowed: 0 (never), 1 (also "
            "short runs)"
        )
    if names is None or switch == "0":
        return None
    path = library()
    if not path.exists() and not ((planned >= MIN_PLANNED_STEPS or switch == "1") and _built(path)):
        return None
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch has no types for it
    except OSError as error:
        LOG.warning(
            "steps run in Python, because the compiled ones can't be loaded: %s",
            error.__cause__ or error,
        )
        return None
    return Compiled(names, memory)


def library() -> Path:
    """Where the compiled steps lie."""
    return native.library(SOURCE, " ".join((torch.__version__, *FLAGS)))


def _built(path: Path) -> bool:
    """Compiles the steps. False if that fails."""
    root = Path(torch.__file__).parent
    return native.built(path, SOURCE, (f"-I{root / 'include'}", f"-L{root / 'lib'}", *FLAGS))
