"""Items on the workers of a cluster, on this machine: the same files while workers are killed, and
the speed of two workers beside forked processes.

`python -m benchmarks kills` and `python -m benchmarks workers` write their tables and their blocks
of docs/results/cluster.md.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import logging
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import yaml

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.experiment import cache, config, resume
from fedml_noniid.pipelines.experiment.training import SECONDS
from fedml_noniid.pipelines.experiment.workspace import CLUSTER, Workspace
from fedml_noniid.pipelines.stages import train

RESULTS = Path("docs") / "results"
PAGE = RESULTS / "cluster.md"
KILLS, TURNS = RESULTS / "kills.csv", RESULTS / "workers.csv"
RECIPES = ("fedavg", "fedprox", "fednova", "scaffold")
ROUNDS, EVERY = 150, 5  # of an item; rounds from one checkpoint to the next
KILL_S = 20.0  # seconds from one kill to the next
PART = re.compile(rb'seconds\\?": ([0-9.e+-]+)')  # of a row in a checkpoint's second file


class Progress(NamedTuple):
    """The rounds of an item at a checkpoint."""

    rounds: int
    seconds: list[float]  # of each round: they tell one training of a round from another


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


def write_study(folder: Path, seeds: int, rounds: int) -> None:
    """Writes the settings of an experiment of small items, four for each seed, and its data."""
    folder.mkdir(parents=True)
    settings = {
        "experiment": "cluster",
        "data": {"name": "digits", "root": "raw", "validation": 0.1, "public": 0},
        "scenario_names": ["skewed"],
        "scenarios": {
            "skewed": {
                "partition": "dirichlet",
                "clients": 20,
                "alpha": 0.3,
                "participation": 0.5,
            }
        },
        "recipe_names": [*RECIPES],
        "recipes": {"fedavg": {}, "fedprox": {"fedprox": {"mu": 0.1}}, "fednova": {}}
        | {"scaffold": {}},
        "seeds": [*range(seeds)],
        "train": {
            "model": "mlp",
            "epochs": 1,
            "batch_size": 32,
            "lr": 0.1,
            "rounds": rounds,
            "engine": "sequential",
            "device": "cpu",
            "threads": 1,
        },
        "machine": {"checkpoint_every": EVERY},
    }
    (folder / config.FILE).write_text(yaml.safe_dump(settings, sort_keys=False))
    for name in ("prepare", "partition"):
        importlib.import_module(f"fedml_noniid.pipelines.stages.{name}").run(
            Workspace.from_environment(folder, {})
        )


def trained(folder: Path, address: str | None = None) -> float:
    """Seconds in which stage `train` trains the experiment, here or on a cluster."""
    began = time.perf_counter()
    train.run(Workspace.from_environment(folder, {CLUSTER: address} if address else {}))
    return time.perf_counter() - began


class Killer(threading.Thread):
    """Kills a worker at random, again and again, and keeps what the checkpoints then have."""

    def __init__(self, folder: Path, every: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.every = folder, every
        self.kills = 0
        self.at: dict[str, list[Progress]] = {}  # by item, after each kill
        self._random, self._over = random.Random(seed), threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every):
            there = workers_here()
            if there:
                victim = self._random.choice(there)
                victim.kill()
                victim.wait()
                self.kills += 1
                self._look()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _look(self) -> None:
        """Reads the newest checkpoint of each item that has one."""
        for item in (self.folder / resume.RESUME).glob("*"):
            found = [progress(path) for path in item.glob("*") if path.is_dir()]
            if found:
                newest = max(found, key=lambda one: one.rounds)
                self.at.setdefault(item.name, []).append(newest)


def workers_here() -> list[psutil.Process]:
    """The workers' processes: what the command `cluster worker`, a child of ours, has started."""
    (command,) = (one for one in psutil.Process().children() if "worker" in one.cmdline())
    below = command.children(recursive=True)
    return [one for one in below if "resource_tracker" not in " ".join(one.cmdline())]


def progress(folder: Path) -> Progress:
    """The rounds of the checkpoint in a folder."""
    rounds = resume.rounds_at(folder)  # the file of rounds may have more already, or be gone
    path = folder / resume.ROUNDS
    found = PART.findall(path.read_bytes()) if rounds and path.is_file() else []
    return Progress(min(rounds, len(found)), [float(part) for part in found[:rounds]])


