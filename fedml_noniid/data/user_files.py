"""A user's own files, by data set: which of them a reader reads. Nothing here imports torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fedml_noniid.core.errors import UserError
from fedml_noniid.own_code import is_own, texts_of

WIDTH = 300  # of a word's vector
GLOVE = f"glove.6B.{WIDTH}d.txt"
LEFTOVERS = ("thumbs.db", "desktop.ini", "__macosx")


def user_files(name: str, root: Path, options: Mapping[str, object]) -> dict[str, Path]:
    """The user's own files that `datasets.load` would read with these checked options, by their
    names relative to `root`.

    Empty for the data sets that are downloaded. UserError for folders that can't be read.
    """
    try:
        files_of = partial(_of_options, name) if is_own(name) else OF_USER.get(name, _none)
        paths = files_of(Path(root), options)
        return {os.path.relpath(path, root): path for path in paths if path.is_file()}
    except OSError as error:
        raise unreadable(root, error) from None


def unreadable(root: Path, error: OSError) -> UserError:
    """The error for a folder or file that can't be read."""
    return UserError(f"{error.filename or root}: can't be read ({error.strerror or error})")


def _none(root: Path, options: Mapping[str, object]) -> list[Path]:
    return []


def _of_options(name: str, root: Path, options: Mapping[str, object]) -> list[Path]:
    """What the options of a user's own reader name, in lists too: files, and all files of
    folders."""
    paths = []
    for text in texts_of(name, {"root": "", **options}):  # it is given
        path = root / text
        paths += sorted(path.rglob("*")) if path.is_dir() else [path]
    return paths


def _of_table(root: Path, options: Mapping[str, object]) -> list[Path]:
    return [
        root / str(options[key]) for key in ("file", "test_file") if options.get(key) is not None
    ]


def _of_images(root: Path, _: Mapping[str, object]) -> list[Path]:
    folders = [
        folder
        for part in train_and_test(root)
        if part.is_dir()
        for folder in entries(part)
        if folder.is_dir()
    ]
    return [file for folder in folders for file in entries(folder)]


def train_and_test(root: Path) -> tuple[Path, Path]:
    """The folders of the training set and of the test set of images."""
    return root / "train", root / "test"


def entries(folder: Path, stray: bool = False) -> list[Path]:
    """What a folder of images holds, sorted by name: folders and files with the ending of an image
    format, or all else."""
    endings, paths = _endings(), sorted(folder.iterdir(), key=lambda entry: entry.name)
    is_stray = [
        entry.name.startswith(".")
        or entry.name.lower() in LEFTOVERS
        or (entry.suffix.lower() not in endings and not entry.is_dir())
        for entry in paths
    ]
    return [entry for entry, other in zip(paths, is_stray, strict=True) if other == stray]


@functools.cache
def _endings() -> frozenset[str]:
    """The endings of the formats that PIL reads, in lower case."""
    from PIL import Image

    return frozenset(
        ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN
    )


# Data sets of a user's own files -> (root, options) -> the files that the reader reads if they are
# there.
OF_USER: dict[str, Callable[[Path, Mapping[str, object]], list[Path]]] = {
    "table": _of_table,
    "text": lambda root, options: [*_of_table(root, options), root / GLOVE],
    "image_folder": _of_images,
    "arrays": lambda root, _: [root / "train.npz", root / "test.npz"],
}
