"""Processes in which the stages' imports are done: `noniid run` forks them, and the stages'
commands hand over to them.

A stage runs in a fork of such a process, as in a process of its own. docs/performance.md says what
it saves, and how it handles threads, signals, a GPU and edited code. Every doubt means that the
stage runs cold, in its own process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.experiment.user_cache import stamps
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.stages.handover import ACCEPTED, OTHER, WARM

SYNC = "sync"  # runs as a stage does
ROOM = "fedml_noniid.pipelines"
# What a stage imports, or a function that does. Without a request, a process imports them in this
# order.
MODULES: dict[str, tuple[str, ...]] = {
    "plan": (f"{ROOM}.stages.plan", f"{ROOM}.experiment.provenance"),
    "prepare": (f"{ROOM}.stages.prepare", "pandas"),
    "partition": (
        f"{ROOM}.stages.partition",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ),
    "train": (f"{ROOM}.stages.train",),
    "evaluate": (f"{ROOM}.stages.evaluate",),
    "report": (f"{ROOM}.stages.report", "pandas"),
    SYNC: (f"{ROOM}.tracking.verbs", f"{ROOM}.tracking.store:load", f"{ROOM}.tracking.models"),
}
SILOS = {
    "deploy": (
        "fedml_noniid.plugins.silo.pair",
        "fedml_noniid.plugins.silo.silo_client",
        f"{ROOM}.stages.deploy",
    )
}
# Environment variables that may differ between `noniid run` and a stage: DVC sets them, and no
# import reads them.
FREE = ("DVC", "NONIID_", "PATH", "PWD", "OLDPWD", "SHLVL", "_", "LINES", "COLUMNS")
MAX_SOCKET_PATH = 100  # bytes
MAX_REQUEST = 200_000  # bytes
PATIENCE_S = 10  # for a request after its connection
EDITED_S = 5  # code that was edited so shortly before may have been imported in part
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Request(NamedTuple):
    """A command that hands its work over."""

    stage: str
    folder: str
    environment: dict[str, str]


@contextlib.contextmanager
def processes(root: Path, code: Sequence[Path], deploys: bool, eager: bool) -> Iterator[None]:
    """Starts the processes for the commands of the experiment in `root`, and ends them with their
    stages.

    `code`: the folders of our code. `deploys`: whether a process imports FedML. `eager`: whether
    they import at once; otherwise at the first request for another stage than `plan`, as there may
    be none.
    """
    before = stamps(code)
    edited = max(stamp[0] for stamp in before.values()) / 1e9  # seconds
    place = tempfile.TemporaryDirectory(prefix="noniid-", ignore_cleanup_errors=True)
    with place as folder:  # nobody else may enter it
        too_long = len(os.fsencode(folder)) + len(OTHER) >= MAX_SOCKET_PATH
        if too_long or time.time() - edited < EDITED_S:
            yield
            return
        environment, home = _compared(os.environ), root.resolve()

        def is_for(request: Request) -> bool:
            """Whether a stage has here what it has in a process of its own."""
            named = Path(request.environment.get("DVC_ROOT") or request.folder).resolve()
            return (
                Path(request.folder).resolve() == named == home
                and _compared(request.environment) == environment
                and stamps(code) == before
            )

        alive, of_parent = os.pipe()
        servers = []
        try:
            for name, modules in (
                {OTHER: MODULES} | ({"deploy": SILOS} if deploys else {})
            ).items():
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                    listening.bind(f"{folder}/{name}")
                    listening.listen()
                    if (pid := _fork()) == 0:
                        os.close(of_parent)  # so that `alive` closes when the parent ends
                        _serve(Server(listening, alive, modules, is_for), eager, folder)
                servers.append(pid)
            os.environ[WARM] = folder
            yield
        finally:
            os.environ.pop(WARM, None)
            for pid in servers:
                os.kill(pid, signal.SIGKILL)  # its stage ends with it
                os.waitpid(pid, 0)
            os.close(alive)
            os.close(of_parent)


class Server(NamedTuple):
    """Serves the commands of one experiment, one after the other, in a fork for each."""

    listening: socket.socket
    alive: int  # descriptor that is readable when the parent has ended
    modules: Mapping[str, Sequence[str]]
    is_for: Callable[[Request], bool]

    def run(self, imports: bool) -> None:
        """Serves until the parent has ended. `imports`: whether it imports when it has no work."""
        waiting = [name for names in self.modules.values() for name in names]
        while True:
            watched = [self.listening.fileno(), self.alive]
            ready = select.select(watched, [], [], 0 if imports and waiting else None)[0]
            if self.alive in ready:
                return
            if ready:
                with contextlib.suppress(OSError, ValueError), self.listening.accept()[0] as client:
                    imports = self._answer(client) or imports
            else:
                _import(waiting.pop(0))

    def _answer(self, client: socket.socket) -> bool:
        """Runs a stage in a fork, or closes the connection: the stage runs cold.

        Returns whether others may follow.
        """
        client.settimeout(PATIENCE_S)
        content, descriptors, _, _ = socket.recv_fds(client, MAX_REQUEST, 3)
        try:
            request = Request(*json.loads(content))
            if not (_is_ours(client) and request.stage in self.modules and self.is_for(request)):
                return False
            client.settimeout(None)
            client.send(ACCEPTED)
            # Plan and sync may have nothing to do. They import what they need.
            others = request.stage not in ("plan", SYNC)
            for name in self.modules[request.stage] if others else ():
                _import(name)
            pid = _fork()
            if pid == 0:
                client.close()
                self.listening.close()
                _leave(request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._wait(client, pid)
        return others

    def _wait(self, client: socket.socket, pid: int) -> None:
        """Passes signals on to a stage until it has ended, and sends the exit code, or minus the
        signal.

        It kills the stage of a command that has ended, with all that the stage has started.
        """
        os.setpgid(pid, pid)  # here too: nobody knows which of the two processes is first
        with open(os.pidfd_open(pid), "rb", 0) as ended:
            watched: list[Any] = [client, ended, self.alive]
            while ended not in (ready := select.select(watched, [], [])[0]):
                number = b""
                with contextlib.suppress(OSError):
                    number = b"" if self.alive in ready else client.recv(1)
                if not number:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    return
                os.kill(pid, number[0])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client.send(code.to_bytes(4, "big", signed=True))


def _serve(server: Server, imports: bool, folder: str) -> None:
    """In a server's process: serves, and ends it."""
    try:
        os.setpgid(0, 0)  # a Ctrl-C is for the waiting command, which passes it on
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as `plugins.silo.loopback` has it
        server.run(imports)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _leave(request: Request, descriptors: Sequence[int]) -> None:
    """In a stage's process: runs the stage as its command would, and ends with its exit code."""
    code = edge.CRASHED
    try:
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        os.setpgid(0, 0)
        for number, given in enumerate(descriptors):
            os.dup2(given, number)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        sys.path.insert(0, request.folder)  # as for `python -m`
        logging.root.handlers.clear()
        code = _run(request.stage)
    except KeyboardInterrupt:
        code = edge.INTERRUPTED
    except BaseException:  # of any kind: Python prints it at the end of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _run(stage: str) -> int:
    if stage == SYNC:
        return edge.guarded(lambda: sync(Workspace.of(Path(), os.environ)))
    if stage in SILOS:
        import torch

        from fedml_noniid.plugins.silo import loopback

        torch.set_num_threads(1)  # its threads would not survive the forks
        loopback.START_METHOD = "fork"
    return stages.main([stage])


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Of Python 3.12, about threads: see docs/performance.md.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _is_ours(client: socket.socket) -> bool:
    """Whether a command is of this user."""
    found = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", found)[1] == os.getuid())


def _import(name: str) -> None:
    """Imports a module. If it can't be imported, the stage says so."""
    module, _, function = name.partition(":")
    with contextlib.suppress(Exception):
        found = importlib.import_module(module)
        if function:
            getattr(found, function)()


def _compared(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that imports may read."""
    return {name: value for name, value in environment.items() if not name.startswith(FREE)}


def sync(place: Workspace) -> int:
    """Brings MLflow up to date. Returns the exit code."""
    from fedml_noniid.pipelines.tracking.store import spared
    from fedml_noniid.pipelines.tracking.verbs import bring_up_to_date

    with spared("the new results"):
        bring_up_to_date(place)
    return 0
