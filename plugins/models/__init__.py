"""The registry of networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError, nearest
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.networks import (
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
from fedml_noniid.plugins.models.recurrent import lstm

MODELS: dict[str, Callable[..., Model]] = {
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
    "lstm": lstm,
}
MOST = 1_000_000  # of an option, such as a width
OF_TEXT = ("lstm",)  # networks that take the vectors of the data set's tokens beside their options


def build(
    name: str,
    input_shape: tuple[int, ...],
    n_classes: int,
    options: Mapping[str, int | bool] | None = None,
    embedding: Tensor | None = None,
) -> Model:
    """The network `name` for samples of shape `input_shape`.

    `embedding` [V, width]: the vectors of the tokens, if samples are text. UserError for an unknown
    name or option, and for a model that can't take such samples.
    """
    check(name, options)
    if embedding is None and name in OF_TEXT:
        allowed = ", ".join(model for model in MODELS if model not in OF_TEXT)
        raise UserError(
            f"model {name!r} takes text only, and the data set is none; allowed: {allowed}"
        )
    if embedding is not None and name not in OF_TEXT:
        raise UserError(
            f"model {name!r} can't take text, which the data set is; allowed: {', '.join(OF_TEXT)}"
        )
    given = {} if embedding is None else {"embedding": embedding}
    return MODELS[name](input_shape, n_classes, **given, **(options or {}))


def check(name: str, options: Mapping[str, int | bool] | None = None) -> None:
    """UserError for an unknown model, an unknown option, or an option's value of the wrong kind."""
    parameters = inspect.signature(MODELS[known("model", name, MODELS)]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    for key, value in (options or {}).items():
        if key not in defaults:
            allowed = ", ".join(defaults) or "none"
            raise UserError(
                f"model {name!r} has no option {key!r}{nearest(key, defaults)}; allowed: {allowed}"
            )
        default = defaults[key]
        least = min(default, 1)  # an option that is off by default may be switched off
        if type(value) is not type(default) or (
            not isinstance(value, bool) and not least <= value <= MOST
        ):
            number = f"a whole number of at least {least} and at most {MOST}"
            kind = "true or false" if isinstance(default, bool) else number
            raise UserError(f"model {name!r}, option {key!r}: {value!r} is not {kind}")
