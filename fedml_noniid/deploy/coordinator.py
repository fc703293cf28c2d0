"""The state that the server's main thread shares with the calls of the silos: who is there, what is
asked, who has answered."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from cryptography import x509

from fedml_noniid.core.errors import UserError, one_line
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.credentials import certificates
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.exit_codes import QuorumError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.wire import Down, RefusedError, Task

if TYPE_CHECKING:
    from fedml_noniid.deploy.silo_server import Call

END_NOTICE_S = 10.0  # how long a server that ends waits for silos to hear it
MAX_PROCESSES = 16  # of a silo, that the server remembers
TICK_S = 0.1  # the main thread looks so often whether a time limit has passed
LOG = logging.getLogger(__name__)
# The reply in an upload of a client with n_k samples. Raises RefusedError.
Check = Callable[[wire.Up, int, int | None], Tree | None]
Noted = Callable[[str, RefusedError], object]  # (name in a certificate, what was refused)
# Of the replies by client, once there are enough: those that are refused after all, and why.
Compare = Callable[[Mapping[int, Tree]], Mapping[int, str]]


class Coordinator:
    """The state of one server process. Silos are called by client number, which counts from 0."""

    ca: x509.Certificate  # of the federation; the `SiloServer` sets it

    def __init__(
        self,
        comm: CommArgs,
        silos: int,
        study: str,
        run: str,
        rounds: int = 0,
        noted: Noted = lambda *_: None,
    ) -> None:
        """`study`: the SHA-256 of the server's study; `rounds` for the status only. `noted` hears
        of the first refusal of each caller and kind in a round."""
        self.comm, self.silos, self.study, self.run, self.rounds = comm, silos, study, run, rounds
        self._noted = noted
        self._error: UserError | None = None  # why the run can't go on
        self.refused: Counter[str] = Counter()  # messages of this round, by name of the refusal
        self._lock = threading.Lock()
        self._news = threading.Event()  # the main thread has something to look at
        self._lines: dict[int, Call] = {}  # client -> its stream
        self._processes: dict[int, list[str]] = {}  # client -> sessions, the last is the newest
        self._samples: dict[int, int] = {}  # client -> n_k, as it says when it comes
        self._last_contact: dict[int, float] = {}  # client -> monotonic seconds
        self._down: Down | None = None
        self._schema: Tree = {}
        self._check: Check | None = None
        self._began = self._since = time.monotonic()
        self._left: set[int] = set()  # clients that have to answer
        self._answers: dict[int, Tree] = {}
        self._failed: dict[int, str] = {}
        self._ending: Task | None = None
        self._logged = set[tuple[str | int, str]]()  # what has its line in this round

    # the silos' side: called by the event loop, and by the thread of the checks
    # ----------------------------------------------------------------------------------------------

    def join(self, client: int, hello: wire.Hello, line: Call) -> wire.Welcome:
        """Lets a silo in, also one that comes again. Raises RefusedError."""
        name = wire.silo(client)
        if hello.study != self.study:
            raise RefusedError("configuration", f"{name}: its study is not the server's")
        broken = RefusedError("broken", f"{name}: has come again on another stream")
        replaced = RefusedError("replaced", f"{name}: another process of this silo has taken over")
        with self._lock:
            known = self._processes.get(client, [])
            if hello.session in known[:-1]:
                raise replaced
            is_new = hello.session not in known
            if is_new:
                self._processes[client] = [*known[1 - MAX_PROCESSES :], hello.session]
                if self._failed.pop(client, None) is not None:  # it may be repaired
                    self._left.add(client)
            self._samples[client] = hello.samples
            if client in self._lines:
                self._lines[client].end(replaced if is_new else broken)
            else:
                self._log((client, "is there"), f"{name} is there", logging.INFO)
            self._lines[client] = line
        self._news.set()
        return wire.Welcome(run=self.run)

    def leave(self, client: int, line: Call) -> None:
        """Notes that a stream has ended."""
        with self._lock:
            if self._lines.get(client) is line:
                del self._lines[client]
                self._last_contact[client] = time.monotonic()
                if self._ending is None:
                    self._log((client, "left"), f"{wire.silo(client)} has left", logging.INFO)
        self._news.set()

    def task(self, client: int) -> Task | Down | None:
        """What to send to a silo: the end of the run, a task, or nothing now."""
        with self._lock:
            if self._ending is None and self._down is not None and client in self._left:
                return wire.row_of(self._down, client)
            return self._ending

    def expected(self, client: int, at: tuple[int, int]) -> Tree:
        """The structure of the answer to (exchange, step). Raises RefusedError if none is
        expected."""
        with self._lock:
            self._refuse_unexpected(client, at)
            return self._schema

    def accept(self, client: int, answer: wire.Answer, leaves: Params, sha256: str = "") -> None:
        """Takes an answer; an upload is checked first. `sha256`: the `wire.digest` of the tensors.
        Raises RefusedError."""
        if answer.failed:
            self.fail(client, answer.at, answer.failed[:500])
            return
        with self._lock:  # a late answer must not meet the check of what is asked now
            self._refuse_unexpected(client, answer.at)
            check = self._check
        assert check is not None, "an answer is expected"
        up = wire.Up(client=client, exchange=answer.exchange, leaves=leaves, sha256=sha256)
        reply = check(up, client, self._samples.get(client))
        with self._lock:
            self._refuse_unexpected(client, answer.at)
            self._answers[client] = reply or {}
            self._left.remove(client)
            if not self._left:
                self._news.set()

    def fail(self, client: int, at: tuple[int, int], why: str) -> None:
        """Notes that a silo can't answer this (exchange, step), or that its answer is of no
        use."""
        with self._lock, suppress(RefusedError):
            self._refuse_unexpected(client, at)
            self._left.remove(client)
            self._note_failure(client, why)
        self._news.set()

    def refuse(self, who: str, refusal: RefusedError) -> None:
        """Counts a call or message that was not taken.

        The first of each caller and kind in a round has a line in both logs.
        """
        with self._lock:
            self.refused[refusal.name] += 1
            line = f"refused from {one_line(who)} ({refusal.name}): {refusal}"
            if self._log((who, refusal.name), line):
                self._noted(who, refusal)

    def give_up(self, error: UserError) -> None:
        """Lets the main thread raise an error of the event loop."""
        self._error = error
        self._news.set()

    def status(self) -> dict[str, Any]:
        """The state of the run, for an operator."""
        with self._lock:
            ask = None if self._down is None else self._down.ask
            asked = () if ask is None else ask.to
            return {
                "run": self.run,
                "round": None if self._down is None else self._down.round,
                "rounds": self.rounds,
                "job": None if ask is None else wire.name(ask),
                "seconds": round(time.monotonic() - self._since, 1),
                "there": sorted(self._lines),
                "asked": list(asked),
                "answered": sorted(self._answers),
                "late": [k for k in asked if k not in self._answers],
                "failed": {str(k): why for k, why in sorted(self._failed.items())},
                "refused": dict(self.refused),
            }

    # the server's side: called by the main thread
    # ----------------------------------------------------------------------------------------------

    def gather(self, resumed: bool = False) -> None:
        """Waits until all silos are there, or after `deadline_s` a quorum.

        Raises QuorumError after `patience_s`.

        `resumed`: a quorum is enough at once. Those who come later join the exchange.
        """
        quorum, comm, began = self.comm.quorum or self.silos, self.comm, time.monotonic()
        while (count := len(self._lines)) < self.silos:
            waited = time.monotonic() - began
            if count >= quorum and (resumed or waited >= comm.deadline_s):
                break
            if waited >= comm.patience_s:
                raise QuorumError(
                    f"only {count} of {self.silos} silos came within {comm.patience_s:g} s; "
                    f"the quorum is {quorum}; start the server again to go on"
                )
            self._wait()
        self._began = time.monotonic()  # who was never there is gone some time after this

    def ask(
        self,
        down: Down,
        schema: Tree,
        check: Check,
        quorum: int = 0,
        compare: Compare = lambda _: {},
    ) -> dict[int, Tree]:
        """Sends a message and returns the checked replies, ascending.

        The exchange ends when all have answered. With a quorum it also ends at the deadline, or
        when the others can't answer or are gone. Raises QuorumError if there is no quorum after
        `patience_s`, or there can't be one. `quorum`: another one than the settings'. `compare`
        refuses replies beside the others: the exchange goes on without them.
        """
        asked = down.question.to
        with self._lock:
            self._down, self._schema, self._check = down, schema, check
            self._left, self._answers, self._failed = {*asked}, {}, {}
            self._logged -= {(client, "failed") for client in asked}
            self._since = time.monotonic()
            for client in self._left & self._lines.keys():
                self._lines[client].wake()
        while True:
            refused: Mapping[int, str] = {}
            with self._lock:
                if self._is_over(down, min(quorum or self.comm.quorum or self.silos, len(asked))):
                    refused = {
                        client: f"round {down.round}: {why}"
                        for client, why in compare(self._answers).items()
                    }
                    if not refused:
                        self._down, self._left = None, set()
                        return dict(sorted(self._answers.items()))
                    for client, why in refused.items():
                        del self._answers[client]
                        self._note_failure(client, why)
            for client, why in refused.items():
                self.refuse(certificates.name(client + 1), RefusedError("outlier", why))
            self._wait()

    def finish(self, kind: Literal["over", "stop"], why: str = "") -> None:
        """Lets the silos know that the run is over ("over"), or given up ("stop"), and waits a
        little for them to hear."""
        end = time.monotonic() + END_NOTICE_S
        with self._lock:
            self._ending = Task(kind=kind, why=why)
            for line in self._lines.values():
                line.wake()
        while self._lines and time.monotonic() < end:
            self._wait()

    def _wait(self) -> None:
        """Waits for news, but no longer than until time limits have to be checked. Raises the error
        that `give_up` has."""
        self._news.wait(TICK_S)
        self._news.clear()
        if self._error is not None and self._ending is None:
            raise self._error

    def round_over(self, line: str) -> None:
        """Writes the one line at the end of a round."""
        with self._lock:
            counts = [f"{n} {name}" for name, n in sorted(self.refused.items())]
            LOG.info("%s", f"{line}; refused {', '.join(counts)}" if counts else line)
            self._logged.clear()
            self.refused.clear()

    # with the lock
    # ----------------------------------------------------------------------------------------------

    def _is_over(self, down: Down, quorum: int) -> bool:
        """Says whether the exchange is over. Raises QuorumError if there can't be a quorum."""
        n_answers, comm, waited = len(self._answers), self.comm, time.monotonic() - self._since
        if n_answers >= quorum and (waited >= comm.deadline_s or all(map(self._gone, self._left))):
            return True
        if n_answers + len(self._left) < quorum or (
            n_answers < quorum and waited >= comm.patience_s
        ):
            silent = ", ".join(map(wire.silo, sorted(self._left)))
            why = [*self._failed.values()] + [f"no answer from {silent}"] * bool(silent)
            raise QuorumError(
                f"round {down.round}, job {wire.name(down.question)!r}: {n_answers} of "
                f"{len(down.question.to)} silos answered in {waited:.0f} s and the quorum is "
                f"{quorum} ({'; '.join(why)}); start the server again to go on"
            )
        return False

    def _refuse_unexpected(self, client: int, at: tuple[int, int]) -> None:
        name, (exchange, _) = wire.silo(client), at
        if self._down is None or at != self._down.at:
            raise RefusedError("stale", f"{name}: answer is to exchange {exchange}, which is over")
        if client not in self._left:
            why = f"has answered exchange {exchange} already, or was not asked in it"
            raise RefusedError("duplicate", f"{name}: {why}")

    def _gone(self, client: int) -> bool:
        """Whether a silo is not waited for any more: some time after its last contact; never while
        it is there."""
        return client not in self._lines and (
            time.monotonic() >= self._last_contact.get(client, self._began) + self.comm.gone_s
        )

    def _note_failure(self, client: int, why: str) -> None:
        who = wire.silo(client)
        self._failed[client] = one_line(why if who in why else f"{who}: {why}", 1000)
        self._log((client, "failed"), self._failed[client])

    def _log(self, what: tuple[str | int, str], line: str, level: int = logging.WARNING) -> bool:
        """Writes a line, if the round has none for `what` yet, and says whether it did: others
        decide how often something happens."""
        is_new = what not in self._logged
        self._logged.add(what)
        if is_new:
            LOG.log(level, "%s", line)
        return is_new
