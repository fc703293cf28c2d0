"""Kills processes of cross-silo runs and compares the final weights, the audit logs and what was
spent of the privacy: `python -m benchmarks chaos`.

Every run has a signed study, a policy and audit logs, as all deployments have. A process gets
SIGKILL at a random time, or ends itself so at one of the `moments`, and is started again. Part 1,
quorum = all: a run must end with the weights of the simulation, which nobody disturbs; a run of
`dpsgd` with the weights and the ledgers of a deployment with the same secrets that nobody disturbs.
Part 2, quorum = 2 of 3: a silo is killed or stopped for a while, sometimes the server is killed;
the weights must be those of a simulation with the same absences. After each run the audit logs are
verified against each other, and a silo's answers are computed again from what it has kept.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks import moments, report
from benchmarks.machine import Watch
from fedml_noniid.core.errors import UserError
from fedml_noniid.data import datasets, partitions, splits
from fedml_noniid.data.client_tests import client_tests
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import results, settings
from fedml_noniid.engines import absences
from fedml_noniid.governance import audit
from fedml_noniid.pipelines.experiment.provenance import git_commit
from fedml_noniid.privacy.ledger import Ledger
from fedml_noniid.processes import loopback

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
SUMMED = ("fedavg", "scaffold", "feddyn", "feddc", "fednlr", "moon")  # under secure sums, too
PRIVATE = "dpsgd"
SILOS, ROUNDS, KILLS, LEAST = 3, 8, 4, 2  # LEAST silos of a secure sum
PUBLIC = 100  # samples of the public split
DEADLINE_S, SLACK_S = 3.0, 2.0  # of a round in part 2; beyond that it counts as late
LIMIT_S = 300.0  # of a run
ENDING_S = 5.0  # for the silos to end behind the server
DELTA = 1e-5  # of the epsilon that is written down
AGAIN = (3, 5)  # exit codes after which systemd starts a process again
AT_RANDOM = "at a random time"
KILL, STOP, ENDED = "SIGKILL", "SIGSTOP", "exit"
FILE = "chaos.csv"


class Deployed(NamedTuple):
    """What is deployed in a run."""

    recipe: str
    secure_sums: int = 0


# Runs of part 1, over and over.
TURNS = (
    *map(Deployed, RECIPES),
    *(Deployed(recipe, LEAST) for recipe in SUMMED),
    *[Deployed(PRIVATE)] * 2,
)


class Planned(NamedTuple):
    """A disturbance. At a random time: after `number` rounds and `pause` s; otherwise at the
    `number`-th occurrence of the moment in a process. It is undone after `until` s."""

    number: int
    pause: float
    event: str
    rank: int
    until: float
    moment: str = AT_RANDOM


class Event(NamedTuple):
    """What has happened to a process."""

    event: str
    rank: int
    moment: str
    round: int


@dataclass
class Ran:
    """What happened in one run."""

    part: int
    run: int
    deployed: Deployed
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0
    longest: float = 0.0  # seconds of the longest round
    absent: int = 0  # answers that were missing
    audit_lines: int = 0  # of all logs, verified
    replayed: int = 0  # answers that were computed again
    epsilon: str = ""  # spent by the silo that has spent the most, and undisturbed
    error: str = ""

    def rows(self, commit: str) -> list[dict[str, Any]]:
        """A line per event."""
        whole = {
            "part": self.part,
            "run": self.run,
            "recipe": self.deployed.recipe,
            "secure_sums": self.deployed.secure_sums,
        }
        end = {key: getattr(self, key) for key in ("audit_lines", "replayed", "epsilon", "absent")}
        end |= {"longest_s": f"{self.longest:.2f}", "seconds": f"{self.seconds:.1f}"}
        end |= {"outcome": self.error or "ok", "commit": commit}
        events = self.events or [Event("none", 0, "", 0)]
        return [whole | event._asdict() | end for event in events]


def deployment(recipe: str, seed: int, secure_sums: int = 0, **comm: object) -> settings.Deployment:
    """Three silos, eight rounds, a small network."""
    norms = recipe != PRIVATE
    content = {
        "common_args": {"random_seed": seed},
        "model_args": {"model": "mlp", "model_options": {"hidden": 16, "batch_norm": norms}},
        "train_args": {
            "recipe": recipe,
            "rounds": ROUNDS,
            "client_num_in_total": SILOS,
            "client_num_per_round": SILOS,
            "secure_sums": secure_sums,
        },
        "comm_args": comm,
    }
    return settings.check(content, "chaos")


def parts(seed: int, silos: int = SILOS, skew: str = "dirichlet", **options: Any) -> Parts:
    """The digits, cut by a partition; by default, a Dirichlet distribution with alpha = 0.5."""
    options = options or ({"alpha": 0.5} if skew == "dirichlet" else {})
    data = datasets.load("digits", Path("data/raw"))
    labels = data.train_y.numpy()
    split = splits.hold_out(labels, 0.1, PUBLIC, seed)
    named = skew, labels, split.train, silos, seed, data.train_owner, "digits"
    clients = partitions.partition(*named, **options)
    tests = client_tests(data, clients, skew, seed)
    return Parts.cut(data, Indices(clients, split.validation, split.public, tests))


def rounds_done(processes: loopback.Processes) -> list[float]:
    """The seconds of the rounds that are over."""
    try:
        with (processes.output / results.ROUNDS).open(newline="") as file:
            return [float(row["seconds"]) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


class Disturbed:
    """The processes of a run, which are killed as planned and started again."""

    def __init__(self, processes: loopback.Processes, plan: Sequence[Planned]) -> None:
        self.processes, self.events = processes, list[Event]()
        self._timed = sorted(event for event in plan if event.moment == AT_RANDOM)
        self._own = {
            rank: [event for event in plan if event.moment != AT_RANDOM and event.rank == rank]
            for rank in range(SILOS + 1)
        }

    def run(self) -> None:
        """Returns at the end, when all have ended. Raises UserError if a process fails by itself,
        or the run takes too long."""
        running, end = self.processes.running, time.monotonic() + LIMIT_S
        for rank in range(SILOS + 1):
            self._start(rank)
        while running[0].exitcode != 0:
            if time.monotonic() > end:
                raise UserError(f"not over after {LIMIT_S:.0f} s ({self.events})")
            for rank in running:
                self._restart(rank)
            if self._timed and len(rounds_done(self.processes)) >= self._timed[0].number:
                self._disturb(self._timed.pop(0))
            time.sleep(0.01)
        for rank in range(1, SILOS + 1):
            running[rank].join(ENDING_S)
            if running[rank].exitcode == -signal.SIGKILL:
                self._note(KILL, rank, self._own[rank].pop(0).moment)
            elif running[rank].exitcode:
                self._fail()
            self.processes.kill(rank)  # it was started when the run was over

    def _start(self, rank: int) -> None:
        if self._own[rank]:
            event = self._own[rank][0]
            path = self.processes.output / moments.FILE.format(rank)
            write_whole(path, f"{event.moment}:{event.number}")
        self.processes.start(rank)

    def _restart(self, rank: int) -> None:
        """Starts a process again that has ended, as systemd does."""
        code = self.processes.running[rank].exitcode
        if code == -signal.SIGKILL and self._own[rank]:
            event = self._own[rank].pop(0)
            self._note(KILL, rank, event.moment)
            time.sleep(event.until)
        elif code in AGAIN:
            self._note(ENDED, rank, f"code {code}")
        elif code:
            self._fail()
        if code:
            self._start(rank)

    def _disturb(self, event: Planned) -> None:
        time.sleep(event.pause)
        process = self.processes.running[event.rank]
        if process.exitcode is not None or self.processes.running[0].exitcode == 0:
            return
        self._note(event.event, event.rank, AT_RANDOM)
        if event.event == KILL:
            self.processes.kill(event.rank)
            time.sleep(event.until)
            self._start(event.rank)
            return
        assert process.pid is not None, "it has been started"
        with contextlib.suppress(ProcessLookupError):  # the run may have just ended
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(event.until)
            os.kill(process.pid, signal.SIGCONT)

    def _note(self, event: str, rank: int, moment: str) -> None:
        done = min(ROUNDS, len(rounds_done(self.processes)) + 1)
        self.events.append(Event(event, rank, moment, done))

    def _fail(self) -> None:
        codes = [self.processes.running[rank].exitcode for rank in range(SILOS + 1)]
        raise UserError(f"{loopback.failure(codes, self.processes.output)} ({self.events})")


def all_must_answer(seed: int, kills: int, folder: Path) -> Ran:
    """Part 1, one run."""
    rng, ran = random.Random(seed), Ran(1, seed, TURNS[seed % len(TURNS)])
    plan = [_planned(rng, ran.deployed) for _ in range(kills)]
    recipe, secure_sums = ran.deployed
    terms, data = deployment(recipe, seed, secure_sums), parts(seed)
    if recipe == PRIVATE:
        return _private(ran, terms, data, plan, folder)
    return _ran(ran, terms, data, plan, folder)


def two_must_answer(seed: int, kills: int, folder: Path) -> Ran:
    """Part 2, one run."""
    rng, ran = random.Random(1000 + seed), Ran(2, seed, Deployed(RECIPES[seed % len(RECIPES)]))
    quorum: dict[str, Any] = {"quorum": SILOS - 1, "deadline_s": DEADLINE_S, "gone_s": 1.0}
    plan = []
    for _ in range(kills):
        rank = 0 if rng.random() < 0.25 else rng.randrange(1, SILOS + 1)
        event = STOP if rank and rng.random() < 0.5 else KILL
        until = rng.uniform(0, DEADLINE_S + 1)
        plan.append(Planned(rng.randrange(ROUNDS - 3), rng.uniform(0, 0.2), event, rank, until))
    terms = deployment(ran.deployed.recipe, seed, **quorum)
    return _ran(ran, terms, parts(seed), plan, folder)


def _planned(rng: random.Random, deployed: Deployed) -> Planned:
    """A kill of part 1: every second one at a random time."""
    rank, pause, until = rng.randrange(SILOS + 1), rng.uniform(0, 0.2), rng.uniform(0, 0.3)
    if rng.random() < 0.5:
        return Planned(rng.randrange(ROUNDS - 3), pause, KILL, rank, until)
    own = moments.OF_SILO if rank else moments.OF_SERVER
    there = [*moments.ANYWHERE, *own]
    if deployed.secure_sums:
        there += 5 * [*(moments.OF_SUMS_OF_SILO if rank else moments.OF_SUMS_OF_SERVER)]
    if rank and deployed.recipe == PRIVATE:
        there += 6 * [*moments.OF_LEDGER]
    moment = rng.choice(there)
    most = 12 if moment == moments.HALF_LINE else 3
    return Planned(rng.randint(1, most), pause, KILL, rank, until, moment)


def _ran(
    ran: Ran,
    terms: settings.Deployment,
    data: Parts,
    plan: Sequence[Planned],
    folder: Path,
    expected: str = "",
) -> Ran:
    """Runs once, and checks. `expected`: the SHA-256 of the weights, if not the simulation's."""
    began = time.monotonic()
    with loopback.Processes(terms, data, folder, moments.process) as processes:
        disturbed = Disturbed(processes, plan)
        try:
            disturbed.run()
            missing = absences.read(processes.output / results.ABSENT)
            ran.absent = sum(len(clients) for clients in missing.values())
            ran.longest = max(rounds_done(processes))
            if processes.digest() != (expected or loopback.simulate(terms, data, missing)):
                raise UserError("OTHER WEIGHTS")
            if not terms.comm_args.quorum and missing:
                raise UserError("an answer is missing, though all silos must answer")
            ran.audit_lines = _verified(processes)
            killed = [event.rank for event in disturbed.events if event.rank] or [1]
            ran.replayed = _replayed(processes, random.Random(ran.run).choice(killed))
        except UserError as error:
            ran.error = " ".join(str(error).split())
        ran.events = disturbed.events
    ran.seconds = time.monotonic() - began
    return ran


