"""Runs of the simulation on a fake CUDA device: which kernels they launch, and where the host
waits. Needs no GPU.

Tensors are torch's fake tensors on device `cuda`. They have shapes and devices but no memory, and
an operation that mixes devices raises. A dispatch mode sees every operation below autograd and
counts:

- launches: operations on the device that are neither a view nor an allocation. A kernel of torch is
  at least one.
- copies: from the host to the device.
- waits: the host needs a value of the device (`.item()`, a copy to the host, a shape that depends
  on data).

Autograd's engine wants a real CUDA context. So its backward pass gives zeros here and is not
counted: a network with a written-out gradient is counted whole, every other one without its
backward pass.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fedml_noniid

DEVICE = torch.device("cuda")
# Operations that only reserve memory.
ALLOCATIONS = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
PACKAGE = f"{Path(fedml_noniid.__file__).parent}/"


class Counts(NamedTuple):
    """What some work costs."""

    launches: int
    copies: int
    waits: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(self, other, strict=True)))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it in part
    """Counts operations, and answers those whose result depends on data, which a fake tensor does
    not have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.launched: Counter[str] = Counter()  # by operation
        self.copied: Counter[str] = Counter()  # by line of our code
        self.waited: Counter[str] = Counter()  # by line of our code

    @property
    def counts(self) -> Counts:
        """All so far."""
        return Counts(*(counter.total() for counter in (self.launched, self.copied, self.waited)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        subject = (
            args[0][0]
            if args and isinstance(args[0], list) and args[0]
            else args[0]
            if args
            else None
        )
        on_device = isinstance(subject, Tensor) and subject.device.type == "cuda"
        is_masked = name == "aten::index" and getattr(args[1][0], "dtype", None) == torch.bool
        stand_in = STAND_INS.get("aten::masked_select" if is_masked else name)
        if stand_in is not None:
            if on_device:
                self.waited[_line()] += 1
            return stand_in(*args, **kwargs)
        if func.namespace == "aten" and func._can_decompose():
            with self:  # in inference mode, torch leaves this to the operation's kernel
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if on_device and result is None:  # an operation on lists, in place
            self.launched[name] += 1
        if not isinstance(first, Tensor):
            return result
        if on_device and first.device.type == "cpu":
            self.waited[_line()] += 1
        elif first.device.type == "cuda":
            tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
            is_copy = name in ("aten::_to_copy", "aten::copy_") and any(
                leaf.device.type == "cpu" for leaf in tensors
            )
            is_view = any(
                returned.alias_info is not None and not returned.alias_info.is_write
                for returned in func._schema.returns
            )
            if is_copy:
                self.copied[_line()] += 1
            elif not is_view and name not in ALLOCATIONS:
                self.launched[name] += 1
        return result


def _item(value: Tensor) -> float | int | bool:
    if value.dtype == torch.bool:
        return True
    return 1.0 if value.is_floating_point() else 1


def _list(values: Tensor) -> Any:
    """One wait, where the stand-in for a value would be one per value."""
    values.cpu()
    # On a device, counts; on the host, positions, such as those of clients. None is twice.
    if values.dtype == torch.int64:
        return (int(values.is_cuda) + np.arange(values.numel())).reshape(values.shape).tolist()
    return np.full(values.shape, _item(values)).tolist()


def _numpy(value: Tensor) -> Any:
    """Zeros, for a tensor on the host; one on a device has no `numpy`."""
    if value.device.type != "cpu":
        raise TypeError(f"can't convert {value.device} tensor to numpy")
    return np.zeros(value.shape, str(value.dtype).removeprefix("torch."))


def _bincount(value: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return value.new_zeros(
        max(minlength, 1), dtype=torch.int64 if weights is None else torch.float64
    )


STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _item,
    "aten::bincount": _bincount,
    "aten::equal": lambda *_: True,
    "aten::nonzero": lambda value: value.new_zeros((value.numel(), value.dim()), dtype=torch.int64),
    "aten::masked_select": lambda value, mask: value.reshape(-1),
}


def _line() -> str:
    """The line of our code that runs, as `engines/record.py:70`."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    if not ours:
        return "elsewhere"
    return f"{ours[-1].filename.removeprefix(PACKAGE).removeprefix('plugins/')}:{ours[-1].lineno}"


def _zeros(outputs: Any, inputs: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(leaf) for leaf in inputs)


@contextmanager
def fake_gpu() -> Iterator[Watch]:
    """Inside, tensors on `DEVICE` are fake, and the Watch counts."""
    watch = Watch()
    # Autograd's engine counts the devices in its first pass, and starts a thread for each. After
    # this pass it has none: its threads would stay, and no process forked later could use autograd.
    scalar = torch.ones((), requires_grad=True)
    torch.autograd.grad(scalar, scalar)
    with (
        patch.object(torch.autograd, "grad", _zeros),
        patch("torch._functorch.eager_transforms._autograd_grad", _zeros),
        patch.object(torch.Tensor, "pin_memory", lambda self, *_: self),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(FakeTensor, "tolist", _list),
        patch.object(FakeTensor, "numpy", _numpy),
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True),
        watch,
    ):
        # Addresses of fake tensors are all 0. Our code only asks whether two are the same, and then
        # copies.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield watch
