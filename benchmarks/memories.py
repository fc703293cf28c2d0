"""What clients' memories on disk cost: rounds of SCAFFOLD with very many clients, beside rounds
with few whose memories lie in RAM. In turns, each in a process of its own."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.core.data import Samples
from fedml_noniid.core.trees import tree_map
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.callbacks import CurrentRun, Row
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Checkpointing
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate

FILE = Path("docs/results/memories.csv")
FORMS = {"ram": 1_000, "disk": 100_000}  # clients by form
ENGINES = ("sequential", "vectorized")
TURNS, ROUNDS, WARM, COHORT = 3, 14, 2, 10
STEPS, BATCH, EVERY = 50, 4, 5  # local steps, samples, rounds from one checkpoint to the next
SAMPLES, OWN, HIDDEN = 1_000, 8, 1_256  # in all; of a client, which shares them; of the MLP
COLUMNS = ["engine", "clients", "form", "turn", "round_s", "checkpoint_s", "peak_mb"]


class Timed(Checkpointing):
    """Also takes the time of each checkpoint."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints, EVERY)
        self.took = [0.0]

    def on_round(self, run: CurrentRun, row: Row) -> None:
        began = time.perf_counter()
        super().on_round(run, row)
        self.took.append(time.perf_counter() - began)


def simulated(engine: str, form: str, timed: Timed) -> Simulation:
    """SCAFFOLD on a model of a million parameters. On disk, every client that will be drawn has
    been drawn before."""
    n, generator = FORMS[form], torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 784, generator=generator)
    y = torch.arange(SAMPLES) % 10
    clients = list(np.random.default_rng(0).integers(0, SAMPLES, (n, OWN)))
    local = LocalTraining(lr=0.05, epochs=1, local_steps=STEPS, batch_size=BATCH)
    network = build("mlp", (784,), 10, {"hidden": HIDDEN})
    plan = Plan(network, local, ROUNDS, COHORT, 0, engine=engine, clients_memory=form)
    federation = Federation.from_indices(Samples(x, y), clients, Samples(x[:100].clone(), y[:100]))
    made = simulate("scaffold", {}, federation, plan, [timed] if form == "disk" else [])
    memory = made.engine.clients.memory
    if form == "disk":
        one = tree_map(lambda leaf: 1e-3 * torch.ones_like(leaf), memory.first)
        drawn = {k for t in range(1, ROUNDS + 1) for k in plan.draw_cohort(t, n)}
        for client in sorted(drawn):
            memory.put_row(client, one)
        memory.committed()
    return made


def one(engine: str, form: str) -> None:
    """Prints seconds of a round and of a checkpoint, and MB, of a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        timed, times = Timed(Checkpoints(Path(folder) / "c.safetensors", "")), []
        rounds = simulated(engine, form, timed).rounds()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            next(rounds)
            times.append(time.perf_counter() - began - (timed.took[-1] if form == "disk" else 0))
    (kib,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    sys.stdout.write(f"{median(times[WARM:]):.4f} {max(timed.took):.4f} {int(kib) >> 10}")


def measured(turn: int, engine: str, form: str) -> dict[str, Any]:
    """A line of the table."""
    code = f"from benchmarks import memories; memories.one({engine!r}, {form!r})"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    values = [engine, FORMS[form], form, turn, *found.stdout.split()]
    return dict(zip(COLUMNS, values, strict=True))


def write(root: Path) -> None:
    """Measures, and writes the table and the page."""
    watch = machine.Watch()
    rows = [
        measured(turn, engine, form)
        for turn in range(1, TURNS + 1)
        for engine in ENGINES
        for form in FORMS
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    context: dict[str, Any] = {
        "rows": rows,
        "machine": machine.line(watch.found()),
    }
    context |= {"ratios": [_ratios(rows, engine) for engine in ENGINES], "cohort": COHORT}
    write_whole(root / FILE, text.getvalue())
    write_whole(root / FILE.with_suffix(".md"), render("memories.md.j2", context))


def _ratios(rows: list[dict[str, Any]], engine: str) -> str:
    """The ratio of each turn, in words."""
    times = {
        (row["form"], row["turn"]): float(row["round_s"]) for row in rows if row["engine"] == engine
    }
    found = [times["disk", turn] / times["ram", turn] for turn in range(1, TURNS + 1)]
    return f"{engine}: {', '.join(f'{ratio:.3f}' for ratio in found)}"
