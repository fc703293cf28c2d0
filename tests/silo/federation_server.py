"""A server in this process without FedML, its honest silos, and a silo that sends whatever a test
wants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import torch

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.silo import settings, wire
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.server_run import ServerRun
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo import Silo
from fedml_noniid.plugins.silo.silo_client import SiloClient, channel
from fedml_noniid.plugins.silo.silo_server import METHODS, SERVICE, SiloServer
from tests.silo import world

LONG = 60.0  # seconds until a test gives up; never reached where the code is right
CALL = b'{"session": "own"}'  # the head of a silo's later calls


def framed(values: Mapping[str, object]) -> bytes:
    """A head as JSON, whatever it says."""
    return json.dumps(values).encode()


def address() -> str:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def outcome(error: grpc.RpcError) -> str:
    """The name of the server's refusal, otherwise gRPC's code."""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return json.loads(error.details())["name"]
    return error.code().name.lower()


def hello(terms: str = "terms", samples: int = 17, session: str = "own") -> bytes:
    """A silo's first message."""
    return framed({"session": session, "terms": terms, "samples": samples})


def answer_of(exchange: int | None, /, **values: object) -> bytes:
    """The head of an answer, but for `values`."""
    return framed({"session": "own", "exchange": exchange} | values)


class Idle(NamedTuple):
    """A server that asks nothing."""

    coordinator: Coordinator
    server: SiloServer
    comm: CommArgs
    kits: Path

    def line(self, rank: int) -> grpc.Channel:
        """A connection with the kit of a rank."""
        return channel(self.comm, self.kits / str(rank), rank)


def sent(line: grpc.Channel, method: str, *messages: bytes, timeout: float = LONG) -> str:
    """What becomes of these messages to a method: "ok", or as in `outcome`."""
    path = method if method.startswith("/") else f"/{SERVICE}/{method}"
    try:
        for _ in line.stream_stream(path)(iter(messages), timeout=timeout):
            pass
    except grpc.RpcError as error:
        return outcome(error)
    return "ok"


class Federation:
    """A server, and silos that do as they should. The other silos are a test's own."""

    def __init__(
        self,
        kits: Path,
        silos: int,
        honest: Collection[int],
        rounds: int,
        recipe: str = "fedavg",
        **comm: object,
    ) -> None:
        self.kits, self.honest, self.data = kits, honest, world.parts()
        self.comm = CommArgs(server=address(), **comm)
        args = world.args(recipe, {}, False)
        args.rounds, args.client_num_in_total, args.client_num_per_round = rounds, silos, silos
        public = self.data.public
        self.terms = settings.terms(
            settings.from_args(args), recipe, world.network(False), len(public.y)
        )
        self.server_run = ServerRun(self.terms, world.shards_of(self.data)[0])
        self.coordinator = Coordinator(self.comm, silos, self.terms.fingerprint, "this run")
        self.silo_server = SiloServer(self.comm, kits / "0", self.coordinator)
        self.error: UserError | None = None
        self.go = threading.Event()  # honest silos answer while it is set
        self.go.set()
        self.calls: dict[int, SiloClient] = {}  # of the honest silos
        self.uploads: dict[int, wire.Up] = {}  # the last of each honest silo
        self._threads = [threading.Thread(target=self._serve, name="server", daemon=True)]
        self._threads += [
            threading.Thread(target=self._silo, args=(k,), name=f"silo {k}", daemon=True)
            for k in honest
        ]

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

    def ended(self) -> bool:
        """Waits for the end of the run; False if it does not come."""
        self._threads[0].join(LONG)
        return not self._threads[0].is_alive()

    def line(self, rank: int) -> grpc.Channel:
        """A connection with the kit of a rank."""
        return channel(self.comm, self.kits / str(rank), rank)

    def answer(self, **leaves: object) -> dict[str, torch.Tensor]:
        """A good answer to the open exchange but for `leaves`; None drops one."""
        schema = flatten(self.server_run.schema)
        good = {key: torch.zeros_like(leaf) for key, leaf in schema.items()}
        found = good | {"n": torch.tensor(17)} | leaves
        return {key: leaf for key, leaf in found.items() if leaf is not None}

    def _serve(self) -> None:
        try:
            self.server_run.serve(self.coordinator)
        except UserError as error:
            self.error = error

    def _silo(self, client: int) -> None:
        shard = world.shards_of(self.data)[client + 1]
        silo, n = Silo(self.terms, client, shard), len(shard.parts["train"].y)

        def answered(down: wire.Down) -> wire.Up:
            self.go.wait(LONG)
            self.uploads[client] = wire.up(client, down.exchange, silo.answer(down))
            return self.uploads[client]

        kit = self.kits / str(client + 1)
        # The server's own error says more than "the server ended the run".
        with (
            suppress(UserError),
            SiloClient(self.comm, kit, client, self.terms.fingerprint, n) as calls,
        ):
            self.calls[client] = calls
            calls.serve(answered)


class Traitor:
    """A silo with a good certificate that is there, and then does what it likes."""

    def __init__(self, federation: Federation, client: int) -> None:
        self.federation, self.client = federation, client
        self.line = federation.line(client + 1)
        self.hello = hello(federation.terms.fingerprint)

    def __enter__(self) -> Traitor:
        assert sent(self.line, "Hello", self.hello) == "ok"
        # The stream lives until it is cancelled, whether anybody reads it or not.
        self.stream = self.line.unary_stream(f"/{SERVICE}/Attend")(CALL)
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.cancel()
        self.line.close()

    def task(self) -> int | None:
        """The exchange that waits for this silo; None when the run is over."""
        while True:
            call = self.line.unary_stream(f"/{SERVICE}/Task")
            task = wire.parsed(next(iter(list(call(CALL, timeout=LONG)))), wire.Task)
            if task.kind != "wait":
                return task.exchange if task.kind == "ask" else None

    def fail(self) -> int | None:
        """Gives the open exchange up; the number of the next one."""
        assert self.answer(failed="no") == "ok"
        return self.task()

    def answer(self, *body: bytes, **values: object) -> str:
        """Answers the open exchange with this body; what becomes of it."""
        return sent(self.line, "Answer", answer_of(self.task(), **values), *body)

    def upload(self, leaves: dict[str, torch.Tensor]) -> str:
        """Answers the open exchange with these tensors."""
        return self.answer(*wire.body(leaves))


def everywhere(
    line: grpc.Channel, message: bytes, methods: Iterable[str] = METHODS[:4]
) -> set[str]:
    """What becomes of one message, sent to each method."""
    return {sent(line, method, message) for method in methods}
