import dataclasses
import gzip
import hashlib
import math
import os
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image

from fedml_noniid.plugins.data.dataset import TENSORS, Dataset, Raw
from fedml_noniid.plugins.data.datasets import load
from fedml_noniid.plugins.data.readers import download, images
from fedml_noniid.plugins.data.readers import mnist as mnist_files
from tests.data.reading import contents, draw, idx, refuse, serving


@pytest.fixture(scope="module")
def digits():
    return load("digits", Path("nowhere"))


# digits


def test_digits(digits):
    assert digits.train_x.shape == (1437, 1, 8, 8) and digits.test_x.shape == (360, 1, 8, 8)
    assert digits.train_x.dtype == torch.uint8 and digits.train_x.max() == 16
    assert digits.train_y.dtype == torch.int64 and digits.classes == tuple("0123456789")
    train, test = digits.train_y.bincount(), digits.test_y.bincount()
    assert ((test - 0.2 * (train + test)).abs() <= 1).all()
    assert digits.mean[0] == pytest.approx(digits.train_x.double().mean().item())
    assert digits.std[0] == pytest.approx(digits.train_x.double().std(correction=0).item())


def test_digits_never_change(digits):
    """The split and the bytes are part of every result: a new value here means that old results
    can't be compared."""
    assert digits.checksum == "4cd82ee7bccdb1ae43e212ea72020f83393c67d635aafbee40ec8e3f55575a55"


def test_normalised(digits):
    x = digits.normalised("train", "cpu")
    assert x.dtype == torch.float32 and x.shape == digits.train_x.shape
    assert x.mean().abs() < 1e-5 and (x.std() - 1).abs() < 1e-3
    assert torch.allclose(
        digits.normalised("test"), (digits.test_x.float() - digits.mean[0]) / digits.std[0]
    )
    raw = dataclasses.replace(digits, train_x=digits.train_x.float())
    assert torch.equal(raw.normalised("train"), x) and raw.train_x.max() == 16  # left as it was


def test_normalisations(digits):
    half, none = (load("digits", Path(), normalise=name) for name in ("half", "none"))
    x = digits.test_x.double()
    assert torch.allclose(half.normalised("test").double(), (x / 16 - 0.5) / 0.5)
    assert torch.allclose(none.normalised("test").double(), x / 16)
    assert half.scale.tolist() == [2] and none.scale.tolist() == [1]  # from -1 to 1, from 0 to 1
    assert digits.scale.tolist() == pytest.approx([16 / digits.std[0]])
    assert len({data.checksum for data in (digits, half, none)}) == 3


def test_normalise_takes_numbers():
    """[m, s] is on the scale of 0 to 1, whatever the unit: here pixels of 0, 4 and 16 of 16, so 0,
    1/4 and 1."""
    x = torch.tensor([[0.0, 4.0, 16.0]]).view(1, 3, 1, 1).to(torch.uint8)
    y = torch.tensor([0])
    found = Dataset.of("mine", Raw(x, y, x, y, ["a"], unit=16), [0.25, 0.5]).normalised("test")
    assert found.flatten().tolist() == [-0.5, 0, 1.5]


def test_unknown_names_name_the_nearest():
    with refuse("data set 'digit' is unknown (did you mean 'digits'?); allowed: digits, mnist, "):
        load("digit", Path())
    with refuse("sises is unknown (did you mean 'size'?); allowed: size, normalise, samples"):
        load("digits", Path(), sises=[8, 8])
    with refuse("normalise = 'chanel' is refused (did you mean 'channel'?); allowed: channel, ha"):
        load("digits", Path(), normalise="chanel")
    with refuse("data set ['digits'] is unknown"):
        load(["digits"], Path())


@pytest.mark.parametrize("size", [[8], [8, 8, 8], [0, 8], [8, -1], [8.0, 8], [8, 5000]])
def test_refused_size(folder, size):
    with refuse("size"):
        load("image_folder", folder, size=size)


@pytest.mark.parametrize(
    "value",
    [
        [0.1],
        [0.1, 0.3, 0.3],
        [0.1, 0],
        [0.1, -0.3],
        [0.1, "0.3"],
        [0.1, True],
        [False, 0.3],
        [0.1, math.inf],
        None,
        0.5,
    ],
)
def test_numbers_that_normalise_does_not_take(value):
    with refuse(
        f"normalise = {value!r} is refused",
        "[mean, deviation] of pixels from 0 to 1 with a deviation above 0",
    ):
        load("digits", Path(), normalise=value)


