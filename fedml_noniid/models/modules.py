"""Prepares a user's `torch.nn.Module`: batch norms that know padding, dropout that draws from keys,
and its tensors in one place.

The user's objects stay: of a plain batch norm or dropout only `forward` is another one. The names
of parameters stay. Running statistics are called `mean` and `var`, as in our own networks.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import BatchNorm, Dropout

NEAR = 8  # names that an error lists
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
# Module -> whether whole channels are dropped. Dropout1d takes two axes for one sample, so it draws
# from torch's generator.
DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
CALLS = 1 << 12  # between the numbers of two calls of the same dropout in one pass
# Names of torch's running statistics -> ours.
RENAMED = {"running_mean": "mean", "running_var": "var"}
COUNTED = "num_batches_tracked"  # which nothing here reads
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def our_name(name: str) -> str:
    """Our name of a tensor in a state dict of torch; "" if nothing here reads it."""
    path, _, last = name.rpartition(".")
    last = RENAMED.get(last, last)
    return "" if last == COUNTED else f"{path}.{last}" if path else last


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Returns the names that are most like a pattern, at most NEAR, for an error."""
    near = difflib.get_close_matches(pattern, sorted(names), n=NEAR, cutoff=0)
    return ", ".join(near)


@dataclass
class Scope:
    """The pass that runs: what prepared submodules read, and what they leave."""

    run: Forward | None = None  # None: no pass runs
    dropping: bool = True  # whether prepared dropouts drop anything
    features: Tensor | None = None  # input of the classifier
    calls: dict[str, int] = field(default_factory=dict)  # of each dropout
    kept: list[str] = field(default_factory=list)  # batch norms and dropouts that are not prepared

    def entered(self, layer: str) -> Forward:
        """The pass that enters a layer."""
        if self.run is None:
            raise UserError(
                f"{layer} runs again in the backward pass",
                allowed="batch norms and dropouts outside of torch.utils.checkpoint",
            )
        return self.run


@dataclass
class MaskedNorm:
    """The forward of a batch norm: padding does not count."""

    name: str
    norm: _BatchNorm
    scope: Scope

    def __call__(self, x: Tensor) -> Tensor:
        norm, run = self.norm, self.scope.entered(self.name)
        if run.plain and run.mask is None and x.numel() > norm.num_features:
            return type(norm).forward(norm, x)
        assert norm.momentum is not None, "`refused` has looked"
        block = BatchNorm("", norm.num_features, norm.momentum, norm.eps)
        weight = x.new_ones(block.n) if norm.weight is None else norm.weight
        bias = x.new_zeros(block.n) if norm.bias is None else norm.bias
        tensors, (mean, var) = norm._buffers, block.running
        params: Params = dict(zip(block.names, (weight, bias), strict=True))
        buffers: Any = {mean: tensors["running_mean"], var: tensors["running_var"]}
        own = Forward(params, buffers, norm.training, run.mask, plain=run.plain)
        out = block(own, x)
        tensors |= {"running_mean": own.buffers[mean], "running_var": own.buffers[var]}
        return out


@dataclass
class KeyedDropout:
    """The forward of a dropout: the key of the step decides what is dropped."""

    name: str
    dropout: _DropoutNd
    number: int
    scope: Scope

    def block(self, call: int = 0) -> Dropout:
        channels = DROPOUTS[type(self.dropout)]
        return Dropout(self.number + CALLS * call, self.dropout.p, channels)

    def __call__(self, x: Tensor) -> Tensor:
        scope, dropout, run = self.scope, self.dropout, self.scope.entered(self.name)
        if not (dropout.training and dropout.p and scope.dropping):
            return x
        call = scope.calls[self.name] = scope.calls.get(self.name, -1) + 1
        out = self.block(call)(Forward({}, {}, train=True, key=run.key), x)
        return x.copy_(out) if dropout.inplace else out


def refused(module: nn.Module) -> Iterator[str]:
    """Why a module can't be a client's network, before any pass."""
    for path, part in module.named_modules():
        prefix = f"{path or type(part).__name__}: "
        if isinstance(part, nn.modules.lazy.LazyModuleMixin):
            yield prefix + "a lazy module has no parameters yet; give it its sizes"
        elif isinstance(part, torch.jit.ScriptModule):
            yield prefix + "a scripted or traced module; allowed: the module that it was made of"
        elif hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            yield prefix + "a compiled module; allowed: the module without torch.compile"
        elif isinstance(part, _BatchNorm) and not part.track_running_stats:
            yield prefix + "a batch norm without running statistics; allowed: track_running_stats"
        elif isinstance(part, _BatchNorm) and part.momentum is None:
            yield prefix + "a batch norm with momentum = None (cumulative mean); allowed: a number"
        elif isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            yield prefix + "a module for several devices; allowed: the module inside"
        if any(map(_refers, tree_leaves(vars(part)))):
            yield prefix + (
                "a function in it refers to a module or a tensor, so that copies of the network "
                "would share it; allowed: a method, or the arguments of a hook"
            )
    for name, leaf in module.named_parameters():
        if not leaf.is_floating_point():
            yield (
                f"{name}: a parameter of {leaf.dtype}; allowed: real numbers (a buffer for whole "
                "numbers, torch.view_as_complex in forward for complex ones)"
            )
        elif leaf.dtype != torch.float32:
            yield f"{name}: a parameter of {leaf.dtype}; allowed: torch.float32 (`.float()`)"
        elif leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            yield (
                f"{name}: a parameter with a hook on its gradient, which would not run; allowed: "
                "`freeze`, or a mask in forward (weight * mask + (weight * (1 - mask)).detach())"
            )


