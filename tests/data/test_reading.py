"""Noise, crops and flips: against torchvision, by their statistics, and that padding and company
change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.data import Samples
from fedml_noniid.core.randomness import uniform
from fedml_noniid.data.reading import Noise, Read, moved

KEYS = st.integers(-(1 << 63), (1 << 63) - 1)


def images(n: int, channels: int = 2, height: int = 6, width: int = 7) -> torch.Tensor:
    """Images of which every pixel has a value of its own."""
    return torch.arange(float(n * channels * height * width)).reshape(n, channels, height, width)


@settings(max_examples=25, deadline=None)
@given(key=KEYS, height=st.integers(5, 9), width=st.integers(5, 9))
def test_crops_and_flips_are_torchvisions(key: int, height: int, width: int) -> None:
    """The offsets by plain arithmetic from the three numbers that an image draws: top, left,
    flip."""
    from torchvision.transforms import functional as transforms

    x = images(6, 3, height, width)
    found = moved(x, torch.tensor(key))
    for image, seen, (a, b, c) in zip(
        x, found, uniform(torch.tensor(key), 6, 3).tolist(), strict=True
    ):
        top, left = int(a * 9), int(b * 9)
        padded = transforms.pad(image, [4], padding_mode="reflect")
        wanted = transforms.crop(padded, top, left, height, width)
        assert torch.equal(seen, transforms.hflip(wanted) if c < 0.5 else wanted)


def reader(key: int, augment: bool = True) -> Read:
    return Read(torch.tensor(key), augment)


def noise(n: int, *std: float) -> Noise:
    """Of n samples in turn, with the last deviation 0."""
    return Noise(torch.tensor([*std, 0.0]).reshape(-1, 1, 1, 1), torch.arange(n) % len(std))


def held(x: torch.Tensor, of: Noise | None) -> Samples:
    """Samples with this noise."""
    return Samples(x, torch.zeros(len(x)), of)


@pytest.mark.parametrize("augment", [False, True])
@settings(max_examples=25, deadline=None)
@given(key=KEYS, n=st.integers(1, 8), step=st.integers(0, 5))
def test_padding_behind_a_batch_changes_nothing(augment: bool, key: int, n: int, step: int) -> None:
    x, index = images(12), torch.tensor([3, 1, 4, 11, 5, 9, 2, 6])
    whole = reader(key, augment)(held(x, noise(12, 0.5, 0.1)), index, step)
    padded = torch.cat([index[:n], torch.zeros(8 - n, dtype=torch.int64)])
    for other in (index[:n], padded):
        assert torch.equal(
            reader(key, augment)(held(x, noise(12, 0.5, 0.1)), other, step)[:n], whole[:n]
        )


def test_under_vmap_each_client_reads_what_it_would_alone() -> None:
    x, of = images(12), noise(12, 0.5, 0.1, 0.0)
    index, keys = torch.tensor([[3, 1, 4], [0, 5, 9], [2, 6, 8]]), torch.tensor([1, 2, 3])
    together = torch.func.vmap(lambda key, at: Read(key, True)(held(x, of), at, 1))(keys, index)
    assert torch.equal(
        together,
        torch.stack(
            [Read(key, True)(held(x, of), at, 1) for key, at in zip(keys, index, strict=True)]
        ),
    )


def test_noise_has_the_deviation_of_the_sample() -> None:
    """Four samples of 90,000 pixels: deviations 0.2, 0.05, 0.2, 0.05, each within four standard
    errors."""
    x = torch.zeros(4, 1, 300, 300, dtype=torch.float64)
    found = reader(5, False)(held(x, noise(4, 0.2, 0.05)), torch.arange(4), 0)
    for seen, std in zip(found, (0.2, 0.05, 0.2, 0.05), strict=True):
        assert abs(seen.mean().item()) < 4 * std / 300
        assert seen.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * 90_000))


def test_noise_does_not_depend_on_the_crop() -> None:
    """Crops and flips and noise draw from streams of their own, and the noise comes last."""
    x, index = images(4), torch.arange(4)
    crop = reader(7)(held(x, None), index, 0)
    eps = reader(7, False)(held(torch.zeros_like(x), noise(4, 0.5)), index, 0)
    assert torch.equal(reader(7)(held(x, noise(4, 0.5)), index, 0), crop + eps)
