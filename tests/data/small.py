"""Small data sets in the formats of the originals: `make(root, monkeypatch)` writes one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torchvision
from torchvision.datasets import EMNIST

from tests.data.reading import draw, idx
from tests.data.tweets import write

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}
PARTS = {"train": 30, "t10k": 20}
Patch = pytest.MonkeyPatch


def mnist(root: Path, monkeypatch: Patch) -> Path:
    """The four files, unpacked. Nothing can be downloaded."""
    folder, rng = root / "MNIST" / "raw", np.random.default_rng(0)
    folder.mkdir(parents=True)
    for kind, n in PARTS.items():
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(idx(rng.integers(0, 256, (n, 28, 28))))
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % 10))
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [(root / "no").as_uri() + "/"])
    return folder


def packed_mnist(root: Path, monkeypatch: Patch) -> None:
    for file in list(mnist(root, monkeypatch).iterdir()):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()


def letter() -> np.ndarray[Any, Any]:
    """An upright L of 28x28: a long stroke down the left, a short one along the bottom."""
    image = np.zeros((28, 28), dtype=np.uint8)
    image[2:26, 4], image[25, 4:14] = 255, 100
    return image


def emnist(root: Path, monkeypatch: Patch, split: str = "byclass", first: int = 0) -> Path:
    """One sample per class and three more, and a test set of seven; the first image is an L, stored
    on its side as the originals are."""
    folder, rng = root / "EMNIST" / "raw", np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    n_classes = len(EMNIST.classes_split_dict[split]) - first
    for part, n in (("train", n_classes + 3), ("test", 7)):
        images = rng.integers(0, 256, (n, 28, 28))
        images[0] = letter().T
        name = f"emnist-{split}-{part}"
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(n) % n_classes + first))
    monkeypatch.setattr(EMNIST, "url", (root / "no" / "gzip.zip").as_uri())
    return folder


def packed_emnist(root: Path, monkeypatch: Patch) -> None:
    """NIST's archive: .gz files in a folder `gzip`, whose sum torchvision takes for the
    original's."""
    folder, content = emnist(root, monkeypatch), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.writestr(f"gzip/{file.name}.gz", gzip.compress(file.read_bytes(), mtime=0))
            file.unlink()
    monkeypatch.setattr(EMNIST, "md5", hashlib.md5(content.getvalue()).hexdigest())
    (folder / "gzip.zip").write_bytes(content.getvalue())


def cifar(root: Path, monkeypatch: Patch, name: str = "cifar10") -> list[dict[str, Any]]:
    """The pickles of four and more images, whose sums torchvision takes for the originals'.

    The batches in the order of the data set, the test set last.
    """
    kind, n_classes = CIFAR[name], int(name.removeprefix("cifar"))
    labels = "labels" if n_classes == 10 else "fine_labels"
    folder, batches, sums = root / kind.base_folder, [], {}
    folder.mkdir(parents=True)
    names = [file for file, _ in (*kind.train_list, *kind.test_list)]
    for i, file in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 256, (4 + i, 3072), dtype=np.uint8)
        batches.append({"data": pixels, labels: [(i + j) % n_classes for j in range(4 + i)]})
        (folder / file).write_bytes(pickle.dumps(batches[i], protocol=2))
    classes = TEN if n_classes == 10 else [f"thing {c:02}" for c in range(100)]
    meta = folder / kind.meta["filename"]
    meta.write_bytes(pickle.dumps({kind.meta["key"]: classes}, protocol=2))
    sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    for key in ("train_list", "test_list"):
        trusted = [[file, sums[file]] for file, _ in getattr(kind, key)]
        monkeypatch.setattr(kind, key, trusted)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": sums[meta.name]})
    monkeypatch.setattr(kind, "url", (root / "no" / kind.filename).as_uri())
    return batches


def packed_cifar(root: Path, monkeypatch: Patch) -> None:
    """The archive of CIFAR-10, and nothing else."""
    cifar(root, monkeypatch)
    kind = CIFAR["cifar10"]
    archive, folder = root / kind.filename, root / kind.base_folder
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, kind.base_folder)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())


def cinic(root: Path, _: Patch | None = None, name: str = "cinic-10") -> dict[Any, Any]:
    """Three, two and one images of each class; the cats are grey. (part, class, number) ->
    pixels."""
    return {
        (part, label, i): draw(
            root / name / part / label / f"{i}.png", "L" if label == "cat" else "RGB", (32, 32)
        )
        for n, part in enumerate(("train", "valid", "test"))
        for label in TEN
        for i in range(3 - n)
    }


def images(root: Path, _: Patch | None = None) -> None:
    """Three training and two test images of cats and dogs."""
    for part, n in (("train", 3), ("test", 2)):
        for label in ("cat", "dog"):
            for i in range(n):
                draw(root / part / label / f"{i}.png", size=(16, 15))


def femnist(root: Path, _: Patch | None = None) -> None:
    """One writer in both parts: each byte divided by 255."""
    pixels = (np.arange(784) % 256 / 255).tolist()
    content = {
        "users": ["a"],
        "num_samples": [1],
        "user_data": {"a": {"x": [pixels], "y": [3]}},
    }
    for part in ("train", "test"):
        (root / "femnist" / part).mkdir(parents=True)
        (root / "femnist" / part / "0.json").write_text(json.dumps(content))


def tweets(root: Path, _: Patch | None = None) -> None:
    write(root, [("04"[i % 2], "ann", f"word{i}") for i in range(9)])


def arrays(root: Path, _: Patch | None = None) -> None:
    root.mkdir()
    for part, n in (("train", 6), ("test", 4)):
        np.savez(root / f"{part}.npz", x=np.arange(n * 3).reshape(n, 3) / 7, y=np.arange(n) % 2)


def table(root: Path, _: Patch | None = None) -> None:
    """The columns x, said and y as CSV and, where pyarrow is, as parquet."""
    root.mkdir()
    lines = [(i / 3, f"word{i % 3}", "yn"[i % 2]) for i in range(20)]
    frame = pd.DataFrame(lines, columns=["x", "said", "y"])
    frame.to_csv(root / "a.csv", index=False)
    frame.to_csv(root / "a.csv.gz", index=False)
