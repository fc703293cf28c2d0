"""rFedAvg and rFedAvg+ (Wang et al. 2022), algorithms 1 and 2, and other readings, against
arithmetic by hand."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Ask, Server, Setting
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.randomness import fold, identity, normal, uniform
from fedml_noniid.core.sums import integers
from fedml_noniid.core.task import Task
from fedml_noniid.data.streams import key
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.plugins import registry
from tests.methods import by_hand as hand

LAM = 0.4
EVERYBODY = (0, 1, 2)
BOTH = ("rfedavg", "rfedavg_plus")
AUTHORS = ("rfedavg_authors", "rfedavg_plus_authors")
# The paper's readings, and those of the authors' code that differ.
SHARED: dict[str, Any] = {
    "delta": "full",
    "delta_scope": "known",
    "warmup": "delta0",
    "weights": "size",
    "opt_state": "reset",
}
PAPER = {
    "rfedavg_authors": SHARED | {"mmd": "mean", "delta_time": "end"},
    "rfedavg_plus_authors": SHARED | {"plus": "exclude"},
}
REPO = {
    "delta": "batch",
    "delta_scope": "sampled",
    "weights": "uniform",
    "opt_state": "persist",
    "plus": "incl_self",
}


def read(name: str, **options: Any) -> dict[str, Any]:
    """A method with the paper's readings but for some."""
    return PAPER.get(name, {}) | options


def delta(w: hand.Tree, positions: hand.Array) -> hand.Array:
    """1/n sum_j phi(w, x_j)."""
    return np.asarray(hand.hidden(w, hand.X[positions]).mean(0))


