"""FedML's gRPC kept in bounds."""

from __future__ import annotations

import importlib
import socket
import threading

import pytest

from plugins.core.errors import UserError
from plugins.silo import transport


def test_fedml_does_not_phone_home_and_is_left_as_it_was(monkeypatch):
    importlib.import_module("plugins.silo.host")
    from fedml.core.mlops.mlops_configs import MLOpsConfigs

    def refused(*_: object) -> None:
        raise AssertionError("a request left the machine")

    monkeypatch.setattr("requests.sessions.Session.request", refused)
    before = MLOpsConfigs.__dict__["fetch_all_configs"]
    with transport.no_phoning_home():
        assert MLOpsConfigs.fetch_all_configs() == ({}, {}, {"LOG_SERVER_URL": ""}, {})
    assert MLOpsConfigs.__dict__["fetch_all_configs"] is before


def test_waiting_for_a_server_that_does_not_come(ports):
    with pytest.raises(UserError, match=r"no server at 127.0.0.1:8890 after 0 s"):
        transport.wait_for_server({0: "127.0.0.1"}, 0.0)


def test_watch_tells_who_is_gone(monkeypatch):
    """One stays, one goes, one was never there: only the second is lost, until the third is expected."""
    monkeypatch.setattr(transport, "WATCH_S", 0.05)
    monkeypatch.setattr(transport, "BASE_PORT", 0)
    seen, gone, lost = threading.Event(), threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as stays, socket.create_server(("127.0.0.1", 0)) as goes:
        ports = [listener.getsockname()[1] for listener in (stays, goes)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
        listens = transport.listens

        def noted(host: str, rank: int) -> bool:
            found = listens(host, rank)
            if found and rank == ports[1]:
                seen.set()
            return found

        monkeypatch.setattr(transport, "listens", noted)

        def on_lost(rank: int) -> None:
            lost.append(rank)
            gone.set()

        with transport.Watch(dict.fromkeys(ports, "127.0.0.1"), on_lost):
            assert seen.wait(10)
            assert not lost
            goes.close()
            assert gone.wait(10)
        assert lost == [ports[1]]
        gone.clear()
        with transport.Watch(dict.fromkeys((ports[0], ports[2]), "127.0.0.1"), on_lost) as watch:
            assert not gone.wait(0.6)
            watch.expect()
            assert gone.wait(10)
    assert lost == ports[1:]
