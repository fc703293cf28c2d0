"""First values of a weight layer: (weight, bias), drawn from a generator for a weight of shape
[n_out, n_in, ...]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Initial = Callable[[torch.Generator, tuple[int, ...]], tuple[Tensor, Tensor]]


def _uniform(generator: torch.Generator, bound: float, *shape: int) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _normal(generator: torch.Generator, std: float, *shape: int) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan in, fan out): the inputs of one output, and the outputs of one input."""
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


def _bias(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """As torch's: uniform in +-1/sqrt(fan in)."""
    return _uniform(generator, 1 / math.sqrt(_fans(shape)[0]), shape[0])


def as_torch(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """As `torch.nn.Linear` and `torch.nn.Conv2d`: weight and bias uniform in +-1/sqrt(fan in)."""
    weight = _uniform(generator, 1 / math.sqrt(_fans(shape)[0]), *shape)
    return weight, _bias(generator, shape)


def kaiming_uniform(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """He et al. 2015 for ReLU: uniform in +-sqrt(6 / fan in); torch's bias."""
    weight = _uniform(generator, math.sqrt(6 / _fans(shape)[0]), *shape)
    return weight, _bias(generator, shape)


def kaiming_normal_out(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """He et al. 2015 for the backward pass: normal with variance 2 / fan out; bias 0."""
    return _normal(generator, math.sqrt(2 / _fans(shape)[1]), *shape), torch.zeros(shape[0])


def xavier_uniform(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Glorot and Bengio 2010: uniform in +-sqrt(6 / (fan in + fan out)); torch's bias."""
    weight = _uniform(generator, math.sqrt(6 / sum(_fans(shape))), *shape)
    return weight, _bias(generator, shape)


def xavier_normal(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Glorot and Bengio 2010: normal with variance 2 / (fan in + fan out); torch's bias."""
    weight = _normal(generator, math.sqrt(2 / sum(_fans(shape))), *shape)
    return weight, _bias(generator, shape)
