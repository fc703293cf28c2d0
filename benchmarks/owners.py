"""How far a data set with very many owners goes: `python -m benchmarks owners` writes
docs/results/owners.csv and a block of docs/results/scale.md.

An `arrays` data set of 8 features, each owner with one to five samples, runs through the stages of
an experiment, one process each. The rounds of all sizes take turns in one process.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import yaml

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.callbacks import Row
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.config import Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.workspace import Workspace

FILE, PAGE = Path("docs") / "results" / "owners.csv", Path("docs") / "results" / "scale.md"
BLOCK = re.compile(r"(<!-- owners\.csv -->\n).*(<!-- /owners\.csv -->)", re.DOTALL)  # of the page
SIZES = (1_000, 10_000, 100_000, 1_000_000)  # owners
FEATURES, CLASSES, MOST = 8, 10, 5  # MOST samples of an owner
COHORT, TESTS, WARM = 100, 10_000, 10
STAGES = ("prepare", "partition", "train", "evaluate", "report")
RECIPES = ("fedavg", "fedprox", "scaffold")  # the stages run the first two of them
MB = 1e6


def write_study(folder: Path, owners: int, rounds: int) -> None:
    """Writes arrays with `owners` owners and the settings of an experiment on them."""
    rng = np.random.default_rng(owners)
    owner = rng.permutation(np.repeat(np.arange(owners), rng.integers(1, MOST + 1, owners)))
    centres = rng.normal(size=(CLASSES, FEATURES))
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    for part, whose in (("train", owner), ("test", rng.integers(0, owners, TESTS))):
        y = rng.integers(0, CLASSES, len(whose))
        x = (centres[y] + rng.normal(size=(len(whose), FEATURES))).astype(np.float32)
        np.savez(folder / "raw" / f"{part}.npz", x=x, y=y, client=whose)
    scenario = {"partition": "natural", "clients": owners, "participation": COHORT / owners}
    training = {"model": "logistic_regression", "epochs": 1, "batch_size": 10, "lr": 0.1}
    settings = {
        "experiment": "owners",
        "data": {"name": "arrays", "root": "raw", "validation": 0, "public": 0},
        "scenario_names": ["owners"],
        "scenarios": {"owners": scenario},
        "recipe_names": [*RECIPES[:2]],
        "recipes": {"fedavg": {}, "fedprox": {"fedprox": {"mu": 0.1}}, "scaffold": {}},
        "seeds": [0],
        "train": {**training, "rounds": rounds, "device": "cpu", "threads": 1},
    }
    (folder / config.FILE).write_text(yaml.safe_dump(settings, sort_keys=False))


def stage(folder: Path, name: str) -> tuple[float, float]:
    """(seconds, peak MB) of a stage in a process of its own, its imports too.

    The peak is that of one process: of the stage, or of one that it starts. UserError if it fails.
    """
    command = [sys.executable, "-m", "fedml_noniid.pipelines.stages", name]
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(2, 1)
        os.execv(command[0], command)
    _, status, used = os.wait4(child, 0)
    if status:
        raise UserError(f"stage {name} failed; see {folder / 'log.txt'}")
    return time.perf_counter() - began, used.ru_maxrss * 1024 / MB


def in_turns(folders: Sequence[Path], recipe: str, rounds: int) -> list[float]:
    """Seconds of a round in each folder, without tests: the lower quartile of `rounds`, in turns.

    Where other processes share the machine, the lower half of the rounds is about undisturbed.
    """
    runs: list[Iterator[Row]] = []
    for folder in folders:
        place = Workspace.from_environment(folder, {})
        given = config.load(place.root)
        total = {"rounds": WARM + rounds + 1, "evaluate_every": WARM + rounds + 1}
        settings = given.model_copy(update={"train": given.train.model_copy(update=total)})
        runs.append(Item.load(place, settings, Unit("owners", recipe, 0)).simulation().rounds())
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(WARM + rounds):
        for k in np.roll(np.arange(len(runs)), number):
            began = time.perf_counter()
            next(runs[k])
            seconds[k].append(time.perf_counter() - began)
    return [float(np.percentile(of[WARM:], 25)) for of in seconds]


def measured(
    work: Path, sizes: Sequence[int] = SIZES, repetitions: int = 2, rounds: int = 500
) -> list[dict[str, float]]:
    """A row of the table for each number of owners."""
    folders = [work / str(size) for size in sizes]
    walls: dict[tuple[Path, str], list[tuple[float, float]]] = {}
    for repetition in range(repetitions):
        for folder, size in zip(folders, sizes, strict=True):
            place = folder / str(repetition)  # a stage makes nothing twice in one folder
            write_study(place, size, 20)
            stage(place, "plan")
            for name in STAGES:
                walls.setdefault((folder, name), []).append(stage(place, name))
    found: list[dict[str, float]] = []
    for folder, size in zip(folders, sizes, strict=True):
        data = (folder / "0" / "data" / "arrays.safetensors").stat().st_size / MB
        row: dict[str, float] = {"owners": size, "data_mb": data}
        row |= {f"{name}_s": median(s for s, _ in walls[folder, name]) for name in STAGES}
        row |= {f"{name}_mb": max(mb for _, mb in walls[folder, name]) for name in STAGES}
        found.append(row)
    for recipe in RECIPES:
        at = [folder / "0" for folder in folders]
        for row, wall in zip(found, in_turns(at, recipe, rounds), strict=True):
            row[f"{recipe}_ms"] = 1000 * wall
    return found


def table(rows: Sequence[Mapping[str, float]]) -> str:
    """The CSV of the rows."""
    text = io.StringIO()
    out = csv.DictWriter(text, rows[0], lineterminator="\n")
    out.writeheader()
    for row in rows:
        out.writerow({name: f"{value:.8g}" for name, value in row.items()})
    return text.getvalue()


def on_page(page: str, content: str, note: str = "") -> str:
    """The page docs/results/scale.md with the numbers of owners.csv.

    `note`: the machine, in one line; without it the page's own line stays.
    """
    rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(io.StringIO(content))]
    kept = re.search(r"^Machine: (.*)$", page, re.MULTILINE)
    context = {
        "rows": rows,
        "stages": STAGES,
        "recipes": RECIPES,
        "most": MOST,
        "cohort": COHORT,
        "machine": note or (kept[1] if kept else ""),
        "ratios": [rows[-1][f"{recipe}_ms"] / rows[0][f"{recipe}_ms"] for recipe in RECIPES],
        "above": max(rows[-1][f"{name}_mb"] for name in STAGES) - rows[-1]["data_mb"],
    }
    return BLOCK.sub(lambda marks: f"{marks[1]}{render('owners.md.j2', context)}{marks[2]}", page)


def write(root: Path, work: Path) -> None:
    """Measures, and writes the table and the numbers of the page."""
    watch = machine.Watch()
    content = table(measured(work))
    page = root / PAGE
    write_whole(page, on_page(page.read_text(), content, machine.line(watch.found())))
    write_whole(root / FILE, content)
