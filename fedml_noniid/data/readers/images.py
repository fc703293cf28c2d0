"""A folder of images as tensors."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Range
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.user_files import entries, train_and_test

Side = Annotated[int, Range(1, 1024)]  # pixels
Size = tuple[Side, Side]  # height, width
PIECE = 32  # images that a thread decodes at a time


# Of each folder x [n, 1 or 3, h, w] uint8 and y [n] int64; the classes; notes.
Images = tuple[list[tuple[Tensor, Tensor]], list[str], list[str]]


def image_folder(
    root: Path, *, size: Size | None = None, test_share: user_data.Share | None = None
) -> Raw:
    """Images in <root>/train/<class>/ and <root>/test/<class>/, 8 bits, grey or RGB; if mixed, grey
    ones become RGB.

    All have one size, or are scaled to `size` = [h, w] (bilinear, antialiased). Classes are the
    names of the folders in alphabetical order; the images of a class are in the order of their file
    names. Files without the ending of an image format (Thumbs.db, notes.txt) are ignored, as are
    names that begin with a dot; a note counts them. An image with a channel for transparency is
    taken if it is opaque everywhere. Without <root>/test, the share `test_share` (0.2) of the
    images is the test set, see `user_data.cut`. Raises UserError for files that can't be read as
    images of that kind, and if train and test have different classes.
    """
    folders = [part for part in train_and_test(root) if part.name == "train" or part.exists()]
    parts, names, notes = image_parts(folders, size and (size[0], size[1]))
    sources = [str(folder) for folder in folders]
    rows = user_data.rows_of(names, [y.numpy() for _, y in parts], None, test_share, sources)
    return rows.raw([x for x, _ in parts], 255, notes)


def image_parts(folders: Sequence[Path], shape: tuple[int, int] | None = None) -> Images:
    """The images of each of `folders`, which hold one folder per class, see `image_folder`."""
    names = [folder.name for folder in class_folders(folders[0])]
    for part in folders[1:]:
        if odd := sorted(set(names) ^ {folder.name for folder in class_folders(part)}):
            raise UserError(
                f"{part.parent}: {folders[0].name} and {part.name} have to hold the same classes; "
                f"only one of them has {', '.join(odd[:5])}"
            )
    files: list[Path] = []
    labels: list[list[int]] = []
    ignored = [path for part in folders for path in entries(part, True) if not path.is_dir()]
    for part in folders:
        labels.append([])
        for label, folder in enumerate(class_folders(part)):
            ignored += entries(folder, True)
            images = entries(folder)
            if not images:
                raise UserError(f"{folder}: holds no image; every class needs some in each part")
            files += images
            labels[-1] += [label] * len(images)
    x = _pixels(files, shape)
    notes = []
    if ignored:
        kinds = user_data.listed(sorted({path.name for path in ignored}))
        notes.append(f"files that are no images, ignored: {len(ignored)} ({kinds})")
    xs = torch.split(x, [len(part) for part in labels])
    parts = [(x, torch.tensor(y)) for x, y in zip(xs, labels, strict=True)]
    return parts, names, notes


def _pixels(files: Sequence[Path], shape: tuple[int, int] | None) -> Tensor:
    """The images [n, 1 or 3, h, w] uint8 of files, with a progress bar on a terminal.

    UserError if one has another size than those before it.
    """
    from rich.console import Console
    from rich.progress import track

    console, x, is_grey = Console(stderr=True), np.empty(0, np.uint8), True
    # Pillow decodes and scales without the interpreter's lock.
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        pieces = [files[i : i + PIECE] for i in range(0, len(files), PIECE)]
        images = chain.from_iterable(
            pool.map(lambda piece: [_image(file, shape) for file in piece], pieces)
        )
        bar = track(images, "images", len(files), console=console, disable=not console.is_terminal)
        for i, image in enumerate(bar):
            height, width = image.shape[:2]
            x = x if i else np.empty((len(files), 3, height, width), np.uint8)
            if (height, width) != x.shape[2:]:
                raise UserError(
                    f"{files[i]}: is {height}x{width}, the images before it are {x.shape[2]}x"
                    f"{x.shape[3]} (height x width); make them alike or set the option size: [h, w]"
                )
            is_grey &= image.ndim == 2
            x[i] = np.moveaxis(np.atleast_3d(image), 2, 0)
    finally:
        pool.shutdown(cancel_futures=True)
    return torch.from_numpy(x[:, :1].copy() if is_grey else x)


def resized(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """Images [n, 1 or 3, h, w] uint8 scaled to `shape` = (h, w), bilinear with antialiasing as
    torchvision's Resize.

    Raises UserError for other samples.
    """
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.dtype is not torch.uint8:
        form = f"{x.dtype} of {'x'.join(map(str, x.shape[1:]))}".removeprefix("torch.")
        allowed = f"none, as the samples are no 8-bit images but {form}"
        raise UserError(path=("size",), value=[*shape], allowed=allowed)
    if tuple(x.shape[2:]) == shape:
        return x
    channels = x.flatten(0, 1).numpy()  # [n * channels, h, w]
    scaled = [
        np.asarray(Image.fromarray(channel).resize(shape[::-1], Image.Resampling.BILINEAR))
        for channel in channels
    ]
    return torch.from_numpy(np.stack(scaled)).reshape(*x.shape[:2], *shape)


def class_folders(part: Path) -> list[Path]:
    """The folders of the classes, in alphabetical order. UserError if there are less than 2."""
    if not part.is_dir():
        raise UserError(
            f"{part}: there is no such folder; an image folder is train/<class>/* and "
            "test/<class>/*"
        )
    folders = entries(part)
    for entry in folders:
        if not entry.is_dir():
            raise UserError(
                f"{entry}: isn't in the folder of a class; needed: {part}/<class>/{entry.name}"
            )
    if len(folders) < 2:
        raise UserError(f"{part}: holds {len(folders)} class folders; at least 2 are needed")
    return folders


def _image(file: Path, shape: tuple[int, int] | None) -> NDArray[np.uint8]:
    """One image, scaled to `shape` = (h, w) if given: [h, w] if grey, [h, w, 3] if coloured."""
    try:
        content = io.BytesIO(file.read_bytes())  # a quarter faster than by name
        likely = Image.registered_extensions()[file.suffix.lower()]
        with Image.open(content, formats=[likely, *Image.ID]) as opened:
            if (n := getattr(opened, "n_frames", 1)) > 1:
                raise UserError(f"{file}: has {n} pictures; allowed: one")
            ImageOps.exif_transpose(opened, in_place=True)  # as it was seen when it was taken
            image = _opaque(file, opened)
            if shape is not None and image.size != shape[::-1]:
                image = image.resize(shape[::-1], Image.Resampling.BILINEAR)
            return np.asarray(image)
    except UserError:
        raise
    # PIL raises these for damaged files of its many formats.
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        reason = (
            "unknown format"
            if isinstance(error, UnidentifiedImageError)
            else " ".join(str(getattr(error, "strerror", None) or error).split())
        )
        raise UserError(
            f"{file}: can't be read as an image ({reason}); repair or remove it"
        ) from None


def _opaque(file: Path, opened: Image.Image) -> Image.Image:
    """The image in mode L or RGB.

    UserError if that changes what is seen: transparency, CMYK, more than 8 bits.
    """
    mode = opened.mode
    if mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
        raise UserError(f"{file}: has the colour mode {mode}; allowed: grey (8 bits) or RGB")
    if opened.has_transparency_data:
        with_alpha = opened.convert("RGBA")
        if with_alpha.getchannel("A").getextrema() != (255, 255):
            raise UserError(
                f"{file}: has the colour mode {mode} with transparent pixels; allowed: grey (8 "
                "bits) or RGB, without "
                "transparency"
            )
        return with_alpha.convert("L" if mode in ("L", "LA") else "RGB")
    wanted = "L" if mode in ("1", "L") else "RGB"
    return opened if mode == wanted else opened.convert(wanted)
