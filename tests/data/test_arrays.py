import numpy as np
import pytest
import torch

from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers.arrays import of_named
from tests.data.reading import refuse

X = np.arange(6 * 3, dtype=np.uint8).reshape(6, 3)
Y = np.array([0, 1, 2, 0, 1, 2])


def write(root, part="train", **arrays):
    """An archive of a valid small data set, with these arrays in place of its own; None takes one
    away."""
    root.mkdir(exist_ok=True)
    n = 6 if part == "train" else 4
    content = {"x": X[:n], "y": Y[:n]} | arrays
    file = root / f"{part}.npz"
    np.savez(file, **{key: array for key, array in content.items() if array is not None})
    return file


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    write(root)
    write(root, "test")
    return root


def loaded(root, train, test, **options):
    """The data set of two files with these changes."""
    write(root, **train)
    write(root, "test", **test)
    return load("arrays", root, **options)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((5,), (5,)), ((4, 5), (1, 4, 5)), ((1, 4, 5), (1, 4, 5)), ((3, 4, 5), (3, 4, 5))],
)
def test_shapes(root, shape, wanted):
    x = np.random.default_rng(0).integers(0, 256, (6, *shape), dtype=np.uint8)
    found = loaded(root, {"x": np.asfortranarray(x)}, {"x": x[:4]})
    assert found.train_x.shape == (6, *wanted) and found.test_x.shape == (4, *wanted)
    assert (
        np.array_equal(found.train_x.reshape(x.shape).numpy(), x) and found.train_x.is_contiguous()
    )


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", ">f4", ">f8"])
def test_floats(root, kind):
    x = np.linspace(-3, 70000 if kind != "float16" else 7, 18).reshape(6, 3)
    test = {"x": x[:4].astype(np.float32)}
    found = loaded(root, {"x": x.astype(kind)}, test, normalise="none")
    assert found.train_x.dtype == found.test_x.dtype == torch.float32 and found.unit == 1
    assert np.array_equal(found.train_x.numpy(), x.astype(kind).astype(np.float32))
    assert torch.equal(found.normalised("train"), found.train_x)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (np.array([7, -5, 7, 7, 2, 2]), np.array([2, 2**63, 7, 7], dtype=np.uint64)),
        (np.array(list("cBccaa")), np.array(list("adcc"))),
    ],
)
def test_owners(root, train, test):
    """Numbered in sorted order over both files: -5, 2, 7, 2**63, and B, a, c, d."""
    found = loaded(root, {"client": train}, {"client": test})
    assert found.train_owner.tolist() == [2, 0, 2, 2, 1, 1] and found.test_owner.tolist() == [
        1,
        3,
        2,
        2,
    ]
    assert found.train_owner.dtype == found.test_owner.dtype == torch.int64


LABELS = np.array(["dog", "ant", "cat", "dog", "ant", "cat"])


def test_labels_are_numbered_in_their_order(root):
    for labels, classes in ((5 * Y - 1, ("-1", "4", "9")), (9 - Y, ("7", "8", "9"))):
        data = loaded(root, {"y": labels}, {"y": labels[:4]})
        assert data.classes == classes and data.unit == 255
        assert torch.equal(data.train_x, torch.from_numpy(X)) and data.train_owner is None
        assert data.test_y.tolist() == [classes.index(str(label)) for label in labels[:4]]
    for order in (["ant", "cat", "dog"], ["dog", "cat", "ant"]):
        more = {} if order[0] == "ant" else {"classes": np.array(order)}
        data = loaded(root, {"y": LABELS} | more, {"y": LABELS[:4]})
        assert data.classes == tuple(order)
        assert data.train_y.tolist() == [order.index(label) for label in LABELS]


