"""Forks of this process: what they wait for, what they can do, and when they end."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 1.0
LOOK_S = 0.0002
WATCH_S = 0.5
THREADS = "/proc/self/task"
AT_WORK = ("R", "D")  # states in proc(5): running, and waiting for the kernel


def _known() -> set[int | None]:
    """The threads that run Python code, by the numbers that the system gives them.

    This one has its new number in a forked process, where `native_id` is still that of the parent.
    """
    return {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}


def _is_ending() -> bool:
    """Tells whether a thread may be on its way out, after its last line of Python.

    Threads that Python never knew, such as torch's, count while they work. False without proc(5).
    """
    known = _known()
    try:
        threads = os.listdir(THREADS)
    except OSError:
        return False
    for thread in threads:
        if int(thread) in known:
            continue
        with contextlib.suppress(OSError):  # it is gone
            status = Path(THREADS, thread, "stat").read_text(errors="replace")
            if status.rpartition(")")[2].lstrip()[:1] in AT_WORK:
                return True
    return not known <= _known()  # one has ended while we looked


def settle() -> None:
    """Waits before a fork until no thread is ending, at most LIMIT_S.

    A thread that has multiplied matrices frees MKL's memory when it ends, after `join` has
    returned. It holds all locks of that memory meanwhile. Nobody gives them back in a process that
    is forked then, which waits for them in its first product, for ever.
    """
    until = time.monotonic() + LIMIT_S
    while _is_ending() and time.monotonic() < until:
        time.sleep(LOOK_S)


def autograd_survives_fork() -> bool:
    """Tells whether a process forked from this one can take gradients.

    On a machine with a GPU, the first backward pass of a process starts autograd's threads, also if
    the pass is on the CPU. From then on autograd refuses to work in forked processes.
    """
    scalar = torch.ones((), requires_grad=True)

    def works() -> bool:
        torch.autograd.grad(scalar, scalar)
        return True

    return bool(in_fork(works))


def in_fork(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns in a forked process, as JSON has it; None if it fails there.

    Not by a `Pool`: a daemon of multiprocessing, such as a silo of a loopback run, may start none.
    """
    reading, writing = os.pipe()
    settle()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        result = file.read()
    os.waitpid(child, 0)
    return json.loads(result) if result else None


def end_with(parent: int) -> None:
    """In a forked process: ends it soon after the process that started it has ended, for whatever
    reason."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
