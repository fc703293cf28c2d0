"""Stage train: every recipe on every partition with every seed -> runs/<scenario>-<recipe>-<seed>/.

The stage trains only the items that the store of finished work lacks. It runs one item per core at
a time, with the same results. A kill loses at most the rounds since the last checkpoint. The
checkpoint lies in .resume/ under the item's fingerprint until the item is done.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from fedml_noniid.pipelines.experiment import cache, config, progress
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.provenance import digest, machine, of_training
from fedml_noniid.pipelines.experiment.training import SECONDS, tags_of, trained
from fedml_noniid.pipelines.experiment.workers import how_many, side_by_side
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.tracking.live import Live
from fedml_noniid.pipelines.tracking.store import Store
from fedml_noniid.plugins.core.errors import NonFiniteError, UserError
from fedml_noniid.plugins.data.indices import INDICES
from fedml_noniid.plugins.engines.callbacks import OnRow
from fedml_noniid.plugins.engines.checkpoint import Checkpoints
from fedml_noniid.plugins.engines.run import Checkpointing
from fedml_noniid.plugins.engines.simulation import resolve_device
from fedml_noniid.plugins.metrics import metric_of

log = logging.getLogger(__name__)
RESUME = ".resume"
DIVERGED = "diverged.txt"  # stored instead of a model: the reason why training failed


class Outcome(NamedTuple):
    """How an item ended."""

    fresh: bool  # trained now, not taken from the store
    scored: str  # the main metric, in words
    reason: str = ""  # why it has no model


def run(place: Workspace) -> None:
    """Trains the unfinished items.

    If some diverge, raises UserError after all other items are done.
    """
    settings = config.load(place.root)
    diverged = train(place, settings, settings.experiment)
    if diverged:
        raise UserError("\n".join(f"{key}: {reason}" for key, reason in diverged.items()))


def train(place: Workspace, settings: Config, title: str) -> dict[str, str]:
    """Trains the unfinished items.

    Returns diverged item -> reason; such an item has no folder in runs/.
    """
    cache.refuse_foreign(place.root, "runs")
    units = settings.units()
    on_gpu = resolve_device(settings.train.device).type == "cuda"
    processes = how_many(settings.machine.processes, settings.train.threads, on_gpu)
    data = cache.sha256(place.dataset(settings.data.name))
    fingerprints = {unit: _fingerprint(place, settings, data, unit) for unit in units}
    todo = sum(
        not cache.is_whole(cache.folder_of(place.repository, found), found)
        for found in fingerprints.values()
    )
    # If one item is left, its clients take all processes.
    workers = processes if todo == 1 and settings.train.threads == 1 and not on_gpu else 1
    diverged = {}
    with progress.Display(f"{title}, training", len(units)) as display:
        work = partial(_get_or_create, place, settings, fingerprints, workers)
        for unit, outcome in side_by_side(work, units, 1 if workers > 1 else processes, display):
            if outcome.reason:
                diverged[unit.key] = outcome.reason
            display.done(unit.key, outcome.reason or outcome.scored, not outcome.fresh)
    cache.keep_only(place.root / "runs", [unit.key for unit in units if unit.key not in diverged])
    return diverged


def _fingerprint(place: Workspace, settings: Config, data: str | None, unit: Unit) -> str:
    """Hash of an item's settings, code, data and partition."""
    indices = cache.sha256(place.partition(unit.scenario, unit.seed) / INDICES)
    return digest(of_training(settings, unit), data, indices)


def _get_or_create(
    place: Workspace, settings: Config, fingerprints: Mapping[Unit, str], workers: int, unit: Unit
) -> Outcome:
    """Trains an item or takes it from the store."""
    fingerprint, folder = fingerprints[unit], place.run(unit.key)
    make = partial(_train, place, settings, workers, unit, fingerprint)
    fresh = cache.get_or_create(folder, place.repository, fingerprint, make)
    if (folder / DIVERGED).is_file():
        return Outcome(fresh, "", (folder / DIVERGED).read_text())
    final = json.loads((folder / "run.json").read_text())["final"]
    main = settings.train.built_loss.metric
    return Outcome(fresh, metric_of(main).shown(float(final.get(f"test_{main}", math.nan))))


def _train(
    place: Workspace, settings: Config, workers: int, unit: Unit, fingerprint: str
) -> dict[str, bytes]:
    """Trains an item from its checkpoint. Reports each round to MLflow and the display."""
    item = Item.load(place, settings, unit)
    resume = place.repository / RESUME / fingerprint[:16]
    every, metric = settings.machine.checkpoint_every, item.loss.metric

    def on_round(row: Mapping[str, float]) -> None:
        # Rows are logged in batches: one call costs as much as a thousand numbers.
        if row["round"] % every == 0:
            run.log_rounds(simulation.loop.rows)
        progress.report(
            progress.RoundReport(
                unit.key,
                int(row["round"]),
                settings.train.rounds,
                row[f"test_{metric}"],
                metric_of(metric).words,
            )
        )

    checkpointing = Checkpointing(
        Checkpoints(resume / "checkpoint.safetensors", fingerprint), every
    )
    simulation = item.simulation([OnRow(on_round), checkpointing], workers)
    log.debug("%s: %s engine (%s)", unit.key, simulation.engine_name, simulation.engine_reason)
    here = machine(item.device)
    tags = {**tags_of(item, simulation, fingerprint), **here, **place.tags}
    store = Store(place.repository, place.tracking_uri)
    run = Live(store, settings.experiment, unit.key, settings.params(unit), tags)
    try:
        files = trained(item, simulation, fingerprint).files()
    except UserError as error:
        run.fail(str(error))
        if not isinstance(error, NonFiniteError):
            raise
        shutil.rmtree(resume, ignore_errors=True)
        return {DIVERGED: str(error).encode()}
    run.finish(simulation.loop.rows, json.loads(files["run.json"])["final"])
    shutil.rmtree(resume, ignore_errors=True)
    made = {
        "tags": here,
        "run_id": run.run_id,
        SECONDS: [row[SECONDS] for row in simulation.loop.rows],
    }
    return files | {cache.MADE: (json.dumps(made, indent=2) + "\n").encode()}
