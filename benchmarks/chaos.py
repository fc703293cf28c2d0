"""Kills processes of cross-silo runs at random moments and compares the final weights: `noniid
chaos`.

Part 1, quorum = all: server and silos get SIGKILL and are started again; a run must end with the
weights of the simulation, which nobody disturbs. Part 2, quorum = 2 of 3: a silo is killed or
stopped for a while, sometimes the server is killed; every round must end within its deadline and 2
s, and the weights must be those of a simulation with the same absences.
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data import datasets, partitions, splits
from fedml_noniid.plugins.data.client_tests import client_tests
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.indices import Indices
from fedml_noniid.plugins.data.shards import Parts
from fedml_noniid.plugins.engines import absences
from fedml_noniid.plugins.silo import loopback, results, settings

RECIPES = (
    "scaffold+fnr+rfedavg_plus+ccn",
    "feddyn",
    "rfedavg_plus",
    "fednlr",
    "feddc",
    "fnr",
    "moon+ccn",
    "fednnnn",
    "scaffold",
    "rfedavg",
)
SILOS, ROUNDS, KILLS = 3, 8, 4
PUBLIC = 100  # samples of the public split
DEADLINE_S, SLACK_S = 3.0, 2.0  # of a round in part 2
LIMIT_S = 120.0  # of a run


@dataclass
class Ran:
    """What happened in one run."""

    recipe: str
    seed: int
    same: bool
    seconds: float
    events: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds of the longest round
    absent: int = 0  # answers that were missing
    error: str = ""


def deployment(recipe: str, seed: int, **comm: object) -> settings.Deployment:
    """Three silos, eight rounds, a small network."""
    content = {
        "common_args": {"random_seed": seed},
        "model_args": {"model": "mlp", "model_options": {"hidden": 16, "batch_norm": True}},
        "train_args": {
            "recipe": recipe,
            "rounds": ROUNDS,
            "client_num_in_total": SILOS,
            "client_num_per_round": SILOS,
        },
        "comm_args": comm,
    }
    return settings.check(content, "chaos")


def parts(seed: int) -> Parts:
    """The digits, cut by a Dirichlet distribution."""
    data = datasets.load("digits", Path("data/raw"))
    split = splits.hold_out(data.train_y.numpy(), 0.1, PUBLIC, seed)
    clients = partitions.partition(
        "dirichlet",
        data.train_y.numpy(),
        split.train,
        SILOS,
        seed,
        data.train_owner,
        "digits",
        alpha=0.5,
    )
    tests = client_tests(data, clients, "dirichlet", seed)
    return Parts.cut(data, Indices(clients, split.validation, split.public, tests))


def rounds_done(processes: loopback.Processes) -> list[float]:
    """The seconds of the rounds that are over."""
    try:
        with (processes.output / results.ROUNDS).open(newline="") as file:
            return [float(row["seconds"]) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


def disturbed(
    processes: loopback.Processes, plan: Sequence[tuple[int, float, str, int, float]]
) -> list[str]:
    """Runs to the end with the events of `plan`: (after how many rounds, s later, event, rank, s
    until it is undone).

    Raises UserError if a process fails by itself, or the run takes too long.
    """
    for rank in range(SILOS + 1):
        processes.start(rank)
    end, left, events = time.monotonic() + LIMIT_S, sorted(plan), []
    while processes.running[0].exitcode is None:
        if time.monotonic() > end:
            raise UserError(f"not over after {LIMIT_S:.0f} s")
        if left and len(rounds_done(processes)) >= left[0][0]:
            _, pause, event, rank, until = left.pop(0)
            time.sleep(pause)
            if processes.running[0].exitcode is not None:
                break
            events.append(
                f"{event} {loopback.name(rank)} in round {len(rounds_done(processes)) + 1}"
            )
            if event == "SIGKILL":
                processes.kill(rank)
                time.sleep(until)
                processes.start(rank)
            else:
                pid = processes.running[rank].pid
                assert pid is not None, "it has been started"
                with contextlib.suppress(ProcessLookupError):  # the run may have just ended
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(until)
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    codes = [processes.running[rank].exitcode for rank in range(SILOS + 1)]
    if any(codes):
        raise UserError(f"{loopback.failure(codes, processes.output)} ({'; '.join(events)})")
    return events


def all_must_answer(seed: int, kills: int, folder: Path) -> Ran:
    """Part 1, one run."""
    rng, recipe = random.Random(seed), RECIPES[seed % len(RECIPES)]
    data, began = parts(seed), time.monotonic()
    terms = deployment(recipe, seed)
    plan = [
        (
            rng.randrange(ROUNDS - 3),
            rng.uniform(0, 0.2),
            "SIGKILL",
            rng.randrange(SILOS + 1),
            rng.uniform(0, 0.3),
        )
        for _ in range(kills)
    ]
    return _ran(Ran(recipe, seed, False, 0.0), terms, data, plan, folder, began)


def two_must_answer(seed: int, kills: int, folder: Path) -> Ran:
    """Part 2, one run."""
    rng, recipe = random.Random(1000 + seed), RECIPES[seed % len(RECIPES)]
    data, began = parts(seed), time.monotonic()
    terms = deployment(recipe, seed, quorum=SILOS - 1, deadline_s=DEADLINE_S, gone_s=1.0)
    plan = []
    for _ in range(kills):
        rank = 0 if rng.random() < 0.25 else rng.randrange(1, SILOS + 1)
        event = "SIGSTOP" if rank and rng.random() < 0.5 else "SIGKILL"
        plan.append(
            (
                rng.randrange(ROUNDS - 3),
                rng.uniform(0, 0.2),
                event,
                rank,
                rng.uniform(0, DEADLINE_S + 1),
            )
        )
    return _ran(Ran(recipe, seed, False, 0.0), terms, data, plan, folder, began)


def _ran(
    ran: Ran,
    terms: settings.Deployment,
    data: Parts,
    plan: Sequence[tuple[int, float, str, int, float]],
    folder: Path,
    began: float,
) -> Ran:
    try:
        with loopback.Processes(terms, data, folder) as processes:
            ran.events = disturbed(processes, plan)
            missing = absences.read(processes.output / results.ABSENT)
            ran.absent = sum(len(clients) for clients in missing.values())
            ran.longest = max(rounds_done(processes))
            ran.same = processes.digest() == loopback.simulate(terms, data, missing)
        if not terms.comm_args.quorum and missing:
            ran.error = "an answer is missing, though all silos must answer"
        if terms.comm_args.quorum and ran.longest > DEADLINE_S + SLACK_S:
            ran.error = f"a round took {ran.longest:.1f} s"
    except UserError as error:
        ran.error = str(error)
    ran.seconds = time.monotonic() - began
    return ran


def good(part: Sequence[Ran]) -> int:
    """How many runs ended as they must."""
    return sum(ran.same and not ran.error for ran in part)


def chaos(
    runs: int,
    quorum_runs: int,
    kills: int,
    first: int,
    to: Path | None,
    say: Callable[[str], object],
) -> bool:
    """Runs both parts; returns whether all runs ended as they must.

    `say` gets a line per run and the summary.

    `runs`, `quorum_runs`: of part 1 and 2. `kills`: events per run. `first`: seed of the first run.
    `to`: the page that is written, None for none.
    """
    began, watch = time.monotonic(), machine.Watch()
    found: list[list[Ran]] = []
    with tempfile.TemporaryDirectory() as folder:
        for one, count in ((all_must_answer, runs), (two_must_answer, quorum_runs)):
            part: list[Ran] = []
            found.append(part)
            for seed in range(first, first + count):
                ran = one(seed, kills, Path(folder))
                part.append(ran)
                ended = "ok" if ran.same and not ran.error else "WRONG"
                said = f"{ran.seconds:.1f} s, {ran.recipe}: {'; '.join(ran.events)} {ran.error}"
                say(f"{one.__name__} {seed}: {ended}, {said}")
    one_part, two_part = found
    minutes = (time.monotonic() - began) / 60
    summary = (
        f"{good(one_part)} of {len(one_part)} runs, with "
        f"{sum(len(ran.events) for ran in one_part)} SIGKILLs together, "
        f"ended with the undisturbed weights. {good(two_part)} of {len(two_part)} runs with a "
        f"quorum of {SILOS - 1} "
        f"ended every round within {DEADLINE_S:.0f} + {SLACK_S:.0f} s, with the weights of a "
        "simulation with the same "
        "absences."
    )
    say(f"{summary} {minutes:.1f} min")
    if to is not None:
        context = {
            "machine": machine.line(watch.found()),
            "summary": summary,
            "parts": {
                f"All {SILOS} must answer": one_part,
                f"{SILOS - 1} must answer": two_part,
            },
        }
        write_whole(to, render("chaos.md.j2", context))
    return all(good(part) == len(part) for part in found)
