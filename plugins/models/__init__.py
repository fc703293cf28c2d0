"""The registry of networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from plugins.core.errors import UserError, nearest
from plugins.core.task import Network
from plugins.models.networks import (
    cnn,
    fednnnn_cifar,
    fednnnn_mnist,
    logistic_regression,
    mlp,
    pfl_cnn,
    resnet18,
    vgg9,
    vgg11,
    vgg16,
)

MODELS: dict[str, Callable[..., Network]] = {
    "logistic_regression": logistic_regression,
    "mlp": mlp,
    "cnn": cnn,
    "fednnnn_mnist": fednnnn_mnist,
    "fednnnn_cifar": fednnnn_cifar,
    "vgg9": vgg9,
    "vgg11": vgg11,
    "vgg16": vgg16,
    "resnet18": resnet18,
    "pfl_cnn": pfl_cnn,
}


def build(
    name: str, input_shape: tuple[int, ...], n_classes: int, options: Mapping[str, int | bool] | None = None
) -> Network:
    """The network `name` for samples of shape `input_shape`; UserError for an unknown name or option."""
    check(name, options)
    return MODELS[name](input_shape, n_classes, **(options or {}))


def check(name: str, options: Mapping[str, int | bool] | None = None) -> None:
    """UserError for an unknown model, an unknown option, or an option's value of the wrong kind."""
    if name not in MODELS:
        raise UserError(f"model {name!r} is unknown{nearest(name, MODELS)}; allowed: {', '.join(MODELS)}")
    known = {p.name: p.default for p in list(inspect.signature(MODELS[name]).parameters.values())[2:]}
    for key, value in (options or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise UserError(f"model {name!r} has no option {key!r}{nearest(key, known)}; allowed: {allowed}")
        least = min(known[key], 1)  # what is off by default may be switched off
        if type(value) is not type(known[key]) or (not isinstance(value, bool) and value < least):
            kind = "true or false" if isinstance(known[key], bool) else f"a whole number of at least {least}"
            raise UserError(f"model {name!r}, option {key!r}: {value!r} is not {kind}")
