"""Files are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from plugins.core.errors import UserError


def write_whole(path: Path, content: bytes | str | Callable[[str], None]) -> None:
    """Writes `content` to `path` so that a reader, or a kill at any moment, sees the old file or the new one.

    `content` may be a function that writes the file whose name it is given, for what is too large to be held twice.
    Missing folders are made. Raises UserError when the folder can't be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(temporary)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; what we write is meant to be read like any other output.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise UserError(
            f"{path}: can't be written ({error.strerror or error}); choose a folder that is writable"
        ) from None


def replace_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Puts a folder with exactly these files in the place of `folder`; on an error the old one stays.

    Raises UserError when it can't be written.
    """
    fresh = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        os.chmod(fresh, 0o755)
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        old = fresh.with_name(f"{fresh.name}.old")
        if folder.exists():
            os.replace(folder, old)
        os.replace(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder}: can't be written ({error.strerror or error}); choose a folder that is writable"
        ) from None
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
