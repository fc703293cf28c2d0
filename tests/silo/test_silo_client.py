"""A silo whose server is away, starts again without end, or refuses it for good."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import silo_client, wire
from fedml_noniid.plugins.silo.certificates import Kit
from fedml_noniid.plugins.silo.exit_codes import LostError, NotAdmittedError, SetBackError
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_client import SiloClient, status
from fedml_noniid.plugins.silo.silo_server import SERVICE
from tests.silo.federation_server import LONG, address, framed

LOST_S, PAUSE_S = 0.2, 0.04  # seconds until a server is lost, and of the first pause
Reply = Callable[[grpc.ServicerContext], list[bytes]]


def welcome(_: grpc.ServicerContext) -> list[bytes]:
    return [framed({"run": "run"})]


def away(context: grpc.ServicerContext) -> list[bytes]:
    context.abort(grpc.StatusCode.UNAVAILABLE, "no")


def refusing(name: str) -> Reply:
    return aborting(json.dumps({"name": name, "why": "no"}))


def aborting(details: str) -> Reply:
    return lambda context: context.abort(grpc.StatusCode.FAILED_PRECONDITION, details)


def saying(*frames: bytes) -> Reply:
    return lambda _: list(frames)


ODD = {
    "away": away,
    "a wait that took no time": saying(framed({"kind": "wait"})),
    "unknown kind": saying(framed({"kind": "dance\x1b[2J"})),
    "html": saying(b"<html>"),
    "nothing": saying(),
    "html as a refusal": aborting("<html><body>502 Bad Gateway</body></html>"),
    "no words": aborting("[]"),
}


def joined(client: SiloClient) -> None:
    """Joins and asks for work."""
    client.hello()
    client.task()


@contextmanager
def silo(kits: Path, **replies: Reply) -> Iterator[tuple[SiloClient, dict[str, int]]]:
    """A silo of a real server with these replies, and how often each method was called."""
    calls = dict.fromkeys(replies, 0)

    def answering(method: str, reply: Reply) -> Callable:
        def answer(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            calls[method] += 1
            yield from reply(context)

        return answer

    handlers = {
        name: grpc.stream_stream_rpc_method_handler(answering(name, reply))
        for name, reply in replies.items()
    }
    port, kit = grpc.server(ThreadPoolExecutor(4)), Kit.read(kits / "0", 0)
    port.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    comm = CommArgs(server=address(), lost_s=LOST_S)
    credentials = grpc.ssl_server_credentials([(kit.key, kit.certificate)], kit.ca, True)
    port.add_secure_port(comm.server, credentials)
    port.start()
    client = SiloClient(comm, kits / "1", 0, "terms", 17)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(silo_client, "FIRST_PAUSE_S", PAUSE_S)
            yield client, calls
    finally:
        client.__exit__()
        port.stop(None).wait(LONG)


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
@pytest.mark.parametrize("method", ["Hello", "Task"])
def test_a_server_that_is_away_or_odd_is_asked_with_pauses(all_kits, method, reply):
    """Until it is lost. 0.2 seconds hold at most ten pauses of 0.02 s, the least."""
    with silo(all_kits, **{"Hello": welcome, method: reply}) as (client, calls):
        began = time.monotonic()
        with pytest.raises(LostError, match=r"no contact with the server at .* for 0.2 s") as lost:
            joined(client)
        assert str(lost.value).isprintable()
        assert LOST_S <= time.monotonic() - began < 10.0
        assert 3 <= calls[method] <= 11


def test_pauses_grow_with_the_wait_and_have_an_end(all_kits, monkeypatch):
    """0.2 s at first, then 10 % of the wait, 5 s at most; all plus or minus 50 %."""
    slept = []
    client = SiloClient(CommArgs(server=address()), all_kits / "1", 0, "terms", 17)
    monkeypatch.setattr(silo_client.time, "sleep", slept.append)
    for waited in (0.0, 30.0, 600.0):
        client._pause(waited)
    client.__exit__()
    assert all(
        mean / 2 <= pause <= 1.5 * mean for mean, pause in zip((0.2, 3.0, 5.0), slept, strict=True)
    )


def test_restarts_without_end_are_answered_with_pauses(all_kits):
    """0.3 seconds with the least pauses of 0.02 s: 15 calls.

    Then the run is over, and the silo hears it.
    """
    began, restarted = time.monotonic(), refusing("restarted")

    def reply(context: grpc.ServicerContext) -> list[bytes]:
        over = time.monotonic() - began > 0.3
        return [framed({"kind": "over"})] if over else restarted(context)

    with silo(all_kits, Hello=welcome, Task=reply) as (client, calls):
        client.hello()
        assert client.task() is None
        assert 3 <= calls["Task"] <= 17 and calls["Hello"] <= 17


@pytest.mark.parametrize("reply", [b"<html>", b"[1]", b"\xff\xfe", b""])
def test_a_status_that_makes_no_sense_is_one_line(all_kits, reply):
    with (
        silo(all_kits, Status=saying(reply)) as (client, _),
        pytest.raises(LostError, match=r"answers, but not as a server of this package does"),
    ):
        status(client._comm, all_kits / "0")


def test_a_refusal_for_good_ends_the_silo_at_once(all_kits):
    with silo(all_kits, Hello=refusing("configuration")) as (client, calls):
        with pytest.raises(NotAdmittedError, match="the server refuses this silo: no"):
            client.hello()
        assert calls["Hello"] == 1


def test_a_server_that_has_lost_the_run_gets_no_memory_of_the_old_one(all_kits):
    runs = iter(["a", "b"])
    with silo(all_kits, Hello=lambda _: [framed({"run": next(runs)})]) as (client, _):
        client.hello()
        with pytest.raises(UserError, match="has lost run a and is at run 'b'; delete this silo's"):
            client.hello()


def test_a_silo_that_was_set_back_lets_the_server_know_and_ends(all_kits, monkeypatch):
    """It has no memory of the rounds before: going on would spoil the run."""
    failed = []
    with silo(all_kits, Hello=welcome) as (client, _):
        downs = iter([wire.Down(7, 1, Ask("train", (0,)), "terms", {0: True}), None])
        monkeypatch.setattr(client, "task", lambda: next(downs))
        monkeypatch.setattr(client, "fail", lambda *why: failed.append(why))

        def answered(_: wire.Down) -> wire.Up:
            raise SetBackError("set back")

        with pytest.raises(SetBackError):
            client.serve(answered)
    assert failed == [(7, "set back")]
