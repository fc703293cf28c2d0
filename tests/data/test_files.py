"""Files on the disk: whole or not at all, readable as the umask says, and never through a symbolic
link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import append, opened, replace_folder, write_whole


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def replaced(path: str) -> None:
    """Writes as safetensors does: another file under that name."""
    Path(path).unlink()
    Path(path).write_text("x")


@pytest.mark.parametrize("content", ["x", replaced])
def test_the_umask_decides(
    tmp_path: Path, umask: int, content: str | Callable[[str], None]
) -> None:
    write_whole(tmp_path / "a" / "open", content)
    write_whole(tmp_path / "private", content, private=True)
    append(tmp_path / "grown", 0, b"x")
    replace_folder(tmp_path / "folder", {"file": b"x"})
    for name in ("a/open", "grown", "folder/file"):
        assert mode(tmp_path / name) == 0o666 & ~umask
    assert mode(tmp_path / "a") == mode(tmp_path / "folder") == 0o777 & ~umask
    assert mode(tmp_path / "private") == 0o600


def test_a_rename_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before the rename, the folder after it."""
    done: list[tuple[str, int]] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given: object, name: str = name, real: Callable[..., object] = real) -> object:
            kind = stat.S_IFMT(os.fstat(given[0]).st_mode) if isinstance(given[0], int) else 0
            done.append((name, kind))
            return real(*given)

        monkeypatch.setattr(os, name, noted)
    write_whole(tmp_path / "file", "x")
    assert done == [("fsync", stat.S_IFREG), ("replace", 0), ("fsync", stat.S_IFDIR)]
    done.clear()
    replace_folder(tmp_path / "folder", {"a": b"1", "b": b"2"})
    files, folder = ("fsync", stat.S_IFREG), ("fsync", stat.S_IFDIR)
    assert done == [files, files, folder, ("replace", 0), folder]


def test_no_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    for name in ("file", "grown", "folder"):
        (tmp_path / name).symlink_to(tmp_path / "secret")
    write_whole(tmp_path / "file", "x")
    with pytest.raises(
        UserError, match=r"grown: can't be written .*; a symbolic link is in its place; remove it"
    ):
        append(tmp_path / "grown", 0, b"x")
    with pytest.raises(OSError, match="symbolic links"):
        opened(tmp_path / "grown", "w")
    assert (tmp_path / "secret").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "x" and not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space on that disk"), (errno.EROFS, "choose a folder that is writable")],
)
def test_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """The old content stays, and nothing is left beside it."""
    write_whole(tmp_path / "file", "old")
    replace_folder(tmp_path / "folder", {"a": b"old"})
    append(tmp_path / "grown", 0, b"old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    for write in (
        lambda: write_whole(tmp_path / "file", "new"),
        lambda: write_whole(tmp_path / "file", replaced),
        lambda: replace_folder(tmp_path / "folder", {"a": b"new"}),
        lambda: append(tmp_path / "grown", 3, b"new"),
    ):
        with pytest.raises(
            UserError, match=rf"can't be written \({os.strerror(number)}\); {remedy}"
        ):
            write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "grown"]
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "a").read_text() == "old"


def test_a_file_grows_from_where_its_reader_left_it(tmp_path: Path) -> None:
    """What a killed process wrote behind that place is cut off."""
    path = tmp_path / "grown"
    for at, content in ((0, b"one"), (3, b" lost, and more"), (3, b" two")):
        append(path, at, content)
    with pytest.raises(UserError, match="grown: was cut or replaced while it was in use"):
        append(path, 8, b"x")
    assert path.read_bytes() == b"one two"
