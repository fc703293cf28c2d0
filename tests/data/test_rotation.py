"""Rotation: whose angle is which, the turned pixels by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.data.rotation import turned, turns


@pytest.mark.parametrize(
    ("degrees", "n", "wanted"),
    [
        ([0, 90, 180, 270], 6, [0, 1, 2, 3, 0, 1]),
        ([180], 3, [2, 2, 2]),
        ([0, 0, 90], 4, [0, 0, 1, 0]),
        ([0, 90, 180], 2, [0, 1]),
        ([0, 180], 2, [0, 2]),
    ],
)
def test_whose_angle_is_which(degrees: list[int], n: int, wanted: list[int]) -> None:
    found = turns(degrees, n, (3, 4, 6) if degrees == [0, 180] else (1, 8, 8))
    assert found.tolist() == wanted and found.dtype == np.int64


def test_turned_by_hand() -> None:
    """Counter-clockwise: the right column becomes the top row."""
    image = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]).reshape(1, 1, 3, 3)
    wanted = [
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[3, 6, 9], [2, 5, 8], [1, 4, 7]],
        [[9, 8, 7], [6, 5, 4], [3, 2, 1]],
        [[7, 4, 1], [8, 5, 2], [9, 6, 3]],
    ]
    assert [turned(image, quarters)[0, 0].tolist() for quarters in range(4)] == wanted
