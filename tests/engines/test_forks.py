"""Processes that are forked beside threads: none waits for a lock that nobody gives back."""

from __future__ import annotations

import _thread
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from fedml_noniid.engines import forks


def code_of(child: Callable[[], int]) -> int | None:
    """The exit code of a forked process that returns what `child` returns. None if it hangs."""
    forks.settle()
    process = os.fork()
    if process == 0:
        try:
            os._exit(child())
        finally:
            os._exit(1)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


@pytest.mark.timeout(60)
def test_a_process_multiplies_that_is_forked_as_a_thread_ends() -> None:
    """Without the wait, a process of 20 hangs: the thread, though joined, has all locks of MKL."""
    x = torch.ones(64, 64)

    def product() -> int:
        return int(torch.mm(x, x)[0, 0] != 64)

    for _ in range(40):
        thread = threading.Thread(target=product)
        thread.start()
        thread.join()
        assert code_of(product) == 0


@pytest.mark.parametrize(("limit", "over"), [(30.0, True), (0.01, False)])
def test_a_fork_waits_for_threads_that_python_does_not_know(
    limit: float, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does not know one any more that is ending. The wait has a limit."""
    monkeypatch.setattr(forks, "LIMIT_S", limit)
    begun, ended = _thread.allocate_lock(), []
    begun.acquire()

    def work() -> None:
        begun.release()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)  # lets other threads run
        ended.append(True)

    _thread.start_new_thread(work, ())
    assert begun.acquire(timeout=10)
    assert code_of(lambda: int(bool(ended))) == int(over)
    while not ended:
        time.sleep(0.001)
