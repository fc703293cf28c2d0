"""A message on the network: a JSON head, then a safetensors file in chunks.

Sizes are checked before memory is taken.

Nothing here makes objects of a type that the sender chooses: a head has the keys and types that the
reader names, a table has tensors, and tensors have one of the dtypes below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params

CHUNK_BYTES = 1 << 20  # bytes of tensors in one frame
MAX_FRAME_BYTES = (
    2 << 20
)  # bytes of the largest frame; gRPC refuses a longer one by its length, before it arrives
MAX_HEAD_BYTES = 1 << 16  # bytes of a head
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RefusedError(UserError):
    """A message that is not taken.

    `name` is one word for counts and tests; the message says why.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why[:1000])  # a name in a table may have megabytes
        self.name = name


class Leaf(NamedTuple):
    """A tensor in a table."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    start: int  # bytes from the end of the table
    stop: int


def form(leaf: Leaf | Tensor) -> str:
    """Dtype and shape in words."""
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def head(values: Mapping[str, object]) -> bytes:
    """A head as its frame."""
    return json.dumps(values).encode()


def parsed(frame: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A head with exactly these keys, of exactly these types. Raises RefusedError."""
    found = _json(frame, MAX_HEAD_BYTES, "head")
    if type(found) is not dict or found.keys() != kinds.keys():
        raise RefusedError("malformed", f"head must have the keys {', '.join(kinds)} and no other")
    for key, kind in kinds.items():
        if type(found[key]) is not kind:
            raise RefusedError(
                "malformed",
                f"head's {key!r} is a {type(found[key]).__name__}; expected {kind.__name__}",
            )
    return found


class Body:
    """Named tensors as frames: the table (safetensors' own header), then the data."""

    def __init__(self, tensors: Params) -> None:
        """Contiguous tensors on the CPU are sent from where they lie."""
        entries: dict[str, Any] = {}
        strides, place = {}, 0
        # Large numbers first, so that all are aligned in the file.
        for key in sorted(tensors, key=lambda key: -tensors[key].element_size()):
            leaf = tensors[key]
            n = math.prod(leaf.shape) * leaf.element_size()
            entries[key] = {
                "dtype": NAMES[leaf.dtype],
                "shape": list(leaf.shape),
                "data_offsets": [place, place + n],
            }
            place += n
            if leaf.stride() != _row_major(leaf.shape) and _dense(tuple(leaf.shape), leaf.stride()):
                strides[key] = list(leaf.stride())
        # Memory order decides how matrix products round, so strides travel too. Names keep the
        # order of the tree.
        table: dict[str, Any] = {key: entries[key] for key in tensors}
        if strides:
            table = {"__metadata__": {"strides": json.dumps(strides)}, **table}
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        self.table = len(text).to_bytes(8, "little") + text
        self.size = place
        self._leaves = [tensors[key] for key in entries]

    def frames(self) -> Iterator[bytes]:
        """The table, then the data."""
        yield self.table
        for leaf in self._leaves:
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                yield bytes(data[start : start + CHUNK_BYTES])


def table(frame: bytes, limit: int = MAX_FRAME_BYTES) -> dict[str, Leaf]:
    """The tensors that a body announces, in the sender's order. Raises RefusedError."""
    if len(frame) < 8 or int.from_bytes(frame[:8], "little") != len(frame) - 8:
        raise RefusedError(
            "malformed", f"table of {len(frame)} bytes doesn't begin with its own length"
        )
    found = _json(frame[8:], limit, "table")
    if type(found) is not dict:
        raise RefusedError("malformed", "table is no JSON object")
    extra = found.pop("__metadata__", {})
    try:
        strides = json.loads(extra["strides"]) if extra else {}
        leaves = {key: _leaf(entry, strides.pop(key, None)) for key, entry in found.items()}
        if strides:
            raise ValueError  # of a tensor that is not there
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise RefusedError("malformed", "table is not that of a safetensors file") from None
    place = 0
    for leaf in sorted(leaves.values(), key=lambda leaf: (leaf.start, leaf.stop)):
        if (
            leaf.start != place
            or leaf.stop - leaf.start != math.prod(leaf.shape) * leaf.dtype.itemsize
        ):
            raise RefusedError(
                "malformed", "table has holes, overlaps, or sizes that don't match the shapes"
            )
        place = leaf.stop
    return leaves


def check_size(leaves: Mapping[str, Leaf], limit: int) -> None:
    """Raises RefusedError if a table announces more than `limit` bytes."""
    size = max((leaf.stop for leaf in leaves.values()), default=0)
    if size > limit:
        raise RefusedError("oversize", f"message of {size} bytes; allowed: {limit}")


def following(frames: Iterator[bytes]) -> bytes:
    """The next frame. Raises RefusedError if there is none."""
    frame = next(frames, None)
    if frame is None:
        raise RefusedError("truncated", "message ended too early")
    return frame


def read(frames: Iterator[bytes], leaves: Mapping[str, Leaf]) -> Params:
    """The tensors, from the frames behind the table.

    Raises RefusedError if there are more bytes or fewer.
    """
    size = max((leaf.stop for leaf in leaves.values()), default=0)
    data, place = bytearray(size), 0
    for frame in frames:
        if place + len(frame) > size:
            raise RefusedError(
                "oversize", f"message has more than the {size} bytes that its table announces"
            )
        data[place : place + len(frame)] = frame
        place += len(frame)
    if place < size:
        raise RefusedError("truncated", f"message ended after {place} of {size} bytes")
    return {key: _tensor(data, leaf) for key, leaf in leaves.items()}


def _tensor(data: bytearray, leaf: Leaf) -> Tensor:
    """A copy of its own: matrix products round differently at addresses that are not aligned."""
    own = torch.empty(leaf.shape, dtype=leaf.dtype)
    if leaf.strides is not None:
        own = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype)
    n = math.prod(leaf.shape)
    return (
        own.copy_(
            torch.frombuffer(data, dtype=leaf.dtype, count=n, offset=leaf.start).view(leaf.shape)
        )
        if n
        else own
    )


def _leaf(entry: Any, strides: Any) -> Leaf:
    """An entry of a table. KeyError, TypeError or ValueError if it is none."""
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    numbers = (start, stop, *shape, *(strides or ()))
    if (
        entry.keys() != {"dtype", "shape", "data_offsets"}
        or len(shape) > 16
        or {*map(type, numbers)} != {int}
    ):
        raise ValueError
    if (
        min(numbers) < 0
        or max(numbers) >= 1 << 48
        or (strides is not None and not _dense(shape, tuple(strides)))
    ):
        raise ValueError
    if math.prod(max(n, 1) for n in shape) >= 1 << 48:
        raise ValueError  # torch fails on [0, 2^47, 2^47] too
    return Leaf(
        DTYPES[entry["dtype"]], shape, None if strides is None else tuple(strides), start, stop
    )


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these strides place every element of a tensor once, without holes."""
    if len(shape) != len(strides) or math.prod(shape) == 0:
        return False
    expected = 1
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    # The stride of an axis of length 1 places nothing, but torch looks at it when it chooses a
    # layout.
    return all(stride <= expected for stride in strides)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _json(frame: bytes, limit: int, what: str) -> Any:
    if len(frame) > limit:
        raise RefusedError("oversize", f"{what} of {len(frame)} bytes; allowed: {limit}")
    try:
        return json.loads(
            frame.decode()
        )  # UTF-8 only: from bytes, json would guess among five encodings
    except (ValueError, RecursionError):
        raise RefusedError("malformed", f"{what} is not JSON") from None
