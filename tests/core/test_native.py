"""Sums in C++: what happens where they can't be compiled or loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedml_noniid.core import native, sums
from fedml_noniid.core.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of compiled files, empty. Sums in C++ are on."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv(native.SWITCH, "")
    sums._library.cache_clear()
    yield tmp_path
    sums._library.cache_clear()


def path() -> Path:
    return native.library(sums.SOURCE, sums.FLAGS)


@pytest.mark.parametrize(
    ("script", "words"),
    [("", "compiler"), ("#!/bin/sh\necho one line >&2; echo another >&2; exit 1\n", "one line")],
    ids=["none", "failing"],
)
def test_without_a_compiler_sums_run_in_python(
    script: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The compiler is tried once. It leaves no file, and one line in the log."""
    compiler = folder / "compiler"
    if script:
        compiler.write_text(script)
        compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        mean = sums.weighted_mean(torch.tensor([1.0, 3.0]), {"w": torch.eye(2)})
    assert mean["w"].tolist() == [0.25, 0.75]
    (record,) = caplog.records
    assert words in record.getMessage() and "\n" not in record.getMessage()
    assert [*folder.iterdir()] == [compiler] * bool(script)


def test_a_damaged_library_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    path().write_bytes(b"half a file")
    assert sums._library() is None
    assert "file too short" in caplog.text and caplog.text.count("\n") == 1


def test_an_unknown_value_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "yes")
    with pytest.raises(UserError, match=rf"{native.SWITCH}: 'yes'.*allowed: 0.*1"):
        sums.weighted_mean(torch.ones(2), {"w": torch.eye(2)})
