"""A silo's connection to the server.

The silo only calls: it has no open port, and works behind NAT and firewalls.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import grpc

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError, shown
from fedml_noniid.plugins.silo import certificates, wire
from fedml_noniid.plugins.silo.coordinator import LONG_POLL_S
from fedml_noniid.plugins.silo.exit_codes import (
    LostError,
    NotAdmittedError,
    QuorumError,
    SetBackError,
    one_line,
)
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_server import KEEPALIVE, SERVICE
from fedml_noniid.plugins.silo.wire import Down, RefusedError, Up

LOG = logging.getLogger(__name__)
FOR_GOOD = ("configuration", "samples", "replaced")  # another try doesn't change them
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


def channel(comm: CommArgs, kit: Path, rank: int) -> grpc.Channel:
    """A channel to the server with the certificates in the folder `kit`. Raises UserError."""
    mine = certificates.Kit.read(kit, rank)
    credentials = grpc.ssl_channel_credentials(mine.ca, mine.key, mine.certificate)
    # Only the server's certificate has this name, whatever its address is.
    name = ("grpc.ssl_target_name_override", certificates.SERVER)
    return grpc.secure_channel(comm.server, credentials, [*OPTIONS, name])


def status(comm: CommArgs, kit: Path) -> dict[str, Any]:
    """The state of a server, for the holder of its kit. Raises UserError."""
    with channel(comm, kit, 0) as line:
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
    """One silo's calls.

    Each is repeated until the server answers, with pauses that grow and are jittered.
    """

    def __init__(
        self,
        comm: CommArgs,
        kit: Path,
        client: int,
        terms: str,
        n: int,
        code: Mapping[str, str] | None = None,
    ) -> None:
        """`client` counts from 0; `terms` is the fingerprint of the silo's configuration; `n` is
        n_k; `code`: the methods that are not ours -> SHA-256 of their source."""
        self._comm, self._client, self._terms = comm, client, terms
        self._session, self._jitter = secrets.token_hex(8), random.Random()
        self._hello = wire.Hello(
            session=self._session, terms=terms, samples=n, code=dict(code or {})
        )
        self._call = wire.Call(session=self._session).frame()
        self._channel = channel(comm, kit, client + 1)
        self._over = threading.Event()
        self.run = ""

    def __enter__(self) -> SiloClient:
        self.hello()
        threading.Thread(target=self._attend, name="attend", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._channel.close()

    def hello(self) -> None:
        """Introduces this process. Raises NotAdmittedError, LostError."""
        call, frame = self._channel.unary_unary(f"/{SERVICE}/Hello"), self._hello.frame()
        welcome = self._patiently(
            lambda: wire.parsed(call(frame, timeout=30.0) or b"", wire.Welcome)
        )
        if self.run and welcome.run != self.run:
            raise UserError(
                f"the server has lost run {self.run} and is at run {shown(welcome.run)}; "
                "delete this silo's file of the old run and start it again"
            )
        self.run = welcome.run

    def serve(self, answered: Callable[[Down], Up]) -> None:
        """Answers until the run is over. Raises UserError."""
        while (down := self.task()) is not None:
            try:
                up = answered(down)
            except UserError as error:
                LOG.warning("exchange %d: %s", down.exchange, error)
                self.fail(down.exchange, str(error))
                if isinstance(error, SetBackError):
                    raise
            else:
                self.answer(up)

    def task(self) -> Down | None:
        """The next message; None when the run is over.

        Raises UserError if the server has given the run up.
        """
        call = self._channel.unary_stream(f"/{SERVICE}/Task")
        began = time.monotonic()
        found: Down | str = "wait"
        while found == "wait":
            try:
                found = self._patiently(lambda: self._read(call(self._call, timeout=self._long_s)))
            except RefusedError as refusal:
                if refusal.name != "restarted":
                    raise
                self.hello()
                self._pause(time.monotonic() - began)
        return None if isinstance(found, str) else found

    def answer(self, up: Up) -> None:
        """Sends an answer, unless the server has gone on without it."""
        head = wire.Answer(session=self._session, exchange=up["exchange"])
        self._send(head, lambda: wire.body(up["leaves"]))

    def fail(self, exchange: int, why: str) -> None:
        """Lets the server know that this silo can't answer."""
        head = wire.Answer(session=self._session, exchange=exchange, failed=one_line(why, 500))
        self._send(head, lambda: iter(()))

    @property
    def _long_s(self) -> float:
        """Seconds for a call that may move a model over a slow line."""
        return max(self._comm.deadline_s, 2 * LONG_POLL_S)

    def _send(self, head: wire.Answer, body: Callable[[], Iterator[bytes]]) -> None:
        call = self._channel.stream_unary(f"/{SERVICE}/Answer")
        try:
            self._patiently(lambda: call(chain([head.frame()], body()), timeout=self._long_s))
        except RefusedError as refusal:
            # Late, or sent twice because the first reply was lost, or the server was started again
            # and will ask again.
            usual = refusal.name in ("stale", "duplicate", "restarted")
            level = logging.DEBUG if usual else logging.WARNING
            LOG.log(level, "the server refused this answer: %s", refusal)
            if refusal.name == "restarted":
                self.hello()

    def _read(self, stream: Iterator[bytes]) -> Down | str:
        """One message of the server, "wait" or "over". Raises UserError if it is malformed, or
        ends the run."""
        received, began = iter(stream), time.monotonic()
        task = wire.parsed(wire.following(received), wire.Task)
        if task.kind == "stop":
            raise QuorumError(f"the server ended the run: {task.why}; its log says more")
        if task.kind == "wait" and time.monotonic() - began < LONG_POLL_S / 2:
            raise RefusedError("malformed", "our server waits before it says that there is no work")
        if task.kind != "ask":
            return task.kind
        table, most = wire.table(wire.following(received)), self._comm.max_message_mb << 20
        if (size := wire.size_of(table)) > most:
            raise RefusedError("oversize", f"message of {size} bytes; allowed: {most}")
        trees = wire.nested(wire.read(received, table))
        ask = Ask(task.job, (self._client,), **trees, owner=task.owner)
        return Down(task.exchange, task.round, ask, self._terms, {self._client: task.counted})

    def _attend(self) -> None:
        """Keeps the stream open that shows the server that this silo is there."""
        call = self._channel.unary_stream(f"/{SERVICE}/Attend")
        while not self._over.is_set():
            # The main thread deals with everything that this thread meets.
            with contextlib.suppress(grpc.RpcError, ValueError):
                for _ in call(self._call):
                    pass
            self._over.wait(self._jitter.uniform(0.5, 1.0))

    def _patiently(self, call: Callable[[], T]) -> T:
        """What `call` returns, once the server answers.

        Raises RefusedError, NotAdmittedError, LostError.
        """
        began, comm = time.monotonic(), self._comm
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                _raise_refusal(error)
                reason = _reason(error)
            except RefusedError as refusal:
                if refusal.name not in ("malformed", "truncated"):
                    raise
                reason = f"its reply makes no sense: {refusal}"
            waited = time.monotonic() - began
            if waited > comm.lost_s:
                raise LostError(
                    f"no contact with the server at {comm.server} for {comm.lost_s:g} s ({reason})"
                )
            self._pause(waited)

    def _pause(self, waited: float) -> None:
        """Sleeps for longer, the longer this silo has waited (seconds)."""
        pause = min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        time.sleep(pause * self._jitter.uniform(0.5, 1.5))


def _raise_refusal(error: grpc.RpcError) -> None:
    """Raises the server's refusal, if that is the error: NotAdmittedError if another try can't
    change it, otherwise RefusedError."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        raise NotAdmittedError(f"the server does not admit this silo: {details[:300]}") from None
    if "CERTIFICATE_VERIFY_FAILED" in details:
        raise NotAdmittedError(
            "the process at comm_args.server has no certificate of this federation; check "
            "address and ca.crt"
        ) from None
    if code is not grpc.StatusCode.FAILED_PRECONDITION:
        return
    try:
        found = wire.parsed(details.encode(), wire.Refusal)
    except RefusedError:
        return  # our server did not write this
    if found.name in FOR_GOOD:
        raise NotAdmittedError(f"the server refuses this silo: {found.why}") from None
    raise RefusedError(found.name, found.why) from None


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower()}: {' '.join((error.details() or '').split())[:200]}"
