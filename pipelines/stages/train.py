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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fedml_noniid.core.errors import Mistake, NonFiniteError, UserError
from fedml_noniid.engines.callbacks import OnRow, Row
from fedml_noniid.engines.device import n_cards, resolve_device, unusable_gpu
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.experiment import cache, config, progress, resume
from fedml_noniid.pipelines.experiment.cache import DIVERGED, Files
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.provenance import machine
from fedml_noniid.pipelines.experiment.training import (
    SECONDS,
    fingerprint_of,
    item_of,
    tags_of,
    trained,
)
from fedml_noniid.pipelines.experiment.workers import how_many, side_by_side
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.tracking.live import Live
from fedml_noniid.pipelines.tracking.store import Store

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How an item ended."""

    fresh: bool  # trained now, not taken from the store
    scored: str  # the main metric, in words
    reason: str = ""  # why it has no model


def run(workspace: Workspace) -> None:
    """Trains the unfinished items.

    If some diverge, raises UserError after all other items are done.
    """
    settings = config.load(workspace.root)
    diverged = train(workspace, settings, settings.experiment)
    if diverged:
        raise UserError.from_mistakes(
            Mistake(f"{key}: {reason}") for key, reason in diverged.items()
        )


def train(workspace: Workspace, settings: Config, title: str) -> dict[str, str]:
    """Trains the unfinished items.

    Returns diverged item -> reason; such an item has no folder in runs/.
    """
    cache.refuse_foreign(workspace.root, "runs")
    units = settings.units()
    cards = n_cards(resolve_device(settings.train.device))
    if settings.train.device == "auto" and (reason := unusable_gpu()):
        log.warning("training runs on the CPU, as torch can't use the GPU: %s", reason)
    processes = how_many(settings.machine.processes, settings.train.threads, cards)
    hashes: dict[Path, str | None] = {}
    fingerprints = {unit: fingerprint_of(workspace, settings, unit, hashes) for unit in units}
    missing = [
        unit
        for unit, fingerprint in fingerprints.items()
        if not cache.is_whole(cache.folder_of(workspace.repository, fingerprint), fingerprint)
    ]
    # If one item is left, its clients take all processes.
    alone = len(missing) == 1 and settings.train.threads == 1 and not cards
    workers = processes if alone else 1
    diverged = {}
    with progress.Display(f"{title}, training", len(units)) as display:
        work = partial(_here, workspace, settings, fingerprints, workers)
        if workspace.cluster is None:
            ended = side_by_side(work, units, 1 if workers > 1 else processes, display, cards > 0)
        else:
            known = ((unit, work(unit)) for unit in units if unit not in missing)
            jobs = {unit: fingerprints[unit] for unit in missing}
            ended = chain(known, _on_cluster(workspace, settings, jobs))
        for unit, outcome in ended:
            if outcome.reason:
                diverged[unit.key] = outcome.reason
            display.done(unit.key, outcome.reason or outcome.scored, not outcome.fresh)
    cache.keep_only(
        workspace.root / "runs", [unit.key for unit in units if unit.key not in diverged]
    )
    return diverged


def _get_or_create(
    workspace: Workspace, settings: Config, unit: Unit, fingerprint: str, make: Callable[[], Files]
) -> Outcome:
    """Takes an item from the store, which calls `make` for one that it lacks."""
    folder = workspace.run(unit.key)
    fresh = cache.get_or_create(folder, workspace.repository, fingerprint, make)
    if (folder / DIVERGED).is_file():
        return Outcome(fresh, "", (folder / DIVERGED).read_text())
    final = json.loads((folder / "run.json").read_text())["final"]
    main = settings.train.built_loss.metric
    return Outcome(fresh, metric_of(main).shown(float(final.get(f"test_{main}", math.nan))))


def _here(
    workspace: Workspace,
    settings: Config,
    fingerprints: Mapping[Unit, str],
    workers: int,
    unit: Unit,
) -> Outcome:
    """Trains an item in this process, unless the store has it."""
    fingerprint = fingerprints[unit]
    make = partial(_train, workspace, settings, workers, unit, fingerprint)
    return _get_or_create(workspace, settings, unit, fingerprint, make)


def _train(
    workspace: Workspace, settings: Config, workers: int, unit: Unit, fingerprint: str
) -> Files:
    """Trains an item from its checkpoint; returns its files for the store."""
    item = item_of(workspace, settings, unit, fingerprint)
    folder = cache.folder_of(workspace.repository, fingerprint, resume.RESUME)
    checkpoints = resume.checkpoints(folder, fingerprint)
    checkpointing = Checkpointing(checkpoints, settings.machine.checkpoint_every)
    on_row = OnRow(lambda _: tracked.on_rows(simulation.loop.rows))
    simulation = item.simulation([on_row, checkpointing], workers)
    log.debug("%s: %s engine (%s)", unit.key, simulation.engine_name, simulation.engine_reason)
    tags = tags_of(item, simulation, fingerprint)
    tracked = _Tracked(workspace, settings, unit, tags, machine(item.device))
    try:
        made = trained(item, simulation, fingerprint).files()
        files = tracked.finished(made, simulation.loop.rows)
    except UserError as error:
        files = tracked.failed(error)
    shutil.rmtree(folder, ignore_errors=True)
    return files


def _on_cluster(
    workspace: Workspace, settings: Config, fingerprints: Mapping[Unit, str]
) -> Iterator[tuple[Unit, Outcome]]:
    """Trains items on the workers of the cluster. Yields each item as it ends."""
    # Imported here: dask comes with an extra.
    from fedml_noniid.pipelines.cluster import front
    from fedml_noniid.pipelines.cluster.job import Done, Job, Report
    from fedml_noniid.pipelines.cluster.traits import traits

    assert workspace.cluster is not None, "the caller asks"
    jobs = [Job(workspace, settings, unit, mark) for unit, mark in fingerprints.items()]
    wanted = traits(resolve_device(settings.train.device), settings.train.threads)
    tracked: dict[Unit, _Tracked] = {}
    rows: dict[Unit, list[Row]] = {unit: [] for unit in fingerprints}
    for job, news in front.trained(workspace.cluster, jobs, wanted) if jobs else ():
        unit = job.unit
        report = news.report if isinstance(news, Done) else news
        if isinstance(report, Report):
            rows[unit][report.begin :] = report.rows
            if unit not in tracked:
                tracked[unit] = _Tracked(workspace, settings, unit, report.tags, report.machine)
        if isinstance(news, Report):
            tracked[unit].on_rows(rows[unit])
            continue
        if isinstance(news, Done):
            files = tracked[unit].finished(news.files, rows[unit])
        elif unit in tracked:
            files = tracked[unit].failed(news)
        else:
            raise news
        yield unit, _get_or_create(workspace, settings, unit, job.fingerprint, partial(dict, files))
        folder = cache.folder_of(workspace.repository, job.fingerprint, resume.RESUME)
        shutil.rmtree(folder, ignore_errors=True)


class _Tracked:
    """Shows a training in MLflow and on the display. `tags`: of the run; `here`: of its machine."""

    def __init__(
        self,
        workspace: Workspace,
        settings: Config,
        unit: Unit,
        tags: Mapping[str, str],
        here: Mapping[str, str],
    ) -> None:
        self.settings, self.unit, self.here = settings, unit, here
        store = Store(workspace.repository, workspace.tracking_uri)
        tags = {**tags, **here, **workspace.tags}
        self.run = Live(store, settings.experiment, unit.key, settings.params(unit), tags)
        self._logged = 0  # batches of rounds

    def on_rows(self, rows: Sequence[Row]) -> None:
        """New rounds are done. `rows`: all rounds so far."""
        row, metric = rows[-1], self.settings.train.built_loss.metric
        done = int(row["round"])
        # Rows are logged in batches: one call costs as much as a thousand numbers.
        batches = done // self.settings.machine.checkpoint_every
        if batches > self._logged:
            self.run.log_rounds(rows)
        self._logged = batches
        progress.report(
            progress.RoundReport(
                self.unit.key,
                done,
                self.settings.train.rounds,
                row[f"test_{metric}"],
                metric,
            )
        )

    def finished(self, files: Files, rows: Sequence[Row]) -> Files:
        """The run is over. Returns the item's files, with how they were made."""
        self.run.finish(rows, json.loads(files["run.json"])["final"])
        made = {
            "tags": self.here,
            "run_id": self.run.run_id,
            SECONDS: [row[SECONDS] for row in rows],
        }
        return {**files, cache.MADE: (json.dumps(made, indent=2) + "\n").encode()}

    def failed(self, error: UserError) -> Files:
        """The run has failed. Returns the files of a diverged item; raises another error."""
        self.run.fail(str(error))
        if not isinstance(error, NonFiniteError):
            raise error
        return {DIVERGED: str(error).encode()}
