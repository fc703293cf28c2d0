"""A deployment whose server sees sums alone ends with the bits of the simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fedml_noniid.contract import silos
from fedml_noniid.contract.federation import takes_norms
from fedml_noniid.core.component import Ask, Replies, Setting
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Tree, tree_map
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.coordinator import Check, Compare
from fedml_noniid.deploy.exit_codes import QuorumError
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines.packing import flatten
from fedml_noniid.governance.secure import masks, vectors
from fedml_noniid.governance.secure.silo import SUM, SecureSilo, Sets, admits
from fedml_noniid.plugins import registry
from tests.deploy import world
from tests.deploy.federation_server import Federation
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


def federation(
    recipe: str, n: int, least: int, kits: Path, folder: Path, **train: object
) -> Federation:
    """Of n silos, whose server sees sums over `least` silos or more."""
    more = {"client_num_in_total": n, "client_num_per_round": n, "secure_sums": least}
    return Federation(kits, world.deployment(recipe, **more | train), folder, parts(n))


class Once:
    """Loses silos, once each."""

    def __init__(self, clients: dict[tuple[int, int], set[int]], again: bool) -> None:
        """`clients`: by (exchange, step) of the run."""
        self.left, self.again = clients, again

    def __call__(self, client: int, down: wire.Down) -> bool | None:
        if client not in self.left.get(down.at, ()):
            return None
        self.left[down.at].remove(client)
        return self.again


@pytest.mark.parametrize(
    ("recipe", "n"),
    [("fedavg", 4), ("scaffold", 4), ("sgdm", 12), ("fedavg", 20), ("fed3r", 4)],
)
def test_masked_plain_and_simulated_weights_are_the_same(
    recipe: str, n: int, kits: Path, tmp_path: Path
) -> None:
    """And nothing that leaves a silo is its update."""
    running = federation(recipe, n, 3, kits, tmp_path)
    assert running.run() == running.simulated()
    vectors = [leaves[SUM] for leaves in running.sent if SUM in leaves]
    assert len(vectors) == n * running.server_run.down.exchange
    for sent in running.sent:
        assert {*sent} in ({SUM}, {"n", "steps", "loss", *SAID, *KEYS})
    for vector in vectors:  # of 64 random bits, none is small
        assert len(vector) < 50 or (vector.abs() < 2**50).double().mean() < 0.1


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

    def ask(
        self,
        down: wire.Down,
        schema: Tree,
        check: Check,
        quorum: int,
        compare: Compare = lambda _: {},
    ) -> dict[int, Tree]:
        assert down.sha256 in ("", wire.digest(wire.tensors(down)))
        self.asked.append((down.ask.to, quorum))
        self.rows |= {*flatten(down.ask.each)}
        there = [k for k in down.ask.to if k not in self.away]
        if len(there) < quorum:
            raise QuorumError("too few")
        replies: dict[int, Tree] = {}
        for k in there:
            self.parts -= down.ask.job == SUM
            if self.parts < 0:
                raise KeyboardInterrupt
            up = self.silos[k].answered(wire.row_of(down, k))
            wire.fit(up["leaves"], schema, wire.silo(k))
            replies[k] = check(up, k, None)
            self.masked_bytes += up["leaves"][SUM].nbytes if SUM in up["leaves"] else 0
        assert compare(replies) == {}, "nobody lies"
        return replies

    def status(self) -> Mapping[str, Mapping[int, str]]:
        """As of the last message."""
        return {"failed": {}}

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


@pytest.mark.parametrize("entry", thinned(DEPLOYED_ALONE, 2, 4))
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


N = torch.arange(3)
OTHER = torch.tensor([0, 2, 1])  # silos 1 and 2 exchanged


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda of: {"clients": OTHER}, "sum over the silos"),
        (lambda of: {"clients": torch.tensor([0, 0, 1])}, "sum over the silos"),
        (lambda of: {"clients": torch.tensor([0, 1, 7])}, "sum over the silos"),
        (lambda of: part(of, slice(1)), "allowed: 2 or more"),
        (lambda of: part(of, slice(1, 3)), "without this silo"),
        (lambda of: {"key": of["key"][OTHER]}, r"silo 1 \(rank 2\) has not signed this key"),
        (lambda of: {"signature": of["signature"] * 0}, "has not signed this key"),
        (lambda of: {"certificate": of["certificate"][OTHER]}, "no valid certificate"),
        (lambda of: {"certificate": of["certificate"] * 0}, "no valid certificate"),
        (lambda of: {"key": of["key"] + torch.tensor([[1], [0], [0]]).byte()}, "another key or n"),
        (lambda of: {"levels": of["levels"] * 0}, "their level is missing"),
        (lambda of: {"levels": of["levels"][1:]}, "levels"),
        (lambda of: {"levels": torch.cat([of["levels"]] * 2, 1)}, "levels"),
        (lambda of: {"clients": torch.tensor(3)}, "key"),
        (lambda of: {"key": of["key"][:, 1:]}, "key"),
        (lambda of: {"key": {"a": of["key"]}}, "key"),
        (lambda of: {"total": torch.tensor(120.0).double()}, "total"),
        (lambda of: {"n": of["n"].double()}, "n"),
        (lambda of: {"n": of["n"] * 2**40}, r"silo 0 \(rank 1\): n = .*; allowed: 1 to 70"),
        *(
            (lambda of, k=k, n=n: {"n": torch.where(k == N, n, of["n"])}, r"n = |or n of it")
            for k in range(3)
            for n in (0, 69, 71)
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
    params = {
        key: leaf
        if key.startswith("head")
        else torch.full_like(leaf, -100.0 if key.endswith("bias") else 0.0)
        for key, leaf in down.ask.params.items()
    }
    return down._replace(ask=down.ask._replace(params=params))


def moved(part: str, down: wire.Down) -> wire.Down:
    other = tree_map(lambda leaf: leaf * 1.5 + 1, getattr(down.ask, part))
    return down._replace(ask=down.ask._replace(**{part: other}))


CHANGES: dict[str, Callable[[wire.Down], wire.Down]] = {
    "a dead layer": dead,
    "round": lambda down: down._replace(round=down.round + 1),
    **{part: partial(moved, part) for part in ("params", "buffers", "shared")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_silos_that_were_asked_different_questions_add_nothing_up(
    change: str, kits: Path, tmp_path: Path
) -> None:
    """Silo 0 gets the true model, the others another one. Each of them refuses."""
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


CLOSE = r"this answer to sums over the silos \[0, 1, 2\]; with one over \[0, 1\] .* fewer than 2"


def test_no_two_sums_differ_by_fewer_silos_than_a_sum_has(
    sum_of_three: Sum, tmp_path: Path
) -> None:
    """Also after the silo was started again; the same set may be asked for once more."""
    sum_of_three.asked(0)
    with pytest.raises(UserError, match=CLOSE):
        sum_of_three.asked(0, **part(sum_of_three.down.ask.shared, slice(2)))
    sum_of_three.asked(0)
    answer = json.loads((tmp_path / "0.sums").read_text().splitlines()[1])["answer"]
    with pytest.raises(UserError, match=CLOSE):
        record(tmp_path).add(answer, (0, 1), 2)
    record(tmp_path).add("another answer", (0, 1), 2)


def test_another_question_with_the_same_answer_is_no_way_around(
    sum_of_three: Sum, kits: Path, tmp_path: Path
) -> None:
    """A FedAvg silo keeps no memory, so it answers alike in another exchange, run and process."""
    sum_of_three.asked(0)
    data, asked = world.parts(), sum_of_three.down.ask.shared
    terms = agreed("fedavg", {}, data)
    down = ServerRun(terms, world.shards_of(data)[0]).down
    # FedAvg reads no shared tensor, so the answer is the same.
    later = down._replace(exchange=1, ask=down.ask._replace(shared={"unused": torch.ones(1)}))
    silos = secure_silos(terms, data, kits, tmp_path)
    sent = [silos[k].answered(wire.row_of(later, k))["leaves"] for k in (0, 1)]
    rows = {key.removeprefix("secure/"): torch.stack([of[key] for of in sent]) for key in KEYS}
    shared = asked | part(asked, slice(2)) | rows
    with pytest.raises(UserError, match=CLOSE):
        silos[0].answered(later._replace(step=1, ask=Ask(SUM, (0,), shared=shared)))


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
            rows += [[k in now for k in range(n)]] * (len(added) == len(now))
        ranks.append(np.linalg.matrix_rank(np.array(rows, dtype=float)))
        for few in chain(*(combinations(range(n), size) for size in range(1, least))):
            rest = np.delete(np.array(rows, dtype=float), few, axis=1)
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


def killed(running: Federation, parts: int, quorum: int) -> Direct:
    """Silo 6 is away, and `parts` silos have added to the first sum over all seven, when the server
    ended."""
    silos = secure_silos(running.terms, running.data, running.kits, running.folder)
    direct = Direct(silos, quorum)
    direct.parts = parts
    with pytest.raises(KeyboardInterrupt):
        running.server_run.serve(direct)
    running.server_run = ServerRun(running.terms, running.shards[0])
    direct.parts, direct.away = math.inf, frozenset({6})
    return direct


@pytest.mark.parametrize(("added", "without"), [(7, {4, 5, 6}), (3, {4, 5, 6}), (1, {0, 6})])
def test_a_server_that_is_started_again_goes_on_without_a_silo(
    added: int, without: set[int], kits: Path, tmp_path: Path
) -> None:
    """Three less are four, more than half; or five, without the one that had added."""
    running = federation("fedavg", 7, 3, kits, tmp_path)
    direct = killed(running, added, 4)
    running.server_run.serve(direct)
    assert running.server_run.missing == {(1, 0): without, (2, 0): {6}}
    assert world.digest(running.server_run.loop.outcome) == running.simulated()


def test_a_server_whose_quorum_needs_a_silo_that_is_away_waits_for_it(
    kits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = federation("fedavg", 7, 3, kits, tmp_path)
    direct = killed(running, 7, 5)
    direct.asked.clear()
    with pytest.raises(QuorumError):
        running.server_run.serve(direct)
    assert direct.asked == [((*range(7),), 5), ((*range(7),), 7)]
    assert "train_args.secure_sums = 3: if one of 7 silos is lost" in caplog.text
    assert "without silo 6 (rank 7); waiting for the silos [0, 1, 2, 3, 4, 5, 6]" in caplog.text


def record(folder: Path, client: int = 0) -> Sets:
    return Sets(folder / f"{client}.sums", f"rank {client + 1}")


@pytest.mark.parametrize("lost", ["last line", "digit", "head", "of another"])
def test_a_record_of_sums_that_was_changed_lost_or_is_older_is_refused(
    lost: str, tmp_path: Path
) -> None:
    """Also while the silo runs: it adds its answer to nothing."""
    held, path = record(tmp_path), tmp_path / "0.sums"
    for answer in ("q", "r"):
        held.add(answer, (0, 1, 2), 2)
    first, second, last = path.read_bytes().splitlines(keepends=True)
    changed = {"last line": [first, second], "digit": [first, second.replace(b"2]", b"3]"), last]}
    if lost in changed:
        path.write_bytes(b"".join(changed[lost]))
    elif lost == "head":
        path.with_name("0.sums.head").unlink()
    else:
        record(tmp_path, 1).add("q", (0, 1), 2)
        for name in ("sums", "sums.head"):
            (tmp_path / f"1.{name}").replace(tmp_path / f"0.{name}")
    refused = r"0\.sums: .*restore both files from a backup, or move them away .* another seed"
    with pytest.raises(UserError, match=refused):
        record(tmp_path)
    with pytest.raises(UserError, match=refused):
        held.add("q", (0, 1), 2)


SAID = ("secure/levels", "secure/sets", "secure/norms")
KEYS = ("secure/key", "secure/signature", "secure/certificate")


@pytest.mark.parametrize(("recipe", "step"), [("fedavg", 0), ("scaffold", 1)])
def test_a_silo_that_comes_again_is_in_the_sum(
    recipe: str, step: int, kits: Path, tmp_path: Path
) -> None:
    """Lost before it answers, or before it adds its part. All make new keys, and none trains
    again."""
    running = federation(recipe, 4, 3, kits, tmp_path)
    running.lose = Once({(1, step): {1}}, again=True)
    assert running.run() == running.simulated() and not running.server_run.missing
    keys = [bytes(sent[KEYS[0]].tolist()) for sent in running.sent if SUM not in sent]
    assert len(keys) == len({*keys}) == (8 if step == 0 else 12)


def test_a_silo_that_is_lost_takes_others_with_it(kits: Path, tmp_path: Path) -> None:
    """Two of twelve go while the sum is made: a third is left out, so that no difference of sums is
    that of two. One goes before: the set is the others."""
    comm = {"quorum": 6, "deadline_s": 30.0, "gone_s": 0.2}
    running = federation("scaffold", 12, 3, kits, tmp_path, comm=comm, rounds=3)
    running.lose = Once({(1, 1): {4, 7}, (2, 0): {2}}, again=False)
    assert running.run() == running.simulated()
    assert running.server_run.missing == {(2, 0): {4, 7, 11}, (3, 0): {2, 4, 7}}
    for path in tmp_path.glob("*.sums"):  # and no silo was asked for more
        assert len(path.read_text().splitlines()) <= 5


def no_disk(client: int, down: wire.Down) -> None:
    """Silo 1 can never add its part."""
    if client == 1 and down.ask.job == SUM:
        raise UserError("no disk")


def test_a_silo_that_can_not_add_its_part_is_left_out(kits: Path, tmp_path: Path) -> None:
    """The exchange begins again twice, and not for ever."""
    running = federation("fedavg", 7, 3, kits, tmp_path, comm={"quorum": 4, "gone_s": 0.2})
    running.lose = no_disk
    assert running.run() == running.simulated()
    assert running.server_run.missing == {(1, 0): {1, 5, 6}, (2, 0): {1, 5, 6}}
    assert max(down.step for down in running.asked) == 7, "counts and a sum, three times"


@pytest.mark.parametrize(
    ("key", "lie", "words"),
    [
        ("n", torch.tensor(1000), "n = 1000 samples; train_args.max_samples allows 70"),
        ("n", torch.tensor(5), "n = 5 samples; it was 4 before"),
        ("steps", torch.tensor(0.0), "'steps' has 0; 4 samples make 2"),
        ("loss", torch.tensor(torch.inf), "'loss' is not finite"),
        ("secure/key", torch.zeros(33, dtype=torch.uint8), "'secure/key' is uint8"),
        ("secure/signature", torch.zeros(64, dtype=torch.uint8), "has not signed this key"),
        ("secure/certificate", torch.zeros(2048, dtype=torch.uint8), "no valid certificate"),
        (SUM, torch.zeros(3, dtype=torch.int64), "'sum' is int64"),
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
    """The others don't suffer. Only a lie in the sum itself costs one of them its place, so that
    no difference of sums shows a single silo's numbers."""
    comm = {"quorum": 3, "gone_s": 5.0 if key == SUM else 0.2}
    running = federation("fedavg", 5, 2, kits, tmp_path, comm=comm)
    running.changed = lambda client, sent: (
        sent | {key: lie} if client == 1 and key in sent else sent
    )
    assert running.run() == running.simulated()
    late = {1, 4} if key == SUM else {1}
    assert running.server_run.missing == {(1, 0): late, (2, 0): late}
    assert any("silo 1 (rank 2)" in line and words in line for line in caplog.messages)


def test_a_key_that_gives_everybody_the_same_secret_is_refused(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silo 1 signs it."""
    make = masks.signature

    def signed(key: EllipticCurvePrivateKey, announced: masks.Announcement) -> bytes:
        return make(key, announced._replace(key=bytes(32)) if announced.client == 1 else announced)

    monkeypatch.setattr(masks, "signature", signed)
    running = federation("fedavg", 4, 2, kits, tmp_path, comm=QUORUM_OF_3)
    zeros = {"secure/key": torch.zeros(32, dtype=torch.uint8)}
    running.changed = lambda client, sent: sent | zeros if client == 1 and SUM not in sent else sent
    running.run()
    assert running.server_run.missing == {(1, 0): {1}, (2, 0): {1}}
    assert "refused from silo-2 (key): round 1: the key of silo 1 (rank 2) is none" in caplog.text
