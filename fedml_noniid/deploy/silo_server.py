"""The server's one port: gRPC with mutual TLS. Silos call, the server never does.

A silo is known by its certificate. It has one stream, Session; Status is for the server's own kit.
All messages are bytes of `deploy.wire`; gRPC and this file make no other objects of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc
import grpc.aio
from cryptography import x509

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import certificates
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.exit_codes import BrokenError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.stream import KEEPALIVE, SERVICE, Stream, event_loop, wait_for, within
from fedml_noniid.deploy.wire import RefusedError

LOG = logging.getLogger(__name__)
HEAD_S = 10.0  # the time for the first message of a call
MAX_CALLS, CALLS_PER_S = 20.0, 2.0  # of a silo: at once, and by the second
RECHECK_S = 2.0  # all open streams are checked so often for certificates that are admitted no more
MAX_CONNECTIONS = 4096  # also those before TLS; less if the process may open few files
OPERATOR = -1  # the client number of the server's own kit
# The line broke, or the exchange is over. After any other refusal of an answer, the silo is out of
# the exchange.
MAY_TRY_AGAIN = ("truncated", "silent", "certificate", "stale", "duplicate")
BOUNDS = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_metadata_size", 1 << 14),
]


class Call(Stream):
    """The stream of a caller, whom its certificate names."""

    def __init__(self, context: Any, deadline_s: float, witness: wire.Witness) -> None:
        names, self.pem = (
            next(iter(context.auth_context().get(key, [])), b"")
            for key in ("x509_common_name", "x509_pem_cert")
        )
        super().__init__(context, names.decode(errors="replace"), deadline_s, witness)
        self.due = asyncio.Event()  # set: there may be something to send
        self.refusal: RefusedError | None = None  # why `end` has ended it
        self._task: Any = asyncio.current_task()

    def wake(self) -> None:
        """Lets the call look for something to send. From any thread."""
        event_loop().call_soon_threadsafe(self.due.set)

    def end(self, refusal: RefusedError) -> None:
        """Ends the call, whatever it waits for. From any thread."""
        self.refusal = refusal
        event_loop().call_soon_threadsafe(self._task.cancel)


Answering = Callable[[int, Call], Awaitable[None]]


class SiloServer:
    """Listens while it is open."""

    def __init__(
        self,
        comm: CommArgs,
        kit: Path,
        coordinator: Coordinator,
        witness: wire.Witness = wire.unwitnessed,
    ) -> None:
        """`kit`: the folder with the server's certificates. `witness` is called in the event loop
        with every message.

        UserError if the kit is bad.
        """
        self._comm, self._coordinator, self._witness = comm, coordinator, witness
        self._names = {certificates.name(k + 1): k for k in range(OPERATOR, coordinator.silos)}
        self._calls: WeakSet[Call] = WeakSet()  # those that are open
        self._rates: dict[int, tuple[float, float]] = {}  # client -> (calls left, when)
        self._kits: dict[str, str] = {}  # name -> last moment of its certificate
        self._checks = ThreadPoolExecutor(1, "check")
        self._kit, self._mine = kit, certificates.Kit.read(kit, 0)
        self._admission = certificates.Admission(self._mine.ca, kit / "crl.pem")
        coordinator.ca = x509.load_pem_x509_certificate(self._mine.ca)

    def __enter__(self) -> SiloServer:
        wait_for(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        wait_for(self._stop())

    async def _start(self) -> None:
        # A quarter of the file descriptors is left for files, whatever strangers do.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = min(hard, 2 * MAX_CONNECTIONS) if hard > 0 else 2 * MAX_CONNECTIONS
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        most = [("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, files * 3 // 4))]
        self._options = KEEPALIVE + BOUNDS + most
        await self._listen()
        self._rechecks = asyncio.create_task(self._recheck())

    async def _listen(self) -> None:
        mine, self._server = self._mine, grpc.aio.server(options=self._options)
        # All are streams: gRPC would wait for the message of a unary call before it calls us.
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(partial(self._serve, answer))
            for name, answer in (("Session", self._session), ("Status", self._status))
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        own = [(mine.key, mine.certificate)]
        credentials = grpc.ssl_server_credentials(own, mine.ca, True)
        self._server.add_secure_port(self._comm.server, credentials)
        await self._server.start()

    async def _stop(self) -> None:
        self._rechecks.cancel()
        await self._server.stop(1.0)

    # calls
    # ----------------------------------------------------------------------------------------------

    async def _serve(self, answer: Answering, _: object, context: Any) -> None:
        """Serves one call. All that is known without a message is checked before one is awaited.

        A RefusedError becomes gRPC's status.
        """
        call = Call(context, self._comm.deadline_s, self._witness)
        self._calls.add(call)
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
        await call.call.write(
            json.dumps(self._coordinator.status() | {"kits": self._kits}).encode()
        )

    async def _session(self, client: int, call: Call) -> None:
        """Sends a silo its tasks and takes its answers, in turns."""
        hello = await call.read(wire.Hello, HEAD_S)
        welcome = self._coordinator.join(client, hello.head, call)
        try:
            await call.write(welcome)
            while not isinstance(task := self._coordinator.task(client), wire.Task):
                try:
                    if task is not None:
                        self._check(call)  # again: it may be revoked since the stream began
                        head, tensors = wire.Task.from_down(task), wire.tensors(task)
                        await call.write(head, tensors, task.sha256)
                        await self._upload(client, task.at, call)
                        continue
                except BrokenError:  # between two messages: the silo hears that the run ends
                    pass
                await call.due.wait()
                call.due.clear()
            await call.write(task)
            # The silo leaves first. When a stream ends, gRPC may drop unread messages.
            async with within(HEAD_S, "the silo did not leave"):
                await call.call.read()
        finally:
            self._coordinator.leave(client, call)

    async def _upload(self, client: int, at: tuple[int, int], call: Call) -> None:
        """Takes the answer to (exchange, step). Raises RefusedError."""

        def look(answer: wire.Answer, table: wire.Table) -> None:
            wire.fit(table, self._coordinator.expected(client, answer.at), wire.silo(client))

        try:
            # Afterwards the exchange is over, so the answer would come too late.
            longest = max(self._comm.deadline_s, self._comm.patience_s)
            answer = await call.read(wire.Answer, longest, look)
            self._check(call)
            whole = answer.head, answer.tensors, answer.sha256
            accept = partial(self._coordinator.accept, client, *whole)
            await event_loop().run_in_executor(self._checks, accept)
        except RefusedError as refusal:
            if refusal.name not in MAY_TRY_AGAIN:
                self._coordinator.fail(client, at, str(refusal))
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
        if left < 1:
            raise RefusedError("rate", "too many calls")
        self._rates[client] = left - 1, now
        self._kits[call.who] = self._admission.last_moment(call.pem)
        return client

    def _check(self, call: Call) -> None:
        """Raises RefusedError if the certificate of a call is not admitted at this moment."""
        if why := self._admission.refusal(call.pem):
            raise RefusedError("certificate", why)

    async def _recheck(self) -> None:
        """Ends the streams of certificates that are not admitted any more; takes a renewed kit."""
        try:
            while True:
                await asyncio.sleep(RECHECK_S)
                with suppress(UserError):  # while the operator replaces it
                    before, self._mine = self._mine, certificates.Kit.read(self._kit, 0)
                    if self._mine != before:  # gRPC's own way to change them crashes under load
                        await self._server.stop(None)
                        await self._listen()
                for call in [*self._calls]:
                    if why := self._admission.refusal(call.pem):
                        call.end(RefusedError("certificate", why))
        except Exception as error:  # of any kind, as nobody awaits this task: it would be lost
            LOG.exception("unexpected")
            self._coordinator.give_up(BrokenError(f"the server can't listen again: {error}"))
