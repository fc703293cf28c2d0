"""An item as a pure function: the folders of an experiment, settings, unit -> the files of runs/.

This is what a worker runs. It reads data and partition there, and it writes checkpoints only.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Mapping
from typing import NamedTuple

from distributed import get_worker

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.engines.callbacks import OnRow, Row
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.pipelines.experiment import cache, resume
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.provenance import machine
from fedml_noniid.pipelines.experiment.training import item_of, tags_of, trained
from fedml_noniid.pipelines.experiment.workspace import Workspace

EVERY_S = 1.0  # seconds between two reports of an item


class Job(NamedTuple):
    """An item for a worker. It has no tensors."""

    workspace: Workspace  # in a file system that front and workers share
    settings: Config
    unit: Unit
    fingerprint: str
    topic: str = ""  # where reports go


class Report(NamedTuple):
    """What a worker tells of an item: while it trains, and at its end."""

    attempt: str
    tags: Mapping[str, str]  # facts of the run
    machine: Mapping[str, str]  # where it is
    begin: int  # rounds before these
    rows: list[Row]


class Done(NamedTuple):
    """A trained item."""

    files: dict[str, bytes]  # of its folder in runs/
    report: Report  # of all rounds


def run(job: Job, attempt: str) -> Done | UserError | str:
    """Trains an item, from the newest checkpoint of an earlier attempt.

    Returns an error of the item, or another as text: dask would also send what its causes hold.
    """
    try:
        return _trained(job, attempt)
    except UserError as error:
        return error.with_traceback(None)
    except Exception:  # of any kind: the item may run a user's code. The front shows it, and ends
        return traceback.format_exc()


def _trained(job: Job, attempt: str) -> Done:
    with located(source=f"worker {get_worker().name}"):
        if not job.workspace.root.is_dir():
            raise UserError(
                f"{job.workspace.root} is not seen there",
                allowed="a file system that front and workers share",
            )
        item = item_of(job.workspace, job.settings, job.unit, job.fingerprint)
    folder = cache.folder_of(job.workspace.repository, job.fingerprint, resume.RESUME)
    checkpoints = resume.checkpoints(folder, job.fingerprint, attempt)
    on_row = OnRow(lambda _: reporter.on_row())
    every = job.settings.machine.checkpoint_every
    simulation = item.simulation([on_row, Checkpointing(checkpoints, every)])
    reporter = _Reporter(job, attempt, item, simulation)
    return Done(trained(item, simulation, job.fingerprint).files(), reporter.report(0))


class _Reporter:
    """Reports the rounds of an item to the front, at most once a second."""

    def __init__(self, job: Job, attempt: str, item: Item, simulation: Simulation) -> None:
        self.job, self.attempt, self.simulation = job, attempt, simulation
        self._tags, self._machine = tags_of(item, simulation, job.fingerprint), machine(item.device)
        self._told, self._when = 0, 0.0  # rounds that were reported, and when

    def report(self, begin: int) -> Report:
        """What is told of the rounds from `begin` on."""
        rows = list(self.simulation.loop.rows[begin:])
        return Report(self.attempt, self._tags, self._machine, begin, rows)

    def on_row(self) -> None:
        """Reports. Raises UserError if the front has gone."""
        worker = get_worker()
        task = worker.state.tasks.get(worker.get_current_task())
        if task is None or task.state == "cancelled":
            raise UserError("nobody waits for this item any more")
        if time.monotonic() - self._when >= EVERY_S:
            worker.log_event(self.job.topic, pickle.dumps(self.report(self._told)))
            self._told, self._when = len(self.simulation.loop.rows), time.monotonic()
