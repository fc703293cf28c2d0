"""pow-d and rpow-d (Cho et al. 2020), and Oort (Lai et al. 2021), against arithmetic by hand."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.contract import silos
from fedml_noniid.core.component import Server
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.plan import Clock
from fedml_noniid.engines.schedule import SECOND, Devices, Waits
from fedml_noniid.governance import study
from fedml_noniid.plugins.baselines.oort import Oort
from tests import federation
from tests.methods import by_hand as hand
from tests.recipe_table import CHOOSING, settings

CLIENTS = [np.array(rows) for rows in ([0], [1, 2], [3], [4, 5], [0, 2, 4])]  # samples are shared
N, M, ROUNDS = len(CLIENTS), 2, 6


def run(name: str, engine: str, **options: Any) -> hand.Ran:
    how: dict[str, Any] = {"engine": engine, "cohort": M, "rounds": ROUNDS, "seed": 1}
    return hand.run(name, {name: options}, of=hand.federation(CLIENTS), **how)


def trainings(ran: hand.Ran) -> list[tuple[hand.Tree, tuple[int, ...]]]:
    """(w_t by hand, clients that train) of each round; compares the run's models with these."""
    asks = [ask for ask, _ in ran.exchanges if ask.job == "train"]
    models, w = [], hand.W0
    for t, ask in enumerate(asks, 1):
        hand.same(ask.params, w, 1e-9)
        ends = [hand.descend(w, ran.batches(k, t)) for k in ask.to]
        models.append((w, ask.to))
        w = hand.average(hand.shares(ask.to, [len(rows) for rows in CLIENTS]), ends)
    hand.same(ran.outcome.params, w, 1e-9)
    return models


def losses(w: hand.Tree, k: int) -> hand.Array:
    """The cross-entropy of each of a client's samples."""
    x, y = hand.X[CLIENTS[k]], hand.Y[CLIENTS[k]]
    return np.array([hand.loss(w, x[[i]], y[[i]]) for i in range(len(y))])


def test_powd_trains_the_candidates_with_the_highest_losses(engine: str) -> None:
    ran, others = run("powd", engine, d=4), set[int]()
    assert [job for job, _ in ran.jobs()] == ["powd.loss", "train"] * ROUNDS
    rounds = [*enumerate(trainings(ran), 1)]
    for t, (w, clients) in rounds:
        drawn, (_, candidates) = set(draw_cohort(1, t, N, M)), ran.jobs()[2 * t - 2]
        assert drawn < set(candidates) and len(candidates) == 4
        by_loss = sorted(candidates, key=lambda k: -losses(w, k).mean())
        assert clients == tuple(sorted(by_loss[:M]))
        others |= set(candidates) - drawn
    assert others == {*range(N)}, "the further candidates are drawn anew in each round"
    assert any(clients != draw_cohort(1, t, N, M) for t, (_, clients) in rounds)


def test_rpowd_goes_by_the_mean_loss_of_the_last_training(engine: str) -> None:
    """All are candidates, so no draw decides once each has trained."""
    ran, known = run("rpowd", engine, d=N), dict[int, float]()
    assert {job for job, _ in ran.jobs()} == {"train"}
    for t, (w, clients) in enumerate(trainings(ran), 1):
        new = {*range(N)} - known.keys()
        by_loss = sorted(known, key=lambda k: -known[k])
        wanted = {*by_loss[: max(0, M - len(new))]}
        assert len({*clients} & new) == min(M, len(new)) and {*clients} - new == wanted
        if t == 1:
            assert clients == draw_cohort(1, 1, N, M)
        for k in clients:
            ways = [hand.descend(w, ran.batches(k, t)[:s]) for s in range(2)]
            steps = zip(ways, ran.batches(k, t), strict=True)
            known[k] = np.mean([hand.loss(v, hand.X[b], hand.Y[b]) for v, b in steps])
    state = ran.state("rpowd")["F"].tolist()
    assert state == pytest.approx([known[k] for k in range(N)], rel=1e-9)


def test_oort_keeps_the_utility_and_the_round_of_the_last_training(engine: str) -> None:
    """|B| sqrt(1 / |B| sum of squared losses) at the received model."""
    ran, u, last = run("oort", engine), [0.0] * N, [0] * N
    for t, (w, clients) in enumerate(trainings(ran), 1):
        new = N - sum(map(bool, last))
        explored = min(new, max(round(max(0.2, 0.9 * 0.98 ** (t - 1)) * M), M - (N - new)))
        assert sum(not last[k] for k in clients) == explored and len(clients) == M
        for k in clients:
            u[k], last[k] = len(CLIENTS[k]) * math.sqrt((losses(w, k) ** 2).mean()), t
    assert ran.state("oort")["U"].tolist() == pytest.approx(u, rel=1e-9)
    assert ran.state("oort")["L"].tolist() == last and all(last)


def server(u: list[float], last: list[float], key: int = 0, **more: Any) -> Server:
    state = {"U": torch.tensor(u).double(), "L": torch.tensor(last).double()}
    task, n = Task(hand.given(), SGD(0.1)), len(u)
    return Server(task, {}, {}, 9, n, state=state, keys=torch.tensor(key), **more)


