"""LEAF's JSON files (Caldas et al. 2018, arXiv:1812.01097): samples by user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from fedml_noniid.core.errors import UserError

PAGE = "https://github.com/TalwalkarLab/leaf/tree/master/data"
COMMAND = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"


class _Samples(BaseModel):
    x: list[Any]
    y: list[Any]


class _File(BaseModel):
    """The content of one file; it may have more keys."""

    users: list[str]
    user_data: dict[str, _Samples]


class User(NamedTuple):
    """One user's samples as one of LEAF's files has them."""

    source: str  # how an error begins: the file and the user
    name: str
    x: list[Any]
    y: list[Any]  # as long as x, not empty


def part_folders(folder: Path) -> tuple[Path, Path]:
    """train and test of one of LEAF's data sets.

    If one is missing, a UserError says how to make it.
    """
    for part in ("train", "test"):
        if not _files(folder / part):
            raise UserError(
                f"{folder / part}: holds no *.json; make them with LEAF's {COMMAND} "
                f"({PAGE}/{folder.name}) and put its data/train and data/test into {folder}"
            )
    return folder / "train", folder / "test"


def users(folder: Path) -> Iterator[User]:
    """The users of all *.json of a folder, one file in memory at a time.

    UserError for files that aren't LEAF's.
    """
    first: dict[str, Path] = {}  # file of each user
    for file in _files(folder):
        content = _content(file)
        if apart := sorted(content.user_data.keys() ^ set(content.users)):
            raise UserError(f"{file}: user {apart[0]!r}: is in one of users and user_data only")
        for name in content.users:
            source = f"{file}: user {name!r}"
            if name in first:
                raise UserError(
                    f"{source}: is twice in {folder}, first in {first[name].name}; allowed: once"
                )
            first[name] = file
            x, y = content.user_data[name].x, content.user_data[name].y
            if not len(x) == len(y) > 0:
                raise UserError(f"{source}: has {len(x)} samples x and {len(y)} labels y")
            yield User(source, name, x, y)
    if not first:
        raise UserError(f"{folder}: its *.json hold no user")


def _files(folder: Path) -> list[Path]:
    # Files whose names begin with a dot are other programs' notes.
    return sorted(file for file in folder.glob("*.json") if not file.name.startswith("."))


def _content(file: Path) -> _File:
    try:
        return _File.model_validate(json.loads(file.read_bytes()), strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise UserError(
            f"{file}: isn't one of LEAF's files ({key}: {wrong['msg']}); needed: users, user_data"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file}: isn't JSON, or was cut off ({error}); make it again with LEAF's {COMMAND}"
        ) from None