def _private(
    ran: Ran, terms: settings.Deployment, data: Parts, plan: Sequence[Planned], folder: Path
) -> Ran:
    """The same beside a deployment with the same secrets that nobody disturbs: the simulation's
    noise is not that of the silos."""
    with loopback.Processes(terms, data, folder, moments.process) as processes:
        Disturbed(processes, []).run()
        expected = processes.digest()
    undisturbed = _spent(folder)
    for path in (folder / "kits").glob("*.ledger*"):
        path.unlink()  # the keys of the noise stay
    _ran(ran, terms, data, plan, folder, expected)
    killed = _spent(folder)
    most = max(killed, key=lambda rank: killed[rank][1])
    ran.epsilon = f"{killed[most][1]:.4f} of {undisturbed[most][1]:.4f}"
    if killed != undisturbed and not ran.error:
        ran.error = f"the ledgers differ: epsilon {ran.epsilon}"
    return ran


def _spent(folder: Path) -> dict[int, tuple[list[str], float]]:
    """By rank: what stands in the ledger, and the epsilon."""
    spent = {}
    for rank in range(1, SILOS + 1):
        path = folder / "kits" / f"{rank}.ledger"
        ledger = Ledger.open(path, owner=f"rank {rank}")
        spent[rank] = path.read_text().splitlines(), ledger.epsilon(DELTA)
        ledger.close()
    return spent


