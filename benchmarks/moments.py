"""The moments at which a process of a deployment ends itself by SIGKILL, for `python -m benchmarks
chaos`: in the middle of a line, of a message, between the phases of a secure sum.

The main function of a process here is `process`. It reads which moment it is to end at, if at any.
"""

from __future__ import annotations

import os
import signal
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import files, tensor_file
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.governance import audit, replay
from fedml_noniid.governance.secure import masks, vectors
from fedml_noniid.governance.secure import server as secure_server
from fedml_noniid.governance.secure.silo import SecureSilo
from fedml_noniid.governance.witness import Witness
from fedml_noniid.privacy.chained import ChainedLines
from fedml_noniid.processes import launch, loopback

FILE, REPLAYED = "moment-{}", "replayed-{}"  # of a rank, in the output folder
REPLAY = "replay"  # in place of a moment: the process computes its silo's answers again
RUN = "chaos"  # the name of each run, so that privacy noise can be drawn again
SAME = "the same SHA-256"  # in a replay's line about an answer
HALF_LINE = "half of an audit line written"
Due = Callable[[], None]  # ends the process at the n-th call


def process(rank: int, config: str, output: str) -> None:
    """The main function of a process that ends at the moment in its file."""
    path = Path(output) / FILE.format(rank)
    moment, _, number = path.read_text().partition(":") if path.is_file() else ("", "", "")
    path.unlink(missing_ok=True)
    if rank == 0:
        _put(launch, "secrets", SimpleNamespace(token_hex=lambda _: RUN))
    if moment == REPLAY:
        try:
            silo = launch.Process.from_config(rank, Path(config))
            said = replay.of_process(silo, silo.fedml, None)
        except UserError as error:
            said = f"error: {error}"
        files.write_whole(Path(output) / REPLAYED.format(rank), said)
        return
    if moment:
        own = [OF_SILO, OF_SUMS_OF_SILO, OF_LEDGER] if rank else [OF_SERVER, OF_SUMS_OF_SERVER]
        ChainMap(ANYWHERE, *own)[moment](_due(int(number)))
    loopback.process(rank, config, output)


def _due(number: int) -> Due:
    left = [number]

    def due() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return due


def _put(owner: Any, name: str, value: object) -> None:
    """Replaces something of a module or a class, in this process."""
    setattr(owner, name, value)


def _before(owner: Any, name: str) -> Callable[[Due], None]:
    """Ends before the n-th call of a function."""

    def put(due: Due) -> None:
        inner = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            due()
            return inner(*args, **named)

        _put(owner, name, called)

    return put


def _after(owner: Any, name: str) -> Callable[[Due], None]:
    """Ends after the n-th call of a function."""

    def put(due: Due) -> None:
        inner = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            result = inner(*args, **named)
            due()
            return result

        _put(owner, name, called)

    return put


def _half_line(due: Due) -> None:
    """Ends once the first half of the n-th line is in the file."""

    class Half(files.Lines):
        def add(self, line: bytes, sync: bool = True) -> None:
            files.append(self.path, self._size, line[: len(line) // 2], private=True, sync=sync)
            due()
            super().add(line, sync)

    _put(audit, "Lines", Half)


def _half_message(due: Due) -> None:
    """Ends while the frames of the n-th message with tensors are sent."""
    inner = wire.leaving

    def leaving(*args: Any) -> Iterator[bytes]:
        for n, frame in enumerate(inner(*args)):
            if n == 2:  # head and table have left
                due()
            yield frame

    _put(wire, "leaving", leaving)


def _not_kept(due: Due) -> None:
    """Ends before the file of the n-th question is written."""
    own = SimpleNamespace(**vars(tensor_file))
    _before(own, "write")(due)
    _put(replay, "tensor_file", own)


def _headless(due: Due) -> None:
    """Ends when the n-th line is in the ledger and not yet in its head."""
    inner = ChainedLines.write_head

    def write_head(lines: ChainedLines) -> None:
        if lines.headed < lines.count:
            due()
        inner(lines)

    _put(ChainedLines, "write_head", write_head)


ANYWHERE = {
    HALF_LINE: _half_line,
    "half of a message sent": _half_message,
    "message in the log, not sent": _after(Witness, "_seal"),
}
OF_SILO = {
    "question in the log, not kept": _not_kept,
    "answer computed, memory not written": _before(Silo, "_save"),
    "memory written": _after(Silo, "_save"),
}
OF_SERVER = {
    "before a checkpoint": _before(Checkpoints, "write"),
    "after a checkpoint": _after(Checkpoints, "write"),
}
BETWEEN = "between the phases of a sum"
OF_SUMS_OF_SILO = {
    BETWEEN: _before(SecureSilo, "_added"),
    "set of a sum noted, not masked": _before(masks, "mask"),
}
OF_SUMS_OF_SERVER = {
    BETWEEN: _before(secure_server, "_request"),
    "sum made, not used": _before(vectors, "sums"),
}
OF_LEDGER = {"line in the ledger, not in its head": _headless}
