"""A whole cross-silo run on this machine: server and silos are processes over loopback gRPC, watched and ended."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from plugins import recipes
from plugins.core.component import Public
from plugins.core.errors import UserError
from plugins.data import datasets, partitions, splits
from plugins.data.files import write_whole
from plugins.engines.hashing import model_tensors, weights_sha256
from plugins.engines.simulation import Simulation
from plugins.silo import launch, results, settings, shards, transport
from plugins.silo.shards import Parts

CONFIG = Path("pipelines/fedml_config.yaml")
FOLDER = Path("deploy")
DEADLINE_S = 900.0
GRACE_S = 20.0  # for the others, once one process has failed
WAIT_S = 120.0  # for another loopback run on this machine
PUBLIC = 100  # samples of the public split, where a recipe needs one


def run(deployment: settings.Deployment, parts: Parts, folder: Path, deadline_s: float = DEADLINE_S) -> str:
    """Runs a deployment with processes on this machine; all files are written under `folder`.

    Returns the SHA-256 of the final weights. Raises UserError that says which process failed and why. In every case,
    all processes are ended.
    """
    if deployment.silos != len(parts.clients):
        raise UserError(
            f"train_args.client_num_in_total = {deployment.silos}, but the partition has {len(parts.clients)} clients"
        )
    deployment = _moved(deployment, folder)
    with transport.claim(WAIT_S):
        _run(deployment, parts, folder, deadline_s)
    output = Path(deployment.tracking_args.output_dir)
    with safe_open(output / results.MODEL, framework="pt") as file:
        return weights_sha256({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118, not a dict


def _run(deployment: settings.Deployment, parts: Parts, folder: Path, deadline_s: float) -> None:
    """Writes the files of the processes, starts the processes and waits for them; kills those that are left."""
    ranks = range(deployment.silos + 1)
    for rank in ranks:
        transport.check_port(rank)
    shards.write(deployment.data_args.shard, parts)
    transport.write_addresses(Path(deployment.comm_args.grpc_ipconfig_path), dict.fromkeys(ranks, "127.0.0.1"))
    config = folder / "fedml_config.yaml"
    write_whole(config, deployment.yaml())
    output = Path(deployment.tracking_args.output_dir)
    output.mkdir(exist_ok=True)
    for stale in (results.MODEL, results.ROUNDS):
        (output / stale).unlink(missing_ok=True)

    # One clean process imports FedML once (11 s, 1 GB) and forks the others.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plugins.silo.pair"])
    # gRPC itself writes a line on each connection that ends. Errors that matter are raised and logged.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # An interrupt ends this process, and it ends the others. Hidden from them, it costs no traceback of their own.
    resource_tracker.ensure_running()  # first: it makes interrupts visible again
    hidden = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, hidden)
    processes = [context.Process(target=_process, args=(rank, str(config), str(output)), daemon=True) for rank in ranks]
    try:
        for process in processes:
            process.start()
        _watch(processes, deadline_s, output)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()


def simulate(deployment: settings.Deployment, parts: Parts) -> str:
    """The same run in the sequential simulation; returns the SHA-256 of the final weights."""
    train, threads = deployment.train_args, torch.get_num_threads()
    torch.set_num_threads(deployment.device_args.threads)
    try:
        local = settings.local_training(train)
        network = deployment.network(tuple(parts.train.x.shape[1:]), parts.n_classes, parts.embedding)
        outcome = Simulation(
            train.recipe, train.settings, network, parts.train, parts.clients, parts.test, parts.validation,
            parts.public, local, deployment.schedule, engine="sequential",
        ).run()  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    return weights_sha256(model_tensors(outcome.params, outcome.evaluated, outcome.buffers))


def needs_public(recipe: str) -> bool:
    """Whether a method of the recipe needs the public split. A method that only records facts about it does not."""
    return any(recipes.METHODS[method]().needs.public >= Public.UNLABELLED for method in recipes.parse(recipe))


def _process(rank: int, config: str, output: str) -> None:
    """The main function of a forked process. Its error goes to its log, where `_failure` reads it."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    logging.basicConfig(filename=launch.log_file(Path(output), rank), filemode="w")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
    launch.leave(launch.run("client" if rank else "server", rank, Path(config)))


