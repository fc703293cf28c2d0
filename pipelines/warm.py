"""Runs a command beside a process that has the slow imports done: `python -m pipelines.warm dvc repro`.

Each `pipelines.stage` that the command starts is answered by a fork of that process, which saves the stage several
seconds of imports. A stage that is killed takes its fork with it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from pipelines import stage

PRELOADED = ("torch", "mlflow", "sklearn.datasets", "matplotlib.figure", "pipelines.study", "pipelines.paper")


def main(command: list[str]) -> int:
    """Runs `command` to its end and returns its exit code."""
    if not command:
        sys.stderr.write("usage: python -m pipelines.warm COMMAND [ARGUMENT ...]\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = str(Path(folder) / "socket")
        server.bind(address)
        server.listen(64)
        server.settimeout(0.1)
        interrupts: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        # The command starts first: DVC's own start-up and our imports go side by side.
        process = subprocess.Popen(command, env=os.environ | {stage.ADDRESS: address})
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        loaded = False
        while process.poll() is None:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            if interrupts:
                # The command was interrupted as well. DVC, told to keep going, takes that for one stage's failure.
                process.terminate()
                _refuse(connection)
                continue
            if not loaded:
                loaded = _preload()
            with connection:
                if os.fork() == 0:
                    server.close()
                    _serve(connection)
            _reap()
        return stage.INTERRUPTED if interrupts else process.returncode


def _preload() -> bool:
    """Imports what stages need, once the first of them asks: a run in which nothing is to be done stays quick."""
    os.environ.update({"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
    for name in PRELOADED:
        importlib.import_module(name)
    return True


def _refuse(connection: socket.socket) -> None:
    """Answers a stage that it is not to begin."""
    with connection:
        connection.sendall(bytes([stage.INTERRUPTED]))
        while connection.recv(1 << 16):  # until it has read that and is gone
            pass


def _serve(connection: socket.socket) -> None:
    """In the fork: becomes the stage, answers with its exit code, and ends."""
    code = 1
    try:
        connection.settimeout(None)
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(head, "big")))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        threading.Thread(target=_die_with, args=(connection,), daemon=True).start()
        code = stage.run(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = stage.INTERRUPTED
    except BaseException:
        # What an interpreter does with an error that nobody expected.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code & 255]))
        os._exit(0)


def _die_with(connection: socket.socket) -> None:
    """Ends this process at once when the other end of the connection is gone."""
    if not connection.recv(1):
        os.kill(os.getpid(), signal.SIGKILL)


def _reap() -> None:
    """Collects forks that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
