"""The server of a run, without FedML and without a network: the suspended rounds, fed with the
uploads of the silos."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.trees import Params, Tree, add, row, zeros_like
from fedml_noniid.data.shards import Shard
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.exit_codes import LostRoundError, QuorumError
from fedml_noniid.deploy.outliers import Outliers, norms
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.settings import DeviceArgs, Terms, refuse_what_reads_more
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.wire import Down, RefusedError, Up
from fedml_noniid.engines.callbacks import Callback, OnRow
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.evaluation import largest
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.engines.packing import flatten, stack
from fedml_noniid.engines.plan import Start
from fedml_noniid.engines.run import Checkpointing, Run

LOG = logging.getLogger(__name__)
Hooks = Callable[[dict[int, Tree]], dict[int, Tree]]  # replies by client


def _secure() -> Any:
    """Secure sums: a part of governance, which a run without them does not import."""
    from fedml_noniid.governance.secure import server

    return server


class ServerRun:
    """The server of a run: `down` is the message to send; `opened` checks an upload, and `feed`
    takes the replies and makes the next message."""

    def __init__(
        self,
        terms: Terms,
        shard: Shard,
        callbacks: Sequence[Callback] = (),
        postprocess: Callable[[Params], Params] = lambda params: params,
        file: RunFile | None = None,
    ) -> None:
        """`shard`: the server's data. `callbacks`: they hear a round before its checkpoint is
        written.

        `postprocess` changes the model at the end of a round, before it is evaluated and sent
        (privacy, defences).

        A checkpoint is written to `file` before the first Ask and after every round. If that file
        exists, the run goes on from there, under the name that it had. UserError if the file is
        damaged or of other settings.
        """
        if terms.secure_sums:
            refuse_what_reads_more(terms.algorithm, terms.tests, callbacks)
        self.terms = terms
        # (round, exchange in it) -> silos that did not answer
        self.missing: dict[tuple[int, int], frozenset[int]] = {}
        self._begun, self._round, self._exchange = False, 0, 0
        self._counted: dict[int, int] = {}
        self._samples: dict[int, int] = {}  # n_k of the silos whose answers were counted
        self.outliers = Outliers(terms.max_norm_ratio)
        test = shard.parts["test"]
        # A silo with one test sample: its replies give the structure that every upload must have.
        sample = Samples(test.x[:1], test.y[:1])
        parts = {"train": sample, "public": sample}
        if "public" not in shard.parts:
            del parts["public"]
        self._probe = Silo(
            replace(terms, device=DeviceArgs()), 0, replace(shard, parts=parts, drift=None)
        )
        self._sample = test.x[:1]
        self._schemas: dict[str, Tree] = {}  # of replies
        self._announced: dict[str, Tree] = {}  # of what arrives
        self._ranges = terms.ranges
        # Every round tests on them, so a run on other samples is another run.
        tests = weights_sha256({"x": test.x, "y": test.y})
        fingerprint = hashlib.sha256(f"{terms.fingerprint} {tests}".encode()).hexdigest()
        self.run, self.resumed, written = "", False, []
        self._checkpoints: Checkpoints | None = None
        if file is not None:
            self._checkpoints = Checkpoints(file.path, fingerprint, file.run, private=True)
            self.resumed = self._checkpoints.exists()
            written = [Checkpointing(self._checkpoints)]
        start = Start.from_plan(terms.algorithm, terms.plan, test.x)
        rest: dict[str, Any] = {key: shard.parts.get(key) for key in ("validation", "public")}
        rest |= {"drift": shard.drift, "absent": lambda *_: self.outliers.left_out}
        federation = Federation.of_server(terms.silos, test, **rest)
        own, limit = [OnRow(self._round_ended), *written], wire.MAX_MAGNITUDE
        self.loop = Run(start, federation, [*callbacks, *own], postprocess, limit=limit)
        if self._checkpoints is not None:
            self.run = self._checkpoints.run
        if self.resumed:
            self._restore(self.loop.notes)
        else:
            self._save()
        self._asks = self._rounds()
        self.down = self._next(None)

    @property
    def schema(self) -> Tree:
        """The structure of an answer to the present message; empty if there is nothing to do."""
        if self.down.ask is None:
            return {}
        return self._announced[wire.name(self.down.ask)]

    def serve(self, coordinator: Coordinator, hooks: Hooks = lambda replies: replies) -> None:
        """Runs to the end with the silos of a coordinator. Raises UserError.

        `hooks` may change or drop the replies of an exchange.
        """
        try:
            if self.terms.secure_sums:
                _secure().warn_of_quorum(coordinator.comm.quorum, self.terms)
            if self.down.ask is not None:
                coordinator.gather(self.resumed)
            while (ask := self.down.ask) is not None:
                try:
                    replies, sums = self._replies(coordinator)
                    self.without([client for client in ask.to if client not in replies])
                    self.feed(hooks(replies), sums)
                except LostRoundError as error:
                    self._lose_round(coordinator, error)
                except (NonFiniteError, QuorumError) as error:
                    self._go_back(coordinator, error)
        except UserError as error:
            # The reason may quote a silo, which is not for the others.
            few = isinstance(error, QuorumError)
            coordinator.finish("stop", "too few silos answered" if few else "the server has failed")
            raise
        coordinator.finish("over")

    def _replies(self, coordinator: Coordinator) -> tuple[dict[int, Tree], Tree]:
        """The replies to the present message, and of secure sums what only their sum is known
        of."""
        terms, ask, down = self.terms, self.down.question, wire.with_digest(self.down)
        if not terms.secure_sums:
            compare = partial(self.outliers.refused, wire.name(ask))
            return coordinator.ask(down, self.schema, self.opened, compare=compare), {}
        whole = self._schemas[wire.name(ask)]
        summed: tuple[dict[int, Tree], Tree] = _secure().summed(
            coordinator, down, whole, terms, self.opened, self.outliers
        )
        return summed

    def open(self, uploads: Mapping[int, Up]) -> dict[int, Tree]:
        """The checked replies of the clients that were asked, ascending, without outliers.

        Raises RefusedError that names a silo.
        """
        checked = {k: self.opened(uploads[k], k) for k in sorted(uploads)}
        replies = {k: reply for k, reply in checked.items() if reply is not None}
        job = "" if self.down.ask is None else wire.name(self.down.ask)
        for client, why in self.outliers.refused(job, [*replies]).items():
            LOG.warning("round %d, %s: %s", self._round, wire.silo(client), why)
            del replies[client]
        return replies

    def opened(self, upload: Up, client: int, samples: int | None = None) -> Tree | None:
        """The checked reply of one client; None if it was not asked. Raises RefusedError.

        `samples`: the number that it gave when it came.
        """
        packing = None if self.down.ask is None else self.terms.algorithm.packing(self.down.ask.job)
        reply = wire.opened(upload, client, self.down, self.schema, self._ranges, packing)
        if reply is not None:
            source, n = f"round {self._round}, {wire.silo(client)}", int(reply["n"])
            if n > (most := self.terms.limits[client]):
                raise RefusedError(
                    "samples",
                    f"{source}: upload counts n = {n} samples; train_args.max_samples allows "
                    f"{most}",
                )
            for known in {samples, self._samples.get(client)} - {None, n}:
                raise RefusedError(
                    "samples",
                    f"{source}: upload counts n = {n} samples; it was {known} before, and may not "
                    "change",
                )
            steps = int(self.terms.plan.steps(np.array(n))) if self.schema["steps"] else 0
            if reply["steps"] != steps:
                raise RefusedError(
                    "steps",
                    f"{source}: upload's 'steps' has {reply['steps']:g}; {n} samples make {steps}",
                )
            self._refuse_overflow(reply, source)
            whole = self._schemas[wire.name(self.down.question)]
            self.outliers.norms[client] = (
                _secure().said(whole, upload["leaves"])
                if self.terms.secure_sums
                else norms(flatten(reply))
            )
        return reply

    @torch.no_grad()
    def _refuse_overflow(self, reply: Tree, source: str) -> None:
        """Raises RefusedError if the model of a reply overflows: a deep network multiplies its
        weights."""
        if reply.get("deltas"):
            params = add(self.loop.state.params, reply["deltas"])
            task = self.loop.start.task
            size = largest(task.network, task.eval(params, reply["buffers"], self._sample))
            # Written so that NaN is refused too.
            if not size <= wire.MAX_MAGNITUDE**3:
                why = f"upload's model overflows on a test sample; {wire.REMEDY}"
                raise RefusedError("range", f"{source}: {why}")

    def without(self, late: Collection[int]) -> None:
        """Leaves these clients, which don't answer the present message, out for the rest of the
        round."""
        self.loop.missing.update(late)
        if missing := {*late, *self.outliers.left_out}:
            self.missing[self._round, self.loop.exchange] = frozenset(missing)

    def _go_back(self, coordinator: Coordinator, error: NonFiniteError | QuorumError) -> None:
        """Repeats a round without the silo that stands out in it: this round, if its model can't be
        used, or the one before, if most silos can't answer to its model. Raises the error if no
        silo stands out, or the others are too few."""
        asked, files, outliers = self.down.question, self._checkpoints, self.outliers
        if files is None:
            raise error
        by, path, done = outliers.ratios, files.path, self.loop.done
        if isinstance(error, QuorumError):
            by, path, done = outliers.last_ratios, files.previous, done - 1
            if 2 * len(coordinator.status()["failed"]) <= len(asked.to) or not path.exists():
                raise error
        suspect = outliers.suspect(by)
        if suspect is None or not self._may_leave_out(coordinator, suspect):
            raise error
        restored = files.read(self.loop.structure, path)
        if restored.round != done:
            raise error
        why = f"its answer was {by[suspect]:.3g} times the median silo's, and then: {error}"
        left_out = outliers.left_out | {suspect: why}
        self.loop.restore(restored)
        self._restore(self.loop.notes)
        outliers.left_out = left_out
        LOG.warning(
            "round %d is repeated, and the run goes on without %s: %s",
            *(done + 1, wire.silo(suspect), why),
        )
        self._begin_again()

    def _lose_round(self, coordinator: Coordinator, error: LostRoundError) -> None:
        """Goes on with the next round. This one has no new model, and no row. Raises the error if
        the round can't be lost."""
        loop, asks = self.loop, self.terms.algorithm.exchanges
        is_last = loop.done + 1 == self.terms.plan.rounds
        if not self._begun or (is_last and asks.finish) or not self._may_leave_out(coordinator):
            raise error
        LOG.warning("round %d is lost: %s", loop.done + 1, error)
        loop.done += 1
        self._exchange = asks.begin + loop.done * asks.round
        self._begin_again()

    def _may_leave_out(self, coordinator: Coordinator, *more: int) -> bool:
        """Whether a quorum is left without more silos for the rest of the run."""
        left = self.terms.silos - len({*self.outliers.left_out, *more})
        return 0 < coordinator.comm.quorum <= left

    def _begin_again(self) -> None:
        """Goes on with the round behind the last one that is over."""
        self._save()
        self._asks.close()
        self._asks = self._rounds()
        self.down = self._next(None)

    def feed(self, replies: Mapping[int, Tree], sums: Tree | None = None) -> Down:
        """Goes on with the replies of all clients that were asked, or of some. `sums`: parts that
        are added up already.

        Returns the next message.
        """
        if self.down.ask is None:
            return self.down
        if not replies:
            raise UserError(f"round {self._round}: no silo is left to average")
        clients = tuple(sorted(replies))
        reply = Reply(clients, **stack([replies[client] for client in clients]), **(sums or {}))
        self._counted |= dict.fromkeys(clients, self._exchange)
        self._samples |= {client: int(replies[client]["n"]) for client in clients}
        self.outliers.count(wire.name(self.down.ask), clients)
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
            answer = Silo.parts(self._probe.reply(ask, 0, self._round))
            self._schemas[wire.name(ask)] = whole = row(answer, 0)
            # A probe may diverge, and only its shapes count: zeros can always be packed.
            zeros = whole | {"deltas": zeros_like(whole["deltas"])}
            self._announced[wire.name(ask)] = (
                _secure().announced(whole, self.terms.silos)
                if self.terms.secure_sums
                else wire.packed(zeros, self.terms.algorithm.packing(ask.job))
            )
        sent = None if ask is None else wire.mapped(wire.compact, ask)
        fingerprint, counted = self.terms.fingerprint, dict(self._counted)
        return Down(self._exchange, self._round, sent, fingerprint, counted)

    def _rounds(self) -> Generator[Ask, Reply, None]:
        loop = self.loop
        if not self._begun:
            yield from loop.begin()
            self._begun = True
            self._save()
        while not loop.over:
            self._round, self.outliers.ratios = loop.done + 1, {}
            yield from loop.round()  # its `seconds` include the wait for the silos

    def _round_ended(self, _: object) -> None:
        self.outliers.last_ratios = self.outliers.ratios
        self._note()
        if self._checkpoints is not None:
            self._checkpoints.keep()

    def _note(self) -> None:
        """Hands the loop the part of a checkpoint that it does not have, as JSON."""
        self.loop.notes = {
            "begun": self._begun,
            "exchange": self._exchange,
            "counted": list(self._counted.items()),
            "samples": list(self._samples.items()),
            "missing": [[*at, sorted(late)] for at, late in self.missing.items()],
            "outliers": self.outliers.state(),
        }

    def _save(self) -> None:
        if self._checkpoints is not None:
            self._note()
            self._checkpoints.write(self.loop.checkpoint())

    def _restore(self, notes: dict[str, Any]) -> None:
        self._begun, self._exchange = notes["begun"], notes["exchange"]
        self._counted, self._samples = dict(notes["counted"]), dict(notes["samples"])
        self.missing = {(t, exchange): frozenset(late) for t, exchange, late in notes["missing"]}
        self.outliers.restore(notes["outliers"])
        self._round = self.loop.done
