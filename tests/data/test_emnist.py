import gzip
import hashlib
import io
import shutil
import string
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import EMNIST

from fedml_noniid.plugins.data.datasets import load
from tests.data.reading import contents, idx, refuse, serving

PAGE = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
SPLITS = {  # the classes in the order of EMNIST's mapping files, and the label of the first
    "byclass": (string.digits + string.ascii_uppercase + string.ascii_lowercase, 0),
    "bymerge": (MERGED, 0),
    "balanced": (MERGED, 0),
    "letters": (string.ascii_lowercase, 1),
    "digits": (string.digits, 0),
    "mnist": (string.digits, 0),
}


def letter():
    """An upright L of 28x28: a long stroke down the left, a short one along the bottom."""
    image = np.zeros((28, 28), dtype=np.uint8)
    image[2:26, 4] = 255
    image[25, 4:14] = 100
    return image


def names(split):
    return [
        f"emnist-{split}-{part}-{end}"
        for part in ("train", "test")
        for end in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]


def files(split):
    classes, first = SPLITS[split]
    rng = np.random.default_rng(0)
    made = []
    for n in (len(classes) + 3, 7):
        images = rng.integers(0, 256, (n, 28, 28))
        images[0] = letter().T  # as the originals are stored
        made += [idx(images), idx(np.arange(n) % len(classes) + first)]
    return dict(zip(names(split), made, strict=True))


def packed(*splits):
    """The archive as NIST packs it: .gz files in a folder `gzip`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for split in splits:
            for name, content in files(split).items():
                archive.writestr(f"gzip/{name}.gz", gzip.compress(content, mtime=0))
    return file.getvalue()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A root with a small `byclass`, unpacked; torchvision takes a small archive for the original,
    and finds none."""
    root = tmp_path / "root"
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in files("byclass").items():
        (raw / name).write_bytes(content)
    monkeypatch.setattr(EMNIST, "md5", hashlib.md5(packed("byclass", "letters")).hexdigest())
    monkeypatch.setattr(EMNIST, "url", (tmp_path / "nothing" / "gzip.zip").as_uri())
    return root


def help_for(split, root):
    return (
        (
            f"put {', '.join(names(split))} (or each as .gz) or, without them, gzip.zip into "
            f"{root / 'EMNIST' / 'raw'}"
        ),
        PAGE,
    )


def test_upright(root):
    found = load("emnist", root)
    assert found.train_x.shape == (65, 1, 28, 28) and found.test_x.shape == (7, 1, 28, 28)
    assert (
        found.train_x.dtype == torch.uint8
        and found.train_x.is_contiguous()
        and found.train_y.dtype == torch.int64
    )
    assert np.array_equal(found.train_x[0, 0].numpy(), letter())
    assert np.array_equal(found.test_x[0, 0].numpy(), letter())
    assert not np.array_equal(letter(), letter().T)


@pytest.mark.parametrize("split", SPLITS)
def test_splits(root, split):
    shutil.rmtree(root)
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for i, (name, content) in enumerate(files(split).items()):
        (raw / (f"{name}.gz" if i % 2 else name)).write_bytes(
            gzip.compress(content) if i % 2 else content
        )
    before = contents(root)
    found = load("emnist", root, split=split)
    classes, _ = SPLITS[split]
    assert found.classes == tuple(classes)
    assert found.train_y.tolist() == [*range(len(classes)), 0, 1, 2]
    assert load("emnist", root, split=split).checksum == found.checksum and contents(root) == before


def test_archive(root):
    raw = root / "EMNIST" / "raw"
    expected = load("emnist", root).checksum
    archive = packed("byclass", "letters")
    (raw / "gzip.zip").write_bytes(archive)
    (raw / names("byclass")[1]).unlink()  # what is left is not mixed with the archive's
    before = contents(root)
    assert load("emnist", root).checksum == expected and contents(root) == before
    assert len(load("emnist", root, split="letters").classes) == 26
    for bad in (b"", archive[: len(archive) // 2], b"<html>not found</html>"):
        (raw / "gzip.zip").write_bytes(bad)
        with refuse(
            raw / "gzip.zip", "damaged or truncated", "delete it", *help_for("byclass", root)
        ):
            load("emnist", root)


def test_download(root, tmp_path, monkeypatch):
    expected = load("emnist", root).checksum
    shutil.rmtree(root)
    archive, mirror = packed("byclass", "letters"), tmp_path / "mirror"
    failed = f"{root / 'EMNIST' / 'raw' / 'gzip.zip'}: not there, and downloading it failed ("
    with refuse(failed, *help_for("letters", root)):
        load("emnist", root, split="letters")
    assert not root.exists()
    mirror.mkdir()
    (mirror / "gzip.zip").write_bytes(archive)
    with serving(mirror, monkeypatch) as url:
        monkeypatch.setattr(EMNIST, "url", f"{url}/gzip.zip")
        assert load("emnist", root).checksum == expected
    assert contents(root) == {Path("EMNIST/raw/gzip.zip"): archive}
    load("emnist", root, split="letters")  # needs no network


def test_a_forgotten_file_is_named(root):
    raw = root / "EMNIST" / "raw"
    missing = raw / names("byclass")[2]
    missing.unlink()
    with refuse(f"{missing}: there is no such file", *help_for("byclass", root)):
        load("emnist", root)


def test_wrong_labels(root):
    labels = root / "EMNIST" / "raw" / names("byclass")[3]
    labels.write_bytes(idx(np.full(7, 62)))
    with refuse(f"{labels}: damaged (has labels outside 0 to 61)"):
        load("emnist", root)
    for name, content in files("letters").items():
        (labels.parent / name).write_bytes(content)
    labels = labels.parent / names("letters")[3]
    labels.write_bytes(idx(np.arange(7)))
    with refuse(f"{labels}: damaged (has labels outside 1 to 26)"):
        load("emnist", root, split="letters")
