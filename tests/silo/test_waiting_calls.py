"""Callers that hold the server's calls: they send nothing, or are revoked while they send.

Real sockets and TLS.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.silo import authority, certificates, silo_client, silo_server, wire
from fedml_noniid.plugins.silo.silo_server import SERVICE
from tests.silo.federation_server import LONG, answer_of, hello, outcome, sent

HELD = 40  # calls; the server of two silos has 16 threads


@pytest.mark.parametrize(
    ("method", "revoked", "staying", "refused"),
    [
        ("Answer", False, silo_server.MAX_PARALLEL_CALLS, "rate): too many calls"),
        ("Status", False, 0, "call): this call is not for this certificate"),
        ("Answer", True, 0, "certificate): certificate of silo-2 is revoked"),
    ],
)
def test_calls_that_send_nothing_keep_no_silo_out(
    idle, caplog, monkeypatch, method, revoked, staying, refused
):
    """Each has a header only.

    Silo 1 is heard at once; the status counts them, and the log has one line about them.
    """
    caplog.set_level(logging.INFO, "fedml_noniid.plugins.silo")
    monkeypatch.setattr(silo_server, "HEAD_S", 1.0)
    go, over = threading.Event(), threading.Semaphore(0)

    def held() -> Iterator[bytes]:
        go.wait(LONG)
        yield from ()

    with idle.line(2) as bad, idle.line(1) as good:
        assert sent(bad, "Hello", hello()) == sent(good, "Hello", hello()) == "ok"
        if revoked:
            authority.revoke(idle.kits, 2)
        calls = [
            bad.stream_stream(f"/{SERVICE}/{method}")(held(), timeout=LONG) for _ in range(HELD)
        ]
        for call in calls:
            call.add_done_callback(lambda _: over.release())
        for _ in range(HELD - staying):
            assert over.acquire(timeout=LONG)
        assert sent(good, "Hello", hello(), timeout=1.0) == "ok"
        status = partial(silo_client.status, idle.comm, idle.kits / "0")
        assert status()["refused"] == {refused.partition(")")[0]: HELD - staying}
        for _ in range(staying):  # their time is over soon
            assert over.acquire(timeout=LONG)
        assert status()["refused"].get("silent", 0) == staying
        lines = [line for line in caplog.messages if "refused" in line]
        assert lines[0] == f"refused from silo-2 ({refused}"
        assert len(lines) <= 3  # also that these calls ended early
        go.set()


def test_an_upload_of_a_silo_that_is_revoked_meanwhile_is_not_taken(idle, caplog):
    """It was admitted when it began. It is revoked before the last bytes come."""
    schema = {"w": torch.zeros(3), "n": torch.tensor(17)}
    down = wire.Down(0, 1, Ask("train", (0,), {}, {}, {}, {}), "terms")
    ask = partial(idle.coordinator.ask, down, schema, lambda up, *_: up["leaves"])
    threading.Thread(target=ask, daemon=True).start()
    go, began = threading.Event(), threading.Event()

    def upload() -> Iterator[bytes]:
        table, *data = wire.body(schema)
        yield from (answer_of(0), table)
        began.set()
        go.wait(LONG)
        yield from data

    with idle.line(1) as line:
        assert sent(line, "Hello", hello()) == "ok"
        call = line.stream_unary(f"/{SERVICE}/Answer").future(upload(), timeout=LONG)
        assert began.wait(LONG)
        while not idle.server._running[0]:
            time.sleep(0.01)  # until the server has admitted it
        authority.revoke(idle.kits, 1)
        go.set()
        assert outcome(call.exception()) == "permission_denied"
    assert idle.coordinator.status()["answered"] == []
    assert "refused from silo-1 (certificate): certificate of silo-1 is revoked" in caplog.text


def test_an_expired_certificate_on_a_living_connection_leaves_a_line(idle, caplog, monkeypatch):
    with idle.line(1) as line:
        assert sent(line, "Hello", hello()) == "ok"
        later = certificates.now() + datetime.timedelta(days=400)
        monkeypatch.setattr(certificates, "now", lambda: later)
        assert sent(line, "Hello", hello()) == "permission_denied"
    (found,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert found.startswith(
        "refused from silo-1 (certificate): certificate of silo-1 expired on 20"
    )
