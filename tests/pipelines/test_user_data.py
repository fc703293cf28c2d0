"""Stage prepare with a user's own files: it writes what they hold, and nothing where they are
bad."""

from __future__ import annotations

import gzip
import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.text import GLOVE
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stage
from fedml_noniid.pipelines.stages import prepare
from tests.data.reading import draw
from tests.files import contents
from tests.pipelines.small import PARAMS, run_stages


def set_data(folder: Path, line: str) -> None:
    old = next(line for line in PARAMS.splitlines() if line.startswith("data: "))
    (folder / "params.yaml").write_text(PARAMS.replace(old, f"data: {line}"))


# Mistakes: one clear line each, and nothing is written.

TABLE = """\
hospital,age,pulse,sex,diagnosis
north,40,60.5,f,ill
north,50,70.5,m,well
south,60,80.5,f,ill
south,70,90.5,m,well
north,80,65.5,f,ill
south,90,75.5,m,well
"""


def table(
    name: str = "a.csv", old: str = "", new: str = "", **more: str
) -> Callable[[Path], object]:
    """Writes TABLE, with one piece of it replaced; `more`: the content of further files, `b_csv`
    for b.csv."""
    assert old in TABLE

    def write(folder: Path) -> None:
        for file, content in {name: TABLE.replace(old, new, 1), **more}.items():
            (folder / file.replace("_", ".")).write_bytes(content.encode())

    return write