def _die_with_parent() -> None:
    """Ends this process as soon as its parent is gone, for any reason; otherwise it would keep its port."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs within a process that was started here"
    wait([parent.sentinel])
    os._exit(1)


def _watch(processes: Sequence[BaseProcess], deadline_s: float, output: Path) -> None:
    """Returns when all have ended well. Raises UserError when one fails or the deadline passes."""
    end, failed = time.monotonic() + deadline_s, False
    while running := [process for process in processes if process.exitcode is None]:
        left = end - time.monotonic()
        if left <= 0:
            break
        wait([process.sentinel for process in running], timeout=left)
        codes = [process.exitcode or 0 for process in processes]
        if min(codes) < 0:  # killed: the cause is known
            break
        if any(codes) and not failed:
            # The others are told, or notice. The server's message may say more.
            failed, end = True, min(end, time.monotonic() + GRACE_S)
    ended = [process.exitcode for process in processes]
    if any(ended):
        raise UserError(_failure(ended, output))
    if None in ended:
        late = ", ".join(transport.name(rank) for rank, code in enumerate(ended) if code is None)
        raise UserError(f"not over after {deadline_s:.0f} s: {late}; see the logs in {output}")


def _failure(codes: Sequence[int | None], output: Path) -> str:
    """The process that is the likely cause: one that was killed, otherwise the server, otherwise a silo."""
    bad = {rank: code for rank, code in enumerate(codes) if code}
    rank = next((rank for rank, code in bad.items() if code < 0), min(bad))
    log = launch.log_file(output, rank)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    code = bad[rank]
    how = f"was killed by signal {-code}" if code < 0 else said[-1] if said else f"exit code {code}"
    return f"{transport.name(rank)}: {how}; see {log}"


def _moved(deployment: settings.Deployment, folder: Path) -> settings.Deployment:
    """The deployment with every path under `folder`."""
    data = deployment.data_args.model_copy(update={"shard": str(folder / "shards" / "{rank}.safetensors")})
    comm = deployment.comm_args.model_copy(update={"grpc_ipconfig_path": str(folder / "ip.csv")})
    tracking = deployment.tracking_args.model_copy(update={"output_dir": str(folder / "run")})
    return deployment.model_copy(update={"data_args": data, "comm_args": comm, "tracking_args": tracking})


def _overridden(
    deployment: settings.Deployment, recipe: str | None, silos: int | None, where: str
) -> settings.Deployment:
    """The deployment with another recipe, at its own defaults, and another number of silos."""
    content = deployment.model_dump()
    train = content["train_args"]
    if recipe is not None:
        train["recipe"] = recipe
        train["settings"] = {m: v for m, v in train["settings"].items() if m in recipes.parse(recipe)}
    if silos is not None:
        train["client_num_in_total"] = train["client_num_per_round"] = silos
    return settings.check(content, where)


def _parts(deployment: settings.Deployment) -> Parts:
    """The data of a loopback run: the data set, cut into as many parts as there are silos."""
    data_args, seed = deployment.data_args, deployment.common_args.random_seed
    data = datasets.load(data_args.dataset, Path(data_args.data_cache_dir))
    split = splits.hold_out(data.train_y.numpy(), 0.1, PUBLIC, seed)
    params = {"alpha": data_args.partition_alpha} if data_args.partition_method == "dirichlet" else {}
    clients = partitions.partition(
        data_args.partition_method, data.train_y.numpy(), split.train, deployment.silos, seed, data.train_owner,
        f"data set {data.name!r}", **params,
    )  # fmt: skip
    public = split.public if needs_public(deployment.train_args.recipe) else np.empty(0, np.int64)
    return Parts.cut(data, clients, split.validation, public)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: runs over loopback, simulates the same, and compares."""
    parser = argparse.ArgumentParser(prog="python -m plugins.silo.launch loopback", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--recipe", help="instead of the file's")
    parser.add_argument("--silos", type=int, help="instead of the file's")
    parser.add_argument("--out", type=Path, default=FOLDER / "loopback")
    options = parser.parse_args(arguments)
    try:
        deployment = settings.read(options.config)
        deployment = _overridden(deployment, options.recipe, options.silos, "loopback")
        parts = _parts(deployment)
        sizes = ", ".join(str(len(part)) for part in parts.clients)
        sys.stdout.write(f"{deployment.train_args.recipe}: a server and {deployment.silos} silos of {sizes} samples\n")
        sys.stdout.flush()
        deployed = run(deployment, parts, options.out, deployment.comm_args.deadline_s or DEADLINE_S)
        simulated = simulate(deployment, parts)
        if deployed != simulated:
            raise UserError(f"the silos' weights {deployed} are not the simulation's {simulated}")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("the sequential simulation ends with the same weights, bit for bit\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
