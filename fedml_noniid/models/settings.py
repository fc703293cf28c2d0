"""The settings of a network, in params.yaml and in FedML's configuration: its name and options, its
first values, what of it is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from fedml_noniid.core.errors import UserError, among, located
from fedml_noniid.core.options import Section
from fedml_noniid.core.trees import Params
from fedml_noniid.data.inputs import Input
from fedml_noniid.models import factories
from fedml_noniid.models.model import Model
from fedml_noniid.models.modules import nearest, our_name
from fedml_noniid.own_code import source_with_files


def _empty(value: object) -> bool:
    return not value


def _shapes(value: object) -> object:
    """`name: [1, 28, 28]` is an input of this shape."""
    if not isinstance(value, dict):
        return value
    return {
        key: {"shape": shape} if isinstance(shape, list) else shape for key, shape in value.items()
    }


class NetworkSettings(Section):
    """A network and its first values."""

    model: str
    model_options: dict[str, Any] = Field(default={})
    init: str = Field(default="", exclude_if=_empty)  # file of first values

    @model_validator(mode="after")
    def _known(self) -> NetworkSettings:
        factories.check(self.model, self.model_options)
        return self

    def model_code(self) -> dict[str, str]:
        """SHA-256 of a user's module with its files, and of the file of first values, by name.

        UserError.
        """
        hashes = {}
        if factories.is_own(self.model):
            hashes[self.model] = source_with_files(self.model, self.model_options)
        if self.init:
            with located("init"):
                hashes[self.init] = hashlib.sha256(_content(Path(self.init))).hexdigest()
        return hashes


class ModelSettings(NetworkSettings):
    """A network that is trained."""

    # The classifier of a module of the user's own: the name of a linear layer.
    head: str = Field(default="", exclude_if=_empty)
    freeze: list[str] = Field(default=[], exclude_if=_empty)  # patterns of parameters
    # Several inputs by name, of a module of the user's own: their shapes, in the order in which
    # they lie in a sample.
    inputs: Annotated[dict[str, Input], BeforeValidator(_shapes)] = Field(
        default={}, exclude_if=_empty
    )


def build_network(
    settings: ModelSettings,
    input_shape: tuple[int, ...],
    n_classes: int,
    embedding: Tensor | None = None,
) -> Model:
    """The network for samples of this shape; `embedding` [V, width]: for text.

    UserError.
    """
    with located("model"):
        network = factories.build(
            *(settings.model, input_shape, n_classes, settings.model_options, embedding),
            *(settings.head, settings.inputs),
        )
    if not (settings.init or settings.freeze):  # a large network takes seconds to draw
        return network
    params, buffers = network.init(torch.Generator().manual_seed(0))
    with located("init"):
        weights = read_weights(Path(settings.init)) if settings.init else {}
        start = fitting(weights, params | buffers)
    with located("freeze"):
        frozen = _matching(settings.freeze, params)
    return replace(network, start=start, frozen=network.frozen | frozen)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror})") from None


def read_weights(path: Path) -> Params:
    """The tensors of a safetensors file or of a state dict of torch, by our names. UserError."""
    content = _content(path)
    try:
        if path.suffix == ".safetensors":
            weights = safetensors.torch.load(content)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: the file may hold anything
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {reason})",
            allowed="*.safetensors, or a state dict that torch.save wrote",
        ) from None
    if not isinstance(weights, dict) or not all(
        isinstance(leaf, Tensor) for leaf in weights.values()
    ):
        raise UserError(f"{path} holds no state dict", allowed="names with tensors")
    named = {our_name(str(name)): leaf for name, leaf in weights.items()}
    return {name: leaf for name, leaf in named.items() if name}


def fitting(weights: Params, wanted: Params) -> Params:
    """The tensors, if the network has them all with their shapes; it may have others."""
    for name, leaf in weights.items():
        if name not in wanted:
            raise UserError(
                f"{name} is no tensor of the network",
                **among(name, wanted),
            )
        if leaf.shape != wanted[name].shape:
            raise UserError(
                f"{name} has shape {list(leaf.shape)}",
                allowed=f"{list(wanted[name].shape)}; leave out what the network draws itself",
            )
    return weights


def _matching(patterns: Sequence[str], params: Params) -> frozenset[str]:
    """The parameters that some pattern names. UserError for a pattern without any, or if all
    are."""
    matching: set[str] = set()
    for pattern in patterns:
        named = {name for name in params if fnmatchcase(name, pattern)}
        if not named:
            raise UserError(value=pattern, allowed=f"a pattern of {nearest(pattern, params)}")
        matching |= named
    if params and matching >= params.keys():
        raise UserError("nothing would be left to train", allowed="some of the parameters")
    return frozenset(matching)
