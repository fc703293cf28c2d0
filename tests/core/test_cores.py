"""More threads where other processes wait: how many, where, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plugins.core import cores
from plugins.core.trees import leaf_row_norms

MANY = torch.empty(cores.MANY)
FEW = torch.empty(cores.MANY - 1)


@pytest.fixture
def lent() -> Iterator[None]:
    cores.lend(3)
    yield
    cores.lend(1)


def threads(leaf: Tensor) -> int:
    with cores.all_cores(leaf):
        return torch.get_num_threads()


def test_what_is_lent_is_used_for_much_and_given_back(lent: None) -> None:
    own = torch.get_num_threads()
    assert (threads(MANY), threads(FEW), torch.get_num_threads()) == (3, own, own)
    with pytest.raises(ZeroDivisionError), cores.all_cores(MANY):
        raise ZeroDivisionError
    assert torch.get_num_threads() == own
    cores.lend(1)
    assert threads(MANY) == own


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_norms_have_the_same_bits_with_more_threads(lent: None, rows: int) -> None:
    leaf = torch.randn((rows, 2_000_003), generator=torch.Generator().manual_seed(rows))
    with_three = leaf_row_norms(leaf)
    cores.lend(1)
    assert torch.equal(with_three, leaf_row_norms(leaf))
