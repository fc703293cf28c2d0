"""Callers that hold the server's streams: they send nothing, stop in mid-message, read nothing, or
are revoked while they send.

Real sockets and TLS.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import grpc
import pytest
import torch

from benchmarks.attacks import outcome
from fedml_noniid.core.component import Ask
from fedml_noniid.credentials import authority, certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import silo_client, silo_server, stream, wire
from fedml_noniid.deploy.exit_codes import BrokenError
from fedml_noniid.deploy.silo_client import SiloClient
from fedml_noniid.deploy.silo_server import SiloServer
from tests.deploy.federation_server import (
    LONG,
    Idle,
    Stream,
    address,
    answer_of,
    body,
    hello,
    hello_of,
    sent,
)
from tests.deploy.test_refusals import begun
from tests.processes import until

HELD = 40  # calls with a header only
SCHEMA = {"w": torch.zeros(3), "n": torch.tensor(17)}


@contextmanager
def asked(idle: Idle, params: dict[str, torch.Tensor] | None = None) -> Iterator[Future]:
    """An exchange with silo 0, which is open until it has answered."""
    down = wire.Down(0, 1, Ask("train", (0,), params or {}, {}, {}, {}), "terms")
    found = begun(idle.coordinator.ask, down, SCHEMA, lambda up, *_: up["leaves"])
    yield found
    idle.coordinator.fail(0, (0, 0), "the test is over")


@pytest.mark.parametrize(
    ("method", "revoked", "staying", "refused"),
    [
        ("Session", False, 20, "rate): too many calls"),
        ("Status", False, 0, "call): this call is not for this certificate"),
        ("Session", True, 0, "certificate): certificate of silo-2 is revoked"),
    ],
)
def test_calls_that_send_nothing_keep_no_silo_out(
    idle, caplog, monkeypatch, method, revoked, staying, refused
):
    """Each has a header only.

    Silo 1 is heard at once; the status counts them, and the log has one line about them.
    """
    monkeypatch.setattr(silo_server, "HEAD_S", 1.0)
    if revoked:
        authority.revoke(idle.kits, 2)
    with idle.line(2) as bad, idle.line(1) as good:
        calls = [begun(Stream(bad, method=method).outcome) for _ in range(HELD)]
        until(lambda: sum(call.done() for call in calls) == HELD - staying)
        assert sent(good, "Session", hello()) == "ok"
        status = partial(silo_client.status, idle.comm, idle.kits / "0")
        assert status()["refused"] == {refused.partition(")")[0]: HELD - staying}
        until(lambda: all(call.done() for call in calls))  # the time of the others is over soon
        assert status()["refused"].get("silent", 0) == staying
    lines = [line for line in caplog.messages if "refused" in line]
    assert lines[0] == f"refused from silo-2 ({refused}"
    assert len(lines) <= 3  # also that these calls ended early


def test_the_status_has_the_last_moment_of_each_certificate(idle):
    """Also of a silo that has left, and of a renewed kit once the silo has come with it."""
    for days in (3, 14):
        authority.renew(idle.kits, 2, days)
        with idle.line(2) as line:
            assert sent(line, "Session", hello()) == "ok"
        last = Kit.read(idle.kits / "2", 2).last
        status = silo_client.status(idle.comm, idle.kits / "0")
        assert status["kits"]["silo-2"] == f"{last:%Y-%m-%d %H:%M} UTC"
        assert {*status["kits"]} == {"server", "silo-2"}


GOOD = [hello(), answer_of(0), *body(SCHEMA)]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (0, "no Hello came within 0.3 s"),
        (1, "no Answer came within 0.3 s"),
        (2, "the Answer did not end within 0.3 s"),
        (3, "the Answer did not end within 0.3 s"),
        ("part of the body", "the Answer did not end within 0.3 s"),
    ],
)
def test_a_message_that_stalls_ends_its_stream_and_the_silo_may_come_again(
    idle, caplog, monkeypatch, frames, words
):
    """After so many frames, the silo sends nothing and does not leave."""
    monkeypatch.setattr(silo_server, "HEAD_S", 0.3)
    monkeypatch.setattr(stream, "MIN_TRANSFER_S", 0.3)
    idle.comm.__dict__["patience_s"] = 0.3 if frames == 1 else LONG
    part = [*GOOD[:3], GOOD[3][:5]] if isinstance(frames, str) else GOOD[:frames]
    with asked(idle) as exchange, idle.line(1) as line:
        assert Stream(line, *part).outcome() == "silent"
        assert f"refused from silo-1 (silent): {words}" in caplog.text
        if frames != 1:  # else the exchange is over too
            again = Stream(line, *GOOD)
            assert again.read(wire.Welcome).run == "run"
            assert exchange.result(LONG)[0]["n"] == 17


def test_a_silo_that_reads_nothing_is_left(idle, caplog, monkeypatch):
    """Its model has 64 MB, more than lies in buffers on the way."""
    monkeypatch.setattr(stream, "MIN_TRANSFER_S", 0.3)
    with asked(idle, {"w": torch.zeros(16 << 20)}), idle.line(1) as line:
        call = Stream(line, hello())
        until(lambda: "(silent): the Task was not taken within 0.3 s" in caplog.text)
        assert idle.coordinator.status()["there"] == []
        assert call.outcome() == "silent"


@pytest.mark.parametrize("frames", [1, 3], ids=["before its task", "while it sends"])
def test_a_silo_that_is_revoked_meanwhile_gets_no_task_and_its_upload_is_not_taken(
    idle, caplog, frames
):
    """It was admitted when it began. The next look at all streams is seconds away."""
    with idle.line(1) as line:
        call = Stream(line, *GOOD[:frames])
        call.read(wire.Welcome)
        if frames == 1:
            authority.revoke(idle.kits, 1)
        with asked(idle):
            if frames > 1:
                call.read(wire.Task)
                authority.revoke(idle.kits, 1)
                call.send(*GOOD[3:])
            with pytest.raises(grpc.RpcError) as error:
                call.read(wire.Task)
            assert outcome(error.value) == "certificate"
            assert idle.coordinator.status()["answered"] == []
    assert "refused from silo-1 (certificate): certificate of silo-1 is revoked" in caplog.text


def test_an_expired_certificate_on_a_living_connection_leaves_a_line(idle, caplog, monkeypatch):
    with idle.line(1) as line:
        assert sent(line, "Session", hello()) == "ok"
        later = certificates.now() + datetime.timedelta(days=400)
        monkeypatch.setattr(certificates, "now", lambda: later)
        assert sent(line, "Session", hello()) == "certificate"
    assert "refused from silo-1 (certificate): certificate of silo-1 expired on 20" in caplog.text


def test_renewed_kits_are_used_without_a_restart(idle, monkeypatch):
    """The old certificates of server and silo are revoked, as if their days were over."""
    monkeypatch.setattr(silo_server, "RECHECK_S", 0.05)
    comm = idle.comm.model_copy(update={"server": address()})
    with (
        SiloServer(comm, idle.kits / "0", idle.coordinator) as server,
        SiloClient(comm, idle.kits / "1", 0, hello_of()) as client,
    ):
        first, shown = client._stream, server._mine
        for rank in (0, 1):
            authority.revoke(idle.kits, rank)
            authority.renew(idle.kits, rank)
        until(lambda: server._mine != shown)
        with asked(idle) as exchange:
            exchange.add_done_callback(lambda _: idle.coordinator.finish("over"))
            client.serve(lambda down: wire.up(0, 0, SCHEMA))
        assert exchange.result(LONG)[0]["n"] == 17 and client._stream is not first


def test_a_server_that_can_not_listen_again_ends(idle, monkeypatch):
    """When it takes a renewed kit. Else it would have no port, and end no revoked stream."""
    monkeypatch.setattr(silo_server, "RECHECK_S", 0.05)

    async def taken() -> None:
        raise RuntimeError("the port is taken")

    comm = idle.comm.model_copy(update={"server": address()})
    with SiloServer(comm, idle.kits / "0", idle.coordinator) as server:
        monkeypatch.setattr(server, "_listen", taken)
        waiting = begun(idle.coordinator.gather)
        authority.renew(idle.kits, 0)
        with pytest.raises(BrokenError, match="can't listen again: the port is taken"):
            waiting.result(LONG)


def test_who_listens_on_the_line_reads_nothing_that_is_sent(idle):
    """A relay between the silo and the server hears all bytes."""
    heard, tensors = bytearray(), {"w": torch.arange(3000.0), "n": torch.tensor(17)}

    def passed(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        client = SiloClient(
            idle.comm.model_copy(update={"server": place}), idle.kits / "1", 0, hello_of()
        )
        joining = begun(client.__enter__)
        ends = [stack.enter_context(listening.accept()[0])]
        ends.append(stack.enter_context(socket.create_connection(idle.comm.address)))
        for pair in (ends, ends[::-1]):
            begun(passed, *pair)
        joining.result(LONG)
        with asked(idle, tensors) as exchange:
            exchange.add_done_callback(lambda _: idle.coordinator.finish("over"))
            client.serve(lambda down: wire.up(0, 0, SCHEMA))
        client.__exit__()
    assert len(heard) > 12_000 and b"server" in heard, "the one name that TLS sends in the open"
    for word in (b"silo-1", b"exchange", b"study", tensors["w"].numpy().tobytes()[:64]):
        assert word not in heard
