"""CIFAR-10 and CIFAR-100: pickled files from a folder, an archive or the network; or CIFAR-10 as
images."""

from __future__ import annotations

import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers.download import archive
from fedml_noniid.data.readers.images import image_parts

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar10(root: Path) -> Raw:
    """CIFAR-10: 50,000 training and 10,000 test images, RGB, 32x32, values 0 to 255, 10 classes.

    The files are read from <root>/cifar-10-batches-py or, without that folder, from the archive
    <root>/cifar-10-python.tar.gz. Without both, a folder of images <root>/cifar10 (train/<class>/*,
    test/<class>/*) is read; the notes say so, since the images may be compressed copies. Without
    all three, the archive is downloaded. Raises UserError for a failed download, and for a file
    that is missing or isn't the original.
    """
    # Imported here, since it takes seconds and other data sets don't need it.
    import torchvision

    kind, copies = torchvision.datasets.CIFAR10, root / "cifar10"
    if (
        copies.is_dir()
        and not (root / kind.base_folder).is_dir()
        and not (root / kind.filename).is_file()
    ):
        return _images(copies)
    return _read(root, kind)


def cifar100(root: Path) -> Raw:
    """CIFAR-100: as CIFAR-10, but 100 classes (the fine labels), cifar-100-python and
    cifar-100-python.tar.gz."""
    import torchvision

    return _read(root, torchvision.datasets.CIFAR100)


def _images(folder: Path) -> Raw:
    """CIFAR-10 from a folder of images."""
    (train, test), names, notes = image_parts([folder / "train", folder / "test"])
    raw = Raw(*train, *test, names)
    if list(raw.classes) != CLASSES or raw.train_x.shape[1:] != (3, 32, 32):
        size = "x".join(map(str, raw.train_x.shape[1:]))
        raise UserError(
            f"{folder}: holds {size} images of {', '.join(raw.classes)}; CIFAR-10 has 3x32x32 "
            f"of {', '.join(CLASSES)}"
        )
    origin = f"CIFAR-10 from the images in {folder.name}, not from its original files"
    return replace(raw, notes=[origin, *notes])


def _read(root: Path, kind: Any) -> Raw:
    """The data set of torchvision's class `kind`."""

    names = ", ".join(name for name, _ in _files(kind))
    needed = (
        f"put {names} into {root / kind.base_folder}, or, without that folder, {kind.filename} "
        f"into {root} ({PAGE} has it)"
    )
    folder = root / kind.base_folder
    if folder.is_dir():
        from torchvision.datasets.utils import check_integrity

        for name, md5 in _files(kind):
            if not (folder / name).is_file():
                raise UserError(f"{folder / name}: there is no such file; {needed}")
            if not check_integrity(folder / name, md5):
                raise UserError(f"{folder / name}: damaged (its MD5 isn't {md5}); {needed}")
        return _raw(root, kind)
    packed = archive(root / kind.filename, kind.url, kind.tgz_md5, needed)
    # In a temporary folder, because `root` may be read-only.
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(packed) as tar:
            tar.extractall(temporary, filter="data")
        return _raw(Path(temporary), kind)


def _files(kind: Any) -> list[tuple[str, str]]:
    """(name, MD5) of each file."""
    return [
        *map(tuple, (*kind.train_list, *kind.test_list)),
        (kind.meta["filename"], kind.meta["md5"]),
    ]


def _raw(root: Path, kind: Any) -> Raw:
    # Unpickling a file can run any program. Torchvision compares the file's MD5 first.
    train, test = (kind(root, train=part) for part in (True, False))
    train_x, test_x = (  # [n, h, w, 3] -> [n, 3, h, w]
        torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test)
    )
    train_y, test_y = torch.tensor(train.targets), torch.tensor(test.targets)
    return Raw(train_x, train_y, test_x, test_y, train.classes)
