"""What each method costs a GPU, counted on a fake one: `python -m benchmarks budget` writes
docs/results/gpu-budget.*.

tests/engines/test_gpu_budget.py holds every method to this table: a method may not launch more,
copy more or wait more.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.fake_gpu import DEVICE, Counts, fake_gpu
from benchmarks.report import RESULTS, render
from fedml_noniid.contract.federation import takes_norms
from fedml_noniid.core.data import Samples
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import ENGINES
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate

FILE = RESULTS / "gpu-budget.csv"
COLUMNS = (
    "recipe",
    "engine",
    *Counts._fields,
    "launches_per_step",
    "waits_at",
)
Settings = Mapping[str, Mapping[str, object]]


class Setting(NamedTuple):
    """What is run: a network on clients of some sizes."""

    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    n_classes: int
    sizes: tuple[int, ...]
    cohort: int
    batch_size: int
    clients_at_once: int | None = None


SMALL = Setting("mlp", {"hidden": 4, "batch_norm": True}, (1, 2, 4), 3, (5, 7, 18, 11), 3, 4)
# Of the users only the cohort's size counts, so there are fewer than pfl's 1,000.
PFL = Setting("pfl_cnn", {}, (3, 32, 32), 10, (50,) * 60, 50, 10, 50)


class Cost(NamedTuple):
    """What a round costs, and where the host waits."""

    counts: Counts
    waits: Counter[str]


def of_round(recipe: str, settings: Settings, engine: str, setting: Setting, steps: int) -> Cost:
    """The second round, with `steps` local steps: in the first one, memory is made that later
    rounds use again."""
    n, options = sum(setting.sizes), dict(setting.options)
    if not takes_norms(recipe, settings):
        options.pop("batch_norm", None)
    clients = np.split(np.arange(n), np.cumsum(setting.sizes)[:-1])
    local = LocalTraining(lr=0.1, epochs=1, batch_size=setting.batch_size, local_steps=steps)
    with fake_gpu() as watch:
        x = torch.empty(n + 20, *setting.shape, device=DEVICE)
        y = torch.zeros(n + 20, dtype=torch.int64, device=DEVICE)
        train, test, public = (
            Samples(x[part], y[part]) for part in np.split(np.arange(n + 20), [n, n + 10])
        )
        simulation = simulate(
            recipe,
            settings,
            Federation.from_indices(train, clients, test, public=public),
            Plan(
                build(setting.model, setting.shape, setting.n_classes, options),
                local,
                2,
                setting.cohort,
                0,
                engine=engine,
                clients_at_once=setting.clients_at_once,
            ),
        )
        rounds = simulation.rounds()
        next(rounds)
        before, waits = watch.counts, watch.waited.copy()
        next(rounds)
        return Cost(watch.counts - before, watch.waited - waits)


def per_step(recipe: str, settings: Settings, engine: str, setting: Setting) -> float:
    """Launches of one more step: of all clients side by side, or of one client."""
    few, many = (
        of_round(recipe, settings, engine, setting, steps).counts.launches for steps in (2, 4)
    )
    return (many - few) / 2 / (1 if engine == "vectorized" else setting.cohort)


def row(
    name: str, recipe: str, settings: Settings, engine: str, setting: Setting, steps: int
) -> list[object]:
    """A line of the table."""
    cost = of_round(recipe, settings, engine, setting, steps)
    places = ", ".join(
        f"{caller} x{times}" if times > 1 else caller
        for caller, times in sorted(cost.waits.items())
    )
    launches = f"{per_step(recipe, settings, engine, setting):g}"
    return [name, engine, *cost.counts, launches, places]


def table(entries: Mapping[str, tuple[str, Settings]]) -> bytes:
    """CSV: pfl's benchmark, then each entry, a name with its recipe and settings, by engine."""
    lines = [row("fedavg (pfl's CIFAR-10 benchmark)", "fedavg", {}, "vectorized", PFL, 5)]
    for name, (recipe, settings) in entries.items():
        lines += [
            row(name, recipe, settings, engine, SMALL, 2) for engine in ENGINES if engine != "auto"
        ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines])
    return text.getvalue().encode()


def write() -> None:
    """Writes the table for the recipes of the tests."""
    from tests.recipe_table import ALONE

    content = table(ALONE)
    write_whole(FILE, content)
    cells = [line[:-1] for line in csv.reader(content.decode().splitlines())]
    write_whole(FILE.with_suffix(".md"), render("gpu-budget", {"table": cells}))
