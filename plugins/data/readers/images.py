"""A folder of images as tensors."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import refusal, whole_number
from fedml_noniid.plugins.data.dataset import Raw


def image_folder(root: Path, *, size: Sequence[int] | None = None) -> Raw:
    """Images in <root>/train/<class>/ and <root>/test/<class>/, 8 bits, grey or RGB; if mixed, grey ones become RGB.

    All have one size, or are scaled to `size` = [h, w] (bilinear, antialiased). Classes are the names of the folders
    in alphabetical order; the images of a class are in the order of their file names. Names that begin with a dot are
    skipped. Raises UserError for any other file that isn't an image, and if train and test have different classes.
    """
    (train, test), names = image_parts([root / "train", root / "test"], image_size(size))
    return Raw(*train, *test, names)


def image_parts(
    folders: Sequence[Path], shape: tuple[int, int] | None = None
) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
    """(x, y) of each of `folders`, and the classes. `folders` hold one folder per class, see `image_folder`."""
    names = [folder.name for folder in class_folders(folders[0])]
    for part in folders[1:]:
        odd = sorted(set(names) ^ {folder.name for folder in class_folders(part)})
        if odd:
            raise UserError(
                f"{part.parent}: {folders[0].name} and {part.name} have to hold the same classes; "
                f"only one of them has {', '.join(odd[:5])}"
            )
    images: list[NDArray[np.uint8]] = []
    parts, labels = [], []
    for part in folders:
        begin = len(images)
        for label, folder in enumerate(class_folders(part)):
            files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
            if not files:
                raise UserError(f"{folder}: holds no image; every class needs some in each part")
            for file in files:
                images.append(_image(file, shape))
                own, first = (f"{image.shape[0]}x{image.shape[1]}" for image in (images[-1], images[0]))
                if own != first:
                    raise UserError(
                        f"{file}: is {own}, the images before it are {first} (height x width); make them alike or set "
                        "the option size: [h, w]"
                    )
            labels += [label] * len(files)
        parts.append(slice(begin, len(images)))
    channels = max(image.ndim for image in images)
    if channels == 3:
        images = [image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2) for image in images]
    x = torch.from_numpy(np.stack(images))  # [n, h, w] or [n, h, w, 3]
    x = x.unsqueeze(1) if channels == 2 else x.permute(0, 3, 1, 2).contiguous()
    y = torch.tensor(labels)
    return [(x[part], y[part]) for part in parts], names


def resized(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Images [n, 1 or 3, h, w] uint8 scaled to `shape` = (h, w), bilinear with antialiasing as torchvision's Resize.

    Raises UserError for other samples.
    """
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.dtype is not torch.uint8:
        found = f"{x.dtype} of {'x'.join(map(str, x.shape[1:]))}".removeprefix("torch.")
        raise UserError(f"size={list(shape)} is refused; allowed: none, as the samples are no 8-bit images but {found}")
    if tuple(x.shape[2:]) == shape:
        return x
    channels = x.flatten(0, 1).numpy()  # [n * channels, h, w]
    scaled = [np.asarray(Image.fromarray(one).resize(shape[::-1], Image.Resampling.BILINEAR)) for one in channels]
    return torch.from_numpy(np.stack(scaled)).reshape(*x.shape[:2], *shape)


def image_size(size: object) -> tuple[int, int] | None:
    """Option `size` as (h, w). UserError for anything but two whole numbers or None."""
    if size is None:
        return None
    if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
        raise refusal("size", size, "[height, width] in pixels")
    return whole_number("size: height", size[0], 1, 1024), whole_number("size: width", size[1], 1, 1024)


def class_folders(part: Path) -> list[Path]:
    """The folders of the classes, in alphabetical order. UserError if `part` has other files or less than 2 classes."""
    if not part.is_dir():
        raise UserError(f"{part}: there is no such folder; an image folder is train/<class>/* and test/<class>/*")
    entries = sorted(entry for entry in part.iterdir() if not entry.name.startswith("."))
    for entry in entries:
        if not entry.is_dir():
            raise UserError(f"{entry}: isn't a folder; {part} may hold one folder per class and nothing else")
    if len(entries) < 2:
        raise UserError(f"{part}: holds {len(entries)} class folders; at least 2 are needed")
    return entries


def _image(file: Path, shape: tuple[int, int] | None) -> NDArray[np.uint8]:
    """One image, scaled to `shape` = (h, w) if given: [h, w] if grey, [h, w, 3] if coloured."""
    try:
        with Image.open(io.BytesIO(file.read_bytes())) as opened:  # a quarter faster than by name
            mode = opened.mode
            if mode not in ("1", "L", "P", "RGB"):
                raise UserError(
                    f"{file}: has the colour mode {mode}; allowed: grey (8 bits) or RGB, without transparency"
                )
            image = opened.convert("L" if mode in ("1", "L") else "RGB") if mode in ("1", "P") else opened
            if shape is not None and image.size != shape[::-1]:
                image = image.resize(shape[::-1], Image.Resampling.BILINEAR)
            return np.asarray(image)
    except UserError:
        raise
    # PIL raises these for damaged files of its many formats.
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "unknown format" if unknown else " ".join(str(error).split())
        raise UserError(f"{file}: can't be read as an image ({reason}); repair or remove it") from None
