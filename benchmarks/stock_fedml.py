"""A deployment under stock FedML 0.8.30: its unmodified runner and its gRPC, a process per rank on
this machine.

A FedML user's main.py does the same as `_fedml`. FedML's messages are pickled, without encryption
or authentication, and FedML listens on all interfaces, so this is for tests and measurements on a
machine of your own.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import yaml
from safetensors import safe_open

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import shards
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import results
from fedml_noniid.deploy.settings import Deployment
from fedml_noniid.engines.record import rounds_csv
from fedml_noniid.processes.loopback import name

HOST, BASE_PORT = (
    "127.0.0.1",
    8890,
)  # the port is hard-coded in FedML: 8890 + rank, on all interfaces
DEADLINE_S = 300.0
WAIT_S = 120.0  # for another run on this machine, and for the server
SETTLE_S = 1.0  # how long a server that listens looks for silos; see `wait_for_server`
CONFIG, ADDRESSES, SHARD = "fedml_config.yaml", "ip.csv", "{rank}.safetensors"
LOG = logging.getLogger(__name__)


def run(deployment: Deployment, parts: Parts, folder: Path, deadline_s: float = DEADLINE_S) -> str:
    """Runs a deployment; all files are written into `folder`.

    Returns the SHA-256 of the final weights.

    Raises UserError that names the process and its log. In every case, all processes are ended.
    """
    ranks = range(len(parts.clients) + 1)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (results.MODEL, results.ROUNDS):
        (folder / stale).unlink(missing_ok=True)
    shards.write(str(folder / SHARD), parts)
    write_whole(
        folder / ADDRESSES, "receiver_id,ip\n" + "".join(f"{rank},{HOST}\n" for rank in ranks)
    )
    comm = {"backend": "GRPC", "grpc_ipconfig_path": str(folder / ADDRESSES)}
    write_whole(
        folder / CONFIG,
        yaml.safe_dump(deployment.model_dump(by_alias=True) | {"comm_args": comm}, sort_keys=False),
    )

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fedml_noniid.deploy.pair"]
    )  # imports FedML once (11 s, 1 GB) for all processes
    processes = [
        context.Process(target=_process, args=(rank, deployment, folder), daemon=True)
        for rank in ranks
    ]
    with lock_ports(WAIT_S):
        for rank in ranks:
            check_port(rank)
        try:
            for process in processes:
                process.start()
            _watch(processes, deadline_s, folder)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
    with safe_open(folder / results.MODEL, framework="pt") as file:
        return str(file.metadata()["weights_sha256"])


def log_file(folder: Path, rank: int) -> Path:
    """All that a process prints or logs."""
    return folder / f"fedml-{rank}.log"


def check_port(rank: int) -> None:
    """UserError if the port of `rank` is taken.

    FedML would share it (SO_REUSEPORT), and both runs would hang.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Closing connections of the last run don't matter, but listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", BASE_PORT + rank))
        except OSError as error:
            why = f"{error.strerror}; FedML's ports are fixed, so end the process that has it"
            raise UserError(
                f"port {BASE_PORT + rank} of {name(rank)} can't be used: {why}"
            ) from None


@contextmanager
def lock_ports(wait_s: float) -> Iterator[None]:
    """Keeps other runs on this machine off FedML's ports.

    UserError if one still holds them after `wait_s`.

    A port that is free now is not enough: another run imports FedML for some seconds before it
    listens.
    """
    path = Path(tempfile.gettempdir()) / f"fedml-ports-{BASE_PORT}.lock"
    end = time.monotonic() + wait_s
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666)) as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > end:
                raise UserError(
                    f"another run has used FedML's ports for {wait_s:.0f} s ({path}); let it "
                    "end first"
                )
            time.sleep(0.2)
        yield


@contextmanager
def no_phoning_home() -> Iterator[None]:
    """`fedml.init` asks FedML's host for its configuration, whatever `using_mlops` says; here it
    gets an empty one."""
    from fedml.core.mlops.mlops_configs import MLOpsConfigs

    original = MLOpsConfigs.__dict__["fetch_all_configs"]
    MLOpsConfigs.fetch_all_configs = staticmethod(lambda: ({}, {}, {"LOG_SERVER_URL": ""}, {}))
    try:
        yield
    finally:
        MLOpsConfigs.fetch_all_configs = original


