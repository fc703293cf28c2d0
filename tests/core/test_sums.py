"""Exact sums of clients' tensors: rounded once each, and then the same in every order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedml_noniid.core import native, sums
from fedml_noniid.core.sums import added, from_integers, integers, weighted_mean, weighted_sum
from fedml_noniid.engines.packing import stack
from tests.core.test_trees import A, B, lists


def drawn(
    m: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Weights such as numbers of samples, and numbers of 1e-8 to 1."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (-8 * torch.rand(m, n, generator=generator, dtype=torch.float64))
    sign = torch.randint(0, 2, (m, n), generator=generator) * 2 - 1
    return torch.randint(1, 500, (m,), generator=generator).double(), (size * sign).to(dtype)


def exact_mean(weights: Tensor, rows: Tensor) -> list[Fraction]:
    omega = [Fraction(w) for w in weights.tolist()]
    columns = rows.double().T.tolist()
    return [
        sum(w * Fraction(x) for w, x in zip(omega, column, strict=True)) / sum(omega)
        for column in columns
    ]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The lines in C++."""
    monkeypatch.setenv(native.SWITCH, "1")
    sums._library.cache_clear()
    if sums._library() is None:
        pytest.skip("needs a C++ compiler; this machine has none")
    yield
    sums._library.cache_clear()


def test_sums_keep_the_dtype_of_the_leaves() -> None:
    """0.25 A + 0.75 B, with float64 weights and float32 leaves."""
    found = weighted_sum(torch.tensor([0.25, 0.75], dtype=torch.float64), stack([A, B]))
    assert lists(found) == {"w": [[7.75, 14.5]], "inner": {"b": [23.0]}}
    assert found["w"].dtype == torch.float32
    twice = weighted_mean(torch.tensor([1, 3]), stack([A, B]))
    assert lists(twice) == lists(found)
    assert lists(weighted_mean(None, stack([A, B]))) == {"w": [[5.5, 9.0]], "inner": {"b": [16.0]}}


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(-90, 120), min_size=1, max_size=9)
    | st.lists(st.integers(-60, -40), min_size=1, max_size=9),
    sign=st.sampled_from([-1, 1, 0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_a_mean_is_that_of_fractions_at_every_level(
    sizes: list[int], sign: int, dtype: torch.dtype, seed: int
) -> None:
    """Off by what the grids of docs/scale.md take of each row, by what the products with the
    weights are rounded by, and by the result's own rounding; to both sides alike."""
    sizes = [min(size, int(math.log2(torch.finfo(dtype).max)) - 2) for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(len(sizes), 20, generator=generator, dtype=torch.float64) + 0.5
    x *= sign or torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    rows = (x * 2.0 ** torch.tensor(sizes, dtype=torch.float64)[:, None]).to(dtype)
    weights = torch.randint(1, 500, (len(sizes),), generator=generator).double()
    bits = 96 if dtype == torch.float64 else 56  # of the total, per number up to 64
    ends = [math.frexp(row.abs().max())[1] for row in rows.double()]
    off = sum(Fraction(2) ** (24 * max(0, math.ceil((end - 6) / 24)) - bits) for end in ends)
    average = weighted_mean(weights, {"w": rows})["w"]
    assert torch.equal(weighted_mean(weights, {"w": -rows})["w"], -average)
    means = exact_mean(weights, rows), exact_mean(weights, rows.abs())
    smallest = Fraction(torch.finfo(dtype).smallest_normal)
    for mine, mean, size in zip(average.tolist(), *means, strict=True):
        # Of float32 and shorter, weights have 29 bits.
        products = size / 2 ** (51 if dtype == torch.float64 else 28)
        rounding = Fraction(torch.finfo(dtype).eps) * abs(mean) + products
        assert abs(Fraction(mine) - mean) <= rounding + off + smallest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [False, True])
def test_twenty_orders_have_the_same_bits(dtype: torch.dtype, far: bool) -> None:
    weights, rows = drawn(40, 300, dtype)
    if far:
        rows[3] *= 1e5
        rows[20] *= 1e9
    first = weighted_mean(weights, {"w": rows})["w"]
    plain = [torch.mv(rows.T, weights.to(dtype))]
    for seed in range(20):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(weighted_mean(weights[order], {"w": rows[order]})["w"], first)
        plain.append(torch.mv(rows[order].T, weights[order].to(dtype)))
    assert any(not torch.equal(plain[0], other) for other in plain)  # else nothing was tested


@pytest.mark.parametrize("size", [1, 7, 2047, 2049, 70_001])
@pytest.mark.usefixtures("compiled")
def test_compiled_lines_have_the_same_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rows = drawn(9, size)
    rows[:, 0] = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, 64, -64, 0.0, -0.0])  # ties, both ends
    for omega in (weights, weights / 3, torch.full((9,), 2.0**-60), -weights):
        mine = sums._compiled(
            rows, (found := sums.Weights.from_numbers(omega, rows.dtype, True)).factors
        )
        assert mine is not None
        plain, _ = sums._rounded(rows, found.factors, sums.PIECE, sums._sum)
        assert torch.equal(mine, plain)


@pytest.mark.usefixtures("compiled")
def test_compiled_lines_leave_large_numbers_to_torch() -> None:
    weights, rows = drawn(3, 5000)
    for value in (65.0, -65.0, math.inf, -math.inf, math.nan):
        rows[1, 4321] = value
        factors = sums.Weights.from_numbers(weights, rows.dtype, True).factors
        assert sums._compiled(rows, factors) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_and_not_a_number(value: float) -> None:
    """An integer would hide it."""
    weights, rows = drawn(4, 10)
    rows[2, 5] = value
    assert weighted_sum(weights, {"w": rows})["w"].isnan().all()
    assert not weighted_sum(weights[:2], {"w": rows[:2]})["w"].isnan().any()


@pytest.mark.parametrize("beyond", [1.0, 1e5, 1e9, math.nan])
def test_a_sum_in_which_rows_come_and_go_is_the_sum_of_those_there(beyond: float) -> None:
    """To the bit, after 50 exchanges, also where a large row or NaN has come and gone."""
    _, rows = drawn(40, 30)
    kept, new = integers(rows, len(rows)), drawn(50, 30, seed=1)[1]
    new[7] *= beyond
    new[-1] *= beyond
    for at, row in enumerate(new):
        place = slice(at * 7 % 40, at * 7 % 40 + 1)
        came, rows = row.unsqueeze(0), rows.clone()
        kept = kept + integers(came, 40) - integers(rows[place], 40)
        rows[place] = came
        found, wanted = from_integers(kept, 40, rows.dtype), added(rows)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert not (rows == new[7]).all(1).any(), "the example has a large row that went"


def test_weights_and_rows_are_as_many() -> None:
    """The compiled lines would read beyond the weights, torch's repeat a single one."""
    for m in (1, 2, 4):
        with pytest.raises(ValueError, match=rf"\[{m}\] weights for rows \[3, 2\]"):
            weighted_mean(torch.ones(m), {"w": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"\[3, 1\] weights"):
        weighted_sum(torch.ones(3, 1), {"w": torch.ones(3, 2)})


def test_nothing_adds_up_to_nothing() -> None:
    assert added(torch.zeros(0, 3)).tolist() == [0.0] * 3
    assert weighted_sum(None, {"w": torch.zeros(4, 0)})["w"].shape == (0,)
    assert weighted_sum(torch.zeros(2), {"w": torch.ones(2, 3)})["w"].tolist() == [0.0] * 3
