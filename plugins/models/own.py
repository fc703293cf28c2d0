"""A user's `torch.nn.Module` as a network of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.task import Layer, Output
from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.data.inputs import Inputs, split
from fedml_noniid.plugins.models.forward import Forward
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.modules import (
    Bound,
    KeyedDropout,
    LastReLU,
    MaskedNorm,
    Scope,
    refused,
    replaced,
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

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.scope.features = args[0]


@dataclass(frozen=True, eq=False)
class OwnNetwork(Model):
    """A module that `make` returns, with what `plugins.models.probe` found out about it.

    Its classifier is the linear layer `head`. What is before it makes the features.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a sample
    _: KW_ONLY
    head: str = ""  # "": none, so there are no features
    state: frozenset[str] = frozenset()  # buffers that training changes; the others are constants
    seeded: bool = False  # whether passes draw from torch's generator, which is then seeded
    out: int = 0  # C
    inputs: Inputs = field(default_factory=dict)  # by name, if there are several
    # `replace` passes it on, because engines replace networks often
    _templates: dict[object, Template] = field(default_factory=dict, repr=False)

    def new(self) -> tuple[nn.Module, Scope]:
        """A new module, prepared. UserError if it can't be a client's network."""
        module, scope = self.make(), Scope()
        if not isinstance(module, nn.Module):
            raise UserError(
                f"model {self.name!r} gives a {type(module).__name__}; allowed: a torch.nn.Module"
            )
        for why in refused(module):
            raise UserError(f"model {self.name!r}: {why}")
        return replaced(module, scope), scope

    def template(self, train: bool, like: Tensor | None = None) -> Template:
        """The module of passes in training, or of others; its constants are as `like`."""
        key = (train, None, None) if like is None else (train, like.device, like.dtype)
        if key not in self._templates:
            # A copy, as vmap lets no module be drawn.
            module, _, scope = self._new(train) if like is None else self.template(train)
            if like is not None:
                module, scope = copy.deepcopy((module, scope))
                module.to(like.device, like.dtype)
            self._templates[key] = Template(module, Bound(module), scope)
        return self._templates[key]

    def _new(self, train: bool) -> Template:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, scope = self.new()
        module.train(train).requires_grad_(False)
        if self.head:
            module.get_submodule(self.head).register_forward_pre_hook(Note(scope))
        return Template(module, Bound(module), scope)

    @cached_property
    def _module(self) -> nn.Module:
        return self.template(False).module

    @property
    def n_classes(self) -> int:
        return self.out

    @cached_property
    def _classifier(self) -> nn.Linear:
        found = self._module.get_submodule(self.head)
        assert isinstance(found, nn.Linear), "the probe has looked"
        return found

    @property
    def feature_size(self) -> int:
        return self._classifier.in_features if self.head else 0

    @property
    def records(self) -> bool:
        return False

    @cached_property
    def draws(self) -> bool:
        return self.seeded or any(
            isinstance(part, KeyedDropout) and part.p > 0 for part in self._module.modules()
        )

    @cached_property
    def norms(self) -> frozenset[str]:
        found = self._module.named_modules()
        return frozenset(name for name, part in found if isinstance(part, MaskedNorm))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In the order of a pass. Only those that are trained, and the classifier.

        The affine pair of a batch norm belongs to the layer before it.
        """
        module, bound, _ = self.template(False)
        order: list[nn.Module] = []
        names = {part: name for name, part in module.named_modules()}
        kinds = (*WEIGHTED, MaskedNorm)
        watched = [part for part in names if isinstance(part, kinds)]
        hooks = [
            part.register_forward_hook(lambda part, *_: order.append(part)) for part in watched
        ]
        with torch.no_grad(), self._entered(self.template(False), False, torch.zeros(())):
            self._pass(module, torch.zeros(1, *self.shape))
        for hook in hooks:
            hook.remove()
        found: list[Layer] = []
        for part in dict.fromkeys(order):
            place = names[part] and f"{names[part]}."  # the network itself has no name
            own = [f"{place}{name}" for name, _ in part.named_parameters(recurse=False)]
            kept = () if names[part] == self.head else self.frozen
            trained = tuple(bound.names[name] for name in own if name not in kept)
            if isinstance(part, MaskedNorm) and found:
                found[-1] = found[-1]._replace(parameters=found[-1].parameters + trained)
            elif isinstance(part, WEIGHTED) and trained:
                found.append(Layer(names[part], trained, part.weight.shape[0]))
        return tuple(sorted(found, key=lambda layer: layer.name == self.head))

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers) of a new module. Modules draw from torch's own generator."""
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module, _ = self.new()
        params = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
        buffers = dict(module.named_buffers())
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
            template.bound.holding(params, buffers) as left,
        ):
            logits = self._pass(template.module, scope.run.images(x) if x.ndim == 4 else x)
        if not self.head:  # NaN: no method can use them unnoticed
            features = logits.new_full((len(logits), 1), torch.nan)
        else:
            assert scope.features is not None, "the probe has looked"
            features = scope.features
        return Output(features.to(some.dtype), logits.to(some.dtype), left)

    def _pass(self, module: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the user's code; several inputs are its arguments by name."""
        found: Tensor = module(**split(self.inputs, x)) if self.inputs else module(x)
        return found

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
        scope.features, scope.calls = None, {}
        with ExitStack() as stack:
            if train and self.precision == "bf16":
                stack.enter_context(torch.autocast(x.device.type, torch.bfloat16))
            if train and self.seeded and key is not None:
                devices = [x.device] if x.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(int(key))
            yield scope

    def classify(self, params: Params, h: Tensor) -> Tensor:
        names = self.template(False).bound.names
        bias = names.get(f"{self.head}.bias")
        weight = params[names[f"{self.head}.weight"]]
        return F.linear(h, weight, None if bias is None else params[bias])

    def pre_activation(self, params: Params, buffers: Params, x: Tensor) -> Tensor | None:
        with LastReLU() as mode:
            h = self(params, buffers, x, False).features
        z, rectified = mode.found or (None, None)
        # `flatten` behind the ReLU gives another tensor of the same memory.
        same = rectified is h or (rectified is not None and h._base is rectified)
        return z.reshape(h.shape) if z is not None and same else None

    def outputs(self, params: Params, buffers: Params, x: Tensor) -> int:
        total = 0

        def count(_: nn.Module, __: object, out: object) -> None:
            nonlocal total
            total += out.numel() if isinstance(out, Tensor) else 0

        module = self.template(False, next(iter(params.values()))).module
        parts = [part for part in module.modules() if not list(part.children())]
        hooks = [part.register_forward_hook(count) for part in parts]
        try:
            self(params, buffers, x, False)
        finally:
            for hook in hooks:
                hook.remove()
        return total
