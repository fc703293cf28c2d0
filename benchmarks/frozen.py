"""Is federated training worth it? Two controls on frozen features beside FedAvg, over five
partitions: `python -m benchmarks frozen` writes docs/results/frozen-features.*.

A small network learns MNIST's digits 0 to 4 in one place. The federation has the digits 5 to 9.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fedml_noniid as nd
from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.summary import spread

FILE = Path("docs") / "results" / "frozen-features.csv"
CLIENTS, SEEDS, TUNING_SEED = 20, (0, 1, 2, 3, 4), 100
PER_CLASS = 800  # training samples of each digit
NET: dict[str, Any] = {"model": "cnn", "model_options": {"channels": 8, "hidden": 64}}
HEAD = {"model": "logistic_regression"}
LOCAL: dict[str, Any] = {"epochs": 1, "batch_size": 32, "device": "cpu", "threads": 1}
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "quantity": {"partition": "quantity", "beta": 0.5},
    "dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "one class each": {"partition": "by_classes", "classes": [[k % 5] for k in range(CLIENTS)]},
}
TUNED_ON = "dirichlet 0.1"
COLUMNS = ("partition", "way", "seed", "rounds", "accuracy", "as_good", "kb", "seconds", "value")


class Way(NamedTuple):
    """A way to a classifier. `grid`: the values of its one tuned number."""

    recipe: str
    on_vectors: bool
    rounds: int
    grid: tuple[float, ...]
    body: bool = False  # begins with the weights of the body

    @property
    def tuned(self) -> str:
        """The number that is tuned."""
        return "lam" if self.rounds == 1 else "lr"

    def options(self, value: float, init: Path) -> dict[str, Any]:
        """Of a run with this value."""
        found = LOCAL | (HEAD if self.on_vectors else NET) | {"rounds": self.rounds}
        if self.body:
            found |= {"init": str(init)}
        if "fed3r" not in self.recipe:
            return found | {"lr": value}
        fine_tune = self.rounds > 1
        of_method = {"fine_tune": fine_tune} | ({} if fine_tune else {"lam": value})
        return found | {"fed3r": of_method} | ({"lr": value} if fine_tune else {})


ROUNDS = 30
RATES = (0.03, 0.1, 0.3, 1.0)
WAYS = {
    "Fed3R": Way("fed3r", True, 1, (0.01, 1.0, 100.0, 10000.0)),
    "linear probe": Way("fedavg", True, ROUNDS, RATES),
    "Fed3R, then the probe": Way("fed3r", True, ROUNDS, RATES),
    "FedAvg from the body": Way("fedavg", False, ROUNDS, RATES, body=True),
    "FedAvg from nothing": Way("fedavg", False, ROUNDS, RATES),
}


def digits(raw: Path, classes: Sequence[int]) -> nd.Data:
    """MNIST's samples of some digits, at 14 x 14 pixels; `PER_CLASS` of each for training."""
    whole = nd.load("mnist", root=raw, size=[14, 14]).dataset
    y = whole.train_y.numpy()
    drawn = np.random.default_rng(0)
    rows = np.concatenate(
        [drawn.permutation(np.flatnonzero(y == digit))[:PER_CLASS] for digit in classes]
    )
    test = np.flatnonzero(np.isin(whole.test_y.numpy(), classes))
    arrays = (
        whole.train_x[rows, 0].numpy(),
        whole.train_y[rows].numpy(),
        whole.test_x[test, 0].numpy(),
        whole.test_y[test].numpy(),
    )
    return nd.from_arrays(*arrays, name="mnist")


def body(raw: Path, to: Path) -> float:
    """Writes the weights of a network that learned the digits 0 to 4; returns its accuracy."""
    run = nd.run(
        "centralised",
        digits(raw, range(5)),
        partition="iid",
        clients=1,
        rounds=10,
        lr=0.1,
        progress=False,
        **LOCAL,
        **NET,
    )
    torch.save(dict(run.model().state_dict()), to)
    return float(run.rounds["test_accuracy"].iloc[-1])


def split(data: nd.Data, partition: str, seed: int) -> nd.Split:
    """Who has which samples; a tenth of them is held out in every run."""
    options: dict[str, Any] = {"clients": CLIENTS, "validation": 0.1, "seed": seed}
    return nd.partition(data, **options, **PARTITIONS[partition])


def chosen(data: Mapping[bool, nd.Data], init: Path, ways: Mapping[str, Way]) -> dict[str, float]:
    """The value of each way's grid with the best validation accuracy, on one partition and seed."""
    found = {}
    for name, way in ways.items():
        of = split(data[way.on_vectors], TUNED_ON, TUNING_SEED)

        def score(value: float, way: Way = way, of: nd.Split = of) -> float:
            options = way.options(value, init)
            try:
                run = nd.run(way.recipe, of, seeds=[TUNING_SEED], progress=False, **options)
            except nd.UserError:  # it diverges
                return 0.0
            return float(run.rounds["validation_accuracy"].iloc[-1])

        found[name] = max(way.grid, key=score)
    return found


