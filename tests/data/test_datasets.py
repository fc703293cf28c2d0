import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image

from fedml_noniid.data.dataset import TENSORS, Dataset, Raw
from fedml_noniid.data.datasets import load, load_once
from fedml_noniid.data.readers import images
from tests.data.reading import refuse

# digits


def test_digits(digits):
    assert digits.train_x.shape == (1437, 1, 8, 8) and digits.test_x.shape == (360, 1, 8, 8)
    assert digits.train_x.dtype == torch.uint8 and digits.train_x.max() == 16
    assert digits.mean[0] == pytest.approx(digits.train_x.double().mean().item())
    assert digits.std[0] == pytest.approx(digits.train_x.double().std(correction=0).item())
    # The split and the bytes are part of every result: with a new value here, old results can't be
    # compared.
    assert digits.checksum == "4cd82ee7bccdb1ae43e212ea72020f83393c67d635aafbee40ec8e3f55575a55"


@pytest.mark.parametrize(
    ("normalise", "wanted", "scale"),
    [("half", [-1, -0.5, 1], 2), ("none", [0, 0.25, 1], 1), ([0.25, 0.5], [-0.5, 0, 1.5], 2)],
)
def test_normalise_is_on_the_scale_of_the_unit(normalise, wanted, scale):
    """Pixels of 0, 4 and 16 of 16 are 0, 1/4 and 1."""
    x = torch.tensor([[0.0, 4.0, 16.0]]).view(1, 3, 1, 1).to(torch.uint8)
    y = torch.tensor([0])
    found = Dataset.from_raw("mine", Raw(x, y, x, y, ["a"], unit=16), normalise)
    assert found.normalised("test").flatten().tolist() == wanted
    assert found.scale.tolist() == [scale] * 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "data set 'digit' is unknown (did you mean 'digits'?); allowed: digits, mni"),
        (["digits"], {}, "data set ['digits'] is unknown"),
        (
            "digits",
            {"sises": [8, 8]},
            "sises is unknown (did you mean 'size'?); allowed: size, n",
        ),
        ("digits", {"normalise": "chanel"}, "normalise = 'chanel' is refused (did you mean 'chan"),
        ("digits", {"samples": 2000}, "samples = 2000 is refused; allowed: 10 to 1437, all of the"),
        *[
            ("digits", {"normalise": value}, "[mean, deviation] of pixels from 0 to 1 with a devia")
            for value in ([0.1], [0.1, 0], [0.1, "0.3"], [0.1, True], [0.1, math.inf], None, 0.5)
        ],
    ],
)
def test_refused(name, options, message):
    with refuse(message):
        load(name, Path(), **options)


def test_fewer_training_samples(digits):
    """The test set stays, the scale is that of what is used, and a note says so."""
    data = load("digits", Path(), samples=200)
    assert len(data.train_y) == 200 and torch.equal(data.test_x, digits.test_x)
    assert data.mean[0] == pytest.approx(data.train_x.double().mean().item())
    assert data.notes == ("200 of 1437 training samples are used, drawn class by class",)
    wanted = (digits.test_x.float() - digits.mean[0]) / digits.std[0]
    assert torch.allclose(digits.normalised("test"), wanted)


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


# save and read


@pytest.mark.parametrize("name", ["digits", "made_tweets"])
def test_round_trip(name, tmp_path):
    data = load(name, Path("nowhere"))
    data.save(tmp_path / "new" / "a.safetensors")
    back = Dataset.read(tmp_path / "new" / "a.safetensors")
    for field in dataclasses.fields(Dataset):
        a, b = getattr(data, field.name), getattr(back, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert os.listdir(tmp_path / "new") == ["a.safetensors"]


def test_read_refuses_what_is_damaged(digits, tmp_path):
    path = tmp_path / "digits.safetensors"
    with refuse(path, "there is no such file"):
        Dataset.read(path)
    digits.save(path)
    good = path.read_bytes()
    flips = (len(good) - 1, len(good) // 2, good.index(b'[\\"0\\"') + 3, good.index(b"std") + 10)
    tensors = {key: getattr(digits, key) for key in TENSORS}
    for bad in (
        *(b"", b"\0" * 100, good[:7], good[:500], good[:-1], good + b"x"),
        *(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in flips),
        *(safetensors.torch.save(tensors, {"dataset": head}) for head in ("{}", "[]", "x")),
    ):
        path.write_bytes(bad)
        with refuse(path, "damaged"):
            Dataset.read(path)
    path.write_bytes(safetensors.torch.save({"other": digits.train_x}, {"shard": "{}"}))
    with refuse(path, "is not a saved data set; the prepare stage writes it"):
        Dataset.read(path)


def test_a_check_and_its_stage_read_a_file_once(tmp_path):
    """The third call reads anew, as does one behind a change of the file or of an option."""
    file, rows = tmp_path / "a.csv", [f"{i},{i % 2}\n" for i in range(20)]
    file.write_text("x,y\n" + "".join(rows))
    options = {"file": "a.csv", "label": "y"}
    first, second, third = (load_once("table", tmp_path, options) for _ in range(3))
    assert second is first and third is not first and third.checksum == first.checksum
    assert load_once("table", tmp_path, options | {"test_share": 0.4}).checksum != first.checksum
    file.write_text("x,y\n" + "".join(rows[1:]))
    assert load_once("table", tmp_path, options).checksum != first.checksum
