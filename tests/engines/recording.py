"""A stand-in for CUDA graphs on a CPU: it records a step's operations, and replays them on the same
memory.

As with a graph, recording computes nothing that lasts, a replay runs no Python of ours, and it
reads and writes the memory of the recorded step. What has to see a value cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that hand a value to Python, or whose result has a shape that depends on data.
SEEING = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::equal",
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it in part
    """Notes each operation, and what memory held before it was first written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.made: set[int] = set()  # memory of the recording itself
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in SEEING:
            raise RuntimeError(f"{func._schema.name} while a step is recorded")
        with self:  # in inference mode, torch leaves this to the operation's kernel
            parts = func.decompose(*args, **kwargs) if func.namespace == "aten" else NotImplemented
        if parts is not NotImplemented:
            return parts
        given = dict(zip((of.name for of in func._schema.arguments), args, strict=False)) | kwargs
        for of in func._schema.arguments:
            if of.alias_info is not None and of.alias_info.is_write:
                written = given.get(of.name)
                for leaf in written if isinstance(written, tuple | list) else [written]:
                    self._keep(leaf)
        found = func(*args, **kwargs)
        out = _tensors(found)
        aliases = [of.alias_info is not None for of in func._schema.returns]
        if not any(aliases):
            self.made.update(leaf.untyped_storage().data_ptr() for leaf in out)
        self.done.append((func, args, kwargs, [] if any(aliases) else out))
        return found

    def _keep(self, leaf: Tensor) -> None:
        storage = leaf.untyped_storage()
        if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]  # torch lacks it
            self.before[storage.data_ptr()] = whole, whole.clone()


def _tensors(found: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in (found if isinstance(found, tuple | list) else [found])
        if isinstance(leaf, Tensor)
    ]


class HostGraphs:
    """Records and replays on a CPU."""

    def __init__(self) -> None:
        self.recorded, self.replays = 0, 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        recorder = Recorder()
        with recorder:
            work()
        with (
            torch.inference_mode()
        ):  # some steps are recorded in it, and what they made may be written in it only
            for whole, before in recorder.before.values():
                whole.copy_(before)
        self.recorded += 1

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, out in recorder.done:
                new = _tensors(func(*args, **kwargs))
                for old, leaf in zip(out, new[: len(out)], strict=True):
                    old.copy_(leaf)

        return replay
