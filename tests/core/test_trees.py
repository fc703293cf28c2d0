"""Functions on trees."""

from __future__ import annotations

import math

import pytest
import torch

from fedml_noniid.core import trees
from fedml_noniid.engines.packing import stack

A = {"w": torch.tensor([[1.0, -2.0]]), "inner": {"b": torch.tensor([2.0])}}
B = {"w": torch.tensor([[10.0, 20.0]]), "inner": {"b": torch.tensor([30.0])}}


def lists(tree: trees.Tree) -> object:
    return {
        key: lists(leaf) if isinstance(leaf, dict) else leaf.tolist() for key, leaf in tree.items()
    }


def test_row_norms_are_the_norms_of_the_rows() -> None:
    stacked = stack([A, B])
    assert trees.row_norms(stacked).tolist() == pytest.approx([3.0, math.sqrt(100 + 400 + 900)])
    assert trees.row_norms({"scalar": torch.tensor([3.0, -4.0])}).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "n", [trees.NORM_BLOCK, 2 * trees.NORM_BLOCK, 2 * trees.NORM_BLOCK + 1, 3_000_001]
)
def test_norms_of_many_small_numbers_are_exact(n: int) -> None:
    """Squares that are added up one by one in float32 are off by 7e-4 for a million and a half of
    them."""
    exact = 1e-3 * math.sqrt(n)
    rows = torch.full((2, n), 1e-3)
    rows[1] *= 2
    assert trees.leaf_row_norms(rows).tolist() == pytest.approx([exact, 2 * exact], rel=1e-6)
    assert trees.norm({"w": rows[0], "b": torch.zeros(3)}).item() == pytest.approx(exact, rel=1e-6)
