"""Processes in which the stages' imports are done: `noniid run` forks them, and the stages'
commands hand over to them.

A stage runs in a fork of such a process, as in a process of its own. docs/performance.md says what
it saves, and how threads, signals, a GPU and edited code are dealt with. Every doubt means that the
stage runs cold, in its own process.
"""

from __future__ import annotations

import array
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
from typing import NamedTuple, TextIO

from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.experiment.facts import stamps
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.stages.handover import ACCEPTED, OTHER, PASSED_ON, WARM

SYNC = "sync"  # runs as a stage does
ROOM = "fedml_noniid.pipelines"
# What a stage imports, or a function that does. Without a request, a process imports them in this
# order.
MODULES: dict[str, tuple[str, ...]] = {
    "plan": (f"{ROOM}.stages.plan",),
    "prepare": (f"{ROOM}.stages.prepare", "pandas"),
    "partition": (
        f"{ROOM}.stages.partition",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ),
    "train": (f"{ROOM}.stages.train",),
    "evaluate": (f"{ROOM}.stages.evaluate",),
    "report": (f"{ROOM}.stages.report",),
    SYNC: (f"{ROOM}.tracking.verbs", f"{ROOM}.tracking.store:load", f"{ROOM}.tracking.models"),
}
SILOS = {
    "deploy": (
        "fedml_noniid.plugins.silo.pair",
        "fedml_noniid.plugins.silo.roles",
        f"{ROOM}.stages.deploy",
    )
}
# Environment variables that may differ between `noniid run` and a stage: DVC sets them, and no
# import reads them.
FREE = ("DVC", "NONIID_", "PATH", "PWD", "OLDPWD", "SHLVL", "_", "LINES", "COLUMNS")
LONGEST = 100  # bytes of a socket's path
PATIENCE_S = 10  # for a request that has begun
EDITED_S = 5  # code that was edited so shortly before may have been imported in part
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Request(NamedTuple):
    """A command that hands its work over."""

    stage: str
    folder: str
    environment: dict[str, str]
    umask: int
    descriptors: tuple[int, ...]


class Stage(NamedTuple):
    """A stage at work."""

    pid: int
    ended: int  # descriptor of the process, readable when it has ended
    client: socket.socket  # of the waiting command


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
    folder = tempfile.mkdtemp(prefix="noniid-")  # nobody else may enter it
    if time.time() - edited < EDITED_S or len(os.fsencode(folder)) + len(OTHER) >= LONGEST:
        os.rmdir(folder)
        yield
        return
    alive, of_servers = os.pipe()
    kinds = {OTHER: MODULES} | ({"deploy": SILOS} if deploys else {})
    started = []
    try:
        for name, modules in kinds.items():
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(f"{folder}/{name}")
                listening.listen()
                server = Server(
                    listening, alive, root.resolve(), modules, lambda: stamps(code) == before, eager
                )
                started.append(_forked(server, of_servers, folder))
        os.environ[WARM] = folder
        yield
    finally:
        os.environ.pop(WARM, None)
        for pid in started:
            os.kill(pid, signal.SIGKILL)  # its stages end with it
            os.waitpid(pid, 0)
        os.close(alive)
        os.close(of_servers)
        shutil.rmtree(folder, ignore_errors=True)