NAMED = {"y": LABELS}


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({"y": np.array(list("aaaaaa"))}, {}, "train.npz: y is always 'a'; at least 2 classes are"),
        ({"y": np.array(list("abcdab"))}, {}, "y has 4 different labels in 6 samples; allowed: cl"),
        ({"y": np.array(["1.5", *"12111"])}, {}, "y is '1.5' in y[0], a measurement; allowed: wh"),
        (NAMED, {"y": np.array(["ant", "cow", "cat", "dog"])}, "test.npz: y is 'cow' in y[1], but"),
        (NAMED | {"classes": np.array(["dog", "cat", "cow"])}, {}, "once; not so: ant, cow"),
        (NAMED | {"classes": np.array(["dog", "cat", "ant", "ant"])}, {}, "once; not so: ant"),
        ({"y": np.array(["a", "b", " ", "a", "b", ""])}, {}, "y[2] is empty; every sample needs a"),
        ({}, NAMED | {"y": LABELS[:4]}, "y is <U3 [4]; allowed: one kind"),
        ({}, {"x": X[:4, :2]}, "test.npz: x holds samples of uint8 [2], "),
        ({}, {"x": X[:4].astype(float)}, "x holds samples of float64 [3], "),
        ({}, {"x": X[:0], "y": Y[:0]}, "test.npz: x is uint8 [0, 3]; allowed"),
        (
            {},
            {"y": np.array([0, 2, 1, 4])},
            "is '4' in y[3], but no training sample is; all",
        ),
        (
            {},
            {"classes": np.array(["a", "b", "c"])},
            "array 'classes' is unknown; allowed: x, y",
        ),
        ({"client": Y}, {}, "client is missing; allowed: owners of both parts or of none"),
        ({"client": Y}, {"client": LABELS[:4]}, "client is <U3 [4]; allowed: one kind"),
    ],
)
def test_two_parts_that_do_not_fit(root, train, test, message):
    with refuse(message):
        loaded(root, train, {"y": train.get("y", Y)[:4]} | test)


# Layouts, ranges, one file


def channels(*shape, n=6):
    return np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)


@pytest.mark.parametrize(
    ("shape", "layout", "wanted"),
    [
        ((5, 4, 3), "auto", (3, 5, 4)),
        ((8, 8, 1), "auto", (1, 8, 8)),
        ((8, 6, 4), "auto", (4, 8, 6)),
        ((3, 5, 6), "auto", (3, 5, 6)),
        ((3, 5, 3), "HWC", (3, 3, 5)),
        ((3, 5, 3), "CHW", (3, 5, 3)),
        ((8, 8, 7), "HWC", (7, 8, 8)),
        ((8, 8, 7), "CHW", (8, 8, 7)),
    ],
)
def test_layouts(root, shape, layout, wanted):
    x = channels(*shape)
    found = loaded(root, {"x": x}, {"x": x[:4]}, layout=layout)
    assert found.train_x.shape == (6, *wanted) and found.train_x.is_contiguous()
    last = wanted != shape or layout == "HWC"
    assert np.array_equal(found.train_x.numpy(), x.transpose(0, 3, 1, 2) if last else x)
    said = any("read as [h, w, channels]" in note for note in found.notes)
    assert said is (layout == "auto" and wanted != shape)


def test_floats_on_the_scale_of_bytes_are_noted(root):
    x = channels(8, 8).astype(np.float32)
    (note,) = [n for n in loaded(root, {"x": x}, {"x": x[:4]}).notes if "floats" in n]
    assert note.startswith(f"images of floats from {x.min():g} to {x.max():g}: ")
    write(root, x=x / 255)
    with refuse(root / "test.npz", "x goes up to ", "x to ", "allowed: one scale"):
        load("arrays", root)
    small = loaded(root, {"x": x / 255}, {"x": x[:4] / 255})
    assert not [note for note in small.notes if "floats" in note]


def test_arrays_in_memory_are_those_of_the_files(root):
    owner = np.array(["zoe", "ada", "zoe", "bob", "ada", "ada"])
    files = {"y": LABELS, "client": owner}
    found = loaded(root, files, {key: of[:4] for key, of in files.items()})
    objects = LABELS.astype(object)  # as pandas has text
    train = {"x": X, "y": objects, "owner": owner}
    raw = of_named(train | {f"test_{key}": of[:4] for key, of in train.items()})
    assert Dataset.from_raw("arrays", raw).checksum == found.checksum
    cut = of_named({"x": X, "y": LABELS, "owner": owner, "test_share": 0.5})
    assert cut.test_owner is not None and len(cut.test_y) + len(cut.train_y) == 6