def test_samples_of_floats_are_normalised_by_feature():
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    y = torch.tensor([0, 1])
    data = Dataset.of("mine", Raw(x, y, x, y, ["a", "b"], unit=1))
    assert data.normalised("train").tolist() == [[-1, 0], [1, 0]] and data.std == (1, 1)


def test_any_images_are_resized_as_torchvision_does(digits):
    found = load("digits", Path(), size=[12, 7]).train_x
    assert found.shape == (1437, 1, 12, 7)
    wanted = torchvision.transforms.Resize((12, 7))(Image.fromarray(digits.train_x[5, 0].numpy()))
    assert np.array_equal(found[5, 0].numpy(), np.asarray(wanted))
    coloured = torch.stack(
        [digits.train_x[:9, 0], digits.train_x[9:18, 0], digits.train_x[18:27, 0]], 1
    )
    both = images.resized(coloured, (12, 7))
    # Channel by channel the same as grey images.
    assert torch.equal(both[:, 1], images.resized(coloured[:, 1:2], (12, 7))[:, 0])


# load


def test_fewer_training_samples(digits):
    """The test set stays, the scale is that of what is used, and a note says so."""
    found = load("digits", Path(), samples=200)
    assert len(found.train_y) == 200 and torch.equal(found.test_x, digits.test_x)
    assert found.mean[0] == pytest.approx(found.train_x.double().mean().item())
    assert found.notes == ("200 of 1437 training samples are used, drawn class by class",)
    with refuse("samples = 2000 is refused; allowed: 10 to 1437, all of the training set"):
        load("digits", Path(), samples=2000)


# save and read