def _refers(function: object) -> bool:
    """Whether a function has a module or a tensor in its closure or its defaults."""
    cells = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    values += getattr(function, "__defaults__", None) or ()
    return any(isinstance(value, nn.Module | Tensor) for value in values)


def is_plain(part: nn.Module) -> bool:
    """Whether a batch norm or a dropout is torch's own, without code or tensors of the user's."""
    if type(part) in NORMS:
        names = {*part._parameters, *part._buffers}
        if names != {"weight", "bias", *RENAMED, COUNTED}:
            return False
    elif type(part) not in DROPOUTS:
        return False
    overridden = {name for name in vars(part) if callable(getattr(type(part), name, None))}
    return not overridden and not any(getattr(part, hooks, None) for hooks in HOOKS)


def prepare(module: nn.Module, scope: Scope) -> None:
    """Has plain batch norms and dropouts follow the pass of `scope`; all others stay torch's."""
    number = 0
    for path, part in module.named_modules():
        if not isinstance(part, _BatchNorm | _DropoutNd):
            continue
        if not is_plain(part):
            scope.kept.append(f"{path} ({type(part).__name__})")
        elif isinstance(part, _BatchNorm):
            vars(part)["forward"] = MaskedNorm(path, part, scope)
        else:
            number += 1
            vars(part)["forward"] = KeyedDropout(path, part, number, scope)


@contextmanager
def hooked(
    module: nn.Module,
    call: Callable[[str, tuple[Any, ...], Any], None],
    kinds: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module,
) -> Iterator[None]:
    """Inside, each pass calls `call` with name, arguments and output of each part of some kinds."""
    hooks = [
        part.register_forward_hook(lambda _, args, out, name=name: call(name, args, out))
        for name, part in module.named_modules()
        if isinstance(part, kinds)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; `memo` as in `copy.deepcopy`.

    Python can't copy tensors that a pass leaves in attributes, as torch's old weight norm does:
    they are cut from their graph.
    """
    for leaf in tree_leaves([vars(part) for part in module.modules()]):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            memo[id(leaf)] = leaf.detach().clone()
    return copy.deepcopy(module, memo)


def converted(module: nn.Module, like: Tensor) -> None:
    """Moves a module's tensors to the device of `like`; those of its parameters' dtype get that of
    `like`. Tensors in attributes count."""
    kinds = {leaf.dtype for leaf in module.parameters()}

    def fn(leaf: Tensor) -> Tensor:
        return leaf.to(like.device, like.dtype if leaf.dtype in kinds else leaf.dtype)

    module._apply(fn)  # type: ignore[no-untyped-call]  # torch has no types for it
    for part in module.modules():
        attributes = vars(part)
        attributes |= {
            name: fn(leaf) for name, leaf in attributes.items() if isinstance(leaf, Tensor)
        }


class Bound:
    """A module as a function: the slots of its tensors are found once, and filled for each pass.

    As `torch.func.functional_call`, but quicker, and buffers that a pass changes come back too.
    The parameters stay in the module until its next pass, as a backward pass may run parts again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, str] = {}  # of a slot -> of the tensor; tied: of the first slot
        self._parameters: list[tuple[dict[str, Any], str, str]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        seen: dict[int, str] = {}
        for path, part in module.named_modules():
            for kind in (part._parameters, part._buffers):
                for name, leaf in kind.items():
                    slot = f"{path}.{name}" if path else name
                    if kind is part._buffers:
                        slot = our_name(slot)
                    if leaf is None or not slot:
                        continue
                    full = self.names[slot] = seen.setdefault(id(leaf), slot)
                    slots = self._buffers if kind is part._buffers else self._parameters
                    slots.append((kind, name, full))

    @contextmanager
    def holding(self, params: Params, buffers: Params, train: bool) -> Iterator[Params]:
        """Has the module hold these tensors. Yields a dictionary that has the buffers behind it.

        In training the module gets copies of the buffers, which it may change in place.
        """
        after: Params = {}
        for kind, name, full in self._parameters:
            kind[name] = params[full]
        slots = [slot for slot in self._buffers if slot[2] in buffers]
        constants = [kind[name] for kind, name, _ in slots]
        copies = {full: buffers[full].clone() if train else buffers[full] for *_, full in slots}
        for kind, name, full in slots:
            kind[name] = copies[full]
        try:
            yield after
            after |= {full: kind[name] for kind, name, full in slots}
        finally:
            for (kind, name, _), leaf in zip(slots, constants, strict=True):
                kind[name] = leaf
