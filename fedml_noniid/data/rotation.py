"""Rotation: a client sees its images turned by its own angle, a feature skew with a few kinds of
clients.

Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020,
https://arxiv.org/abs/2006.04088: rotated MNIST has the angles 0, 90, 180 and 270 degrees, rotated
CIFAR 0 and 180. Pixels only change places, so a turned image is exact. Departure: the paper repeats
the data set for each angle; here the partition decides who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.types import Ints

QUARTER = 90  # degrees


def turns(degrees: Sequence[int], n_clients: int, shape: Sequence[int]) -> Ints:
    """The quarter turns of each client's images, counter-clockwise, [N]; client i has the angle
    number i modulo their number.

    `shape` is the shape of a sample. Raises UserError for samples that are no images, and for
    quarter turns of images that are not square.
    """
    if len(shape) != 3:
        raise UserError(
            f"rotation is refused for samples of shape {list(shape)}, as they are no images; "
            "leave it out"
        )
    if shape[1] != shape[2] and any(angle % 180 for angle in degrees):
        raise UserError(
            path=("rotation", "degrees"),
            value=list(degrees),
            allowed=f"0, 180 for images of {shape[1]} x {shape[2]} pixels",
        )
    return np.resize(np.array(degrees, np.int64) // QUARTER, n_clients)


def turned(x: Tensor, quarters: int) -> Tensor:
    """Images turned counter-clockwise by `quarters` times 90 degrees, [n, channels, H, W] or
    without n."""
    return torch.rot90(x, quarters, (-2, -1)).contiguous()
