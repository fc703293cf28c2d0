"""LEAF's JSON files (Caldas et al. 2018, arXiv:1812.01097), and FEMNIST, which comes in them."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugins.core.errors import UserError
from plugins.data.checks import refusal, whole_number
from plugins.data.dataset import Raw
from plugins.data.types import Ints

PAGE = "https://github.com/TalwalkarLab/leaf/tree/master/data"
COMMAND = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
KEYS = ("users", "num_samples", "user_data")

Samples = dict[str, tuple[NDArray[np.uint8], Ints]]  # user -> (x [n, 784], y [n])


class User(NamedTuple):
    """One user's samples in one of LEAF's files, as they are there."""

    where: str  # how an error begins: the file and the user
    name: str
    x: list[Any]
    y: list[Any]  # as long as x, not empty


def femnist(root: Path) -> Raw:
    """LEAF's FEMNIST: digits and letters of NIST SD 19 by writer, grey, 28x28, black on white, values 0 to 255.

    <root>/femnist/train/*.json and test/*.json are what LEAF's preprocess.sh leaves in data/train and data/test. Its
    pixels are bytes divided by 255 and become these bytes again. As in LEAF (data_to_json.py) the background is white,
    255, and not 0 as in MNIST and EMNIST; classes are digits, upper case, lower case. LEAF holds the first image of
    nearly every writer twice (group_by_writer.py), so that a split by sample can put it into both parts; it is kept.

    Samples are sorted by the names of their users, however they lie in files; the owners are the numbers of these names
    in sorted order, over both parts. Raises UserError for missing or damaged files.
    """
    train, test = (_images(folder) for folder in part_folders(root / "femnist"))
    number = {name: i for i, name in enumerate(sorted({*train, *test}))}
    train_x, train_y, train_owner = _stacked(train, number)
    test_x, test_y, test_owner = _stacked(test, number)
    classes = string.digits + string.ascii_uppercase + string.ascii_lowercase
    return Raw(train_x, train_y, test_x, test_y, list(classes), train_owner=train_owner, test_owner=test_owner)


def part_folders(folder: Path) -> tuple[Path, Path]:
    """train and test of one of LEAF's data sets. UserError, which says how to make them, if they aren't there."""
    for part in ("train", "test"):
        if not _files(folder / part):
            if _files(folder / "all_data"):
                step = f"{folder / 'all_data'} isn't split; split it with LEAF's {COMMAND} (in data/{folder.name})"
            else:
                step = f"make them with LEAF's {COMMAND} ({PAGE}/{folder.name})"
            raise UserError(
                f"{folder / part}: holds no *.json; {step} and put its data/train and data/test into {folder}"
            )
    return folder / "train", folder / "test"


def users(folder: Path) -> Iterator[User]:
    """The users of all *.json of a folder, one file in memory at a time. UserError for anything that isn't LEAF's."""
    seen: dict[str, Path] = {}
    for file in _files(folder):
        names, counts, data = _content(file)
        for name, count in zip(names, counts, strict=True):
            where = f"{file}: user {name!r}"
            if name in seen:
                raise UserError(f"{where}: is twice in {folder}, first in {seen[name].name}; allowed: once")
            seen[name] = file
            samples = data.get(name)
            if not isinstance(samples, dict) or not all(isinstance(samples.get(key), list) for key in ("x", "y")):
                raise UserError(f"{where}: has no lists x and y in user_data")
            x, y = samples["x"], samples["y"]
            if not len(x) == len(y) == whole_number(f"{where}: num_samples", count, 1):
                raise UserError(f"{where}: num_samples is {count}, but x has {len(x)} samples and y has {len(y)}")
            yield User(where, name, x, y)
        unlisted = sorted(data.keys() - set(names))
        if unlisted:
            raise UserError(f"{file}: user {unlisted[0]!r}: is in user_data but not in users")
    if not seen:
        raise UserError(f"{folder}: its *.json hold no user")


def _files(folder: Path) -> list[Path]:
    # Files whose names begin with a dot are other programs' notes.
    return sorted(file for file in folder.glob("*.json") if not file.name.startswith("."))


def _content(file: Path) -> tuple[list[str], list[Any], dict[str, Any]]:
    """The values of KEYS of one file."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: isn't JSON, or was cut off ({error}); make it again with LEAF's {COMMAND}") from None
    missing = [key for key in KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(f"{file}: isn't one of LEAF's files, it lacks {', '.join(missing)}; needed: {', '.join(KEYS)}")
    names, counts, data = (content[key] for key in KEYS)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refusal(f"{file}: users", names, "a list of names")
    if not isinstance(counts, list) or len(counts) != len(names):
        raise refusal(f"{file}: num_samples", counts, f"a list of {len(names)} numbers, one for each of users")
    if not isinstance(data, dict):
        raise refusal(f"{file}: user_data", data, "an object with x and y of each of users")
    return names, counts, data


def _images(folder: Path) -> Samples:
    """The samples of one part of FEMNIST by user."""
    found = {}
    for user in users(folder):
        y = [whole_number(f"{user.where}: y[{i}]", label, 0, 61) for i, label in enumerate(user.y)]
        found[user.name] = _pixels(user), np.array(y, dtype=np.int64)
    return found


def _pixels(user: User) -> NDArray[np.uint8]:
    """A user's images [n, 784] as bytes. UserError for what isn't a byte divided by 255."""
    for i, image in enumerate(user.x):
        if not isinstance(image, list) or len(image) != 784:
            raise refusal(f"{user.where}: x[{i}]", image, "a list of 784 numbers (28x28 pixels)")
    try:
        x = np.array(user.x)
    except ValueError:  # a list among the numbers
        x = np.array(None)
    if x.dtype.kind not in "fiu" or x.ndim != 2:
        raise UserError(f"{user.where}: x holds something that isn't a number from 0 to 1")
    with np.errstate(invalid="ignore", over="ignore"):
        whole = np.rint(x * 255.0)
        # Written so that NaN doesn't fit.
        fits = (x >= 0) & (x <= 1) & (np.abs(x - whole / 255) <= 1e-6)
    if not fits.all():
        i, j = np.argwhere(~fits)[0].tolist()
        raise refusal(f"{user.where}: x[{i}][{j}]", x[i, j].item(), "0 to 1 in steps of 1/255")
    pixels: NDArray[np.uint8] = whole.astype(np.uint8)
    return pixels


def _stacked(part: Samples, number: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, 1, 28, 28], y [n] and owner [n] of a part, by the users' names."""
    names = sorted(part)
    x = np.concatenate([part[name][0] for name in names]).reshape(-1, 1, 28, 28)
    y = np.concatenate([part[name][1] for name in names])
    owner = np.repeat([number[name] for name in names], [len(part[name][1]) for name in names])
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(owner.astype(np.int64))
