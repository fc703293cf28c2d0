"""A whole cross-silo run on this machine: server and silos are processes over loopback gRPC,
watched and ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority
from fedml_noniid.data import shards
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import results, settings, wire
from fedml_noniid.engines.absences import Missing, listed
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.governance import policy
from fedml_noniid.processes import launch
from fedml_noniid.simulate import simulate as simulated

CONFIG = Path(__file__).with_name("fedml_config.yaml")
OWNERSHIP_FILE = "loopback.txt"
OWNED = "Runs of a server and its silos on one machine replace the files of this folder.\n"
Main = Callable[[int, str, str], None]
DEADLINE_S = 900.0
GRACE_S = 20.0  # for the others, once one process has failed


class Processes:
    """A server and its silos as processes on this machine. All are ended at the end."""

    def __init__(
        self, deployment: settings.Deployment, parts: Parts, folder: Path, main: Main | None = None
    ) -> None:
        """Writes the files of all processes under `folder`; starts nothing.

        Raises UserError, also if it is not ours.

        `main`: what each process runs, with (rank, configuration, folder for its output).
        """
        refuse_foreign(folder)
        write_whole(folder / OWNERSHIP_FILE, OWNED)
        sizes = {"max_samples": [len(part) for part in parts.clients]}
        train = deployment.train_args.model_copy(update=sizes)
        deployment = _moved(deployment.model_copy(update={"train_args": train}), folder)
        self.deployment, self.config = deployment, folder / "fedml_config.yaml"
        self.output = Path(deployment.tracking_args.output_dir)
        shards.write(deployment.data_args.shard, parts)
        for old in (folder / "kits").glob("*/"):  # they may have expired; secrets and ledgers stay
            shutil.rmtree(old)
        authority.make(folder / "kits", deployment.silos)
        policy.admit_own(deployment, next(shards.split(parts)), folder)
        # A new run, not one that goes on. A refused one leaves the old run's files.
        shutil.rmtree(self.output, ignore_errors=True)
        write_whole(self.config, deployment.yaml())
        self.output.mkdir(parents=True)
        self.running: dict[int, BaseProcess] = {}
        self._main = main or process
        # One clean process imports FedML once (11 s, 1 GB) and forks the others.
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["fedml_noniid.deploy.pair", "fedml_noniid.deploy.silo_client"]
        )
        # gRPC itself writes a line on each connection that ends. Errors that matter are raised and
        # logged.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # An interrupt ends this process, and it ends the others. Hidden from them, it costs no
        # traceback of their own.
        resource_tracker.ensure_running()  # first: it makes interrupts visible again
        hidden = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, hidden)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self.running):
            self.kill(rank)

    def start(self, rank: int) -> None:
        """Starts the process of a rank."""
        process = self._context.Process(
            target=self._main, args=(rank, str(self.config), str(self.output)), daemon=True
        )
        process.start()
        self.running[rank] = process

    def kill(self, rank: int) -> None:
        """Ends the process of a rank by SIGKILL."""
        process = self.running[rank]
        process.kill()
        process.join()

    def wait(self, deadline_s: float) -> None:
        """Returns when all have ended well. Raises UserError when one fails or the deadline
        passes."""
        end = time.monotonic() + deadline_s
        processes = [self.running[rank] for rank in sorted(self.running)]
        while (running := [process for process in processes if process.exitcode is None]) and (
            left := end - time.monotonic()
        ) > 0:
            wait([process.sentinel for process in running], timeout=left)
            codes = [process.exitcode or 0 for process in processes]
            if min(codes) < 0 or (codes[0] and 0 in self.running):
                break  # the cause is known: the silos wait for a server that is started again
            if any(codes):  # the server's message may say more
                end = min(end, time.monotonic() + GRACE_S)
        ended = [process.exitcode for process in processes]
        if any(ended):
            raise UserError(failure(ended, self.output))
        if None in ended:
            raise UserError(
                f"not over after {deadline_s:.0f} s: "
                f"{', '.join(name(rank) for rank, code in enumerate(ended) if code is None)}; see "
                f"the logs in {self.output}"
            )

    def digest(self) -> str:
        """SHA-256 of the final weights."""
        with safe_open(self.output / results.MODEL, framework="pt") as file:
            return weights_sha256({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118, not a dict


def run(
    deployment: settings.Deployment, parts: Parts, folder: Path, deadline_s: float = DEADLINE_S
) -> str:
    """Runs a deployment with processes on this machine; all files are written under `folder`.

    Returns the SHA-256 of the final weights. Raises UserError that says which process failed and
    why. In every case, all processes are ended.
    """
    with Processes(deployment, parts, folder) as processes:
        for rank in range(deployment.silos + 1):
            processes.start(rank)
        processes.wait(deadline_s)
        return processes.digest()


def simulate(deployment: settings.Deployment, parts: Parts, missing: Missing | None = None) -> str:
    """The same run in the sequential simulation, with the same absences; returns the SHA-256 of the
    final weights."""
    train, threads = deployment.train_args, torch.get_num_threads()
    torch.set_num_threads(deployment.device_args.threads)
    try:
        network = deployment.network(
            tuple(parts.train.x.shape[1:]), parts.n_classes, parts.embedding
        )
        federation = Federation.from_indices(
            parts.train,
            parts.clients,
            parts.test,
            validation=parts.validation,
            public=parts.public,
            absent=listed(missing or {}),
            drift=parts.drift,
            tests=parts.client_tests,
        )
        plan = replace(deployment.plan(network), engine="sequential")
        outcome = simulated(
            train.recipe, train.settings, federation, plan, train.built_callbacks()
        ).run()
    finally:
        torch.set_num_threads(threads)
    return weights_sha256(
        model_tensors(outcome.params, outcome.evaluated, outcome.buffers, outcome.models)
    )


def process(rank: int, config: str, output: str) -> None:
    """The main function of a forked process.

    Its error goes to its log, where `failure` reads it.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    logging.basicConfig(handlers=[launch.LogFile(launch.log_file(Path(output), rank))])
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    launch.leave(launch.run(rank, Path(config)))


