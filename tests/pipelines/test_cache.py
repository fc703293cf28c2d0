"""The store of finished work: made once, restored where it was damaged, and never taken for
something else."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import cache
from tests.files import contents

FINGERPRINT, OTHER = "a" * 64, "b" * 64
FILES = {"rounds.csv": b"round\n1\n", "model.safetensors": b"weights"}
MADE = {cache.MADE: b'{"seconds": [1.5]}'}


def made() -> cache.Files:
    return FILES


def never() -> cache.Files:
    raise AssertionError("it is there")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an item, settled."""
    folder = tmp_path / "runs" / "item"
    assert cache.get_or_create(folder, tmp_path, FINGERPRINT, lambda: FILES | MADE)
    return folder


def test_what_is_made_is_in_the_folder_and_in_the_store(folder: Path, tmp_path: Path) -> None:
    """How it was made is in the store alone, since that differs from run to run."""
    found = contents(folder)
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in FILES.items()}
    assert json.loads(found.pop(cache.RECEIPT)) == {"fingerprint": FINGERPRINT, "files": hashes}
    assert found == FILES
    stored = contents(tmp_path / cache.STORE / FINGERPRINT[:16])
    assert stored == FILES | MADE | {cache.RECEIPT: (folder / cache.RECEIPT).read_bytes()}
    assert cache.made(tmp_path, FINGERPRINT) == {"seconds": [1.5]}
    assert cache.made(tmp_path, OTHER) == cache.made(tmp_path, "") == {}
    (cache.folder_of(tmp_path, FINGERPRINT) / cache.MADE).write_bytes(b"\xff{")
    assert cache.made(tmp_path, FINGERPRINT) == {}


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize("damage", [Path.unlink, append])
@pytest.mark.parametrize("name", [*FILES, cache.RECEIPT])
def test_a_damaged_folder_comes_back_from_the_store_and_the_store_from_the_folder(
    folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    whole, stored = contents(folder), tmp_path / cache.STORE / FINGERPRINT[:16]
    if (name, damage) == (cache.RECEIPT, Path.unlink):
        (folder / name).unlink()
        with pytest.raises(UserError, match="runs/item: not written by noniid"):
            cache.get_or_create(folder, tmp_path, FINGERPRINT, never)  # it may be the user's
        return
    same = name == cache.RECEIPT and damage is append  # another end of its line says the same
    for place in (folder, stored):
        damage(place / name)
        assert cache.is_whole(place, FINGERPRINT) == same
        assert not cache.get_or_create(folder, tmp_path, FINGERPRINT, never)
        assert same or contents(folder) == whole
        assert cache.is_whole(folder, FINGERPRINT) and cache.is_whole(stored, FINGERPRINT)


def test_a_folder_that_dvc_brought_fills_the_store(folder: Path, tmp_path: Path) -> None:
    """After `dvc pull` there is no store yet."""
    shutil.rmtree(tmp_path / cache.STORE)
    assert not cache.get_or_create(folder, tmp_path, FINGERPRINT, never)
    shutil.rmtree(folder)
    assert not cache.get_or_create(folder, tmp_path, FINGERPRINT, never)
    assert cache.made(tmp_path, FINGERPRINT) == {}, "how it was made is known where it was made"


def test_what_is_of_other_settings_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    """TensorBoard's default folder is runs/ too."""
    for name in ("a", "b"):
        cache.get_or_create(tmp_path / "runs" / name, tmp_path, FINGERPRINT, made)
    (tmp_path / "runs" / "events.out.tfevents.1").write_text("loss")
    (tmp_path / "runs" / "Nov23_host").mkdir()
    (tmp_path / "runs" / ".b.x7.unfinished").mkdir()  # of a killed process
    cache.keep_only(tmp_path / "runs", ["a", "d"])
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "a",
        "events.out.tfevents.1",
        "Nov23_host",
    }


def test_a_file_that_was_changed_is_named(folder: Path, tmp_path: Path) -> None:
    """Without a whole copy the files are made again; an error leaves the folder as it was."""
    cache.check(folder)
    append(tmp_path / cache.STORE / FINGERPRINT[:16] / "model.safetensors")
    (folder / "rounds.csv").write_text("{}")
    with pytest.raises(UserError, match=r"item/rounds\.csv: is missing or was changed"):
        cache.check(folder)
    with pytest.raises(AssertionError, match="it is there"):
        cache.get_or_create(folder, tmp_path, FINGERPRINT, never)
    assert (folder / "rounds.csv").read_text() == "{}"
    assert cache.get_or_create(folder, tmp_path, FINGERPRINT, made)
    assert cache.is_whole(folder, FINGERPRINT)
    for text in (b"", b"[]", b'{"fingerprint": 3}', b"\xff"):
        (folder / cache.RECEIPT).write_bytes(text)
        with pytest.raises(UserError, match=r"item/receipt\.json: can't be read"):
            cache.check(folder)


@pytest.mark.parametrize("name", [*cache.OF_ITEMS, *cache.WHOLE])
def test_what_is_not_ours_is_refused_by_name_and_stays(tmp_path: Path, name: str) -> None:
    """DVC removes what lies in plan/ and report/ unless dvc.lock names them."""
    (tmp_path / name / "logs").mkdir(parents=True)
    (tmp_path / name / ".gitkeep").touch()
    if name in cache.OF_ITEMS:
        cache.get_or_create(tmp_path / name / "item", tmp_path, FINGERPRINT, made)
        cache.refuse_foreign(tmp_path, name)  # an empty folder loses nothing
    (tmp_path / name / "logs" / "events").write_text("loss")
    (tmp_path / name / "thesis.tex").write_text("")
    words = rf"/{name}/logs and 1 more: not written by noniid, .*; move or delete it"
    with pytest.raises(UserError, match=words):
        cache.refuse_foreign(tmp_path)
    with pytest.raises(UserError, match=f"{name}/logs: not written by noniid"):
        cache.get_or_create(tmp_path / name / "logs", tmp_path, FINGERPRINT, never)
    assert contents(tmp_path / name / "logs") == {"events": b"loss"}
    (tmp_path / "dvc.lock").write_text(f"stages:\n  x:\n    outs:\n    - path: {name}\n")
    if name in cache.WHOLE:
        cache.refuse_foreign(tmp_path)
