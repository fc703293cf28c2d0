"""The ledger of a silo: kills, full disks, files that were changed, and a budget that is spent."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import files
from fedml_noniid.privacy.accounting import epsilon
from fedml_noniid.privacy.ledger import Budget, BudgetError, Ledger, Release

DELTA = 1e-5
pytest.importorskip("dp_accounting", reason="budgets need the extra [privacy]")


def opened(folder: Path, most: float | None = None, owner: str = "rank 1") -> Ledger:
    return Ledger.open(folder / "1.ledger", most and Budget(most, DELTA), owner)


def filled(folder: Path, n: int = 3) -> Ledger:
    ledger = opened(folder)
    for number in range(n):
        ledger.spend(Release(f"{number}", "sample", 2.0, 5, f"round {number}, train"))
    return ledger


def test_releases_add_up_over_restarts_and_each_counts_once(tmp_path):
    filled(tmp_path).close()
    again = filled(tmp_path, 4)  # three of them are known
    assert again.epsilon(DELTA) == epsilon({2.0: 20}, DELTA)
    again.spend(Release("other", "silo", 1.0))
    again.close()
    # What is about a silo is about each of its samples.
    assert opened(tmp_path).epsilon(DELTA) == epsilon({2.0: 20, 1.0: 1}, DELTA)


def test_a_spent_budget_refuses_counts_nothing_and_stays_spent(tmp_path, caplog):
    """Two releases of 5 passes fit, and a small one of the silo, which leaves less for samples. A
    repeated one still has its answer."""
    most = (epsilon({2.0: 10}, DELTA) + epsilon({2.0: 15}, DELTA)) / 2
    for number in range(2):
        ledger = opened(tmp_path, most)
        ledger.spend(Release(f"{number}", "sample", 2.0, 5))
        ledger.close()
    ledger = opened(tmp_path, most)
    for _ in range(2):
        before = ledger.path.read_bytes()
        with pytest.raises(BudgetError, match=r"1\.ledger: budget_epsilon: the privacy budget"):
            ledger.spend(Release("2", "sample", 2.0, 5))
        assert ledger.path.read_bytes() == before
    ledger.spend(Release("1", "sample", 2.0, 5))
    ledger.spend(Release("a", "silo", 2.0))
    assert epsilon({2.0: 12}, DELTA) < most, "without the silo's it would fit"
    words = set()  # the server reads them: they do not say what was spent
    for release in (Release("3", "sample", 2.0, 2), Release("b", "silo", 0.0)):
        with pytest.raises(BudgetError) as error:
            ledger.spend(release)
        words.add(str(error.value))
    assert len(words) == 1
    assert f"would be {epsilon({2.0: 13}, DELTA):.4g} at" in caplog.text
    assert "would be inf at" in caplog.text


def spending(folder: Path, n: int, pipe) -> None:
    ledger = opened(folder)
    for number in range(n):
        ledger.spend(Release(f"{number}", "sample", 2.0))
        pipe.send(number)  # the answer leaves


def test_what_left_before_a_kill_is_counted(tmp_path):
    """Killed at ten moments: the ledger has all answers that left, and at most one more."""
    fork = multiprocessing.get_context("fork")
    known = 0
    for kill in range(10):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=spending, args=(tmp_path, 10_000, theirs))
        process.start()
        theirs.close()
        left = known - 1
        while left < known + kill:
            left = ours.recv()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        try:
            while True:
                left = ours.recv()
        except EOFError:
            pass
        ledger = opened(tmp_path)
        known = len(ledger._ids)
        ledger.close()
        assert left + 1 <= known <= left + 2


def test_a_line_that_was_cut_while_it_was_written_never_left(tmp_path):
    """Cut at many bytes. The head counts the lines before it."""
    ledger = filled(tmp_path, 2)
    path, head = ledger.path, ledger._lines.head
    whole, counted = path.read_bytes(), head.read_bytes()
    ledger.spend(Release("last", "sample", 2.0, 5))
    ledger.close()
    line = path.read_bytes()[len(whole) :]
    for cut in (*range(0, len(line), 11), len(line) - 1, len(line)):
        path.write_bytes(whole + line[:cut])
        head.write_bytes(counted)
        again = opened(tmp_path)
        assert ("last" in again._ids) == (cut == len(line))
        again.spend(Release("last", "sample", 2.0, 5))
        again.close()
        assert path.read_bytes() == whole + line


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_counts_nothing_and_lets_nothing_leave(tmp_path, monkeypatch, written):
    ledger = filled(tmp_path)
    before = ledger.path.read_bytes()

    def full(path: Path, at: int, content: bytes, private: bool, sync: bool) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content[:written])
        with files.writing(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedml_noniid.data.files.append", full)
        with pytest.raises(UserError, match="No space left"):
            ledger.spend(Release("new", "sample", 2.0))
    assert "new" not in ledger._ids
    ledger.close()
    again = opened(tmp_path)
    assert again._ids == {"0", "1", "2"} and again.epsilon(DELTA) == epsilon({2.0: 15}, DELTA)
    again.spend(Release("new", "sample", 2.0))
    assert again.path.read_bytes().startswith(before)


def test_a_head_that_can_not_be_written_holds_answers_back_until_it_can(tmp_path, monkeypatch):
    """The line is on the disk, so it counts. No second line follows before the head does."""
    ledger = filled(tmp_path)

    def full(path: Path, content: str, private: bool) -> None:
        raise UserError(f"{path}: can't be written")

    with monkeypatch.context() as patched:
        patched.setattr("fedml_noniid.privacy.chained.write_whole", full)
        for name in ("new", "new", "newer"):
            with pytest.raises(UserError, match=r"ledger\.head: can't be written"):
                ledger.spend(Release(name, "sample", 2.0))
    assert len(ledger.path.read_bytes().splitlines()) == 5
    ledger.spend(Release("new", "sample", 2.0))
    ledger.close()
    assert opened(tmp_path)._ids == {"0", "1", "2", "new"}


def changed(number: int, **fields: object):
    def change(lines: list[bytes]) -> list[bytes]:
        lines[number] = json.dumps(json.loads(lines[number]) | fields).encode()
        return lines

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[:-1], "has 3 lines, and its head counts 4"),
        (lambda lines: lines[:1], "has 1 lines"),
        (lambda lines: [], "has 0 lines"),
        (lambda lines: [lines[0], *lines[2:]], "has 3 lines"),
        (lambda lines: [*lines, *lines[1:]], "has 7 lines"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2 was changed"),
        (changed(2, count=1), "line 3 was changed"),
        (changed(2, noise=9.0), "line 3 was changed"),
        (changed(0, owner="rank 2"), "line 1 was changed"),
        (lambda lines: [b"\xff\xfe"] * 4, "is no privacy ledger"),
        (lambda lines: [b"3"] * 4, "is no privacy ledger"),
    ],
)
def test_a_ledger_that_was_changed_is_refused_by_name(tmp_path, change, said):
    ledger = filled(tmp_path)
    ledger.close()
    lines = change(ledger.path.read_bytes().splitlines())
    ledger.path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(UserError, match=rf"1\.ledger: {said}.*restore both files"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"lines": "x"}', b'{"lines": 4}'])
def test_a_damaged_head_is_refused(tmp_path, content):
    ledger = filled(tmp_path)
    ledger.close()
    ledger._lines.head.write_bytes(content)
    with pytest.raises(UserError, match=r"1\.ledger: "):
        opened(tmp_path)


def test_files_of_others_are_refused_and_missing_ones_too(tmp_path):
    filled(tmp_path / "a").close()
    filled(tmp_path / "b", 4).close()
    with pytest.raises(UserError, match="is the privacy ledger of 'rank 1'; this is 'rank 2'"):
        opened(tmp_path / "a", owner="rank 2")
    (tmp_path / "a" / "1.ledger.head").rename(tmp_path / "head")
    with pytest.raises(UserError, match="has 4 lines, and its head counts 0"):
        opened(tmp_path / "a")
    (tmp_path / "b" / "1.ledger").unlink()
    with pytest.raises(UserError, match="has 0 lines, and its head counts 5"):
        opened(tmp_path / "b")


def test_who_may_remove_both_files_begins_anew(tmp_path):
    """What the ledger does not promise: it guards against mistakes of the machine's owner."""
    filled(tmp_path).close()
    for name in ("1.ledger", "1.ledger.head"):
        (tmp_path / name).unlink()
    assert opened(tmp_path).epsilon(DELTA) == 0


def test_a_new_ledger_is_told(tmp_path, caplog):
    """It does not know the samples: beside new kits, it counts from 0."""
    for _ in range(2):
        filled(tmp_path / "kits").close()
    assert caplog.messages == [
        f"{tmp_path}/kits/1.ledger: a new privacy ledger begins; it has nothing of before"
    ]
    caplog.clear()
    assert opened(tmp_path / "new kits").epsilon(DELTA) == 0 and "new kits" in caplog.text


def test_two_processes_can_not_spend_the_same_budget(tmp_path):
    ledger = filled(tmp_path)
    with pytest.raises(UserError, match="another process uses this privacy ledger"):
        opened(tmp_path)
    ledger.close()
    opened(tmp_path).close()
