"""The server's one port: gRPC with mutual TLS. Silos call, the server never does.

A silo is known by its certificate. It has one stream, Session; Status is for the server's own kit.
All messages are bytes of `plugins.silo.wire`; gRPC and this file make no other objects of them. An
event loop in a thread of its own runs all calls.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fedml_noniid.plugins.core.trees import Params
from fedml_noniid.plugins.silo import certificates, wire
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.wire import H, RefusedError

SERVICE = "fedml_noniid.Federation"
MAX_NEW_STREAMS = 4  # of one silo, beside the one that it has
HEAD_S = 10.0  # the time for the first message of a call
MAX_CALLS, CALLS_PER_S = 60.0, 5.0  # of a silo: at most, and back by the second
MIN_TRANSFER_S = 60.0  # the least time for a message; more if the deadline is later
RECHECK_S = 2.0  # all open streams are checked so often for certificates that are admitted no more
MAX_CONNECTIONS = 4096  # also those before TLS; less if the process may open few files
OPERATOR = -1  # the client number of the server's own kit
# The line broke, or the exchange is over. After any other refusal of an answer, the silo is out of
# the exchange.
MAY_TRY_AGAIN = ("truncated", "silent", "certificate", "stale", "duplicate")
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
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_metadata_size", 1 << 14),
]


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process. Its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises RefusedError if this takes longer: `what` has not happened."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RefusedError("silent", f"{what} within {seconds:g} s") from None


Answering = Callable[[int, "Call"], Awaitable[None]]


class Call:
    """A call of a certificate's holder: its messages, with time limits."""

    def __init__(self, context: Any, rest_s: float, witness: wire.Witness) -> None:
        """`rest_s`: seconds for a message whose head has come, and for one that is sent."""
        names, self.pem = (
            next(iter(context.auth_context().get(key, [])), b"")
            for key in ("x509_common_name", "x509_pem_cert")
        )
        self.who = names.decode(errors="replace")
        self.due = asyncio.Event()  # set: there may be something to send
        self.refusal: RefusedError | None = None  # why `end` has ended it
        self.context, self._rest_s, self._witness = context, rest_s, witness
        self._loop = asyncio.get_running_loop()
        self._task: Any = asyncio.current_task()

    def wake(self) -> None:
        """Lets the call look for something to send. From any thread."""
        self._loop.call_soon_threadsafe(self.due.set)

    def end(self, refusal: RefusedError) -> None:
        """Ends the call, whatever it waits for. From any thread."""

        def cancel() -> None:
            self.refusal = refusal
            self._task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    async def read(
        self, kind: type[H], head_s: float, look: wire.Look = lambda *_: True
    ) -> wire.Message[H]:
        """The next message; its head is there within `head_s` seconds. Raises RefusedError."""
        steps, name = wire.arriving(kind, look), kind.__name__
        next(steps)
        async with within(head_s, f"no {name} came"):
            message = steps.send(await self._frame())
        async with within(self._rest_s, f"the {name} did not end"):
            while message is None:
                message = steps.send(await self._frame())
        self._witness(self.who, False, message)
        return message

    async def write(self, head: wire.Head, tensors: Params | None = None) -> None:
        """Sends a message. Raises RefusedError if the silo does not take it."""

        def left(message: wire.Message[wire.Head]) -> None:
            self._witness(self.who, True, message)

        async with within(self._rest_s, f"the {type(head).__name__} was not taken"):
            for frame in wire.leaving(head, tensors, left):
                await self.context.write(frame)

    async def _frame(self) -> bytes:
        frame: bytes = await self.context.read()
        if frame is grpc.aio.EOF:
            raise RefusedError("truncated", "the message ended too early")
        return frame


