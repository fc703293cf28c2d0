"""The server's one port: gRPC with mutual TLS. Silos call, the server never does.

A silo is known by its certificate. Hello, Attend, Task and Answer are for silos; Status is for the
server's own kit. All messages are bytes of `plugins.silo.wire`; gRPC and this file make no other
objects of them.
"""

from __future__ import annotations

import functools
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc

from fedml_noniid.plugins.silo import certificates, wire
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.wire import RefusedError

SERVICE = "fedml_noniid.Federation"
METHODS = ("Hello", "Attend", "Task", "Answer", "Status")
MAX_PARALLEL_CALLS = 4  # of one silo
HEAD_S = 10.0  # the time for the first message of a call
# A silo's calls: at most, back by the second, back for an answer.
MAX_CALLS, CALLS_PER_S, CALLS_PER_ANSWER = 60.0, 5.0, 10.0
MIN_UPLOAD_S = 60.0  # the least time for an upload; more if the deadline is later
MAX_CONNECTIONS = 4096  # also those before TLS; less if the process may open few files
OPERATOR = -1  # the client number of the server's own kit
Frames = Iterator[bytes]
C = TypeVar("C", wire.Call, wire.Answer)
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", wire.MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", wire.MAX_FRAME_BYTES),
]
BOUNDS = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_metadata_size", 1 << 14),
]


