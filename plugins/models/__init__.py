"""The registry of networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError, known
from fedml_noniid.plugins.core.options import check_options
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
        raise UserError(
            f"model {name!r} takes text only, and the data set is none",
            allowed=", ".join(model for model in MODELS if model not in OF_TEXT),
        )
    if embedding is not None and name not in OF_TEXT:
        raise UserError(
            f"model {name!r} can't take text, which the data set is", allowed=", ".join(OF_TEXT)
        )
    of_text = () if embedding is None else (embedding,)
    return MODELS[name](input_shape, n_classes, *of_text, **(options or {}))


def check(name: str, options: Mapping[str, int | bool] | None = None) -> None:
    """UserError for an unknown model, and for options that it does not take."""
    check_options(MODELS[known("model", name, MODELS)], options or {})