class Reference:
    """Both algorithms with every option; batches and random numbers are those of the run that it is
    compared with."""

    def __init__(
        self, name: str, ran: hand.Ran, momentum: float = 0.0, lr: float = hand.LR, **options: Any
    ) -> None:
        self.name, self.ran, self.plus = name, ran, "plus" in name
        self.o: dict[str, Any] = SHARED | {
            "mmd": "mean",
            "delta_time": "end",
            "plus": "exclude",
            "L": 100,
            "dp": "none",
        }
        self.o |= (REPO if name in AUTHORS else {}) | options
        self.lr, self.momentum, self.v = lr, momentum, {k: hand.zeros() for k in EVERYBODY}
        self.w, self.loss = hand.W0, 0.0
        self.table: dict[int, hand.Array] = {}  # of whom it is known
        if self.o["warmup"] == "delta0":
            self.table = {
                k: self.map(self.w, k, "map", 0) for k in EVERYBODY
            }  # line 1: delta_0, with w_0
        self.noise = np.zeros(2)

    @property
    def scope(self) -> int:
        """The component's number among the keys."""
        return identity(registry.METHODS[self.name]())

    def of_the_server(self, t: int) -> hand.Array:
        """The repo's noise on the average: every one of L samples has its own, of std sigma."""
        if not (self.plus and self.o["dp"] == "repo"):
            return np.zeros(2)
        at = fold(torch.tensor(key(0, "server", t)), self.scope)
        drawn = normal(fold(at, "noise"), 2, dtype=torch.float64).numpy()
        return np.asarray(self.o["sigma"] / np.sqrt(self.o["L"]) * drawn)

    def map(self, w: hand.Tree, k: int, job: str, t: int) -> hand.Array:
        """delta^k over its whole set, or over a batch of it; with noise."""
        at = fold(self.ran.simulation.engine.clients.keys(Ask(job, (k,)), t)[0], self.scope)
        positions = hand.CLIENTS[k]
        size = min(self.o["L"], len(positions))
        if self.o["delta"] == "batch":
            order = np.argsort(uniform(fold(at, "draw"), len(positions)).numpy(), kind="stable")
            positions = positions[order[:size]]
        found = delta(w, positions)
        noise = normal(fold(at, "noise"), 2, dtype=torch.float64).numpy()
        if self.o["dp"] == "paper":
            c_0 = self.o["clip"]
            found = (
                found / max(1, np.sqrt((found**2).sum()) / c_0)
                + self.o["sigma"] * c_0 / size * noise
            )
        if self.o["dp"] == "repo" and not self.plus:
            found = found + self.o["sigma"] / np.sqrt(size) * noise
        return found

    def regulariser(
        self, phi: hand.Array, k: int, cohort: tuple[int, ...]
    ) -> tuple[float, hand.Array]:
        """r_k and its derivative by phi; 0 where nobody else is known."""
        counted = cohort if self.o["delta_scope"] == "sampled" else EVERYBODY
        others = np.array(
            [self.table[j] for j in counted if j != k and j in self.table]
        )  # never its own
        if len(others) == 0:
            return 0.0, np.zeros(2)
        if not self.plus:  # eq. 5: r = 1/(N-1) sum_j ||phi - delta^j||^2
            factor = 1 if self.o["mmd"] == "sum" else 1 / len(others)
            return factor * ((phi - others) ** 2).sum(), factor * 2 * (phi - others).sum(0)
        if self.o["plus"] == "incl_self":
            others = np.array([self.table[j] for j in counted if j in self.table])
        away = phi - (
            others.mean(0) + self.noise
        )  # section IV-C: r = ||phi - 1/(N-1) sum_j delta^j||^2
        return (away**2).sum(), 2 * away

    def round(
        self, t: int, cohort: tuple[int, ...], batches: list[list[hand.Array]] | None = None
    ) -> None:
        batches = [self.ran.batches(k, t) for k in cohort] if batches is None else batches
        self.noise = self.of_the_server(t)
        local, losses = [], []
        for k, of in zip(cohort, batches, strict=True):
            v = self.v[k] if self.o["opt_state"] == "persist" else hand.zeros()
            w_k, of_steps = self.w, []
            for batch in of:
                x, y = hand.X[batch], hand.Y[batch]
                r, dr = self.regulariser(hand.hidden(w_k, x).mean(0), k, cohort)
                of_steps.append(hand.loss(w_k, x, y) + LAM * r)
                g = hand.gradient(
                    w_k, x, y, dh=LAM * dr / len(batch)
                )  # every sample is 1/B of the mean
                v = hand.each(lambda v, g: self.momentum * v + g, v, g)
                w_k = hand.each(lambda w, v: w - self.lr * v, w_k, v)  # line 9 (algorithm 2: 10)
            self.v[k] = v
            local.append(w_k)
            losses.append(np.mean(of_steps))
        self.loss = float(np.mean(losses))
        n = np.array([hand.SIZES[k] if self.o["weights"] == "size" else 1 for k in cohort])
        old, self.w = self.w, hand.average(n / n.sum(), local)  # line 12
        if self.plus:  # algorithm 2, line 15: with the new global model
            mapping = EVERYBODY if self.o["delta_scope"] == "sampled" else cohort
            self.table = self.table | {k: self.map(self.w, k, "map", t) for k in mapping}
        else:  # algorithm 1, line 10: with the local model, or as printed with the received one
            models = [old] * len(cohort) if self.o["delta_time"] == "start" else local
            self.table = self.table | {
                k: self.map(w, k, "train", t) for k, w in zip(cohort, models, strict=True)
            }

    def rows(self) -> hand.Array:
        """The server's table: zero where nothing is known."""
        return np.stack([self.table.get(k, np.zeros(2)) for k in EVERYBODY])


