"""A user's own tables and texts: what the readers make of files and of data frames."""

from __future__ import annotations

import gzip
import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.frames import ColumnError, UndecidedError
from fedml_noniid.data.readers.table import of_frame
from fedml_noniid.data.readers.text import of_texts
from fedml_noniid.data.text import GLOVE, PAD, UNKNOWN, WIDTH
from tests.data.reading import refuse
from tests.files import contents

TRAIN = """\
ward,age,sex,pulse,ill
b,40,f,60,yes
b,50,m,70.5,no
a,60,NA,-8e1,None
a,70,f,+90,yes
c,80,m,.5,None
c,90,f,0,no
"""
TEST = """\
age,ill,sex,pulse,ward
45,no,x,61,b
40,yes,f,60,d
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    return tmp_path


OPTIONS: dict[str, Any] = {"file": "train.csv", "label": "ill", "owner": "ward", "one_hot": ["sex"]}
BOTH = OPTIONS | {"test_file": "test.csv"}


def test_a_table_of_two_files(root: Path) -> None:
    """The test file has its columns in another order, a category and an owner that training
    lacks."""
    before = contents(root)
    found = load("table", root, **BOTH)
    assert found.classes == ("None", "no", "yes")  # text, sorted; None is a name
    assert found.train_x.tolist() == [
        [40, 0, 1, 0, 60],
        [50, 0, 0, 1, 70.5],
        [60, 1, 0, 0, -80],
        [70, 0, 1, 0, 90],
        [80, 0, 0, 1, 0.5],
        [90, 0, 1, 0, 0],
    ]
    assert found.test_x.tolist() == [[45, 0, 0, 0, 61], [40, 0, 1, 0, 60]]
    assert found.train_x.dtype == torch.float32 and found.unit == 1
    assert found.train_y.tolist() == [2, 1, 0, 2, 0, 1] and found.test_y.tolist() == [1, 2]
    assert found.train_owner is not None and found.train_owner.tolist() == [1, 1, 0, 0, 2, 2]
    assert found.test_owner is not None and found.test_owner.tolist() == [1, 3]
    assert list(found.notes) == [
        "5 features, in this order: age, sex=NA, sex=f, sex=m, pulse",
        "classes without a test sample: None",
        "2 of 4 owners have no test sample: a client of only these has no test accuracy of its own",
        "1 of 4 owners have no training sample: their test samples belong to no client",
        "column 'age' has another whole number in every row; leave out an identifier",
        "column 'sex': 1 test samples have categories that training lacks: x",
        "1 of 2 test samples are equal to a training sample",
    ]
    assert contents(root) == before


def test_formats_are_the_same(root: Path) -> None:
    """A byte order mark, a blank line, quotes and other ends of lines, too."""
    pytest.importorskip("pyarrow", reason="parquet needs [pipeline]")
    frame = pd.read_csv(root / "train.csv", keep_default_na=False)
    frame.to_csv(root / "other.csv.gz", index=False)
    frame.to_parquet(root / "other.parquet", index=False)
    text = TRAIN.replace("b,50,m", '\n"b",50,"m"').replace("\n", "\r\n")
    (root / "other.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = load("table", root, **BOTH).checksum
    for ending in (".csv", ".csv.gz", ".parquet"):
        assert load("table", root, **BOTH | {"file": f"other{ending}"}).checksum == expected
    test = pd.read_csv(root / "test.csv")
    options = {key: value for key, value in OPTIONS.items() if key != "file"}
    assert Dataset.from_raw("table", of_frame(frame, test, **options)).checksum == expected
    chosen = {"features": ["pulse", "sex"], "one_hot": ["sex", "ward"], "owner": None}
    names = "features, in this order: pulse, sex=NA, sex=f, sex=m, ward=a, ward=b, ward=c"
    assert load("table", root, **BOTH | chosen).notes[0] == f"7 {names}"


def test_a_constant_column_does_not_blow_up_other_values() -> None:
    """0.1 as float32 has a mean that rounds to another number, so its computed deviation isn't
    0."""
    n = 49
    frame = pd.DataFrame({"same": np.full(n, 0.1), "x": np.arange(n) % 7, "y": np.arange(n) % 2})
    data = Dataset.from_raw("mine", of_frame(frame, frame.assign(same=0.2), label="y"))
    assert data.std[0] == 1 and data.normalised("test")[:, 0].max().item() == pytest.approx(0.1)
    assert "features that are constant in the training rows: same" in data.notes


def kinds(n: int = 60) -> pd.DataFrame:
    """A frame with the types of columns that pandas has."""
    i = np.arange(n)
    return pd.DataFrame(
        {
            "float": i / 7,
            "int": i % 5,
            "bool": i % 3 == 0,
            "nullable": pd.array(i % 4, dtype="Int64"),
            "text": [f" {v}.5 " for v in i],
            "category": pd.Categorical((i % 3).astype(str)),
            "y": i % 2,
        },
        index=i[::-1] * 10,
    )


def test_types_of_columns() -> None:
    frame = kinds()
    found = of_frame(frame, frame, label="y")
    wanted = np.stack(
        [
            np.arange(60) / 7,
            np.arange(60) % 5,
            np.arange(60) % 3 == 0,
            np.arange(60) % 4,
            np.arange(60) + 0.5,
            np.arange(60) % 3,
        ],
        axis=1,
    )
    assert np.array_equal(found.train_x.numpy(), wanted.astype(np.float32))
    assert of_frame(
        frame.rename(columns={"int": 7}), frame.rename(columns={"int": 7}), label="y"
    ).classes == ["0", "1"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 2], ["2", "9", "10"]),
        ([1.0, 0.0, 10.0], ["0", "1", "10"]),
        ([True, False, True], ["False", "True"]),
        (["b", "a", "10"], ["10", "a", "b"]),
        (["-1", "1", "0"], ["-1", "0", "1"]),
        (pd.Categorical(["x", "nan", "None"]), ["None", "nan", "x"]),
        (pd.array(["x", "NA", "y"], dtype="string"), ["NA", "x", "y"]),
    ],
)
def test_labels_are_names(labels: Any, names: list[str]) -> None:
    frame = pd.DataFrame({"x": np.arange(12) / 3, "y": pd.Series(labels).repeat(4).to_numpy()})
    assert of_frame(frame, frame, label="y").classes == names


# The cut of a test set

label_lists = st.lists(st.integers(0, 4), min_size=2, max_size=200)


@settings(deadline=None, max_examples=60)
@given(labels=label_lists, fraction=st.floats(0.01, 0.99), n_owners=st.integers(0, 12))
def test_cut(labels: list[int], fraction: float, n_owners: int) -> None:
    y = np.array(labels)
    owners = np.arange(len(y)) * 7 % 31 % n_owners if n_owners else None
    owner = np.zeros(len(y), int) if owners is None else owners
    if not ((np.bincount(y)[y] > 1) & (np.bincount(owner)[owner] > 1)).any():
        with refuse(f"mine: {len(y)} samples are too few to cut a test set from", "add a test set"):
            user_data.cut(y, owners, fraction, "mine")
        return
    train, test, _ = user_data.cut(y, owners, fraction, "mine")
    assert sorted([*train, *test]) == list(range(len(y))) and len(test)
    assert (np.diff(train) > 0).all() and (np.diff(test) > 0).all()
    assert set(y[train]) == set(y)
    if owners is None:
        shares = fraction * np.bincount(y)
        drawn = np.bincount(y[test], minlength=len(shares))
        assert (np.abs(drawn - shares) <= 2).all() and abs(
            len(test) - fraction * len(y)
        ) <= 1 + len(shares)
    assert np.array_equal(user_data.cut(y, owners, fraction, "mine")[1], test)


def test_every_owner_is_tested_and_trains() -> None:
    owners = np.repeat([0, 1, 2, 3], [100, 10, 2, 1])
    y = np.arange(113) % 2
    train, test, notes = user_data.cut(y, owners, 0.2, "mine")
    assert np.bincount(owners[test], minlength=4).tolist() == [20, 2, 1, 0]
    assert abs(int(y[test][:20].sum()) - 10) <= 1  # stratified within the owner
    assert notes == "test set: 23 of 113 samples, drawn by owner and label with a fixed seed"
    assert np.bincount(owners[train]).tolist() == [80, 8, 1, 1]


# Text

TEXTS = [
    ("a good day", "+", "ann"),
    ("a bad day", "-", "bob"),
    ("good good", "+", "bob"),
    ("bad!", "-", "ann"),
]


def texts(times: int = 1) -> pd.DataFrame:
    return pd.DataFrame(TEXTS * times, columns=["said", "mood", "who"])


def test_texts(tmp_path: Path) -> None:
    """Training counts good 3, a, bad and day 2, ! 1; four words fit beside the special ones."""
    texts().to_csv(tmp_path / "said.csv", index=False)
    pd.DataFrame([("so good a day", "+", "ann")], columns=["said", "mood", "who"]).to_csv(
        tmp_path / "t.csv", index=False
    )
    options = {
        "file": "said.csv",
        "text": "said",
        "label": "mood",
        "owner": "who",
        "vocabulary": 6,
        "length": 3,
    }
    found = load("text", tmp_path, **options, test_file="t.csv")
    good, a, bad, day = 2, 3, 4, 5
    assert found.train_x.tolist() == [
        [a, good, day],
        [a, bad, day],
        [good, good, PAD],
        [bad, UNKNOWN, PAD],
    ]
    assert found.test_x.tolist() == [[UNKNOWN, good, a]]
    assert found.train_x.dtype == torch.int32 and found.mean == () and found.classes == ("+", "-")
    assert found.embedding is not None and found.embedding.shape == (6, WIDTH)
    assert found.train_owner is not None and found.train_owner.tolist() == [0, 1, 1, 0]
    assert "1 of 5 texts cut to 3 tokens" in found.notes and any(
        "drawn at random" in note for note in found.notes
    )
    (tmp_path / GLOVE).write_text("good" + " 0.5" * WIDTH + "\nbad" + " -0.5" * WIDTH + "\n")
    found = load("text", tmp_path, **options, test_file="t.csv")
    assert found.embedding is not None and found.embedding[good].tolist() == [0.5] * WIDTH
    assert f"word vectors: {GLOVE}, 2 of 4 words found, the others drawn at random" in found.notes


@pytest.mark.parametrize(
    ("read", "rest"),
    [
        (partial(of_texts, text="said", label="mood"), ""),
        (partial(of_frame, label="said", one_hot=["mood"]), " (`missing`)"),
    ],
)
def test_only_options_that_there_are_and_that_help_are_advised(
    read: Callable[..., object], rest: str
) -> None:
    """A table's label can't be dropped; data set `text` has neither `missing` nor `drop`."""
    frame = pd.DataFrame({"said": ["a"] + [None] * 5, "mood": ["+", "-"] * 3})
    wanted = "frame: column 'said' has no value in 5 rows, first in row 2; allowed: fill or remove"
    with pytest.raises(UserError) as found:
        read(frame)
    error: UserError = found.value
    assert str(error) == f"{wanted} them{rest}"
    assert str(error.below("data", source="params.yaml")) == f"params.yaml: data: {error}"


class Milligrams:
    """As pint's quantities are."""

    units = "mg"

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: of_frame([1, 2], label="y"), "frame is a list; allowed: a pandas.DataFrame"),  # type: ignore[arg-type]  # that is the mistake
        (
            lambda: of_frame(kinds(), kinds().to_numpy(), label="y"),
            "test is a ndarray; allowed: a pandas.DataFrame",
        ),
        (
            lambda: of_frame(kinds(), label="z"),
            "frame: label: column 'z' is unknown; allowed: float, int",
        ),
        *[
            (partial(of_frame, kinds(), label="y", **options), words)
            for options, words in (
                ({"drop": ["y"]}, "columns that are not in `label`"),
                ({"drop": ["int"], "features": ["int"]}, "features = 'int' is refused"),
                ({"drop": ["z"]}, "drop: column 'z' is unknown"),
                ({"missing": "mean"}, "missing = 'mean' is unknown (did you mean 'median'?)"),
            )
        ],
        (
            lambda: of_frame(kinds().assign(int=None), label="y"),
            "column 'int' has no value in 60 rows, first in row 1",
        ),
        (
            lambda: of_frame(kinds().assign(int=pd.Timestamp(0)), label="y"),
            "column 'int' is Timestamp(",
        ),
        (
            lambda: of_frame(kinds().assign(int=1j), label="y"),
            "column 'int' is 1j in row 1; allowed: numbers",
        ),
        (
            lambda: of_frame(kinds().assign(int=[[1]] * 60), label="y"),
            "column 'int' is [1] in row 1; allowed: numbers",
        ),
        (
            lambda: of_frame(kinds().assign(y=[(1,), (2,)] * 30), label="y"),
            "column 'y' is (1,) in row 1; allowed:",
        ),
        (
            lambda: of_frame(kinds().assign(y=[(1,), (2,)] * 30), label="y", missing="mode"),
            "column 'y' is (1,) in row 1; allowed:",
        ),
        (
            lambda: of_frame(kinds().assign(y=pd.NA), label="y"),
            "column 'y' has no value in 60 rows, first in row 1",
        ),
        *[
            (partial(of_frame, kinds().assign(int=[cell] * 60), label="y"), "in row 1; allowed: n")
            for cell in (np.complex64(1 + 2j), Milligrams())
        ],
        (
            partial(of_frame, kinds().assign(text="<6"), label="y", na=["<7"], missing="median"),
            "na = '<7' is refused; allowed: texts of cells of frame",
        ),
        (
            partial(of_frame, kinds().assign(text=["<6", *"5" * 59]), label="y", na=["<6"]),
            "column 'text' has no value in row 1; allowed: fill or remove them (`missing`)",
        ),
        (
            lambda: of_texts(texts(), text="said", label="mood", length=0),
            "length = 0 is refused",
        ),
        (
            lambda: of_texts(texts(), text="said", label="said"),
            "label = 'said' is refused; allowed: columns that are not in `text`",
        ),
    ],
)
def test_refused_in_memory(call: Callable[[], object], message: str) -> None:
    with refuse(message):
        call()