SMALL = {"x": X, "y": Y}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x is missing; needed: x and y"),
        ({"y": None}, "y is missing"),
        ({"z": X}, "array 'z' is unknown; allowed: x, y, client, classes"),
        ({"clients": Y}, "array 'clients' is unknown (did you mean 'client'?)"),
        (
            {"x": X.astype(int)},
            "x is int64 [6, 3]; allowed: uint8 (0 to 255), float16, float32, float64",
        ),
        ({"x": X > 3}, "x is bool [6, 3]; allowed: uint8"),
        ({"x": X.astype(str)}, "x is <U3 [6, 3]; allowed: uint8"),
        ({"x": X.astype(complex)}, "x is complex128 [6, 3]; allowed: uint8"),
        ({"x": X.astype(np.longdouble)}, "[6, 3]; allowed: uint8"),
        ({"x": np.zeros(6, [("a", np.uint8), ("b", float)])}, "; allowed: uint8"),
        ({"x": X[:, 0]}, "x is uint8 [6]; allowed: [n, features], [n, h, w], [n, channels, h, w]"),
        ({"x": np.uint8(3)}, "x is uint8 []; allowed: [n, features]"),
        ({"x": X.reshape(6, 1, 1, 1, 3)}, "x is uint8 [6, 1, 1, 1, 3]; allowed: [n, features]"),
        (
            {"x": X[:0], "y": Y[:0]},
            (
                "x is uint8 [0, 3]; allowed: [n, features], [n, h, w], [n, channels, h, w] or [n, "
                "h, w, channels], none"
            ),
        ),
        ({"x": X[:, :0]}, "x is uint8 [6, 0]; allowed: [n, features]"),
        ({"y": Y[:5]}, "y is int64 [5]; allowed: whole numbers or text [6], one for each of x"),
        ({"y": Y[:, None]}, "y is int64 [6, 1]; allowed: whole numbers or text [6]"),
        ({"y": Y.astype(float)[:, None, None]}, "y is float64 [6, 1, 1]; allowed: numbers [6, t]"),
        (
            {"y": Y.astype(float)[:5]},
            "y is float64 [5]; allowed: numbers [6, t], a row for each of",
        ),
        ({"y": np.array([0, 1, np.nan, 2, 0, 1])}, "y is nan in row 2; allowed: finite numbers"),
        ({"y": np.array([0, 1, 1e39, 2, 0, 1])}, "y is 1e+39 in row 2; allowed: finite numbers"),
        (
            {"y": np.ones(6)},
            "y is always [1.0]; there is nothing to learn",
        ),
        ({"y": np.full((6, 2), 2)}, "y is int64 [6, 2]; allowed: whole numbers or text [6]"),
        (
            {"y": np.ones(6), "classes": np.array(["a", "b"])},
            "classes is <U1 [2]; allowed: text [1]",
        ),
        ({"y": Y > 0}, "y is bool [6]; allowed: whole numbers or text [6]"),
        ({"y": Y.astype("S1")}, "y is |S1 [6]; allowed: whole numbers or text [6]"),
        ({"y": np.array([0, 1, 2, 2**63, 1, 0], np.uint64)}, "y has 4 different labels in 6"),
        (
            {"classes": np.array(["a", "b"])},
            "classes is <U1 [2]; allowed: text [3], a name for each class of y",
        ),
        ({"classes": np.arange(3)}, "classes is int64 [3]; allowed: text [C]"),
        (
            {"classes": np.array(["a", "b", "a"])},
            "y: classes has to name each class once; not so: a",
        ),
        (
            {"x": X.astype(object)},
            "can't be read as arrays (damaged, too large, with Python objects",
        ),
        (
            {"client": np.array([1, None, 2, 3, 4, 5])},
            "can't be read as arrays (damaged, too large, with Python objects",
        ),
    ],
)
def test_refused_training_arrays(root, changes, message):
    file = write(root, **changes)
    with refuse(f"{file}: ", message):
        load("arrays", root)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_the_first_pixel_that_is_no_number_is_named(root, bad):
    x = np.zeros((6, 3, 4, 5))
    x[3, 1, 2, 4] = x[3, 2, 0, 0] = x[5, 0, 0, 0] = bad
    file = write(root, x=x)
    with refuse(f"{file}: x[3, 1, 2, 4] = ", "is refused; allowed: finite numbers of float32"):
        load("arrays", root)