PARTIAL: dict[str, Any] = {"cohort": 2, "rounds": 3, "batch_size": 2, "momentum": 0.5, "lr": 0.12}
NOISY = {"sigma": 0.8, "L": 2}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BOTH),
    *((name, {"dp": "paper", "clip": 0.4} | NOISY) for name in BOTH),
    *((name, {"L": 2}) for name in AUTHORS),  # the repo
    *((name, read(name, delta="batch", L=2)) for name in AUTHORS),
    *((name, read(name, delta_scope="sampled")) for name in AUTHORS),
    *((name, read(name, delta_scope="sampled", warmup="none")) for name in AUTHORS),
    *((name, read(name, warmup="none")) for name in AUTHORS),
    *((name, read(name, dp="paper", clip=0.4, delta="batch", **NOISY)) for name in AUTHORS),
    *((name, read(name, dp="repo", **NOISY)) for name in AUTHORS),
    *((name, read(name, weights="uniform")) for name in AUTHORS),
    *((name, read(name, opt_state="persist")) for name in AUTHORS),
    *(
        ("rfedavg_authors", read("rfedavg_authors", **options))
        for options in (
            {"mmd": "sum"},
            {"mmd": "sum", "warmup": "none"},
            {"delta_time": "start"},
        )
    ),
    *(
        ("rfedavg_plus_authors", read("rfedavg_plus_authors", **options))
        for options in (
            {"plus": "incl_self"},
            {"plus": "incl_self", "warmup": "none"},
            {"plus": "incl_self", "delta_scope": "sampled", "delta": "batch", "L": 2},
        )
    ),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_three_rounds_of_partial_participation(
    name: str, options: dict[str, object], engine: str
) -> None:
    """Two of three clients, mini-batches of 2, momentum: the rows, and optimisers, of those who are
    absent stay."""
    ran = hand.run(name, {name: {"lam": LAM} | options}, engine=engine, **PARTIAL)
    reference = Reference(name, ran, momentum=0.5, lr=0.12, **options)
    cohorts = [draw_cohort(0, t, 3, 2) for t in (1, 2, 3)]
    assert len(set(cohorts)) > 1, "the example has an absent client whose row is used"
    assert cohorts[1] != cohorts[0], (
        "without a warm-up, the server does not know every other client in round 2"
    )
    for t, cohort in enumerate(cohorts, start=1):
        reference.round(t, cohort)
        assert ran.outcome.rows[t - 1]["local_loss"] == pytest.approx(reference.loss, rel=1e-10)
    hand.same(ran.outcome.params, reference.w)
    np.testing.assert_allclose(ran.state(name)["delta"], reference.rows(), rtol=1e-10)
    for k, v in reference.v.items() if reference.o["opt_state"] == "persist" else ():
        hand.same(hand.row(ran.memory(name)["optimizer"]["v"], k), v)
    assert reference.rows().any(axis=0).all(), "no hidden neuron is dead"


@pytest.mark.parametrize("name", BOTH)
def test_every_option_changes_the_outcome(name: str) -> None:
    """A reference that ignored an option would agree with code that does."""
    outcomes = [
        hand.run(of, {of: {"lam": LAM} | options}, **PARTIAL).outcome.params["fc1.weight"]
        for of, options in OPTIONS
        if of in (name, f"{name}_authors")
    ]
    for one, other in combinations(outcomes, 2):
        assert not torch.allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_the_authors_variant_with_the_papers_readings_is_the_paper(name: str, engine: str) -> None:
    """To the bit."""
    paper = hand.run(name, {name: {"lam": LAM}}, engine=engine, **PARTIAL)
    authors = f"{name}_authors"
    ran = hand.run(authors, {authors: {"lam": LAM} | read(authors)}, engine=engine, **PARTIAL)
    assert hand.identical(ran, paper)
    assert torch.equal(ran.state(authors)["delta"], paper.state(name)["delta"])
    for mine, theirs in zip(ran.outcome.rows, paper.outcome.rows, strict=True):
        columns = [key for key in theirs if key.startswith(f"{name}_")]
        assert len(columns) == 3
        assert [mine[key.replace(name, authors, 1)] for key in columns] == [
            theirs[key] for key in columns
        ]


def test_the_exchanges_of_rfedavg() -> None:
    """delta_0 before round 1 by everybody, then one exchange a round: delta goes up with the
    model."""
    ran = hand.run("rfedavg", cohort=2)
    assert [job for job, _ in ran.jobs()] == ["rfedavg.map", "train", "train"]
    assert ran.jobs()[0][1] == EVERYBODY


