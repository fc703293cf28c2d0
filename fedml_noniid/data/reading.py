"""Changes to samples as a client reads them: noise, new at every read; in training also crops and
flips.

FNR-FL (eq. 2): x' = x + (eps * M(x)) sigma + mu with eps ~ N(0, 1) and mu = 0; M(x) sigma is
`Noise.std`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.core.randomness import fold, noisy, uniform

PAD = 4  # pixels of padding on each side; a crop has the image's own size
MOVES, NOISE = 0, 1  # the keys of a batch: for crops and flips, and for noise


class Noise(NamedTuple):
    """Gaussian noise by sample: sample i has the standard deviations std[row[i]]."""

    std: Tensor  # [K, ...], each row broadcasts to a sample; the last row is 0, for clean samples
    row: Tensor  # [n] int64


@dataclass(frozen=True)
class Read:
    """How samples change on the way into a batch.

    The draws depend on key and step only, not on padding.
    """

    key: Tensor  # 0-d, of this client, round, job and pass
    augment: bool = False

    def __call__(self, samples: Samples, index: Tensor, step: int) -> Tensor:
        """The samples `index` [B] as the client sees them in this step, [B, ...]."""
        noise: Noise | None = samples.noise
        key, x = fold(self.key, step), samples.x[index]
        if self.augment:
            x = moved(x, fold(key, MOVES))
        return x if noise is None else noisy(x, noise.std[noise.row[index]], fold(key, NOISE))


def moved(x: Tensor, key: Tensor) -> Tensor:
    """Each image is padded by reflection, cropped to its size at a random place, and perhaps
    mirrored, [B, C, H, W].

    FNR-FL's code does this to CIFAR-10. Images need at least PAD + 1 pixels in height and width.
    """
    n, channels, height, width = x.shape
    drawn = uniform(key, n, 3, dtype=torch.float64)
    top, left = (drawn[:, :2] * (2 * PAD + 1)).long().unbind(1)
    across = torch.arange(width, device=x.device)
    across = torch.where(drawn[:, 2:] < 0.5, width - 1 - across, across)  # [B, W]
    rows = _reflected(
        top.unsqueeze(1) + torch.arange(height, device=x.device) - PAD, height
    )  # [B, H]
    columns = _reflected(left.unsqueeze(1) + across - PAD, width)
    pixels = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(
        1
    )  # [B, H W], one gather for both
    return x.flatten(2).gather(2, pixels.unsqueeze(1).expand(n, channels, -1)).reshape(x.shape)


def _reflected(position: Tensor, size: int) -> Tensor:
    """Positions from -PAD to size - 1 + PAD; those outside are reflected.

    The outermost pixels aren't repeated.
    """
    return size - 1 - (size - 1 - position.abs()).abs()
