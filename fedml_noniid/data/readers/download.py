"""Downloads that are complete or leave nothing, with a time limit."""

from __future__ import annotations

import http.client
import socket
import tempfile
import urllib.error
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole

URL_TIMEOUT = 30.0  # seconds without a byte

_forbidden = ContextVar("_forbidden", default=False)


class DownloadNeededError(UserError):
    """A file is not there, and downloads are forbidden."""


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside, a download is not begun: it raises DownloadNeededError."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


@contextmanager
def download_folder(path: Path, needed: str) -> Iterator[Path]:
    """A temporary folder for torchvision to download `path` into.

    UserError for a failed download; it says what is `needed` in its place.
    """
    if _forbidden.get():
        raise DownloadNeededError(f"{path}: is not there, and would be downloaded")
    timeout = socket.getdefaulttimeout()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # torchvision sets no timeout: without one, a host that never answers would block for
            # ever.
            socket.setdefaulttimeout(URL_TIMEOUT)
            yield Path(folder)
    except (OSError, RuntimeError, EOFError, zlib.error, http.client.HTTPException) as failure:
        if isinstance(failure, urllib.error.HTTPError):
            failure.close()  # it holds the connection
        reason = " ".join(str(failure).split())
        raise UserError(
            f"{path}: not there, and downloading it failed ({reason}); {needed}"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)


def archive(path: Path, url: str, md5: str, needed: str) -> Path:
    """`path`, downloaded from `url` if it isn't there.

    UserError unless it has the sum `md5`; it says what is `needed`.
    """
    from torchvision.datasets.utils import check_integrity, download_url

    if not path.is_file():
        with download_folder(path, needed) as folder:
            download_url(url, folder, path.name, md5)
            write_whole(path, (folder / path.name).read_bytes())
    elif not check_integrity(path, md5):
        raise UserError(
            f"{path}: damaged or truncated (its MD5 isn't {md5}); delete it to have it downloaded, "
            f"or {needed}"
        )
    return path
