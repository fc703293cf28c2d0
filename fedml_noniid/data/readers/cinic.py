"""CINIC-10, from a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers.cifar import CLASSES
from fedml_noniid.data.readers.images import class_folders, image_parts

PAGE = "https://datashare.ed.ac.uk/handle/10283/3192"
ARCHIVE = "CINIC-10.tar.gz"


def cinic10(root: Path, *, valid: Literal["unused", "train"] = "unused") -> Raw:
    """CINIC-10 (Darlow et al.

    2018, arXiv:1810.03505): 90,000 images each to train, validate and test, RGB, 32x32.

    They are read from <root>/cinic-10 (or CINIC-10): train/<class>/*.png, valid/<class>/*.png and
    test/<class>/*.png. Grey images become RGB. `valid`: whether its samples are added behind those
    of train, or not read. A shorter set in the same folders is fine. Raises UserError for missing
    folders, other classes and other images.
    """
    folder = next(
        (path for name in ("cinic-10", "CINIC-10") if (path := root / name).is_dir()),
        root / "cinic-10",
    )
    folders = [
        folder / part for part in ("train", "test", *(["valid"] if valid == "train" else []))
    ]
    for part in folders:
        if not part.is_dir():
            raise UserError(
                f"{part}: there is no such folder; download {ARCHIVE} from {PAGE} and unpack it "
                f"into {folder}"
            )
        classes = [entry.name for entry in class_folders(part)]
        odd = [f"lacks {name}" for name in CLASSES if name not in classes]
        odd += [f"also has {name}" for name in classes if name not in CLASSES]
        if odd:
            raise UserError(
                f"{part}: {', '.join(odd[:5])}; it has to hold the classes {', '.join(CLASSES)}"
            )
    parts, names, notes = image_parts(folders)
    height, width = parts[0][0].shape[2:]
    if (height, width) != (32, 32):
        raise UserError(
            f"{folder}: its images are {height}x{width} (height x width); CINIC-10's are 32x32"
        )
    train, test, *more = [(x.expand(-1, 3, -1, -1).contiguous(), y) for x, y in parts]
    train_x, train_y = (torch.cat(tensors) for tensors in zip(train, *more, strict=True))
    return Raw(train_x, train_y, *test, names, notes=notes)