def wait_for_server(timeout_s: float) -> None:
    """Returns when the server listens and has looked for silos. Raises UserError after `timeout_s`.

    A silo that starts before the server fails. A silo that the server finds during its search
    reports twice, gets the model twice, and can then block the server for ever while it trains.
    """
    end = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), socket.create_connection((HOST, BASE_PORT), 1.0):
            break
        if time.monotonic() > end:
            raise UserError(f"no server at {HOST}:{BASE_PORT} after {timeout_s:.0f} s")
        time.sleep(0.2)
    time.sleep(SETTLE_S)


def _watch(processes: Sequence[BaseProcess], deadline_s: float, folder: Path) -> None:
    """Returns when all have ended well.

    Raises UserError when one fails, for the others would wait for ever.
    """
    end = time.monotonic() + deadline_s
    while running := [rank for rank, process in enumerate(processes) if process.exitcode is None]:
        wait(
            [processes[rank].sentinel for rank in running], timeout=max(0.0, end - time.monotonic())
        )
        for rank in running:
            if code := processes[rank].exitcode:
                raise UserError(
                    f"{name(rank)} ended with exit code {code}; see {log_file(folder, rank)}"
                )
        if time.monotonic() > end:
            late = ", ".join(name(rank) for rank in running)
            raise UserError(f"not over after {deadline_s:.0f} s: {late}; see the logs in {folder}")


def _process(rank: int, deployment: Deployment, folder: Path) -> None:
    """The main function of a forked process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = os.open(
        log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644
    )
    for stream in (1, 2):  # FedML prints to stdout, gRPC writes to stderr without Python
        os.dup2(log, stream)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    torch.set_num_threads(deployment.device_args.threads)
    code = 1
    try:
        if rank:
            wait_for_server(WAIT_S)
        _fedml(rank, deployment, folder)
        code = 0
    except Exception:  # of FedML or of the pair, which is the same here: the run has failed
        LOG.exception("%s failed", name(rank))
    finally:
        logging.shutdown()
        os._exit(code)  # threads that FedML and gRPC left running would keep the process alive


def _die_with_parent() -> None:
    """Ends this process as soon as its parent is gone, for any reason; otherwise it would keep its
    port."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs within a process that was started here"
    wait([parent.sentinel])
    os._exit(1)


def _fedml(rank: int, deployment: Deployment, folder: Path) -> None:
    """The steps of a FedML user's main.py."""
    import fedml
    from fedml.arguments import Arguments

    from fedml_noniid.deploy.host import Model, batches
    from fedml_noniid.deploy.pair import make_pair

    command = argparse.Namespace(
        yaml_config_file=str(folder / CONFIG),
        run_id="0",
        rank=rank,
        local_rank=0,
        node_rank=0,
        role="client" if rank else "server",
        run_device_id="0",
        using_mlops=False,
    )
    args = Arguments(command, training_type="cross_silo", comm_backend="GRPC")
    args.worker_num = deployment.silos
    with no_phoning_home():
        # Without FedML's own logging set-up, which turns every print of the process into a log
        # record.
        args = fedml.init(args, check_env=False, should_init_logs=False)

    shard = shards.read(folder / SHARD.replace("{rank}", str(rank)), rank, deployment.silos)
    samples = shard.parts["train" if rank else "test"]
    model = Model(deployment.network(tuple(samples.x.shape[1:]), shard.n_classes, shard.embedding))
    trainer_class, aggregator_class = make_pair(deployment.train_args.recipe)
    # The constructor of the runner runs everything; `.run()` would only leave a file in the home
    # folder.
    cpu, n, k = torch.device("cpu"), len(samples.y), rank - 1
    if rank:
        dataset = (n, 0, None, None, {k: n}, {k: batches(samples)}, None, shard.n_classes)
        fedml.FedMLRunner(args, cpu, dataset, model, trainer_class(model, args, shard))
        return
    aggregator = aggregator_class(model, args, shard)
    fedml.FedMLRunner(
        args, cpu, (0, 0, None, None, {}, {}, None, shard.n_classes), model, None, aggregator
    )
    if aggregator.server_run.down.ask is not None:
        raise UserError("FedML ended before the run was over")
    write_whole(folder / results.ROUNDS, rounds_csv(aggregator.server_run.loop.rows))
    results.write_model(folder / results.MODEL, aggregator.server_run.loop.outcome)