class Losses(logging.Handler):
    """Counts how often the front says that an item has lost its worker, by the item's name."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.of: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key, lost, _ = record.getMessage().partition(": lost worker")
        if lost:
            self.of[key] = self.of.get(key, 0) + 1


def disturbed(
    work: Path, items: int, workers: int, every: float = KILL_S, rounds: int = ROUNDS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each item, facts of the run): `items` items, on workers of which one at a time is
    killed, and by forked processes which nobody disturbs."""
    here, there = work / "here", work / "there"
    write_study(here, items // len(RECIPES), rounds)
    shutil.copytree(here, there)
    losses, front = Losses(), logging.getLogger("fedml_noniid.pipelines.cluster.front")
    front.addHandler(losses)
    try:
        with cluster(work, workers) as address:
            killer = Killer(there, every, items)
            killer.start()
            wall = trained(there, address)
            killer.stop()
    finally:
        front.removeHandler(losses)
    forked = trained(here)
    rows = []
    for path in sorted((there / "runs").iterdir()):
        pair = (path, here / "runs" / path.name)
        mine, theirs = (json.loads((one / "run.json").read_text()) for one in pair)
        fingerprint = mine["tags"]["fingerprint"]
        seconds = cache.made(there, fingerprint)[SECONDS]
        seen = killer.at.get(fingerprint[:16], [])
        rows.append(
            {
                "item": path.name,
                "lost_workers": losses.of.get(path.name, 0),
                "looks": len(seen),
                "rounds_at_last_look": seen[-1].rounds if seen else 0,
                "kept": all(seconds[: at.rounds] == at.seconds for at in seen),
                "same_weights": mine["weights_sha256"] == theirs["weights_sha256"],
                "train_s": round(sum(seconds), 3),
            }
        )
    facts = {"workers": workers, "kills": killer.kills, "wall_s": wall, "forked_s": forked}
    return rows, facts


def in_turns(work: Path, turns: int, items: int, workers: int = 2) -> list[dict[str, Any]]:
    """Seconds of the same items by forked processes and on warm workers, in turns."""
    given, rows = work / "given", []
    write_study(given, items // len(RECIPES), ROUNDS)
    with cluster(work, workers) as address:
        places = {"forked": None, "cluster": address}
        for turn in range(turns + 1):  # the first one warms up
            order = list(places) if turn % 2 else list(reversed(places))
            for name in order:
                folder = work / f"{name}-{turn}"
                shutil.copytree(given, folder)
                seconds = trained(folder, places[name])
                if turn:
                    rows.append({"turn": turn, "by": name, "seconds": round(seconds, 3)})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The CSV of the rows."""
    text = io.StringIO()
    out = csv.DictWriter(text, rows[0], lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue()


def on_page(
    page: str, name: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> str:
    """The page with the block of one table, which `name` names."""
    block = re.compile(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)", re.DOTALL)
    context = {"rows": rows, "recipes": RECIPES, "rounds": ROUNDS, "every": EVERY, **facts}
    text = render(f"{name}.md.j2", context)
    return block.sub(lambda marks: f"{marks[1]}{text}{marks[2]}", page)


def write_kills(root: Path, work: Path, items: int, workers: int) -> None:
    """Measures items under kills, and writes table and block."""
    watch = machine.Watch()
    rows, facts = disturbed(work, items, workers)
    facts |= {"kill_s": KILL_S, "machine": machine.line(watch.found())}
    facts["used"] = sum(row["train_s"] for row in rows) / facts["wall_s"] / workers
    _write(root, "kills", rows, facts)


def write_turns(root: Path, work: Path, turns: int, items: int) -> None:
    """Measures two workers beside forked processes, and writes table and block."""
    watch = machine.Watch()
    rows = in_turns(work, turns, items)
    walls = {(row["by"], row["turn"]): row["seconds"] for row in rows}
    found = [walls["forked", turn] / walls["cluster", turn] for turn in range(1, turns + 1)]
    facts = {"ratios": found, "middle": median(found), "items": items}
    facts |= {"machine": machine.line(watch.found())}
    _write(root, "workers", rows, facts)


def _write(
    root: Path, name: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    page = root / PAGE
    write_whole(page, on_page(page.read_text(), name, rows, facts))
    write_whole(root / RESULTS / f"{name}.csv", table(rows))
