"""A user's `torch.nn.Module` as a network of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.task import Layer, Output
from fedml_noniid.core.trees import Params
from fedml_noniid.data.inputs import Inputs, split
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.model import Model
from fedml_noniid.models.modules import (
    Bound,
    KeyedDropout,
    Scope,
    converted,
    copied,
    hooked,
    our_name,
    prepare,
    refused,
)

KEY = "key"  # the one entry of what a step draws ahead
# Modules whose parameters have one row per neuron or channel.
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Template(NamedTuple):
    """A module into which every pass puts its tensors."""

    module: nn.Module
    bound: Bound
    scope: Scope


@dataclass
class Note:
    """Takes the input of the classifier as features."""

    scope: Scope

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        self.scope.features = args[0] if args else named["input"]


def _frozen(leaf: Tensor) -> nn.Parameter:
    return nn.Parameter(leaf, requires_grad=False)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of float32 have the same bits: 0 is not -0."""
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


@dataclass(frozen=True, eq=False)
class OwnNetwork(Model):
    """A module that `make` returns, with what `models.probe` found out about it.

    Its classifier is the linear layer `head`. What is before it makes the features.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a sample
    _: KW_ONLY
    head: str = ""  # "": none, so there are no features
    state: frozenset[str] = frozenset()  # buffers that training changes; the others are constants
    seeded: bool = False  # whether passes draw from torch's generator, which is then seeded
    dropping: bool = True  # whether the dropouts that draw from keys drop anything
    channels_last: bool = True  # whether the module takes images in the fastest layout
    out: int = 0  # C
    inputs: Inputs = field(default_factory=dict)  # by name, if there are several
    # Frozen parameters, which may be large: those of all templates and, where they have the same
    # values, of all modules lie in this memory.
    fixed: Params = field(default_factory=dict, repr=False)
    # `replace` passes it on, because engines replace networks often
    templates: dict[object, Template] = field(default_factory=dict, repr=False)

    def untouched(self, seed: int = 0) -> nn.Module:
        """A copy of what the user's code makes, which may be one module every time. They share the
        frozen parameters. UserError if it can't be a client's network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make()
        if not isinstance(module, nn.Module):
            raise UserError(
                f"model {self.name!r} gives a {type(module).__name__}; allowed: a torch.nn.Module"
            )
        for why in refused(module):
            raise UserError(f"model {self.name!r}: {why}")
        memo: dict[int, Any] = {}
        for name, leaf in module.named_parameters():
            if type(leaf) is nn.Parameter and not leaf.requires_grad:
                known = self.fixed.get(name, leaf.data)
                memo[id(leaf)] = _frozen(known if _same_bits(known, leaf.data) else leaf.data)
        return copied(module, memo)

    def template(self, train: bool, like: Tensor | None = None) -> Template:
        """The module of passes in training, or of others; its constants are as `like`."""
        key = self.head, train, *(() if like is None else (like.device, like.dtype))
        if key not in self.templates:
            if like is None:
                module, scope = self.untouched(), Scope()
                module.train(train)
                module.requires_grad_(False)
                for name, leaf in module.named_parameters():
                    if name in self.fixed:  # each pass puts in its own values
                        leaf.data = self.fixed[name]
                prepare(module, scope)
                if self.head:
                    part = module.get_submodule(self.head)
                    part.register_forward_pre_hook(Note(scope), with_kwargs=True)
            else:  # a copy, as vmap lets no module be drawn
                made, _, its_scope = self.template(train)
                memo: dict[int, Any] = {
                    id(leaf): _frozen(leaf.data)
                    for name, leaf in made.named_parameters()
                    if name in self.frozen
                }
                module, scope = copied(made, memo), copy.deepcopy(its_scope, memo)
                converted(module, like)
            self.templates[key] = Template(module, Bound(module), scope)
        return self.templates[key]

    @cached_property
    def _module(self) -> nn.Module:
        return self.template(False).module

    @property
    def n_classes(self) -> int:
        return self.out

    @cached_property
    def _classifier(self) -> nn.Linear:
        classifier = self._module.get_submodule(self.head)
        assert isinstance(classifier, nn.Linear), "the probe has looked"
        return classifier

    @property
    def feature_size(self) -> int:
        return self._classifier.in_features if self.head else 0

    @property
    def records(self) -> bool:
        return False

    @cached_property
    def dropouts(self) -> dict[str, KeyedDropout]:
        """The dropouts that draw from keys, by name."""
        forwards = {name: vars(part).get("forward") for name, part in self._module.named_modules()}
        return {
            name: module for name, module in forwards.items() if isinstance(module, KeyedDropout)
        }

    @cached_property
    def draws(self) -> bool:
        return self.seeded or any(dropout.dropout.p > 0 for dropout in self.dropouts.values())

    @cached_property
    def norms(self) -> frozenset[str]:
        parts = self._module.named_modules()
        return frozenset(name for name, part in parts if isinstance(part, _BatchNorm))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In the order of a pass. Only those that are trained, and the classifier.

        The affine pair of a batch norm belongs to the layer before it.
        """
        module, bound, _ = self.template(False)
        names: list[str] = []
        with (
            torch.no_grad(),
            hooked(module, lambda name, *_: names.append(name), (_BatchNorm, *WEIGHTED)),
            self._entered(self.template(False), False, torch.zeros(())),
        ):
            self.apply(module, torch.zeros(1, *self.shape))
        layers: list[Layer] = []
        for name in dict.fromkeys(names):
            part = module.get_submodule(name)
            follows = isinstance(part, _BatchNorm)
            if not layers if follows else "weight" not in part._parameters:  # or parametrised
                continue
            units = layers[-1].units if follows else cast("Tensor", part.weight).shape[0]
            own = dict(part.named_parameters(prefix=name, recurse=False))
            kept = () if name == self.head else self.frozen
            rows = [slot for slot, leaf in own.items() if leaf.shape[:1] == (units,)]
            trained = tuple(bound.names[slot] for slot in rows if slot not in kept)
            if follows:
                layers[-1] = layers[-1]._replace(parameters=layers[-1].parameters + trained)
            elif trained:
                layers.append(Layer(name, trained, units))
        return tuple(sorted(layers, key=lambda layer: layer.name == self.head))

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers) of a new module. Modules draw from torch's own generator."""
        module = self.untouched(int(torch.randint(2**62, (), generator=generator)))
        params = {name: leaf.detach() for name, leaf in module.named_parameters()}
        buffers = {our_name(name): leaf for name, leaf in module.named_buffers()}
        return params, {name: buffers[name].detach().clone() for name in sorted(self.state)}

    def draws_ahead(
        self, params: Params, buffers: Params, x: Tensor, keys: Tensor, batch: int
    ) -> Iterator[Params]:
        keys = keys if self.seeded else keys.to(x.device)
        for step in range(keys.shape[-1]):
            yield {KEY: keys[..., step]}

    def __call__(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        drawn: Params | None = None,
        axes: int = 0,
    ) -> Output:
        some = next(iter(params.values()))
        template = self.template(train, some)
        key = (drawn or {}).get(KEY, key)
        with (
            self._entered(template, train, x, mask, key) as scope,
            template.bound.holding(params, buffers, train) as left,
        ):
            images = x.ndim == 4 and self.channels_last
            logits = self.apply(template.module, scope.entered("").images(x) if images else x)
        if not self.head:  # NaN: no method can use them unnoticed
            features = logits.new_full((len(logits), 1), torch.nan)
        else:
            assert scope.features is not None, "the probe has looked"
            features = scope.features
        return Output(features.to(some.dtype), logits.to(some.dtype), left)

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns the outputs of the user's code; several inputs are its arguments by name."""
        logits: Tensor = module(**split(self.inputs, x)) if self.inputs else module(x)
        return logits

    @contextmanager
    def _entered(
        self,
        template: Template,
        train: bool,
        x: Tensor,
        mask: Tensor | None = None,
        key: Tensor | None = None,
    ) -> Iterator[Scope]:
        """Inside, the template's modules know the pass."""
        scope = template.scope
        scope.run = Forward({}, {}, train, mask, key, plain=self.plain)
        scope.features, scope.calls, scope.dropping = None, {}, self.dropping
        with ExitStack() as stack:
            if train and self.precision == "bf16":
                stack.enter_context(torch.autocast(x.device.type, torch.bfloat16))
            if train and self.seeded and key is not None:
                devices = [x.device] if x.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(int(key))
            try:
                yield scope
            finally:
                scope.run = None

    def classify(self, params: Params, h: Tensor) -> Tensor:
        names = self.template(False).bound.names
        bias = names.get(f"{self.head}.bias")
        weight = params[names[f"{self.head}.weight"]]
        return F.linear(h, weight, None if bias is None else params[bias])