def _forked(server: Server, of_parent: int, folder: str) -> int:
    """Starts a server; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of Python 3.12, about threads: see docs/performance.md
        pid = os.fork()
    if pid == 0:
        os.close(of_parent)  # so that the pipe closes when the parent ends, for whatever reason
        try:
            os.setpgid(0, 0)  # a Ctrl-C is for the waiting command, which passes it on
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as `plugins.silo.loopback` has it
            server.run()
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)
    return pid


class Server:
    """Serves the commands of one experiment, one fork for each."""

    def __init__(
        self,
        listening: socket.socket,
        alive: int,
        root: Path,
        modules: Mapping[str, Sequence[str]],
        is_same_code: Callable[[], bool],
        eager: bool,
    ) -> None:
        """`alive`: a descriptor that is readable when the parent has ended."""
        self._listening, self._alive, self._root = listening, alive, root
        self._modules, self._is_same_code = modules, is_same_code
        self._waiting = [name for names in modules.values() for name in names]  # to import
        self._imports = eager
        self._environment = _compared(os.environ)
        self._stages: list[Stage] = []

    def run(self) -> None:
        """Returns when the parent has ended."""
        while True:
            watched = [self._listening.fileno(), self._alive]
            watched += [of for one in self._stages for of in (one.ended, one.client.fileno())]
            ready = select.select(watched, [], [], 0 if self._imports and self._waiting else None)[
                0
            ]
            if self._alive in ready:
                for one in self._stages:
                    _kill(one)
                return
            for one in list(self._stages):
                if one.ended in ready:
                    self._tell(one)
                elif one.client.fileno() in ready:
                    self._pass_on(one)
            if self._listening.fileno() in ready:
                self._accept()
            elif not ready:
                _import(self._waiting.pop(0))

    def _accept(self) -> None:
        """Begins a stage in a fork.

        A request that is not for this process is closed: the stage runs cold.
        """
        client, _ = self._listening.accept()
        with contextlib.suppress(OSError, ValueError):
            client.settimeout(PATIENCE_S)
            request = _received(client)
            client.settimeout(None)
            if self._takes(client, request):
                client.sendall(ACCEPTED)
                # Plan and sync may have nothing to do. They import what they need.
                if request.stage not in ("plan", SYNC):
                    self._imports = True
                    for name in self._modules[request.stage]:
                        _import(name)
                pid = os.fork()
                if pid == 0:
                    code = edge.CRASHED
                    try:
                        self._leave(client)
                        code = _work(request)
                    except KeyboardInterrupt:
                        code = edge.INTERRUPTED
                    finally:
                        os._exit(code)
                self._stages.append(Stage(pid, os.pidfd_open(pid), client))
            for one in request.descriptors:
                os.close(one)
        if not any(one.client is client for one in self._stages):
            client.close()

    def _takes(self, client: socket.socket, request: Request) -> bool:
        """Whether a stage has here what it has in a process of its own."""
        _, user, _ = struct.unpack(
            "3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        named = Path(request.environment.get("DVC_ROOT") or request.folder).resolve()
        return (
            user == os.getuid()
            and request.stage in self._modules
            and Path(request.folder).resolve() == named == self._root
            and _compared(request.environment) == self._environment
            and self._is_same_code()
        )

    def _leave(self, client: socket.socket) -> None:
        """In a fork: gives up what belongs to the server."""
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        os.setpgid(0, 0)
        client.close()
        os.close(self._alive)
        self._listening.close()
        for one in self._stages:
            os.close(one.ended)
            one.client.close()

    def _tell(self, one: Stage) -> None:
        """Tells the command how its stage has ended: the exit code, or minus the signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
        with contextlib.suppress(OSError):
            one.client.sendall(code.to_bytes(4, "big", signed=True))
        self._forget(one)

    def _pass_on(self, one: Stage) -> None:
        """Passes a signal on. The stage of a command that has ended is killed."""
        try:
            number = one.client.recv(1)
        except OSError:
            number = b""
        if number:
            os.kill(one.pid, number[0])
        else:
            _kill(one)
            self._forget(one)

    def _forget(self, one: Stage) -> None:
        self._stages.remove(one)
        os.close(one.ended)
        one.client.close()


def _kill(one: Stage) -> None:
    """Ends a stage and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    os.waitpid(one.pid, 0)


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


def _received(client: socket.socket) -> Request:
    """The request of a command.

    OSError, ValueError if it is not whole, or not for a stage alone.
    """
    descriptors = array.array("i")
    head, rights, _, _ = client.recvmsg(4, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for _, _, data in rights:
        descriptors.frombytes(data)
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size and (part := client.recv(size - len(body))):
        body += part
    (stage,), folder, environment, umask = json.loads(body)
    return Request(stage, folder, environment, umask, tuple(descriptors))


def _work(request: Request) -> int:
    """In a fork: runs the stage as its command would. Returns the exit code."""
    for number in PASSED_ON:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    for place, given in enumerate(request.descriptors):
        os.dup2(given, place)
    for given in request.descriptors:
        os.close(given)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.stdin, sys.stdout, sys.stderr = open(0), _text(1), _text(2)  # noqa: SIM115, until the process ends
    sys.argv = [stages.__file__, request.stage]
    sys.path.insert(0, request.folder)  # as for `python -m`
    logging.root.handlers.clear()
    if request.stage in SILOS:
        import torch

        from fedml_noniid.plugins.silo import loopback

        torch.set_num_threads(1)  # its threads would not survive the forks
        loopback.START_METHOD = "fork"
    code = edge.CRASHED
    try:
        if request.stage == SYNC:
            code = edge.guarded(lambda: sync(Workspace.of(Path(), os.environ)))
        else:
            code = stages.main([request.stage])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else edge.CRASHED
    except Exception:  # of any kind: Python prints it at the end of a process
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


def _text(descriptor: int) -> TextIO:
    """A standard stream as Python opens it."""
    is_error = descriptor == 2
    encoding, errors = (
        getattr(sys.__stdout__, "encoding", None),
        "backslashreplace" if is_error else None,
    )
    return open(descriptor, "w", 1 if is_error or os.isatty(descriptor) else -1, encoding, errors)


def sync(place: Workspace) -> int:
    """Brings MLflow up to date. Returns the exit code."""
    from fedml_noniid.pipelines.tracking.store import spared
    from fedml_noniid.pipelines.tracking.verbs import bring_up_to_date

    with spared("the new results"):
        bring_up_to_date(place)
    return 0
