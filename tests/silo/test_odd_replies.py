"""A silo whose server answers oddly: waits without end, unknown kinds, HTML of a proxy, control
characters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from fedml_noniid.plugins.silo import silo_client
from fedml_noniid.plugins.silo.exit_codes import LostError, NotAdmittedError
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_server import SERVICE
from tests.silo.federation_server import LONG, address, framed

HTML = "<html><body>502 Bad Gateway</body></html>"
WELCOME = framed({"run": "run", "epoch": "epoch"})


def kind(name: str) -> bytes:
    return framed({"kind": name})


Reply = Callable[[grpc.ServicerContext], list[bytes]]


def refusing(details: str) -> Reply:
    return lambda context: context.abort(grpc.StatusCode.FAILED_PRECONDITION, details)


@contextmanager
def server(**replies: Reply) -> Iterator[tuple[CommArgs, dict[str, int]]]:
    """A real server with these replies, without certificates; and how often each method was
    called."""
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
    port = grpc.server(ThreadPoolExecutor(4))
    port.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    comm = CommArgs(server=address(), plaintext=True, lost_s=2.0)
    port.add_insecure_port(comm.server)
    port.start()
    try:
        yield comm, calls
    finally:
        port.stop(None).wait(LONG)


def silo(comm: CommArgs) -> silo_client.SiloClient:
    return silo_client.SiloClient(comm, None, 0, "terms", 17)


@pytest.mark.parametrize(
    "reply",
    [
        lambda _: [kind("wait")],
        lambda _: [kind("dance\x1b[2J")],
        lambda _: [b"<html>"],
        lambda _: [],
        refusing(HTML),
        refusing('{"name": 1}'),
        refusing("[]"),
    ],
    ids=["wait", "unknown kind", "html", "nothing", "html as a refusal", "a number", "no words"],
)
@pytest.mark.parametrize("method", ["Hello", "Task"])
def test_replies_that_make_no_sense_are_asked_again_with_growing_pauses(reply, method):
    """Until `lost_s`, as if nobody had answered: 2 seconds hold at most 2 / 0.1 calls."""
    with server(**{"Hello": lambda _: [WELCOME], method: reply}) as (comm, calls):
        line = silo(comm)
        began = time.monotonic()
        with pytest.raises(LostError, match=r"no contact with the server at .* for 2 s") as lost:  # noqa: PT012, any
            line.hello()
            line.task()
        line.__exit__()
        assert 2.0 <= time.monotonic() - began < 10.0
        assert 3 <= calls[method] <= 21
        assert str(lost.value).isprintable()


def test_restarts_without_end_are_answered_with_pauses():
    """2.5 seconds with the least pauses of 0.1 s: 25 calls.

    Then the run is over, and the silo hears it.
    """
    began, restarted = time.monotonic(), refusing(json.dumps({"name": "epoch", "why": "no"}))

    def replies(context: grpc.ServicerContext) -> list[bytes]:
        return [kind("over")] if time.monotonic() - began > 2.5 else restarted(context)

    with server(Hello=lambda _: [WELCOME], Task=replies) as (comm, calls):
        line = silo(comm)
        line.hello()
        assert line.task() is None
        line.__exit__()
        assert 3 <= calls["Task"] <= 27 and calls["Hello"] <= 27


def test_a_wait_that_took_its_time_is_no_odd_reply(monkeypatch):
    """Our server holds a call for work for LONG_POLL_S. The next call comes at once."""
    monkeypatch.setattr(silo_client, "LONG_POLL_S", 0.2)
    waits = iter([kind("wait")] * 4 + [kind("over")])

    def reply(_: grpc.ServicerContext) -> list[bytes]:
        time.sleep(0.2)
        return [next(waits)]

    with server(Hello=lambda _: [WELCOME], Task=reply) as (comm, calls):
        line = silo(comm)
        line.hello()
        began = time.monotonic()
        assert line.task() is None
        assert calls["Task"] == 5 and time.monotonic() - began < 3.0
        line.__exit__()


def test_a_refusal_for_good_still_ends_the_silo_at_once():
    with server(Hello=refusing(json.dumps({"name": "identity", "why": "no"}))) as (comm, calls):
        line = silo(comm)
        with pytest.raises(NotAdmittedError, match="the server refuses this silo: no"):
            line.hello()
        line.__exit__()
        assert calls["Hello"] == 1


@pytest.mark.parametrize("reply", [HTML.encode(), b"[1]", b"\xff\xfe", b""])
def test_a_status_that_makes_no_sense_is_one_line(reply):
    with (
        server(Status=lambda _: [reply]) as (comm, _),
        pytest.raises(LostError, match=r"answers, but not as") as lost,
    ):
        silo_client.status(comm, None)
    assert str(lost.value).isprintable()
