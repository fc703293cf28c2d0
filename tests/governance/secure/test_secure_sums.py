"""A deployment whose server sees sums alone ends with the bits of the simulation."""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedml_noniid.contract import silos
from fedml_noniid.contract.federation import takes_norms
from fedml_noniid.core.component import Ask, Replies, Setting
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree, tree_map
from fedml_noniid.credentials import authority, certificates
from fedml_noniid.data import shards
from fedml_noniid.data.shards import Parts, Shard
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.coordinator import Check, Compare, Coordinator
from fedml_noniid.deploy.exit_codes import QuorumError
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.deploy.silo_client import SiloClient
from fedml_noniid.deploy.silo_server import SiloServer
from fedml_noniid.engines.packing import flatten
from fedml_noniid.governance import study
from fedml_noniid.governance.secure import masks, vectors
from fedml_noniid.governance.secure.server import largest, warn_of_quorum
from fedml_noniid.governance.secure.silo import SUM, SecureSilo, Sets, admits, question_of
from fedml_noniid.plugins import registry
from fedml_noniid.processes import loopback
from tests.deploy import world
from tests.deploy.federation_server import LONG, address
from tests.recipe_table import DEPLOYED_ALONE
from tests.walks import thinned

QUORUM_OF_3 = {"quorum": 3, "gone_s": 0.2}


def parts(n: int) -> Parts:
    """Three to seven samples of each silo."""
    whole = world.parts()
    sizes = [3 + k % 5 for k in range(n)]
    edges = np.cumsum((0, *sizes))
    clients = [np.arange(a, b) for a, b in pairwise(edges)]
    train = Samples(whole.train.x[: edges[-1]], whole.train.y[: edges[-1]])
    return replace(whole, train=train, clients=clients, tests=None)


def deployment(recipe: str, n: int, least: int, **train: object) -> settings.Deployment:
    more = {"client_num_in_total": n, "client_num_per_round": n, "secure_sums": least}
    return world.deployment(recipe, **more | train)


# (client, message) -> None, or whether the process that is lost now is started again
Lose = Callable[[int, wire.Down], bool | None]
Change = Callable[[int, Params], Params]  # what a silo sends in place of its answer