def _die_with_parent() -> None:
    """Ends this process as soon as its parent is gone, for any reason; otherwise it would keep its
    port."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs within a process that was started here"
    wait([parent.sentinel])
    os._exit(1)


def failure(codes: Sequence[int | None], output: Path) -> str:
    """The process that is the likely cause: one that was killed, otherwise the server, otherwise a
    silo."""
    bad = {rank: code for rank, code in enumerate(codes) if code}
    rank = next((rank for rank, code in bad.items() if code < 0), min(bad))
    log = launch.log_file(output, rank)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    code = bad[rank]
    how = f"was killed by signal {-code}" if code < 0 else said[-1] if said else f"exit code {code}"
    return f"{name(rank)}: {how}; see {log}"


def name(rank: int) -> str:
    """The name of a process in messages."""
    return "server (rank 0)" if rank == 0 else wire.silo(rank - 1)


def refuse_foreign(folder: Path) -> None:
    """UserError if a folder holds what no run on this machine wrote."""
    if (
        folder.is_dir()
        and not (folder / OWNERSHIP_FILE).is_file()
        and (foreign := sorted(path.name for path in folder.iterdir()))
    ):
        raise UserError(
            f"{folder}: holds {foreign[0]}, and no run on this machine wrote that; allowed: a new "
            "or an empty folder"
        )


def _moved(deployment: settings.Deployment, folder: Path) -> settings.Deployment:
    """The deployment with every path under `folder`, at a free port."""
    data = deployment.data_args.model_copy(
        update={"shard": str(folder / "shards" / "{rank}.safetensors")}
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    places = {key: str(folder / f"{key}.yaml") for key in ("study", "policy")}
    comm = deployment.comm_args.model_copy(
        update={"server": address, "kit": str(folder / "kits" / "{rank}"), **places}
    )
    tracking = deployment.tracking_args.model_copy(update={"output_dir": str(folder / "run")})
    return deployment.model_copy(
        update={"data_args": data, "comm_args": comm, "tracking_args": tracking}
    )


def compare(
    deployment: settings.Deployment, parts: Parts, out: Path, say: Callable[[str], object]
) -> str:
    """Runs a deployment over loopback, simulates the same, and compares the weights.

    Returns their SHA-256. UserError if they differ.

    `out`: folder for all files. `say` gets two lines.
    """
    say(
        f"{deployment.train_args.recipe}: a server and {deployment.silos} silos of "
        f"{', '.join(str(len(part)) for part in parts.clients)} samples"
    )
    deployed = run(deployment, parts, out)
    if deployed != (simulated := simulate(deployment, parts)):
        raise UserError(f"the silos' weights {deployed} are not the simulation's {simulated}")
    say("the sequential simulation ends with the same weights, bit for bit")
    return deployed
