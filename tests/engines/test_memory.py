"""The data lie in memory once, whatever the number of clients; and a large cross-device round fits
into 6 GB."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_data_are_there_once(engine: str) -> None:
    x, y = torch.randn(401, 13), torch.arange(401) % 3
    train, test = Samples(x, y), Samples(x[:7].clone(), y[:7])
    clients = np.array_split(np.arange(401), 200)
    local = LocalTraining(lr=0.1, epochs=1, batch_size=8)
    network = build("mlp", (13,), 3, {"hidden": 4})
    simulation = simulate(
        "scaffold+rfedavg_plus",
        {},
        Federation.from_indices(train, clients, test),
        Plan(network, local, 2, 2, 0, engine=engine),
    )
    most = 0
    for _ in simulation.rounds():
        wide = {
            t.untyped_storage().data_ptr()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.shape == x.shape
        }
        most = max(most, len(wide))
    assert most == 1 and simulation.engine.clients.train.x is x


# The most memory is VmHWM: in `ru_maxrss` is that of the process which started the script.
CROSS_DEVICE = """
from pathlib import Path
import numpy as np, torch
from fedml_noniid.core.data import Samples
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate

def images(n):
    return torch.randint(256, (n, 3, 28, 28), dtype=torch.uint8), torch.arange(n) % 10

torch.set_num_threads(1)
raw = Raw(*images(50_000), *images(10_000), [str(c) for c in range(10)])
data = Dataset.from_raw("cifar", raw, "half")
train = Samples(data.normalised("train"), data.train_y)
test = Samples(data.normalised("test"), data.test_y)
local = LocalTraining(lr=0.1, epochs=1, batch_size=32)
plan = Plan(build("cnn", (3, 28, 28), 10), local, 1, 100, 0)
of = Federation.from_indices(train, np.array_split(np.arange(50_000), 500), test)
row = simulate("rfedavg_plus", {}, of, plan).run().rows[-1]
assert row["test_accuracy"] >= 0, row
most = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(1024 * int(most))
"""


@pytest.mark.slow
def test_500_clients_of_cifar_10_in_6_gb() -> None:
    """rFedAvg's cross-device case, 20 % of 500 clients with its CNN, one round; random pixels in
    CIFAR-10's shape."""
    found = subprocess.run(
        [sys.executable, "-c", CROSS_DEVICE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 6e9


MANY_CLIENTS = """
import sys, time
from pathlib import Path
import numpy as np, torch
from fedml_noniid.core.data import Samples
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate

class Timed(Checkpointing):
    seconds = []

    def on_round(self, run, row):
        began = time.perf_counter()
        super().on_round(run, row)
        self.seconds.append(time.perf_counter() - began)

torch.set_num_threads(1)
train = Samples(torch.randn(1000, 784), torch.arange(1000) % 10)
clients = list(np.random.default_rng(0).integers(0, 1000, (100_000, 8)))
local = LocalTraining(lr=0.05, epochs=5, batch_size=4)
plan = Plan(build("mlp", (784,), 10, {"hidden": 1256}), local, 8, 20, 0)
of = Federation.from_indices(train, clients, Samples(train.x[:100], train.y[:100]))
saves = Timed(Checkpoints(Path(sys.argv[1]) / "run.safetensors", ""))
simulate("scaffold", {}, of, plan, [saves]).run()
most = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(1024 * int(most), min(saves.seconds))
"""


@pytest.mark.slow
def test_100_000_clients_with_a_million_numbers_each_in_4_gb(tmp_path: Path) -> None:
    """SCAFFOLD: the memories of all clients would be 400 GB. A checkpoint takes less than a
    second."""
    found = subprocess.run(
        [sys.executable, "-c", MANY_CLIENTS, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    resident, seconds = map(float, found.stdout.split())
    assert resident < 4e9 and seconds < 1
