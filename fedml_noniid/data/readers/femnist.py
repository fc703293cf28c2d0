"""FEMNIST: digits and letters by writer, as LEAF makes it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data.checks import refusal, whole_number
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers import leaf
from fedml_noniid.data.types import Ints

Samples = dict[str, tuple[NDArray[np.uint8], Ints]]  # user -> (x [n, 784], y [n])


def femnist(root: Path) -> Raw:
    """LEAF's FEMNIST: digits and letters of NIST SD 19 by writer, grey, 28x28, black on white,
    values 0 to 255.

    LEAF's preprocess.sh writes data/train and data/test, which go to <root>/femnist/train/*.json
    and test/*.json. Its pixels are bytes divided by 255; here they are bytes again. As in LEAF
    (data_to_json.py) the background is white, 255, and not 0 as in MNIST and EMNIST. Classes are
    digits, upper case, lower case. LEAF has the first image of nearly every writer twice
    (group_by_writer.py). So a split by sample can put it into both parts; both are kept.

    Samples are sorted by the names of their users, whatever file they are in. Owners are the
    numbers of these names in sorted order, over both parts. Raises UserError for missing or damaged
    files.
    """
    train, test = (_images(folder) for folder in leaf.part_folders(root / "femnist"))
    number = {name: i for i, name in enumerate(sorted({*train, *test}))}
    train_x, train_y, train_owner = _stacked(train, number)
    test_x, test_y, test_owner = _stacked(test, number)
    classes = string.digits + string.ascii_uppercase + string.ascii_lowercase
    return Raw(
        train_x,
        train_y,
        test_x,
        test_y,
        list(classes),
        train_owner=train_owner,
        test_owner=test_owner,
    )


def _images(folder: Path) -> Samples:
    """The samples of one part of FEMNIST by user."""
    by_writer = {}
    for user in leaf.users(folder):
        with located(source=user.source):
            y = [whole_number(f"y[{i}]", label, 0, 61) for i, label in enumerate(user.y)]
            by_writer[user.name] = _pixels(user.x), np.array(y, dtype=np.int64)
    return by_writer


def _pixels(images: list[Any]) -> NDArray[np.uint8]:
    """A user's images [n, 784] as bytes. UserError for a value that isn't a byte divided by 255."""
    try:
        x = np.array(images)
    except ValueError:  # images of unlike length, a list among the numbers
        x = np.array(None)
    if x.dtype.kind not in "fiu" or x.shape != (len(images), 784):
        raise UserError("x isn't a list of images, each a list of 784 numbers from 0 to 1")
    with np.errstate(invalid="ignore", over="ignore"):
        whole = np.rint(x * 255.0)
        # In this form, NaN doesn't fit.
        fits = (x >= 0) & (x <= 1) & (np.abs(x - whole / 255) <= 1e-6)
    if not fits.all():
        i, j = np.argwhere(~fits)[0].tolist()
        raise refusal(f"x[{i}][{j}]", x[i, j].item(), "0 to 1 in steps of 1/255")
    pixels: NDArray[np.uint8] = whole.astype(np.uint8)
    return pixels


def _stacked(part: Samples, number: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, 1, 28, 28], y [n] and owner [n] of a part, by the users' names."""
    names = sorted(part)
    x = np.concatenate([part[name][0] for name in names]).reshape(-1, 1, 28, 28)
    y = np.concatenate([part[name][1] for name in names])
    owner = np.repeat([number[name] for name in names], [len(part[name][1]) for name in names])
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(owner.astype(np.int64))