def raw(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def parquet(**changed: object) -> Callable[[Path], object]:
    frame = pd.read_csv(io.StringIO(TABLE)).assign(**changed)
    return lambda folder: frame.to_parquet(folder / "a.parquet")


def twice_in_parquet(folder: Path) -> None:
    columns = [
        pyarrow.array([1.0, 2.0, 3.0, 4.0]),
        pyarrow.array([3.0, 4.0, 5.0, 6.0]),
        pyarrow.array(list("uvuv")),
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays(columns, ["x", "x", "diagnosis"]), folder / "a.parquet"
    )


def images(*more: tuple[str, str]) -> Callable[[Path], object]:
    """Two classes of two images in both parts, and `more` = (file, colour mode)."""

    def write(folder: Path) -> None:
        for part in ("train", "test"):
            for label in ("cat", "dog"):
                for i in range(2):
                    draw(folder / part / label / f"{i}.png")
        for name, mode in more:
            (folder / name).parent.mkdir(exist_ok=True)
            Image.new(mode, (6, 5)).save(folder / name)

    return write


def halved(make: Callable[[Path], object], name: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        make(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return write


def nothing(folder: Path) -> None:
    pass


CSV = "name: table, file: a.csv, label: diagnosis, features: [age, pulse]"
ALL = "name: table, file: a.csv, label: diagnosis, owner: hospital, one_hot: [sex]"
PARQUET = "name: table, file: a.parquet, label: diagnosis"
WITH_TEST = f"{CSV}, test_file: b.csv"
TEXT = "name: text, file: a.csv, text: said, label: mood"
SAID = b"said,mood\nhi,b\nho,c\nhe,b\nha,c\n"
FOLDER, ARRAYS = "name: image_folder", "name: arrays"
# What was done wrong -> (the section `data`, the files, the facts that the message has to name).
MISTAKES: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    # A table: files
    "no file named": ("name: table, label: y", nothing, ("params.yaml: data.file is missing",)),
    "no label named": (
        "name: table, file: a.csv",
        table(),
        ("label is missing", "allowed: the column of the class, or `target`"),
    ),
    "an option that isn't": (
        f"{CSV}, owners: hospital",
        nothing,
        ("data.owners is unknown", "did you mean 'owner'", "test_share"),
    ),
    "no such file": (
        CSV.replace("a.csv", "b.csv"),
        table(),
        ("mine/b.csv: there is no such file; file is relative", "a.csv"),
    ),
    "no such test file": (WITH_TEST, table(), ("mine/b.csv", "test_file is relative to root")),
    "another format": (
        CSV.replace("a.csv", "a.xls"),
        table(),
        ("file = 'a.xls'", ".csv, .csv.gz, .parquet, .xlsx"),
    ),
    "an empty file": (
        CSV,
        raw("a.csv", b""),
        ("a.csv: can't be read as CSV", "the names of the columns"),
    ),
    "names and no rows": (
        CSV,
        table(old=TABLE[TABLE.index("north") :], new=""),
        ("a.csv: has no rows",),
    ),
    "a line that is too long": (
        CSV,
        table(old="50,70.5", new="50,7,5"),
        ("a.csv", "Expected 5 fields in line 3, saw 6"),
    ),
    "a line that is too short": (
        ALL,
        table(old="f,ill", new="f"),
        ("a.csv: column 'diagnosis'", "row 1"),
    ),
    "a quote that isn't closed": (
        CSV,
        table(old="north,50", new='"north,50'),
        ("a.csv: can't be read as CSV", "row 2"),
    ),
    "semicolons, and another separator named": (
        f"{CSV}, separator: '|'",
        raw("a.csv", TABLE.replace(",", ";").encode()),
        ("separated by ';', not '|'",),
    ),
    "latin-1": (
        CSV,
        raw("a.csv", TABLE.replace("ill", "krank ä").encode("latin-1")),
        ("a.csv: can't be read as CSV", "its `encoding` may be cp1252", "UTF-8"),
    ),
    "semicolons and marks of thousands": (
        CSV,
        raw("a.csv", TABLE.replace(",", ";").replace("60.5", "1.234,5").encode()),
        ("a.csv: column 'pulse' is '1.234,5' in row 1", "thousands"),
    ),
    "UTF-16": (
        CSV,
        raw("a.csv", TABLE.encode("utf-16")),
        ("a.csv: is UTF-16; set `encoding` to utf-16",),
    ),
    "a workbook called CSV": (
        CSV,
        lambda f: zipfile.ZipFile(f / "a.csv", "w").writestr("sheet1.xml", bytes(range(256))),
        ("a.csv: ",),
    ),
    "the file as root": (
        CSV,
        lambda f: (f.rmdir(), f.write_text(TABLE)),
        ("mine/a.csv: there is no such file",),
    ),
    "a folder called CSV": (
        CSV,
        lambda f: (f / "a.csv").mkdir(),
        ("a.csv: there is no such file", "there is none"),
    ),
    "gzip cut off": (
        CSV.replace("a.csv", "a.csv.gz"),
        raw("a.csv.gz", gzip.compress(TABLE.encode() * 50)[:-20]),
        ("a.csv.gz: can't be read as CSV",),
    ),
    "parquet cut off": (
        PARQUET,
        halved(parquet(), "a.parquet"),
        ("a.parquet: can't be read as parquet",),
    ),
    "CSV called parquet": (PARQUET, table("a.parquet"), ("a.parquet: can't be read as parquet",)),
    # A table: columns
    "a label that isn't a column": (
        CSV.replace("label: diagnosis", "label: diagnose"),
        table(),
        ("a.csv: label: column 'diagnose' is unknown (did you mean 'diagnosis'?)", "hospital, age"),
    ),
    "an owner that isn't a column": (
        f"{CSV}, owner: hospitals",
        table(),
        ("owner", "did you mean 'hospital'"),
    ),
    "a feature that isn't a column": (
        CSV.replace("pulse", "puls"),
        table(),
        ("a.csv: features: column 'puls'", "did you mean 'pulse'"),
    ),
    "a feature that the test file lacks": (
        WITH_TEST,
        table(b_csv="age,diagnosis\n40,ill\n"),
        ("b.csv: column 'pulse' is unknown", "age, diagnosis"),
    ),
    "features that are no list": (
        CSV.replace("[age, pulse]", "age"),
        table(),
        ("params.yaml: data.features = 'age'", "a list"),
    ),
    "a number as label": (
        CSV.replace("label: diagnosis", "label: 4"),
        table(),
        ("params.yaml: data.label = 4", "allowed: text"),
    ),
    "categories that aren't a column": (
        f"{CSV}, one_hot: [sexes]",
        table(),
        ("one_hot", "did you mean 'sex'"),
    ),
    "no line of names": (
        CSV,
        table(old=TABLE[: TABLE.index("north")], new=""),
        ("a.csv: label: column 'diagnosis' is unknown", "north"),
    ),
    "a feature twice": (
        CSV.replace("pulse]", "age]"),
        table(),
        ("features = 'age'", "each column once"),
    ),
    "the label as a feature": (
        CSV.replace("pulse]", "diagnosis]"),
        table(),
        ("features = 'diagnosis'", "not in `label`"),
    ),
    "the owner as the label": (
        f"{CSV}, owner: diagnosis",
        table(),
        ("owner = 'diagnosis'", "not in `label`"),
    ),
    "two columns of one name": (
        CSV,
        table(old="age", new="pulse"),
        ("a.csv: column 'pulse' is there twice",),
    ),
    "two columns of one name in parquet": (
        PARQUET,
        twice_in_parquet,
        ("a.parquet: can't be read as parquet", "x"),
    ),
    "a column without a name": (
        CSV,
        table(old="sex", new=""),
        ("a.csv: column 4 of 5 is called ''", "index=False"),
    ),
    "a name of two lines": (
        CSV,
        table(old="sex", new='"se\nx"'),
        ("a.csv: column 4 of 5 is called 'se\\nx'", "one line"),
    ),
    "no column left": (
        "name: table, file: a.csv, label: y",
        raw("a.csv", b"y\n1\n2\n1\n2\n"),
        ("a.csv: no column is left", "used: y"),
    ),
    # A table: values
    "words among numbers": (
        CSV,
        table(old="90.5", new="high"),
        ("a.csv: column 'pulse' is 'high' in row 4", "correct the others"),
    ),
    "categories that aren't named": (
        ALL.replace(", one_hot: [sex]", ""),
        table(),
        ("a.csv: column 'sex' is 'f' in row 1", "one_hot", "drop"),
    ),
    "a decimal comma": (
        CSV,
        table(old="70.5", new='"70,5"'),
        ("a.csv: column 'pulse' is '70,5' in row 2; allowed: num",),
    ),
    "a date": (
        PARQUET,
        parquet(hospital=1, sex=1, age=pd.Timestamp(2020, 1, 1)),
        ("a.parquet: column 'age' is Timestamp(", "numbers"),
    ),
    "an empty cell": (
        CSV,
        table(old="60.5", new=""),
        ("a.csv: column 'pulse' has no value in row 1", "fill or remove"),
    ),
    "several missing numbers": (
        CSV,
        raw("a.csv", TABLE.replace("70.5", "NA").replace("80.5", "nan").encode()),
        ("a.csv: column 'pulse' has no value in 2 rows, first in row 2",),
    ),
    "missing numbers in parquet": (
        PARQUET,
        parquet(hospital=1, sex=1, age=[1, None, 3, 4, 5, 6]),
        ("column 'age' has no value in row 2",),
    ),
    "lists in parquet": (
        PARQUET,
        parquet(hospital=1, sex=1, age=[[1, 2]] * 6),
        ("column 'age' is ", "in row 1; allowed: numbers"),
    ),
    "missing labels in parquet": (
        PARQUET,
        parquet(hospital=1, sex=1, diagnosis=["ill", None, "well", "ill", "well", None]),
        ("a.parquet: column 'diagnosis' has no value in 2 rows, first in row 2",),
    ),
    "fractions as labels in parquet": (
        PARQUET.replace("label: diagnosis", "label: pulse"),
        parquet(hospital=1, sex=1, diagnosis=1),
        (
            "a.parquet: column 'pulse' is '60.5' in row 1, a measurement",
            "with 6 different",
            "regression target",
        ),
    ),
    "a size of a table": (f"{CSV}, size: [8, 8]", table(), ("size = [8, 8]", "no 8-bit images")),
    "an infinite number": (
        CSV,
        table(old="80.5", new="-inf"),
        ("column 'pulse' in row 3 = -inf", "finite numbers of fl"),
    ),
    "a number beyond float32": (
        CSV,
        table(old="80.5", new="1e39"),
        ("column 'pulse' in row 3 = 1e+39", "finite"),
    ),
    "a missing label": (
        CSV,
        table(old="m,well", new="m,"),
        ("a.csv: column 'diagnosis' has no value in row 2",),
    ),
    "a missing owner": (
        ALL,
        table(old="north,80", new=" ,80"),
        ("a.csv: column 'hospital' has no value in row 5",),
    ),
    "one class": (
        CSV,
        raw("a.csv", TABLE.replace("well", "ill").encode()),
        ("'diagnosis' is always 'ill'", "2 classes"),
    ),
    "a measurement as label": (
        "name: table, file: a.csv, label: pulse, features: [age]",
        table(),
        ("a.csv: column 'pulse' is '60.5' in row 1, a measurement", "whole numbers or text"),
    ),
    "an identifier as label": (
        "name: table, file: a.csv, label: age, features: [pulse]",
        table(),
        ("a.csv: column 'age' has 6 different labels in 6 samples", "identifier"),
    ),
    "a label in the test file only": (
        WITH_TEST,
        table(b_csv="age,pulse,diagnosis\n1,2,well\n3,4,Ill\n"),
        ("b.csv: column 'diagnosis' is 'Ill' in row 2", "did you mean 'ill'", "allowed: ill, well"),
    ),
    "constant features": (
        CSV.replace("[age, pulse]", "[age]"),
        raw("a.csv", b"age,diagnosis\n" + b"7,a\n7,b\n" * 5),
        ("a.csv: every feature is constant in the training rows: age",),
    ),
    "too many categories": (
        "name: table, file: a.csv, label: y, one_hot: [x]",
        raw("a.csv", b"x,y\n" + b"".join(b"c%d,%d\n" % (i, i % 2) for i in range(1500))),
        ("a.csv: column 'x' has 1200 categories; allowed: at most 1000",),
    ),
    # A table: the test set
    "a share of 1": (
        f"{CSV}, test_share: 1.0",
        table(),
        ("test_share = 1.0", "a number between 0 and 1"),
    ),
    "a share and a test file": (
        f"{WITH_TEST}, test_share: 0.2",
        table(b_csv=TABLE),
        ("test_share = 0.2", "b.csv is the test set"),
    ),
    "the test file is the training file": (
        f"{CSV}, test_file: a.csv",
        table(),
        ("test_file = 'a.csv'", "another file"),
    ),
    "owners of one row": (
        CSV + ", owner: hospital",
        raw(
            "a.csv",
            b"hospital,age,pulse,diagnosis\n"
            + b"".join(b"h%d,1,%d,%d\n" % (i, i, i % 2) for i in range(6)),
        ),
        ("a.csv: 6 samples are too few to cut a test set from", "no owner has two"),
    ),
    # Text
    "no text column": (
        TEXT.replace("said", "sayd"),
        raw("a.csv", b"said,mood\na,b\n"),
        ("'sayd'", "mean 'said'"),
    ),
    "an empty text": (
        TEXT,
        raw("a.csv", b"said,mood\nhi,b\nho,c\n ,b\nha,c\n"),
        ("column 'said' has no value in row 3",),
    ),
    "the text as the label": (
        TEXT.replace("mood", "said"),
        raw("a.csv", SAID),
        ("label = 'said'", "not in `text`"),
    ),
    "no text named": (
        TEXT.replace("text: said, ", ""),
        raw("a.csv", SAID),
        ("params.yaml: data.text is missing",),
    ),
    "features of a text": (
        f"{TEXT}, features: [said]",
        raw("a.csv", SAID),
        ("features is unknown", "label"),
    ),
    "no label of a text": (
        TEXT,
        raw("a.csv", SAID + b"hm,\n"),
        ("a.csv: column 'mood' has no value in row 5", "fill or remove"),
    ),
    "commas in texts without quotes": (
        TEXT,
        raw("a.csv", SAID + b"oh, so good,b\n"),
        ("a.csv", "line 6, saw 3"),
    ),
    "texts of no tokens": (f"{TEXT}, length: 0", raw("a.csv", SAID), ("length = 0", "1 to 1000")),
    "damaged word vectors": (
        TEXT,
        lambda f: (raw("a.csv", SAID)(f), (f / GLOVE).write_text("good 1 2\n")),
        (GLOVE, "line 1", "300 numbers"),
    ),
    "a vocabulary of two": (
        f"{TEXT}, vocabulary: 2",
        raw("a.csv", b"said,mood\na,b\n"),
        ("vocabulary = 2", "from 3 to 1000000000"),
    ),
    # Images
    "no training folder": (
        FOLDER,
        nothing,
        ("mine/train: there is no such folder", "train/<class>/*"),
    ),
    "the training folder as root": (
        FOLDER,
        lambda f: [draw(f / c / "0.png") for c in ("cat", "dog")],
        ("mine/train: there is no such folder",),
    ),
    "folders in the folder of a class": (
        FOLDER,
        lambda f: (images()(f), draw(f / "train/cat/old/0.png")),
        ("train/cat/old: can't be read as an image (Is a directory)",),
    ),
    "images of a format that isn't read": (
        FOLDER,
        lambda f: (
            images()(f),
            [p.rename(p.with_suffix(".heic")) for p in (f / "train/cat").iterdir()],
        ),
        ("train/cat: holds no image",),
    ),
    "a page called image": (
        FOLDER,
        lambda f: (images()(f), (f / "test/cat/1.png").write_text("<html>")),
        ("test/cat/1.png: can't be read as an image", "unknown format", "repair or remove"),
    ),
    "a size of one number": (
        f"{FOLDER}, size: 28",
        images(),
        ("params.yaml: data.size = 28 is refused", "a list"),
    ),
    "one class of images": (
        FOLDER,
        lambda f: draw(f / "train/cat/0.png"),
        ("mine/train: holds 1 class folders",),
    ),
    "images without classes": (
        FOLDER,
        images(("train/0.png", "RGB")),
        ("train/0.png: isn't in the folder of a class",),
    ),
    "an empty class": (
        FOLDER,
        lambda f: (images()(f), (f / "train/cow").mkdir(), (f / "test/cow").mkdir()),
        ("train/cow",),
    ),
    "a class of strays": (
        FOLDER,
        lambda f: (
            images()(f),
            *(((f / p).mkdir(), (f / p / "Thumbs.db").touch()) for p in ("train/cow", "test/cow")),
        ),
        ("train/cow: holds no image",),
    ),
    "a class in test only": (
        FOLDER,
        images(("test/cow/0.png", "RGB")),
        ("the same classes", "cow"),
    ),
    "16 bits": (
        FOLDER,
        images(("train/cat/9.png", "I;16")),
        ("cat/9.png: has the colour mode I;16", "grey (8 bits)"),
    ),
    "test images and a share": (
        f"{FOLDER}, test_share: 0.2",
        images(),
        ("test_share = 0.2", "mine/test is the test set"),
    ),
    "images of 32 bits": (
        FOLDER,
        images(("train/cat/9.tiff", "F")),
        ("9.tiff: has the colour mode F",),
    ),
    "a class in train only": (FOLDER, images(("train/cow/0.png", "RGB")), ("the same", "cow")),
    # Arrays
    "no arrays": (ARRAYS, nothing, ("mine/train.npz: there is no such file; needed: ",)),
    "a folder of .npy": (
        ARRAYS,
        lambda f: np.save(f / "train.npy", np.ones(3)),
        ("mine/train.npz: there is no such",),
    ),
    "an array of another name": (
        ARRAYS,
        lambda f: np.savez(f / "train.npz", X=np.ones((4, 2)), y=np.arange(4)),
        ("train.npz: array 'X'", "allowed: x, y"),
    ),
    "an ambiguous layout": (
        ARRAYS,
        lambda f: np.savez(f / "train.npz", x=np.zeros((30, 3, 8, 3), np.uint8), y=np.ones(30)),
        ("train.npz: x is uint8 [30, 3, 8, 3]", "layout: CHW", "HWC"),
    ),
    "a layout that isn't": (
        f"{ARRAYS}, layout: NHWC",
        nothing,
        ("data.layout = 'NHWC' is unknown", "allowed: auto, CHW, HWC"),
    ),
    # Another data set
    "no CINIC-10": ("name: cinic10", nothing, ("CINIC-10.tar.gz", "datashare.ed.ac.uk")),
    "no FEMNIST": ("name: femnist", nothing, ("femnist/train", "preprocess.sh")),
    "no Sentiment140": (
        "name: sent140, users: 3",
        nothing,
        ("sent140", "trainingandtestdata.zip"),
    ),
    "a data set that isn't": ("name: minst", nothing, ("'minst'", "did you mean 'mnist'")),
    "a size of 0": ("name: digits, size: [0, 8]", nothing, ("params.yaml: data.size", "0")),
    "a split of EMNIST that isn't": (
        "name: emnist, split: letter",
        nothing,
        (
            (
                "params.yaml: data.split = 'letter' is unknown (did you mean "
                "'letters'?); allowed: byclass"
            ),
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line_and_nothing_is_written(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, make, facts = MISTAKES[mistake]
    set_data(tmp_path, f"{{{data}, root: mine, validation: 0.1, public: 5}}")
    (tmp_path / "mine").mkdir()
    make(tmp_path / "mine")
    before = contents(tmp_path)
    assert stage.main(["prepare", "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert all(fact in said for fact in facts), said
    assert contents(tmp_path) == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "mine",
        "params.yaml",
    ]


# What the stage plan makes of a user's own files.

KINDS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a table": (CSV, table(), "a.csv"),
    "its test file": (WITH_TEST, table(b_csv=TABLE), "b.csv"),
    "a table in parquet": (f"{PARQUET}, features: [age]", parquet(), "a.parquet"),
    "texts": (TEXT, raw("a.csv", SAID), "a.csv"),
    "word vectors": (TEXT, lambda f: (raw("a.csv", SAID)(f), (f / GLOVE).write_text("hi")), GLOVE),
    "an image": (FOLDER, images(), "test/dog/1.png"),
    "arrays": (
        ARRAYS,
        lambda f: [np.savez(f / f"{part}.npz", x=np.eye(4)) for part in ("train", "test")],
        "test.npz",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_another_plan(kind: str, tmp_path: Path) -> None:
    """Only for the stage prepare, and by the content: not by the time of the file, or the place of
    the experiment."""
    data, make, name = KINDS[kind]

    def planned(folder: Path) -> dict[str, bytes]:
        run_stages(folder, ("plan",))
        return contents(folder / "plan")

    folder = tmp_path / "first"
    folder.mkdir()
    set_data(folder, f"{{{data}, root: mine, validation: 0.1, public: 5}}")
    (folder / "mine").mkdir()
    make(folder / "mine")
    (folder / "mine" / "notes.txt").write_text("not read")
    before = planned(folder)
    shutil.copytree(folder, tmp_path / "second")  # with the time of copying
    (tmp_path / "second" / "mine" / "notes.txt").write_text("and changed")
    assert planned(tmp_path / "second") == before
    for change in (lambda path: path.write_bytes(path.read_bytes()[::-1]), Path.unlink):
        change(folder / "mine" / name)
        after = planned(folder)
        assert [name for name in after if after[name] != before[name]] == ["prepare.json"]
        before = after
    (folder / "mine" / name).write_bytes(b"new")
    assert planned(folder)["prepare.json"] != before["prepare.json"]


def test_a_copy_of_dvc_reads_the_repository_s_files(tmp_path: Path) -> None:
    """DVC runs queued experiments in copies, which lack the files that git ignores."""
    copied = tmp_path / ".dvc" / "tmp" / "exps" / "one"
    copied.mkdir(parents=True)
    set_data(copied, f"{{{CSV}, root: mine, validation: 0.1, public: 1}}")
    (tmp_path / "mine").mkdir()
    table()(tmp_path / "mine")
    prepare.run(Workspace.from_environment(copied, {"DVC_ROOT": str(tmp_path)}))
    assert Dataset.read(copied / "data" / "table.safetensors").classes == ("ill", "well")
    assert not (tmp_path / "data").exists()
