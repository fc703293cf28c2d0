"""An item as a pure function: settings, unit, indices, and data by checksum -> the files of runs/.

This is what a worker runs. It reads nothing else, and it writes checkpoints only.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from distributed import get_worker

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES, Indices, read_indices
from fedml_noniid.engines.callbacks import OnRow, Row
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.pipelines.experiment import cache, resume
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.provenance import machine, training_fingerprint
from fedml_noniid.pipelines.experiment.training import tags_of, trained

FOLDER = "NONIID_CLUSTER_FOLDER"  # environment variable of a worker: a folder of its own
EVERY_S = 1.0  # seconds between two reports of an item


class Job(NamedTuple):
    """An item for a worker. It has no tensors."""

    settings: Config
    unit: Unit
    fingerprint: str
    indices: bytes  # indices.safetensors, compressed
    data: Path  # the data set's file in front; a worker that lacks it has one in its own folder
    sha256: str  # of that file
    resume: Path  # the item's folder of checkpoints in front
    every: int  # rounds from one checkpoint to the next
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
    data, shared = _data_of(job)
    item = Item.from_parts(job.settings, job.unit, data, _indices(job))
    folder = job.resume if shared else _own_folder(job) / resume.RESUME / job.resume.name
    checkpoints = resume.checkpoints(folder, job.fingerprint, attempt)
    on_row = OnRow(lambda _: reporter.on_row())
    simulation = item.simulation([on_row, Checkpointing(checkpoints, job.every)])
    reporter = _Reporter(job, attempt, item, simulation)
    files = trained(item, simulation, job.fingerprint).files()
    if not shared:  # the front can't remove it
        shutil.rmtree(folder, ignore_errors=True)
    return Done(files, reporter.report(0))


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
            get_worker().log_event(self.job.topic, pickle.dumps(self.report(self._told)))
            self._told, self._when = len(self.simulation.loop.rows), time.monotonic()


_loaded: dict[str, Dataset] = {}  # the last data set of this process, by the file's SHA-256


def _data_of(job: Job) -> tuple[Dataset, bool]:
    """The data set of an item, and whether its folders in front are seen here. Raises UserError."""
    shared = job.data.is_file()
    path = job.data if shared else _own_folder(job) / job.data.name
    if job.sha256 not in _loaded:
        if not path.is_file():
            raise UserError(f"{_where()}: {path} is missing; put the data set of the front there")
        if cache.sha256(path) != job.sha256:
            raise UserError(f"{_where()}: {path} has other data than the front; copy it again")
        data = Dataset.read(path)
        _loaded.clear()
        _loaded[job.sha256] = data
    return _loaded[job.sha256], shared


def _own_folder(job: Job) -> Path:
    named = os.environ.get(FOLDER)
    if not named:
        raise UserError(
            f"{_where()}: {job.data} is not seen there; allowed: a file system that front and "
            "workers share, or `noniid cluster worker --folder` with a copy of the data set"
        )
    return Path(named)


def _indices(job: Job) -> Indices:
    """The partition of an item. UserError unless all of the item is that of the front."""
    content = zlib.decompress(job.indices)
    sha256 = hashlib.sha256(content).hexdigest()
    with located(source=_where()):
        mine = training_fingerprint(job.settings, job.unit, job.sha256, sha256)
    if mine != job.fingerprint:
        raise UserError(
            f"{_where()}: has other code for {job.unit.key} than the front; install the same "
            "packages there, yours too, and start the worker again"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INDICES)
        path.write_bytes(content)
        return read_indices(path)


def _where() -> str:
    return f"worker {get_worker().name}"