def test_round_trip(digits, tmp_path):
    digits.save(tmp_path / "new" / "digits.safetensors")
    back = Dataset.read(tmp_path / "new" / "digits.safetensors")
    for field in dataclasses.fields(Dataset):
        a, b = getattr(digits, field.name), getattr(back, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert os.listdir(tmp_path / "new") == ["digits.safetensors"]


def test_read_refuses_what_is_damaged(digits, tmp_path):
    path = tmp_path / "digits.safetensors"
    with refuse(path, "there is no such file"):
        Dataset.read(path)
    digits.save(path)
    good = path.read_bytes()
    for bad in (
        b"",
        b"\0" * 100,
        good[:7],
        good[:500],
        good[: len(good) // 2],
        good[:-1],
        good + b"x",
    ):
        path.write_bytes(bad)
        with refuse(path, "damaged"):
            Dataset.read(path)
    for where in (
        len(good) - 1,
        len(good) // 2,
        good.index(b'[\\"0\\"') + 3,
        good.index(b"std") + 10,
    ):
        path.write_bytes(good[:where] + bytes([good[where] ^ 1]) + good[where + 1 :])
        with refuse(path, "damaged"):
            Dataset.read(path)
    for metadata in (
        None,
        {"dataset": "{}"},
        {"dataset": "[]", "checksum": digits.checksum},
        {"dataset": "x"},
    ):
        path.write_bytes(
            safetensors.torch.save({key: getattr(digits, key) for key in TENSORS}, metadata)
        )
        with refuse(path, "damaged, or not a saved data set"):
            Dataset.read(path)
    path.write_bytes(safetensors.torch.save({"other": digits.train_x}))
    with refuse(path, "not a saved data set"):
        Dataset.read(path)
    path.unlink()
    path.mkdir()
    with refuse(path):
        Dataset.read(path)


def test_a_swapped_label_is_found(digits, tmp_path):
    y = digits.train_y.clone()
    y[[0, 1]] = y[[1, 0]]
    swapped = dataclasses.replace(digits, train_y=y)
    object.__setattr__(swapped, "checksum", digits.checksum)
    swapped.save(tmp_path / "x")
    with refuse("doesn't match its checksum"):
        Dataset.read(tmp_path / "x")


def test_an_unwritable_place_is_named_and_left_alone(digits, tmp_path):
    (tmp_path / "file").write_text("mine")
    with refuse(tmp_path / "file" / "digits", "can't be written"):
        digits.save(tmp_path / "file" / "digits")
    assert contents(tmp_path) == {Path("file"): b"mine"}


# MNIST


def small_mnist():
    rng = np.random.default_rng(0)
    files = {}
    for kind, n in (("train", 30), ("t10k", 20)):
        files[f"{kind}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (n, 28, 28)))
        files[f"{kind}-labels-idx1-ubyte"] = idx(np.arange(n) % 10)
    return files


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """<root>/MNIST/raw with a small MNIST, unpacked; nothing can be downloaded."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, content in small_mnist().items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(
        torchvision.datasets.MNIST, "mirrors", [(tmp_path / "mirror").as_uri() + "/"]
    )
    return folder


def pack(folder, *names):
    for name in names:
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()


def test_mnist_unpacked_packed_and_mixed(raw, tmp_path):
    unpacked = load("mnist", tmp_path)
    assert unpacked.train_x.shape == (30, 1, 28, 28) and unpacked.test_x.shape == (20, 1, 28, 28)
    assert unpacked.train_x.dtype == torch.uint8
    assert unpacked.train_y.dtype == torch.int64 and unpacked.test_y.tolist() == [
        *range(10),
        *range(10),
    ]
    assert unpacked.train_x.numpy().tobytes() == small_mnist()["train-images-idx3-ubyte"][16:]
    pack(raw, "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    assert load("mnist", tmp_path).checksum == unpacked.checksum
    pack(raw, "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte")
    before = contents(tmp_path)
    assert load("mnist", tmp_path).checksum == unpacked.checksum
    assert contents(tmp_path) == before  # a read-only folder will do


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", mnist_files.FILES)
def test_mnist_damaged_files(raw, tmp_path, name, packed):
    good = (raw / name).read_bytes()
    file = raw / (f"{name}.gz" if packed else name)
    for bad in (
        b"",
        good[:6],
        good[:-1],
        good[:20],
        good + b"\0",
        b"\1" + good[1:],
        good[:4] + b"\0\0\0\0",
    ):
        file.write_bytes(gzip.compress(bad) if packed else bad)
        if packed:
            (raw / name).unlink(missing_ok=True)
        with refuse(f"{file}: damaged", ", ".join(mnist_files.FILES), f"into {raw}"):
            load("mnist", tmp_path)
    if packed:
        whole = gzip.compress(good)
        for bad in (
            whole[:-1],
            whole[: len(whole) // 2],
            b"<html>not found</html>",
            b"",
            whole[:12] + b"\xff\xff" + whole[14:],
        ):
            file.write_bytes(bad)
            with refuse(f"{file}: damaged or truncated"):
                load("mnist", tmp_path)


def test_mnist_wrong_content(raw, tmp_path, monkeypatch):
    labels = raw / "t10k-labels-idx1-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(good[:-1] + b"\x0a")
    with refuse(f"{labels}: damaged (has labels outside 0 to 9)"):
        load("mnist", tmp_path)
    labels.write_bytes(idx(np.arange(19) % 10))
    with refuse(f"{labels}: has another number of samples"):
        load("mnist", tmp_path)
    labels.write_bytes(idx(np.zeros(10_000)))  # as long as the original
    with refuse(f"{labels}: damaged (isn't the original file)"):
        load("mnist", tmp_path)


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that torchvision takes for its download server."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    with serving(folder, monkeypatch) as url:
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"{url}/"])
        yield folder


def test_mnist_is_downloaded_and_only_what_is_missing(raw, mirror, tmp_path, monkeypatch):
    expected = load("mnist", tmp_path).checksum
    resources = []
    for name in mnist_files.FILES:
        packed = gzip.compress((raw / name).read_bytes())
        (mirror / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    kept = raw / "train-images-idx3-ubyte"
    age = kept.stat().st_mtime_ns
    for name in mnist_files.FILES:
        if name != kept.name:
            (raw / name).unlink()
    assert load("mnist", tmp_path).checksum == expected
    assert sorted(os.listdir(raw)) == sorted(mnist_files.FILES) and kept.stat().st_mtime_ns == age

    shutil.rmtree(tmp_path / "MNIST")
    (mirror / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not what the checksum says")
    with refuse("MNIST/raw/train-images-idx3-ubyte: not there, and downloading it failed"):
        load("mnist", tmp_path)
    assert not (tmp_path / "MNIST").exists()


def test_mnist_failed_download(raw, tmp_path):
    missing = raw / "t10k-images-idx3-ubyte"
    missing.unlink()
    before = contents(tmp_path)
    with refuse(
        f"{missing}: not there, and downloading it failed",
        ", ".join(mnist_files.FILES),
        f"into {raw}",
    ):
        load("mnist", tmp_path)
    assert contents(tmp_path) == before
    with refuse("train-images-idx3-ubyte: not there", "into"):
        load("mnist", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_mnist_host_that_never_answers(raw, tmp_path, monkeypatch):
    (raw / "t10k-images-idx3-ubyte").unlink()
    monkeypatch.setattr(download, "URL_TIMEOUT", 0.2)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [url])
        begin = time.perf_counter()
        with refuse("t10k-images-idx3-ubyte: not there, and downloading it failed"):
            load("mnist", tmp_path)
    assert time.perf_counter() - begin < 5
    assert socket.getdefaulttimeout() is None


# image folders


@pytest.fixture
def folder(tmp_path):
    for part, n in (("train", 3), ("test", 2)):
        for label in ("cat", "dog"):
            for i in range(n):
                draw(tmp_path / part / label / f"{i}.png")
    return tmp_path


def test_image_folder(folder):
    pixels = draw(folder / "train" / "dog" / "1.png")
    (folder / "train" / ".DS_Store").write_text("")
    (folder / "train" / "dog" / ".hidden").write_text("")
    found = load("image_folder", folder)
    assert found.train_x.shape == (6, 3, 5, 6) and found.test_x.shape == (4, 3, 5, 6)
    assert found.train_x.dtype == torch.uint8 and found.train_x.is_contiguous()
    assert found.classes == ("cat", "dog")
    assert found.train_y.tolist() == [0, 0, 0, 1, 1, 1] and found.test_y.tolist() == [0, 0, 1, 1]
    assert np.array_equal(found.train_x[4].permute(1, 2, 0).numpy(), pixels)
    x = found.train_x.double()
    assert found.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert found.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())
    found.save(folder / "saved")
    assert torch.equal(Dataset.read(folder / "saved").test_x, found.test_x)


def test_stray_files_are_ignored_with_one_note(folder):
    expected = load("image_folder", folder)
    strays = (
        "train/Thumbs.db",
        "train/cat/Thumbs.db",
        "test/dog/desktop.ini",
        "test/cat/readme.txt",
        "train/cat/._0.png",
    )
    for name in strays:
        (folder / name).write_text("")
    (folder / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    found = load("image_folder", folder)
    assert torch.equal(found.train_x, expected.train_x) and found.classes == expected.classes
    told = "files that are no images, ignored: 5 (._0.png, Thumbs.db, desktop.ini, readme.txt)"
    assert found.notes == (told, *expected.notes)


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1), ("PA", 3), ("P", 3)])
def test_an_alpha_channel_without_transparency_is_dropped(tmp_path, mode, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6), dtype=np.uint8)
    for part in ("train", "test"):
        for label in ("a", "b"):
            file = tmp_path / part / label / ("0.tiff" if mode == "PA" else "0.png")
            file.parent.mkdir(parents=True)
            Image.fromarray(pixels).convert("RGB" if mode == "RGBA" else mode[0]).convert(
                mode
            ).save(file)
    found = load("image_folder", tmp_path)
    assert found.train_x.shape == (2, channels, 5, 6)
    if mode != "PA":
        assert (found.train_x.numpy() == pixels).all()


def test_transparency_in_a_palette_is_refused(folder):
    Image.new("P", (6, 5)).save(folder / "train" / "cat" / "9.png", transparency=0)
    with refuse(
        folder / "train" / "cat" / "9.png",
        "colour mode P with transparent pixels; allowed: grey (8 bits) or",
    ):
        load("image_folder", folder)


def test_without_a_test_folder_a_share_of_each_class_tests(folder):
    shutil.rmtree(folder / "test")
    for label in ("cat", "dog"):
        for i in range(3, 10):
            draw(folder / "train" / label / f"{i}.png")
    found = load("image_folder", folder)
    assert found.test_y.tolist() == [0, 0, 1, 1] and found.train_y.bincount().tolist() == [8, 8]
    assert found.notes[0] == "test set: 4 of 20 samples, drawn by label with a fixed seed"
    assert len(load("image_folder", folder, test_share=0.5).test_y) == 10


def test_grey_images_and_a_constant_channel(tmp_path):
    for part in ("train", "test"):
        for label in ("a", "b"):
            draw(tmp_path / part / label / "0.png", "L", value=7)
    found = load("image_folder", tmp_path)
    assert found.train_x.shape == (2, 1, 5, 6)
    assert found.mean == (7.0,) and found.std == (1.0,)
    assert torch.equal(found.normalised("train"), torch.zeros(2, 1, 5, 6))


def test_grey_among_coloured_becomes_rgb(folder):
    pixels = draw(folder / "test" / "cat" / "0.png", "L")
    found = load("image_folder", folder)
    assert found.train_x.shape[1] == found.test_x.shape[1] == 3
    assert (found.test_x[0].numpy() == pixels.squeeze(2)).all()


def test_formats(folder):
    for suffix in ("jpg", "bmp", "gif", "webp"):
        draw(folder / "train" / "cat" / f"more.{suffix}")
    draw(folder / "train" / "cat" / "bits.png", "L", value=255)
    Image.new("1", (6, 5)).save(folder / "train" / "cat" / "bits.png")
    assert load("image_folder", folder).train_x.shape == (11, 3, 5, 6)


def test_size(folder):
    draw(folder / "train" / "dog" / "9.png", size=(12, 10))
    with refuse(folder / "train" / "dog" / "9.png", "is 10x12", "are 5x6", "option size"):
        load("image_folder", folder)
    assert load("image_folder", folder, size=[4, 7]).train_x.shape == (7, 3, 4, 7)
    assert torch.equal(
        load("image_folder", folder, size=(5, 6)).train_x[:6], load_without(folder, "9.png").train_x
    )


def load_without(folder, name):
    (folder / "train" / "dog" / name).unlink()
    return load("image_folder", folder)


def test_unreadable_images(folder):
    file = folder / "test" / "dog" / "x.jpg"
    draw(file, size=(60, 50))
    good = file.read_bytes()
    for bad in (b"", b"not an image", good[: len(good) // 2], good[:30]):
        file.write_bytes(bad)
        with refuse(f"{file}: can't be read as an image ("):
            load("image_folder", folder, size=[5, 6])
    png = file.with_suffix(".png")
    file.rename(png)
    draw(png, size=(60, 50))
    good = png.read_bytes()
    for where in (10, 20, 45, len(good) // 2):
        png.write_bytes(
            good[:where] + bytes(b ^ 255 for b in good[where : where + 9]) + good[where + 9 :]
        )
        with refuse(f"{png}: can't be read as an image ("):
            load("image_folder", folder, size=[5, 6])
    png.unlink()
    png.mkdir()
    with refuse(f"{png}: can't be read as an image ("):
        load("image_folder", folder)
    png.rmdir()
    draw(png, "RGBA")
    with refuse(
        f"{png}: has the colour mode RGBA with transparent pixels; allowed: grey (8 bits) or RGB"
    ):
        load("image_folder", folder)


def test_wrong_folders(folder, tmp_path):
    with refuse(tmp_path / "no" / "train", "no such folder", "train/<class>/*"):
        load("image_folder", tmp_path / "no")
    stray = folder / "train" / "5.png"
    draw(stray)
    with refuse(stray, "isn't in the folder of a class; needed: ", "train/<class>/5.png"):
        load("image_folder", folder)
    stray.unlink()
    (folder / "test" / "bird").mkdir()
    with refuse(folder, "the same classes", "bird"):
        load("image_folder", folder)
    (folder / "train" / "bird").mkdir()
    with refuse(folder / "train" / "bird", "holds no image"):
        load("image_folder", folder)
    for part in ("train", "test"):
        for label in ("bird", "dog"):
            shutil.rmtree(folder / part / label)
    with refuse(folder / "train", "holds 1 class folders; at least 2"):
        load("image_folder", folder)


# The real data


@pytest.fixture(scope="module")
def real():
    """The folder with MNIST/raw/*.gz: FEDML_NONIID_DATA, or shared/data beside the repository."""
    folder = Path(
        os.environ.get("FEDML_NONIID_DATA") or Path(__file__).parents[3] / "shared" / "data"
    )
    if not (folder / "MNIST" / "raw").is_dir():
        pytest.skip(
            f"real MNIST isn't in {folder}; set FEDML_NONIID_DATA to the folder that holds "
            "MNIST/raw"
        )
    return folder


def test_real_mnist(real, tmp_path):
    before = sorted(os.listdir(real / "MNIST" / "raw"))
    found = load("mnist", real)
    assert found.train_x.shape == (60000, 1, 28, 28) and found.test_x.shape == (10000, 1, 28, 28)
    assert found.train_y.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    # The values that everybody uses, 0.1307 and 0.3081, times 255.
    assert found.mean[0] / 255 == pytest.approx(0.1307, abs=1e-4) and found.std[
        0
    ] / 255 == pytest.approx(0.3081, abs=1e-4)
    assert sorted(os.listdir(real / "MNIST" / "raw")) == before
