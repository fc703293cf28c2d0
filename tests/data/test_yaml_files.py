"""Files of settings that are no proper YAML: the file, the line and the remedy in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.yaml_files import json_of, read_yaml
from fedml_noniid.pipelines.experiment import config

CASES = {
    "twice": (
        b"train_args:\n  epochs: 1\n  epochs: 2\n",
        ": line 3: the key 'epochs' is there twice; keep one of them",
    ),
    "latin-1": (
        "a: 1\n# Köln\n".encode("latin-1"),
        ": line 2: is not UTF-8 (byte 0xf6); save the file as UTF-8",
    ),
    "UTF-16": (
        "a: 1\n".encode("utf-16"),
        ": line 1: is not UTF-8 (byte 0xff); save the file as UTF-8",
    ),
    "NUL": (
        b"a: 1\nb: 2\0\n",
        ": line 2: holds the control character '\\x00'; remove it, or save the file as UTF-8",
    ),
    "bracket": (b"a: 1\nb: [1\nc: 2\n", ": line 3: is not YAML (while parsing a flow sequence"),
    "tab": (
        b"a:\n\tb: 1\n",
        ": line 2: is not YAML (while scanning for the next token; found character '\\t' that",
    ),
    "brackets": (b"a: " + b"[" * 900 + b"]" * 900, ": is nested too deeply; allowed: 50 levels"),
    "sixty levels": (b"[" * 60 + b"]" * 60, ": is not YAML (is nested too deeply; allowed: 50"),
    "digits": (b"a: " + b"9" * 5000, ": is not YAML (Exceeds the limit (4300 digits)"),
    "bits": (
        b"a: {? 0x" + b"f" * 3000 + b" : 1}",
        ": is not YAML (a number has more than 10000 bits",
    ),
    "a date": (b"a: 2027-99-99", ": is not YAML (month must be in 1..12"),
    "aliases": (
        b"a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (k, k, b"*%c, " % (k - 1) * 10) for k in b"bcdefgh"),
        ": is not YAML (its aliases make too many values",
    ),
    "itself": (b"a: &a [*a]", ": is not YAML (its aliases make too many values, or one that is in"),
}


@pytest.mark.parametrize(("content", "said"), CASES.values(), ids=CASES)
def test_a_bad_file_is_one_line_with_the_remedy(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(UserError) as found:
        config.load(tmp_path)
    (line,) = str(found.value).splitlines()
    assert line.startswith("params.yaml" + said)


@pytest.mark.parametrize("content", [b"[" * 60 + b"]" * 60, b"[" * 10**6, b"9" * 5000, b"{"])
def test_json_that_is_none_or_a_bomb_is_a_value_error(content: bytes) -> None:
    assert json_of(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    with pytest.raises(ValueError, match=r"nested too deeply|limit \(4300 digits\)|Expecting"):
        json_of(content)


def test_who_changes_what_a_file_holds_changes_no_other_reading(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {b: 1}")
    read_yaml(tmp_path / "a.yaml")["a"]["b"] = 2
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": 1}}
