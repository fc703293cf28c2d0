"""All readers in one walk: whole files give the same data twice; damaged, missing and foreign files
are refused by name, and never run."""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.datasets import DATASETS, load
from tests.data import small
from tests.data.reading import refuse
from tests.files import contents


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return file.getvalue()


def header(text: bytes) -> bytes:
    """An archive with an array whose header is wrong."""
    return npz(x_npy=b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


@dataclass(frozen=True)
class Case:
    """How a small data set is written, and further contents that its files must not have."""

    make: Callable[[Path, pytest.MonkeyPatch], object]
    options: dict[str, Any] = field(default_factory=dict)
    bad: tuple[bytes, ...] = ()
    more: bool = False  # whether a byte more at the end is a damage
    half: bool = True  # whether half a file is a damage
    needed: str | None = ""  # in the names of the files that have to be there; None: no file has


SHAPE = b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"9" * 15 + b",)}"
ARRAYS = (
    npy(np.ones(3)),
    npz(x=b"text", y_npy=npy(np.arange(6))),
    header(b"(" * 60),
    header(SHAPE),
)
TABLE = {"label": "y", "test_share": 0.5}
CASES = {
    "mnist": Case(small.mnist, bad=(b"\0\0\x08\x01\0\0\0\0",), more=True),
    "mnist packed": Case(small.packed_mnist),
    "emnist": Case(small.emnist, more=True),
    "emnist packed": Case(small.packed_emnist, more=True),
    "cifar10": Case(small.cifar, more=True),
    "cifar100": Case(lambda root, patch: small.cifar(root, patch, "cifar100"), more=True),
    "cifar10 packed": Case(small.packed_cifar, more=True),
    "cinic10": Case(small.cinic, needed=None),
    "image_folder": Case(small.images, needed=None),
    "femnist": Case(small.femnist, bad=(b"[]", b"\xff\xfe\x00", b"[" * 100_000), more=True),
    "sent140": Case(small.tweets, {"users": 1}),
    "arrays": Case(small.arrays, bad=ARRAYS, needed="train"),
    "table": Case(small.table, {"file": "a.csv", "drop": ["said"], **TABLE}, half=False),
    "table packed": Case(small.table, {"file": "a.csv.gz", "drop": ["said"], **TABLE}),
    "text": Case(small.table, {"file": "a.csv", "text": "said", **TABLE}, half=False),
}
FILELESS = {"digits", "made_tweets"}


def test_every_reader_is_in_the_walk() -> None:
    assert {name.split()[0] for name in CASES} | FILELESS == set(DATASETS)


class Bomb:
    """What writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def of_each_kind(root: Path, case: Case) -> list[Path]:
    """The files that are damaged: all, of images one of each part."""
    chosen = case.options.get("file")
    files = (
        [root / chosen] if chosen else sorted(file for file in root.rglob("*") if file.is_file())
    )
    parts = {file.relative_to(root).parts[-3]: file for file in files if file.suffix == ".png"}
    return [file for part, file in parts.items() if part != "valid"] or files


@pytest.mark.parametrize("name", CASES)
def test_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, root, mark = CASES[name], tmp_path / "root", tmp_path / "ran"
    case.make(root, monkeypatch)

    def read() -> str:
        return load(name.split()[0], root, **case.options).checksum

    before = contents(root)
    expected = read()
    bomb = pickle.dumps(Bomb(mark))
    for file in of_each_kind(root, case):
        good = file.read_bytes()
        bad = [b"", b"<html>not found</html>", bomb, *case.bad]
        bad += [good[: len(good) // 2]] * case.half + [good + b"\0"] * case.more
        for content in bad:
            file.write_bytes(content)
            with refuse(file):
                read()
        # A few bytes that flipped may be harmless, and are never more than a UserError.
        for at in range(0, len(good), max(1, len(good) // 12)):
            file.write_bytes(good[:at] + bytes(b ^ 255 for b in good[at : at + 9]) + good[at + 9 :])
            with contextlib.suppress(UserError):
                read()
        file.unlink()
        if case.needed is not None and case.needed in file.name:
            with refuse(root):
                read()
        file.write_bytes(good)
    assert not mark.exists()
    assert read() == expected and contents(root) == before, "a read-only folder will do"
    pickle.loads(bomb)
    assert mark.exists(), "it works"
