"""Sums in C++: what happens where they can't be compiled or loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
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


def test_without_a_compiler_sums_run_in_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler is tried once. It leaves no file, and one line in the log."""
    monkeypatch.setenv("CXX", str(folder / "no-compiler"))
    with caplog.at_level(logging.WARNING, native.__name__):
        for _ in range(2):
            mean = sums.weighted_mean(torch.tensor([1.0, 3.0]), {"w": torch.eye(2)})
    assert mean["w"].tolist() == [0.25, 0.75]
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "no-compiler" in caplog.text and not list(folder.iterdir())


def test_a_damaged_library_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    path().write_bytes(b"half a file")
    assert sums._library() is None
    assert "file too short" in caplog.text and caplog.text.count("\n") == 1


def test_an_unknown_value_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "yes")
    with pytest.raises(UserError, match=rf"{native.SWITCH}: 'yes'.*allowed: 0.*1"):
        sums.weighted_mean(torch.ones(2), {"w": torch.eye(2)})


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(folder: Path) -> None:
    if sums._library() is None:
        pytest.skip("needs a C++ compiler; this machine has none")
    path().unlink()
    code = "from fedml_noniid.core import sums; raise SystemExit(sums._library() is None)"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    assert list(folder.iterdir()) == [path()]


def test_an_error_of_the_compiler_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = folder / "compiler"
    compiler.write_text("#!/bin/sh\necho first line >&2; echo second >&2; exit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    assert sums._library() is None
    assert caplog.text.strip().endswith("first line") and [*folder.iterdir()] == [compiler]
