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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError, shown
from fedml_noniid.plugins.silo import certificates, frames, wire
from fedml_noniid.plugins.silo.coordinator import LONG_POLL_S
from fedml_noniid.plugins.silo.exit_codes import LostError, NotAdmittedError, QuorumError
from fedml_noniid.plugins.silo.frames import RefusedError
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_server import ASK, HELLO, KEEPALIVE, SERVICE, WELCOME
from fedml_noniid.plugins.silo.wire import Down, Up

LOG = logging.getLogger(__name__)
FOR_GOOD = (
    "configuration",
    "samples",
    "replaced",
    "identity",
)  # refusals that another try doesn't change
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


def channel(comm: CommArgs, kit: Path | None, rank: int) -> grpc.Channel:
    """A channel to the server; `kit` None for plaintext. Raises UserError."""
    if kit is None:
        return grpc.insecure_channel(comm.server, OPTIONS)
    own = certificates.Kit.read(kit, rank)
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    # Only the server's certificate has this name, whatever its address is.
    name = ("grpc.ssl_target_name_override", certificates.SERVER)
    return grpc.secure_channel(comm.server, credentials, [*OPTIONS, name])


def status(comm: CommArgs, kit: Path | None) -> dict[str, Any]:
    """The state of a server, asked with its own kit. Raises UserError."""
    with channel(comm, kit, 0) as line:
        call = line.unary_unary(f"/{SERVICE}/Status")
        try:
            return dict(
                json.loads(call(b"{}", timeout=5.0, metadata=(("name", certificates.SERVER),)))
            )
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
        self, comm: CommArgs, kit: Path | None, client: int, terms: str, samples: int
    ) -> None:
        """`client` counts from 0; `terms` is the fingerprint of the silo's configuration; `samples`
        is n_k."""
        self._comm, self._client, self._terms, self._samples = comm, client, terms, samples
        self._session, self._jitter = secrets.token_hex(8), random.Random()
        self._metadata = (("name", certificates.name(client + 1)),)  # read in plaintext only
        self._channel = channel(comm, kit, client + 1)
        self._over = threading.Event()
        self._head: dict[str, Any] = {}
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
        values = (self._client, self._session, self._terms, self._samples)
        head, call = (
            frames.head(dict(zip(HELLO, values, strict=True))),
            self._channel.unary_unary(f"/{SERVICE}/Hello"),
        )
        welcome = self._patiently(
            lambda: frames.parsed(call(head, timeout=30.0, metadata=self._metadata) or b"", WELCOME)
        )
        if self.run and welcome["run"] != self.run:
            raise UserError(
                f"the server has lost run {self.run} and is at run {shown(welcome['run'])}; "
                "delete this silo's file "
                "of the old run and start it again"
            )
        self.run = welcome["run"]
        self._head = {**welcome, "session": self._session, "client": self._client}

    def task(self) -> Down | None:
        """The next message; None when the run is over.

        Raises UserError if the server has given the run up.
        """
        call = self._channel.unary_stream(f"/{SERVICE}/Task")
        began = time.monotonic()
        while True:
            try:
                found = self._patiently(
                    lambda: self._read(call(frames.head(self._head), **self._long))
                )
            except RefusedError as refusal:
                if refusal.name != "epoch":
                    raise
                self.hello()  # the server was started again
                self._pause(time.monotonic() - began)
                continue
            if found != "wait":
                return found if isinstance(found, Down) else None

    def answer(self, up: Up) -> None:
        """Sends an answer, unless the server has gone on without it."""
        body = frames.Body(up["leaves"])

        def sent() -> Iterator[bytes]:
            yield frames.head(self._head | {"exchange": up["exchange"], "failed": ""})
            yield from body.frames()

        self._upload(sent)

    def fail(self, exchange: int, why: str) -> None:
        """Tells the server that this silo can't answer."""
        self._upload(
            lambda: iter([frames.head(self._head | {"exchange": exchange, "failed": why[:500]})])
        )

    @property
    def _long(self) -> dict[str, Any]:
        """Arguments of a call that may move a model over a slow line."""
        return {"timeout": max(self._comm.deadline_s, 2 * LONG_POLL_S), "metadata": self._metadata}

    def _upload(self, sent: Callable[[], Iterator[bytes]]) -> None:
        call = self._channel.stream_unary(f"/{SERVICE}/Answer")
        try:
            self._patiently(lambda: call(sent(), **self._long))
        except RefusedError as refusal:
            # Late, or sent twice because the first reply was lost, or the server was started again
            # and will ask again.
            level = (
                logging.DEBUG
                if refusal.name in ("stale", "duplicate", "epoch")
                else logging.WARNING
            )
            LOG.log(level, "the server refused this answer: %s", refusal)
            if refusal.name == "epoch":
                self.hello()

    def _read(self, stream: Iterator[bytes]) -> Down | str:
        """One message of the server. Raises UserError if it is malformed, or ends the run."""
        received, began = iter(stream), time.monotonic()
        head = frames.parsed(frames.following(received), ASK)
        if head["kind"] == "stop":
            raise QuorumError(f"the server ended the run: {head['why']}; its log says more")
        early = (
            time.monotonic() - began < LONG_POLL_S / 2
        )  # our server holds a call before it says "wait"
        if head["kind"] == "over" or (head["kind"] == "wait" and not early):
            return str(head["kind"])
        if head["kind"] != "ask":
            raise RefusedError("malformed", f"{shown(head['kind'])} is no reply at this moment")
        leaves = frames.table(frames.following(received))
        frames.check_size(leaves, self._comm.max_message_mb << 20)
        trees = wire.nested(frames.read(received, leaves))
        ask = Ask(head["job"], (self._client,), **trees, owner=head["owner"])
        return Down(
            head["exchange"], head["round"], ask, head["terms"], {self._client: head["counted"]}
        )

    def _attend(self) -> None:
        """Keeps the stream open that shows the server that this silo is there."""
        call = self._channel.unary_stream(f"/{SERVICE}/Attend")
        while not self._over.is_set():
            # The main thread deals with everything that this thread meets.
            with contextlib.suppress(grpc.RpcError, ValueError):
                for _ in call(frames.head(self._head), metadata=self._metadata):
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
                refusal = _refusal(error)
                if refusal is not None:
                    raise refusal from None
                reason = _reason(error)
            except RefusedError as refusal:
                if refusal.name not in ("malformed", "truncated"):
                    raise
                # a broken line, a proxy, or another program
                reason = f"its reply makes no sense: {refusal}"
            waited = time.monotonic() - began
            if waited > comm.lost_s:
                raise LostError(
                    f"no contact with the server at {comm.server} for {comm.lost_s:g} s ({reason})"
                )
            self._pause(waited)

    def _pause(self, waited: float) -> None:
        """Sleeps for longer, the longer this silo has waited (seconds)."""
        time.sleep(
            min(max(PAUSE * waited, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            * self._jitter.uniform(0.5, 1.5)
        )


def _refusal(error: grpc.RpcError) -> RefusedError | None:
    """The server's refusal, if that is the error.

    Raises NotAdmittedError if another try can't change it.
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        raise NotAdmittedError(f"the server does not admit this silo: {details[:300]}") from None
    if "CERTIFICATE_VERIFY_FAILED" in details:
        raise NotAdmittedError(
            "the process at comm_args.server has no certificate of this federation; check "
            "address and ca.crt"
        ) from None
    if code is not grpc.StatusCode.FAILED_PRECONDITION:
        return None
    try:
        told = frames.parsed(details.encode(), {"name": str, "why": str})
    except RefusedError:
        return None  # these are not our server's words
    if told["name"] in FOR_GOOD:
        raise NotAdmittedError(f"the server refuses this silo: {told['why']}") from None
    return RefusedError(told["name"], told["why"])


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower()}: {' '.join((error.details() or '').split())[:200]}"
