"""Tensors with a head of plain values in one safetensors file, under a checksum over both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import safetensors
import safetensors.torch
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole


class Sealed(Protocol):
    """What such a file holds, in memory."""

    @property
    def checksum(self) -> str: ...


Content = TypeVar("Content", bound=Sealed)


def checksum(head: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the head and the tensors' names, types, shapes and bytes, hexadecimal."""
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for key, tensor in tensors.items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()


def write(
    path: Path, kind: str, head: Mapping[str, object], tensors: Mapping[str, Tensor], checksum: str,
    private: bool = False,
) -> None:  # fmt: skip
    """Writes the file, whole or not at all; its metadata name head and checksum by `kind`."""
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    # One key: safetensors writes several in any order, and the same content has to give the same bytes.
    metadata = {kind: json.dumps({"head": head, "checksum": checksum})}
    write_whole(path, safetensors.torch.save(whole, metadata), private)


def read(
    path: Path, kind: str, made: Callable[[Any, dict[str, Tensor]], Content], what: str, origin: str, remedy: str
) -> Content:
    """`made(head, tensors)` of a file that `write` wrote.

    Raises UserError if the file is missing or damaged. The message says `what` the file should be, its `origin` if it
    is missing, and the `remedy` if it is damaged.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; {origin}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            sealed = json.loads(file.metadata()[kind])
            tensors = {key: file.get_tensor(key) for key in sorted(file.keys())}
        found, expected = made(sealed["head"], tensors), sealed["checksum"]
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: damaged, or not {what} ({reason}); {remedy}") from None
    if found.checksum != expected:
        raise UserError(f"{path}: damaged (its content doesn't match its checksum); {remedy}")
    return found
