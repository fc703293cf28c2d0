"""Part 4: whether a run ends with the same bits when it is repeated, spread over workers, killed,
or deployed.

The job is the workload `mlp` for a few rounds. Its batches are fixed, or an engine draws them from
a seed. The answers compare the SHA-256 of the final weights. `python -m benchmarks.repeatability
RESULT ENGINE@CHECKPOINT JOB` runs one of our simulations with a checkpoint after every round, and
goes on from the file if it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import chaos
from benchmarks.comparison import Log
from benchmarks.engines import Engine
from benchmarks.ours import simulation, timed
from benchmarks.peers.harness import Job, main
from benchmarks.processes import FailedError, Running, measure
from benchmarks.workloads import SEED, Workload, write_job
from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.processes import loopback

WORKERS = (1, 2, 4)
KILLED_IN = 2  # the round after which the process is killed; its checkpoint is there
SAME, ONE, UNTRIED = "same", "one process", "not tried"
OURS = "benchmarks.ours"

Answer = dict[
    str, Any
]  # said: the cell of the report; sha256: what was run -> SHA-256 of its final weights


def answer(runs: Callable[[], Mapping[str, str]]) -> Answer:
    """Makes the runs, by name, and compares their SHA-256. A failure becomes the answer."""
    try:
        hashes = dict(runs())
    except (FailedError, UserError) as error:
        reason, _, _ = str(error).partition("; see ")  # a log that is gone with its folder
        return {"said": f"failed: {reason}", "sha256": {}}
    different = len(set(hashes.values()))
    return {
        "said": SAME if different == 1 else f"{different} results of {len(hashes)} runs",
        "sha256": hashes,
    }


def unanswered(why: str) -> Answer:
    """An answer without runs."""
    return {"said": why, "sha256": {}}


def rows(
    workload: Workload, engines: Sequence[Engine], deploying: bool, folder: Path, log: Log
) -> list[Answer]:
    """A row of answers per engine.

    Our sequential engine is the one with workers. `deploying`: whether to deploy.
    """
    path = folder / "repeatability.npz"
    write_job(workload, path)
    found = []
    for engine in engines:
        log(f"repeatability: {engine.name}")
        found.append(_row(engine, path, deploying, folder))
    path.unlink()
    return found


def _row(engine: Engine, path: Path, deploying: bool, folder: Path) -> Answer:
    mine, notes = engine.module == OURS, set[str]()

    def run(of: Engine) -> str:
        numbers, weights = measure(of, path)
        notes.add(numbers["note"])
        return weights_sha256(weights)

    twice = answer(lambda: {word: run(engine) for word in ("first", "second")})
    first = twice["sha256"].get("first", "")
    workers = killed = deployed = unanswered(UNTRIED)
    if not engine.parallel:
        workers = unanswered(ONE)
    elif first:
        known = {engine: first}  # it has just run with this number of workers
        spread = {count: engine.with_workers(count) for count in WORKERS}
        workers = answer(
            lambda: {str(count): known.get(of) or run(of) for count, of in spread.items()}
        )
    if mine and first:
        killed = answer(lambda: {"undisturbed": first, "resumed": resumed(engine, path, folder)})
    if mine and engine.parallel and deploying:
        deployed = answer(lambda: deployment(folder / "deployment"))
    name, note = engine.name.replace("two ", ""), ", ".join(sorted(notes - {""}))
    return {
        "engine": name,
        "note": note,
        "twice": twice,
        "workers": workers,
        "killed": killed,
        "deployed": deployed,
    }


def resumed(engine: Engine, path: Path, folder: Path) -> str:
    """SHA-256 of the weights of a run that got SIGKILL and was started again.

    Raises FailedError.
    """
    checkpoint = folder / "killed.safetensors"
    checkpoint.unlink(missing_ok=True)
    saving = replace(engine, module=__name__, argument=f"{engine.argument}@{checkpoint}")
    running = Running(saving, path, in_turns=True)
    for _ in range(KILLED_IN):
        running.turn()
    if not running.ready:
        running.outcome()  # raises if it failed
        raise FailedError(f"ended before round {KILLED_IN + 1}")
    running.end()
    numbers, weights = measure(saving, path)
    if numbers["from"] != KILLED_IN:
        raise FailedError(f"went on after round {numbers['from']}, not after round {KILLED_IN}")
    return weights_sha256(weights)


def deployment(folder: Path) -> dict[str, str]:
    """SHA-256 of FedAvg with three silos over FedML's cross-silo runtime, and of its simulation.

    Raises UserError.
    """
    terms, parts = chaos.deployment("fedavg", SEED), chaos.parts(SEED)
    return {
        "deployment": loopback.run(terms, parts, folder),
        "simulation": loopback.simulate(terms, parts),
    }


def saved(job: Job, argument: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Runs a job with a checkpoint. The number `from` is the round after which it went on."""
    engine, _, checkpoint = argument.partition("@")
    simulated = simulation(job, engine, checkpoint=Path(checkpoint))
    _, weights = timed(simulated)
    return {"from": simulated.start_round}, weights


if __name__ == "__main__":
    main(saved)
