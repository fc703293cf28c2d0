"""The server's half of secure sums: it asks for counts and keys, names a set of silos, and adds up
what they send, masked."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, count

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree, row
from fedml_noniid.credentials import certificates
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.coordinator import Check, Coordinator
from fedml_noniid.deploy.exit_codes import LostRoundError, QuorumError
from fedml_noniid.deploy.outliers import Norms, Outliers, part
from fedml_noniid.deploy.settings import Terms
from fedml_noniid.deploy.wire import Down, RefusedError, Up
from fedml_noniid.engines.packing import flatten, stack
from fedml_noniid.engines.streaming import Weighing
from fedml_noniid.governance.secure import liars, masks, vectors
from fedml_noniid.governance.secure.silo import (
    ANNOUNCED,
    CHECK,
    COUNTS,
    SUM,
    admits,
    certified,
    question_of,
)

LOG = logging.getLogger(__name__)
# A silo that can't add its part so often is out of the exchange. One that was started again can't
# add it once: it has no key yet.
MAX_FAILURES = 2
PIECE = 1 << 16  # numbers that the caches hold as float64
STEPS = 3  # of an attempt: counts, the sum, and what silos show if it is too long
Earlier = Mapping[int, Sequence[frozenset[int]]]  # by silo: to which sets it has added its answer


def announced(schema: Tree, silos: int) -> Tree:
    """The structure of what one of so many silos sends first, in place of a reply of this
    structure. `sets`: 1 for each silo of the first set to which it has added this answer, 2 for
    those that are in the second one, too. `norms`: of the parts of the answer."""
    keys = {key: torch.zeros(size, dtype=torch.uint8) for key, size in ANNOUNCED.items()}
    keys["levels"] = torch.zeros(len(vectors.added(flatten(schema))), dtype=torch.uint8)
    keys["sets"] = torch.zeros(silos, dtype=torch.uint8)
    keys["norms"] = torch.zeros(len(_names(schema)), dtype=torch.float64)
    return {key: schema[key] for key in COUNTS} | {"secure": keys}


def warn_of_quorum(quorum: int, terms: Terms) -> None:
    """Warns of a `comm_args.quorum` that no silo can be lost with while a sum is made."""
    silos, least = terms.plan.cohort, terms.secure_sums
    if quorum and max(min(quorum, silos), silos // 2 + 1) > silos - least:
        LOG.warning(
            "comm_args.quorum = %d, train_args.secure_sums = %d: if one of %d silos is lost while "
            "a sum is made, the next sum has %d silos at most; it needs the quorum, and more than "
            "half of the silos, so the run would end",
            *(quorum, least, silos, silos - least),
        )


def said(schema: Tree, leaves: Params) -> dict[str, float]:
    """By part: the norm that a silo says its answer has; `leaves`: what it has sent first."""
    return dict(zip(_names(schema), leaves["secure/norms"].tolist(), strict=True))


def summed(
    coordinator: Coordinator,
    down: Down,
    schema: Tree,
    terms: Terms,
    check: Check,
    outliers: Outliers,
) -> tuple[dict[int, Tree], Tree]:
    """The counts of the silos whose answers to `down` were added up, and the sums, as parts of a
    Reply.

    If a silo is lost while a sum is made, the exchange begins again: with the same set, or with
    `secure_sums` silos less, and without silos that fail again. So it does after a restart of the
    server, since the silos say to which sets they have added. Raises QuorumError if neither can be,
    LostRoundError if that is since a silo has lied.

    `schema`: the structure of a reply. `check` takes the counts, and notes the norms in `outliers`,
    which hears who is left out.
    """
    by, structure = (
        Weighing.from_recipe(terms.algorithm, down.question.job),
        announced(schema, terms.silos),
    )
    question_once = cache(partial(question_of, down))  # while the silos train
    checked = partial(_announced, coordinator, down, question_once, check)
    compare = partial(outliers.refused, wire.name(down.question))
    answers = min(coordinator.comm.quorum or terms.silos, len(down.question.to))
    quorum = max(answers, terms.secure_sums)
    left, wanted = down.question.to, quorum  # who may be in a set, and how many have to answer
    failures, why = Counter[int](), ""
    for attempt in count():
        question = _to(down, left)._replace(step=STEPS * attempt)
        counts = coordinator.ask(question, structure, checked, wanted, compare)
        earlier = {k: _sets(row["secure"].pop("sets")) for k, row in counts.items()}
        clients = largest(earlier, terms.secure_sums)
        if len(clients) < quorum:
            begun = {tuple(sorted(silos)) for sets in earlier.values() for silos in sets}
            few = (
                f"round {down.round}: {len(clients)} silos may be in one sum, and the quorum is "
                f"{quorum}: a sum over the silos {', '.join(map(str, sorted(begun)))} was begun, "
                f"without {_named(sorted({*chain(*begun)}), counts) or 'the others'}"
            )
            # The set that lacks the fewest silos, if these may still come.
            lacks = {silos: len({*silos} - {*counts}) for silos in begun if {*silos} <= {*left}}
            back = [(n, silos) for silos, n in lacks.items() if n and len(silos) >= quorum]
            if not back:
                has_lied = any({*silos} & {*outliers.left_out} for silos in begun)
                kind = LostRoundError if has_lied else QuorumError
                raise kind(f"{few}{why}; start the server again to go on")
            left = min(back)[1]
            wanted = len(left)
            LOG.warning("%s; waiting for the silos %s", few, [*left])
            continue
        counts = {client: counts[client] for client in clients}
        whole = stack([counts[client] for client in clients])
        there = vectors.together(whole["secure"].pop("levels"))
        del whole["secure"]["norms"]
        adding = _Adding(schema, there, by, whole["n"], {k: outliers.norms[k] for k in clients})
        added = coordinator.ask(
            _request(question, clients, whole, there), {SUM: adding.total}, adding.check, 1
        )
        if len(added) == len(clients):
            if not (lied := adding.liars(coordinator, question, clients)):
                kept = {k: {key: row[key] for key in COUNTS} for k, row in counts.items()}
                return kept, adding.sums()
            outliers.left_out |= lied
            for client, said_why in lied.items():
                refusal = RefusedError("outlier", f"round {down.round}: {said_why}")
                coordinator.refuse(certificates.name(client + 1), refusal)
            left, wanted = tuple(k for k in clients if k not in lied), quorum
            continue
        LOG.warning(
            "round %d: %s sent no part of the sum; the exchange begins again",
            down.round,
            _named(clients, added),
        )
        failed = coordinator.status()["failed"]
        failures.update(map(int, failed))
        left, wanted = tuple(k for k in clients if failures[k] < MAX_FAILURES), quorum
        why = "".join(f"; {reason}" for reason in failed.values())
    raise AssertionError("counts without end")


def _sets(of_each: Tensor) -> list[frozenset[int]]:
    """The sets that a silo says it has added its answer to."""
    sets = [frozenset((of_each >= at).nonzero().flatten().tolist()) for at in (1, 2)]
    return [silos for silos in sets if silos]


def largest(earlier: Earlier, least: int) -> tuple[int, ...]:
    """The largest set of these silos that finds no refusal: of all of them, of an earlier set, or
    of `least` silos less."""
    there, best = frozenset(earlier), frozenset[int]()
    known = dict.fromkeys(silos for sets in earlier.values() for silos in sets)
    fewer = [frozenset(sorted(silos & there)[: max(len(silos) - least, 0)]) for silos in known]
    for silos in (there, *known, *fewer):
        now, before = silos & there, frozenset[int]()
        while now != before:  # a silo that says it has been in other sets costs only itself
            now, before = frozenset(k for k in now if admits(earlier[k], now, least)), now
        best = max(best, now, key=len)
    return tuple(sorted(best))


def _announced(
    coordinator: Coordinator,
    down: Down,
    question: Callable[[], str],
    check: Check,
    up: Up,
    client: int,
    samples: int | None,
) -> Tree | None:
    """Checks what a silo sends first: also its key, which the other silos would refuse. Then they
    would be the ones that send no part of a sum. Raises RefusedError."""
    reply = check(up, client, samples)
    if reply is not None:
        key, signed, certificate = (reply["secure"][name].numpy().tobytes() for name in ANNOUNCED)
        exchange = masks.Exchange(coordinator.run, coordinator.study, down.exchange)
        announcement = masks.Announcement(exchange, question(), client, int(reply["n"]), key)
        try:
            public = certified(coordinator.ca, client, certificate)
            masks.check_signature(public, announcement, signed)
            masks.shared(X25519PrivateKey.generate(), client, key)
        except UserError as error:
            raise RefusedError("key", f"round {down.round}: {error}") from None
    return reply


class _Adding:
    """Adds up the silos' masked vectors as they come."""

    def __init__(
        self, schema: Tree, there: Tensor, by: Weighing, n: Tensor, said: Mapping[int, Norms]
    ) -> None:
        """`there`: the levels. `n` [M]: the silos' samples. `said`: by silo, the norms of the parts
        of its answer."""
        leaves = flatten(schema)
        self._schema, self._there, self._by, self._n, self._said = schema, there, by, n, said
        self._parts = vectors.parts(leaves, there)
        length = sum(size for _, size in self._parts)
        self.total = torch.zeros(length, dtype=torch.int64)
        self._digests: dict[int, str] = {}  # by silo that has added

    def check(self, up: Up, client: int, _: int | None) -> Tree:
        """Adds an upload; a silo that sends it again adds nothing. Raises RefusedError."""
        leaves: Mapping[str, Tensor] = up["leaves"]
        wire.fit(leaves, {SUM: self.total}, wire.silo(client))
        if client not in self._digests:
            self._digests[client] = up.get("sha256") or wire.digest({SUM: leaves[SUM]})
            self.total += leaves[SUM]  # modulo 2^64
        return {}

    def sums(self) -> Tree:
        """The parts of a Reply."""
        return vectors.sums(self.total, self._schema, self._by, self._there, self._n)

    def liars(
        self, coordinator: Coordinator, question: Down, clients: tuple[int, ...]
    ) -> dict[int, str]:
        """By silo: why it is left out, if the sum is far longer than the silos said."""
        if not self._is_too_long(clients):
            return {}
        LOG.warning(
            "round %d: the sum is longer than the silos said; they show what they have added",
            question.round,
        )
        nonce = secrets.token_bytes(32)
        shared = {"nonce": torch.frombuffer(bytearray(nonce), dtype=torch.uint8)}
        answers = coordinator.ask(
            _next_step(question, question.step + 2, Ask(CHECK, clients, shared=shared)),
            {CHECK: self._sums_of(clients), SUM: self.total},
            partial(self._shown, clients, nonce),
            1,
        )
        shown = {client: answer[CHECK] for client, answer in answers.items()}
        if disputed := liars.disputed(clients, shown):
            return dict.fromkeys(disputed, "other silos have another mask in common with it")
        lied = [
            client
            for client, answer in answers.items()
            if liars.has_lied(
                liars.own(answer[SUM], answer[CHECK], clients.index(client)),
                self._in_integers(client, clients.index(client)),
            )
        ]
        if lied:
            return dict.fromkeys(lied, "it has added far larger numbers than it said")
        silent = [client for client in clients if client not in shown]
        return dict.fromkeys(silent, "it has not shown what it has added")

    def _is_too_long(self, clients: tuple[int, ...]) -> bool:
        """Whether the sum of a part is longer than its silos said. The lengths at the levels are
        added: an upper bound."""
        n, sizes = self._n.double().sum().item(), [size for _, size in self._parts]
        squares, lengths = defaultdict[vectors.Part, float](float), defaultdict[str, float](float)
        for (segment, _), numbers in zip(self._parts, torch.split(self.total, sizes), strict=True):
            for piece in torch.split(numbers, PIECE) if segment.whole else ():
                values = piece.double()
                squares[segment] += torch.dot(values, values).item()
        for segment, square in squares.items():
            unit = vectors.unit(self._by, segment.name, segment.level, 1.0, n, len(self._n))
            lengths[segment.name] += math.sqrt(square) / unit
        for name, length in lengths.items():
            omegas = self._by.omega(name, self._n).tolist()
            said = [self._said[client][name] for client in clients]
            if length > liars.TOO_LONG * sum(map(operator.mul, omegas, said)):
                return True
        return False

    def _sums_of(self, clients: tuple[int, ...]) -> Tensor:
        """The structure of the signed sums over a silo's streams."""
        return torch.zeros(
            len(clients), len({part for part, _ in self._parts}), liars.SUMS, dtype=torch.int64
        )

    def _shown(
        self, clients: tuple[int, ...], nonce: bytes, up: Up, client: int, _: int | None
    ) -> Tree:
        """Signed sums, over a silo's masked numbers and over its streams. Raises RefusedError."""
        leaves: Tree = up["leaves"]
        wire.fit(leaves, {CHECK: self._sums_of(clients), SUM: self.total}, wire.silo(client))
        if wire.digest({SUM: leaves[SUM]}) != self._digests[client]:
            raise RefusedError(
                "outlier", f"{wire.silo(client)}: it shows other numbers than it has added"
            )
        return {CHECK: leaves[CHECK], SUM: liars.signed_sums(leaves[SUM], self._parts, nonce)}

    def _in_integers(self, client: int, position: int) -> list[float]:
        """The norm of each part of a silo's vector, as it said."""
        n, total = self._n[position].item(), self._n.double().sum().item()
        return [
            self._said[client][part.name]
            * vectors.unit(self._by, part.name, part.level, n, total, len(self._n))
            if part.whole
            else math.inf
            for part in dict.fromkeys(part for part, _ in self._parts)
        ]


def _names(schema: Tree) -> list[str]:
    """The parts of an answer."""
    return [*dict.fromkeys(map(part, vectors.added(flatten(schema))))]


def _request(question: Down, clients: tuple[int, ...], whole: Tree, there: Tensor) -> Down:
    """The sum over a set; `whole`: what its silos have sent, stacked; `there`: their levels."""
    shared = whole["secure"] | {
        "levels": there.byte(),
        "clients": torch.tensor(clients),
        "n": whole["n"],
    }
    return _next_step(question, question.step + 1, Ask(SUM, clients, shared=shared))


def _next_step(question: Down, step: int, ask: Ask) -> Down:
    """A further message of the exchange, with tensors of its own."""
    return question._replace(step=step, ask=ask, sha256="")


def _to(down: Down, clients: tuple[int, ...]) -> Down:
    """The message to some of its silos."""
    ask = down.question
    rows = torch.tensor([ask.to.index(client) for client in clients], dtype=torch.int64)
    return down._replace(ask=ask._replace(to=clients, each=row(ask.each, rows)))


def _named(silos: Iterable[int], without: Collection[int]) -> str:
    return ", ".join(wire.silo(k) for k in silos if k not in without)