def test_oorts_utility_has_a_bonus_for_the_long_unseen_and_a_factor_for_the_slow() -> None:
    """T is 3 s, the time of rank int(0.3 x 4); (3 / 6)^2 = 1 / 4 and (3 / 4)^2 = 9 / 16."""
    at = server([5.0, 5.0, 7.0, 8.0], [2.0, 8.0, 8.0, 8.0], durations=(2.0, 3.0, 4.0, 6.0))
    bonus = [math.sqrt(0.1 * math.log(9) / last) for last in (2, 8)]
    sums = [5 + bonus[0], 5 + bonus[1], 7 + bonus[1], 8 + bonus[1]]
    wanted = [sums[0], sums[1], sums[2] * 9 / 16, sums[3] / 4]
    assert Oort().utilities(at, [0, 1, 2, 3]) == pytest.approx(dict(enumerate(wanted)))
    alike = Oort(alpha=0.0).utilities(at, [0, 1, 2, 3])
    assert alike == pytest.approx(dict(enumerate(sums)))
    assert Oort().utilities(server([5.0, 5.0], [2.0, 8.0]), [0, 1]) == pytest.approx(
        dict(enumerate(sums[:2]))
    ), "without devices nobody is slow"


def test_oort_draws_by_utility_above_the_cut_off() -> None:
    """Of 3 known clients with one to choose, the last one's utility is below 95 % of the largest;
    the other two are drawn in proportion to theirs, 1 : 0.96."""
    n = 1000
    cohorts = [
        Oort().choose(server([100.0, 96.0, 94.0], [1e9] * 3, key=key, cohort=(0,)))
        for key in range(n)
    ]
    counts = Counter(cohorts)
    assert counts.keys() == {(0,), (1,)}
    share, deviation = 100 / 196, math.sqrt(100 * 96) / 196 / math.sqrt(n)
    assert abs(counts[0,] / n - share) < 4 * deviation


@pytest.mark.parametrize("recipe", CHOOSING)
def test_where_all_take_part_it_is_fedavg_to_the_bit(recipe: str, engine: str) -> None:
    how: dict[str, Any] = {"engine": engine, "cohort": len(federation.SIZES), "batch_norm": True}
    made = federation.simulation(recipe, **how)
    assert federation.equal_models(made.run(), federation.run("fedavg", **how))
    assert made.remarks == {
        "no_effect": f"all clients take part in each round, so {recipe} has none to choose"
    }
    assert federation.simulation(recipe).remarks["cohorts"].startswith(f"{recipe} chooses")


@pytest.mark.parametrize("recipe", CHOOSING)
def test_what_the_clock_shows(recipe: str) -> None:
    """Client k takes k + 1 microseconds for a step: a round waits for the slowest that trains, and
    for a pass of the slowest candidate."""
    n = len(federation.SIZES)
    devices = Devices(tuple(range(1, n + 1)), (0,) * n, (0,) * n)
    how: dict[str, Any] = {"clock": Clock(devices, Waits()), "rounds": 4}
    made = federation.simulation(recipe, settings(recipe), **how)
    exchanges, out = hand.tapped(made), made.run()
    now, ends = 0, []
    for ask, _ in exchanges:
        passes = {k: -(-federation.SIZES[k] // 4) for k in ask.to}
        counts = {"train": 2 + (recipe == "oort"), "loss": 1}[ask.job]  # two epochs
        now += max(counts * passes[k] * (k + 1) for k in ask.to)
        ends += [now / SECOND] if ask.job == "train" else []
    assert [row["clock_s"] for row in out.rows] == ends


SIX = Devices((1,) * 6, (0,) * 6, (0,) * 6)
REFUSED = [
    ("powd", Clock(SIX, Waits(deadline=9)), "nobody knows before it who is late"),
    ("oort", Clock(replace(SIX, dropout=0.1), Waits()), "without dropout"),
    ("oort", Clock(SIX, Waits(), 9), "and no until_s"),
]


@pytest.mark.parametrize(("recipe", "clock", "words"), REFUSED)
def test_a_schedule_that_nobody_could_know_is_refused(
    recipe: str, clock: Clock, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        federation.simulation(recipe, clock=clock)


@pytest.mark.parametrize("recipe", CHOOSING)
def test_the_server_of_silos_chooses_as_a_simulation_does(recipe: str) -> None:
    """Where some of three silos train; a silo can't know its last round then."""
    given = {recipe: {"d": 3}} if recipe != "oort" else {}
    agreed, server = silos.terms(recipe, given, cohort=2, rounds=5), silos.shards_of()[0]
    deployed = silos.talk(ServerRun(agreed, server), silos.silos_of(agreed))
    expected = silos.simulated(recipe, given, False, cohort=2, rounds=5)
    assert silos.digest(deployed) == silos.digest(expected)
    drawn = silos.simulated("fedavg", {}, False, cohort=2, rounds=5)
    assert silos.digest(expected) != silos.digest(drawn)
    made = silos.deployment(recipe, given, cohort=2)
    signed = study.make(made, server, "of silos", datetime.date(2030, 1, 1))
    assert signed.may_end_early and signed.last_round(0) == 0
