"""Feature skew: each client's own Gaussian noise (FNR-FL, eq. 2), from a form and sigma to standard deviations.

The forms are those of NIID-Bench's AddGaussianNoise (Li et al., ICDE 2022), which FNR-FL's code has unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plugins.core.errors import UserError
from plugins.data.checks import known, real_number, refusal
from plugins.data.reading import Noise
from plugins.data.types import Ints

FORMS = ("level", "equal", "space")


def deviations(form: str, sigma: float, n_clients: int, shape: tuple[int, ...], scale: Tensor) -> Tensor:
    """The standard deviation of each client's noise in normalised units, [N, C, 1, 1] or [N, C, H, W] float64.

    `shape` is that of a sample, `scale` [C] what 1 on the scale of `sigma` is after normalisation (`Dataset.scale`).
    `level`: client i has sigma i / (N - 1), so that the first is clean; `equal`: all have sigma; `space`: client i
    has sigma in the i-th cell of a grid, but for the last client, which is clean. An only client has sigma throughout.
    Raises UserError for an unknown form, a sigma below 0, text, a grid on what are no images, and one with more rows
    than an image has pixels.
    """
    known("noise.form", form, FORMS)
    real_number("noise.sigma", sigma, lambda value: value >= 0, "a number from 0 up")
    if not len(scale):
        raise UserError("noise is refused for text, which has no scale; leave it out")
    wide = [1] * (len(shape) - 1)  # the axes behind the channels
    if form == "space" and n_clients > 1:
        pattern = _cells(n_clients, shape).unsqueeze(1)  # [N, 1, H, W]
    elif form == "level" and n_clients > 1:
        pattern = (torch.arange(n_clients, dtype=torch.float64) / (n_clients - 1)).view(-1, 1, *wide)
    else:
        pattern = torch.ones(n_clients, 1, *wide, dtype=torch.float64)
    return sigma * pattern * scale.double().view(1, -1, *wide)


def amounts(form: str, sigma: float, n_clients: int, shape: tuple[int, ...], scale: Tensor) -> Tensor:
    """Each client's standard deviation on the scale of `sigma`, averaged over a sample, [N] float64."""
    return deviations(form, sigma, n_clients, shape, torch.ones_like(scale)).flatten(1).mean(1)


def held(std: Tensor, clients: Sequence[Ints], x: Tensor) -> Noise:
    """The noise of training samples `x` [n, ...]: that of the client which holds them; `std` is [N, ...]."""
    row = torch.full((len(x),), len(std))
    for client, positions in enumerate(clients):
        row[torch.from_numpy(positions)] = client
    return _noise(std, row, x)


def alone(std: Tensor, x: Tensor) -> Noise:
    """The noise of samples `x` [n, ...] that one client looks at; `std` is its own, [...]."""
    return _noise(std.unsqueeze(0), torch.zeros(len(x), dtype=torch.int64), x)


def _noise(std: Tensor, row: Tensor, x: Tensor) -> Noise:
    return Noise(torch.cat([std, torch.zeros_like(std[:1])]).to(x), row.to(x.device))


def _cells(n_clients: int, shape: tuple[int, ...]) -> Tensor:
    """1 in each client's cell and 0 elsewhere, [N, H, W]; nowhere for the last client.

    NIID-Bench's grid has ceil(sqrt(N - 1)) rows and columns over 28 pixels, whatever the image; here, over the whole
    image, which is the same for 28 x 28. Its index of a row, i // cell size, leaves the image unless the cell size
    happens to be the number of rows; here it is i // rows, and cells are filled row by row.
    """
    rows = math.isqrt(n_clients - 2) + 1  # the square root of N - 1, rounded up
    if len(shape) != 3 or min(shape[1:]) < rows:
        allowed = f"images of at least {rows} x {rows} pixels for {n_clients} clients, or another form"
        raise refusal("noise.form", "space", f"{allowed}; samples have the shape {list(shape)}")
    height, width = shape[1] // rows, shape[2] // rows
    cells = torch.zeros(n_clients, *shape[1:], dtype=torch.float64)
    for client in range(n_clients - 1):
        row, column = divmod(client, rows)
        cells[client, row * height : (row + 1) * height, column * width : (column + 1) * width] = 1
    return cells
