"""A silo's connection to the server: one stream, which is opened again when it breaks.

The silo only calls: it has no open port, and works behind NAT and firewalls.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import PublicError, UserError, one_line, shown
from fedml_noniid.credentials import certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.yaml_files import json_of
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.exit_codes import LostError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.stream import KEEPALIVE, SERVICE, Stream, wait_for
from fedml_noniid.deploy.wire import Down, RefusedError, Up

LOG = logging.getLogger(__name__)
# A late answer, one that was sent twice since the line broke, or a line that broke.
USUAL = ("stale", "duplicate", "broken", "truncated", "silent")
WELCOME_S = 30.0  # seconds until the server answers Hello
STEADY_S = 5.0  # a stream that was idle so long, between two messages, was a contact
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two tries, before jitter
PAUSE = 0.1  # of the time that the server has been away
OPTIONS = [
    *KEEPALIVE,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # gRPC's own pauses between connections grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
T = TypeVar("T")
# The silo's own decision about a task: called with its head and its table before a byte of its
# tensors is read. It raises UserError.
Admit = Callable[[wire.Task, wire.Table], object]


def channel(comm: CommArgs, kit: Kit, module: Any = grpc) -> Any:
    """A channel to the server; `module`: grpc or grpc.aio."""
    credentials = grpc.ssl_channel_credentials(kit.ca, kit.key, kit.certificate)
    # Only the server's certificate has this name, whatever its address is.
    name = ("grpc.ssl_target_name_override", certificates.SERVER)
    return module.secure_channel(comm.server, credentials, [*OPTIONS, name])


def status(comm: CommArgs, kit: Path) -> dict[str, Any]:
    """The state of a server, for the holder of its kit. Raises UserError."""
    with channel(comm, Kit.read(kit, 0)) as line:
        call = line.unary_unary(f"/{SERVICE}/Status")
        try:
            return dict(json_of(call(b"{}", timeout=5.0)))
        except grpc.RpcError as error:
            raise LostError(
                f"no answer from {comm.server} ({_reason(error)[0]}); is the server running?"
            ) from None
        except (ValueError, TypeError):
            raise LostError(
                f"{comm.server} answers, but not as a server of this package does"
            ) from None


class SiloClient:
    """One silo's stream.

    When it breaks, it is opened again, with pauses that grow and are jittered.
    """

    def __init__(
        self,
        comm: CommArgs,
        kit: Path,
        client: int,
        hello: wire.Hello,
        admit: Admit = lambda *_: None,
        witness: wire.Witness = wire.unwitnessed,
        run: str = "",
    ) -> None:
        """`client` counts from 0. `witness` is called with every message. `run`: the name of the
        run that this silo has a memory of; "" without one."""
        self._comm, self._folder, self._client, self._hello = comm, kit, client, hello
        self._admit, self._witness = admit, witness
        self._jitter = random.Random()
        self._kit = Kit.read(kit, client + 1)
        self._channel: Any = None
        self._stream: Stream | None = None
        self._contact = 0.0  # monotonic seconds
        self._answered: tuple[object, Up] = ("", {})  # the last task, and its upload
        self.run = run
        self._named = ""  # the refusal that the log has named last

    def __enter__(self) -> SiloClient:
        self._contact = time.monotonic()
        self._patiently(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        wait_for(self._close())

    def serve(self, answered: Callable[[Down], Up]) -> None:
        """Answers until the run is over. Raises UserError."""
        while self._patiently(lambda: self._turn(answered)):
            pass

    def _turn(self, answered: Callable[[Down], Up]) -> bool:
        """Waits for a task and answers it; False when the run is over.

        Raises RefusedError if the server gives the run up, or ends it too early.
        """
        stream = self._stream or self._open()
        refusal: UserError | None = None

        def look(task: wire.Task, table: wire.Table) -> bool:
            nonlocal refusal
            try:
                self._admit(task, table)
            except UserError as error:
                refusal = error
            return refusal is not None

        began = time.monotonic()
        message = wait_for(stream.read(wire.Task, None, look))
        task = message.head
        asked = task.model_copy(update={"seal": None}), message.sha256
        if task.kind != "ask":
            if time.monotonic() - began > STEADY_S:
                self._contact = time.monotonic()
            if task.kind == "stop":
                raise RefusedError("stop", f"it has given the run up: {task.why}")
            self._admit(task, {})
            return False
        answer = wire.Answer(exchange=task.exchange, step=task.step)
        is_new = asked != self._answered[0]  # else the answer was not taken whole
        try:
            if refusal is not None:
                raise refusal
            if is_new:
                self._answered = "", {}
                trees, counted = wire.nested(message.tensors), {self._client: task.counted}
                ask = Ask(task.job, (self._client,), **trees, owner=task.owner)
                down = Down(task.exchange, task.round, ask, "", counted, task.step, message.sha256)
                self._answered = asked, answered(down)
        except UserError as error:
            refusal = error
        if is_new:  # after the computation, which is no wait for the server
            self._contact = time.monotonic()
        if refusal is None:
            wait_for(stream.write(answer, self._answered[1]["leaves"]))
            return True
        LOG.warning("exchange %d: %s", task.exchange, refusal)
        wait_for(stream.write(answer.model_copy(update={"failed": _for_server(refusal)})))
        return True

    # the stream
    # ----------------------------------------------------------------------------------------------

    def _open(self) -> Stream:
        """Opens the stream and introduces this process."""
        self._stream = wait_for(self._call())
        wait_for(self._stream.write(self._hello))
        run = wait_for(self._stream.read(wire.Welcome, WELCOME_S)).head.run
        if self.run and run != self.run:
            raise RefusedError(
                "run",
                f"it is at run {shown(run)}, and this silo at run {self.run}; if the server has "
                "lost that run, delete this silo's memory of it and start the silo again",
            )
        self.run = run
        return self._stream

    async def _call(self) -> Stream:
        await self._close()
        self._renew()
        self._channel = channel(self._comm, self._kit, grpc.aio)
        call = self._channel.stream_stream(f"/{SERVICE}/Session")()
        return Stream(call, certificates.SERVER, self._comm.deadline_s, self._witness)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        self._channel = self._stream = None

    def _renew(self) -> None:
        """Takes the kit as it is on disk now. UserError once its certificate has expired."""
        with suppress(UserError):  # while the operator replaces it
            self._kit = Kit.read(self._folder, self._client + 1)
        if certificates.now() > self._kit.last:
            raise UserError(
                f"this silo's own certificate expired on {self._kit.last:%Y-%m-%d}; ask the "
                "operator for a new kit"
            )

    def _patiently(self, step: Callable[[], T]) -> T:
        """What `step` returns, once the server does its part.

        What the server says ends no silo: it is asked again. Raises LostError, UserError.
        """
        while True:
            try:
                result = step()
                self._named = ""
                return result
            except (grpc.RpcError, RefusedError) as error:
                self._renew()
                reason, level = _reason(error)
            now, stream = time.monotonic(), self._stream
            if stream is not None and stream.idle_since < now - STEADY_S:
                self._contact = now
            waited = now - self._contact
            wait_for(self._close())
            if waited > self._comm.lost_s:
                raise LostError(
                    f"no contact with the server at {self._comm.server} for "
                    f"{self._comm.lost_s:g} s ({reason})"
                )
            if level > logging.DEBUG and reason != self._named:
                LOG.log(level, "the server at %s: %s; asking again", self._comm.server, reason)
                self._named = reason
            self._pause(waited)

    def _pause(self, waited: float) -> None:
        """Sleeps for longer, the longer this silo has waited (seconds)."""
        pause = min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(pause * self._jitter.uniform(0.5, 1.5))


def _for_server(refusal: UserError) -> str:
    """What the server hears of a refusal: rule, key and value, and no file of this silo."""
    if not isinstance(refusal, PublicError):
        return "it can't answer; its own log says why"
    return one_line(refusal.without_source(), 500)


def _reason(error: grpc.RpcError | RefusedError) -> tuple[str, int]:
    """Why the stream has ended, and the level of its line in the log."""
    usual = False
    if isinstance(error, RefusedError):
        reason, usual = f"its message is refused: {error}", error.name in USUAL
    elif "CERTIFICATE_VERIFY_FAILED" in (details := error.details() or ""):
        reason = "has no certificate of this federation; check address and ca.crt"
    else:
        reason, usual = f"{error.code().name.lower()}: {' '.join(details.split())[:200]}", True
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            with suppress(RefusedError):  # then our server did not write this
                said = wire.parsed(details.encode(), wire.Refusal)
                reason, usual = f"it refuses this silo: {said.why}", said.name in USUAL
    return reason, logging.DEBUG if usual else logging.WARNING
