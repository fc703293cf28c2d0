"""One silo of a deployment sends far too much: `python -m benchmarks poison`.

Processes are those of `noniid deploy`. The silo's answers are replaced just before they leave, so
it has a good certificate, seals its messages and says what is expected of it, but for the numbers.
A run ends well if the server names this silo and no other one, goes on to the last round, and, if
no round was lost, ends with the weights of a simulation in which the same silos were absent.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from benchmarks import chaos, report
from benchmarks.machine import Watch
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.data import shards
from fedml_noniid.data.files import write_whole
from fedml_noniid.deploy import results, settings, silo_client, wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.silo import Silo
from fedml_noniid.engines import absences
from fedml_noniid.governance.secure.silo import SUM
from fedml_noniid.plugins import registry
from fedml_noniid.processes import launch, loopback

FILE = "lie.json"  # beside the configuration
RUNS, ROUNDS, LIMIT_S = 20, 6, 300.0
SKEWS: dict[str, dict[str, Any]] = {
    "dirichlet": {"alpha": 0.1},
    "quantity": {"beta": 0.3, "min_size": 2},
    "iid_unbalanced": {},
}
HONEST_SILOS = (3, 9)
RECIPES = ("fedavg", "scaffold", "feddyn", "fednlr")
# (silos, quorum, least silos of a sum)
FEDERATIONS = ((3, 2, 2), (5, 3, 2), (9, 5, 3))
PLAIN, MASKED = (1e2, 1e4, 1e5, 1e6, 1e8), (2**54, 2**56, 2**58, 2**60, 2**61)


class Lie(NamedTuple):
    """What a silo sends from a round on. `added`: to its masked vector; otherwise in its place."""

    client: int
    since: int
    size: float
    added: bool

    def applied(self, leaves: Params) -> Params:
        """The tensors of an answer, as they leave."""
        return {
            key: self._changed(key, leaf)
            if key == SUM or key.startswith(("deltas/", "upload/"))
            else leaf
            for key, leaf in leaves.items()
        }

    def _changed(self, key: str, leaf: Tensor) -> Tensor:
        if key == SUM and self.added:
            return leaf + int(self.size)
        return torch.full_like(leaf, int(self.size) if key == SUM else self.size)


def process(rank: int, config: str, output: str) -> None:
    """The main function of a process; one silo lies."""
    lie = Lie(*json.loads(Path(config).with_name(FILE).read_text()))
    if rank == lie.client + 1:
        serve: Callable[..., None] = silo_client.SiloClient.serve

        def lying(self: silo_client.SiloClient, answered: Callable[[wire.Down], wire.Up]) -> None:
            def lying_answer(down: wire.Down) -> wire.Up:
                up = answered(down)
                return up if down.round < lie.since else up | {"leaves": lie.applied(up["leaves"])}

            serve(self, lying_answer)

        silo_client.SiloClient.serve = lying  # type: ignore[method-assign]  # of this process alone
    loopback.process(rank, config, output)


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One run, as a line of poison.csv."""
    rng = random.Random(seed)
    silos, quorum, least = FEDERATIONS[seed % len(FEDERATIONS)]
    masked = seed % 2 == 1
    size = (MASKED if masked else PLAIN)[seed % 5]
    lie = Lie(rng.randrange(silos), rng.randint(1, ROUNDS), size, rng.random() < 0.7)
    restarted = rng.random() < 0.5
    recipe = rng.choice(RECIPES)
    content = chaos.deployment(recipe, seed).model_dump(by_alias=True)
    content["train_args"] |= {
        "client_num_in_total": silos,
        "client_num_per_round": silos,
        "secure_sums": least if masked else 0,
        "rounds": ROUNDS,
    }
    content["comm_args"] |= {"quorum": quorum, "gone_s": 2.0}
    data = chaos.parts(seed, silos)
    ran = {
        "run": seed,
        "recipe": recipe,
        "silos": silos,
        "quorum": quorum,
        "secure_sums": least if masked else 0,
        "size": size,
        "since": lie.since,
        "how": "added" if masked and lie.added else "in its place",
        "restarted": restarted,
    }
    began = time.monotonic()
    with loopback.Processes(settings.check(content, "poison"), data, folder, process) as processes:
        write_whole(processes.config.with_name(FILE), json.dumps(lie))
        for rank in range(silos + 1):
            processes.start(rank)
        if restarted:
            while len(chaos.rounds_done(processes)) < lie.since - 1:
                time.sleep(0.01)
            processes.kill(0)
            processes.start(0)
        error = ""
        try:
            ran |= _ended(processes, data, lie)
        except UserError as failed:
            error = " ".join(str(failed).split())
    return ran | {"seconds": round(time.monotonic() - began, 1), "outcome": error or "ok"}


