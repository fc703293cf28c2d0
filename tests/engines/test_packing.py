"""Trees as flat ones with keys that say where a leaf was."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.engines.packing import flatten, unflatten

TREE = {
    "x": {"w": torch.tensor([1.0, 2.0]), "inner": {"b": torch.tensor([3.0])}},
    "empty": {},
    "y": torch.zeros(1),
}


def test_flatten_and_unflatten_are_inverse() -> None:
    flat = flatten(TREE)
    assert list(flat) == ["x/w", "x/inner/b", "y"]
    again = unflatten(flat, TREE)
    assert again.keys() == TREE.keys() and again["empty"] == {}
    assert again["x"]["w"] is TREE["x"]["w"] and again["x"]["inner"]["b"] is TREE["x"]["inner"]["b"]
    with pytest.raises(KeyError):
        unflatten({"y": flat["y"]}, TREE)
