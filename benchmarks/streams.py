"""One server with many silos in one round: `python -m benchmarks streams` writes
docs/results/streams.md and .csv.

Each silo has a certificate, a stream (TLS) and an audit log of its own, as deployed. A few
processes share the silos among them, without FedML. A silo adds one to the model that it gets, so
an exchange takes the time of its messages. The server is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.core.component import Ask
from fedml_noniid.core.errors import UserError
from fedml_noniid.credentials import authority
from fedml_noniid.credentials.certificates import Kit
from fedml_noniid.data.files import write_whole
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_client import SiloClient
from fedml_noniid.deploy.silo_server import SiloServer
from fedml_noniid.deploy.stream import event_loop
from fedml_noniid.governance.audit import FILE, Log
from fedml_noniid.governance.witness import Witness
from fedml_noniid.processes import launch

STUDY = "0" * 64  # its SHA-256: all agree on it
OUT, MB = "streams.csv", 1e6


class Size(NamedTuple):
    """What is measured."""

    silos: int
    numbers: int  # float32 of the model
    exchanges: int
    processes: int  # that the silos share


def memory(what: str) -> float:
    """Memory of this process, in MB: VmRSS, now, or VmHWM, the most so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) * 1024 / MB


def cpu() -> float:
    """CPU seconds of this process."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def witness(folder: Path, rank: int) -> Witness:
    """With the audit log of a process."""
    kit = Kit.read(folder / "kits" / str(rank), rank)
    return Witness(Log(folder / FILE.format(rank), kit), kit)


def silo(comm: CommArgs, folder: Path, client: int) -> None:
    """One silo, to the end of the run."""

    def answered(down: wire.Down) -> wire.Up:
        assert down.ask is not None, "there is something to do"
        return wire.up(client, down.exchange, {"w": down.ask.params["w"] + 1})

    hello, rank = wire.Hello(session=f"{client}", study=STUDY, samples=1), client + 1
    own = witness(folder, rank)
    with SiloClient(comm, folder / "kits" / str(rank), client, hello, witness=own) as connection:
        connection.serve(answered)


def some_silos(comm: CommArgs, folder: Path, clients: range) -> None:
    """The silos of one process, a thread each."""
    torch.set_num_threads(1)
    event_loop()  # before the threads, which would make one each
    with ThreadPoolExecutor(len(clients)) as pool:
        for found in [pool.submit(silo, comm, folder, client) for client in clients]:
            found.result()
    launch.leave(0)


def server(comm: CommArgs, folder: Path, size: Size) -> None:
    """The server. Writes a line per exchange; exchange -1 is the wait for all silos."""
    torch.set_num_threads(1)
    rows, model = list[dict[str, float]](), {"w": torch.zeros(size.numbers)}
    coordinator, own = Coordinator(comm, size.silos, STUDY, "run"), witness(folder, 0)

    def noted(exchange: int, began: tuple[float, float]) -> None:
        taken = {"seconds": time.monotonic() - began[0], "cpu_seconds": cpu() - began[1]}
        room = {"rss_mb": memory("VmRSS"), "most_mb": memory("VmHWM")}
        rows.append({"exchange": exchange, **taken, **room})

    noted(-2, (time.monotonic(), cpu()))
    with SiloServer(comm, folder / "kits" / "0", coordinator, own):
        began = time.monotonic(), cpu()
        coordinator.gather()
        noted(-1, began)
        for exchange in range(size.exchanges):
            ask = Ask("train", tuple(range(size.silos)), model)
            began = time.monotonic(), cpu()
            down = wire.Down(exchange, exchange + 1, ask, "")
            found = coordinator.ask(down, model, lambda up, *_: dict(up["leaves"]))
            noted(exchange, began)
            assert all(torch.equal(found[k]["w"], model["w"] + 1) for k in ask.to), "all answered"
            model = found[0]
        coordinator.finish("over")
    write_whole(folder / OUT, pd.DataFrame(rows).to_csv(index=False))
    launch.leave(0)


def measure(size: Size) -> tuple[pd.DataFrame, int]:
    """(a line per exchange, lines of the server's audit log). UserError if a process fails."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as place:
        folder = Path(place)
        authority.make(folder / "kits", size.silos)
        with socket.create_server(("127.0.0.1", 0)) as free:
            comm = CommArgs(server=f"127.0.0.1:{free.getsockname()[1]}")
        shares = [range(k, size.silos, size.processes) for k in range(size.processes)]
        started: list[Any] = [context.Process(target=server, args=(comm, folder, size))]
        started += [context.Process(target=some_silos, args=(comm, folder, of)) for of in shares]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise UserError("a process of the measurement has failed; it has said why")
        lines = len((folder / FILE.format(0)).read_bytes().splitlines())
        return pd.read_csv(folder / OUT), lines


def write(root: Path, size: Size, command: str) -> None:
    """Measures, and writes the table and the page."""
    watch = machine.Watch()
    table, lines = measure(size)
    context: dict[str, Any] = {"size": size, "command": command, "lines": lines}
    context |= {"machine": machine.line(watch.found())}
    context |= {"start": table.iloc[0], "gathered": table.iloc[1], "exchanges": table.iloc[2:]}
    to = root / "docs" / "results"
    write_whole(to / OUT, table.to_csv(index=False))
    write_whole(to / "streams.md", render("streams.md.j2", context))
