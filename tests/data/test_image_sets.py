"""What the readers make of images: MNIST, EMNIST, CIFAR, CINIC and folders; and their downloads.

test_readers has what all readers share.
"""

from __future__ import annotations

import shutil
import socket
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers import download
from fedml_noniid.data.readers import mnist as mnist_files
from tests.data import small
from tests.data.reading import Breaking, draw, idx, refuse, serving
from tests.files import contents

Patch = pytest.MonkeyPatch


def rgb(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """An image [3, h, w] as PIL has it."""
    return x.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("make", [small.mnist, small.emnist, small.cifar])
def test_packed_files_are_the_same(make: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    name = {"cifar": "cifar10"}.get(make.__name__, make.__name__)
    make(tmp_path / "a", monkeypatch)
    data = load(name, tmp_path / "a")
    getattr(small, f"packed_{make.__name__}")(tmp_path / "b", monkeypatch)
    assert load(name, tmp_path / "b").checksum == data.checksum
    if name == "mnist":
        file = tmp_path / "a" / "MNIST" / "raw" / "train-images-idx3-ubyte"
        assert data.train_x.numpy().tobytes() == file.read_bytes()[16:]
        assert data.train_x.shape == (30, 1, 28, 28) and data.test_y.tolist() == [*range(10)] * 2


# MNIST and EMNIST


def test_contents_that_do_not_fit(tmp_path: Path, monkeypatch: Patch) -> None:
    labels = small.mnist(tmp_path, monkeypatch) / "t10k-labels-idx1-ubyte"
    for wrong, words in (
        (np.full(20, 10), "damaged (has labels outside 0 to 9)"),
        (np.arange(19) % 10, "has another number of samples"),
        (np.zeros(10_000), "damaged (isn't the original file)"),  # as long as the original
    ):
        labels.write_bytes(idx(wrong))
        with refuse(f"{labels}: {words}", ", ".join(mnist_files.FILES), f"into {labels.parent}"):
            load("mnist", tmp_path)
    folder = small.emnist(tmp_path, monkeypatch, "letters", first=1)
    labels = folder / "emnist-letters-test-labels-idx1-ubyte"
    labels.write_bytes(idx(np.arange(7)))
    with refuse(f"{labels}: damaged (has labels outside 1 to 26)"):
        load("emnist", tmp_path, split="letters")
    labels.unlink()
    with refuse(f"{labels}: there is no such file", "gzip.zip"):  # no reason to download 560 MB
        load("emnist", tmp_path, split="letters")


MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
SPLITS = {  # the classes in the order of EMNIST's mapping files, and the label of the first
    "byclass": (string.digits + string.ascii_uppercase + string.ascii_lowercase, 0),
    "bymerge": (MERGED, 0),
    "balanced": (MERGED, 0),
    "letters": (string.ascii_lowercase, 1),
    "digits": (string.digits, 0),
    "mnist": (string.digits, 0),
}


@pytest.mark.parametrize("split", SPLITS)
def test_emnist_is_upright_and_its_classes_begin_at_0(
    split: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    classes, first = SPLITS[split]
    small.emnist(tmp_path, monkeypatch, split, first)
    found = load("emnist", tmp_path, split=split)
    assert found.classes == tuple(classes)
    assert found.train_y.tolist() == [*range(len(classes)), 0, 1, 2]
    assert found.train_x.is_contiguous() and found.test_x.shape == (7, 1, 28, 28)
    for x in (found.train_x, found.test_x):
        assert np.array_equal(x[0, 0].numpy(), small.letter())


# CIFAR and CINIC


@pytest.mark.parametrize("name", small.CIFAR)
def test_cifar(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    *train, test = small.cifar(tmp_path, monkeypatch, name)
    found = load(name, tmp_path)
    assert found.train_x.dtype == torch.uint8 and found.train_y.dtype == torch.int64
    assert found.train_x.is_contiguous() and found.train_x.shape[1:] == (3, 32, 32)
    wanted = np.concatenate([batch["data"] for batch in train])
    # Byte 1024 c + 32 i + j of a row is channel c of the pixel in row i, column j.
    assert found.train_x[2, 1, 3, 5] == wanted[2, 1024 + 3 * 32 + 5]
    assert np.array_equal(found.train_x.reshape(-1, 3072).numpy(), wanted)
    assert np.array_equal(found.test_x.reshape(-1, 3072).numpy(), test["data"])
    key = "labels" if name == "cifar10" else "fine_labels"
    assert found.train_y.tolist() == [y for batch in train for y in batch[key]]
    assert found.classes[:2] == (
        ("airplane", "automobile") if key == "labels" else ("thing 00", "thing 01")
    )
    half = load(name, tmp_path, size=[28, 28], normalise="half")
    assert half.train_x.shape[1:] == (3, 28, 28) and half.mean == (127.5,) * 3


def test_images_serve_where_there_are_no_originals(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    pixels = {
        (part, name): draw(folder / part / name / "0.png", size=(32, 32))
        for part in ("train", "test")
        for name in small.TEN
    }
    data = load("cifar10", tmp_path)
    assert data.train_y.tolist() == list(range(10))
    assert np.array_equal(rgb(data.test_x[3]), pixels["test", "cat"])
    assert data.notes == ("CIFAR-10 from the images in cifar10, not from its original files",)
    for part in ("train", "test"):
        (folder / part / "cat").rename(folder / part / "lion")
    with refuse(folder, "3x32x32 images of airplane", "lion", "CIFAR-10 has 3x32x32"):
        load("cifar10", tmp_path)
    # Originals go first.
    (tmp_path / "cifar-10-batches-py").mkdir()
    with refuse(tmp_path / "cifar-10-batches-py" / "data_batch_1", "there is no such file"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cinic-10", "CINIC-10"])
def test_cinic(name: str, tmp_path: Path) -> None:
    """The cats are grey, and become RGB."""
    folder, pixels = tmp_path / name, small.cinic(tmp_path, name=name)
    data, whole = load("cinic10", tmp_path), load("cinic10", tmp_path, valid="train")
    assert data.test_x.shape == (10, 3, 32, 32) and data.classes == tuple(small.TEN)
    assert whole.train_x.shape == (50, 3, 32, 32) and whole.train_x.is_contiguous()
    assert torch.equal(whole.train_x[:30], data.train_x)
    assert data.train_y.tolist() == [label for label in range(10) for _ in range(3)]
    assert whole.train_y[30:].tolist() == [label for label in range(10) for _ in range(2)]
    assert np.array_equal(rgb(data.test_x[9]), pixels["test", "truck", 0])
    assert np.array_equal(rgb(whole.train_x[33]), pixels["valid", "automobile", 1])
    assert (data.train_x[11].numpy() == pixels["train", "cat", 2][:, :, 0]).all()
    shutil.rmtree(folder / "valid")
    with refuse(folder / "valid", "no such folder"):
        load("cinic10", tmp_path, valid="train")
    shutil.move(folder / "train" / "cat", folder / "train" / "cats")
    with refuse(folder / "train", "lacks cat, also has cats", ", ".join(small.TEN)):
        load("cinic10", tmp_path)
    for part, label in ((part, label) for part in ("train", "test") for label in small.TEN):
        draw(tmp_path / "other" / "cinic-10" / part / label / "0.png", "L", size=(28, 24))
    with refuse("its images are 24x28 (height x width); CINIC-10's are 32"):
        load("cinic10", tmp_path / "other")


# Downloads


def test_an_archive_is_downloaded_whole_or_not_at_all(tmp_path: Path, monkeypatch: Patch) -> None:
    """A server without the file, with another one, or that stops in the middle of it leaves
    nothing."""
    root, mirror, kind = tmp_path / "root", tmp_path / "mirror", small.CIFAR["cifar10"]
    small.packed_cifar(mirror, monkeypatch)
    archive = mirror / kind.filename
    whole = archive.read_bytes()
    expected = load("cifar10", mirror).checksum
    failed = f"{root / kind.filename}: not there, and downloading it failed ("
    for content, handler in ((None, ()), (whole[:-1], ()), (whole, (Breaking,))):
        archive.unlink() if content is None else archive.write_bytes(content)
        with serving(mirror, monkeypatch, *handler) as url:
            monkeypatch.setattr(kind, "url", f"{url}/{kind.filename}")
            with refuse(failed, kind.filename, "https://www.cs.toronto.edu/~kriz/cifar.html"):
                load("cifar10", root)
        assert not root.exists()
    with serving(mirror, monkeypatch) as url:
        monkeypatch.setattr(kind, "url", f"{url}/{kind.filename}")
        assert load("cifar10", root).checksum == expected
    # Kept whole, so the second time needs no network.
    assert contents(root) == {kind.filename: whole}
    assert load("cifar10", root).checksum == expected


def test_a_host_that_never_answers(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(download, "URL_TIMEOUT", 0.2)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [url])
        with refuse("train-images-idx3-ubyte: not there, and downloading it failed"):
            load("mnist", tmp_path / "new")
    assert socket.getdefaulttimeout() is None and not (tmp_path / "new").exists()


# Folders of images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small.images(tmp_path)
    return tmp_path


def test_image_folder(folder: Path) -> None:
    """Strays are counted; a photo is turned as its EXIF says: 6, the camera lay on its side."""
    pixels = draw(folder / "train" / "dog" / "1.png", size=(16, 15))
    photo, exif = Image.new("RGB", (15, 16)), Image.Exif()
    photo.paste((255, 0, 0), (0, 0, 2, 16))  # the left edge of what is stored was at the top
    exif[0x0112] = 6
    photo.save(folder / "train" / "cat" / "0.png", exif=exif)
    for name in ("train/Thumbs.db", "test/dog/desktop.ini", "test/cat/a.txt", "train/cat/._0.png"):
        (folder / name).write_text("")
    (folder / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    data = load("image_folder", folder)
    assert data.train_x.shape == (6, 3, 15, 16) and data.test_x.shape == (4, 3, 15, 16)
    assert data.train_x.dtype == torch.uint8 and data.classes == ("cat", "dog")
    assert data.train_y.tolist() == [0, 0, 0, 1, 1, 1] and data.test_y.tolist() == [0, 0, 1, 1]
    assert np.array_equal(rgb(data.train_x[4]), pixels)
    assert (data.train_x[0, 0, :2] == 255).all() and not data.train_x[0, 0, 2:].any()
    names = "._0.png, Thumbs.db, a.txt, desktop.ini"
    assert data.notes[0] == f"files that are no images, ignored: 4 ({names})"
    x = data.train_x.double()
    assert data.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())


def test_sizes_and_a_share_for_the_test(folder: Path) -> None:
    expected = load("image_folder", folder).train_x
    draw(folder / "train" / "dog" / "9.png", size=(12, 10))
    with refuse(folder / "train" / "dog" / "9.png", "is 10x12", "are 15x16", "option size"):
        load("image_folder", folder)
    assert torch.equal(load("image_folder", folder, size=(15, 16)).train_x[:6], expected)
    shutil.rmtree(folder / "test")
    for i in range(3, 10):
        draw(folder / "train" / "cat" / f"{i}.png", size=(16, 15))
    data = load("image_folder", folder, size=[4, 7])
    assert data.test_y.tolist() == [0, 0, 1] and data.train_x.shape == (11, 3, 4, 7)
    assert data.notes[0] == "test set: 3 of 14 samples, drawn by label with a fixed seed"


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1), ("P", 3)])
def test_an_alpha_channel_without_transparency_is_dropped(
    tmp_path: Path, mode: str, channels: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6), dtype=np.uint8)
    plain = Image.fromarray(pixels).convert("RGB" if mode == "RGBA" else mode[0])
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
        plain.convert(mode).save(tmp_path / name / "0.png")
    data = load("image_folder", tmp_path)
    assert data.train_x.shape == (2, channels, 5, 6) and (data.train_x.numpy() == pixels).all()


# The real data


def test_kinds_of_images(folder: Path) -> None:
    """Formats may be mixed; a grey image among coloured ones becomes RGB."""
    for suffix in ("jpg", "bmp", "gif", "webp"):
        draw(folder / "train" / "cat" / f"more.{suffix}", size=(16, 15))
    Image.new("1", (16, 15)).save(folder / "train" / "cat" / "bits.png")
    pixels = draw(folder / "test" / "cat" / "0.png", "L", size=(16, 15))
    data = load("image_folder", folder)
    assert data.train_x.shape == (11, 3, 15, 16)
    assert (data.test_x[0].numpy() == pixels.squeeze(2)).all()


TWO = {"save_all": True, "append_images": [Image.new("L", (16, 15), 9)]}


@pytest.mark.parametrize(
    ("name", "mode", "options", "message"),
    [
        ("9.gif", "L", TWO, "has 2 pictures; allowed: one"),
        ("9.png", "RGBA", {}, "has the colour mode RGBA with transparent pixels; allowed: grey (8"),
        ("9.png", "P", {"transparency": 0}, "has the colour mode P with transparent pixels"),
        ("9.jpg", "CMYK", {}, "has the colour mode CMYK; allowed"),
    ],
)
def test_images_of_other_kinds(
    folder: Path, name: str, mode: str, options: dict[str, Any], message: str
) -> None:
    file = folder / "train" / "cat" / name
    Image.new(mode, (16, 15)).save(file, **options)
    with refuse(f"{file}: {message}"):
        load("image_folder", folder)
