"""What FedGen and FedFTG share, against loops in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.baselines.generators import (
    diversity,
    draw_labels,
    generate,
    init,
    label_weights,
)

COUNTS = torch.tensor([[3.0, 0.0, 1.0, 0.0], [1.0, 0.0, 5.0, 0.0]])


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_generate(slope: float) -> None:
    """W2 a(W1 [eps, onehot(y)] + b1) + b2."""
    g = init(torch.tensor(3), 2, 3, 4, 5, torch.zeros((), dtype=torch.float64))
    eps, y = torch.tensor([[0.1, -2.0], [1.5, 0.3]], dtype=torch.float64), torch.tensor([2, 0])
    w = {name: leaf.numpy() for name, leaf in g.items()}
    given = np.array([[0.1, -2.0, 0, 0, 1], [1.5, 0.3, 1, 0, 0]])
    a = given @ w["w1"].T + w["b1"]
    wanted = np.where(a > 0, a, slope * a) @ w["w2"].T + w["b2"]
    assert ((a > 0).any(), (a < 0).any()) == (True, True)
    np.testing.assert_allclose(generate(g, eps, y, 3, slope), wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_weights_fill_their_range(dtype: torch.dtype) -> None:
    """Uniform in +-1/sqrt(inputs): 40 + 10 and 300 inputs."""
    g = init(torch.tensor(3), 40, 10, 300, 20, torch.zeros((), dtype=dtype))
    for name, shape, inputs in (
        ("w1", (300, 50), 50),
        ("b1", (300,), 50),
        ("w2", (20, 300), 300),
        ("b2", (20,), 300),
    ):
        leaf = g[name]
        assert (leaf.shape, leaf.dtype) == (shape, dtype)
        assert leaf.abs().max() <= inputs**-0.5
        if leaf.numel() > 100:
            assert leaf.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.1), (
                "the deviation of a uniform number"
            )
    assert len({leaf.flatten()[0].item() for leaf in g.values()}) == 4


def test_diversity() -> None:
    rng = np.random.default_rng(0)
    eps, out = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    total = 0.0
    for i in range(4):
        for j in range(4):
            total += ((eps[i] - eps[j]) ** 2).mean() * np.abs(out[i] - out[j]).mean()
    assert diversity(torch.tensor(eps), torch.tensor(out)).item() == pytest.approx(
        np.exp(-total / 16), rel=1e-12
    )
    assert diversity(torch.tensor(eps), torch.zeros(4, 2)).item() == 1.0, (
        "one output for every noise: the worst"
    )


def test_labels_follow_the_cohorts_counts() -> None:
    """4 : 0 : 6 : 0 of 10, to 5 standard errors; a label that nobody has is never drawn."""
    y = draw_labels(torch.tensor(1), COUNTS, 20_000)
    share = np.bincount(y.numpy(), minlength=4) / 20_000
    assert share[[1, 3]].tolist() == [0, 0]
    assert abs(share[0] - 0.4) < 5 * np.sqrt(0.24 / 20_000)
    assert torch.equal(y, draw_labels(torch.tensor(1), COUNTS, 20_000))
    assert not torch.equal(y, draw_labels(torch.tensor(2), COUNTS, 20_000))


def test_label_weights() -> None:
    wanted = [[0.75, 0.0, 1 / 6, 0.0], [0.25, 0.0, 5 / 6, 0.0]]
    np.testing.assert_allclose(label_weights(COUNTS), wanted, rtol=1e-6)
