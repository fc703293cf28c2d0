"""A silo whose server is away, starts again without end, or refuses it for good."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority, certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import silo_client, wire
from fedml_noniid.deploy.exit_codes import LostError, QuorumError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_client import SiloClient, status
from fedml_noniid.deploy.stream import SERVICE, event_loop
from tests.deploy.federation_server import LONG, Idle, address, body, framed, hello_of
from tests.deploy.test_refusals import begun

LOST_S, PAUSE_S = 0.2, 0.04  # seconds until a server is lost, and of the first pause
Reply = Callable[[grpc.ServicerContext], list[bytes]]


WELCOME = framed({"run": "run"})


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
    "unknown kind": saying(WELCOME, framed({"kind": "dance\x1b[2J"})),
    "html": saying(b"<html>"),
    "nothing": saying(),
    "nothing more": saying(WELCOME),
    "no body": saying(WELCOME, framed({"kind": "ask"})),
    "half a body": saying(WELCOME, framed({"kind": "ask"}), *body({"w": torch.ones(2)})[:1]),
    "html as a refusal": aborting("<html><body>502 Bad Gateway</body></html>"),
    "no words": aborting("[]"),
    "stopped": saying(WELCOME, framed({"kind": "stop", "why": "no\nreason"})),
    "over too early": saying(WELCOME, framed({"kind": "over"})),
    "another run": saying(framed({"run": "other"})),
}
# Each may be a lie.
ODD |= {name: refusing(name) for name in ("configuration", "replaced", "certificate")}


@contextmanager
def silo(kits: Path, reply: Reply, method: str = "Session") -> Iterator[tuple[SiloClient, list]]:
    """A silo of a real server with this reply to a method, and a list with an item per call."""
    calls: list[int] = []

    def answer(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        calls.append(1)
        next(stream)
        yield from reply(context)

    handlers = {method: grpc.stream_stream_rpc_method_handler(answer)}
    kit, comm = Kit.read(kits / "0", 0), CommArgs(server=address(), lost_s=LOST_S)
    credentials = grpc.ssl_server_credentials([(kit.key, kit.certificate)], kit.ca, True)
    port = grpc.server(ThreadPoolExecutor(4))
    port.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port.add_secure_port(comm.server, credentials)
    port.start()
    client = SiloClient(comm, kits / "1", 0, hello_of(), refusing_the_end, run="run")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(lambda: port.stop(None).wait(LONG))
        stack.callback(client.__exit__)
        patch.setattr(silo_client, "FIRST_PAUSE_S", PAUSE_S)
        yield client, calls


def refusing_the_end(task: wire.Task, _: wire.Table) -> None:
    if task.kind == "over":
        raise wire.RefusedError("study", "the last round was not asked")


def unexpected(_: wire.Down) -> wire.Up:
    raise AssertionError("there is no task")


def joined(client: SiloClient, answered: Callable[[wire.Down], wire.Up] = unexpected) -> None:
    """Joins and asks for work."""
    client.__enter__()
    client.serve(answered)


def calls_until_honest(kits: Path, lie: Reply) -> int:
    """The calls of a silo to a server that says this three times, and then ends the run."""
    replies, honest = iter([lie] * 3), saying(WELCOME, framed({"kind": "over"}))
    with silo(kits, lambda context: next(replies, honest)(context)) as (client, calls):
        client._comm = client._comm.model_copy(update={"lost_s": LONG})
        client._admit = lambda *task: None if len(calls) > 3 else refusing_the_end(*task)
        joined(client)
    return len(calls)


SAID = {
    "configuration": "it refuses this silo: no",
    "stopped": r"has given the run up: no\nreason",
    "over too early": "the last round was not asked",
    "another run": "it is at run 'other', and this silo at run run; if the server has",
}


@pytest.mark.parametrize("reply", ODD)
def test_a_server_that_is_away_or_odd_is_asked_with_pauses(all_kits, caplog, reply):
    """Three, of 0.02 s at least, and the silo is there for an honest server. The log names a lie
    once, on one line."""
    began = time.monotonic()
    assert calls_until_honest(all_kits, ODD[reply]) == 4
    assert time.monotonic() - began >= 3 * PAUSE_S / 2
    assert len(caplog.messages) <= 1 and all(map(str.isprintable, caplog.messages))
    if reply in SAID:
        assert SAID[reply] in caplog.text and "; asking again" in caplog.text


@pytest.mark.parametrize("reply", [away, ODD["stopped"]])
def test_a_server_that_stays_away_or_odd_is_lost(all_kits, reply):
    """0.2 seconds hold at most ten pauses of 0.02 s, the least."""
    with silo(all_kits, reply) as (client, calls):
        with pytest.raises(LostError, match=r"no contact with the server at .* for 0.2 s") as lost:
            joined(client)
        assert str(lost.value).isprintable() and len(calls) <= 11


def test_pauses_grow_with_the_wait_and_have_an_end(all_kits, monkeypatch):
    """0.2 s at first, then 10 % of the wait, 5 s at most; all plus or minus 50 %."""
    client, slept = SiloClient(CommArgs(server=address()), all_kits / "1", 0, hello_of()), []
    monkeypatch.undo()  # `asking_soon`
    monkeypatch.setattr(silo_client.time, "sleep", slept.append)
    for waited, mean in ((0.0, 0.2), (30.0, 3.0), (600.0, 5.0)):
        client._pause(waited)
        assert mean / 2 <= slept[-1] <= 1.5 * mean


@pytest.mark.parametrize("reply", [b"<html>", b"[1]", b"\xff\xfe", b""])
def test_a_status_that_makes_no_sense_is_one_line(all_kits, reply):
    with (
        silo(all_kits, saying(reply), "Status") as (client, _),
        pytest.raises(LostError, match=r"answers, but not as a server of this package does"),
    ):
        status(client._comm, all_kits / "0")


@pytest.mark.parametrize(
    ("renewed", "error", "words"),
    [
        (False, UserError, r"own certificate expired on 20..-..-..; ask the operator for a new"),
        (True, LostError, "no contact"),
    ],
)
def test_a_silo_whose_certificate_is_over_says_so(kits, monkeypatch, renewed, error, words):
    """The server's TLS turns it away without a word. With a renewed kit, it tries on."""
    later = certificates.now() + datetime.timedelta(days=15)
    with silo(kits, away) as (client, _):
        monkeypatch.setattr(certificates, "now", lambda: later)
        if renewed:
            authority.renew(kits, 1, 30)
        with pytest.raises(error, match=words):
            joined(client)


