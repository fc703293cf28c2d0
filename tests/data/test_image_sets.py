"""What the readers make of images: MNIST, EMNIST, CIFAR, CINIC and folders; and their downloads.

test_readers has what all readers share.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import socket
import string
import time
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


# MNIST and EMNIST


def test_mnist_unpacked_and_packed(tmp_path: Path, monkeypatch: Patch) -> None:
    raw = small.mnist(tmp_path / "a", monkeypatch)
    found = load("mnist", tmp_path / "a")
    assert found.train_x.shape == (30, 1, 28, 28) and found.test_x.shape == (20, 1, 28, 28)
    assert found.train_x.dtype == torch.uint8 and found.train_y.dtype == torch.int64
    assert found.test_y.tolist() == [*range(10), *range(10)]
    assert found.train_x.numpy().tobytes() == (raw / "train-images-idx3-ubyte").read_bytes()[16:]
    small.packed_mnist(tmp_path / "b", monkeypatch)
    assert load("mnist", tmp_path / "b").checksum == found.checksum


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


def test_emnists_archive_is_read_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    small.emnist(tmp_path / "a", monkeypatch)
    small.packed_emnist(tmp_path / "b", monkeypatch)
    assert load("emnist", tmp_path / "b").checksum == load("emnist", tmp_path / "a").checksum


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
    pixels = {
        (part, name): draw(tmp_path / "cifar10" / part / name / "0.png", size=(32, 32))
        for part in ("train", "test")
        for name in small.TEN
    }
    found = load("cifar10", tmp_path)
    assert found.classes == tuple(small.TEN) and found.train_y.tolist() == list(range(10))
    assert np.array_equal(rgb(found.test_x[3]), pixels["test", "cat"])
    assert found.notes == ("CIFAR-10 from the images in cifar10, not from its original files",)
    for part in ("train", "test"):
        (tmp_path / "cifar10" / part / "cat").rename(tmp_path / "cifar10" / part / "lion")
    with refuse(tmp_path / "cifar10", "3x32x32 images of airplane", "lion", "CIFAR-10 has 3x32x32"):
        load("cifar10", tmp_path)
    # Whatever lies there, originals go first.
    (tmp_path / "cifar-10-batches-py").mkdir()
    with refuse(tmp_path / "cifar-10-batches-py" / "data_batch_1", "there is no such file"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cinic-10", "CINIC-10"])
def test_cinic(name: str, tmp_path: Path) -> None:
    pixels = small.cinic(tmp_path, name=name)
    found = load("cinic10", tmp_path)
    assert found.train_x.shape == (30, 3, 32, 32) and found.test_x.shape == (10, 3, 32, 32)
    assert found.train_x.is_contiguous() and found.classes == tuple(small.TEN)
    assert found.train_y.tolist() == [label for label in range(10) for _ in range(3)]
    assert np.array_equal(rgb(found.train_x[4]), pixels["train", "automobile", 1])
    assert np.array_equal(rgb(found.test_x[9]), pixels["test", "truck", 0])
    assert (found.train_x[11].numpy() == pixels["train", "cat", 2][:, :, 0]).all()
    used = load("cinic10", tmp_path, valid="train")
    assert used.train_x.shape == (50, 3, 32, 32) and torch.equal(used.train_x[:30], found.train_x)
    assert used.train_y[30:].tolist() == [label for label in range(10) for _ in range(2)]
    assert np.array_equal(rgb(used.train_x[33]), pixels["valid", "automobile", 1])
    shutil.rmtree(tmp_path / name / "valid")
    assert load("cinic10", tmp_path).checksum == found.checksum
    with refuse(tmp_path / name / "valid", "no such folder"):
        load("cinic10", tmp_path, valid="train")
    shutil.move(tmp_path / name / "train" / "cat", tmp_path / name / "train" / "cats")
    with refuse(tmp_path / name / "train", "lacks cat, also has cats", ", ".join(small.TEN)):
        load("cinic10", tmp_path)


def test_cinic_of_another_size(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in small.TEN:
            draw(tmp_path / "cinic-10" / part / name / "0.png", "L", size=(28, 24))
    with refuse(tmp_path / "cinic-10", "its images are 24x28 (height x width); CINIC-10's are 32"):
        load("cinic10", tmp_path)


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


def test_only_the_files_of_mnist_that_are_missing_are_downloaded(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    raw, mirror, resources = small.mnist(tmp_path, monkeypatch), tmp_path / "mirror", []
    expected = load("mnist", tmp_path).checksum
    mirror.mkdir()
    for name in mnist_files.FILES:
        packed = gzip.compress((raw / name).read_bytes())
        (mirror / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
        if not name.startswith("train-images"):
            (raw / name).unlink()
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    age = (raw / "train-images-idx3-ubyte").stat().st_mtime_ns
    with serving(mirror, monkeypatch) as url:
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"{url}/"])
        assert load("mnist", tmp_path).checksum == expected
    assert sorted(os.listdir(raw)) == sorted(mnist_files.FILES)
    assert (raw / "train-images-idx3-ubyte").stat().st_mtime_ns == age


def test_a_host_that_never_answers(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(download, "URL_TIMEOUT", 0.2)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [url])
        begin = time.perf_counter()
        with refuse("train-images-idx3-ubyte: not there, and downloading it failed"):
            load("mnist", tmp_path / "new")
    assert time.perf_counter() - begin < 5
    assert socket.getdefaulttimeout() is None and not (tmp_path / "new").exists()


# Folders of images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small.images(tmp_path)
    return tmp_path


def test_image_folder(folder: Path) -> None:
    pixels = draw(folder / "train" / "dog" / "1.png", size=(16, 15))
    found = load("image_folder", folder)
    assert found.train_x.shape == (6, 3, 15, 16) and found.test_x.shape == (4, 3, 15, 16)
    assert found.train_x.dtype == torch.uint8 and found.train_x.is_contiguous()
    assert found.classes == ("cat", "dog")
    assert found.train_y.tolist() == [0, 0, 0, 1, 1, 1] and found.test_y.tolist() == [0, 0, 1, 1]
    assert np.array_equal(rgb(found.train_x[4]), pixels)
    x = found.train_x.double()
    assert found.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert found.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())


def test_stray_files_are_ignored_with_one_note(folder: Path) -> None:
    expected = load("image_folder", folder)
    for name in (
        "train/Thumbs.db",
        "train/cat/Thumbs.db",
        "test/dog/desktop.ini",
        "test/cat/readme.txt",
        "train/cat/._0.png",
    ):
        (folder / name).write_text("")
    (folder / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    found = load("image_folder", folder)
    assert torch.equal(found.train_x, expected.train_x) and found.classes == expected.classes
    told = "files that are no images, ignored: 5 (._0.png, Thumbs.db, desktop.ini, readme.txt)"
    assert found.notes == (told, *expected.notes)


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1), ("PA", 3), ("P", 3)])
def test_an_alpha_channel_without_transparency_is_dropped(
    tmp_path: Path, mode: str, channels: int
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6), dtype=np.uint8)
    plain = Image.fromarray(pixels).convert("RGB" if mode == "RGBA" else mode[0])
    for part in ("train", "test"):
        for label in ("a", "b"):
            file = tmp_path / part / label / ("0.tiff" if mode == "PA" else "0.png")
            file.parent.mkdir(parents=True)
            plain.convert(mode).save(file)
    found = load("image_folder", tmp_path)
    assert found.train_x.shape == (2, channels, 5, 6)
    if mode != "PA":
        assert (found.train_x.numpy() == pixels).all()


def test_kinds_of_images(folder: Path) -> None:
    """Formats may be mixed; a grey image among coloured ones becomes RGB; transparency is
    refused."""
    for suffix in ("jpg", "bmp", "gif", "webp"):
        draw(folder / "train" / "cat" / f"more.{suffix}", size=(16, 15))
    Image.new("1", (16, 15)).save(folder / "train" / "cat" / "bits.png")
    pixels = draw(folder / "test" / "cat" / "0.png", "L", size=(16, 15))
    found = load("image_folder", folder)
    assert found.train_x.shape == (11, 3, 15, 16)
    assert (found.test_x[0].numpy() == pixels.squeeze(2)).all()
    file, words = folder / "train" / "cat" / "9.png", "transparent pixels; allowed: grey (8 bits)"
    of_two = file.with_suffix(".gif")
    Image.new("L", (16, 15)).save(
        of_two, save_all=True, append_images=[Image.new("L", (16, 15), 9)]
    )
    with refuse(f"{of_two}: has 2 pictures; allowed: one"):
        load("image_folder", folder)
    of_two.unlink()
    draw(file, "RGBA", size=(16, 15))
    with refuse(f"{file}: has the colour mode RGBA with {words}"):
        load("image_folder", folder)
    Image.new("P", (16, 15)).save(file, transparency=0)
    with refuse(f"{file}: has the colour mode P with {words}"):
        load("image_folder", folder)
    Image.new("CMYK", (16, 15)).save(file.with_suffix(".jpg"))
    file.unlink()
    with refuse("has the colour mode CMYK; allowed"):
        load("image_folder", folder)


def test_a_photo_is_turned_as_it_was_taken(folder: Path) -> None:
    """Orientation 6: the camera was turned by 90 degrees, so the top is at the right."""
    photo = Image.new("RGB", (15, 16))  # stored lying: 15 wide
    photo.paste((255, 0, 0), (0, 0, 2, 16))  # its left edge is what was at the top
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(folder / "train" / "cat" / "0.png", exif=exif)
    found = load("image_folder", folder)
    assert found.train_x.shape[2:] == (15, 16)
    assert (found.train_x[0, 0, :2] == 255).all() and not found.train_x[0, 0, 2:].any()


def test_without_a_test_folder_a_share_of_each_class_tests(folder: Path) -> None:
    shutil.rmtree(folder / "test")
    for label in ("cat", "dog"):
        for i in range(3, 10):
            draw(folder / "train" / label / f"{i}.png", size=(16, 15))
    found = load("image_folder", folder)
    assert found.test_y.tolist() == [0, 0, 1, 1] and found.train_y.bincount().tolist() == [8, 8]
    assert found.notes[0] == "test set: 4 of 20 samples, drawn by label with a fixed seed"
    assert len(load("image_folder", folder, test_share=0.5).test_y) == 10


def test_size(folder: Path) -> None:
    expected = load("image_folder", folder).train_x
    draw(folder / "train" / "dog" / "9.png", size=(12, 10))
    with refuse(folder / "train" / "dog" / "9.png", "is 10x12", "are 15x16", "option size"):
        load("image_folder", folder)
    assert load("image_folder", folder, size=[4, 7]).train_x.shape == (7, 3, 4, 7)
    assert torch.equal(load("image_folder", folder, size=(15, 16)).train_x[:6], expected)


# The real data


def test_real_mnist() -> None:
    """FEDML_NONIID_DATA, or shared/data beside the repository, holds MNIST/raw/*.gz."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    root = Path(os.environ.get("FEDML_NONIID_DATA") or beside)
    if not (root / "MNIST" / "raw").is_dir():
        pytest.skip(f"real MNIST isn't in {root}; set FEDML_NONIID_DATA to its folder")
    found = load("mnist", root)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert found.train_y.bincount().tolist() == counts and len(found.test_y) == 10_000
    # The values that everybody uses, 0.1307 and 0.3081, times 255.
    assert found.mean[0] / 255 == pytest.approx(0.1307, abs=1e-4)
    assert found.std[0] / 255 == pytest.approx(0.3081, abs=1e-4)
