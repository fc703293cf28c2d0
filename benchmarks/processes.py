"""Runs each measurement in a separate process with one thread: one at a time, or several that
take turns by round."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.engines import Engine
from benchmarks.peers.harness import DONE, READY, TURNS, read_result

ROOT = Path(__file__).parent.parent
LIMIT = 3600  # seconds
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch's variable
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",  # some peers would use a GPU
    **dict.fromkeys(
        ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"), "0"
    ),  # Flower and Ray send telemetry
    "PYTHONPATH": str(ROOT),
}
TURN = b"!"

Found = tuple[dict[str, Any], dict[str, Tensor]]  # measured numbers, final weights


class FailedError(Exception):
    """A measured process ended without a result."""


class Running:
    """A measuring process, from its start to its result."""

    def __init__(self, engine: Engine, job: Path, in_turns: bool = False) -> None:
        """`in_turns`: whether its rounds wait for their turn. Raises FailedError."""
        self._folder = tempfile.TemporaryDirectory()
        self._limit = time.monotonic() + LIMIT
        self._result, self._errors = (
            Path(self._folder.name) / "result.npz",
            Path(self._folder.name) / "stderr",
        )
        # Our commands set it too. The bare loop is the limit, so it gets all the help.
        # Peers run with their defaults.
        inherited = {key: value for key, value in os.environ.items() if key != LARGE_PAGES}
        pages = {LARGE_PAGES: "1"} if ".peers." not in engine.module else {}
        theirs: tuple[int, ...] = ()
        self._pipes: tuple[int, ...] = ()
        if in_turns:
            (turns, give), (answers, say) = os.pipe(), os.pipe()
            theirs, self._pipes = (turns, say), (give, answers)
        named = {TURNS: ",".join(map(str, theirs))} if in_turns else {}
        try:
            with self._errors.open("w") as errors:
                self._process = subprocess.Popen(
                    [
                        engine.python,
                        "-m",
                        engine.module,
                        str(self._result),
                        engine.argument,
                        str(job),
                    ],
                    cwd=self._folder.name,
                    env=inherited | ENVIRONMENT | pages | named,
                    pass_fds=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
        except OSError as error:
            self._close()
            raise FailedError(str(error)) from None
        finally:
            for end in theirs:
                os.close(end)
        self.ready = in_turns and self._hears(READY)

    def turn(self) -> None:
        """Lets it run one round, if one is left."""
        if self.ready:
            try:
                os.write(self._pipes[0], TURN)
                self.ready = self._hears(DONE) and self._hears(READY)
            except BrokenPipeError:  # it ended while it waited; `outcome` says how
                self.ready = False

    def _hears(self, word: bytes) -> bool:
        """Waits for a word.

        False if the process ends instead; its children may keep the pipe open, so this polls.
        """
        while not select.select([self._pipes[1]], [], [], 0.2)[0]:
            if self._process.poll() is not None or time.monotonic() > self._limit:
                return False
        return os.read(self._pipes[1], 1) == word

    def outcome(self) -> Found:
        """Waits for the end and returns the result. Raises FailedError."""
        try:
            code = self._process.wait(max(0.0, self._limit - time.monotonic()))
            if code or not self._result.exists():
                last = (
                    self._errors.read_text(errors="replace").strip().splitlines() or ["no message"]
                )[-1]
                raise FailedError(f"ended with {code}: {last}")
            return read_result(self._result)
        except subprocess.TimeoutExpired as error:
            raise FailedError(str(error)) from None
        finally:
            self.end()

    def end(self) -> None:
        """Ends the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        pipes, self._pipes = self._pipes, ()
        for end in pipes:
            os.close(end)
        self._folder.cleanup()


def measure(engine: Engine, job: Path) -> Found:
    """Measures a job with an engine. Raises FailedError."""
    return Running(engine, job).outcome()


def in_turns(jobs: Sequence[tuple[Engine, Path]], at_once: int) -> list[Found | FailedError]:
    """Measures each pair of an engine and a job in turns: `at_once` rounds of one, then as many of
    the next.

    They start one after the other, since the start of one would disturb the rounds of the others.
    """
    running: list[Running | FailedError] = []
    started: list[Running] = []
    try:
        for engine, job in jobs:
            try:
                started.append(Running(engine, job, in_turns=True))
                running.append(started[-1])
            except FailedError as error:
                running.append(error)
        while any(process.ready for process in started):
            for process in started:
                for _ in range(at_once):
                    process.turn()
        return [
            process if isinstance(process, FailedError) else _ended(process) for process in running
        ]
    finally:
        for process in started:
            process.end()


def _ended(running: Running) -> Found | FailedError:
    try:
        return running.outcome()
    except FailedError as error:
        return error
