"""The server of a run, without FedML and without a network: the suspended rounds, fed with the
uploads of the silos."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedml_noniid.plugins.core.component import Ask, Reply
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params, Tree, add, row
from fedml_noniid.plugins.engines.callbacks import Callback, Row
from fedml_noniid.plugins.engines.checkpoint import Checkpoints
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.hashing import weights_sha256
from fedml_noniid.plugins.engines.packing import stack
from fedml_noniid.plugins.engines.plan import Start
from fedml_noniid.plugins.engines.run import Checkpointing, Outcome, Run
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.frames import RefusedError
from fedml_noniid.plugins.silo.settings import Terms
from fedml_noniid.plugins.silo.silo import Silo
from fedml_noniid.plugins.silo.wire import Down, Up


class _Noting(Callback):
    """Has the notes of a server_run at hand when a checkpoint is written."""

    def __init__(self, server_run: ServerRun) -> None:
        self.server_run = server_run

    def on_round(self, run: Run, row: Row) -> None:
        run.notes = self.server_run.notes

    def state(self) -> dict[str, Any]:
        return {}


class ServerRun:
    """The server of a run: `down` is the message to send; `open` and `feed` take the uploads and
    make the next one."""

    def __init__(
        self,
        terms: Terms,
        federation: Federation,
        callbacks: Sequence[Callback] = (),
        postprocess: Callable[[Params], Params] = lambda params: params,
        kept: Path | None = None,
        run: str = "",
    ) -> None:
        """`federation`: what the server has of it.

        `callbacks`: they hear a round before its checkpoint is written.

        `postprocess` changes the model at the end of a round, before it is evaluated and sent
        (privacy, defences).

        A checkpoint is written to `kept` before the first Ask and after every round. If that file
        exists, the run goes on from there, under the name `run` that it had. UserError if the file
        is damaged or of other settings.
        """
        self.terms = terms
        self.outcome: Outcome | None = None
        self.missing: dict[
            tuple[int, int], frozenset[int]
        ] = {}  # (round, exchange in it) -> silos that did not answer
        self._begun, self._round, self._exchange = False, 0, 0
        self._counted: dict[int, int] = {}
        self._samples: dict[int, int] = {}  # n_k of the silos whose answers were counted
        test = federation.test
        # A silo with one test sample: its replies give the structure that every upload must have.
        sample = Samples(test.x[:1], test.y[:1])
        self._probe = Silo(terms, 0, sample, sample if federation.public is not None else None)
        self._sample = sample.x
        self._schemas: dict[str, Tree] = {}
        self._ranges = wire.ranges(terms.algorithm.components)
        # Every round tests on them, so a run on other samples is another run.
        tests = weights_sha256({"x": test.x, "y": test.y})
        fingerprint = hashlib.sha256(f"{terms.fingerprint} {tests}".encode()).hexdigest()
        self.kept: Checkpoints | None = None
        if kept is not None:
            self.kept = Checkpoints(kept, fingerprint, run, private=True)
        self.resumed = self.kept is not None and self.kept.exists()
        written = [] if self.kept is None else [Checkpointing(self.kept)]
        start = Start.of(terms.algorithm, terms.plan, test.x)
        self.loop = Run(start, federation, [*callbacks, _Noting(self), *written], postprocess)
        self.run = run if self.kept is None else self.kept.run
        if self.resumed:
            self._restore(self.loop.notes)
        else:
            self._save()
        self._asks = self._rounds()
        # the algorithm's own object: the meter tells models apart by identity
        self._ask: Ask | None = None
        self.down = self._next(None)

    @property
    def rows(self) -> list[Row]:
        """The rows of rounds.csv so far."""
        return self.loop.rows

    @property
    def schema(self) -> Tree:
        """The structure of an answer to the present message; empty if there is nothing to do."""
        return {} if self.down.ask is None else self._schemas[wire.name(self.down.ask)]

    def open(self, uploads: Mapping[int, Up]) -> dict[int, Tree]:
        """The checked replies of the clients that were asked, ascending.

        Raises RefusedError that names a silo.
        """
        return {
            k: reply for k in sorted(uploads) if (reply := self.opened(uploads[k], k)) is not None
        }

    def opened(self, upload: Up, client: int) -> Tree | None:
        """The checked reply of one client; None if it was not asked. Raises RefusedError."""
        reply = wire.opened(upload, client, self.down, self.schema, self._ranges)
        if reply is not None:
            where = f"round {self._round}, {wire.silo(client)}"
            wire.same_samples(int(reply["n"]), self._samples.get(client), where)
            self._try(reply, where)
        return reply

    def _try(self, reply: Tree, where: str) -> None:
        """Raises RefusedError if the model of a reply overflows: a deep network multiplies its
        weights."""
        if reply["deltas"]:
            params = add(self.loop.state.params, reply["deltas"])
            with torch.no_grad():
                out = self.loop.start.task.eval(params, reply["buffers"], self._sample)
            # Written so that NaN is refused too.
            if (
                not torch.cat([out.features, out.logits], dim=1).abs().max()
                <= wire.MAX_MAGNITUDE**3
            ):
                raise RefusedError(
                    "range", f"{where}: upload's model overflows on a test sample; {wire.REMEDY}"
                )

    def without(self, late: Collection[int]) -> None:
        """These clients don't answer the present message: they are left out for the rest of the
        round."""
        self.loop.missing.update(late)
        if late:
            self.missing[self._round, self.loop.exchange] = frozenset(late)

    def feed(self, replies: Mapping[int, Tree]) -> Down:
        """Goes on with the replies of all clients that were asked, or of some.

        Returns the next message.
        """
        if self._ask is None:
            return self.down
        if not replies:
            raise UserError(f"round {self._round}: no silo is left to average")
        clients = tuple(sorted(replies))
        reply = Reply(clients, **stack([replies[client] for client in clients]))
        self._counted |= dict.fromkeys(clients, self._exchange)
        self._samples |= {client: int(replies[client]["n"]) for client in clients}
        self._exchange += 1
        self.down = self._next(reply)
        return self.down

    def _next(self, reply: Reply | None) -> Down:
        try:
            with torch.no_grad():
                ask = next(self._asks) if reply is None else self._asks.send(reply)
        except StopIteration:
            ask = None
        if ask is not None and wire.name(ask) not in self._schemas:
            self._schemas[wire.name(ask)] = row(
                Silo.parts(self._probe.reply(ask, 0, self._round)), 0
            )
        self._ask = ask
        return wire.down(
            self._exchange, self._round, ask, self.terms.fingerprint, dict(self._counted)
        )

    def _rounds(self) -> Generator[Ask, Reply, None]:
        loop = self.loop
        if not self._begun:
            yield from loop.begin()
            self._begun = True
            self._save()
        while not loop.over:
            self._round = loop.done + 1
            yield from loop.round()  # its `seconds` include the wait for the silos
        self.outcome = loop.outcome

    @property
    def notes(self) -> dict[str, Any]:
        """The part of a checkpoint that the loop does not have, as JSON."""
        return {
            "begun": self._begun,
            "exchange": self._exchange,
            "counted": list(self._counted.items()),
            "samples": list(self._samples.items()),
            "missing": [[*at, sorted(late)] for at, late in self.missing.items()],
        }

    def _save(self) -> None:
        if self.kept is not None:
            self.loop.notes = self.notes
            self.kept.write(self.loop.checkpoint())

    def _restore(self, notes: dict[str, Any]) -> None:
        self._begun, self._exchange = notes["begun"], notes["exchange"]
        self._counted, self._samples = dict(notes["counted"]), dict(notes["samples"])
        self.missing = {(t, exchange): frozenset(late) for t, exchange, late in notes["missing"]}
        self._round = self.loop.done