HOLES = pd.DataFrame(
    {
        "x": [1.0, 3.0, np.nan, 3.0, 8.0, 9.0, np.nan, 2.0],
        "kind": ["b", "a", "b", "", "a", "b", "a", " "],
        "site": ["n", "n", "s", "s", "n", None, "s", "n"],
        "y": ["u", "v", "u", "v", "u", "v", "u", ""],
    }
)
FULL = pd.DataFrame({"x": [np.nan, 100.0], "kind": ["", "a"], "site": ["n", "s"], "y": ["u", "v"]})


# Rows 6 (no owner) and 8 (no label) go in any case. Of the others x is 1, 3, -, 3, 8, - and kind b,
# a, b, -, a, a. The table comes twice. The test rows' 100 counts for nothing.
@pytest.mark.parametrize(
    ("missing", "x", "kind"),
    [
        ("median", [1, 3, 3, 3, 8, 3], "babaaa"),
        ("mode", [1, 3, 3, 3, 8, 3], "babaaa"),
        ("category", [1, 3, 3, 3, 8, 3], "bab aa"),
        ("drop", [1, 3, 8], "baa"),
    ],
)
def test_missing_values_are_filled_by_the_training_rows_alone(
    missing: str, x: list[int], kind: str
) -> None:
    options = {"label": "y", "owner": "site", "one_hot": ["kind"], "missing": missing}
    raw = of_frame(pd.concat([HOLES, HOLES]), FULL, **options)
    names = [" ", "a", "b"] if missing == "category" else ["a", "b"]
    rows = [[value, *(text == name for name in names)] for value, text in zip(x, kind, strict=True)]
    assert raw.train_x.tolist() == rows * 2
    fill, mode = [3, *[float(name == names[0]) for name in names]], [name == "a" for name in names]
    assert raw.test_x.tolist() == ([] if missing == "drop" else [fill]) + [[100, *mode]]
    notes = "\n".join(raw.notes)
    assert f"frame: {16 - 2 * len(x)} of 16 rows are left out" in notes
    said = {"category": "'kind': 3 cells without a value are a category", "drop": "left out"}
    assert said.get(missing, "'kind': 3 cells without a value are filled with the") in notes
    filled = "'x': 5 cells without a value are filled with the .* of all clients together, 3"
    assert missing == "drop" or re.search(filled, notes), "an honest report says that"
    rows = pd.DataFrame({"x": [100.0], "kind": ["a"]})
    assert raw.encode is not None and raw.encode(rows).tolist() == [[100, *mode]]


