"""More threads where other processes wait: how many, where, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedml_noniid.plugins.core.component import Reply
from fedml_noniid.plugins.core.errors import NonFiniteError
from fedml_noniid.plugins.engines import cores
from fedml_noniid.plugins.engines.clients import _squares, refuse_non_finite

MIN_THREADED_NUMBERS = torch.empty(cores.MIN_THREADED_NUMBERS)
FEW = torch.empty(cores.MIN_THREADED_NUMBERS - 1)


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
    assert (threads(MIN_THREADED_NUMBERS), threads(FEW), torch.get_num_threads()) == (3, own, own)
    with pytest.raises(ZeroDivisionError), cores.all_cores(MIN_THREADED_NUMBERS):
        raise ZeroDivisionError
    assert torch.get_num_threads() == own
    cores.lend(1)
    assert threads(MIN_THREADED_NUMBERS) == own


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_an_update_that_is_not_finite_is_found_with_more_threads(
    lent: None, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there are they used, and nothing but whether the sum is finite goes into the run."""
    used, threads = set[int](), torch.set_num_threads

    def seen(n: int) -> None:
        used.add(n)
        threads(n)

    monkeypatch.setattr(torch, "set_num_threads", seen)
    deltas = torch.randn((clients, 2_000_003), generator=torch.Generator().manual_seed(clients))
    ones = torch.ones(clients)
    reply = Reply(tuple(range(clients)), {"w": deltas}, {}, {}, ones, ones, ones)
    refuse_non_finite(reply, 1)
    assert 3 in used
    exact = deltas.double().square().sum().item() + clients
    assert _squares(reply) == pytest.approx(exact, rel=1e-4)
    deltas[clients - 1, -1] = torch.inf
    with pytest.raises(NonFiniteError, match=rf"round 1, client {clients - 1}: "):
        refuse_non_finite(reply, 1)
    assert torch.get_num_threads() == 1
