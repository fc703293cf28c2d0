"""A server in this process without FedML, its honest silos, and a silo that sends whatever a test
wants."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import grpc
import numpy as np
import torch

from benchmarks.attacks import outcome, read
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.silo_client import SiloClient, channel
from fedml_noniid.deploy.silo_server import SiloServer
from fedml_noniid.deploy.stream import SERVICE
from fedml_noniid.engines.packing import flatten
from fedml_noniid.governance.secure.silo import SecureSilo
from fedml_noniid.processes import loopback
from tests.deploy import world

Answered = Callable[[wire.Down], wire.Up]
LONG = 60.0  # seconds until a test gives up; never reached where the code is right
METHODS = ("Session", "Status")


def framed(values: Mapping[str, object]) -> bytes:
    """A head as JSON, whatever it says."""
    return json.dumps(values).encode()


def address() -> str:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def hello(study: str = "study", samples: int = 17, session: str = "own") -> bytes:
    """A silo's first message, whatever it says."""
    return framed({"session": session, "study": study, "samples": samples})


def answer_of(exchange: int | None, /, **values: object) -> bytes:
    """The head of an answer, but for `values`."""
    return framed({"exchange": exchange} | values)


def body(leaves: Mapping[str, torch.Tensor]) -> list[bytes]:
    """The table of tensors, and their bytes in frames."""
    return list(wire.leaving(wire.Answer(exchange=0), dict(leaves), lambda message: message.head))[
        1:
    ]


class Stream:
    """A call that sends what a test wants. It lives until it is closed."""

    def __init__(self, line: grpc.Channel, *frames: bytes, method: str = "Session") -> None:
        self._leaving: SimpleQueue = SimpleQueue()
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        self.call = line.stream_stream(path)(chain(frames, iter(self._leaving.get, None)))

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self._leaving.put(frame)

    def read(self, kind: type[wire.H]) -> wire.H:
        """The head of the next message."""
        return read(self.call, kind).head

    def end(self) -> None:
        """Sends nothing any more."""
        self._leaving.put(None)

    def outcome(self) -> str:
        """Waits for the end of the call: "ok", or as in `outcome`."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return outcome(error)
        finally:
            self.end()
        return "ok"


def hello_of(samples: int = 17) -> wire.Hello:
    """What an honest silo says first."""
    return wire.Hello(session=secrets.token_hex(8), study="study", samples=samples)


class Idle(NamedTuple):
    """A server that asks nothing."""

    coordinator: Coordinator
    server: SiloServer
    comm: CommArgs
    kits: Path

    def line(self, rank: int) -> grpc.Channel:
        """A connection with the kit of a rank."""
        return channel(self.comm, Kit.read(self.kits / str(rank), rank))


def sent(line: grpc.Channel, method: str, *messages: bytes) -> str:
    """What becomes of these messages at the begin of a call: "ok" with a reply, or as in
    `outcome`."""
    stream = Stream(line, *messages, method=method)
    stream.end()
    try:
        next(stream.call, None)
    except grpc.RpcError as error:
        return outcome(error)
    stream.call.cancel()
    return "ok"


# (client, message) -> None, or whether the process that is lost now is started again
Lose = Callable[[int, wire.Down], bool | None]
Change = Callable[[int, Params], Params]  # what a silo sends in place of its answer


class LostError(Exception):
    """A silo's process ends; its argument: and is started again."""