def test_columns_that_need_a_decision_are_named_at_once() -> None:
    """Each with the option that helps; the label comes first."""
    n = 120
    frame = pd.DataFrame(
        {
            "id": [f"p{i}" for i in range(n)],
            "sex": ["f", "m"] * 60,
            "blood": ["A", None, "B"] * 40,
            "on": pd.date_range("2024-01-01", periods=n).strftime("%d.%m.%Y"),
            "at": pd.date_range("2024", periods=n),
            "lab": ["<5", *["6.5"] * (n - 1)],
            "age": [None, *range(n - 1)],
            "void": [1.0] + [None] * (n - 1),
            "ok": range(n),
            "price": np.linspace(0.5, 7, n),
            "y": [0, 1] * 60,
        }
    )
    with pytest.raises(UndecidedError) as found:
        of_frame(frame.drop(columns="price"), label="y")
    decided = [
        (one.column, one.option) for one in found.value.errors if isinstance(one, ColumnError)
    ]
    assert decided == [
        ("id", "drop"),
        ("sex", "one_hot"),
        ("blood", "one_hot"),
        ("on", "drop"),
        ("at", "drop"),
        ("lab", "na"),
        ("age", "missing"),
        ("void", "drop"),
        ("blood", "missing"),
    ]
    lines = str(found.value).splitlines()
    assert (
        "numbers; dates: leave" in lines[3]
        and "Timestamp" in lines[4]
        and "correct the others" in lines[5]
    )