def _verified(processes: loopback.Processes) -> int:
    """The lines of all audit logs, once each silo's agrees with the server's. Raises UserError."""
    logs = [processes.output / audit.FILE.format(rank) for rank in range(SILOS + 1)]
    for log in logs[1:]:
        audit.verify(log, processes.deployment.kit(0) / "ca.crt", logs[0])
    return sum(len(log.read_bytes().splitlines()) for log in logs)


def _replayed(processes: loopback.Processes, rank: int) -> int:
    """How many answers of a silo a new process has computed again, with the SHA-256 in its log.
    Raises UserError."""
    write_whole(processes.output / moments.FILE.format(rank), f"{moments.REPLAY}:")
    processes.start(rank)
    processes.running[rank].join(LIMIT_S)
    said = processes.output / moments.REPLAYED.format(rank)
    lines = said.read_text().splitlines() if said.is_file() else ["no replay"]
    if wrong := [line for line in lines if moments.SAME not in line]:
        raise UserError(f"replay of rank {rank}: {wrong[0]}")
    return len(lines)


def summary(table: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the page from the lines of chaos.csv."""
    runs = table.drop_duplicates(["part", "run"])
    longest = runs.loc[runs["part"] == 2, "longest_s"]
    ok, ends = table["outcome"] == "ok", runs["outcome"] == "ok"
    killed = table[table["event"] == KILL].assign(ok=ok, of=table["rank"].gt(0))
    by_moment = killed.groupby("moment").agg(
        silos=("of", "sum"),
        servers=("of", lambda column: int((~column).sum())),
        ended=("ok", "sum"),
    )
    by_recipe = (
        runs.assign(ok=ends)
        .groupby(["part", "recipe", "secure_sums"], sort=False)
        .agg(runs=("run", "size"), ok=("ok", "sum"), longest=("longest_s", "max"))
    )
    return {
        "runs": {part: len(group) for part, group in runs.groupby("part")},
        "good": {
            part: int(group.eq("ok").sum()) for part, group in runs.groupby("part")["outcome"]
        },
        "silos_killed": int(killed["of"].sum()),
        "servers": int((~killed["of"]).sum()),
        "stopped": int(table["event"].eq(STOP).sum()),
        "ended": int(table["event"].eq(ENDED).sum()),
        "absent": int(runs["absent"].sum()),
        "longest": longest.max(),
        "lines": int(runs["audit_lines"].sum()),
        "replayed": int(runs["replayed"].sum()),
        "secure": int(runs["secure_sums"].gt(0).sum()),
        "private": runs[runs["recipe"] == PRIVATE].to_dict("records"),
        "wrong": runs[~ends].to_dict("records"),
        "moments": by_moment.reset_index().to_dict("records"),
        "recipes": by_recipe.reset_index().to_dict("records"),
    }


def chaos(
    count: Mapping[int, int], kills: int, first: int, work: Path, say: Callable[[str], object]
) -> pd.DataFrame:
    """Runs what chaos.csv in the folder `work` lacks. Returns all its lines, one per event.

    `count`: how many runs of part 1 and 2. `kills`: events per run. `first`: seed of the first run.
    `say` gets a line per run.
    """
    path, commit, rows = work / FILE, git_commit(), list[dict[str, Any]]()
    if path.is_file():
        kept = pd.read_csv(path, keep_default_na=False)
        rows = kept[kept["commit"] == commit].to_dict("records")
    done = {(row["part"], row["run"]) for row in rows}
    for part, run in ((1, all_must_answer), (2, two_must_answer)):
        for seed in range(first, first + count[part]):
            if (part, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                ran = run(seed, kills, Path(folder) / "run")
            rows += ran.rows(commit)
            write_whole(path, pd.DataFrame(rows).to_csv(index=False))
            what = "; ".join(f"{event.event} {event.rank} {event.moment}" for event in ran.events)
            say(f"part {part}, run {seed}: {ran.error or 'ok'}, {ran.seconds:.1f} s, {what}")
    return pd.read_csv(io.StringIO(pd.DataFrame(rows).to_csv(index=False)), keep_default_na=False)


def write(table: pd.DataFrame, watch: Watch) -> None:
    """Writes chaos.csv and chaos.md into docs/results."""
    context = {
        "machine": watch.line(),
        "silos": SILOS,
        "delta": f"{DELTA:g}",
        "deadline": DEADLINE_S,
        "slack": SLACK_S,
        "rounds": ROUNDS,
        "least": LEAST,
    }
    report.write(report.RESULTS, "chaos", context | summary(table), {"chaos": table})
