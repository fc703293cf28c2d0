"""MNIST's file format: grey images of 28x28, and their labels, unpacked or as .gz."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError

Check = Callable[[Path, bytes], None]  # of a file's unpacked content; raises for what it refuses
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"  # how the files' names end


def path_of(folder: Path, name: str) -> Path | None:
    """The path of file `name` in `folder`, unpacked or as .gz; None if it isn't there."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def parts(
    folder: Path,
    names: Sequence[str],
    allowed: range,
    needed: str,
    check: Check = lambda path, content: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """train x and y, test x and y of the four files `names`; x is [n, 1, 28, 28] uint8, y [n]
    int64.

    UserError for damaged files, for another number of labels than images, and for labels outside
    `allowed`; it says what is `needed`.
    """
    train_x, train_y, test_x, test_y = (path_of(folder, name) or folder / name for name in names)
    return *_part(train_x, train_y, allowed, needed, check), *_part(
        test_x, test_y, allowed, needed, check
    )


def _part(
    images: Path, labels: Path, allowed: range, needed: str, check: Check
) -> tuple[Tensor, Tensor]:
    pixels = np.frombuffer(_content(images, needed, check), np.uint8, offset=16)
    answers = np.frombuffer(_content(labels, needed, check), np.uint8, offset=8)
    x, y = (
        torch.from_numpy(pixels.reshape(-1, 1, 28, 28).copy()),
        torch.from_numpy(answers.astype(np.int64)),
    )
    if len(x) != len(y):
        raise UserError(f"{labels}: has another number of samples than the images; {needed}")
    if int(y.min()) not in allowed or int(y.max()) not in allowed:
        outside = f"{allowed[0]} to {allowed[-1]}"
        raise UserError(f"{labels}: damaged (has labels outside {outside}); {needed}")
    return x, y


def _content(path: Path, needed: str, check: Check) -> bytes:
    """The content of a file of images or of labels, unpacked. UserError unless it is whole."""
    unpacked = path.read_bytes()
    if path.suffix == ".gz":
        try:
            unpacked = gzip.decompress(unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise UserError(f"{path}: damaged or truncated; {needed}") from None
    images = IMAGES in path.name
    samples = int.from_bytes(unpacked[4:8], "big")
    begin = b"\0\0\x08" + (b"\x03" if images else b"\x01") + unpacked[4:8]
    begin += (28).to_bytes(4, "big") * 2 if images else b""
    size = len(begin) + samples * (784 if images else 1)
    if samples == 0 or not unpacked.startswith(begin) or len(unpacked) != size:
        raise UserError(f"{path}: damaged or truncated; {needed}")
    check(path, unpacked)
    return unpacked
