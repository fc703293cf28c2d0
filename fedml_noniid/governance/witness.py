"""Notes every message of a process in its audit log, and on a silo refuses what was not signed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from cryptography import x509

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.sums import compiled_sha256
from fedml_noniid.credentials import certificates
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.exit_codes import BrokenError
from fedml_noniid.deploy.wire import Down, RefusedError, Up
from fedml_noniid.governance.audit import ADDS, ANSWERS, ARRIVED, FILE, SENT, Log, seal_of
from fedml_noniid.governance.policy import Participant
from fedml_noniid.governance.replay import Kept
from fedml_noniid.governance.secure.silo import CHECK, SUM

if TYPE_CHECKING:
    from fedml_noniid.deploy.host import HostTrainer

APART = {"seal", "certificate"}  # keys of a head that are not repeated in a line


class Witness:
    """A `wire.Witness`: exchanges seals with the other side, and notes what leaves and arrives."""

    def __init__(self, log: Log, kit: Kit) -> None:
        self.log, self._kit, self._sealed = log, kit, (-1, log.seal())
        self._ca = x509.load_pem_x509_certificate(kit.ca)
        self._certificates: dict[str, str] = {}  # by name
        # Of a server: hears that the log can't be written. Messages without tensors still pass, so
        # that silos hear the end of the run.
        self.failed: Callable[[UserError], object] | None = None

    @staticmethod
    def from_process(process: Participant) -> Witness:
        """That of a process. Raises UserError."""
        agreed, signed = process.agreed, process.agreed.signed
        kit = Kit.read(agreed.deployment.kit(process.rank), process.rank)
        facts = {"study": signed.study.name, "sha256": signed.sha256, "owner": signed.owner}
        # Machines compile one source differently, so the study has the source's hash alone.
        facts |= {"policy": agreed.policy_sha256, "compiled": compiled_sha256()}
        log = Log(process.folder / FILE.format(process.rank), kit, **facts)
        return Witness(log, kit)

    def __call__(self, peer: str, left: bool, message: wire.Message[Any]) -> wire.Head:
        """Notes a message before it leaves, or once it has arrived; returns its head, sealed if it
        leaves. Raises RefusedError if the other side's seal is not one of its own, BrokenError if
        the log can't be written."""
        head: Any = message.head
        kind = type(head).__name__
        facts = {"peer": peer, "message": kind, "head": head.model_dump(exclude=APART)}
        if message.table:
            facts |= {"exchange": head.exchange, "sha256": message.sha256}
        if left:
            with self._writing(bool(message.table)):
                self.log.write(SENT, **facts)
                self._seal(head)
            return self._sealed_head(head)
        seal, certificate = seal_of(head.seal), head.certificate
        if certificate:
            issued = certificates.issued(certificate.encode(), self._ca)
            if issued is None or certificates.common_name(issued) != peer:
                raise RefusedError("seal", f"{kind}: has a certificate that is not of {peer}")
            self._certificates[peer] = certificate
        if seal is None or not seal.signed_by(self._certificates.get(peer, "")):
            raise RefusedError("seal", f"{kind}: has no seal that {peer} has signed")
        with self._writing(bool(message.table)):
            self.log.write(ARRIVED, **facts, seal=seal)
        return wire.unwitnessed(peer, left, message)

    def refused(self, who: str, refusal: RefusedError) -> None:
        """Notes a call or a message that was not taken."""
        with self._writing(False):
            self.log.write("refused", who=who, name=refusal.name, why=str(refusal))

    @contextmanager
    def _writing(self, has_tensors: bool) -> Iterator[None]:
        """Hands over an error of the log; BrokenError on a silo, and for a message with tensors."""
        try:
            yield
        except UserError as error:
            if self.failed is not None:
                self.failed(error)
            if self.failed is None or has_tensors:
                raise BrokenError.from_mistakes(error.mistakes) from None

    def _seal(self, head: wire.Head) -> None:
        """Makes the seal of a head. A server syncs its log once per exchange: its messages to the
        other silos have the same seal."""
        exchange = head.exchange if isinstance(head, wire.Task) else -1
        if exchange < 0 or exchange != self._sealed[0]:
            self._sealed = exchange, self.log.seal()

    def _sealed_head(self, head: wire.Head) -> wire.Head:
        """A head with this log's seal."""
        certificate = self._kit.certificate.decode()
        introduces = isinstance(head, wire.Hello | wire.Welcome)
        own = {"seal": tuple(self._sealed[1]), "certificate": certificate if introduces else ""}
        return head.model_copy(update=own)


