"""`examples/fedml_project` as its user runs it: FedML's own runner and gRPC, a process per rank."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from benchmarks.stock_fedml import check_port, lock_ports, wait_for_server
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.shards import of_loaders
from fedml_noniid.deploy.settings import check
from tests.deploy import world
from tests.pipelines.small import ROOT

PROJECT = ROOT / "examples" / "fedml_project"
# Tests use no network: `fedml.init` gets an empty configuration in place of that of FedML's host.
OFFLINE = """\
import runpy, sys
from fedml.core.mlops.mlops_configs import MLOpsConfigs
MLOpsConfigs.fetch_all_configs = staticmethod(lambda: ({}, {}, {"LOG_SERVER_URL": ""}, {}))
sys.argv = ["main.py", *sys.argv[1:]]
sys.path.insert(0, "")
runpy.run_path("main.py", run_name="__main__")
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DEADLINE_S = 240.0


@contextmanager
def project(folder: Path, python: str = sys.executable) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The four processes of a project, the server first; each has a log <rank>.log."""
    with ExitStack() as stack:
        stack.enter_context(lock_ports(DEADLINE_S))
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(4):
            check_port(rank)
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            role = "client" if rank else "server"
            command = [python, "-c", OFFLINE, "--cf", "fedml_config.yaml"]
            process = subprocess.Popen(
                [*command, "--rank", str(rank), "--role", role],
                cwd=folder,
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
            )
            stack.callback(process.kill)
            processes.append(process)
            if not rank:
                wait_for_server(DEADLINE_S)
        yield processes


def copied(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """The project with changes: file, text, other text."""
    made = Path(shutil.copytree(PROJECT, folder / "project"))
    for name, text, other in changes:
        content = (made / name).read_text()
        assert content.count(text) == 1
        (made / name).write_text(content.replace(text, other))
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("ports")
def test_the_project_ends_with_the_weights_of_the_simulation(tmp_path: Path) -> None:
    """With FedML's name of the rounds, several exchanges in each, and loaders that shuffle."""
    folder = copied(
        tmp_path,
        ("fedml_config.yaml", "rounds: 4 ", "comm_round: 3 "),
        ("fedml_config.yaml", "scaffold+ccn", "scaffold+rfedavg_plus+ccn"),
    )
    with project(folder) as processes:
        codes = [process.wait(DEADLINE_S) for process in processes]
        assert codes == [0] * 4, folder / f"{codes.index(next(filter(None, codes)))}.log"
    made = subprocess.run(
        [sys.executable, "simulation.py"],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    (_, simulated), (_, deployed) = (line.split() for line in made.stdout.splitlines()[-2:])
    assert simulated == deployed and len(simulated) == 64
    # rFedAvg+ asks for means first, and then twice in a round.
    assert ": 3 rounds, in 7 exchanges; 3 of 3 silos" in (folder / "0.log").read_text()


WEIGHTED = "sampler=torch.utils.data.WeightedRandomSampler([1.0] * len(rows), len(rows))"
CAUGHT = """\
if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from error
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            [("silo_data.py", "shuffle=bool(rank)", f"{WEIGHTED} if rank == 2 else None")],
            "silo 1 (rank 2) has ended before the run was over: UserError: train: its DataLoader",
            id="before the silo has a pair",
        ),
        pytest.param(
            [
                (
                    "main.py",
                    "    device = ",
                    "    args.nesterov = args.rank == 2\n    device = ",
                ),
                ("main.py", CAUGHT.splitlines()[0] + "\n    main()\n", CAUGHT),
            ],
            "silo 1 (rank 2) has ended before the run was over: see its log",
            id="by the silo's pair, and its user catches it",
        ),
        pytest.param(
            [("main.py", "    device = ", "    args.epochs += args.rank == 2\n    device = ")],
            "silo 1 (rank 2): its configuration is not the server's",
            id="by the server in the first round",
        ),
    ],
)
def test_a_refusal_ends_all_processes(
    changes: list[tuple[str, str, str]], said: str, tmp_path: Path
) -> None:
    folder = copied(tmp_path, *changes)
    with project(folder) as processes:
        codes = [process.wait(DEADLINE_S) for process in processes]
    assert all(codes), codes
    assert said in (folder / "0.log").read_text()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize(
    ("rank", "other", "columns", "row", "port"),
    [
        (0, 1, "receiver_id,ip", "{rank},127.0.0.1", 8890),
        # 192.0.2.7 is nobody's address.
        (
            *(2, 0, "eid,rank,grpc_server_ip,grpc_server_port,ingress_ip"),
            *("{rank},{rank},192.0.2.7,{port},127.0.0.1", 9190),
        ),
        (
            *(0, 1, "grpc_server_port,ingress_ip,grpc_server_ip,rank,eid"),
            *("{port},,127.0.0.1,{rank},{rank}", 9190),
        ),
    ],
)
def test_a_process_that_fails_ends_those_that_wait_for_it(
    rank: int, other: int, columns: str, row: str, port: int, tmp_path: Path, monkeypatch
) -> None:
    """FedML's own loop of messages hears it, whatever it waits for.

    The addresses are in the form of FedML 0.8.30, or of 0.9.6, where ports are free.
    """
    host = importlib.import_module("fedml_noniid.deploy.host")
    from fedml.core.distributed.communication.grpc import grpc_comm_manager as fedmls

    known, addresses = tmp_path / "known.csv", tmp_path / "ip.csv"
    known.write_text("receiver_id,ip\n0,127.0.0.1\n1,127.0.0.1\n")  # of the manager below
    rows = [row.format(rank=each, port=port + each) for each in (0, 1)]
    addresses.write_text("\n".join([columns, *rows, ""]))
    args = SimpleNamespace(rank=rank, grpc_ipconfig_path=str(addresses))
    monkeypatch.setattr(fedmls, "lock", threading.Lock())
    for key in ("joined", "unfinished"):
        monkeypatch.setattr(host._Process, key, False)
    with lock_ports(DEADLINE_S), ExitStack() as stack:
        check_port(other)
        manager = fedmls.GRPCCommManager("127.0.0.1", port + other, str(known), "", other, 1)
        stack.callback(manager.stop_receive_message)
        assert not host.tell_others(args), "nothing has failed"
        monkeypatch.setattr(sys, "last_value", UserError("no GPU"), raising=False)
        assert host.tell_others(args)
        with pytest.raises(host.EndedError, match=r"has ended before .*: UserError: no GPU$"):
            manager.message_handling_subroutine()


# Loaders
# --------------------------------------------------------------------------------------------------


DATA = TensorDataset(torch.arange(6.0).view(6, 1), torch.arange(6) % 2)


def train(loader: object) -> list[float]:
    """The inputs that a silo trains on, in their order."""
    samples = of_loaders(1, 3, 2, train=loader).parts["train"]
    assert torch.equal(samples.y, samples.x.flatten().long() % 2)
    return samples.x.flatten().tolist()


class Seeded(Sampler[int]):
    """A user's own sampler."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6).tolist())

    def __len__(self) -> int:
        return 6


class Noisy(torch.utils.data.Dataset):
    """A transform that draws random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((1,), float(i)) + torch.rand(1), i % 2


class Stream(IterableDataset):
    """Samples in a fixed order, or in one that is drawn."""

    def __init__(self, shuffles: bool) -> None:
        self.shuffles = shuffles

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(6) if self.shuffles else torch.arange(6)
        return iter([DATA[int(i)] for i in order])


SHUFFLED = RandomSampler(DATA)
IN_ORDER = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        (DataLoader(DATA, batch_size=4), IN_ORDER),
        (DataLoader(DATA, batch_size=4, shuffle=True), IN_ORDER),
        (DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True), IN_ORDER),
        (DataLoader(DATA, batch_sampler=BatchSampler(SHUFFLED, 4, True)), IN_ORDER),
        (DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler([4, 1, 3])), [4, 1, 3]),
        (DataLoader(DATA, batch_size=4, sampler=[2, 0]), [2, 0]),
        (DataLoader(Subset(DATA, [5, 2, 3]), batch_size=2, shuffle=True), [5, 2, 3]),
        (DataLoader(Stream(False), batch_size=4), IN_ORDER),
        ([DATA[:4], DATA[4:]], IN_ORDER),
        ((DATA[i : i + 2] for i in (0, 2, 4)), IN_ORDER),
    ],
)
def test_a_loader_is_read_in_the_order_of_its_data(loader: object, order: list[float]) -> None:
    before = torch.get_rng_state()
    assert train(loader) == order
    if not (isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)):
        assert torch.equal(torch.get_rng_state(), before)  # the caller's generator


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 6, 6)), "WeightedRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=3)), "RandomSampler"),
        (DataLoader(DATA, sampler=Seeded()), "Seeded"),
        (DataLoader(DATA, batch_sampler=BatchSampler(Seeded(), 4, False)), "Seeded"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "list"),
        (DataLoader(Noisy(), batch_size=4, shuffle=True), "two readings differ"),
        (DataLoader(Stream(True), batch_size=4), "two readings differ"),
        (
            DataLoader(DATA, collate_fn=lambda items: (torch.rand(1, 1), torch.zeros(1).long())),
            "two readings differ",
        ),
        (DataLoader([{"x": torch.zeros(1), "y": 0}]), "can't be joined"),
        (DataLoader([(torch.zeros(1), 0, 1)]), "can't be joined"),
        (DataLoader([(torch.zeros(1), "cat")]), "can't be joined"),
        (DataLoader(TensorDataset(torch.zeros(0, 1), torch.zeros(0))), "can't be joined"),
        ([], "can't be joined"),
    ],
)
def test_a_loader_whose_samples_are_drawn_is_refused(loader: object, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        train(loader)
    (line,) = str(error.value).splitlines()
    assert line.startswith("train: ") and "allowed: " in line


def test_fedmls_data_are_those_of_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    """FedML hands its own loader to the trainer; a shuffling one is read in the same order."""
    aggregator, (silo, *_) = world.pair("fedavg", {})
    ((x, y),) = silo._batches
    silo.set_model_params(aggregator.get_model_params())

    def train(x: torch.Tensor, **options: object) -> None:
        loader = DataLoader(TensorDataset(x, y), shuffle=True, **options)
        silo.update_dataset(loader, None, len(y))
        silo.train(silo.local_train_dataset, torch.device("cpu"), silo.args)

    train(x, batch_size=5, drop_last=True)
    assert torch.equal(silo.silo._shard.parts["train"].x, x)
    assert f"args.batch_size = {world.BATCH} is used, not 5 of the loader" in caplog.text
    assert "args.drop_last = False is used, not True of the loader" in caplog.text
    with pytest.raises(UserError, match="data of FedMLRunner are not the shard's"):
        train(x.flip(0), batch_size=world.BATCH)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("common_args", "training_type", "simulation"),
        ("common_args", "training_type", "cross_device"),
        ("common_args", "scenario", "hierarchical"),
        ("common_args", "using_mlops", True),
        ("comm_args", "backend", "MQTT_S3"),
        ("comm_args", "backend", "MPI"),
        ("train_args", "federated_optimizer", "LSA"),
        ("dp_args", "enable_fhe", True),
        ("validation_args", "enable_contribution", True),
    ],
)
def test_what_the_page_says_is_refused(section: str, key: str, value: object) -> None:
    """docs/fedml.md has a table of what FedML offers."""
    with pytest.raises(UserError, match=rf"^x: {section}\.{key} = .* is ") as error:
        check({section: {key: value}}, "x")
    assert len(str(error.value).splitlines()) == 1
    page = (ROOT / "docs" / "fedml.md").read_text()
    table = page[page.index("## What FedML offers") :]
    assert f"`{key}" in table