def measure(raw: Path, work: Path) -> list[dict[str, str]]:
    """All rows; those that are in `work` already are not run again."""
    work.mkdir(parents=True, exist_ok=True)
    rows, init = work / "rows.csv", work / "body.pt"
    if not init.is_file():
        body(raw, init)
    images = digits(raw, range(5, 10))
    options = NET["model_options"]
    data = {False: images, True: nd.embed(images, "cnn", model_options=options, init=init)}
    known = list(csv.DictReader(rows.open())) if rows.is_file() else []
    if not known:
        write_whole(rows, ",".join(COLUMNS) + "\n")
    done = {(row["partition"], row["way"], int(row["seed"])): row for row in known}
    values: dict[str, float] = {row["way"]: float(row["value"]) for row in known}
    values |= chosen(data, init, {name: way for name, way in WAYS.items() if name not in values})
    for seed in SEEDS:
        for partition in PARTITIONS:
            goal = 0.0  # Fed3R is the first way
            for name, way in WAYS.items():
                key = (partition, name, seed)
                if key not in done:
                    of = split(data[way.on_vectors], partition, seed)
                    began = time.perf_counter()
                    run = nd.run(
                        way.recipe,
                        of,
                        seeds=[seed],
                        progress=False,
                        **way.options(values[name], init),
                    )
                    seconds = time.perf_counter() - began
                    found = [partition, name, seed, *measured(run, goal), seconds, values[name]]
                    done[key] = dict(zip(COLUMNS, map(str, found), strict=True))
                    with rows.open("a") as file:
                        csv.writer(file, lineterminator="\n").writerow(found)
                goal = goal or float(done[key]["accuracy"])
    return list(done.values())


def measured(run: nd.Result, goal: float) -> tuple[int, float, int, float]:
    """(rounds, final accuracy, first round with an accuracy of `goal` or 0, KB of a client)."""
    accuracies = run.rounds["test_accuracy"].tolist()
    as_good = next((t for t, found in enumerate(accuracies, 1) if found >= goal > 0), 0)
    moved = run.rounds["bytes_up"].sum() + run.rounds["bytes_down"].sum()
    return len(accuracies), accuracies[-1], as_good, round(moved / CLIENTS / 1000, 1)


def page(rows: Sequence[Mapping[str, str]], machine_line: str) -> str:
    """The page with the tables."""
    accuracy: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        of = accuracy.setdefault(row["way"], {}).setdefault(row["partition"], {})
        of[int(row["seed"])] = 100 * float(row["accuracy"])
    cells = {
        name: [_with_interval(list(of[p].values())) for p in PARTITIONS]
        for name, of in accuracy.items()
    }
    gaps = {
        name: [
            _with_interval([of[p][s] - accuracy["Fed3R"][p][s] for s in of[p]], sign="+")
            for p in PARTITIONS
        ]
        for name, of in accuracy.items()
        if name != "Fed3R"
    }
    costs, ends = [], []
    for name, way in WAYS.items():
        mine = [row for row in rows if row["way"] == name]
        good = [int(row["as_good"]) for row in mine if int(row["as_good"])]
        reached = f"{len(good)} of {len(mine)}" + (
            f", in round {int(np.median(good))} (median)" if good else ""
        )
        kb, seconds = (np.median([float(row[key]) for row in mine]) for key in ("kb", "seconds"))
        value = float(mine[0]["value"])
        tuned = f"{way.tuned} {value:g}"
        costs.append((name, way.rounds, f"{kb:,.0f}", f"{seconds:.1f}", tuned, reached))
        ends += [name] if value in (way.grid[0], way.grid[-1]) else []
    context: dict[str, Any] = {
        "partitions": list(PARTITIONS),
        "cells": cells,
        "gaps": gaps,
        "costs": costs,
        "ends": ends,
        "machine": machine_line,
    }
    context |= {"seeds": len(SEEDS), "clients": CLIENTS, "rounds": ROUNDS, "per_class": PER_CLASS}
    return render("frozen.md.j2", context)


def _with_interval(values: Sequence[float], sign: str = "") -> str:
    """The mean, and half the 95 % interval of the t distribution."""
    ends = interval(spread(values))
    assert ends is not None, "there are several seeds"
    return f"{np.mean(values):{sign}.1f} ± {(ends[1] - ends[0]) / 2:.1f}"


def write(root: Path, raw: Path, work: Path) -> None:
    """Measures what is missing, and writes the table and the page."""
    watch = machine.Watch()
    rows = measure(raw, work)
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(root / FILE, text.getvalue())
    write_whole(root / FILE.with_suffix(".md"), page(rows, machine.line(watch.found())))
