"""Callers that hold the server's calls: they send nothing, or are revoked while they send.

Real sockets and TLS.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.silo import (
    authority,
    certificates,
    silo_client,
    silo_server,
    wire,
)
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_server import SERVICE, SiloServer
from tests.silo.federation_server import LONG, METHODS, address, framed, outcome, sent
from tests.silo.test_attacks import call_of

HELD = 40  # calls; the server of two silos has 16 threads
SCHEMA = {"w": torch.zeros(3), "n": torch.tensor(17)}


@pytest.fixture
def server(kits: Path) -> Iterator[tuple[Coordinator, CommArgs]]:
    """A server of two silos that asks nothing."""
    comm = CommArgs(server=address(), quorum=1, deadline_s=0.2)
    coordinator = Coordinator(comm, 2, "terms", "run")
    with SiloServer(comm, kits / "0", coordinator):
        yield coordinator, comm


def hello(client: int) -> bytes:
    return framed({"client": client, "session": "own", "terms": "terms", "samples": 17})


def held(go: threading.Event, *first: bytes) -> Iterator[bytes]:
    """Messages of a call that sends no more until `go`."""
    yield from first
    go.wait(LONG)


@pytest.mark.parametrize("revoked", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_calls_that_send_nothing_keep_no_silo_out(
    server, kits, caplog, monkeypatch, revoked, method
):
    """Each has a header only.

    Silo 1 is heard at once; the status counts them, and the log has one line about them.
    """
    _, comm = server
    caplog.set_level(logging.INFO, "fedml_noniid.plugins.silo")
    monkeypatch.setattr(silo_server, "HEAD_S", 2.0)
    go, over = threading.Event(), threading.Semaphore(0)
    with (
        silo_client.channel(comm, kits / "2", 2) as bad,
        silo_client.channel(comm, kits / "1", 1) as good,
    ):
        assert sent(bad, "Hello", hello(1)) == sent(good, "Hello", hello(0)) == "ok"
        if revoked:
            authority.revoke(kits, 2)
        calls = [
            bad.stream_stream(f"/{SERVICE}/{method}")(held(go), timeout=LONG) for _ in range(HELD)
        ]
        for call in calls:
            call.add_done_callback(lambda _: over.release())
        staying = 0 if revoked or method == "Status" else silo_server.MAX_PARALLEL_CALLS
        for _ in range(HELD - staying):
            assert over.acquire(timeout=LONG)
        began = time.monotonic()
        assert sent(good, "Hello", hello(0), timeout=1.0) == "ok"
        found = silo_client.status(comm, kits / "0")["refused"]
        assert time.monotonic() - began < 1.0
        kind = "certificate" if revoked else "call" if method == "Status" else "rate"
        assert found == {kind: HELD - staying}
        for _ in range(staying):  # their time is over soon
            assert over.acquire(timeout=LONG)
        lines = [
            record.getMessage() for record in caplog.records if "refused" in record.getMessage()
        ]
        why = {
            "certificate": "certificate of silo-2 is revoked",
            "call": "this call is not for this certificate",
            "rate": "too many calls",
        }[kind]
        assert lines[0] == f"refused from silo-2 ({kind}): {why}"
        assert ("refused from silo-2 (silent): a call sent too little in 2 s" in lines) is (
            staying > 0
        )
        assert len(lines) <= 3  # also that these calls ended early
        assert silo_client.status(comm, kits / "0")["refused"].get("silent", 0) == staying
        go.set()


def test_an_upload_of_a_silo_that_is_revoked_meanwhile_is_not_taken(server, kits, caplog):
    """It was admitted when it began. It is revoked before the last bytes come."""
    coordinator, comm = server
    down = wire.Down(0, 1, Ask("train", (0,), {}, {}, {}, {}), "terms")
    taken: dict[int, object] = {}

    def ask() -> None:
        taken.update(coordinator.ask(down, SCHEMA, lambda up, client, n: up["leaves"]))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    go = threading.Event()

    def upload() -> Iterator[bytes]:
        head = call_of(coordinator) | {"exchange": 0}
        yield framed(head)
        table, *data = wire.body(SCHEMA)
        yield table
        go.wait(LONG)
        yield from data

    with silo_client.channel(comm, kits / "1", 1) as line:
        assert sent(line, "Hello", hello(0)) == "ok"
        call = line.stream_unary(f"/{SERVICE}/Answer").future(upload(), timeout=LONG)
        while not coordinator.bytes_in > len(hello(0)):
            time.sleep(0.01)  # until the server has the head
        authority.revoke(kits, 1)
        go.set()
        assert outcome(call.exception()) == "permission_denied"
    assert coordinator.status()["answered"] == []
    assert "refused from silo-1 (certificate): certificate of silo-1 is revoked" in caplog.text
    authority.make(kits, 2)
    authority.renew(kits, 1)  # the honest silo, with its new kit
    with silo_client.channel(comm, kits / "1", 1) as line:
        assert sent(line, "Hello", hello(0)) == "ok"
        head = call_of(coordinator) | {"exchange": 0}
        assert sent(line, "Answer", framed(head), *wire.body(SCHEMA)) == "ok"
    asking.join(LONG)
    assert list(taken) == [0]


def test_an_expired_certificate_on_a_living_connection_leaves_a_line(
    server, kits, caplog, monkeypatch
):
    _, comm = server
    with silo_client.channel(comm, kits / "1", 1) as line:
        assert sent(line, "Hello", hello(0)) == "ok"
        later = certificates.now() + datetime.timedelta(days=400)
        monkeypatch.setattr(certificates, "now", lambda: later)
        with pytest.raises(grpc.RpcError) as refused:
            line.unary_unary(f"/{SERVICE}/Hello")(hello(0), timeout=LONG)
        assert outcome(refused.value) == "permission_denied"
    (found,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert found.startswith(
        "refused from silo-1 (certificate): certificate of silo-1 expired on 20"
    )
