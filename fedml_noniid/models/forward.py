"""One forward pass through a network: what its layers read beside their input, and record."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedml_noniid.core.trees import Params


@dataclass
class Forward:
    """One forward pass: what layers read beside their input, and what they record."""

    params: Params
    buffers: Params
    train: bool
    mask: Tensor | None = None  # [B], 1 for a sample, 0 for padding; None when nothing is padded
    # 0-d, for `core.randomness`: what dropout draws from in train mode
    key: Tensor | None = None
    drawn: Params = field(
        default_factory=dict
    )  # dropout's factors, where they were drawn before the pass
    record: bool = False
    # no vmap transforms this pass, so it may use kernels that vmap can't transform
    plain: bool = False
    out: Params = field(
        default_factory=dict
    )  # memory for written-out gradients, kept from pass to pass
    # in front of the batch: 1 if parameters, buffers and samples of several clients lie side by
    # side
    axes: int = 0
    activations: dict[str, Tensor] = field(default_factory=dict)
    dropping: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # outside of training: dims by dropout

    def images(self, x: Tensor) -> Tensor:
        """Images [B, M, H, W] in the fastest layout: the channels of a position lie side by side.

        In this layout torch pools ten times as fast on a CPU, and oneDNN and cuDNN need not reorder
        images between two convolutions.
        """
        if not self.plain:
            return x
        x = x.contiguous(memory_format=torch.channels_last)
        # An image of one channel has both layouts at once. Its stride tells torch which one is
        # meant.
        return x.as_strided(x.shape, (x.stride(0), 1, x.stride(2), 1)) if x.shape[1] == 1 else x

    def memory(self, name: str, like: Tensor) -> Tensor:
        """Memory for the gradient of a parameter `like` this: the last pass's, if it has its
        shape."""
        buffer = self.out.get(name)
        if buffer is None or buffer.shape != like.shape:
            with torch.inference_mode(False):  # it is kept for passes outside of this mode
                buffer = self.out[name] = like.new_empty(like.shape)
        return buffer

    def activate(self, layer: str, z: Tensor) -> Tensor:
        """ReLU, recorded as the activation of weight layer `layer`."""
        h = torch.relu(z)
        self.note(layer, h)
        return h

    def note(self, layer: str, h: Tensor) -> None:
        if self.record:
            self.activations[layer] = h
