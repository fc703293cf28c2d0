"""The processes of a cluster: a scheduler, and workers that train one item at a time.

They listen at one address each, never at all of the machine's, and serve no page.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from distributed import Nanny, Scheduler, Worker
from distributed.utils import get_ip

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.device import VISIBLE, cards, resolve_device
from fedml_noniid.own_code import look_in
from fedml_noniid.pipelines.cluster import address, kit, settings
from fedml_noniid.pipelines.cluster.traits import resources, traits

log = logging.getLogger(__name__)
START_S = 300  # seconds that a worker waits for its scheduler


class _SilentScheduler(Scheduler):
    """A scheduler without a page.

    dask's own listens at 0.0.0.0 without TLS, also with --no-dashboard.
    """

    def start_http_server(self, *_: object, **__: object) -> None:
        """Starts none."""


class _SilentWorker(Worker):
    """A worker without a page, as the scheduler."""

    def start_http_server(self, *_: object, **__: object) -> None:
        """Starts none."""


def serve(folder: Path, listen: str) -> None:
    """Runs a scheduler that listens at `listen` until it is stopped.

    `folder`: the kit, into which it writes its address. UserError.
    """
    host, port = address.host_and_port(listen)
    security, file = kit.security(folder), folder.resolve() / address.FILE
    settings.apply()

    async def run() -> None:
        options = {"security": security, "scheduler_file": str(file), "dashboard": False}
        async with _SilentScheduler(host=host, port=port, protocol="tls", **options) as scheduler:
            log.info("the scheduler listens at %s", scheduler.address)
            log.info("workers: noniid cluster worker %s", file.parent)
            log.info("items: noniid run --cluster %s", file.parent)
            await scheduler.finished()

    try:
        _run(run)
    except OSError as error:
        raise UserError(
            f"--listen {listen}: can't listen there ({error.strerror or error})"
        ) from None


def work(folder: Path, processes: int, threads: int, device_name: str) -> None:
    """Runs workers until their scheduler ends. Raises UserError.

    `folder`: the kit. `processes`: workers. `threads`: of each training, as train.threads.
    `device_name`: as train.device.
    """
    look_in(Path.cwd())  # the workers take over where this process looks for modules
    scheduler = address.located(folder, START_S)
    device = resolve_device(device_name)
    if device.type == "cpu":  # so that `train.device: auto` means the same here as in front
        os.environ[VISIBLE] = ""
    seats = cards(processes) if device.type == "cuda" else [""] * processes
    torch.set_num_threads(threads)
    carried = resources(traits(device, threads))
    settings.apply(threads)

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="noniid-", ignore_cleanup_errors=True) as scratch:
            nannies = [_nanny(scheduler, carried, scratch, seat) for seat in enumerate(seats)]
            try:
                await asyncio.gather(*nannies)
                log.info("%d workers of %s", len(nannies), scheduler.address)
                await asyncio.gather(*(nanny.finished() for nanny in nannies))
            finally:
                await asyncio.gather(*(nanny.close() for nanny in nannies))

    try:
        _run(run)
    except (OSError, TimeoutError, RuntimeError) as error:  # RuntimeError: a worker did not start
        raise UserError(
            f"{scheduler.address}: no scheduler of this cluster answers there ({error})"
        ) from None


def _nanny(
    scheduler: address.Scheduler, carried: dict[str, float], scratch: str, seat: tuple[int, str]
) -> Nanny:
    """A process that starts a worker, and starts it again when it dies.

    `seat`: number of the worker, and the GPU that it sees.
    """
    n, card = seat
    return Nanny(
        scheduler.address,
        nthreads=1,
        name=f"{socket.gethostname()}-{os.getpid()}-{n}",
        host=get_ip(scheduler.host),
        security=scheduler.security,
        resources=carried,
        memory_limit=None,
        local_directory=scratch,
        worker_class=_SilentWorker,
        env={VISIBLE: card},
        dashboard=False,
        silence_logs=logging.ERROR,
        death_timeout=START_S,
    )


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs until the work ends or this process is told to end (SIGTERM)."""

    async def until_told() -> None:
        task = asyncio.create_task(work())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_told())
