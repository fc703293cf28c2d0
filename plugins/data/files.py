"""Files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from plugins.core.errors import UserError


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes `content` to `path` so that a reader, or a kill at any moment, sees the old file or the new one.

    Missing folders are made. Raises UserError when the folder can't be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
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