class LostError(Exception):
    """A silo's process ends; `again`: and is started again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again


class Running:
    """A server and silos, each in a thread, as `noniid deploy` runs them without FedML; with or
    without secure sums."""

    def __init__(
        self, terms: settings.Deployment, data: Parts, kits: Path, folder: Path, lose: Lose
    ) -> None:
        self.deployment, self.kits, self.folder, self.lose = terms, kits, folder, lose
        self.comm = terms.comm_args.model_copy(update={"server": address()})
        self.shards: list[Shard] = list(shards.split(data))
        train = terms.train_args
        network = world.network(takes_norms(train.recipe, train.settings))
        self.terms = settings.terms(terms, train.recipe, network, data.public)
        self.server_run = ServerRun(self.terms, self.shards[0])
        self.seen: list[dict[str, torch.Tensor]] = []  # what left the silos
        self.asked: list[wire.Down] = []
        self.errors: dict[int, UserError] = {}
        self.changed: Change = lambda client, leaves: leaves

    def run(self) -> str:
        """SHA-256 of the final weights. Raises UserError."""
        terms = self.terms
        coordinator = Coordinator(self.comm, terms.silos, "study", "this run")
        threads = [
            threading.Thread(target=self._silo, args=(k,), daemon=True) for k in range(terms.silos)
        ]
        with SiloServer(self.comm, self.kits / "0", coordinator):
            for thread in threads:
                thread.start()
            self.server_run.serve(coordinator)
            for thread in threads:
                thread.join(LONG)
        return world.digest(self.server_run.loop.outcome)

    def _silo(self, client: int) -> None:
        while True:
            try:
                self._process(client)
                return
            except LostError as lost:
                if not lost.again:
                    return
            except UserError as error:
                self.errors[client] = error
                return

    def _process(self, client: int) -> None:
        shard, kit = self.shards[client + 1], self.kits / str(client + 1)
        shared = round(self.terms.algorithm.needs.shared * shard.n_public)
        hello = wire.Hello(
            session=f"{client}-{len(self.asked)}",
            study="study",
            samples=len(shard.parts["train"].y) + shared,
        )
        with SiloClient(self.comm, kit, client, hello) as calls:
            memory = self.folder / f"silo-{client}.safetensors"
            silo = Silo(self.terms, client, shard, RunFile(memory, calls.run))

            def own(down: wire.Down) -> wire.Up:
                asked = down._replace(terms=self.terms.fingerprint)
                return wire.up(client, down.exchange, silo.answer(asked))

            of, sets = (calls.run, "study"), memory.with_suffix(".sums")
            secure = SecureSilo(own, self.terms, client + 1, kit, of, sets)
            inner = secure.answered if self.terms.secure_sums else own

            def answered(down: wire.Down) -> wire.Up:
                self.asked.append(down)
                if (again := self.lose(client, down)) is not None:
                    raise LostError(again)
                found = inner(down)
                found["leaves"] = self.changed(client, found["leaves"])
                self.seen.append(found["leaves"])
                return found

            calls.serve(answered)


def nobody(client: int, down: wire.Down) -> None:
    """Loses nobody."""


class Once:
    """Loses silos at a place of the run, once each."""

    def __init__(self, clients: Collection[int], exchange: int, step: int, again: bool) -> None:
        self.left, self.at, self.again = {*clients}, (exchange, step), again

    def __call__(self, client: int, down: wire.Down) -> bool | None:
        if down.at != self.at or client not in self.left:
            return None
        self.left.remove(client)
        return self.again


@pytest.mark.parametrize(
    ("recipe", "n"),
    [("fedavg", 4), ("scaffold", 4), ("fedavg", 12), ("sgdm", 12), ("fedavg", 20), ("fed3r", 4)],
)
def test_masked_plain_and_simulated_weights_are_the_same(
    recipe: str, n: int, kits: Path, tmp_path: Path
) -> None:
    """And nothing that leaves a silo is its update."""
    data = parts(n)
    terms = deployment(recipe, n, 3)
    running = Running(terms, data, kits, tmp_path, nobody)
    assert running.run() == loopback.simulate(terms, data)
    vectors = [leaves[SUM] for leaves in running.seen if SUM in leaves]
    assert len(vectors) == n * running.server_run.down.exchange
    for sent in running.seen:
        assert {*sent} in ({SUM}, {"n", "steps", "loss", *SAID, *KEYS})
    for vector in vectors:  # of 64 random bits, none is small
        assert len(vector) < 50 or (vector.abs() < 2**50).double().mean() < 0.1


class KilledError(Exception):
    """The server ends."""


class Direct:
    """A coordinator whose silos answer at once."""

    run, study = "this run", "study"

    def __init__(self, silos: Sequence[SecureSilo], quorum: int = 0) -> None:
        self.silos, self.ca = silos, x509.load_pem_x509_certificate(silos[0]._kit.ca)
        self.comm = settings.CommArgs(quorum=quorum)
        self.masked_bytes, self.away = 0, frozenset[int]()
        self.rows = set[str]()  # tensors that differ from silo to silo
        self.parts: float = math.inf  # of sums; then the server is killed
        self.asked: list[tuple[tuple[int, ...], int]] = []  # who, and how many had to answer
        self.failed: dict[int, str] = {}
        self.before: Callable[[wire.Down], None] = lambda down: None

    def ask(
        self,
        down: wire.Down,
        schema: Tree,
        check: Check,
        quorum: int,
        compare: Compare = lambda _: {},
    ) -> dict[int, Tree]:
        self.before(down)
        assert down.sha256 in ("", wire.digest(wire.tensors(down)))
        found: dict[int, Tree] = {}
        self.failed = {}
        self.asked.append((down.ask.to, quorum))
        self.rows |= {*flatten(down.ask.each)}
        there = [k for k in down.ask.to if k not in self.away]
        if len(there) < quorum:
            raise QuorumError("too few")
        for k in there:
            if down.ask.job == SUM:
                self.parts -= 1
                if self.parts < 0:
                    raise KilledError
            try:
                up = self.silos[k].answered(wire.row_of(down, k))
                wire.fit(up["leaves"], schema, wire.silo(k))
                found[k] = check(up, k, None)
            except UserError as error:
                self.failed[k] = str(error)
            else:
                self.masked_bytes += up["leaves"][SUM].nbytes if SUM in up["leaves"] else 0
        if len(found) < quorum:
            raise QuorumError(str(self.failed))
        assert compare(found) == {}, "nobody lies"
        return found

    def status(self) -> Mapping[str, Mapping[int, str]]:
        """As of the last message."""
        return {"failed": self.failed}

    def gather(self, resumed: bool) -> None:
        """All are there."""

    def finish(self, kind: str, why: str = "") -> None:
        """They hear it."""


def secure_silos(terms: settings.Terms, data: Parts, kits: Path, folder: Path) -> list[SecureSilo]:
    def made(client: int, silo: Silo) -> SecureSilo:
        def own(down: wire.Down) -> wire.Up:
            return wire.up(client, down.exchange, silo.answer(down))

        rank, of = client + 1, ("this run", "study")
        return SecureSilo(own, terms, rank, kits / str(rank), of, folder / f"{client}.sums")

    return [made(k, silo) for k, silo in enumerate(world.silos_of(terms, data))]


def agreed(recipe: str, methods: Mapping[str, object], data: Parts) -> settings.Terms:
    made = silos.deployment(recipe, methods, secure_sums=2)
    network = world.network(takes_norms(recipe, methods))
    return settings.terms(made, recipe, network, data.public)


@pytest.mark.parametrize("entry", thinned(DEPLOYED_ALONE, 2))
def test_every_recipe_has_the_simulations_bits_or_is_refused(
    entry: str, kits: Path, tmp_path: Path
) -> None:
    (recipe, methods), data = DEPLOYED_ALONE[entry], world.parts()
    algorithm = registry.build(recipe, methods, Setting(3, 3, n_public=len(data.public.y)))
    tests_models = algorithm.needs.personal or algorithm.own_models
    if algorithm.needs.replies > Replies.SUMS or tests_models or algorithm.packing("train"):
        with pytest.raises(UserError, match=r"run with train_args.secure_sums: .* allowed: 0"):
            agreed(recipe, methods, data)
        return
    terms = agreed(recipe, methods, data)
    server = ServerRun(terms, world.shards_of(data)[0])
    direct = Direct(secure_silos(terms, data, kits, tmp_path))
    server.serve(direct)
    assert direct.masked_bytes == sum(row["bytes_up"] for row in server.loop.rows)
    # Silos of a sum can't compare them: see docs/threats.md.
    assert direct.rows == ({"feddyn_authors/alpha"} if entry == "feddyn_authors" else set())
    assert world.digest(server.loop.outcome) == world.digest(world.simulated(recipe, methods, True))


# A server that lies
# --------------------------------------------------------------------------------------------------


class Sum(NamedTuple):
    """Three silos that have answered, and the sum over all of them."""

    silos: list[SecureSilo]
    down: wire.Down

    @staticmethod
    def from_questions(silos: list[SecureSilo], questions: Sequence[wire.Down]) -> Sum:
        """A question to each, and the request that an honest server makes of their answers."""
        first = [
            silo.answered(wire.row_of(down, k))["leaves"]
            for k, (silo, down) in enumerate(zip(silos, questions, strict=True))
        ]
        shared = {
            key.removeprefix("secure/"): torch.stack([one[key] for one in first])
            for key in ("n", *KEYS)
        }
        levels = vectors.together(torch.stack([one["secure/levels"] for one in first])).byte()
        shared |= {"clients": torch.arange(3), "levels": levels}
        ask = Ask(SUM, (0, 1, 2), shared=shared)
        return Sum(silos, questions[0]._replace(step=1, ask=ask))

    def asked(self, client: int, **changed: object) -> dict[str, torch.Tensor]:
        """What a silo sends; `changed`: of what it is asked."""
        shared = self.down.ask.shared | changed
        ask = self.down.ask._replace(to=(client,), shared=shared)
        return self.silos[client].answered(self.down._replace(ask=ask))["leaves"]


@pytest.fixture
def sum_of_three(kits: Path, tmp_path: Path) -> Sum:
    data = world.parts()
    terms = agreed("fedavg", {}, data)
    down = ServerRun(terms, world.shards_of(data)[0]).down
    return Sum.from_questions(secure_silos(terms, data, kits, tmp_path), [down] * 3)


def part(of: Tree, clients: slice) -> Tree:
    """The sum over some of the three."""
    return {key: of[key][clients] for key in ("clients", "n", "key", "signature", "certificate")}


def with_n(of: Tree, client: int, n: int) -> Tree:
    """Another number of samples of one silo."""
    return {"n": torch.where(torch.arange(3) == client, n, of["n"])}


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """The rows of silos 1 and 2 exchanged."""
    return rows[[0, 2, 1]]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda of: {"clients": torch.tensor([0, 2, 1])}, "sum over the silos"),
        (lambda of: {"clients": torch.tensor([0, 0, 1])}, "sum over the silos"),
        (lambda of: {"clients": torch.tensor([0, 1, 7])}, "sum over the silos"),
        (lambda of: part(of, slice(1)), "allowed: 2 or more"),
        (lambda of: part(of, slice(1, 3)), "without this silo"),
        (lambda of: {"key": swapped(of["key"])}, r"silo 1 \(rank 2\) has not signed this key"),
        (lambda of: {"signature": of["signature"] * 0}, "has not signed this key"),
        (lambda of: {"certificate": swapped(of["certificate"])}, "no valid certificate"),
        (lambda of: {"certificate": of["certificate"] * 0}, "no valid certificate"),
        (lambda of: {"key": of["key"] + torch.tensor([[1], [0], [0]]).byte()}, "another key or n"),
        (lambda of: {"levels": of["levels"] * 0}, "their level is missing"),
        (lambda of: {"levels": of["levels"][1:]}, "levels"),
        (lambda of: {"clients": torch.tensor(3)}, "key"),
        (lambda of: {"key": of["key"][:, 1:]}, "key"),
        (lambda of: {"key": {"a": of["key"]}}, "key"),
        (lambda of: {"total": torch.tensor(120.0).double()}, "total"),
        (lambda of: {"more": torch.tensor(120)}, "more"),
        (lambda of: {"n": of["n"].double()}, "n"),
        (lambda of: {"n": of["n"] * 2**40}, r"silo 0 \(rank 1\): n = .*; allowed: 1 to 70"),
        *(
            (partial(with_n, client=k, n=n), r"n = |or n of it")
            for k in range(3)
            for n in (-1, 0, 1, 69, 71)
        ),
    ],
)
def test_a_silo_adds_nothing_to_a_sum_that_is_not_one(
    changed: Callable[[Tree], Tree], words: str, sum_of_three: Sum
) -> None:
    with pytest.raises(UserError, match=words):
        sum_of_three.asked(0, **changed(sum_of_three.down.ask.shared))
    assert len(sum_of_three.asked(0)[SUM]) > 100  # and goes on


def dead(down: wire.Down) -> wire.Down:
    """The question with a first layer whose neurons never fire: nothing before the last bias has a
    gradient."""
    params = dict(down.ask.params)
    for key in [key for key in params if not key.startswith("head")]:
        params[key] = torch.full_like(params[key], -100.0 if key.endswith("bias") else 0.0)
    return down._replace(ask=down.ask._replace(params=params))


CHANGES: dict[str, Callable[[wire.Down], wire.Down]] = {
    "a dead layer": dead,
    "round": lambda down: down._replace(round=down.round + 1),
    **{
        part: lambda down, part=part: down._replace(
            ask=down.ask._replace(
                **{part: tree_map(lambda leaf: leaf * 1.5 + 1, getattr(down.ask, part))}
            )
        )
        for part in ("params", "buffers", "shared")
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_silos_that_were_asked_different_questions_add_nothing_up(
    change: str, kits: Path, tmp_path: Path
) -> None:
    """Silo 0 gets the true model, the others another one. Each of them refuses. Silos that were
    asked the same add up what they have."""
    data = world.parts()
    terms = agreed("scaffold", {}, data)
    down = ServerRun(terms, world.shards_of(data)[0]).down
    other = CHANGES[change](down)
    assert wire.digest(wire.tensors(other)) != wire.digest(wire.tensors(down)) or change == "round"
    silos = secure_silos(terms, data, kits, tmp_path)
    attacked = Sum.from_questions(silos, [down, other, other])
    for k in range(3):
        with pytest.raises(UserError, match=r"has not signed .* for this question"):
            attacked.asked(k)
    if change == "a dead layer":
        whole = Sum.from_questions(silos, [other] * 3)
        added = sum(whole.asked(k)[SUM] for k in range(3))
        assert (added.abs() < 2**50).double().mean() > 0.5


def test_no_upload_is_larger_than_the_study_says(sum_of_three: Sum) -> None:
    """The server names all levels that there are, and one more. All numbers are below 64."""
    tensors = len(sum_of_three.down.ask.shared["levels"])
    with pytest.raises(UserError, match="levels"):
        sum_of_three.asked(0, levels=torch.ones(tensors, vectors.LEVELS + 1).byte())
    largest = sum_of_three.asked(0, levels=torch.ones(tensors, vectors.LEVELS).byte())[SUM]
    assert largest.nbytes == 2 * sum_of_three.asked(1)[SUM].nbytes
    data = world.parts()
    (of,) = study.messages(agreed("fedavg", {}, data), world.shards_of(data)[0]).values()
    assert largest.nbytes <= of.up_bytes < 1.5 * largest.nbytes + 3000


CLOSE = r"this answer to sums over the silos \[0, 1, 2\]; with one over \[0, 1\] .* fewer than 2"


def test_no_two_sums_differ_by_fewer_silos_than_a_sum_has(
    sum_of_three: Sum, kits: Path, tmp_path: Path
) -> None:
    """Also after the silo was started again; the same set may be asked for once more."""
    sum_of_three.asked(0)
    two = part(sum_of_three.down.ask.shared, slice(2))
    with pytest.raises(UserError, match=CLOSE):
        sum_of_three.asked(0, **two)
    sum_of_three.asked(0)
    again = record(tmp_path)
    answer = json.loads((tmp_path / "0.sums").read_text().splitlines()[1])["answer"]
    with pytest.raises(UserError, match=CLOSE):
        again.add(answer, (0, 1), 2)
    again.add("another answer", (0, 1), 2)


def test_another_question_with_the_same_answer_is_no_way_around(
    sum_of_three: Sum, kits: Path, tmp_path: Path
) -> None:
    """A FedAvg silo keeps no memory, so it answers alike in another exchange, run and process."""
    sum_of_three.asked(0)
    data, (_, down) = world.parts(), sum_of_three
    later = down._replace(exchange=1, step=0)
    first = ServerRun(agreed("fedavg", {}, data), world.shards_of(data)[0]).down.ask
    made, sent = secure_silos(agreed("fedavg", {}, data), data, kits, tmp_path), []
    for k in (0, 1):
        # FedAvg reads no shared tensor, so the answer is the same.
        other = first._replace(to=(k,), shared={"unused": torch.ones(1)})
        question = later._replace(ask=other, counted={k: 0})
        sent.append(made[k].answered(question)["leaves"])
    rows = {key.removeprefix("secure/"): torch.stack([of[key] for of in sent]) for key in KEYS}
    shared = down.ask.shared | part(down.ask.shared, slice(2)) | rows
    asked = later._replace(step=1, ask=Ask(SUM, (0,), shared=shared), counted={0: 0})
    with pytest.raises(UserError, match=CLOSE):
        made[0].answered(asked)


def test_no_combination_of_sums_tells_of_fewer_silos() -> None:
    """Of random requests for sums over sets, most of them made only if no silo refuses. Silos are
    lost, too, and such sums are not complete. The complete ones are rows over the silos. The silos
    `few` can be told apart if a combination of rows is 0 at all others: then the rank without their
    columns is smaller."""
    ranks = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        n, least = int(rng.integers(3, 11)), int(rng.integers(2, 4))
        earlier: dict[int, list[set[int]]] = {k: [] for k in range(n)}
        asked, rows = [{*range(n)}], [[False] * n]
        for _ in range(150):
            base = asked[0 if rng.random() < 0.5 else rng.integers(len(asked))]
            now = {*rng.permutation(sorted(base))[: rng.integers(1, len(base) + 1)].tolist()}
            added = [k for k in now if admits(earlier[k], now, least) and rng.random() < 0.98]
            if len(now) < least or (len(added) < len(now) and rng.random() < 0.95):
                continue
            asked.append(now)
            for k in added:
                earlier[k] += [now] if now not in earlier[k] else []
            if len(added) == len(now):
                rows.append([k in now for k in range(n)])
        found = np.array(rows, dtype=float)
        ranks.append(np.linalg.matrix_rank(found))
        for few in chain(*(combinations(range(n), size) for size in range(1, least))):
            rest = np.delete(found, few, axis=1)
            assert np.linalg.matrix_rank(rest) == ranks[-1], (seed, few, rows)
    assert ranks.count(1) > 20 and ranks.count(2) > 20


@pytest.mark.parametrize(
    ("least", "sets"),
    [
        (2, [(0, 1), (1, 2), (0, 2)]),  # (a + c - b) / 2 is silo 0
        (3, [range(7), (0, 1, 2), (3, 4, 5)]),  # what is left is silo 6
        (3, [range(12), range(9), (0, 1, 2)]),  # a third one
        (2, [(0, 1, 3, 4, 5), (0, 1, 4), (2, 3, 5)]),  # no part of the first: c - a + b is silo 2
        (3, [range(7), range(5)]),  # silos 5 and 6
        (2, [(0, 1, 2), range(5)]),  # a larger one later
    ],
)
def test_a_silo_refuses_the_set_with_which_sums_would_tell_too_much(
    least: int, sets: Sequence[Sequence[int]], tmp_path: Path
) -> None:
    """Of the last one at the latest. Each process reads what the ones before it have written."""

    def complete(answer: str, one: Sequence[int]) -> bool:
        try:
            for k in one:
                record(tmp_path, k).add(answer, [*one], least)
        except UserError:
            return False
        return True

    done = [complete("answer", one) for one in sets]
    assert not all(done)
    assert complete("another answer", sets[-1])


def test_silos_that_say_what_is_not_so_cost_themselves_alone() -> None:
    """The set is all others', whatever sets they name."""
    everybody = frozenset(range(7))
    assert largest(dict.fromkeys(range(7), ()), 3) == (*range(7),)
    for lie in ([frozenset({5})], [frozenset({0, 5, 9})], [everybody, frozenset({5})]):
        said = dict.fromkeys(range(7), ()) | {5: lie}
        assert {*range(7)} - {5} <= {*largest(said, 3)}
    noted = {k: [everybody] for k in range(6)}
    assert len(largest(noted, 3)) == 4, "silo 6 is away: three less"
    assert {0, 1, 2, 3, 4} & {*largest(noted | {5: [frozenset({0, 5})]}, 3)} >= {0, 1, 2, 3}


