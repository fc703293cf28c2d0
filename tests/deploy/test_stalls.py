"""Messages that stop, in the phases that `test_waiting_calls` and `test_silo_client` leave out: no
TLS, a drip of bytes, a silo that stays when the run is over, a server that does not read.

Real sockets and TLS. Time limits are short; the tests hold only to what happens.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.deploy import silo_client, silo_server, stream, wire
from fedml_noniid.deploy.exit_codes import LostError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_client import SiloClient
from tests.deploy.federation_server import (
    LONG,
    Idle,
    Stream,
    answer_of,
    body,
    framed,
    hello,
    hello_of,
    sent,
)
from tests.deploy.test_refusals import begun
from tests.deploy.test_silo_client import WELCOME, joined, silo
from tests.processes import until

SHORT_S, LOST_S = 0.3, 0.5
W = {"w": torch.zeros(1000)}
TASK, OVER = framed({"kind": "ask"}), framed({"kind": "over"})
ENOUGH = 8  # calls: a silo that comes more often never leaves


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limits of messages."""
    monkeypatch.setattr(silo_server, "HEAD_S", SHORT_S)
    monkeypatch.setattr(silo_client, "WELCOME_S", SHORT_S)
    monkeypatch.setattr(stream, "MIN_TRANSFER_S", SHORT_S)
    monkeypatch.setattr(silo_client, "STEADY_S", SHORT_S / 6)  # as in use, far below the others


# A server, and a silo that stalls


def test_connections_without_tls_keep_no_silo_out(idle: Idle, monkeypatch: pytest.MonkeyPatch):
    """They are open, and say nothing or no TLS."""
    monkeypatch.setattr(silo_server, "HEAD_S", LONG)
    lines = [socket.create_connection(idle.comm.address) for _ in range(50)]
    for line in lines[::2]:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with idle.line(1) as good:
        assert sent(good, "Session", hello()) == "ok"
    for line in lines:
        line.close()


def test_a_drip_of_bytes_is_no_message(idle: Idle, caplog: pytest.LogCaptureFixture):
    """A byte every 10 ms is no silence, but a message has one time limit. 4,000 bytes would take 40
    s."""
    down = wire.Down(0, 1, Ask("train", (0,)), "terms")
    begun(idle.coordinator.ask, down, W, lambda up, *_: up["leaves"])
    with idle.line(1) as line:
        slow = Stream(line, hello(), answer_of(0), body(W)[0])

        def drip() -> None:
            while slow.call.is_active():
                slow.send(b"\0")
                time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        assert slow.outcome() == "silent"
    assert "refused from silo-1 (silent): the Answer did not end within 0.3 s" in caplog.text
    idle.coordinator.fail(0, (0, 0), "the test is over")


def test_a_silo_that_stays_when_the_run_is_over_does_not_keep_the_server(
    idle: Idle, caplog: pytest.LogCaptureFixture
):
    with idle.line(1) as line:
        call = Stream(line, hello())
        call.read(wire.Welcome)
        ending = begun(idle.coordinator.finish, "over")
        assert call.read(wire.Task).kind == "over"
        assert call.outcome() == "silent"
        assert "(silent): the silo did not leave within 0.3 s" in caplog.text
        ending.result(LONG)


# A silo, and a server that stalls


def lost(client: SiloClient, answered: Callable[[wire.Down], wire.Up]) -> str:
    """Why a silo gives its server up."""
    client._comm = client._comm.model_copy(update={"deadline_s": SHORT_S, "lost_s": LOST_S})
    with pytest.raises(LostError, match=r"no contact with the server at .* for 0.5 s") as error:
        joined(client, answered)
    return str(error.value)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "no Welcome came within 0.3 s"),
        ([WELCOME, TASK], "the Task did not end within 0.3 s"),
        ([WELCOME, TASK, body(W)[0], b"\0" * 999], "the Task did not end within 0.3 s"),
        # It does not read the answer. 64 MB are more than lies in buffers on the way.
        ([WELCOME, TASK, *body({})], "the Answer was not taken within 0.3 s"),
    ],
    ids=["hello", "head", "part of the body", "answer"],
)
def test_a_silo_leaves_a_server_that_stops_in_mid_message(all_kits: Path, frames, words):
    def stalled(context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [WELCOME, OVER] if len(calls) > ENOUGH else frames
        until(lambda: not context.is_active())

    large = {"w": torch.zeros(16 << 20)}
    with silo(all_kits, stalled) as (client, calls):
        assert words in lost(client, lambda down: wire.up(0, down.exchange, large))


def test_idle_times_and_computations_are_no_silence_of_the_server(all_kits: Path):
    """Both last longer than `lost_s` = 0.2 s; then the line breaks."""
    computed = []

    def restarted(context: grpc.ServicerContext) -> Iterator[bytes]:
        yield WELCOME
        if len(calls) == 1:
            time.sleep(2 * SHORT_S)
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarts")
        yield from (OVER,) if computed else (TASK, *body({}))
        time.sleep(SHORT_S / 10)  # the silo has the whole task

    def answered(down: wire.Down) -> wire.Up:
        computed.append(down.exchange)
        time.sleep(2 * SHORT_S)
        return wire.up(0, down.exchange, {})

    with silo(all_kits, restarted) as (client, calls):
        client._admit = lambda *_: None
        joined(client, answered)
    assert computed == [0] and len(calls) == 3


def test_a_silo_leaves_a_server_that_does_not_begin_with_tls(all_kits: Path, monkeypatch):
    monkeypatch.setattr(silo_client, "FIRST_PAUSE_S", 0.04)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        client = SiloClient(CommArgs(server=place, lost_s=0.2), all_kits / "1", 0, hello_of())
        assert "within 0.3 s" in lost(client, lambda _: wire.up(0, 0, {}))
        client.__exit__()
