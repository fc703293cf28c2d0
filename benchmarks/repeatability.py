"""Part 3: whether a run ends with the same bits when it is repeated or spread over workers.

The job is the workload `mlp` for a few rounds. Its batches are fixed, or an engine draws them from
a seed. The answers compare the SHA-256 of the final weights. `python -m benchmarks chaos` kills and
deploys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison import Log
from benchmarks.engines import Engine
from benchmarks.processes import FailedError, measure
from benchmarks.workloads import Workload, write_job
from fedml_noniid.engines.hashing import weights_sha256

WORKERS = (1, 2, 4)
SAME, ONE, UNTRIED = "same", "one process", "not tried"

Answer = dict[
    str, Any
]  # said: the cell of the report; sha256: what was run -> SHA-256 of its final weights


def answer(runs: Callable[[], Mapping[str, str]]) -> Answer:
    """Makes the runs, by name, and compares their SHA-256. A failure becomes the answer."""
    try:
        hashes = dict(runs())
    except FailedError as error:
        return {"said": f"failed: {error}", "sha256": {}}
    different = len(set(hashes.values()))
    return {
        "said": SAME if different == 1 else f"{different} results of {len(hashes)} runs",
        "sha256": hashes,
    }


def rows(workload: Workload, engines: Sequence[Engine], folder: Path, log: Log) -> list[Answer]:
    """Returns a row of answers per engine. Our sequential engine is the one with workers."""
    path = folder / "repeatability.npz"
    write_job(workload, path)
    lines = []
    for engine in engines:
        log(f"repeatability: {engine.name}")
        lines.append(_row(engine, path))
    path.unlink()
    return lines


def _row(engine: Engine, path: Path) -> Answer:
    notes = set[str]()

    def run(variant: Engine) -> str:
        numbers, weights = measure(variant, path)
        notes.add(numbers["note"])
        return weights_sha256(weights)

    twice = answer(lambda: {word: run(engine) for word in ("first", "second")})
    first = twice["sha256"].get("first", "")
    workers = {"said": UNTRIED if engine.parallel else ONE, "sha256": {}}
    if engine.parallel and first:
        known = {engine: first}  # it has just run with this number of workers
        spread = {count: engine.with_workers(count) for count in WORKERS}
        workers = answer(
            lambda: {
                str(count): known.get(variant) or run(variant) for count, variant in spread.items()
            }
        )
    name, note = engine.name.replace("two ", ""), ", ".join(sorted(notes - {""}))
    return {"engine": name, "note": note, "twice": twice, "workers": workers}