class SiloServer:
    """Listens while it is open."""

    def __init__(self, comm: CommArgs, kit: Path, coordinator: Coordinator) -> None:
        """`kit`: the folder with the server's certificates.

        UserError if it is bad.
        """
        self._comm, self._coordinator = comm, coordinator
        self._names = {certificates.name(k + 1): k for k in range(OPERATOR, coordinator.silos)}
        self._running: Counter[int] = Counter()  # calls by client
        self._calls: dict[int, tuple[float, float]] = {}  # client -> (calls left, when)
        self._lock = threading.Lock()
        # A quarter of the file descriptors is left for files, whatever strangers do.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = min(hard, 2 * MAX_CONNECTIONS) if hard > 0 else 2 * MAX_CONNECTIONS
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        most = [("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, files * 3 // 4))]
        # Silos can fill all threads but eight. There, calls that are turned away wait for
        # milliseconds.
        threads = MAX_PARALLEL_CALLS * coordinator.silos + 8
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "call"),
            options=KEEPALIVE + BOUNDS + most,
            maximum_concurrent_rpcs=10 * threads,
        )
        # All are streams: a unary call would wait for its message in a thread before the server
        # knows who calls.
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(functools.partial(self._serve, method))
            for method in METHODS
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        mine = certificates.Kit.read(kit, 0)
        self._admission = certificates.Admission(mine.ca, kit / "crl.pem")
        credentials = grpc.ssl_server_credentials([(mine.key, mine.certificate)], mine.ca, True)
        self._server.add_secure_port(comm.server, credentials)

    def __enter__(self) -> SiloServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1.0).wait(5.0)

    # calls
    # ----------------------------------------------------------------------------------------------

    def _serve(self, method: str, stream: Frames, context: grpc.ServicerContext) -> Frames:
        """Answers one call: the method gets the client, the first message, the messages behind it,
        and gRPC's context."""
        call: Callable[..., Frames] = getattr(self, f"_{method.lower()}")
        with self._call(context, operator=method == "Status") as client:
            with self._within(HEAD_S, client, context):
                first = wire.following(stream)
            yield from call(client, first, stream, context)

    def _hello(self, client: int, first: bytes, *_: object) -> Frames:
        yield self._coordinator.hello(client, wire.parsed(first, wire.Hello)).frame()

    def _attend(
        self, client: int, first: bytes, _: object, context: grpc.ServicerContext
    ) -> Frames:
        call = self._parsed(client, first, wire.Call)
        context.add_callback(self._coordinator.wake)
        context.send_initial_metadata(())
        self._coordinator.attend(client, call.session, lambda: self._active(context))
        yield from ()

    def _task(self, client: int, first: bytes, _: object, context: grpc.ServicerContext) -> Frames:
        call = self._parsed(client, first, wire.Call)
        context.add_callback(self._coordinator.wake)
        found = self._coordinator.task(client, call.session, lambda: self._active(context))
        self._identity(context)  # again: the certificate may be revoked since the call began
        if isinstance(found, wire.Task):
            yield found.frame()
        else:
            yield wire.Task.of(found).frame()
            yield from wire.body(wire.tensors(found))

    def _answer(
        self, client: int, first: bytes, received: Frames, context: grpc.ServicerContext
    ) -> Frames:
        answer = self._parsed(client, first, wire.Answer)
        if answer.failed:
            self._coordinator.fail(client, answer.exchange, answer.failed[:500])
        else:
            self._upload(client, answer.exchange, received, context)
        yield b"{}"

    def _upload(
        self, client: int, exchange: int, received: Frames, context: grpc.ServicerContext
    ) -> None:
        """Takes the tensors of an answer. Raises RefusedError."""
        schema = self._coordinator.expected(client, exchange)
        try:
            with self._within(max(self._comm.deadline_s, MIN_UPLOAD_S), client, context):
                table = wire.table(wire.following(received))
                wire.fit(table, schema, wire.silo(client))  # before memory is taken
                leaves = wire.read(received, table)
        except RefusedError as refusal:
            # Else the silo died or the line broke, and it will try again.
            if refusal.name != "truncated":
                self._coordinator.fail(client, exchange, str(refusal))
            raise
        self._identity(context)  # again: the certificate may be revoked since the call began
        up = wire.Up(client=client, exchange=exchange, leaves=leaves)
        self._coordinator.accept(client, up)
        self._pay(client, -CALLS_PER_ANSWER)

    def _status(self, *_: object) -> Frames:
        yield json.dumps(self._coordinator.status()).encode()

    # what all calls share
    # ----------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, context: grpc.ServicerContext, operator: bool) -> Iterator[int]:
        """The calling client, identified and within its limits.

        A RefusedError within becomes gRPC's status.
        """
        client = self._identity(context)
        if (client == OPERATOR) is not operator:
            self._turn_away(context, client, "call", "this call is not for this certificate")
        with self._lock:
            free = self._running[client] < MAX_PARALLEL_CALLS and self._left(client) >= 1
            self._running[client] += free
        if not free:
            self._refuse(client, RefusedError("rate", "too many calls"))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
        self._pay(client, 1)
        try:
            yield client
        except RefusedError as refusal:
            self._refuse(client, refusal)
            details = wire.Refusal(name=refusal.name, why=str(refusal)[:500])
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, details.frame().decode())
        finally:
            with self._lock:
                self._running[client] -= 1

    @contextmanager
    def _within(self, seconds: float, client: int, context: grpc.ServicerContext) -> Iterator[None]:
        """Ends the call after so many seconds: messages that never come must not keep a thread."""

        def end() -> None:
            self._refuse(client, RefusedError("silent", f"a call sent too little in {seconds:g} s"))
            context.cancel()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _identity(self, context: grpc.ServicerContext) -> int:
        """The client of a call, or OPERATOR; ends the call of anybody else."""
        names = context.auth_context().get("x509_common_name", [b""])
        who = names[0].decode(errors="replace")
        if refusal := self._refusal(context):
            self._turn_away(context, who, "certificate", refusal)
        if who not in self._names:
            self._turn_away(context, who, "name", f"{who[:40]!r} takes no part in this run")
        return self._names[who]

    def _turn_away(
        self, context: grpc.ServicerContext, who: str | int, name: str, why: str
    ) -> NoReturn:
        """Ends the call of a certificate that may not make it."""
        self._refuse(who, RefusedError(name, why))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        raise AssertionError("abort raises")

    def _refuse(self, who: str | int, refusal: RefusedError) -> None:
        """Counts what was refused of a client, or of an unknown name."""
        name = who[:40] if isinstance(who, str) else certificates.name(who + 1)
        self._coordinator.refuse(name, refusal)

    def _refusal(self, context: grpc.ServicerContext) -> str:
        """Why the certificate of a call is not admitted at this moment; "" if it is."""
        pem = next(iter(context.auth_context().get("x509_pem_cert", [])), b"")
        return self._admission.refusal(pem)

    def _active(self, context: grpc.ServicerContext) -> bool:
        """Whether a call that waits still has a caller whom the server admits."""
        return bool(context.is_active()) and not self._refusal(context)

    def _parsed(self, client: int, first: bytes, kind: type[C]) -> C:
        """The head of a call. Raises RefusedError unless it is of the silo's last process."""
        head = wire.parsed(first, kind)
        self._coordinator.check(client, head.session)
        return head

    def _left(self, client: int) -> float:
        left, when = self._calls.get(client, (MAX_CALLS, 0.0))
        return min(MAX_CALLS, left + (time.monotonic() - when) * CALLS_PER_S)

    def _pay(self, client: int, calls: float) -> None:
        with self._lock:
            self._calls[client] = self._left(client) - calls, time.monotonic()
