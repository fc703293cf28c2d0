"""Files are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedml_noniid.plugins.core.errors import UserError


def write_whole(path: Path, content: bytes | str | Callable[[str], None], private: bool = False) -> None:
    """Writes `content` to `path`. Readers see the old file or the new one, even if the process is killed.

    `content` may be a function that gets a file name and writes that file, for content that is too large to be held
    twice. Missing folders are made. `private`: only the owner may read it. Raises UserError if the folder can't be
    written.
    """
    with _beside(path) as place:
        fresh = place / "new"
        with fresh.open("wb") as file:
            if callable(content):
                content(str(fresh))
            else:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
            os.fsync(file.fileno())
        fresh.chmod(0o600 if private else 0o644)  # whatever the umask
        fresh.replace(path)


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replaces `folder` by one with exactly these files; on an error the old folder stays.

    Raises UserError if it can't be written.
    """
    with _beside(folder) as place:
        fresh, old = place / "new", place.with_name(f"{place.name}.old")
        fresh.mkdir()
        fresh.chmod(0o755)
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if folder.exists():
            folder.replace(old)
        fresh.replace(folder)
        shutil.rmtree(old, ignore_errors=True)


def remove_abandoned(folder: Path, names: Iterable[str]) -> None:
    """Removes the temporary folders that killed writers of these files, named or by pattern, have left in `folder`.

    No writer of these files may run. A folder that holds anything else than a writer's one file stays.
    """
    for name in names:
        for place in folder.glob(f".{name}.????????"):
            if place.is_dir() and not place.is_symlink() and {path.name for path in place.iterdir()} <= {"new"}:
                shutil.rmtree(place, ignore_errors=True)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Imports FedML without its warnings, which are not ours to mend, and without the folders that wandb leaves."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        warnings.simplefilter("ignore")
        before, tempfile.tempdir = tempfile.tempdir, place
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `path`: a rename from there replaces `path` in one step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
        ) as place:  # fmt: skip
            yield Path(place)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: can't be written ({reason}); choose a folder that is writable") from None
