"""MNIST's file format: grey images of 28x28, and their labels, unpacked or as .gz."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plugins.data.readers.download import Complaint

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"  # how the files' names end


def found(folder: Path, name: str) -> Path | None:
    """Where file `name` of `folder` lies, unpacked or as .gz."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def content(path: Path, error: Complaint) -> bytes:
    """What a file of images or of labels holds, unpacked. Raises `error` unless it is whole."""
    unpacked = path.read_bytes()
    if path.suffix == ".gz":
        try:
            unpacked = gzip.decompress(unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise error(path, "damaged or truncated") from None
    images = IMAGES in path.name
    samples = int.from_bytes(unpacked[4:8], "big")
    begin = b"\0\0\x08" + (b"\x03" if images else b"\x01") + unpacked[4:8]
    begin += (28).to_bytes(4, "big") * 2 if images else b""
    size = len(begin) + samples * (784 if images else 1)
    if samples == 0 or not unpacked.startswith(begin) or len(unpacked) != size:
        raise error(path, "damaged or truncated")
    return unpacked


def samples(images: bytes, labels: bytes, allowed: range, path: Path, error: Complaint) -> tuple[Tensor, Tensor]:
    """x [n, 1, 28, 28] uint8 and y [n] int64 of the contents of two files; `path` is the one of the labels.

    Raises `error` for another number of labels than images, and for labels outside `allowed`.
    """
    x = torch.from_numpy(np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28).copy())
    y = torch.from_numpy(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))
    if len(x) != len(y):
        raise error(path, "has another number of samples than the images")
    if int(y.min()) not in allowed or int(y.max()) not in allowed:
        raise error(path, f"damaged (has labels outside {allowed[0]} to {allowed[-1]})")
    return x, y
