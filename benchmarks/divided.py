"""What dividing the clients of a round among workers of a cluster gains: rounds of the same item in
one process, in two forked ones, and on two workers over TLS. In turns, each run from the start."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.workspace import CLUSTER
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole

FILE = Path("docs/results/divided.csv")
RECIPES = ("fedavg", "scaffold+fnr")  # one sum; models and memories, and a further exchange
FORMS = {"one process": 1, "two forked processes": 2, "two workers of a cluster": 1}  # processes
ON_CLUSTER = "two workers of a cluster"
CLIENTS, OWN, COHORT, TESTS = 20, 100, 10, 100  # samples of a client; clients of a round
TURNS, ROUNDS = 2, 6  # the first round and the last, which tests, are left out
COLUMNS = ["recipe", "form", "turn", "round_s", "weights_sha256"]


def write_study(folder: Path) -> None:
    """Writes images and settings for the CNN of the FedAvg paper, 1,663,370 parameters."""
    rng = np.random.default_rng(0)
    (folder / "raw").mkdir(parents=True)
    for part, n in (("train", CLIENTS * OWN), ("test", TESTS)):
        owner, y = np.arange(n) % CLIENTS, rng.integers(0, 10, n)
        x = rng.normal(size=(n, 1, 28, 28)).astype(np.float32)
        np.savez(folder / "raw" / f"{part}.npz", x=x, y=y, client=owner)
    scenario = {"partition": "natural", "clients": CLIENTS, "participation": COHORT / CLIENTS}
    training = {"model": "cnn", "epochs": 1, "batch_size": 20, "lr": 0.05, "device": "cpu"}
    settings = {
        "experiment": "divided",
        "data": {"name": "arrays", "root": "raw", "validation": 0, "public": 100},
        "scenario_names": ["images"],
        "scenarios": {"images": scenario},
        "recipe_names": [],
        "recipes": {recipe: {} for recipe in RECIPES},
        "seeds": [0],
        "train": {**training, "threads": 1, "rounds": ROUNDS, "evaluate_every": ROUNDS},
        "machine": {"checkpoint_every": ROUNDS},
    }
    (folder / config.FILE).write_text(yaml.safe_dump(settings, sort_keys=False))


def noniid(folder: Path, *words: str, **environment: str) -> None:
    """Runs a module of the project in a process of its own. UserError if it fails."""
    command = [sys.executable, "-m", *words]
    given = {**os.environ, "PYTHONPATH": os.getcwd(), **environment}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")


@contextmanager
def cluster(folder: Path, workers: int = 2) -> Iterator[str]:
    """The address of a cluster on loopback, over TLS."""
    verb, kit = [sys.executable, "-m", "fedml_noniid", "cluster"], folder / "kit"
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    address = f"file:{kit / 'scheduler.json'}"
    subprocess.run([*verb, "kit", "--out", str(kit)], check=True, capture_output=True)
    parts = (
        ["scheduler", "--listen", f"tls://127.0.0.1:{port}", "--kit", str(kit)],
        ["worker", address, "--processes", str(workers)],
    )
    running = []
    try:
        for words in parts:
            process = subprocess.Popen([*verb, *words], stdout=subprocess.PIPE, text=True)
            running.append(process)
            assert process.stdout is not None, "it is a pipe"
            process.stdout.readline()  # it is there
        yield address
    finally:
        for process in reversed(running):
            process.terminate()
            process.communicate()


def measured(study: Path, recipe: str, form: str, turn: int, address: str) -> dict[str, Any]:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "study"
        shutil.copytree(study, folder)
        settings = yaml.safe_load((folder / config.FILE).read_text())
        settings["recipe_names"] = [recipe]
        settings["machine"]["processes"] = FORMS[form]
        (folder / config.FILE).write_text(yaml.safe_dump(settings, sort_keys=False))
        chosen = {CLUSTER: address} if form == ON_CLUSTER else {}
        noniid(folder, "fedml_noniid.pipelines.stages", "train", **chosen)
        (made,) = folder.glob(".items/*/made.json")
        (run,) = folder.glob("runs/*/run.json")
        seconds = json.loads(made.read_text())["seconds"][1:-1]
        sha256 = json.loads(run.read_text())["weights_sha256"]
    return dict(
        zip(COLUMNS, [recipe, form, turn, f"{median(seconds):.4f}", sha256[:16]], strict=True)
    )


def write(root: Path, turns: int) -> None:
    """Measures, and writes the table and the page."""
    watch = machine.Watch()
    with tempfile.TemporaryDirectory() as name:
        study = Path(name) / "study"
        write_study(study)
        settings = yaml.safe_load((study / config.FILE).read_text())
        one = settings | {"recipe_names": [RECIPES[0]]}
        (study / config.FILE).write_text(yaml.safe_dump(one, sort_keys=False))
        for stage in ("prepare", "partition"):
            noniid(study, "fedml_noniid.pipelines.stages", stage)
        with cluster(Path(name)) as address:
            rows = [
                measured(study, recipe, form, turn, address)
                for turn in range(1, turns + 1)
                for recipe in RECIPES
                for form in FORMS
            ]
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    context = {
        "rows": rows,
        "ratios": [_ratios(rows, recipe, turns) for recipe in RECIPES],
        "machine": machine.line(watch.found()),
        "same": len({(row["recipe"], row["weights_sha256"]) for row in rows}) == len(RECIPES),
    }
    context |= {"clients": CLIENTS, "own": OWN, "cohort": COHORT, "rounds": ROUNDS}
    write_whole(root / FILE, text.getvalue())
    write_whole(root / FILE.with_suffix(".md"), render("divided.md.j2", context))


def _ratios(rows: list[dict[str, Any]], recipe: str, turns: int) -> str:
    """How many times as fast as one process the cluster is in each turn, in words."""
    times = {
        (row["form"], row["turn"]): float(row["round_s"]) for row in rows if row["recipe"] == recipe
    }
    one, *_ = FORMS
    found = [times[one, turn] / times[ON_CLUSTER, turn] for turn in range(1, turns + 1)]
    return f"{recipe}: {', '.join(f'{ratio:.2f}' for ratio in found)}"
