"""LEAF's JSON files (Caldas et al. 2018, arXiv:1812.01097): samples by user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import refusal, whole_number

PAGE = "https://github.com/TalwalkarLab/leaf/tree/master/data"
COMMAND = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
KEYS = ("users", "num_samples", "user_data")


class User(NamedTuple):
    """One user's samples as one of LEAF's files has them."""

    where: str  # how an error begins: the file and the user
    name: str
    x: list[Any]
    y: list[Any]  # as long as x, not empty


def part_folders(folder: Path) -> tuple[Path, Path]:
    """train and test of one of LEAF's data sets.

    If one is missing, a UserError says how to make it.
    """
    for part in ("train", "test"):
        if not _files(folder / part):
            if _files(folder / "all_data"):
                step = (
                    f"{folder / 'all_data'} isn't split; split it with LEAF's {COMMAND} (in "
                    f"data/{folder.name})"
                )
            else:
                step = f"make them with LEAF's {COMMAND} ({PAGE}/{folder.name})"
            raise UserError(
                f"{folder / part}: holds no *.json; {step} and put its data/train and data/test "
                f"into {folder}"
            )
    return folder / "train", folder / "test"


def users(folder: Path) -> Iterator[User]:
    """The users of all *.json of a folder, one file in memory at a time.

    UserError for files that aren't LEAF's.
    """
    seen: dict[str, Path] = {}
    for file in _files(folder):
        names, counts, data = _content(file)
        for name, count in zip(names, counts, strict=True):
            where = f"{file}: user {name!r}"
            if name in seen:
                raise UserError(
                    f"{where}: is twice in {folder}, first in {seen[name].name}; allowed: once"
                )
            seen[name] = file
            samples = data.get(name)
            if not isinstance(samples, dict) or not all(
                isinstance(samples.get(key), list) for key in ("x", "y")
            ):
                raise UserError(f"{where}: has no lists x and y in user_data")
            x, y = samples["x"], samples["y"]
            if not len(x) == len(y) == whole_number(f"{where}: num_samples", count, 1):
                raise UserError(
                    f"{where}: num_samples is {count}, but x has {len(x)} samples and y has "
                    f"{len(y)}"
                )
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
        raise UserError(
            f"{file}: isn't JSON, or was cut off ({error}); make it again with LEAF's {COMMAND}"
        ) from None
    missing = [key for key in KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise UserError(
            f"{file}: isn't one of LEAF's files, it lacks {', '.join(missing)}; needed: "
            f"{', '.join(KEYS)}"
        )
    names, counts, data = (content[key] for key in KEYS)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refusal(f"{file}: users", names, "a list of names")
    if not isinstance(counts, list) or len(counts) != len(names):
        raise refusal(
            f"{file}: num_samples", counts, f"a list of {len(names)} numbers, one for each of users"
        )
    if not isinstance(data, dict):
        raise refusal(f"{file}: user_data", data, "an object with x and y of each of users")
    return names, counts, data
