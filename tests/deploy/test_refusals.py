"""Bad uploads are refused by name, and what the server then does: it goes on without the silo, or
ends."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.attacks import Line
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.coordinator import Check, Coordinator
from fedml_noniid.deploy.exit_codes import QuorumError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.wire import RefusedError
from tests.deploy import world
from tests.deploy.federation_server import LONG, Federation, Traitor, answer_of, body
from tests.walks import thinned

TRAITOR = 2  # rank 3


BIAS = "deltas/fc2.bias"
# (what differs from a good answer, the name of the refusal, words of the reason). None: missing; a
# number: everywhere.
UPLOADS = [
    ({BIAS: math.nan}, "non-finite", "is not finite"),
    ({BIAS: -math.inf}, "non-finite", "is not finite"),
    ({BIAS: torch.zeros(8)}, "shape", "expected float32"),
    ({BIAS: torch.zeros(4).double()}, "dtype", "is float64"),
    ({BIAS: None}, "missing", "lacks 'deltas/"),
    ({"deltas/more": torch.zeros(1)}, "extra", "has 'deltas/more'"),
    ({BIAS: 1e20}, "range", "has 1e+20; allowed: from -1"),
    ({"n": 10**9}, "samples", "1000000000 samples; train_args.max_samples allows 70"),
    ({"n": 0}, "range", "'n' has 0; allowed: from 1"),
    ("more bytes", "oversize", "bytes; expected: "),
    ("no table", "malformed", "no table of tensors"),
]
# The same of what a method uploads.
LIES = [
    ("fednova", {"upload/fednova/a": 0.0}, "range", "upload/fednova/a"),
    ("qfedavg", {"upload/qfedavg/F": math.inf}, "non-finite", "upload/qfedavg/F"),
    ("fedgen", {"upload/fedgen/counts": 2.5}, "range", "upload/fedgen/counts"),
    ("scaffold", {"n": 18}, "samples", "n = 18 samples; it was 17 before"),
]


def frames(kind: dict | str, federation: Federation) -> list[bytes]:
    """The body of a bad answer."""
    if isinstance(kind, dict):
        return body(federation.answer(**kind))
    table, *rest = body(federation.answer())
    return [table, b"".join([*rest, b"more"])] if kind == "more bytes" else [b"[]", *rest]


@contextmanager
def betrayed(
    kits: Path, quorum: int, rounds: int = 2, held: bool = False, recipe: str = "fedavg"
) -> Iterator[tuple[Federation, Traitor]]:
    """A federation of three, of which the last is a test's.

    No time limit is short: only rules can end an exchange.

    `held`: the others do not answer before `go` is set.
    """
    comm = {"quorum": quorum, "deadline_s": 3600.0, "gone_s": 0.0}
    federation = Federation(kits, world.deployment(recipe, rounds, comm), honest=(0, 1))
    if held:
        federation.go.clear()
    with federation:
        with Traitor(federation, TRAITOR) as traitor:
            traitor.task()
            yield federation, traitor
        # The traitor has left.
        assert federation.ended()


@pytest.mark.parametrize(
    ("recipe", "kind", "name", "why"), [*(("fedavg", *row) for row in UPLOADS), *LIES]
)
def test_with_a_quorum_the_run_goes_on_without_a_bad_upload(
    all_kits, recipe, kind, name, why, caplog
):
    with betrayed(all_kits, quorum=2, recipe=recipe) as (federation, traitor):
        assert traitor.answer(*frames(kind, federation)) == name
        assert federation.coordinator.refused == {name: 1}
    assert federation.error is None
    assert federation.server_run.missing == {(1, 0): {TRAITOR}, (2, 0): {TRAITOR}}
    assert federation.digest() == federation.simulated()
    assert any("silo 2 (rank 3)" in line and why in line for line in caplog.messages)


@pytest.mark.parametrize(("kind", "name", "why"), thinned(UPLOADS, 1, 9))
def test_with_a_quorum_of_all_a_bad_upload_ends_the_run_at_once(all_kits, kind, name, why):
    """One line that names silo and reason. Deadline and patience are hours."""
    with betrayed(all_kits, quorum=0) as (federation, traitor):
        assert traitor.answer(*frames(kind, federation)) == name
    assert isinstance(federation.error, QuorumError)
    said = str(federation.error)
    assert "silo 2 (rank 3)" in said and why in said and "\n" not in said


@pytest.mark.parametrize("second", ["the same", "rubbish"])
def test_a_second_answer_is_refused_and_the_first_counts(all_kits, second):
    """It waits in the stream until the silo is asked again: then it is an answer to another
    exchange, or none."""
    with betrayed(all_kits, quorum=2, held=True) as (federation, traitor):
        good = [answer_of(traitor.task()), *body(federation.answer())]
        assert traitor.say(*good) == "ok"
        traitor.stream.send(*(good if second == "the same" else [b"rubbish"]))
        federation.go.set()
        name = "stale" if second == "the same" else "malformed"
        assert traitor.task() == 1 and traitor.stream.outcome() == name
        assert federation.coordinator.refused == {name: 1}
    assert federation.server_run.missing == {(2, 0): {TRAITOR}}


@pytest.mark.parametrize(("exchange", "expected"), [(-1, "stale"), (0, "truncated")])
def test_a_silo_may_still_answer_after_a_stale_or_truncated_answer(all_kits, exchange, expected):
    """It may be the line that broke. The last frame is half there."""
    with betrayed(all_kits, quorum=0, rounds=1) as (federation, traitor):
        good = body(federation.answer())
        stream, traitor.stream = traitor.stream, None
        stream.send(answer_of(exchange), *good[:-1], good[-1][:-1])
        stream.end()
        assert stream.outcome() == expected
        assert traitor.answer(*good) == "ok"
    assert federation.error is None and federation.server_run.missing == {}


def test_a_silo_may_not_change_its_number_of_samples(all_kits):
    with betrayed(all_kits, quorum=2) as (federation, traitor):
        assert traitor.upload(federation.answer()) == "ok"
        assert traitor.upload(federation.answer(n=torch.tensor(18))) == "samples"
    assert federation.error is None
    assert federation.server_run.missing == {(2, 0): {TRAITOR}}


# The rules, without a network

DOWN = wire.Down(4, 2, Ask("train", (0, 1, 2), {}, {}, {}, {}), "terms")
FOREVER = 3600.0


def coordinator(**comm: float) -> Coordinator:
    """Of three silos, patient unless said otherwise."""
    patient = {"deadline_s": FOREVER, "patience_s": FOREVER, "gone_s": FOREVER}
    return Coordinator(CommArgs(**patient | comm), 3, "t", "r")


HELLO = wire.Hello(session="s", study="t", samples=17)
AGAIN = HELLO.model_copy(update={"session": "another process"})


def begun(call: Callable[..., object], *values: object) -> Future:
    """A call in a thread of its own, which does not outlive a test that fails."""
    found: Future = Future()

    def run() -> None:
        try:
            found.set_result(call(*values))
        except UserError as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


@contextmanager
def there(state: Coordinator, *clients: int) -> Iterator[None]:
    """These silos have their streams."""
    lines = {client: Line() for client in clients}
    for client, line in lines.items():
        state.join(client, HELLO, line)
    yield
    for client, line in lines.items():
        state.leave(client, line)


def asked(
    state: Coordinator, down: wire.Down = DOWN, check: Check = lambda up, *_: up["leaves"]
) -> Future:
    """An exchange that has begun."""
    found = begun(state.ask, down, {}, check)
    end = time.monotonic() + LONG
    while state._down is not down:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def answer(state: Coordinator, client: int, exchange: int = 4) -> None:
    state.accept(client, wire.Answer(exchange=exchange), {"n": torch.tensor(17)})


def test_a_late_answer_does_not_meet_the_check_of_what_is_asked_now() -> None:
    """A check may add the answer to a sum."""
    state, checked = coordinator(), list[int]()
    with there(state, 0, 1, 2):
        asked(state, check=lambda _, client, __: checked.append(client))
        with pytest.raises(RefusedError, match="is to exchange 3, which is over"):
            answer(state, 0, exchange=3)
        answer(state, 0)
        with pytest.raises(RefusedError, match="has answered exchange 4 already"):
            answer(state, 0)
    assert checked == [0]


THREE = (0, 1, 2)


@pytest.mark.parametrize(
    ("comm", "present", "asks", "answers", "failures", "expected", "least_s"),
    [
        ({}, THREE, THREE, (2, 0, 1), {}, [0, 1, 2], 0.0),
        # A quorum waits for a late silo until the deadline.
        ({"quorum": 2, "deadline_s": 0.15}, THREE, THREE, (0, 2), {}, [0, 2], 0.15),
        # It waits only a moment for one that was never there, and not for one that has failed.
        ({"quorum": 2, "gone_s": 0.15}, (0, 1), THREE, (0, 1), {}, [0, 1], 0.0),
        ({"quorum": 2}, THREE, THREE, (0, 1), {2: "no disk"}, [0, 1], 0.0),
        # One that has failed and comes again is asked again.
        ({"quorum": 2}, THREE, THREE, (0, 2, 1), {0: "no disk"}, [0, 1, 2], 0.0),
        # Of two that are asked, three can't answer.
        ({"quorum": 3}, THREE, (0, 2), (0, 2), {}, [0, 2], 0.0),
        (
            {"quorum": 2, "deadline_s": 0.01, "gone_s": 0.0, "patience_s": 0.15},
            *((0, 1), THREE, (0,), {}),
            r"1 of 3 silos .* quorum is 2 .*silo 1 \(rank 2\), silo 2",
            0.15,
        ),
        # Failures that rule a quorum out end the run at once.
        (
            {"quorum": 2},
            *(THREE, THREE, (), {2: "silo 2 (rank 3): no disk", 0: "no memory"}),
            r"silo 2 \(rank 3\): no disk; silo 0 \(rank 1\): no memory",
            0.0,
        ),
    ],
)
def test_how_an_exchange_ends(comm, present, asks, answers, failures, expected, least_s):
    state, began = coordinator(**comm), time.monotonic()
    with there(state, *present):
        exchange = asked(state, DOWN._replace(ask=DOWN.ask._replace(to=asks)))
        for client, why in failures.items():
            assert not exchange.done()
            state.fail(client, (4, 0), why)
            if client in answers:
                state.join(client, AGAIN, Line())
        for client in answers:
            assert not exchange.done()
            answer(state, client)
        ends = isinstance(expected, list)
        with nullcontext() if ends else pytest.raises(QuorumError, match=expected):
            assert list(exchange.result(LONG)) == expected
        assert time.monotonic() - began >= least_s


def test_a_silo_that_is_gone_is_waited_for_only_a_moment():
    """One that is there is waited for."""
    state = coordinator(quorum=2, gone_s=0.05)
    with there(state, 0, 1):
        with there(state, 2):
            exchange = asked(state)
            answer(state, 0)
            answer(state, 1)
            with pytest.raises(TimeoutError):
                exchange.result(0.15)
        assert list(exchange.result(LONG)) == [0, 1]


# Before the first exchange


def test_a_silo_with_another_study_is_not_let_in():
    with pytest.raises(RefusedError, match=r"silo 1 \(rank 2\): its study is not the server's"):
        coordinator().join(1, HELLO.model_copy(update={"study": "another"}), Line())


@pytest.mark.parametrize(
    ("present", "deadline_s", "resumed", "least_s"),
    [
        (THREE, FOREVER, False, 0.0),
        ((0, 2), 0.15, False, 0.15),  # with a quorum after the deadline
        ((0, 2), FOREVER, True, 0.0),  # goes on with one at once
    ],
)
def test_a_run_begins_when_all_are_there_or_a_quorum(present, deadline_s, resumed, least_s):
    state, began = coordinator(quorum=2, deadline_s=deadline_s), time.monotonic()
    with there(state, *present):
        begun(state.gather, resumed).result(LONG)
    assert time.monotonic() - began >= least_s


def test_a_run_does_not_begin_below_the_quorum():
    state = coordinator(quorum=2, deadline_s=0.01, patience_s=0.15)
    words = r"only 1 of 3 silos came .* the quorum is 2"
    with there(state, 1), pytest.raises(QuorumError, match=words):
        state.gather()


# The log


def test_a_silo_that_comes_and_goes_does_not_fill_the_log(caplog):
    """Each event, refusal and failure of a caller has one line in a round. The line at its end
    counts the refusals."""
    caplog.set_level(logging.INFO, "fedml_noniid.deploy")
    state, noted = coordinator(quorum=1), []
    state._noted = lambda who, refusal: noted.append((who, refusal.name))
    for _ in range(50):
        with there(state, 0):
            pass
    for i in range(120):
        state.refuse(f"silo-{i % 3}", RefusedError(f"kind {i % 2}", "rubbish"))
    with there(state, *THREE):
        exchange = asked(state)
        for session in ("1", "2", "3"):
            state.join(2, HELLO.model_copy(update={"session": session}), Line())
            state.fail(2, (4, 0), "study: it has expired")
        state.fail(1, (4, 0), "disk full")
        answer(state, 0)
        assert list(exchange.result(LONG)) == [0]
    state.round_over("round 1 of 2")
    assert len(noted) == 6 and len(caplog.messages) == 14
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    said = ["silo 2 (rank 3): study: it has expired", "silo 1 (rank 2): disk full"]
    assert warnings[6:] == said
    assert caplog.messages[-1] == "round 1 of 2; refused 60 kind 0, 60 kind 1"


def test_a_silo_can_not_write_lines_of_its_own_into_the_log(caplog):
    state = coordinator(quorum=1)
    asked(state)
    state.fail(2, (4, 0), "no disk\nround 9 of 9: accuracy 1.0\x1b[2J\r\ud800" + "x" * 10_000)
    (line,) = caplog.messages
    assert line.startswith(r"silo 2 (rank 3): no disk\nround 9 ")
    assert line.isprintable() and len(line) <= 1000
    assert json.dumps(state.status()).isascii()
