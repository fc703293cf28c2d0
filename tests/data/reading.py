"""What the tests of the readers share: refusals, folders, and servers to download from."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedml_noniid.core.errors import UserError


def refuse(*parts: object) -> pytest.RaisesExc[UserError]:
    """A UserError of one line that contains `parts`."""
    return pytest.raises(
        UserError,
        match=r"\A(?=.*" + ")(?=.*".join(re.escape(str(part)) for part in parts) + r")[^\n]*\Z",
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Breaking(Quiet):
    """Says how long a file is and sends its first half."""

    def copyfile(self, source, outputfile):
        content = source.read()
        outputfile.write(content[: len(content) // 2])


@contextlib.contextmanager
def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, handler: type[Quiet] = Quiet
) -> Iterator[str]:
    """The address of a server of the files in `folder`, without a slash at its end."""
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def draw(file, mode="RGB", size=(6, 5), value=None, **options):
    """Writes an image of `size` (width, height) with random pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], len(Image.new(mode, (1, 1)).getbands()))
    pixels = (
        np.random.default_rng(len(str(file))).integers(0, 256, shape)
        if value is None
        else np.full(shape, value)
    )
    Image.fromarray(
        pixels.astype(np.uint8).squeeze(2) if shape[2] == 1 else pixels.astype(np.uint8)
    ).save(file, **options)
    return pixels


def idx(array):
    """An array as a file of MNIST."""
    return (
        struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )
