import json
import string

import numpy as np
import pytest
import torch

from fedml_noniid.data.datasets import load
from tests.data.reading import refuse
from tests.files import contents

COMMAND = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
PAGE = "https://github.com/TalwalkarLab/leaf/tree/master/data/femnist"


def user(name, labels):
    """A writer's bytes [n, 784] and labels; the bytes depend on the name."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, (len(labels), 784)), labels


WRITERS = {
    "train": {
        "f0100_2": user("f0100_2", [0, 61, 10]),
        "f0001_1": user("f0001_1", [36, 5]),
        "f10": user("f10", [9]),
    },
    "test": {
        "f0001_1": user("f0001_1 test", [4]),
        "f0100_2": user("f0100_2 test", [1, 2]),
        "a": user("a", [7]),
    },
}


def write(file, writers, **changes):
    """What LEAF writes: each byte divided by 255."""
    content = {
        "users": list(writers),
        "num_samples": [len(labels) for _, labels in writers.values()],
        "user_data": {
            name: {"x": (pixels / 255).tolist(), "y": labels}
            for name, (pixels, labels) in writers.items()
        },
        **changes,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return content


def some(part, *names):
    return {name: WRITERS[part][name] for name in names}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    write(
        root / "femnist" / "train" / "all_data_0_niid_0_keep_0_train_9.json",
        some("train", "f0100_2", "f0001_1"),
    )
    write(
        root / "femnist" / "train" / "all_data_1_niid_0_keep_0_train_9.json", some("train", "f10")
    )
    write(root / "femnist" / "test" / "all_data_0_niid_0_keep_0_test_9.json", WRITERS["test"])
    return root


def test_femnist(root):
    before = contents(root)
    found = load("femnist", root)
    # By name: f0001_1 with 2, f0100_2 with 3, f10 with 1; "a" comes first and is in test only.
    assert found.train_owner.tolist() == [1, 1, 2, 2, 2, 3] and found.test_owner.tolist() == [
        0,
        1,
        2,
        2,
    ]
    assert found.train_owner.dtype == torch.int64
    assert found.train_y.tolist() == [36, 5, 0, 61, 10, 9] and found.test_y.tolist() == [7, 4, 1, 2]
    assert found.train_x.shape == (6, 1, 28, 28) and found.test_x.shape == (4, 1, 28, 28)
    assert found.train_x.dtype == torch.uint8 and found.unit == 255
    wanted = [WRITERS["train"][name][0] for name in ("f0001_1", "f0100_2", "f10")]
    assert np.array_equal(found.train_x.reshape(-1, 784).numpy(), np.concatenate(wanted))
    assert np.array_equal(
        found.test_x[0, 0, 3].numpy(), WRITERS["test"]["a"][0][0, 3 * 28 : 4 * 28]
    )
    assert "".join(found.classes) == string.digits + string.ascii_uppercase + string.ascii_lowercase
    assert load("femnist", root).checksum == found.checksum and contents(root) == before


def test_every_byte_comes_back(root):
    """All of 0 to 255, also rounded to 7 digits."""
    pixels = np.arange(784) % 256
    bits = pixels // 255 * 255  # 0 and 255, as whole numbers 0 and 1
    for x, wanted in (
        ((pixels / 255).tolist(), pixels),
        (np.round(pixels / 255, 7).tolist(), pixels),
        ((bits // 255).tolist(), bits),
    ):
        write(
            root / "femnist" / "train" / "one.json",
            {"x": user("x", [0])},
            user_data={"x": {"x": [x], "y": [0]}},
        )
        assert load("femnist", root).train_x[-1].flatten().tolist() == wanted.tolist()


BLANK = [0.5019607843137255] * 784  # 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": None}, "isn't one of LEAF's files (users: "),
        ({"user_data": None}, "isn't one of LEAF's files (user_data: "),
        ({"users": "a"}, "isn't one of LEAF's files (users: "),
        ({"users": [3]}, "isn't one of LEAF's files (users.0: "),
        (
            {"user_data": {"a": {"x": [], "y": []}}},
            "user 'a': has 0 samples x and 0 labels y",
        ),
        ({"user_data": []}, "isn't one of LEAF's files (user_data: "),
        ({"user_data": {}}, "user 'a': is in one of users and user_data only"),
        ({"user_data": {"a": [1]}}, "isn't one of LEAF's files (user_data.a: "),
        ({"user_data": {"a": {"x": [BLANK]}}}, "isn't one of LEAF's files (user_data.a.y: "),
        ({"user_data": {"a": {"x": [BLANK], "y": 1}}}, "(user_data.a.y: "),
        (
            {"user_data": {"a": {"x": [BLANK], "y": [1, 2]}}},
            "has 1 samples x and 2 labels y",
        ),
        (
            {"user_data": {"a": {"x": [BLANK] * 2, "y": [1]}}},
            "has 2 samples x and 1 labels y",
        ),
        (
            {"user_data": {"a": {"x": [BLANK], "y": [1]}, "b": {"x": [], "y": []}}},
            "user 'b': is in one of users and user_data only",
        ),
    ],
)
def test_wrong_structure(root, changes, message):
    file = root / "femnist" / "test" / "bad.json"
    (root / "femnist" / "test" / "all_data_0_niid_0_keep_0_test_9.json").unlink()
    write(file, some("test", "a"), **changes)
    with refuse(file, message):
        load("femnist", root)


def test_missing_and_double_users(root):
    folder = root / "femnist"
    write(folder / "train" / "z.json", some("train", "f10"))
    with refuse(f"z.json: user 'f10': is twice in {folder / 'train'}, first in all_data_1_niid_0_"):
        load("femnist", root)
    (folder / "train" / "z.json").rename(folder / "train" / "._a.json")  # as a note of macOS
    load("femnist", root)
    for file in (folder / "test").iterdir():
        file.unlink()
    with refuse(f"{folder / 'test'}: holds no *.json; make them with LEAF's {COMMAND} ({PAGE})"):
        load("femnist", root)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (BLANK, 62, "y[0] = 62 is refused; allowed: 0 to 61"),
        (BLANK, -1, "y[0] = -1 is refused; allowed: 0 to 61"),
        (BLANK, 3.0, "y[0] = 3.0 is refused; allowed: 0 to 61"),
        (BLANK, True, "y[0] = True is refused; allowed: 0 to 61"),
        (BLANK, "3", "y[0] = '3' is refused; allowed: 0 to 61"),
        (BLANK, None, "y[0] = None is refused; allowed: 0 to 61"),
        (BLANK[:-1], 3, "x isn't a list of images, each a list of 784 numbers"),
        ([*BLANK, 0], 3, "x isn't a list of images, each a list of 784 numbers"),
        (0.5, 3, "x isn't a list of images, each a list of 784 numbers"),
        ([*BLANK[1:], "0.5"], 3, "x isn't a list of images, each a list of 784 numbers"),
        ([*BLANK[1:], None], 3, "x isn't a list of images, each a list of 784 numbers"),
        ([*BLANK[1:], [0.5]], 3, "x isn't a list of images, each a list of 784 numbers"),
        ([*BLANK[1:], 10**30], 3, "x isn't a list of images, each a list of 784 numbers"),
        (
            [*BLANK[1:], float("nan")],
            3,
            "x[0][783] = nan is refused; allowed: 0 to 1 in steps of 1/255",
        ),
        ([float("inf"), *BLANK[1:]], 3, "x[0][0] = inf is refused"),
        ([BLANK[0], -1 / 255, *BLANK[2:]], 3, "x[0][1] = -0.00392"),
        ([BLANK[0], 256 / 255, *BLANK[2:]], 3, "x[0][1] = 1.0039"),
        ([BLANK[0], 1e308, *BLANK[2:]], 3, "x[0][1] = 1e+308 is refused"),
        ([BLANK[0], 1 / 255 + 2e-6, *BLANK[2:]], 3, "x[0][1] = 0.003923"),
        ([BLANK[0], 0.5, *BLANK[2:]], 3, "x[0][1] = 0.5 is refused"),
        ([128] * 784, 3, "x[0][0] = 128 is refused; allowed: 0 to 1 in steps of 1/255"),
    ],
)
def test_wrong_samples(root, x, y, message):
    file = root / "femnist" / "train" / "bad.json"
    write(file, some("test", "a"), user_data={"a": {"x": [x], "y": [y]}})
    with refuse(f"{file}: user 'a': ", message):
        load("femnist", root)
