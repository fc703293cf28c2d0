"""`examples/fedml_project` as its user runs it: FedML's own runner and gRPC, a process per rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.stock_fedml import check_port, lock_ports, wait_for_server
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.shards import of_loaders
from fedml_noniid.plugins.silo.settings import check
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
DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.usefixtures("ports")
def test_the_project_ends_with_the_weights_of_the_simulation(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(PROJECT, tmp_path / "project"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        stack.enter_context(lock_ports(DEADLINE_S))
        processes = []
        for rank in range(4):
            check_port(rank)
            log = stack.enter_context((tmp_path / f"{rank}.log").open("w"))
            role = "client" if rank else "server"
            command = [sys.executable, "-c", OFFLINE, "--cf", "fedml_config.yaml"]
            process = subprocess.Popen(
                [*command, "--rank", str(rank), "--role", role],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
            stack.callback(process.kill)
            processes.append(process)
            if not rank:
                wait_for_server(DEADLINE_S)
        codes = [process.wait(DEADLINE_S) for process in processes]
        assert codes == [0] * 4, tmp_path / f"{codes.index(next(filter(None, codes)))}.log"
    made = subprocess.run(
        [sys.executable, "simulation.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (_, simulated), (_, deployed) = (line.split() for line in made.stdout.splitlines()[-2:])
    assert simulated == deployed and len(simulated) == 64


def test_a_loader_that_shuffles_is_refused() -> None:
    data = TensorDataset(torch.arange(6.0).view(6, 1), torch.arange(6) % 2)
    shard = of_loaders(1, 3, 2, train=DataLoader(data, batch_size=4))
    assert shard.parts["train"].x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="train: its DataLoader shuffles"):
        of_loaders(1, 3, 2, train=DataLoader(data, batch_size=4, shuffle=True))


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
