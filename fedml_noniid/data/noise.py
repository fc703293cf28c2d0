"""Feature skew: each client's own Gaussian noise (FNR-FL, eq.

2), from a form and sigma to standard deviations.

The forms are those of NIID-Bench's AddGaussianNoise (Li et al., ICDE 2022), which FNR-FL's code has
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.reading import Noise
from fedml_noniid.data.types import Ints


def deviations(
    form: str, sigma: float, n_clients: int, shape: tuple[int, ...], scale: Tensor
) -> Tensor:
    """The standard deviation of each client's noise in normalised units, [N, C, 1, 1] or [N, C, H,
    W] float64.

    `shape` is the shape of a sample. `scale` [C] says what 1 on the scale of `sigma` is after
    normalisation (`Dataset.scale`). `level`: client i has sigma i / (N - 1), so the first is clean;
    `equal`: all have sigma; `space`: client i has sigma in the i-th cell of a grid, and the last
    client is clean. A single client has sigma everywhere. Raises UserError for text, a grid on
    samples that are no images, and a grid with more rows than an image has pixels.
    """
    if not len(scale):
        raise UserError("noise is refused for text, which has no scale; leave it out")
    wide = [1] * (len(shape) - 1)  # the axes behind the channels
    if form == "space" and n_clients > 1:
        pattern = _cells(n_clients, shape).unsqueeze(1)  # [N, 1, H, W]
    elif form == "level" and n_clients > 1:
        pattern = (torch.arange(n_clients, dtype=torch.float64) / (n_clients - 1)).view(
            -1, 1, *wide
        )
    else:
        pattern = torch.ones(n_clients, 1, *wide, dtype=torch.float64)
    return sigma * pattern * scale.double().view(1, -1, *wide)


def amounts(
    form: str, sigma: float, n_clients: int, shape: tuple[int, ...], scale: Tensor
) -> Tensor:
    """Each client's standard deviation on the scale of `sigma`, averaged over a sample, [N]
    float64."""
    return deviations(form, sigma, n_clients, shape, torch.ones_like(scale)).flatten(1).mean(1)


def per_sample(std: Tensor, clients: Sequence[Ints], x: Tensor) -> Noise:
    """The noise of training samples `x` [n, ...], each with that of its client; `std` is [N,
    ...]."""
    row = torch.full((len(x),), len(std))
    lists = Ragged.from_lists(clients)
    row[torch.from_numpy(lists.flat)] = torch.from_numpy(lists.holder)
    return Noise(torch.cat([std, torch.zeros_like(std[:1])]).to(x), row.to(x.device))


def for_client(std: Tensor, x: Tensor) -> Noise:
    """The noise of samples `x` [n, ...] that one client reads; `std` [...] is its own."""
    return per_sample(std.unsqueeze(0), [np.arange(len(x))], x)


def _cells(n_clients: int, shape: tuple[int, ...]) -> Tensor:
    """1 in each client's cell and 0 elsewhere, [N, H, W]; nowhere for the last client.

    NIID-Bench's grid has ceil(sqrt(N - 1)) rows and columns over 28 pixels for every image. Here it
    covers the whole image, which is the same for 28 x 28. NIID-Bench's row index, i // cell size,
    leaves the image unless the cell size equals the number of rows; here it is i // rows, and cells
    are filled row by row.
    """
    rows = math.isqrt(n_clients - 2) + 1  # the square root of N - 1, rounded up
    if len(shape) != 3 or min(shape[1:]) < rows:
        allowed = (
            f"images of at least {rows} x {rows} pixels for {n_clients} clients, or another form"
        )
        raise UserError(
            path=("noise", "form"),
            value="space",
            allowed=f"{allowed}; samples have the shape {list(shape)}",
        )
    height, width = shape[1] // rows, shape[2] // rows
    cells = torch.zeros(n_clients, *shape[1:], dtype=torch.float64)
    for client in range(n_clients - 1):
        row, column = divmod(client, rows)
        cells[client, row * height : (row + 1) * height, column * width : (column + 1) * width] = 1
    return cells
