"""Who only simulates never imports fedml; who asks for a pair does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


PROGRAM = """
import os, sys
from fedml_noniid.plugins import ccn, fednlr, fednnnn, fnr, rfedavg
import fedml_noniid.plugins.registry, fedml_noniid.engines.simulation
from fedml_noniid.deploy import server_run
from fedml_noniid.processes import launch, loopback
from tests.deploy import world
world.simulated("scaffold+fnr", {}, True)
assert not [name for name in sys.modules if name.split(".")[0] in ("fedml", "grpc", "mlflow")]
from fedml_noniid.cli import app
from fedml_noniid.credentials import authority
from fedml_noniid.governance.secure import silo as secure_silo
from fedml_noniid.deploy import silo_client, silo_server
from fedml_noniid.processes import launch, loopback
from fedml_noniid.governance import audit, disclosure, replay, study
assert not {"dvc", "mlflow", "pyarrow", "tabulate", "dask", "distributed"} & sys.modules.keys()
from fedml_noniid.deploy import host, pair
import fedml
assert not {"dvc", "mlflow"} & sys.modules.keys()
os._exit(0)
"""


def test_the_simulation_never_imports_fedml_nor_a_deployment_the_pipeline(tmp_path):
    """FedML's own packages import others of it where they are installed.

    wandb, which FedML imports, makes four empty folders in each process, and a process that is
    ended leaves them: ours has none.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_asking_for_a_pair_imports_fedml():
    from fedml_noniid.plugins.fnr import FNRAggregator, FNRTrainer

    names = [[base.__name__ for base in pair.__mro__] for pair in (FNRTrainer, FNRAggregator)]
    assert "ClientTrainer" in names[0] and "ServerAggregator" in names[1]
    assert "fedml" in sys.modules
