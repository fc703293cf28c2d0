"""Prepares a user's `torch.nn.Module`: batch norms that know padding, dropout that draws from keys,
and its tensors in one place.

The names of parameters stay. A batch norm's running statistics are called `mean` and `var`, as in
our own networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.models.forward import Forward
from fedml_noniid.plugins.models.layers import BatchNorm, Dropout

# Module -> whether whole channels are dropped.
DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
CALLS = 1 << 12  # between the numbers of two calls of the same dropout in one pass


@dataclass
class Scope:
    """The pass that runs: what replaced submodules read, and what they leave."""

    run: Forward = field(default_factory=lambda: Forward({}, {}, train=False))
    features: Tensor | None = None  # input of the classifier
    calls: dict[int, int] = field(default_factory=dict)  # of each dropout


class MaskedNorm(nn.Module):
    """Stands for a batch norm: padding does not count, and nothing is changed in place."""

    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, norm: _BatchNorm, scope: Scope) -> None:
        super().__init__()
        n = norm.num_features
        self.weight, self.bias = norm.weight, norm.bias  # the objects: they may be tied
        for name, leaf in (("mean", norm.running_mean), ("var", norm.running_var)):
            assert leaf is not None, "`refused` has looked"
            self.register_buffer(name, leaf.clone())
        assert norm.momentum is not None, "`refused` has looked"
        self.block, self.scope = BatchNorm("", n, norm.momentum, norm.eps), scope
        self.training = norm.training

    def forward(self, x: Tensor) -> Tensor:
        run, (mean, var) = self.scope.run, self.block.running
        one = x.new_ones(()).expand(self.block.n)
        weight = one if self.weight is None else self.weight
        bias = torch.zeros_like(one) if self.bias is None else self.bias
        params = dict(zip(self.block.names, (weight, bias), strict=True))
        buffers = {mean: self.mean, var: self.var}
        own = Forward(params, buffers, self.training, run.mask, plain=run.plain)
        out = self.block(own, x)
        self.mean, self.var = own.buffers[mean], own.buffers[var]
        return out


class KeyedDropout(nn.Module):
    """Stands for a dropout: the key of the step decides what is dropped."""

    def __init__(self, number: int, p: float, channels: bool, scope: Scope) -> None:
        super().__init__()
        self.number, self.p, self.channels, self.scope = number, p, channels, scope

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        call = self.scope.calls[self.number] = self.scope.calls.get(self.number, -1) + 1
        block = Dropout(self.number + CALLS * call, self.p, self.channels)
        own = Forward({}, {}, train=True, key=self.scope.run.key)
        return block(own, x)


def refused(module: nn.Module) -> Iterator[str]:
    """Why a module can't be a client's network, before any pass."""
    for path, part in module.named_modules():
        where = f"{path or type(part).__name__}: "
        if isinstance(part, nn.modules.lazy.LazyModuleMixin):
            yield where + "a lazy module has no parameters yet; give it its sizes"
        elif isinstance(part, _BatchNorm) and not part.track_running_stats:
            yield where + "a batch norm without running statistics; allowed: track_running_stats"
        elif isinstance(part, _BatchNorm) and part.momentum is None:
            yield where + "a batch norm with momentum = None (cumulative mean); allowed: a number"
        elif isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            yield where + "a module for several devices; allowed: the module inside"


def replaced(module: nn.Module, scope: Scope) -> nn.Module:
    """The module, with batch norms and dropouts that know the pass. One that is used twice stays
    one."""
    known: dict[nn.Module, nn.Module] = {}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        new = known.get(part)
        if new is None and isinstance(part, _BatchNorm):
            new = MaskedNorm(part, scope)
        elif new is None and type(part) in DROPOUTS:
            number = 1 + sum(isinstance(one, KeyedDropout) for one in known.values())
            new = KeyedDropout(number, part.p, DROPOUTS[type(part)], scope)
        if new is None:
            continue
        known[part] = new
        if not path:
            return new
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, new)
    return module


class Bound:
    """A module as a function: the places of its tensors are found once, and filled for each pass.

    As `torch.func.functional_call`, but quicker, and buffers that a pass assigns come back too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: dict[str, str] = {}  # of a place -> of the tensor; tied: of the first place
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        seen: dict[int, str] = {}
        for path, part in module.named_modules():
            for kind in (part._parameters, part._buffers):
                for name, leaf in kind.items():
                    if leaf is None:
                        continue
                    place = f"{path}.{name}" if path else name
                    full = self.names[place] = seen.setdefault(id(leaf), place)
                    places = self._buffers if kind is part._buffers else self._places
                    places.append((kind, name, full))

    @contextmanager
    def holding(self, params: Params, buffers: Params) -> Iterator[Params]:
        """Inside, the module has these tensors. Yields a dictionary that has the buffers behind
        it."""
        left: Params = {}
        every = [*self._places, *self._buffers]
        before = [kind[name] for kind, name, _ in every]
        try:
            for kind, name, full in self._places:
                if full in params:
                    kind[name] = params[full]
            for kind, name, full in self._buffers:
                if full in buffers:
                    kind[name] = buffers[full]
            yield left
            left |= {full: kind[name] for kind, name, full in self._buffers if full in buffers}
        finally:
            for (kind, name, _), leaf in zip(every, before, strict=True):
                kind[name] = leaf


class LastReLU(TorchFunctionMode):
    """Notes input and output of the last ReLU of a pass."""

    found: tuple[Tensor, Tensor] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_):
            # Out of place: its input must stay.
            self.found = args[0], torch.clamp(args[0], min=0)
            return self.found[1]
        return function(*args, **(kwargs or {}))