class Federation:
    """A server and silos, each in a thread, as `noniid deploy` runs them without FedML.

    A test may lose silos, or change what they send. Silos that are not `honest` are a test's own.
    """

    def __init__(
        self,
        kits: Path,
        deployment: settings.Deployment,
        folder: Path | None = None,
        data: Parts | None = None,
        honest: Collection[int] | None = None,
    ) -> None:
        """`folder`: of checkpoint and memories; secure sums need it."""
        self.kits, self.deployment, self.folder = kits, deployment, folder
        self.data = data or world.parts()
        # A silo that was told "stop" waits for the server; here none comes again.
        own = {"server": address(), "lost_s": 3.0}
        self.comm = deployment.comm_args.model_copy(update=own)
        network = deployment.network((1, 4, 4), world.CLASSES, None)
        recipe, self.shards = deployment.train_args.recipe, world.shards_of(self.data)
        self.terms = settings.terms(deployment, recipe, network, self.data.public)
        file = folder and RunFile(folder / "checkpoint.safetensors", "this run")
        self.server_run = ServerRun(self.terms, self.shards[0], file=file)
        self.coordinator = Coordinator(self.comm, self.terms.silos, "study", "this run")
        self.silo_server = SiloServer(self.comm, kits / "0", self.coordinator)
        self.error: UserError | None = None
        self.go = threading.Event()  # honest silos answer while it is set
        self.go.set()
        self.calls: dict[int, SiloClient] = {}  # of the honest silos
        self.asked: list[wire.Down] = []
        self.sent: list[Params] = []  # what left the silos
        self.lose: Lose = lambda *_: None
        self.changed: Change = lambda client, leaves: leaves
        silos = range(self.terms.silos) if honest is None else honest
        targets = [self._serve, *(partial(self._silo, k) for k in silos)]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def __enter__(self) -> Federation:
        self.silo_server.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        if self._threads[0].is_alive():  # a test has failed: the silos go, and so does the server
            self.coordinator.finish("stop", "the test is over")
        self.silo_server.__exit__()
        for thread in self._threads[1:]:
            thread.join(LONG)

    def run(self) -> str:
        """SHA-256 of the final weights. Raises UserError."""
        with self:
            assert self.ended()
        if self.error is not None:
            raise self.error
        return self.digest()

    def digest(self) -> str:
        """SHA-256 of the weights, once the run is over."""
        return world.digest(self.server_run.loop.outcome)

    def simulated(self) -> str:
        """SHA-256 of the weights of a simulation in which the same silos were missing."""
        return loopback.simulate(self.deployment, self.data, self.server_run.missing)

    def ended(self) -> bool:
        """Waits for the end of the run; False if it does not come."""
        self._threads[0].join(LONG)
        return not self._threads[0].is_alive()

    def line(self, rank: int) -> grpc.Channel:
        """A connection with the kit of a rank."""
        return channel(self.comm, Kit.read(self.kits / str(rank), rank))

    def answer(self, **leaves: object) -> dict[str, torch.Tensor]:
        """A good answer to the open exchange but for `leaves`; None drops one, and a number fills
        one."""
        good = {"n": 17, "steps": float(self.terms.plan.steps(np.array(17)))}
        schema, changed = flatten(self.server_run.schema), good | leaves
        zeros = {key: torch.zeros_like(leaf) for key, leaf in schema.items()}
        for key, leaf in changed.items():
            zeros[key] = (
                torch.full_like(schema[key], leaf) if isinstance(leaf, int | float) else leaf
            )
        return {key: leaf for key, leaf in zeros.items() if leaf is not None}

    def _serve(self) -> None:
        try:
            self.server_run.serve(self.coordinator)
        except UserError as error:
            self.error = error

    def _silo(self, client: int) -> None:
        # The server's own error says more than "the server ended the run".
        with suppress(UserError):
            while self._lost(client):
                pass

    def _lost(self, client: int) -> bool:
        """Runs a silo's process; whether it is lost, and is started again."""
        shard, kit = self.shards[client + 1], self.kits / str(client + 1)
        n = len(shard.parts["train"].y) + round(self.terms.algorithm.needs.shared * shard.n_public)
        try:
            with SiloClient(self.comm, kit, client, hello_of(n)) as calls:
                self.calls[client] = calls
                calls.serve(partial(self._answered, client, self._answering(client, kit)))
        except LostError as lost:
            return lost.args[0]
        return False

    def _answering(self, client: int, kit: Path) -> Answered:
        memory = self.folder and self.folder / f"silo-{client}.safetensors"
        file = memory and RunFile(memory, "this run")
        silo = Silo(self.terms, client, self.shards[client + 1], file)

        def own(down: wire.Down) -> wire.Up:
            down = down._replace(terms=self.terms.fingerprint)
            return wire.up(client, down.exchange, silo.answer(down))

        if not self.terms.secure_sums:
            return own
        sums, names = memory.with_suffix(".sums"), ("this run", "study")
        return SecureSilo(own, self.terms, client + 1, kit, names, sums).answered

    def _answered(self, client: int, inner: Answered, down: wire.Down) -> wire.Up:
        self.go.wait(LONG)
        self.asked.append(down)
        if (again := self.lose(client, down)) is not None:
            raise LostError(again)
        up = inner(down)
        up["leaves"] = self.changed(client, up["leaves"])
        self.sent.append(up["leaves"])
        return up


class Traitor:
    """A silo with a good certificate that is there, and then does what it likes."""

    def __init__(self, federation: Federation, client: int) -> None:
        self.federation, self.client = federation, client
        self.line = federation.line(client + 1)
        self.hello = hello(session=secrets.token_hex(8))
        self._exchange: int | None = None  # the one that it was asked to answer
        self.stream: Stream | None = None
        self.over = False  # the run

    def __enter__(self) -> Traitor:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.end()
        self.line.close()

    def join(self) -> Stream:
        """Its stream, after its hello."""
        if self.stream is None and not self.over:
            self.stream, self._exchange = Stream(self.line, self.hello), None
            self.stream.read(wire.Welcome)
        return self.stream

    def task(self) -> int | None:
        """The exchange that waits for this silo; None when the run is over."""
        stream = self.join()
        if self._exchange is None and not self.over:
            task = stream.read(wire.Task)
            self.over = task.kind != "ask"
            self._exchange = None if self.over else task.exchange
            if self.over:
                stream.call.cancel()
        return self._exchange

    def fail(self) -> int | None:
        """Gives the open exchange up; the number of the next one."""
        assert self.answer(failed="no") == "ok"
        return self.task()

    def answer(self, *frames: bytes, **values: object) -> str:
        """Answers the open exchange with this body; what becomes of it."""
        return self.say(answer_of(self.task(), **values), *frames)

    def say(self, *frames: bytes) -> str:
        """Sends frames in place of the answer to the open exchange; what becomes of them."""
        exchange, stream, state = self.task(), self.join(), self.federation.coordinator
        stream.send(*frames)
        self._exchange = None
        while stream.call.is_active():
            with state._lock:
                over = state._ending or (state._down and state._down.exchange != exchange)
                answered = self.client in state._answers
            if answered and not over:
                return "ok"
            if over:  # the next message comes, or the refusal
                break
            threading.Event().wait(0.005)
        try:
            self.task()
        except grpc.RpcError as error:
            self.stream = None
            return outcome(error)
        return "ok"

    def upload(self, leaves: dict[str, torch.Tensor]) -> str:
        """Answers the open exchange with these tensors."""
        return self.answer(*body(leaves))
