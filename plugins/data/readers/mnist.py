"""MNIST's four files, from a folder or from the network."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import socket
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from plugins.core.errors import UserError
from plugins.data.dataset import Raw
from plugins.data.files import write_whole

URL_TIMEOUT = 30.0  # seconds without a byte

# SHA-256 of the original files, unpacked.
FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def mnist(root: Path) -> Raw:
    """MNIST: 60,000 training and 10,000 test images, grey, 28x28, values 0 to 255.

    The four files are used where they lie in <root>/MNIST/raw, unpacked or as .gz; what isn't there is downloaded
    into that folder. Raises UserError for a failed download and for a damaged file.
    """
    # Imported here, since it takes seconds and other data sets don't need it.
    import torchvision

    raw = root / "MNIST" / "raw"
    missing = [name for name in FILES if not (raw / name).is_file() and not (raw / f"{name}.gz").is_file()]
    if missing:
        _download(raw, missing)
    # torchvision reads unpacked files only. They are unpacked elsewhere, for `raw` may be read-only.
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "MNIST" / "raw"
        unpacked.mkdir(parents=True)
        for name in FILES:
            (unpacked / name).write_bytes(_content(raw, name))
        parts = [torchvision.datasets.MNIST(folder, train=train) for train in (True, False)]
    tensors: list[Tensor] = []
    for part, kind in zip(parts, ("train", "t10k"), strict=True):
        if len(part.data) != len(part.targets):
            raise _error(raw / f"{kind}-labels-idx1-ubyte", "has another number of samples than the images")
        tensors += [part.data.unsqueeze(1), part.targets]
    train_x, train_y, test_x, test_y = tensors
    return Raw(train_x, train_y, test_x, test_y, [str(c) for c in range(10)])


def _error(path: Path, problem: str) -> UserError:
    return UserError(f"{path}: {problem}; put the four files {', '.join(FILES)} (or each as .gz) into {path.parent}")


def _content(raw: Path, name: str) -> bytes:
    """One of the four files, unpacked and checked. UserError if it is damaged."""
    path = raw / name
    if path.is_file():
        content = path.read_bytes()
    else:
        path = raw / f"{name}.gz"
        try:
            content = gzip.decompress(path.read_bytes())
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise _error(path, "damaged or truncated") from None
    images = "images" in name
    samples = int.from_bytes(content[4:8], "big")
    begin = b"\0\0\x08" + (b"\x03" if images else b"\x01") + content[4:8]
    begin += (28).to_bytes(4, "big") * 2 if images else b""
    size = len(begin) + samples * (784 if images else 1)
    if samples == 0 or not content.startswith(begin) or len(content) != size:
        raise _error(path, "damaged or truncated")
    if not images and max(content[8:]) > 9:
        raise _error(path, "damaged (has labels above 9)")
    # A shorter set in the same format is fine, but what has the original's length has to be the original.
    original = 60_000 if name.startswith("train") else 10_000
    if samples == original and hashlib.sha256(content).hexdigest() != FILES[name]:
        raise _error(path, "damaged (isn't the original file)")
    return content


def _download(raw: Path, missing: Sequence[str]) -> None:
    """Downloads MNIST and puts the `missing` files into `raw` once all are complete."""
    import torchvision

    timeout = socket.getdefaulttimeout()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # torchvision sets no timeout: a host that never answers would hang us for ever.
            socket.setdefaulttimeout(URL_TIMEOUT)
            torchvision.datasets.MNIST(folder, download=True)
            for name in missing:
                write_whole(raw / name, (Path(folder) / "MNIST" / "raw" / name).read_bytes())
    except (OSError, RuntimeError, EOFError, zlib.error, http.client.HTTPException) as error:
        reason = " ".join(str(error).split())
        raise _error(raw / missing[0], f"not there, and downloading it failed ({reason})") from None
    finally:
        socket.setdefaulttimeout(timeout)
