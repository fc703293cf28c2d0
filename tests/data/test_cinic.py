import shlex
import shutil
import subprocess

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.data.datasets import load
from tests.data.reading import contents, draw, refuse

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def fill(folder, parts=("train", "valid", "test")):
    """A small CINIC-10, of which the cats are grey; file -> pixels."""
    return {
        (part, name, i): draw(
            folder / part / name / f"cifar10-{part}-{i}.png",
            "L" if name == "cat" else "RGB",
            (32, 32),
        )
        for n, part in enumerate(parts)
        for name in TEN
        for i in range(3 - n)
    }


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["cinic-10", "CINIC-10"])
def test_cinic(root, name):
    pixels = fill(root / name)
    before = contents(root)
    found = load("cinic10", root)
    assert found.train_x.shape == (30, 3, 32, 32) and found.test_x.shape == (10, 3, 32, 32)
    assert found.train_x.dtype == torch.uint8 and found.train_x.is_contiguous()
    assert found.classes == tuple(TEN)
    assert found.train_y.tolist() == [label for label in range(10) for _ in range(3)]
    assert found.test_y.tolist() == list(range(10))
    assert np.array_equal(
        found.train_x[4].permute(1, 2, 0).numpy(), pixels["train", "automobile", 1]
    )
    assert np.array_equal(found.test_x[9].permute(1, 2, 0).numpy(), pixels["test", "truck", 0])
    grey = pixels["train", "cat", 2][:, :, 0]
    assert all(np.array_equal(found.train_x[11, channel].numpy(), grey) for channel in range(3))
    assert load("cinic10", root).checksum == found.checksum and contents(root) == before


def test_valid(root):
    pixels = fill(root / "cinic-10")
    unused, used = load("cinic10", root, valid="unused"), load("cinic10", root, valid="train")
    assert used.train_x.shape == (50, 3, 32, 32) and torch.equal(used.train_x[:30], unused.train_x)
    assert used.train_y[30:].tolist() == [label for label in range(10) for _ in range(2)]
    assert np.array_equal(
        used.train_x[33].permute(1, 2, 0).numpy(), pixels["valid", "automobile", 1]
    )
    assert torch.equal(used.test_x, unused.test_x)
    shutil.rmtree(root / "cinic-10" / "valid")
    assert load("cinic10", root).checksum == unused.checksum
    with refuse(root / "cinic-10" / "valid", "no such folder"):
        load("cinic10", root, valid="train")


def test_all_grey_becomes_rgb(root):
    for part in ("train", "test"):
        for name in TEN:
            draw(root / "cinic-10" / part / name / "0.png", "L", (32, 32))
    assert load("cinic10", root).train_x.shape == (10, 3, 32, 32)


def test_missing(root):
    folder = root / "cinic-10"
    with refuse(
        folder / "train",
        "no such folder",
        "CINIC-10.tar.gz from https://datashare.ed.ac.uk/handle/10283/3192",
    ):
        load("cinic10", root)
    assert not root.exists()


def test_the_command_of_the_refusal_unpacks_the_archive(tmp_path):
    root = tmp_path / "my root"
    fill(tmp_path / "source")
    root.mkdir()
    archive = root / "CINIC-10.tar.gz"
    subprocess.run(
        ["tar", "-czf", archive, "-C", tmp_path / "source", "train", "valid", "test"], check=True
    )
    folder = shlex.quote(str(root / "cinic-10"))
    command = f"mkdir -p {folder} && tar -xzf {shlex.quote(str(archive))} -C {folder}"
    with refuse(f"unpack {archive}: {command}"):
        load("cinic10", root)
    subprocess.run(command, shell=True, check=True)
    assert len(load("cinic10", root).train_y) == 30


def test_wrong_content(root):
    fill(root / "cinic-10")
    train = root / "cinic-10" / "train"
    shutil.move(train / "cat", train / "cats")
    with refuse(train, "lacks cat, also has cats", f"the classes {', '.join(TEN)}"):
        load("cinic10", root)
    shutil.move(train / "cats", train / "cat")
    bad = train / "dog" / "cifar10-train-1.png"
    good = bad.read_bytes()
    for content in (b"", b"<html>", good[: len(good) // 2]):
        bad.write_bytes(content)
        with refuse(f"{bad}: can't be read as an image ("):
            load("cinic10", root)
    draw(bad, size=(31, 32))
    with refuse(bad, "is 32x31, the images before it are 32x32"):
        load("cinic10", root)
    bad.write_bytes(good)
    for file in (root / "cinic-10" / "test" / "frog").iterdir():
        file.unlink()
    with refuse(root / "cinic-10" / "test" / "frog", "holds no image"):
        load("cinic10", root)


def test_wrong_size(root):
    for part in ("train", "test"):
        for name in TEN:
            draw(root / "cinic-10" / part / name / "0.png", size=(28, 24))
    with refuse(root / "cinic-10", "its images are 24x28 (height x width); CINIC-10's are 32x32"):
        load("cinic10", root)
