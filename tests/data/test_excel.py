"""Tables as spreadsheets write them: other separators, decimals and encodings, and .xlsx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedml_noniid as nd
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers.table import of_frame
from fedml_noniid.data.readers.text import of_texts
from fedml_noniid.pipelines.experiment.config import DataSettings
from tests.data.reading import refuse

N = 40
FRAME = pd.DataFrame(
    {
        "größe": np.arange(N) / 8,
        "dose": (1.7e9 + np.random.default_rng(0).normal(size=N)).round(5),  # needs float64
        "n": np.arange(N) * 37,
        "y": np.where(np.arange(N) % 2, "gut", "schlecht"),
    }
)
GERMAN = "CSV read with separator ';', decimal ','{}, as German Excel writes it"


def german(separator: str = ";", frame: pd.DataFrame = FRAME) -> str:
    return frame.to_csv(sep=separator, decimal=",", index=False)


def read(folder: Path, content: str | bytes, **options: Any) -> Dataset:
    raw = content.encode() if isinstance(content, str) else content
    (folder / "a.csv").write_bytes(raw)
    return load("table", folder, **{"file": "a.csv", "label": "y", **options})


@pytest.fixture(scope="module")
def plain() -> Dataset:
    return Dataset.from_raw("table", of_frame(FRAME, label="y"))


def same(data: Dataset, expected: Dataset) -> bool:
    """Whether the samples have the same bits."""
    parts = ("train_x", "train_y", "test_x", "test_y")
    return all(getattr(data, key).equal(getattr(expected, key)) for key in parts)


@pytest.mark.parametrize(
    ("separator", "encoding", "options", "note"),
    [
        (";", "utf-8", {}, GERMAN.format("")),
        (";", "utf-8-sig", {"encoding": "UTF8"}, GERMAN.format("")),
        (";", "utf-8", {"separator": ";", "decimal": ","}, GERMAN.format("")),
        (";", "cp1252", {"encoding": "cp1252"}, GERMAN.format(", encoding cp1252")),
        (";", "utf-16", {"encoding": "utf-16"}, GERMAN.format(", encoding utf-16")),
        (";", "utf-8", {"na": ["0,125"], "missing": "median"}, GERMAN.format("")),
        ("\t", "utf-8", {}, "CSV read with separator '\\t', decimal ','"),
        ("|", "utf-8", {}, "CSV read with separator '|', decimal ','"),
        (",", "utf-8", {"decimal": ","}, "CSV read with decimal ','"),
    ],
)
def test_marks_are_found_or_given_and_said(
    tmp_path: Path,
    plain: Dataset,
    separator: str,
    encoding: str,
    options: dict[str, Any],
    note: str,
) -> None:
    """To the last bit, as the frame: `dose` needs float64. pandas quotes 1,5 beside commas."""
    data = read(tmp_path, german(separator).encode(encoding), **options)
    assert data.notes[0] == note
    assert same(data, plain) != ("na" in options)
    number = data.train_x[data.train_x[:, 0] != 0.125]
    assert set(number[:, 0].tolist()) <= {*FRAME["größe"], FRAME["größe"][1:].median(), 2.5}


def test_a_csv_with_commas_and_points_is_what_it_was(tmp_path: Path, plain: Dataset) -> None:
    """No note, also where a name has a semicolon; the settings of its trainings are the same."""
    marks = {"separator": ",", "decimal": ".", "encoding": "utf-8"}
    for options in ({}, marks):
        assert read(tmp_path, FRAME.to_csv(index=False), **options).checksum == plain.checksum
    data = read(tmp_path, FRAME.to_csv(sep=";", index=False))
    assert data.notes[0] == "CSV read with separator ';'" and same(data, plain)
    named = read(tmp_path, FRAME.rename(columns={"n": "n;m"}).to_csv(index=False))
    assert same(named, plain) and "CSV read" not in named.notes[0]
    content = {"name": "table", "file": "a.csv", "label": "y", "validation": 0, "public": 0}
    assert not {*marks, "sheet"} & DataSettings(**content).resolved.keys()
    assert DataSettings(**content, decimal=",").resolved["decimal"] == ","


SMALL = FRAME[["größe", "y"]]
THOUSANDS = "x;y\n" + "".join(f"{i + 1}.{i:03};{i % 2}\n" for i in range(N))
BOTH = "a;b,y\n" + "".join(f"{i};5,{i % 2}\n" for i in range(N))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (BOTH, {}, "its cells may be separated by ',' or ';'; set `separator` to one"),
        (THOUSANDS, {}, "'1.000' may be a number with decimals, or thousands; set `decimal` to"),
        (THOUSANDS, {"decimal": ","}, "numbers such as '1.000' need '.' as `decimal`, or no thou"),
        (
            german(",").replace('"', "'"),
            {},
            "can't be read as CSV (Expected 4 fields in line 2, saw 6)",
        ),
        (german(",", SMALL), {}, "numbers such as '0,0' need ',' as `decimal`, or"),
        (german(";", SMALL), {"decimal": "."}, "numbers such as '0,0' need ',' as `decimal`, or"),
        (
            german() + "1,5;1.234,5;1;gut\n",
            {},
            "is '1.234,5' in row 41; allowed: numbers; numbers such",
        ),
        (german(), {"separator": ","}, "its columns are separated by ';', not ','"),
        (german().encode("cp1252"), {}, "its `encoding` may be cp1252"),
        (german().encode("utf-16"), {}, "is UTF-16; set `encoding` to utf-16"),
        (german(), {"encoding": "cp1252"}, "encoding = 'cp1252' is refused; allowed: none, as"),
        (german(), {"encoding": "hex"}, "encoding = 'hex' is refused; allowed: the name of an"),
        ("x;y\n\0;1\n", {"encoding": "cp1252"}, "it has a NUL character"),
        (german(), {"separator": "/"}, "separator = '/' is unknown"),
        (
            german(),
            {"sheet": "One"},
            "sheet = 'One' is refused; allowed: none, since a.csv is no .xlsx",
        ),
    ],
)
def test_a_reading_that_is_not_sure_is_refused(
    tmp_path: Path, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    with refuse(message):
        read(tmp_path, content, **options)


def test_an_option_that_says_which_reading_is_right(tmp_path: Path) -> None:
    assert read(tmp_path, BOTH, separator=",", one_hot=["a;b"]).notes[0].startswith("32 features")
    data = read(tmp_path, THOUSANDS, decimal=".")
    assert data.train_x.max() < 41 and data.notes[0] == "CSV read with separator ';'"


def test_new_rows_of_text_have_the_marks_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(german())
    data = nd.load("table", root=tmp_path, file="a.csv", label="y")
    rows = pd.DataFrame({"größe": ["1,5"], "dose": [2.5], "n": ["3"]})
    assert data.samples(rows).tolist() == [[1.5, 2.5, 3]]
    with refuse("x: column 'größe' is '1.234' in row 1; allowed: numbers"):
        data.samples(rows.assign(größe="1.234"))


def test_texts_and_categories_keep_their_commas(tmp_path: Path) -> None:
    frame = pd.DataFrame({"said": ["ja, 1,5", "nein"] * 20, "y": ["1,5 x", "2,5 x"] * 20})
    (tmp_path / "a.csv").write_text(frame.to_csv(sep=";", index=False), encoding="cp1252")
    options = {"text": "said", "label": "y"}
    data = load("text", tmp_path, file="a.csv", encoding="cp1252", **options)
    assert data.notes[0] == "CSV read with separator ';', encoding cp1252"
    assert data.train_x.equal(of_texts(frame, **options).train_x)
    with refuse("separator = ';' is refused; allowed: none, since frame is no .csv"):
        of_frame(frame, label="y", separator=";")


def test_a_workbook(tmp_path: Path, plain: Dataset) -> None:
    """As the CSV, the checksum too: blank rows and columns, and empty sheets, do not count."""
    pytest.importorskip("openpyxl", reason="needs [excel]")
    path, options = tmp_path / "a.xlsx", {"file": "a.xlsx", "label": "y"}
    with pd.ExcelWriter(path) as book:
        FRAME.to_excel(book, sheet_name="Daten", index=False, startrow=2, startcol=1)
        pd.DataFrame().to_excel(book, sheet_name="Tabelle2", index=False)
    assert load("table", tmp_path, **options).checksum == plain.checksum
    with pd.ExcelWriter(path) as book:
        FRAME.assign(n=0).to_excel(book, sheet_name="Alt", index=False)
        FRAME.to_excel(book, sheet_name="Neu", index=False)
    assert load("table", tmp_path, **options, sheet="Neu").checksum == plain.checksum
    for more, message in (
        ({}, "has several sheets; set `sheet`; allowed: Alt, Neu"),
        ({"sheet": "neu"}, "sheet 'neu' is unknown (did you mean 'Neu'?)"),
        ({"decimal": ","}, "decimal = ',' is refused; allowed: none, since a.xlsx is no .csv"),
    ):
        with refuse(message):
            load("table", tmp_path, **options, **more)
    # A formula that Excel never computed has no value.
    wrong = {"größe": ["#N/A", *range(1, N)], "dose": pd.Timestamp(0), "n": ["=1+1", *range(1, N)]}
    FRAME.assign(**wrong).to_excel(path, index=False)
    words = r"'größe' is '#N/A' in row 1; .*\n.*'dose' is datetime.*\n.*'n' has no value in row 1"
    with pytest.raises(nd.UserError, match=words):
        load("table", tmp_path, **options)
