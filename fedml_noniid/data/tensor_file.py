"""Tensors with a head of plain values in one safetensors file, under a checksum over both."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole


class Checksummed(Protocol):
    """What such a file holds, in memory."""

    @property
    def checksum(self) -> str: ...


Content = TypeVar("Content", bound=Checksummed)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A head and tensors on the CPU, and nothing more."""

    head: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def checksum(self) -> str:
        return checksum(self.head, dict(sorted(self.tensors.items())))


def checksum(head: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the head and the tensors' names, types, shapes and bytes, hexadecimal."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for key, tensor in tensors.items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()


def write(
    path: Path,
    kind: str,
    head: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    checksum: str,
    private: bool = False,
) -> None:
    """Writes the file, whole or not at all; its metadata name head and checksum by `kind`.

    Raises UserError.
    """
    # safetensors refuses tensors that share memory. The later ones are copied, and only they: the
    # memories of hundreds of clients are gigabytes.
    apart: dict[str, Tensor] = {}
    memories: set[int] = set()
    for key, tensor in tensors.items():
        whole = tensor.contiguous()
        memory = whole.untyped_storage().data_ptr()
        apart[key] = whole.clone() if memory in memories else whole
        memories.add(memory)
    # One key: safetensors writes several in any order, and the same content has to give the same
    # bytes.
    metadata = {kind: json.dumps({"head": head, "checksum": checksum})}

    def save(name: str) -> None:
        try:
            save_file(apart, name, metadata)
        except SafetensorError as error:  # how it reports a full disk
            number = re.search(r"os error (\d+)", str(error))
            raise (
                OSError(int(number[1]), os.strerror(int(number[1])))
                if number
                else OSError(str(error))
            ) from None

    write_whole(path, save, private)


def read(
    path: Path,
    kind: str,
    made: Callable[[Any, dict[str, Tensor]], Content],
    what: str,
    origin: str,
    remedy: str,
) -> Content:
    """`made(head, tensors)` of a file that `write` wrote.

    Raises UserError if the file is missing or damaged. The message says `what` the file should be,
    its `origin` if it is missing, and the `remedy` if it is damaged.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; {origin}")
    try:
        with safe_open(path, "pt") as file:
            stored = json.loads((file.metadata() or {})[kind])
            tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
        content, expected = made(stored["head"], tensors), stored["checksum"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        if error.args == (kind,):  # the file is whole, and of another kind
            raise UserError(f"{path}: is not {what}; {origin or remedy}") from None
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: damaged, or not {what} ({reason}); {remedy}") from None
    if content.checksum != expected:
        raise UserError(f"{path}: damaged (its content doesn't match its checksum); {remedy}")
    return content