FLOATS = np.linspace(0, 1, 24).reshape(12, 2)
ENDS = np.arange(12) % 2
MASK = np.arange(24).reshape(12, 2) == 7  # row 3, column 1


class Quantity(np.ndarray):
    """As arrays with units are."""


class Marked(torch.Tensor):
    """A tensor of somebody's own kind."""


class Measured:
    """As pint's quantities are: no array, but it gives one."""

    units = "mmHg"

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return FLOATS


NO_VALUE = "is masked, so it has no value; allowed: fill or remove it"
MEANING = "with units or another meaning; allowed: its numbers alone"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ma.array(FLOATS, mask=MASK)}, f"x[3, 1] {NO_VALUE}"),
        ({"x": {"a": np.ma.array(FLOATS, mask=MASK)}}, f"x.a[3, 1] {NO_VALUE}"),
        (
            {"x": [np.ma.array(row, mask=mask) for row, mask in zip(FLOATS, MASK, strict=True)]},
            f"x[3][1] {NO_VALUE}",
        ),
        ({"y": np.ma.array(ENDS, mask=MASK[:, 1])}, f"y[3] {NO_VALUE}"),
        ({"y": np.ma.array(ENDS.astype(str), mask=MASK[:, 1])}, f"y[3] {NO_VALUE}"),
        ({"owner": np.ma.array(ENDS, mask=MASK[:, 1])}, f"owner[3] {NO_VALUE}"),
        (
            {"owner": np.where(MASK[:, 1], " ", "a")},
            "owner[3] is empty; every sample needs an owner",
        ),
        ({"x": FLOATS.view(Quantity)}, f"x is a Quantity, {MEANING}"),
        ({"x": Measured()}, f"x is a Measured, {MEANING}"),
        ({"x": torch.tensor(FLOATS).as_subclass(Marked)}, f"x is a Marked, {MEANING}"),
        ({"x": torch.tensor(FLOATS).to("meta")}, "x is no array: Cannot copy out of meta tensor"),
        (
            {"x": torch.quantize_per_tensor(torch.tensor(FLOATS).float(), 0.1, 0, torch.qint8)},
            "x is no array: ",
        ),
        ({"x": torch.complex(*torch.tensor(FLOATS).repeat(2, 1, 1)).conj()}, "x is complex128"),
        ({"x": np.ma.zeros(12, [("a", float), ("b", float)])}, "allowed: uint8"),
    ],
)
def test_what_numbers_alone_cannot_say_is_refused(arrays, message):
    with refuse(message):
        of_named({"x": FLOATS, "y": ENDS, **arrays})


@pytest.mark.parametrize(
    "same",
    [
        np.ma.array(FLOATS),
        np.rec.array(FLOATS),
        torch.tensor(FLOATS, requires_grad=True),
        [row.requires_grad_() for row in torch.tensor(FLOATS)],
        torch.nn.Parameter(torch.tensor(FLOATS)),
        torch.tensor(FLOATS).to_sparse(),
        torch.complex(*torch.tensor(np.stack([FLOATS, -FLOATS]))).conj().imag,
    ],
)
def test_what_holds_the_same_numbers_is_read(same):
    wanted = of_named({"x": FLOATS, "y": ENDS})
    found = of_named({"x": same, "y": torch.tensor(ENDS)})
    assert torch.equal(found.train_x, wanted.train_x) and torch.equal(found.test_y, wanted.test_y)