class SiloServer:
    """Listens while it is open."""

    def __init__(
        self,
        comm: CommArgs,
        kit: Path,
        coordinator: Coordinator,
        witness: wire.Witness = lambda *_: None,
    ) -> None:
        """`kit`: the folder with the server's certificates. `witness` is called in the event loop
        with every message.

        UserError if the kit is bad.
        """
        self._comm, self._coordinator, self._witness = comm, coordinator, witness
        self._names = {certificates.name(k + 1): k for k in range(OPERATOR, coordinator.silos)}
        self._calls: set[Call] = set()  # the open streams
        self._new: Counter[int] = Counter()  # streams by client that have not said hello
        self._rates: dict[int, tuple[float, float]] = {}  # client -> (calls left, when)
        self._checks = ThreadPoolExecutor(1, "check")
        mine = certificates.Kit.read(kit, 0)
        self._admission = certificates.Admission(mine.ca, kit / "crl.pem")
        self._credentials = grpc.ssl_server_credentials(
            [(mine.key, mine.certificate)], mine.ca, True
        )

    def __enter__(self) -> SiloServer:
        asyncio.run_coroutine_threadsafe(self._start(), event_loop()).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), event_loop()).result()

    async def _start(self) -> None:
        # A quarter of the file descriptors is left for files, whatever strangers do.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = min(hard, 2 * MAX_CONNECTIONS) if hard > 0 else 2 * MAX_CONNECTIONS
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        most = [("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, files * 3 // 4))]
        self._server = grpc.aio.server(options=KEEPALIVE + BOUNDS + most)
        # All are streams: gRPC would wait for the message of a unary call before it calls us.
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(partial(self._serve, self._session)),
            "Status": grpc.stream_stream_rpc_method_handler(partial(self._serve, self._status)),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self._server.add_secure_port(self._comm.server, self._credentials)
        await self._server.start()
        self._rechecks = asyncio.create_task(self._recheck())

    async def _stop(self) -> None:
        self._rechecks.cancel()
        await self._server.stop(1.0)

    # calls
    # ----------------------------------------------------------------------------------------------

    async def _serve(self, answer: Answering, _: object, context: Any) -> None:
        """Serves one call. All that is known without a message is checked before one is awaited.

        A RefusedError becomes gRPC's status.
        """
        call = Call(context, max(self._comm.deadline_s, MIN_TRANSFER_S), self._witness)
        try:
            client = self._admitted(call, operator=answer == self._status)
            await answer(client, call)
            return
        except RefusedError as error:
            refusal = error
        except asyncio.CancelledError:
            if call.refusal is None:  # the caller has left
                raise
            refusal = call.refusal
        self._coordinator.refuse(call.who, refusal)
        details = wire.Refusal(name=refusal.name, why=str(refusal)[:500])
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, details.frame().decode())

    async def _status(self, _: int, call: Call) -> None:
        await call.context.write(json.dumps(self._coordinator.status()).encode())

    async def _session(self, client: int, call: Call) -> None:
        """Sends a silo its tasks and takes its answers, in turns."""
        self._new[client] += 1
        try:
            hello = await call.read(wire.Hello, HEAD_S)
        finally:
            self._new[client] -= 1
        welcome = self._coordinator.join(client, hello.head, call)
        self._calls.add(call)
        try:
            await call.write(welcome)
            while await self._turn(client, call):
                pass
        finally:
            self._calls.remove(call)
            self._coordinator.leave(client, call)

    async def _turn(self, client: int, call: Call) -> bool:
        """Waits for a task, sends it, and takes the answer; False once the run is over."""
        call.due.clear()
        found = self._coordinator.task(client)
        if found is None:
            await call.due.wait()
            return True
        if isinstance(found, wire.Task):
            await call.write(found)
            return False
        self._check(call)  # again: it may be revoked since the call began
        await call.write(wire.Task.of(found), wire.tensors(found))
        return await self._upload(client, found.exchange, call)

    async def _upload(self, client: int, exchange: int, call: Call) -> bool:
        """Takes the answer to the exchange; False if it is the silo's last. Raises RefusedError."""

        def look(answer: wire.Answer, table: wire.Table) -> bool:
            wire.fit(table, self._coordinator.expected(client, answer.exchange), wire.silo(client))
            return True

        try:
            # Afterwards the exchange is over, so the answer would come too late.
            longest = max(self._comm.deadline_s, self._comm.patience_s)
            answer = await call.read(wire.Answer, longest, look)
            self._check(call)  # again: the certificate may be revoked since the call began
            accept = partial(self._coordinator.accept, client, answer.head, answer.tensors)
            await event_loop().run_in_executor(self._checks, accept)
            return not answer.head.last
        except RefusedError as refusal:
            if refusal.name not in MAY_TRY_AGAIN:
                self._coordinator.fail(client, exchange, str(refusal))
            raise

    # who may call
    # ----------------------------------------------------------------------------------------------

    def _admitted(self, call: Call, operator: bool) -> int:
        """The client of a call, or OPERATOR. Raises RefusedError if it may not make this call."""
        self._check(call)
        client = self._names.get(call.who)
        if client is None:
            raise RefusedError("name", f"{call.who[:40]!r} takes no part in this run")
        if (client == OPERATOR) is not operator:
            raise RefusedError("call", "this call is not for this certificate")
        now, (left, since) = time.monotonic(), self._rates.get(client, (MAX_CALLS, 0.0))
        left = min(MAX_CALLS, left + (now - since) * CALLS_PER_S)
        if left < 1 or self._new[client] >= MAX_NEW_STREAMS:
            raise RefusedError("rate", "too many calls")
        self._rates[client] = left - 1, now
        return client

    def _check(self, call: Call) -> None:
        """Raises RefusedError if the certificate of a call is not admitted at this moment."""
        if why := self._admission.refusal(call.pem):
            raise RefusedError("certificate", why)

    async def _recheck(self) -> None:
        """Ends the streams of certificates that are not admitted any more."""
        while True:
            await asyncio.sleep(RECHECK_S)
            for call in self._calls:
                if why := self._admission.refusal(call.pem):
                    call.end(RefusedError("certificate", why))
