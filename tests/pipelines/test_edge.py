"""What the edge of a process makes of errors of the file system: a line with a remedy, and exit
code 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedml_noniid.pipelines import edge
from tests.pipelines.small import ROOT


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "error: runs/x: No space left on device; free space on that disk, then start again\n",
        ),
        (errno.EROFS, "error: runs/x: Read-only file system; choose a folder that is writable\n"),
        (errno.EACCES, "error: runs/x: Permission denied; choose a folder that is writable\n"),
    ],
)
def test_an_error_of_the_disk_is_a_line(
    number: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise OSError(number, os.strerror(number), "runs/x")

    assert edge.guarded(fail) == edge.WRONG_INPUT
    assert capsys.readouterr().err == said


def test_another_error_stays_what_it_is() -> None:
    """A bug is not taken for a full disk."""

    def fail() -> int:
        raise FileNotFoundError(errno.ENOENT, "gone", "x")

    with pytest.raises(FileNotFoundError):
        edge.guarded(fail)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a device that is always full"
)
def test_an_output_on_a_full_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedml_noniid", "--version"]  # imports no torch
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == edge.WRONG_INPUT
    assert (
        done.stderr
        == "error: the output: No space left on device; free space on that disk, then start again\n"
    )
