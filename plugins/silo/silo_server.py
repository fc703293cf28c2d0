"""The server's one port: gRPC with mutual TLS. Silos call, the server never does.

A silo is known by its certificate. Hello, Attend, Task and Answer are for silos; Status is for the
server's own kit. All messages are bytes of `plugins.silo.frames`; gRPC and this file make no other
objects of them.
"""

from __future__ import annotations

import functools
import json
import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from fedml_noniid.plugins.silo import certificates, frames, wire
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.frames import RefusedError
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.wire import Down

LOG = logging.getLogger(__name__)
SERVICE = "fedml_noniid.Federation"
METHODS = {name: f"_{name.lower()}" for name in ("Hello", "Attend", "Task", "Answer", "Status")}
CALL = {"run": str, "epoch": str, "session": str, "client": int}
HELLO, WELCOME = (
    {"client": int, "session": str, "terms": str, "samples": int},
    {"run": str, "epoch": str},
)
ANSWER = CALL | {"exchange": int, "failed": str}
ASK = {
    "kind": str,
    "why": str,
    "exchange": int,
    "round": int,
    "job": str,
    "owner": str,
    "counted": int,
    "terms": str,
}
MAX_PARALLEL_CALLS = 4  # calls of one silo that run at a time
HEAD_S = 10.0  # the time for the first message of a call
MAX_CALLS, CALLS_PER_S, CALLS_PER_ANSWER = (
    60.0,
    5.0,
    10.0,
)  # a silo's calls: at most, back by the second, back for an answer
MIN_UPLOAD_S = 60.0  # the least time for an upload; more if the deadline is later
MAX_CONNECTIONS = 4096  # at most, also those before TLS; less if the process may open few files
OPERATOR = -1  # who has the server's own kit
Frames = Iterator[bytes]
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", frames.MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", frames.MAX_FRAME_BYTES),
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

    def __init__(self, comm: CommArgs, kit: Path | None, coordinator: Coordinator) -> None:
        """`kit`: the folder with the server's certificates, None for plaintext.

        UserError if the port is taken.
        """
        self._comm, self._coordinator = comm, coordinator
        self._running: Counter[int] = Counter()
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
        pool = ThreadPoolExecutor(threads, "call")
        self._server = grpc.server(
            pool, options=KEEPALIVE + BOUNDS + most, maximum_concurrent_rpcs=10 * threads
        )
        # All are streams: a unary call would wait for its message in a thread before the server
        # knows who calls.
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(
                functools.partial(self._serve, getattr(self, call))
            )
            for method, call in METHODS.items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self._admission: certificates.Admission | None = None
        try:
            if kit is None:
                self._server.add_insecure_port(comm.server)
            else:
                own = certificates.Kit.read(kit, 0)
                self._admission = certificates.Admission(own.ca, kit / "crl.pem")
                credentials = grpc.ssl_server_credentials(
                    [(own.key, own.certificate)], own.ca, True
                )
                self._server.add_secure_port(comm.server, credentials)
        except RuntimeError:
            comm.check_free()  # says why
            raise

    def __enter__(self) -> SiloServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1.0).wait(5.0)

    # calls
    # ----------------------------------------------------------------------------------------------

    def _serve(
        self, call: Callable[..., Frames], stream: Frames, context: grpc.ServicerContext
    ) -> Frames:
        """Answers one call: `call` gets the client, the first message, the messages behind it, and
        gRPC's context."""
        with self._call(context, operator=call == self._status) as client:
            received = self._received(stream)
            with self._within(HEAD_S, client, context):
                first = frames.following(received)
            yield from call(client, first, received, context)

    def _hello(self, client: int, first: bytes, *_: object) -> Frames:
        head = frames.parsed(first, HELLO)
        self._same(client, head)
        yield frames.head(
            self._coordinator.hello(client, head["session"], head["terms"], head["samples"])
        )

    def _attend(
        self, client: int, first: bytes, _: object, context: grpc.ServicerContext
    ) -> Frames:
        head = self._checked(client, first, CALL)
        context.add_callback(self._coordinator.wake)
        context.send_initial_metadata(())
        self._coordinator.attend(client, head["session"], lambda: self._active(context))
        yield from ()

    def _task(self, client: int, first: bytes, _: object, context: grpc.ServicerContext) -> Frames:
        head = self._checked(client, first, CALL)
        context.add_callback(self._coordinator.wake)
        kind, what = self._coordinator.task(client, head["session"], lambda: self._active(context))
        self._identity(
            context
        )  # again: the certificate may have been revoked while the call waited
        if isinstance(what, Down):
            assert what.ask is not None, "an open exchange has a message"
            counted = what.counted[client]
            values = (
                kind,
                "",
                what.exchange,
                what.round,
                what.ask.job,
                what.ask.owner,
                counted,
                what.terms,
            )
            yield self._sent(frames.head(dict(zip(ASK, values, strict=True))))
            for frame in frames.Body(wire.tensors(what)).frames():
                yield self._sent(frame)
        else:
            yield self._sent(
                frames.head(dict(zip(ASK, (kind, what, 0, 0, "", "", 0, ""), strict=True)))
            )

    def _answer(
        self, client: int, first: bytes, received: Frames, context: grpc.ServicerContext
    ) -> Frames:
        head = self._checked(client, first, ANSWER)
        if head["failed"]:
            why = head["failed"].removeprefix(f"{wire.silo(client)}: ")[:500]
            self._coordinator.fail(client, head["exchange"], f"{wire.silo(client)}: {why}")
            yield b"{}"
            return
        schema, where = self._coordinator.expected(client, head["exchange"])
        try:
            with self._within(max(self._comm.deadline_s, MIN_UPLOAD_S), client, context):
                leaves = frames.table(frames.following(received))
                wire.fit(leaves, schema, where)  # before memory is taken
                up = wire.Up(
                    client=client, exchange=head["exchange"], leaves=frames.read(received, leaves)
                )
        except RefusedError as refusal:
            if (
                refusal.name != "truncated"
            ):  # else the silo died or the line broke, and it will try again
                self._coordinator.fail(client, head["exchange"], str(refusal))
            raise
        self._identity(
            context
        )  # again: the certificate may have been revoked while the upload came
        self._coordinator.accept(client, up)
        self._pay(client, -CALLS_PER_ANSWER)
        yield b"{}"

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
            self._turn_away(
                context,
                certificates.name(client + 1),
                "call",
                "this call is not for this certificate",
            )
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
            told = json.dumps({"name": refusal.name, "why": str(refusal)[:500]})
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, told)
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
        if self._admission is None:
            who = dict(context.invocation_metadata()).get("name", "")
        else:
            who = next(iter(context.auth_context().get("x509_common_name", [])), b"").decode(
                errors="replace"
            )
            if refusal := self._refusal(context):
                self._turn_away(context, who, "certificate", refusal)
        names = {certificates.name(rank): rank - 1 for rank in range(self._coordinator.silos + 1)}
        if who not in names:
            self._turn_away(context, who, "name", f"{who[:40]!r} takes no part in this run")
        return names[who]

    def _turn_away(self, context: grpc.ServicerContext, who: str, name: str, why: str) -> None:
        """Ends the call of a certificate that may not make it."""
        self._coordinator.refuse(who[:40], RefusedError(name, why))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def _refuse(self, client: int, refusal: RefusedError) -> None:
        self._coordinator.refuse(certificates.name(client + 1), refusal)

    def _refusal(self, context: grpc.ServicerContext) -> str:
        """Why the certificate of a call is not admitted at this moment; "" if it is."""
        pem = next(iter(context.auth_context().get("x509_pem_cert", [])), b"")
        return "" if self._admission is None else self._admission.refusal(pem)

    def _active(self, context: grpc.ServicerContext) -> bool:
        """Whether a call that waits still has a caller whom the server admits."""
        return bool(context.is_active()) and not self._refusal(context)

    def _checked(self, client: int, first: bytes, kinds: dict[str, type]) -> dict[str, Any]:
        head = frames.parsed(first, kinds)
        self._same(client, head)
        self._coordinator.check(client, head)
        return head

    @staticmethod
    def _same(client: int, head: dict[str, Any]) -> None:
        if head["client"] != client:
            raise RefusedError(
                "identity",
                f"{wire.silo(client)}: message says that it is of client {head['client']}",
            )

    def _left(self, client: int) -> float:
        left, when = self._calls.get(client, (MAX_CALLS, 0.0))
        return min(MAX_CALLS, left + (time.monotonic() - when) * CALLS_PER_S)

    def _pay(self, client: int, calls: float) -> None:
        with self._lock:
            self._calls[client] = self._left(client) - calls, time.monotonic()

    def _sent(self, frame: bytes) -> bytes:
        self._coordinator.bytes_out += len(frame)
        return frame

    def _received(self, stream: Frames) -> Frames:
        for frame in stream:
            self._coordinator.bytes_in += len(frame)
            yield frame
