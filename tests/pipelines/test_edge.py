"""What the edge of a process makes of errors of the file system: a line with a remedy, and exit
code 2."""

from __future__ import annotations

import errno
import os

import pytest

from fedml_noniid.pipelines import edge


@pytest.mark.parametrize(
    ("number", "path", "said"),
    [
        (errno.ENOSPC, None, "the output: No space left on device; free space on that disk, then"),
        (errno.EROFS, "runs/x", "runs/x: Read-only file system; choose a folder that is writable"),
        (errno.EACCES, "runs/x", "runs/x: Permission denied; choose a folder that is writable"),
    ],
)
def test_an_error_of_the_disk_is_a_line(
    number: int, path: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise OSError(number, os.strerror(number), path)

    assert edge.guarded(fail) == edge.WRONG_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_another_error_stays_what_it_is() -> None:
    """A bug is not taken for a full disk."""

    def fail() -> int:
        raise FileNotFoundError(errno.ENOENT, "gone", "x")

    with pytest.raises(FileNotFoundError):
        edge.guarded(fail)