# The silo's answers, to a real server


def asked(idle: Idle, schema: dict) -> Future:
    """An exchange with silo 0. After it, the run is over."""
    down = wire.Down(7, 1, Ask("train", (0,), {"w": torch.ones(3)}), "terms", {0: 5})
    found = begun(idle.coordinator.ask, down, schema, lambda up, *_: up["leaves"])
    found.add_done_callback(lambda _: idle.coordinator.finish("over"))
    return found


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (wire.RefusedError("set back", "set back").below(source="/own/file"), "set back"),
        (UserError("/own/memory: can't be written"), "it can't answer; its own log says why"),
        (UserError("is no\nfile", path=("own",), value="/own/x"), "it can't answer; its own log"),
    ],
)
def test_a_silo_that_can_not_answer_says_so_without_its_paths_and_stays(idle, caplog, error, heard):
    def answered(_: wire.Down) -> wire.Up:
        raise error

    exchange = asked(idle, {})
    with SiloClient(idle.comm, idle.kits / "1", 0, hello_of()) as client:
        client.serve(answered)
    with pytest.raises(QuorumError, match=heard) as said:
        exchange.result(LONG)
    assert "/own" not in str(said.value)
    assert any("/own" in one.getMessage() for one in caplog.records), "its own log has the path"


def test_a_task_can_be_refused_before_a_byte_of_its_tensors_is_kept(idle):
    """The server hears why, and the stream goes on to the end of the run."""
    seen, exchange = [], asked(idle, {})

    def admit(task: wire.Task, table: wire.Table) -> None:
        if task.kind == "ask":
            seen.append((task.exchange, task.job, table["params/w"].shape))
            raise wire.RefusedError("policy", "policy: no model of 3 weights")

    with SiloClient(idle.comm, idle.kits / "1", 0, hello_of(), admit) as client:
        client.serve(unexpected)
    with pytest.raises(QuorumError, match="policy: no model of 3 weights"):
        exchange.result(LONG)
    assert seen == [(7, "train", (3,))]


def test_an_answer_is_computed_once_if_the_line_breaks_before_it_arrives(idle):
    """Each side sees a message before it leaves, and the other side sees the same SHA-256."""
    computed, here, there = [], [], []

    def witness(noted: list, who: str, left: bool, message: wire.Message) -> wire.Head:
        noted.append((who, left, type(message.head), message.sha256))
        return message.head

    idle.server._witness = partial(witness, there)

    def answered(down: wire.Down) -> wire.Up:
        computed.append(down.exchange)
        event_loop().call_soon_threadsafe(client._stream.call.cancel)
        return wire.up(0, down.exchange, {"w": down.ask.params["w"] * 2})

    exchange, own = asked(idle, {"w": torch.zeros(3)}), (idle.comm, idle.kits / "1", 0, hello_of())
    with SiloClient(*own, witness=partial(witness, here)) as client:
        client.serve(answered)
    assert exchange.result(LONG)[0]["w"].tolist() == [2.0] * 3 and computed == [7]
    # Hello, Welcome, Task; the same again and the answer; the end.
    assert len(there) == 8 and {who for who, *_ in there} == {"silo-1"}
    for mine, other in ((here, there), (there, here)):
        arrived = {tuple(rest) for _, left, *rest in mine if not left}
        assert arrived and arrived <= {tuple(rest) for _, left, *rest in other if left}
