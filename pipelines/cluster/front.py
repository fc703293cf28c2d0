"""The process in front of a cluster: gives each fit worker one item, and hears of it.

An item that loses its worker is given away again, and goes on from its newest checkpoint. Files of
items come from the workers directly; through the scheduler go settings, indices and reports.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Future, KilledWorker
from distributed.client import CancelledError

from fedml_noniid.core.errors import Mistake, UserError
from fedml_noniid.pipelines.cluster import address
from fedml_noniid.pipelines.cluster.job import Done, Job, Report, run
from fedml_noniid.pipelines.cluster.settings import SETTINGS
from fedml_noniid.pipelines.cluster.traits import differences, label

log = logging.getLogger(__name__)
CONNECT_S = 30  # seconds to wait for the scheduler
WORKER_S = 300  # seconds without a fit worker, then the run ends
LOOK_S = 2.0  # seconds between two looks at the workers
# An item that loses so many workers without one more round done ends the run: it may kill them.
MAX_LOSSES = 5
LOST = "the scheduler of the cluster has ended, or can't be reached any more"
CONTINUES = "the same command goes on from here"
News = Report | Done | UserError  # a UserError is the item's own


def trained(
    cluster: Path, jobs: Sequence[Job], wanted: Mapping[str, str]
) -> Iterator[tuple[Job, News]]:
    """Trains items on the workers with the traits `wanted`; yields what is heard of each.

    The last of an item is a Done or a UserError. Raises UserError if the cluster fails.
    """
    with connected(cluster) as client:
        yield from _Front(client, wanted).trained(jobs)


@contextlib.contextmanager
def connected(cluster: Path) -> Iterator[Client]:
    """A client of the scheduler of the cluster with this kit. UserError if there is none."""
    scheduler = address.located(cluster)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # people read our lines
    with dask.config.set(SETTINGS):
        try:
            client = Client(
                scheduler.address,
                security=scheduler.security,
                timeout=CONNECT_S,
                set_as_default=False,
                direct_to_workers=True,  # files of items don't go through the scheduler
            )
        except (OSError, TimeoutError) as error:
            raise UserError(
                f"{scheduler.address}: no scheduler of this cluster answers there ({error})"
            ) from None
        with client:
            yield client


class FitWorkers:
    """Finds the workers that compute the bits of the front. `wanted`: their traits."""

    def __init__(self, client: Client, wanted: Mapping[str, str]) -> None:
        self.client, self.wanted = client, wanted
        self.resources = {label(wanted): 1}  # what a task of the front takes of a worker
        self._named: set[str] = set()  # unfit workers that were named
        self._seen = 0.0  # when a fit worker was last there; 0: never
        self._began = time.monotonic()

    def addresses(self) -> dict[str, str]:
        """Address -> name, of those that are there. Names the others, once. Raises UserError."""
        info: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):
            info = self.client.scheduler_info()
        if "workers" not in info:  # as of a client that could not connect again
            raise UserError(f"{LOST}; {CONTINUES}")
        fit, unfit = {}, []
        for at, worker in info["workers"].items():
            if self.resources.keys() <= worker["resources"].keys():
                fit[at] = str(worker["name"])
                continue
            unfit.append(
                f"worker {worker['name']} gets no item: "
                f"it {differences(self.wanted, worker['resources'])}"
            )
        new = [line for line in unfit if line not in self._named]
        self._named.update(new)
        if fit and not self._seen:
            log.info("%d workers of the cluster may train", len(fit))
        if fit:
            self._seen = time.monotonic()
        elif unfit and not self._seen:
            raise UserError.from_mistakes(map(Mistake, unfit))
        elif time.monotonic() - max(self._seen, self._began) > WORKER_S:
            raise UserError(f"no worker that may train came within {WORKER_S} s; {CONTINUES}")
        for line in new:
            log.warning("%s", line)
        return fit


class _Front:
    """Gives items to workers. `wanted`: the traits of a fit worker."""

    def __init__(self, client: Client, wanted: Mapping[str, str]) -> None:
        self.client, self.workers = client, FitWorkers(client, wanted)
        self.topic = f"noniid-{secrets.token_hex(4)}"
        self.news: queue.SimpleQueue[str | Report] = queue.SimpleQueue()  # str: an attempt's end
        self.running: dict[str, tuple[Job, Future]] = {}  # by attempt
        self.waiting: deque[Job] = deque()
        self.losses: dict[str, int] = {}  # of an item since its last report; by fingerprint

    def trained(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, News]]:
        """As the function."""
        self.waiting.extend(job._replace(topic=self.topic) for job in jobs)
        self.client.subscribe_topic(self.topic, lambda event: self.news.put(pickle.loads(event[1])))
        looked, fit = 0.0, 0
        while self.waiting or self.running:
            if time.monotonic() - looked >= LOOK_S:
                fit, looked = len(self.workers.addresses()), time.monotonic()
            while self.waiting and len(self.running) < fit:
                self._start(self.waiting.popleft())
            with contextlib.suppress(queue.Empty):
                yield from self._heard(self.news.get(timeout=LOOK_S))

    def _start(self, job: Job) -> None:
        attempt = secrets.token_hex(4)
        future = self.client.submit(
            run,
            job,
            attempt,
            key=f"{job.unit.key}-{attempt}",
            pure=False,
            retries=0,
            resources=self.workers.resources,
        )
        self.running[attempt] = job, future
        future.add_done_callback(lambda _: self.news.put(attempt))

    def _heard(self, news: str | Report) -> Iterator[tuple[Job, News]]:
        """Yields a report, or the end of an attempt unless the item begins again."""
        if isinstance(news, Report):
            if news.attempt in self.running:
                job = self.running[news.attempt][0]
                self.losses.pop(job.fingerprint, None)
                yield job, news
            return
        job, future = self.running.pop(news)
        try:
            result = future.result()
            if isinstance(result, str):
                raise RuntimeError(f"{job.unit.key}, on a worker:\n{result}")
            yield job, result
        except KilledWorker as error:
            losses = self.losses[job.fingerprint] = self.losses.get(job.fingerprint, 0) + 1
            if losses >= MAX_LOSSES:
                raise UserError(
                    f"{job.unit.key}: {losses} workers died with it, one after the other; is their "
                    "memory enough?"
                ) from None
            log.warning(
                "%s: lost worker %s, goes on elsewhere", job.unit.key, error.last_worker.name
            )
            self.waiting.appendleft(job)
        except (OSError, CancelledError):
            raise UserError(f"{LOST}; {CONTINUES}") from None
        future.release()
