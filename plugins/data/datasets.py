"""Data sets as tensors: scikit-learn's digits, MNIST, a folder of images; and one file to keep any of them in."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from plugins.core.errors import UserError
from plugins.data.checks import known, options_of
from plugins.data.files import write_whole
from plugins.data.images import read_images
from plugins.data.mnist import read_mnist

TENSORS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, as read; `x_normalised = (x.float() - mean) / std`."""

    name: str
    train_x: Tensor  # [n, channels, h, w] uint8 or float32, raw
    train_y: Tensor  # [n] int64
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of the training images, in raw units
    std: tuple[float, ...]  # as mean; 1 for a channel that is constant
    checksum: str  # SHA-256 over the tensors' bytes and the fields above, in hexadecimal

    def normalised(self, part: Literal["train", "test"], device: torch.device | str = "cpu") -> Tensor:
        """The images of one part, normalised, on `device`. [n, channels, h, w] float32"""
        raw = {"train": self.train_x, "test": self.test_x}[part]
        # The raw bytes travel: a quarter of the floats.
        x = raw.to(device).to(torch.float32, copy=True)
        mean, std = (torch.tensor(v, dtype=torch.float32, device=device).view(-1, 1, 1) for v in (self.mean, self.std))
        return x.sub_(mean).div_(std)


def digits(root: Path) -> Dataset:
    """scikit-learn's bundled digits: 1797 grey images of 8x8, values 0 to 16; `root` isn't used.

    Split 1437 to 360, stratified by class, once and for all: the test set doesn't depend on an experiment's seed.
    """
    # Imported here, since it takes seconds and only the prepare stage needs it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    x = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(bunch.target.astype(np.int64))
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=bunch.target, random_state=0)
    train, test = np.sort(train), np.sort(test)
    return _dataset("digits", (x[train], y[train], x[test], y[test]), [str(c) for c in range(10)])


def mnist(root: Path) -> Dataset:
    """MNIST: 60,000 training and 10,000 test images, grey, 28x28, values 0 to 255.

    The four files are used where they lie in <root>/MNIST/raw, unpacked or as .gz; what isn't there is downloaded
    into that folder. Raises UserError for a failed download and for a damaged file.
    """
    return _dataset("mnist", read_mnist(root), [str(c) for c in range(10)])


def image_folder(root: Path, *, size: Sequence[int] | None = None) -> Dataset:
    """Images in <root>/train/<class>/ and <root>/test/<class>/, 8 bits, grey or RGB; grey ones become RGB if mixed.

    All have one size, or are scaled to `size` = [h, w] (bilinear, antialiased). Classes are the names of the folders
    in alphabetical order, the images of a class are in the order of their file names. Files whose names begin with a
    dot are passed over. Raises UserError for anything else that isn't an image, and for classes that differ.
    """
    tensors, classes = read_images(root, size)
    return _dataset("image_folder", tensors, classes)


DATASETS: dict[str, Callable[..., Dataset]] = {"digits": digits, "mnist": mnist, "image_folder": image_folder}


def load(name: str, root: Path, **options: object) -> Dataset:
    """Data set `name`, from files under `root`. UserError for an unknown name or option, and for bad files."""
    loader = DATASETS[known("data set", name, DATASETS)]
    options_of(loader, f"data set {name}", options)
    try:
        return loader(Path(root), **options)
    except OSError as error:
        raise UserError(f"{error.filename or root}: can't be read ({error.strerror or error})") from None


def save(dataset: Dataset, path: Path) -> None:
    """Writes a data set into one safetensors file, whole or not at all; see `read`."""
    header = {"name": dataset.name, "classes": dataset.classes, "mean": dataset.mean, "std": dataset.std}
    metadata = {"dataset": json.dumps(header), "checksum": dataset.checksum}
    tensors = {key: getattr(dataset, key).contiguous() for key in TENSORS}
    write_whole(Path(path), safetensors.torch.save(tensors, metadata))


def read(path: Path) -> Dataset:
    """The data set that `save` wrote. UserError if the file is missing, damaged, or not what was written."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; the prepare stage writes it")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            train_x, train_y, test_x, test_y = tensors = [file.get_tensor(key) for key in TENSORS]
        header = json.loads(metadata["dataset"])
        name, expected = str(header["name"]), metadata["checksum"]
        classes, mean, std = (tuple(header[key]) for key in ("classes", "mean", "std"))
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: damaged, or not a saved data set ({reason}); delete it and prepare it again"
        ) from None
    if _checksum(tensors, name, classes, mean, std) != expected:
        raise UserError(f"{path}: damaged (its content doesn't match its checksum); delete it and prepare it again")
    return Dataset(name, train_x, train_y, test_x, test_y, classes, mean, std, expected)


def _dataset(name: str, tensors: Sequence[Tensor], classes: Sequence[str]) -> Dataset:
    train_x, train_y, test_x, test_y = tensors
    mean, std = _moments(train_x)
    checksum = _checksum(tensors, name, tuple(classes), mean, std)
    return Dataset(name, train_x, train_y, test_x, test_y, tuple(classes), mean, std, checksum)


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images [n, channels, h, w]; 1 in place of a deviation of 0.

    Sums of whole numbers, so the result doesn't depend on the machine.
    """
    total, squares = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for chunk in torch.split(x, max(1, 2**24 // x[0].numel())):
        wide = chunk.to(torch.int32)
        total += wide.sum((0, 2, 3))
        squares += wide.square_().sum((0, 2, 3))
    n = x.numel() // x.shape[1]
    sums = list(zip(total.tolist(), squares.tolist(), strict=True))
    return tuple(s / n for s, _ in sums), tuple(math.sqrt(n * q - s * s) / n or 1.0 for s, q in sums)


def _checksum(
    tensors: Sequence[Tensor], name: str, classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> str:
    digest = hashlib.sha256(json.dumps([name, classes, mean, std]).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
