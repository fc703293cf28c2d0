"""Finds networks by name, a user's own too, and makes them for samples and classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from fedml_noniid import own_code
from fedml_noniid.core.errors import UserError, located, shown
from fedml_noniid.core.options import check_options, unknown
from fedml_noniid.data.inputs import Inputs, total
from fedml_noniid.models.model import Model
from fedml_noniid.models.networks import (
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
from fedml_noniid.models.own import OwnNetwork
from fedml_noniid.models.probe import as_row, probed
from fedml_noniid.models.recurrent import lstm

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
CNN_PIXELS = 28  # width and height from which the model of images is a cnn
OF_TEXT = ("lstm",)  # networks that take the vectors of the data set's tokens beside their options
OWN = "a torch.nn.Module, or a function that makes one, of your own as package.module:name"
Factory = Callable[..., nn.Module]
_probed: dict[tuple[str, Factory | nn.Module, str], OwnNetwork] = {}


def model_for(shape: Sequence[int]) -> str:
    """The network for samples [...] without embedding, where the user names none."""
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= CNN_PIXELS else "mlp"


def name_of(model: object) -> str:
    """The name under which `check` and `build` know a network: its own, or that of an object.

    A class or a function is called anew for each run. A module is copied: each run starts from its
    parameters. UserError for another object.
    """
    if isinstance(model, str):
        return model
    if not isinstance(model, nn.Module) and not callable(model):
        raise UserError(path=("model",), value=model, allowed=f"{', '.join(MODELS)}, or {OWN}")
    return own_code.name_of(model)


def described(name: str) -> str:
    """A name of a network that is the same in every process."""
    known = own_code.registered(name)
    kind = type(known) if isinstance(known, nn.Module) else known
    return name if kind is None else f"{kind.__module__}:{kind.__qualname__}"


def is_own(name: str) -> bool:
    """Whether a name is that of a user's code, which other processes find too."""
    return name not in MODELS and own_code.is_own(name)


def check(name: object, options: Mapping[str, Any] | None = None) -> None:
    """UserError for an unknown network, and for options that it does not take."""
    made = _factory(name)
    with located("model_options"):
        if name in MODELS:
            check_options(made, options or {})
        elif isinstance(made, nn.Module):
            for option in options or {}:
                unknown((option,), option, ())
        else:
            chosen = options or {}
            own_code.check_arguments(made, chosen, facts((), 0, None).keys() - chosen.keys())


def build(
    name: str,
    input_shape: tuple[int, ...],
    n_classes: int,
    options: Mapping[str, Any] | None = None,
    embedding: Tensor | None = None,
    head: str = "",
    inputs: Inputs | None = None,
) -> Model:
    """The network `name` for samples of shape `input_shape`.

    `embedding` [V, width]: the vectors of the tokens, if samples are text. `head`: the classifier
    of a user's module, by default its last linear layer. `inputs`: those that a user's module takes
    by name, if there are several; samples are [total]. UserError for an unknown name or option, and
    for a network that can't take such samples, or can't be trained.
    """
    check(name, options)
    if inputs and (name in MODELS or input_shape != (total(inputs),)):
        why = f"model {name!r} takes one" if name in MODELS else f"samples are {list(input_shape)}"
        raise UserError(f"inputs with {total(inputs)} numbers are refused, as {why}")
    if name not in MODELS:
        known = facts(input_shape, n_classes, embedding)
        network = own_network(name, options or {}, known, head, inputs)
        return as_row(network, 0 if embedding is None else len(embedding))
    if head:
        raise UserError(f"head = {shown(head)} is refused with model {name!r}, which has its own")
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


def own_network(
    name: str,
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
    head: str = "",
    inputs: Inputs | None = None,
) -> OwnNetwork:
    """A user's network, probed: once in a process for each factory, as it takes seconds.

    UserError if it can't be trained.
    """
    embedding, factory = facts["embedding"], _factory(name)
    tokens = 0 if embedding is None else len(embedding)
    named = dict(inputs or {})
    arguments = json.dumps(
        [options, {**facts, "embedding": tokens}, head, [*named.items()]],
        sort_keys=True,
        default=repr,
    )
    key = name, factory, arguments
    if key in _probed:
        return _probed[key]
    shapes = {key: tuple(spec.shape) for key, spec in named.items()}
    make = maker(name, options, {**facts, "input_shape": shapes or facts["input_shape"]})
    network = OwnNetwork(
        *(name, make, facts["input_shape"]), head=head, tokens=tokens > 0, inputs=named
    )
    probe = probed(network, facts["n_classes"], tokens)
    if not isinstance(factory, nn.Module):  # which may be trained in the meantime
        _probed[key] = probe
    return probe


def _factory(name: object) -> Callable[..., Any]:
    """What makes the network of a name. UserError."""
    with located("model"):
        factory = own_code.object_of("model", name, MODELS, OWN)
    if not isinstance(factory, nn.Module) and not callable(factory):
        raise UserError(f"model {name!r} is a {type(factory).__name__}", allowed=OWN)
    made: Callable[..., Any] = factory
    return made


def facts(input_shape: tuple[int, ...], n_classes: int, embedding: Tensor | None) -> dict[str, Any]:
    """What a factory is given if it has a parameter of this name."""
    return {
        "input_shape": input_shape,
        "n_classes": n_classes,
        "num_classes": n_classes,
        "embedding": embedding,
    }


FACTS = tuple(facts((), 0, None))


def maker(
    name: str, options: Mapping[str, Any], facts: Mapping[str, object]
) -> Callable[[], nn.Module]:
    """Makes a user's module, or returns it; `facts`: as of `facts`."""
    factory = _factory(name)
    if isinstance(factory, nn.Module):
        return lambda: factory
    asked = inspect.signature(factory).parameters
    arguments = {key: value for key, value in facts.items() if key in asked} | dict(options)
    return partial(factory, **arguments)