class Guard:
    """Decides, before a byte of a task's tensors is read, whether a silo takes it."""

    def __init__(self, process: Participant, log: Log) -> None:
        """`log`: how often each exchange was answered stands there, also by earlier processes."""
        self._agreed, self._policy = process.agreed, process.agreed.policy
        self._kept, self._log, self._rounds = Kept(process, log), log, log.rounds
        self._answers = log.answers.copy()
        self._round = 0  # the last one of this run in which the silo was asked
        self._last = self._agreed.signed.study.last_round(process.rank - 1)

    def admit(self, task: wire.Task, table: wire.Table) -> None:
        """Raises RefusedError if the study or the policy does not allow the task."""
        if task.kind == "over":
            if self._round < self._last:
                raise RefusedError(
                    "study",
                    f"says that the run is over; this silo was asked up to round {self._round}; by "
                    f"the study's seed, its last one is round {self._last}",
                )
            return
        exchange, study, today = task.exchange, self._agreed.signed, datetime.date.today()
        study.check_date(today)
        if (last := self._policy.expires) is not None and today > last:
            self._refuse(f"expires = {last}; today is {today}")
        # A job with a dot is no job without its owner.
        job = f"{task.owner}.{task.job}" if task.owner or "." in task.job else task.job
        study.study.refuse_message(exchange, task.round, job, table)
        if not wire.NOT_COUNTED <= task.counted < exchange:
            why = f"exchange {exchange}: counts an answer to exchange {task.counted}"
            raise RefusedError("study", why)
        times = self._answers[ADDS if job == SUM else ANSWERS, exchange]
        # What a silo has added it shows once.
        if job != CHECK and times >= (most := self._policy.max_answers):
            what = "added to sums" if job == SUM else "answered"
            self._refuse(f"max_answers = {most}: exchange {exchange} was {what} {times} times")
        self._round = max(self._round, task.round)

    def _refuse(self, why: str) -> NoReturn:
        """Raises RefusedError for a rule of the policy. The server does not hear its path."""
        named = self._agreed.deployment.comm_args.policy
        raise RefusedError("policy", why).below(source=named)

    def answering(self, trainer: HostTrainer, run: str) -> Callable[[Down], Up]:
        """The answers of a trainer in a run, each noted before it is computed."""
        self._round = self._rounds.get(run, 0)

        def answered(down: Down) -> Up:
            assert trainer.silo is not None, "the run has begun"
            down = down._replace(terms=trainer.terms.fingerprint)
            self._answers[ANSWERS, down.exchange] += 1
            self._kept.keep(trainer.silo, down)
            answer = trainer.answered(down)
            study = self._agreed.signed.study
            study.refuse_answer(wire.name(down.question), answer["leaves"])
            if trainer.terms.secure_sums:  # it leaves in a sum alone
                self._kept.hidden(answer)
            return answer

        return answered

    def adding(self, inner: Callable[[Down], Up]) -> Callable[[Down], Up]:
        """The answers of a SecureSilo, each part of a sum noted before it is computed."""

        def answered(down: Down) -> Up:
            if wire.name(down.question) == SUM:
                self._answers[ADDS, down.exchange] += 1
                self._log.write(ADDS, exchange=down.exchange)
            return inner(down)

        return answered
