"""The state that the server's main thread shares with the calls of the silos: who is there, what is
asked, who has answered."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fedml_noniid.plugins.core.trees import Tree
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.exit_codes import QuorumError, one_line
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.wire import Down, RefusedError, Task

LONG_POLL_S = 20.0  # a call for work is answered after this, with or without work
END_NOTICE_S = 10.0  # how long a server that ends waits for silos to hear it
RECHECK_S = 5.0  # a call that waits looks so often whether its caller is still admitted
TICK_S = 0.1  # the main thread looks so often whether a time limit has passed
MAX_ROUND_LINES = 3  # log lines of a round beside the one at its end
LOG = logging.getLogger(__name__)
Active = Callable[[], bool]  # whether the caller still listens
# The reply in an upload of a client with n_k samples. Raises RefusedError.
Check = Callable[[wire.Up, int, int | None], Tree | None]


class Coordinator:
    """The state of one server process. Silos are called by client number, which counts from 0."""

    def __init__(
        self,
        comm: CommArgs,
        silos: int,
        terms: str,
        run: str,
        rounds: int = 0,
        code: Mapping[str, str] | None = None,
    ) -> None:
        """`terms`: the fingerprint of the server's configuration; `rounds` for the status only.

        `code`: the methods that are not ours -> SHA-256 of their source.
        """
        self.code = code or {}
        self.comm, self.silos, self.terms, self.run, self.rounds = comm, silos, terms, run, rounds
        self.refused: Counter[str] = Counter()  # messages of this round, by name of the refusal
        self._changed = threading.Condition()
        self._sessions: dict[int, str] = {}
        self._samples: dict[int, int] = {}  # client -> n_k, as it says when it comes
        self._streams: Counter[int] = Counter()  # client -> its open streams
        self._last_contact: dict[int, float] = {}  # client -> monotonic seconds
        self._down: Down | None = None
        self._schema: Tree = {}
        self._check: Check | None = None
        self._began = self._since = time.monotonic()
        self._answers: dict[int, Tree] = {}
        self._failed: dict[int, str] = {}
        self._ending: Task | None = None
        self._notified: set[int] = set()  # clients that know the end
        self._logged: set[tuple[str, str]] = set()  # (name in the certificate, refusal)
        self._lines = 0

    # the silos' side: called by the threads of gRPC
    # ----------------------------------------------------------------------------------------------

    def hello(self, client: int, hello: wire.Hello) -> wire.Welcome:
        """Lets a silo in, also one that comes again. Raises RefusedError."""
        where, most = wire.silo(client), self.comm.max_samples
        if hello.terms != self.terms:
            why = wire.other_configuration(hello.code, self.code)
            raise RefusedError("configuration", f"{where}: {why}")
        if not 1 <= hello.samples <= most:
            raise RefusedError(
                "samples",
                f"{where}: says it has {hello.samples} samples; allowed: 1 to "
                f"comm_args.max_samples = {most}",
            )
        with self._changed:
            self._sessions[client], self._samples[client] = hello.session, hello.samples
            self._failed.pop(client, None)  # it may be repaired
            self._changed.notify_all()
        return wire.Welcome(run=self.run)

    def check(self, client: int, session: str) -> None:
        """Raises RefusedError unless the silo's last process calls, and has said hello to this
        process of the server."""
        known = self._sessions.get(client)
        if known is None:
            raise RefusedError("restarted", f"{wire.silo(client)}: has not said hello")
        if session != known:
            raise RefusedError(
                "replaced", f"{wire.silo(client)}: another process of this silo has taken over"
            )

    def attend(self, client: int, session: str, active: Active) -> None:
        """Waits in the stream that shows that a silo is there, as long as it is."""

        def over() -> bool:
            replaced = self._sessions.get(client) != session
            return replaced or client in self._notified or not active()

        with self._changed:
            self._streams[client] += 1
            if self._streams[client] == 1:
                self._note(f"{wire.silo(client)} is there")
            self._changed.notify_all()
            try:
                # `active` also changes without notice: a certificate is revoked.
                while not self._changed.wait_for(over, RECHECK_S):
                    pass
            finally:
                self._streams[client] -= 1
                self._last_contact[client] = time.monotonic()
                if not self._streams[client] and client not in self._notified:
                    self._note(f"{wire.silo(client)} has left")
                self._changed.notify_all()

    def wake(self) -> None:
        """Lets waiting calls look whether their caller is still there."""
        with self._changed:
            self._changed.notify_all()

    def task(self, client: int, session: str, active: Active) -> Task | Down:
        """The message to a silo, the end of the run, or "wait" after `LONG_POLL_S`."""

        def due() -> bool:
            replaced = self._sessions.get(client) != session
            return bool(self._ending or self._asks(client)) or replaced or not active()

        with self._changed:
            self._changed.wait_for(due, LONG_POLL_S)
            if self._ending is not None:
                self._notified.add(client)
                self._changed.notify_all()
                return self._ending
            if self._down is not None and self._asks(client):
                return wire.row_of(self._down, client)
            return Task(kind="wait")

    def expected(self, client: int, exchange: int) -> Tree:
        """The structure of the answer. Raises RefusedError if none is expected."""
        with self._changed:
            self._refuse_unexpected(client, exchange)
            return self._schema

    def accept(self, client: int, up: wire.Up) -> None:
        """Checks an answer and takes it. Raises RefusedError."""
        assert self._check is not None, "an answer is expected"
        try:
            reply = self._check(up, client, self._samples.get(client))
        except RefusedError as refusal:
            self.fail(client, up["exchange"], str(refusal))
            raise
        with self._changed:
            self._refuse_unexpected(client, up["exchange"])
            self._answers[client] = reply or {}
            self._changed.notify_all()

    def fail(self, client: int, exchange: int, why: str) -> None:
        """Notes that a silo can't answer this exchange, or that its answer is of no use."""
        with self._changed:
            self._refuse_unexpected(client, exchange)
            who = wire.silo(client)
            self._failed[client] = one_line(why if who in why else f"{who}: {why}")
            self._note(self._failed[client])
            self._changed.notify_all()

    def refuse(self, who: str, refusal: RefusedError) -> None:
        """Counts a call or message that was not taken.

        The first of each caller and kind has a line in the log.
        """
        with self._changed:
            self.refused[refusal.name] += 1
            if (who, refusal.name) not in self._logged:
                self._logged.add((who, refusal.name))
                LOG.warning(
                    "refused from %s (%s): %s", one_line(who), refusal.name, one_line(str(refusal))
                )

    def status(self) -> dict[str, Any]:
        """The state of the run, for an operator."""
        with self._changed:
            ask = None if self._down is None else self._down.ask
            asked = () if ask is None else ask.to
            return {
                "run": self.run,
                "round": None if self._down is None else self._down.round,
                "rounds": self.rounds,
                "job": None if ask is None else wire.name(ask),
                "seconds": round(time.monotonic() - self._since, 1),
                "there": self._present(),
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
        with self._changed:
            while (count := len(self._present())) < self.silos:
                waited = time.monotonic() - began
                if count >= quorum and (resumed or waited >= comm.deadline_s):
                    break
                if waited >= comm.patience_s:
                    raise QuorumError(
                        f"only {count} of {self.silos} silos came within {comm.patience_s:g} s; "
                        f"the quorum is {quorum}; start the server again to go on"
                    )
                self._changed.wait(TICK_S)
            self._began = time.monotonic()  # who was never there is gone some time after this

    def ask(self, down: Down, schema: Tree, check: Check) -> dict[int, Tree]:
        """Sends a message and returns the checked replies, ascending.

        The exchange ends when all have answered. With a quorum it also ends at the deadline, or
        when the others can't answer or are gone. Raises QuorumError if there is no quorum after
        `patience_s`, or there can't be one.
        """
        assert down.ask is not None, "there is something to do"
        asked, comm = down.ask.to, self.comm
        quorum = min(comm.quorum or self.silos, len(asked))
        with self._changed:
            self._down, self._schema, self._check = down, schema, check
            self._answers, self._failed, self._since = {}, {}, time.monotonic()
            self._changed.notify_all()
            while True:
                left = [k for k in asked if k not in self._answers and k not in self._failed]
                enough, waited = len(self._answers) >= quorum, time.monotonic() - self._since
                if enough and (waited >= comm.deadline_s or all(map(self._gone, left))):
                    break
                hopeless = len(self._answers) + len(left) < quorum
                if hopeless or (not enough and waited >= comm.patience_s):
                    silent = ", ".join(map(wire.silo, left))
                    why = [*self._failed.values()] + [f"no answer from {silent}"] * bool(left)
                    raise QuorumError(
                        f"round {down.round}, job {wire.name(down.ask)!r}: {len(self._answers)} of "
                        f"{len(asked)} silos answered in {waited:.0f} s and the quorum is {quorum} "
                        f"({'; '.join(why)}); start the server again to go on"
                    )
                self._changed.wait(TICK_S)
            self._down = None
            return dict(sorted(self._answers.items()))

    def round_over(self, line: str) -> None:
        """Writes the one line at the end of a round."""
        with self._changed:
            counts = [f"{n} {name}" for name, n in sorted(self.refused.items())]
            line += f"; refused {', '.join(counts)}" if counts else ""
            more = self._lines - MAX_ROUND_LINES
            LOG.info("%s", f"{line}; {more} more events" if more > 0 else line)
            self._lines = 0
            self.refused.clear()

    def finish(self, kind: Literal["over", "stop"], why: str = "") -> None:
        """Lets the silos know that the run is over ("over"), or given up ("stop"), and waits a
        little for them to hear."""
        with self._changed:
            self._ending = Task(kind=kind, why=why)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._notified.issuperset(self._present()), END_NOTICE_S)

    # with the lock
    # ----------------------------------------------------------------------------------------------

    def _asks(self, client: int) -> bool:
        down = self._down
        asked = down is not None and down.ask is not None and client in down.ask.to
        return asked and client not in self._answers and client not in self._failed

    def _refuse_unexpected(self, client: int, exchange: int) -> None:
        where = wire.silo(client)
        if self._down is None or exchange != self._down.exchange:
            raise RefusedError("stale", f"{where}: answer is to exchange {exchange}, which is over")
        if not self._asks(client):
            why = f"has answered exchange {exchange} already, or was not asked in it"
            raise RefusedError("duplicate", f"{where}: {why}")

    def _present(self) -> list[int]:
        return sorted(k for k, streams in self._streams.items() if streams)

    def _gone(self, client: int) -> bool:
        """Whether a silo is not waited for any more: some time after its last contact; never while
        it is there."""
        since = self._last_contact.get(client, self._began)
        return not self._streams[client] and time.monotonic() >= since + self.comm.gone_s

    def _note(self, text: str) -> None:
        """Writes a log line, unless the round has had enough of them."""
        self._lines += 1
        if self._lines <= MAX_ROUND_LINES:
            LOG.info(text)