@pytest.mark.parametrize(
    ("pattern", "other", "message"),
    [
        ("3,3,1", "3,3,1\0", "can't be read as CSV (it has a NUL byte); needed: UTF-8"),
        ("a,b", "a,b\0", "can't be read as CSV (it has a NUL byte); needed: UTF-8"),
        # pandas or Python alone take these for numbers.
        (r"(\d)\n", r"\1,\n", "can't be read as CSV ("),
        (r"\n\d+,", r"\nTrue,", "column 'a' is 'True' in row 1; allowed: numbers"),
        (r"\n1,", r"\n1_0,", "column 'a' is '1_0' in row 2; allowed: numbers"),
    ],
)
def test_a_csv_that_is_refused(tmp_path: Path, pattern: str, other: str, message: str) -> None:
    text = "a,b,y\n" + "".join(f"{i},{i % 5},{i % 2}\n" for i in range(40))
    wrong = re.sub(pattern, other, text).encode()
    for name, content in {"t.csv": wrong, "t.csv.gz": gzip.compress(wrong)}.items():
        (tmp_path / name).write_bytes(content)
        with refuse(f"{name}: {message}"):
            load("table", tmp_path, file=name, label="y")


def test_numbers_of_a_csv_have_the_bits_of_python(tmp_path: Path) -> None:
    """With and without a cell that pandas does not take for a number; x needs float64."""
    x = (1.7e9 + np.random.default_rng(0).normal(size=300)).tolist()
    for more in ([], ["5\u00a0"]):
        rows = list(zip(x, itertools.cycle(["-0", " 7", "+5", "1E5", "001", ".5", *more])))
        text = "".join(f"{one!r},{cell},{i % 2}\n" for i, (one, cell) in enumerate(rows))
        (tmp_path / "t.csv").write_text(f"x,z,y\n{text}")
        found = load("table", tmp_path, file="t.csv", label="y")
        read = [*found.train_x.tolist(), *found.test_x.tolist()]
        assert sorted(map(str, read)) == sorted(str([one, float(cell)]) for one, cell in rows)


def test_names_that_look_alike_get_a_note() -> None:
    n = np.arange(60)
    rows = {"sex": np.choose(n % 3, ["F", "f", "m"]), "Sex": n % 5, "y": n // 3 % 2}
    rows["ward"] = np.choose(n // 4 % 3, ["North", "north ", "South"])
    notes = nd.from_frame(pd.DataFrame(rows), label="y", owner="ward", one_hot=["sex"]).notes
    for what, names in (
        ("owners", "'North', 'north '"),
        ("column 'sex': categories", "'F', 'f'"),
        ("columns", "'sex', 'Sex'"),
    ):
        assert f"{what} that differ only in blanks or case: {names}" in notes