def test_the_exchanges_of_rfedavg_plus() -> None:
    """Lines 13-16: the cohort maps its data with the model that the server has just averaged."""
    ran = hand.run("rfedavg_plus", cohort=2)
    assert [job for job, _ in ran.jobs()] == [
        "rfedavg_plus.map",
        "train",
        "rfedavg_plus.map",
        "train",
        "rfedavg_plus.map",
    ]
    (train, _), (mapped, _) = ran.exchanges[3:]
    assert mapped.to == train.to
    assert all(torch.equal(mapped.params[key], ran.outcome.params[key]) for key in mapped.params)


@pytest.mark.parametrize(
    ("name", "options", "numbers"),
    [
        ("rfedavg", {}, 3 * 2),  # N - 1 vectors of d
        ("rfedavg_authors", {}, 2 * 2),  # M - 1
        (
            "rfedavg_authors",
            {"delta_scope": "known", "warmup": "none"},
            3 * 2 + 3,
        ),  # and which are known
        ("rfedavg_plus", {}, 2),
        ("rfedavg_plus_authors", {}, 2),
        ("rfedavg_plus_authors", {"warmup": "none"}, 2 + 1),
    ],
    ids=str,
)
def test_what_a_client_is_sent(name: str, options: dict[str, object], numbers: int) -> None:
    """N = 4, M = 3, d = 2."""
    (component,) = registry.build(name, {name: options}, Setting(4, 3)).components
    state = {"delta": torch.zeros(4, 2)} | (
        {"known": torch.zeros(4)} if "warmup" in options else {}
    )
    state |= {"sum": integers(state["delta"], 4)}
    sent = component.message(server(state, (0, 1, 3)))
    assert sum(leaf[0].numel() for leaf in sent.values()) == numbers
    assert all(leaf.shape[0] == 3 for leaf in sent.values())


def server(state: dict[str, torch.Tensor], cohort: tuple[int, ...]) -> Server:
    return Server(
        Task(hand.given(), SGD(0.1)), {}, {}, 1, len(state["delta"]), state=state, cohort=cohort
    )


@pytest.mark.parametrize(
    ("name", "warmup"),
    [*((name, "delta0") for name in (*BOTH, *AUTHORS)), *((name, "none") for name in AUTHORS)],
)
def test_what_is_recorded(name: str, warmup: str, engine: str) -> None:
    """Eq.

    2's distances of the cohort, the mean of their r, the median norm of their known delta, and 8
    bytes a number.

    rFedAvg: of the delta that the round brought; rFedAvg+: of those that it used, as the next map
    comes later.
    """
    options = read(name, warmup=warmup) if name in AUTHORS else {}
    ran = hand.run(name, {name: {"lam": LAM} | options}, engine=engine, cohort=2, rounds=3)
    reference = Reference(name, ran, **options)
    for t in (1, 2, 3):
        cohort, row = draw_cohort(0, t, 3, 2), ran.outcome.rows[t - 1]
        before = reference.table
        reference.round(t, cohort)
        after = reference.table
        if reference.plus:
            reference.table = before
        table = reference.table
        mmd = [
            [
                np.sqrt(((table[i] - table[j]) ** 2).sum()) if {i, j} <= table.keys() else np.nan
                for j in cohort
            ]
            for i in cohort
        ]
        np.testing.assert_allclose(
            ran.outcome.tensors[f"{name}/mmd"][t - 1], mmd, rtol=1e-9, atol=1e-12
        )
        found = [reference.regulariser(table[k], k, cohort)[0] for k in cohort if k in table]
        norms = [np.sqrt((table[k] ** 2).sum()) for k in cohort if k in table]
        for column, wanted in (
            ("r", np.mean(found) if found else np.nan),
            ("delta_norm_median", _median(norms)),
        ):
            assert row[f"{name}_{column}"] == pytest.approx(wanted, rel=1e-9, nan_ok=True)
        masked = (1 if reference.plus else 2) if warmup == "none" else 0
        assert row[f"{name}_delta_bytes"] == 8 * ((2 if reference.plus else 2 * 2) + masked)
        reference.table = after


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else float("nan")
