"""A silo's connection to the server: one stream, which is opened again when it breaks.

The silo only calls: it has no open port, and works behind NAT and firewalls.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError, shown
from fedml_noniid.plugins.kits import certificates
from fedml_noniid.plugins.kits.certificates import Kit
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.exit_codes import (
    LostError,
    NotAdmittedError,
    QuorumError,
    SetBackError,
    one_line,
)
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.stream import KEEPALIVE, SERVICE, Stream, wait_for
from fedml_noniid.plugins.silo.wire import Down, RefusedError, Up

LOG = logging.getLogger(__name__)
# Another try doesn't change them. With a renewed kit, "certificate" is worth one.
FOR_GOOD = ("configuration", "samples", "replaced", "certificate", "name", "call")
# A late answer, or one that was sent twice since the line broke.
USUAL = ("stale", "duplicate", "broken")
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
# tensors is read. It raises UserError; the server hears the message.
Admit = Callable[[wire.Task, wire.Table], object]


def channel(comm: CommArgs, kit: Kit, of: Any = grpc) -> Any:
    """A channel to the server; `of`: grpc or grpc.aio."""
    credentials = grpc.ssl_channel_credentials(kit.ca, kit.key, kit.certificate)
    # Only the server's certificate has this name, whatever its address is.
    name = ("grpc.ssl_target_name_override", certificates.SERVER)
    return of.secure_channel(comm.server, credentials, [*OPTIONS, name])


def status(comm: CommArgs, kit: Path) -> dict[str, Any]:
    """The state of a server, for the holder of its kit. Raises UserError."""
    with channel(comm, Kit.read(kit, 0)) as line:
        call = line.unary_unary(f"/{SERVICE}/Status")
        try:
            return dict(json.loads(call(b"{}", timeout=5.0)))
        except grpc.RpcError as error:
            raise LostError(
                f"no answer from {comm.server} ({_reason(error)}); is the server running?"
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
    ) -> None:
        """`client` counts from 0. `witness` is called with every message."""
        self._comm, self._folder, self._client, self._hello = comm, kit, client, hello
        self._admit, self._witness = admit, witness
        self._jitter = random.Random()
        self._kit = Kit.read(kit, client + 1)
        self._channel: Any = None
        self._stream: Stream | None = None
        self._contact = 0.0  # monotonic seconds
        self._answered: tuple[object, Up] = ("", {})  # the last task, and its upload
        self.run = ""

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

        Raises UserError if the server has given the run up, or was set back.
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

        message = wait_for(stream.read(wire.Task, None, look))
        task = message.head
        asked = task.model_copy(update={"seal": None}), message.sha256
        if task.kind == "stop":
            raise QuorumError(f"the server ended the run: {task.why}; its log says more")
        if task.kind == "over":
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
                down = Down(task.exchange, task.round, ask, "", counted, task.step)
                self._answered = asked, answered(down)
        except UserError as error:
            refusal = error
        if is_new:  # after the computation, which is no wait for the server
            self._contact = time.monotonic()
        if refusal is None:
            wait_for(stream.write(answer, self._answered[1]["leaves"]))
            return True
        LOG.warning("exchange %d: %s", task.exchange, refusal)
        wait_for(stream.write(answer.model_copy(update={"failed": one_line(str(refusal), 500)})))
        if isinstance(refusal, SetBackError):
            wait_for(stream.read(wire.Task, None, lambda *_: True))  # the server has heard it
            raise refusal
        return True

    # the stream
    # ----------------------------------------------------------------------------------------------

    def _open(self) -> Stream:
        """Opens the stream and introduces this process."""
        self._stream = wait_for(self._call())
        wait_for(self._stream.write(self._hello))
        run = wait_for(self._stream.read(wire.Welcome, WELCOME_S)).head.run
        if self.run and run != self.run:
            raise UserError(
                f"the server has lost run {self.run} and is at run {shown(run)}; "
                "delete this silo's file of the old run and start it again"
            )
        self.run = run
        return self._stream

    async def _call(self) -> Stream:
        await self._close()
        self._renewed()
        self._channel = channel(self._comm, self._kit, grpc.aio)
        call = self._channel.stream_stream(f"/{SERVICE}/Session")()
        return Stream(call, certificates.SERVER, self._comm.deadline_s, self._witness)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _renewed(self) -> bool:
        """Takes the kit as it is on disk now; says whether it is another one."""
        before = self._kit
        with suppress(UserError):  # while the operator replaces it
            self._kit = Kit.read(self._folder, self._client + 1)
        return self._kit != before

    def _patiently(self, step: Callable[[], T]) -> T:
        """What `step` returns, once the server does its part.

        Raises NotAdmittedError, LostError.
        """
        while True:
            try:
                return step()
            except (grpc.RpcError, RefusedError) as error:
                renewed = self._renewed()
                reason = _reason(error, renewed)
                last = self._kit.last
                if certificates.now() > last:
                    raise NotAdmittedError(
                        f"this silo's own certificate expired on {last:%Y-%m-%d}; ask the operator "
                        "for a new kit"
                    ) from None
            now = time.monotonic()
            if self._stream is not None and self._stream.idle_since < now - STEADY_S:
                self._contact = now
            waited, self._stream = now - self._contact, None
            if waited > self._comm.lost_s:
                raise LostError(
                    f"no contact with the server at {self._comm.server} for "
                    f"{self._comm.lost_s:g} s ({reason})"
                )
            self._pause(waited)

    def _pause(self, waited: float) -> None:
        """Sleeps for longer, the longer this silo has waited (seconds)."""
        pause = min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(pause * self._jitter.uniform(0.5, 1.5))


def _reason(error: grpc.RpcError | RefusedError, renewed: bool = False) -> str:
    """Why the stream has ended. Raises NotAdmittedError if another try can't change it."""
    if isinstance(error, RefusedError):
        return f"its reply makes no sense: {error}"
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        raise NotAdmittedError(
            "the process at comm_args.server has no certificate of this federation; check "
            "address and ca.crt"
        )
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        with suppress(RefusedError):  # then our server did not write this
            found = wire.parsed(details.encode(), wire.Refusal)
            if found.name in FOR_GOOD and not (found.name == "certificate" and renewed):
                raise NotAdmittedError(f"the server refuses this silo: {one_line(found.why)}")
            level = logging.DEBUG if found.name in USUAL else logging.WARNING
            LOG.log(level, "the server has refused a message: %s", found.why)
    return f"{error.code().name.lower()}: {' '.join(details.split())[:200]}"
