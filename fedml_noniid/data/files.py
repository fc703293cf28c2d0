"""Files are written whole or not at all, and they last: a file and the name of a file are on the
disk before we go on.

The user's umask decides who may read them. Files with private content are for their owner alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedml_noniid.core.errors import UserError

WRITABLE, FULL = "choose a folder that is writable", "free space on that disk, then start again"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: FULL,
    errno.EACCES: WRITABLE,
    errno.EPERM: WRITABLE,
    errno.EROFS: WRITABLE,
    errno.ELOOP: "a symbolic link is in its place; remove it",
}
UNFINISHED = ".unfinished"  # ending of the temporary folders; a killed process leaves one


def write_whole(
    path: Path, content: bytes | str | Callable[[str], None], private: bool = False
) -> None:
    """Writes `content` to `path`.

    Readers see the old file or the new one, even if the process is killed.

    `content` may be a function that gets a file name and writes that file, for content that is too
    large to be held twice. Missing folders are made. `private`: only the owner may read it. Raises
    UserError if the folder can't be written.
    """
    with _beside(path) as temporary:
        fresh = temporary / "new"
        with opened(fresh, "wb", private) as file:
            rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if not callable(content):
                file.write(content.encode() if isinstance(content, str) else content)
        if callable(content):
            content(str(fresh))
            fresh.chmod(rights)  # it may have made another file under that name
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(path)
        _sync(path.parent)


def append(path: Path, at: int, content: bytes, private: bool = False, sync: bool = True) -> None:
    """Writes `content` at the byte `at` of a file, which then ends behind it.

    At 0 the file may be missing. Without `sync`, it survives a kill, and no loss of power.

    Raises UserError if the file can't be written, or is shorter than `at`.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(path, "ab", private) as file:
            if os.fstat(file.fileno()).st_size < at:
                raise UserError(f"{path}: was cut or replaced while it was in use; start again")
            file.truncate(at)
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if at == 0:
            _sync(path.parent)


class Lines:
    """A file for its owner alone that grows by whole lines.

    A kill may leave a part of a line at its end. It does not count: the next line takes its place.
    """

    def __init__(self, path: Path) -> None:
        """Reads and writes nothing."""
        self.path, self.cut, self._size = path, 0, 0  # bytes of a part of a line, of whole lines

    def read(self) -> Iterator[bytes]:
        """The whole lines, one at a time; none if there is no file. After the last one, lines can
        be added. Raises OSError."""
        self.cut = self._size = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        self.cut = len(line)
                        return
                    self._size += len(line)
                    yield line[:-1]

    def add(self, line: bytes, sync: bool = True) -> None:
        """Adds a line, see `append`. Raises UserError."""
        append(self.path, self._size, line + b"\n", private=True, sync=sync)
        self._size += len(line) + 1

    def sync(self) -> None:
        """Makes all lines survive a loss of power. Raises UserError."""
        append(self.path, self._size, b"", private=True)


def replace_folder(folder: Path, files: Mapping[str, bytes], private: bool = False) -> None:
    """Replaces `folder` by one with exactly these files; on an error the old folder stays.

    `private`: only the owner may read it. Raises UserError if it can't be written.
    """
    with _beside(folder) as temporary:
        fresh = temporary / "new"
        fresh.mkdir(mode=0o700 if private else 0o777)
        for name, content in files.items():
            (fresh / name).parent.mkdir(exist_ok=True)
            with opened(fresh / name, "wb", private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync(fresh)
        if folder.exists():
            folder.replace(temporary / "old")
        fresh.replace(folder)
        _sync(folder.parent)


def opened(path: Path, mode: str, private: bool = False) -> IO[Any]:
    """Opens a file for writing.

    Raises OSError, also if the file is a symbolic link: it may lead anywhere.
    """
    rights = 0o600 if private else 0o666
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, rights))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an error of the file system a UserError that names `path` and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, WRITABLE)
        raise UserError(f"{path}: can't be written ({error.strerror or error}); {remedy}") from None


def remove_abandoned(folder: Path, names: Iterable[str]) -> None:
    """Removes the temporary folders that killed writers of these files, named or by pattern, have
    left in `folder`.

    No writer of these files may run. A folder that holds anything else than a writer's one file
    stays.
    """
    for name in names:
        for temporary in folder.glob(f".{name}.*{UNFINISHED}"):
            if (
                temporary.is_dir()
                and not temporary.is_symlink()
                and {path.name for path in temporary.iterdir()} <= {"new"}
            ):
                shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Imports FedML without its warnings, which are not ours to mend, and without the folders that
    wandb leaves."""
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
    ):
        warnings.simplefilter("ignore")
        before, tempfile.tempdir = tempfile.tempdir, temporary
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `path`: a rename from there replaces `path` in one
    step."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED, ignore_cleanup_errors=True
        ) as temporary:
            yield Path(temporary)


def _sync(folder: Path) -> None:
    """Puts the names in a folder on the disk: without it, a crash may undo a rename."""
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(there)
    finally:
        os.close(there)
