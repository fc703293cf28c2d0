import hashlib
import io
import pickle
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

from fedml_noniid.plugins.data.datasets import load
from tests.data.reading import Breaking, contents, draw, refuse, serving

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HUNDRED = [f"thing {i:02}" for i in range(100)]
KINDS = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}


class Python2(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings: the originals are that old."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, text):
        self.write(pickle.BINSTRING + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = save_string


def pickled(content):
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue()


def batch(n, labels, classes, seed):
    """The pickle of `n` images as the originals have them: rows of 3072 bytes, red, green, blue,
    each by rows."""
    data = np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)
    fine = [(seed + i) % classes for i in range(n)]
    content = {b"data": data, labels: fine, b"filenames": [b"x.png"] * n}
    if classes == 100:
        content[b"coarse_labels"] = [0] * n
    return pickled(content), data, fine


def md5(content):
    return hashlib.md5(content).hexdigest()


class Small:
    """A small data set in the original's format, whose sums torchvision takes for the
    original's."""

    def __init__(self, name, root, monkeypatch):
        self.kind, self.root, self.monkeypatch = KINDS[name], root, monkeypatch
        self.labels, self.classes = (b"labels", 10) if name == "cifar10" else (b"fine_labels", 100)
        self.names = TEN if name == "cifar10" else HUNDRED
        self.folder, self.archive = root / self.kind.base_folder, root / self.kind.filename
        self.train, self.test = (
            [entry[0] for entry in files] for files in (self.kind.train_list, self.kind.test_list)
        )
        self.files, self.data, self.targets = {}, {}, {}
        for i, file in enumerate([*self.train, *self.test]):
            made = batch(4 + i, self.labels, self.classes, i)
            self.files[file], self.data[file], self.targets[file] = made
        key = {10: b"label_names", 100: b"fine_label_names"}[self.classes]
        self.files[self.kind.meta["filename"]] = pickled({key: [c.encode() for c in self.names]})
        self.packed = self.pack()
        self.trust()

    def pack(self):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, content in self.files.items():
                info = tarfile.TarInfo(f"{self.kind.base_folder}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return file.getvalue()

    def trust(self):
        for key, names in (("train_list", self.train), ("test_list", self.test)):
            self.monkeypatch.setattr(
                self.kind, key, [[name, md5(self.files[name])] for name in names]
            )
        meta = self.kind.meta | {"md5": md5(self.files[self.kind.meta["filename"]])}
        self.monkeypatch.setattr(self.kind, "meta", meta)
        self.monkeypatch.setattr(self.kind, "tgz_md5", md5(self.packed))
        self.monkeypatch.setattr(
            self.kind, "url", (self.root / "nothing" / self.archive.name).as_uri()
        )

    def unpacked(self):
        self.folder.mkdir(parents=True)
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)

    def help(self):
        """What every error says."""
        names = ", ".join(self.files)
        return (
            (
                f"put {names} into {self.folder}, or, without that folder, {self.archive.name} "
                "into "
                f"{self.root}"
            ),
            PAGE,
        )


@pytest.fixture(params=KINDS)
def small(request, tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    made = Small(request.param, root, monkeypatch)
    made.name = request.param
    return made


def test_folder(small):
    small.unpacked()
    before = contents(small.root)
    found = load(small.name, small.root)
    assert found.train_x.dtype == torch.uint8 and found.train_y.dtype == torch.int64
    assert found.train_x.is_contiguous() and found.train_x.shape[1:] == (3, 32, 32)
    wanted = np.concatenate([small.data[name] for name in small.train])
    # Byte 1024 c + 32 i + j of a row is channel c of the pixel in row i, column j.
    assert found.train_x[2, 1, 3, 5] == wanted[2, 1024 + 3 * 32 + 5]
    assert np.array_equal(found.train_x.reshape(-1, 3072).numpy(), wanted)
    assert np.array_equal(found.test_x.reshape(-1, 3072).numpy(), small.data[small.test[0]])
    assert found.train_y.tolist() == [y for name in small.train for y in small.targets[name]]
    assert found.test_y.tolist() == small.targets[small.test[0]]
    assert found.classes == tuple(small.names) and found.unit == 255
    assert load(small.name, small.root).checksum == found.checksum
    assert contents(small.root) == before


def test_archive(small):
    small.unpacked()
    expected = load(small.name, small.root).checksum
    shutil.rmtree(small.folder)
    small.archive.write_bytes(small.packed)
    assert load(small.name, small.root).checksum == expected
    assert contents(small.root) == {
        Path(small.archive.name): small.packed
    }  # a read-only folder will do


def test_download(small, tmp_path, monkeypatch):
    small.unpacked()
    expected = load(small.name, small.root).checksum
    shutil.rmtree(small.root)
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / small.archive.name).write_bytes(small.packed)
    with serving(tmp_path / "mirror", monkeypatch) as url:
        monkeypatch.setattr(small.kind, "url", f"{url}/{small.archive.name}")
        assert load(small.name, small.root).checksum == expected
    # Kept whole, so the second time needs no network.
    assert contents(small.root) == {Path(small.archive.name): small.packed}
    assert load(small.name, small.root).checksum == expected


def test_failed_downloads(small, tmp_path, monkeypatch):
    """A host that isn't there, has no such file, has another one, or stops in the middle of it."""
    failed = f"{small.archive}: not there, and downloading it failed ("
    with refuse(failed, *small.help()):
        load(small.name, small.root)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    with serving(mirror, monkeypatch) as url:
        monkeypatch.setattr(small.kind, "url", f"{url}/{small.archive.name}")
        with refuse(failed, "404", *small.help()):
            load(small.name, small.root)
        (mirror / small.archive.name).write_bytes(small.packed[:-1])
        with refuse(failed, *small.help()):
            load(small.name, small.root)
    (mirror / small.archive.name).write_bytes(small.packed)
    with serving(mirror, monkeypatch, Breaking) as url:
        monkeypatch.setattr(small.kind, "url", f"{url}/{small.archive.name}")
        with refuse(failed, *small.help()):
            load(small.name, small.root)
    with refuse(failed.replace(str(small.root), str(tmp_path / "elsewhere"))):
        load(small.name, tmp_path / "elsewhere")
    assert contents(small.root) == {} and not (tmp_path / "elsewhere").exists()


class Bomb:
    """What writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled_that_is_not_the_original(small, tmp_path, monkeypatch):
    """Each file in turn would run a program; so would the archive's and the server's."""
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists()  # it works
    mark.unlink()
    small.unpacked()
    for name, good in small.files.items():
        (small.folder / name).write_bytes(bomb)
        with refuse(f"{small.folder / name}: damaged (its MD5 isn't {md5(good)})", *small.help()):
            load(small.name, small.root)
        (small.folder / name).write_bytes(good)
    shutil.rmtree(small.folder)
    small.files = dict.fromkeys(small.files, bomb)
    packed = small.pack()
    small.archive.write_bytes(packed)
    with refuse(
        f"{small.archive}: damaged or truncated (its MD5 isn't {md5(small.packed)})", *small.help()
    ):
        load(small.name, small.root)
    small.archive.unlink()
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / small.archive.name).write_bytes(packed)
    with serving(tmp_path / "mirror", monkeypatch) as url:
        monkeypatch.setattr(small.kind, "url", f"{url}/{small.archive.name}")
        with refuse(f"{small.archive}: not there, and downloading it failed"):
            load(small.name, small.root)
    assert not mark.exists() and contents(small.root) == {}


def test_damaged_and_missing_files(small):
    small.unpacked()
    for name, good in small.files.items():
        file = small.folder / name
        for bad in (b"", good[:-1], good + b"\0", b"<html>not found</html>"):
            file.write_bytes(bad)
            with refuse(f"{file}: damaged", *small.help()):
                load(small.name, small.root)
        file.unlink()
        with refuse(f"{file}: there is no such file", *small.help()):
            load(small.name, small.root)
        file.write_bytes(good)
    load(small.name, small.root)
    shutil.rmtree(small.folder)
    for bad in (b"", small.packed[: len(small.packed) // 2], b"<html>not found</html>"):
        small.archive.write_bytes(bad)
        with refuse(f"{small.archive}: damaged or truncated", "delete it", *small.help()):
            load(small.name, small.root)
        assert contents(small.root) == {Path(small.archive.name): bad}


def test_torchvision_names_the_originals():
    """The sums of the files on the page, and that the meta file is among them."""
    assert torchvision.datasets.CIFAR10.tgz_md5 == "c58f30108f718f92721af3b95e74349a"
    assert torchvision.datasets.CIFAR100.tgz_md5 == "eb9058c3a382ffc7106e4002c42a8d85"
    assert all(len(kind.meta["md5"]) == 32 for kind in KINDS.values())


def test_size_and_normalise(small):
    small.unpacked()
    found = load(small.name, small.root, size=[28, 28], normalise="half")
    assert found.train_x.shape[1:] == (3, 28, 28) and found.mean == (127.5,) * 3


def test_images_serve_where_there_are_no_originals(tmp_path, monkeypatch):
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    pixels = {
        (part, name): draw(tmp_path / "cifar10" / part / name / "0.png", size=(32, 32))
        for part in ("train", "test")
        for name in names
    }
    found = load("cifar10", tmp_path)
    assert found.classes == tuple(names) and found.train_y.tolist() == list(range(10))
    assert np.array_equal(found.test_x[3].permute(1, 2, 0).numpy(), pixels["test", "cat"])
    assert found.notes == ("CIFAR-10 from the images in cifar10, not from its original files",)
    for part in ("train", "test"):
        (tmp_path / "cifar10" / part / "cat").rename(tmp_path / "cifar10" / part / "lion")
    with refuse(tmp_path / "cifar10", "3x32x32 images of airplane", "lion", "CIFAR-10 has 3x32x32"):
        load("cifar10", tmp_path)
    # Whatever lies there, originals go first.
    (tmp_path / "cifar-10-batches-py").mkdir()
    with refuse(tmp_path / "cifar-10-batches-py" / "data_batch_1", "there is no such file"):
        load("cifar10", tmp_path)