def _ended(processes: loopback.Processes, data: Any, lie: Lie) -> dict[str, Any]:
    """What the files say once the server has ended. Raises UserError if a run did not end well."""
    server = processes.running[0]
    server.join(LIMIT_S)
    log = launch.log_file(processes.output, 0).read_text()
    if server.exitcode != 0:
        raise UserError(f"the server ended with {server.exitcode}: {log[-300:]}")
    named = {
        client
        for client in range(processes.deployment.silos)
        if f"refused from silo-{client + 1} (outlier)" in log
        or f"refused from silo-{client + 1} (range)" in log
        or f"goes on without silo {client} (" in log
    }
    if named != {lie.client}:
        raise UserError(f"named: {sorted(named)}, the liar is {lie.client}")
    missing = absences.read(processes.output / results.ABSENT)
    lost = ROUNDS - len(chaos.rounds_done(processes))
    if not lost and processes.digest() != loopback.simulate(processes.deployment, data, missing):
        raise UserError("OTHER WEIGHTS")
    return {"lost_rounds": lost, "repeated": log.count(" is repeated, and the run goes on")}


def honest(say: Callable[[str], object]) -> pd.DataFrame:
    """By method, skew and number of silos: the largest ratio of a norm to the median's, in a run in
    which nobody lies. Methods that can't be deployed, or not with so few silos, are left out."""
    rows = []
    for (skew, options), silos in product(SKEWS.items(), HONEST_SILOS):
        data = chaos.parts(0, silos, skew, **options)
        for recipe in registry.names():
            content = chaos.deployment(recipe, 0).model_dump(by_alias=True)
            content["train_args"] |= {
                "client_num_in_total": silos,
                "client_num_per_round": silos,
                "rounds": ROUNDS,
            }
            try:
                deployed = settings.check(content, "poison")
                shape = tuple(data.train.x.shape[1:])
                network = deployed.network(shape, data.n_classes, data.embedding)
                terms = settings.terms(deployed, recipe, network, data.public)
            except UserError as error:
                say(f"{recipe}, {silos} silos: {error}")
                continue
            server, *own = shards.split(data)
            run = ServerRun(terms, server)
            silo = [Silo(terms, k, shard) for k, shard in enumerate(own)]
            largest, refused = 0.0, 0
            while (ask := run.down.ask) is not None:
                answers = {k: silo[k].answer(wire.row_of(run.down, k)) for k in ask.to}
                ups = {k: wire.up(k, run.down.exchange, answer) for k, answer in answers.items()}
                replies = run.open(ups)
                refused += len(ups) - len(replies)
                run.feed(replies)
                ratios = run.outliers.ratios | run.outliers.last_ratios
                largest = max([largest, *ratios.values()])
            rows.append(
                {"recipe": recipe, "skew": skew, "silos": silos, "refused": refused}
                | {"largest_ratio": round(largest, 2)}
            )
        say(f"{skew}, {silos} silos: {max(row['largest_ratio'] for row in rows):g}")
    return pd.DataFrame(rows)


def write(runs: int, say: Callable[[str], object]) -> None:
    """Runs so many lies and the honest table; writes poison.csv, poison-honest.csv, poison.md."""
    watch, lied = Watch(), []
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            lied.append(run(seed, Path(folder) / "run"))
        say(" ".join(f"{key}={value}" for key, value in lied[-1].items()))
    without = honest(say)
    table = pd.DataFrame(lied)
    context = {
        "machine": watch.line(),
        "runs": lied,
        "good": int(table["outcome"].eq("ok").sum()),
        "lost": int(table["lost_rounds"].sum()),
        "methods": without["recipe"].nunique(),
        "refused": int(without["refused"].sum()),
        "skews": [*SKEWS],
        "silos": HONEST_SILOS,
        "largest": without.nlargest(5, "largest_ratio").to_dict("records"),
        "bound": settings.TrainArgs().max_norm_ratio,
    }
    report.write(report.RESULTS, "poison", context, {"poison": table, "poison-honest": without})