def test_kits_are_renewed_in_a_run(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes go on. Silo 0 is renewed between its key and the sum. Silo 3's kit of 14 days
    ends between the two, so the exchange begins again."""
    own, clock = tmp_path / "kits", [certificates.now()]
    data, terms = parts(4), deployment("fedavg", 4, 2)
    # (days since the message before, ranks that are renewed); questions and sums in turns
    days = iter([(0, ()), (7, (1,)), (5, (2, 3)), (3, (4,)), (1, ()), (4, ())])
    for module in (certificates, authority):
        monkeypatch.setattr(module, "now", lambda: clock[0])
    authority.make(own, 4)
    made = settings.terms(terms, "fedavg", world.network(takes_norms("fedavg", {})))
    direct = Direct(secure_silos(made, data, own, tmp_path))
    refused: list[str] = []

    def before(down: wire.Down) -> None:
        refused.extend(direct.failed.values())
        passed, ranks = next(days)
        clock[0] += datetime.timedelta(days=passed)
        for rank in ranks:
            authority.renew(own, rank)

    direct.before = before
    server = ServerRun(made, world.shards_of(data)[0])
    server.serve(direct)
    assert refused == ["silo 3 (rank 4) has no valid certificate of this federation"] * 3
    assert world.digest(server.loop.outcome) == loopback.simulate(terms, data)
    assert not server.missing


def test_a_cohort_below_the_quorum_has_to_answer_whole(kits: Path, tmp_path: Path) -> None:
    """As without secure sums."""
    data, comm = parts(6), {"quorum": 4}
    terms = deployment("fedavg", 6, 2, cohort=3, comm=comm)
    made = settings.terms(terms, "fedavg", world.network(takes_norms("fedavg", {})))
    direct, server = (
        Direct(secure_silos(made, data, kits, tmp_path), quorum=4),
        ServerRun(made, world.shards_of(data)[0]),
    )
    server.serve(direct)
    assert {(len(to), quorum) for to, quorum in direct.asked} == {(3, 3), (3, 1)}
    assert world.digest(server.loop.outcome) == loopback.simulate(terms, data)


class Lives(NamedTuple):
    """The servers of one run over seven silos of FedAvg, each without its predecessor's memory."""

    terms: settings.Deployment
    made: settings.Terms
    data: Parts
    silos: list[SecureSilo]

    def direct(self, quorum: int, away: Collection[int] = ()) -> Direct:
        """Those silos that are there."""
        direct = Direct(self.silos, quorum)
        direct.away = frozenset(away)
        return direct

    def server(self) -> ServerRun:
        """A new one."""
        return ServerRun(self.made, world.shards_of(self.data)[0])

    def killed(self, parts: int) -> None:
        """The server ends when so many silos have added to the first sum over all."""
        direct = self.direct(4)
        direct.parts = parts
        with pytest.raises(KilledError):
            self.server().serve(direct)


@pytest.fixture
def lives(kits: Path, tmp_path: Path) -> Lives:
    data, terms = parts(7), deployment("fedavg", 7, 3)
    made = settings.terms(terms, "fedavg", world.network(takes_norms("fedavg", {})))
    return Lives(terms, made, data, secure_silos(made, data, kits, tmp_path))


@pytest.mark.parametrize(("added", "without"), [(7, {4, 5, 6}), (3, {4, 5, 6}), (1, {0, 6})])
def test_a_server_that_is_started_again_goes_on_without_a_silo(
    added: int, without: set[int], lives: Lives
) -> None:
    """All, three or one had added to the sum over all seven, and silo 6 is away since. Three less
    are four, more than half; or five, without the one that had added."""
    lives.killed(added)
    again = lives.server()
    again.serve(lives.direct(4, away={6}))
    assert again.missing == {(1, 0): without, (2, 0): {6}}
    simulated = loopback.simulate(lives.terms, lives.data, again.missing)
    assert world.digest(again.loop.outcome) == simulated


@pytest.mark.parametrize(
    ("quorum", "silos", "least", "cohort", "ends"),
    [
        (0, 7, 3, 0, False),
        (4, 7, 3, 0, False),
        (5, 7, 3, 0, True),
        (4, 8, 4, 0, True),
        (5, 9, 2, 7, False),
        (5, 9, 2, 5, True),
        (9, 9, 2, 7, True),
    ],
)
def test_a_quorum_that_allows_no_lost_silo_is_told(
    quorum: int, silos: int, least: int, cohort: int, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As `largest` has it, if all had added to the sum and one is away."""
    deployed = deployment("fedavg", silos, least, cohort=cohort)
    made = settings.terms(deployed, "fedavg", world.network(takes_norms("fedavg", {})))
    warn_of_quorum(quorum, made)
    assert bool(caplog.messages) == ends
    asked = cohort or silos
    left = largest({k: [frozenset(range(asked))] for k in range(asked - 1)}, least)
    assert ends == (quorum > 0 and len(left) < min(quorum, asked))


def test_a_server_whose_quorum_needs_a_silo_that_is_away_waits_for_it(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    lives.killed(7)
    direct = lives.direct(5, away={6})
    with pytest.raises(QuorumError):
        lives.server().serve(direct)
    assert direct.asked == [((*range(7),), 5), ((*range(7),), 7)]
    assert (
        "comm_args.quorum = 5, train_args.secure_sums = 3: if one of 7 silos is lost" in caplog.text
    )
    assert "4 silos may be in one sum, and the quorum is 5" in caplog.text
    assert "without silo 6 (rank 7); waiting for the silos [0, 1, 2, 3, 4, 5, 6]" in caplog.text
    again = lives.server()
    again.serve(lives.direct(5))
    assert world.digest(again.loop.outcome) == loopback.simulate(lives.terms, lives.data)
    assert not again.missing


def record(folder: Path, client: int = 0) -> Sets:
    return Sets(folder / f"{client}.sums", f"rank {client + 1}")


def test_what_a_silo_has_added_to_survives_each_kill(tmp_path: Path) -> None:
    """In a line, cut at many bytes, and between the line and its head. The first set counts."""
    record(tmp_path).add("q", (0, 1, 2), 2)
    path, head = tmp_path / "0.sums", tmp_path / "0.sums.head"
    whole, counted = path.read_bytes(), head.read_bytes()
    record(tmp_path).add("r", (0, 1), 2)
    line = path.read_bytes()[len(whole) :]
    for cut in (*range(0, len(line), 13), len(line)):
        path.write_bytes(whole + line[:cut])
        head.write_bytes(counted)
        again = record(tmp_path)
        assert again.earlier("r") == [{0, 1}] * (cut == len(line))
        with pytest.raises(UserError, match=r"sums over the silos \[0, 1, 2\]"):
            again.add("q", (0, 1), 2)
        again.add("r", (0, 1), 2)
        assert path.read_bytes() == whole + line


@pytest.mark.parametrize("lost", ["one line", "last line", "digit", "file", "head", "of another"])
def test_a_record_of_sums_that_was_changed_lost_or_is_older_is_refused(
    lost: str, tmp_path: Path
) -> None:
    """Also while the silo runs: it adds its answer to nothing."""
    held, path = record(tmp_path), tmp_path / "0.sums"
    for answer in ("q", "r"):
        held.add(answer, (0, 1, 2), 2)
    lines = path.read_bytes().splitlines(keepends=True)
    if lost == "head":
        path.with_name("0.sums.head").unlink()
    elif lost == "file":
        path.unlink()
    elif lost == "of another":
        record(tmp_path, 1).add("q", (0, 1, 2), 2)
        for name in ("sums", "sums.head"):
            (tmp_path / f"1.{name}").replace(tmp_path / f"0.{name}")
    else:
        changed = {
            "one line": [lines[0], lines[2]],
            "last line": lines[:-1],
            "digit": [lines[0], lines[1].replace(b"2]", b"3]"), lines[2]],
        }
        path.write_bytes(b"".join(changed[lost]))
    refused = r"0\.sums: .*restore both files from a backup, or move them away .* another seed"
    with pytest.raises(UserError, match=refused):
        record(tmp_path)
    with pytest.raises(UserError, match=refused):
        held.add("q", (0, 1), 2)


def test_a_new_record_of_sums_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        record(tmp_path).add("q", (0, 1), 2)
    assert caplog.messages == [
        f"{tmp_path}/0.sums: a new record of sums begins; it has nothing of before"
    ]


def adding(folder: Path, client: int) -> None:
    for number in range(10):
        record(folder).add(f"{client} {number}", (0, 1), 2)


def test_processes_share_a_record_of_sums(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=adding, args=(tmp_path, k)) for k in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONG)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert all(record(tmp_path).earlier(f"{k} {n}") == [{0, 1}] for k in range(3) for n in (0, 9))


SAID = ("secure/levels", "secure/sets", "secure/norms")
KEYS = ("secure/key", "secure/signature", "secure/certificate")


@pytest.mark.parametrize(("recipe", "step"), [("fedavg", 0), ("fedavg", 1), ("scaffold", 1)])
def test_a_silo_that_comes_again_is_in_the_sum(
    recipe: str, step: int, kits: Path, tmp_path: Path
) -> None:
    """Lost before it answers, or before it adds its part. All make new keys, and none trains
    again."""
    data, terms = parts(4), deployment(recipe, 4, 3)
    running = Running(terms, data, kits, tmp_path, Once([1], 1, step, again=True))
    assert running.run() == loopback.simulate(terms, data)
    assert not running.server_run.missing
    keys = [bytes(sent[KEYS[0]].tolist()) for sent in running.seen if SUM not in sent]
    assert len(keys) == len({*keys}) == (8 if step == 0 else 12)


@pytest.mark.parametrize("recipe", ["fedavg", "scaffold"])
def test_a_silo_that_is_lost_takes_others_with_it(recipe: str, kits: Path, tmp_path: Path) -> None:
    """Two of twelve go while the sum is made: a third is left out, so that no difference of sums is
    that of two. One goes before: the set is the others."""
    data = parts(12)
    comm = {"quorum": 6, "deadline_s": 30.0, "gone_s": 0.2}
    terms = deployment(recipe, 12, 3, comm=comm, rounds=3)
    losses = [Once([4, 7], 1, 1, again=False), Once([2], 2, 0, again=False)]

    def lose(client: int, down: wire.Down) -> bool | None:
        found = [once(client, down) for once in losses]
        return False if False in found else None

    running = Running(terms, data, kits, tmp_path, lose)
    digest, missing = running.run(), running.server_run.missing
    assert missing == {(2, 0): {4, 7, 11}, (3, 0): {2, 4, 7}}
    assert digest == loopback.simulate(terms, data, missing)
    for path in tmp_path.glob("*.sums"):  # and no silo was asked for more
        assert len(path.read_text().splitlines()) <= 5


def no_disk(client: int, down: wire.Down) -> None:
    """Silo 1 can never add its part."""
    if client == 1 and down.ask.job == SUM:
        raise UserError("no disk")


def test_a_silo_that_can_not_add_its_part_is_left_out(kits: Path, tmp_path: Path) -> None:
    """The exchange begins again twice, and not for ever."""
    data = parts(7)
    terms = deployment("fedavg", 7, 3, comm={"quorum": 4, "gone_s": 0.2})
    running = Running(terms, data, kits, tmp_path, no_disk)
    digest, missing = running.run(), running.server_run.missing
    assert missing == {(1, 0): {1, 5, 6}, (2, 0): {1, 5, 6}}
    assert digest == loopback.simulate(terms, data, missing)
    assert max(down.step for down in running.asked) == 7, "counts and a sum, three times"


@pytest.mark.parametrize(
    ("key", "lie", "words"),
    [
        ("n", torch.tensor(-1), "'n' has -1"),
        ("n", torch.tensor(1000), "n = 1000 samples; train_args.max_samples allows 70"),
        ("n", torch.tensor(5), "n = 5 samples; it was 4 before"),
        ("steps", torch.tensor(0.0), "'steps' has 0; 4 samples make 2"),
        ("loss", torch.tensor(torch.inf), "'loss' is not finite"),
        ("secure/key", torch.zeros(33, dtype=torch.uint8), "'secure/key' is uint8"),
        ("secure/key", torch.zeros(32, dtype=torch.uint8), "has not signed this key"),
        ("secure/signature", torch.zeros(64, dtype=torch.uint8), "has not signed this key"),
        ("secure/certificate", torch.zeros(2048, dtype=torch.uint8), "no valid certificate"),
        (SUM, torch.zeros(3, dtype=torch.int64), "'sum' is int64"),
        (SUM, torch.zeros(3), "'sum' is float32"),
    ],
)
def test_a_silo_that_lies_where_it_shows_is_left_out(
    key: str,
    lie: torch.Tensor,
    words: str,
    kits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others don't suffer. Only a lie in the sum itself costs two of them their place, so that
    no difference of sums shows a single silo's numbers."""
    data = parts(7)
    terms = deployment("fedavg", 7, 3, comm={"quorum": 4, "gone_s": 5.0 if key == SUM else 0.2})
    running = Running(terms, data, kits, tmp_path, nobody)

    def changed(client: int, sent: Params) -> Params:
        return sent | {key: lie} if client == 1 and key in sent else sent

    running.changed = changed
    digest, missing = running.run(), running.server_run.missing
    late = {1, 5, 6} if key == SUM else {1}
    assert missing == {(1, 0): late, (2, 0): late}
    assert digest == loopback.simulate(terms, data, missing)
    assert any("silo 1 (rank 2)" in line and words in line for line in caplog.messages)


def test_a_key_that_gives_everybody_the_same_secret_is_refused(
    kits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Silo 1 signs it, in each of two exchanges."""
    terms, zeros, exchanges = deployment("fedavg", 4, 2, comm=QUORUM_OF_3), bytes(32), count()
    private = load_pem_private_key((kits / "2" / "own.key").read_bytes(), None)
    assert isinstance(private, EllipticCurvePrivateKey)
    running = Running(terms, parts(4), kits, tmp_path, nobody)

    def changed(client: int, sent: Params) -> Params:
        if client != 1 or SUM in sent:
            return sent
        of = masks.Exchange("this run", "study", next(exchanges))
        question = question_of(running.server_run.down)
        said = masks.Announcement(of, question, client, int(sent["n"]), zeros)
        made = {"key": zeros, "signature": masks.signature(private, said)}
        return sent | {
            f"secure/{name}": torch.frombuffer(bytearray(value), dtype=torch.uint8)
            for name, value in made.items()
        }

    running.changed = changed
    running.run()
    assert running.server_run.missing == {(1, 0): {1}, (2, 0): {1}}
    assert "refused from silo-2 (key): round 1: the key of silo 1 (rank 2) is none" in caplog.text


def test_a_server_that_needs_all_says_who_could_not_add(kits: Path, tmp_path: Path) -> None:
    running = Running(deployment("fedavg", 4, 3), parts(4), kits, tmp_path, no_disk)
    with pytest.raises(
        QuorumError, match=r"quorum is 4: .* without silo 1 .*; silo 1 .*: it can't answer; "
    ):
        running.run()


def test_without_enough_silos_the_server_ends(kits: Path, tmp_path: Path) -> None:
    data, comm = parts(4), {"quorum": 3, "deadline_s": 30.0, "gone_s": 0.2, "patience_s": 1.0}
    terms = deployment("fedavg", 4, 3, comm=comm)
    running = Running(terms, data, kits, tmp_path, Once([1], 0, 1, again=False))
    with pytest.raises(QuorumError, match=r"3 of 4 silos answered in .* and the quorum is 4"):
        running.run()
