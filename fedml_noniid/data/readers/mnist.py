"""MNIST's four files, from a folder or from the network."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.readers import idx
from fedml_noniid.data.readers.download import download_folder

# SHA-256 of the original files, unpacked.
FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def mnist(root: Path) -> Raw:
    """MNIST: 60,000 training and 10,000 test images, grey, 28x28, values 0 to 255.

    The four files are read from <root>/MNIST/raw, unpacked or as .gz. Missing files are downloaded
    into that folder. Raises UserError for a failed download and for a damaged file.
    """
    raw = root / "MNIST" / "raw"
    missing = [name for name in FILES if idx.path_of(raw, name) is None]
    if missing:
        _download(raw, missing)
    return Raw(
        *idx.parts(raw, list(FILES), range(10), _needed(raw), _original),
        [str(c) for c in range(10)],
    )


def _needed(folder: Path) -> str:
    return f"put the four files {', '.join(FILES)} (or each as .gz) into {folder}"


def _original(path: Path, content: bytes) -> None:
    """UserError if a file has as many samples as the original and isn't the original.

    Shorter sets are fine.
    """
    name = path.name.removesuffix(".gz")
    samples = 60_000 if name.startswith("train") else 10_000
    if (
        int.from_bytes(content[4:8], "big") == samples
        and hashlib.sha256(content).hexdigest() != FILES[name]
    ):
        raise UserError(f"{path}: damaged (isn't the original file); {_needed(path.parent)}")


def _download(raw: Path, missing: Sequence[str]) -> None:
    """Downloads MNIST and puts the `missing` files into `raw` once all are complete."""
    with download_folder(raw / missing[0], _needed(raw)) as folder:
        import torchvision  # it takes seconds and is seldom needed

        torchvision.datasets.MNIST(folder, download=True)
        for name in missing:
            write_whole(raw / name, (folder / "MNIST" / "raw" / name).read_bytes())
