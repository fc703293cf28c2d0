"""Feature skew: the standard deviations by hand, and against NIID-Bench's grid where that is in
order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.noise import amounts, deviations, for_client, per_sample

GREY = torch.tensor([4.0])  # 1 on the [0, 1] scale is 4 after normalisation
COLOUR = torch.tensor([4.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("form", "n", "wanted"),
    [
        ("level", 1, [0.5]),
        ("level", 2, [0, 0.5]),
        ("level", 10, [0.5 * i / 9 for i in range(10)]),
        ("equal", 1, [0.5]),
        ("equal", 2, [0.5, 0.5]),
        ("equal", 10, [0.5] * 10),
        ("space", 1, [0.5]),
    ],
)
def test_one_level_for_a_whole_image(form: str, n: int, wanted: list[float]) -> None:
    found = deviations(form, 0.5, n, (3, 28, 28), COLOUR)
    assert found.shape == (n, 3, 1, 1)
    for client, level in enumerate(wanted):
        assert found[client].flatten().tolist() == pytest.approx([4 * level, 2 * level, 5 * level])
    assert amounts(form, 0.5, n, (3, 28, 28), COLOUR).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("n", range(18, 27))
def test_space_is_niid_benchs_grid(n: int) -> None:
    """Its AddGaussianNoise with total = N - 1 and net_id = i, where its cells are of as many pixels
    as its rows."""
    size = 28 // 5
    found = deviations("space", 0.3, n, (1, 28, 28), torch.tensor([1.0])).numpy()[:, 0]
    for net_id in range(n):
        mask = np.zeros((28, 28))
        row, column = int(net_id / size), net_id % size
        mask[row * size : (row + 1) * size, column * size : (column + 1) * size] = 1
        assert np.array_equal(found[net_id], 0.3 * mask * (net_id < n - 1))


@pytest.mark.parametrize(
    ("form", "sigma", "n", "shape", "scale", "message"),
    [
        (
            "equal",
            0.5,
            3,
            (25,),
            torch.empty(0),
            r"noise is refused for text, which has no scale; leave it out",
        ),
        (
            "space",
            0.5,
            3,
            (4,),
            torch.ones(4),
            r"form = 'space' .*images of at least 2 x 2 .* 3 clients.*shape \[4\]",
        ),
        (
            "space",
            0.5,
            27,
            (1, 5, 28),
            GREY,
            r"form = 'space' .*images of at least 6 x 6 pixels for 27 clients",
        ),
    ],
)
def test_refusals(
    form: str, sigma: float, n: int, shape: tuple[int, ...], scale: torch.Tensor, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        deviations(form, sigma, n, shape, scale)
    assert "\n" not in str(error.value)


def test_a_sample_has_the_noise_of_the_client_that_holds_it() -> None:
    """Position 3 is nobody's, so it is clean."""
    std = torch.tensor([[0.1], [0.2]], dtype=torch.float64)
    found = per_sample(std, [np.array([4, 0]), np.array([1, 2])], torch.zeros(5, 7))
    assert found.std.dtype == torch.float32
    assert found.std[found.row].flatten().tolist() == pytest.approx([0.1, 0.2, 0.2, 0, 0.1])
    assert found.std[-1].item() == 0
    found = for_client(torch.tensor([0.2]), torch.zeros(3, 7))
    assert found.std[found.row].flatten().tolist() == pytest.approx([0.2] * 3)
