"""Personalised methods, each client tested on its own test split, beside FedAvg with local
fine-tuning: `python -m benchmarks personalised` writes docs/results/personalised*.

The step size of each method is tuned in the same way, on the clients' validation splits. Each run
is a file of the work folder, so an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from benchmarks import machine
from benchmarks.report import render
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import NonFiniteError
from fedml_noniid.data import datasets
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.partitions import PARTITIONS
from fedml_noniid.data.rotation import turned
from fedml_noniid.data.streams import stream
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.personal import client_model
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from fedml_noniid.pipelines.reporting.comparison import paired
from fedml_noniid.simulate import simulate

CLIENTS, ROUNDS, EVERY = 20, 30, 5
HIDDEN, EPOCHS, BATCH = 64, 3, 20
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
TUNING, SEEDS = range(100, 103), range(1000, 1010)
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}  # of each client's samples
CONTROL = "FedAvg + fine-tuning"


class Scenario(NamedTuple):
    """What the clients hold."""

    data: dict[str, Any]
    partition: str
    options: dict[str, Any]
    rotated: bool = False  # client k sees images turned by k mod 4 quarters


class Method(NamedTuple):
    """A recipe with what differs from its defaults."""

    recipe: str
    settings: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # of a tuple, never changed


SCENARIOS = {
    "digits, labels Dirichlet(0.1)": Scenario(
        {"name": "digits"}, "dirichlet", {"alpha": 0.1, "min_size": 20}
    ),
    "digits, rotated": Scenario({"name": "digits"}, "iid", {}, rotated=True),
    "MNIST 2,000, two classes": Scenario(
        {"name": "mnist", "samples": 2000, "size": [14, 14]}, "shards", {"classes_per_client": 2}
    ),
}
METHODS = {
    "FedAvg": Method("fedavg"),
    CONTROL: Method("finetune"),
    "local training alone": Method("apfl", {"apfl": {"alpha": 1.0}}),
    "FedPer": Method("fedper"),
    "FedRep": Method("fedrep"),
    "FedBN": Method("fedbn"),
    "Ditto": Method("ditto"),
    "APFL": Method("apfl"),
    "APFL (adaptive)": Method("apfl", {"apfl": {"adaptive": True}}),
    "FedALA": Method("fedala"),
    "FedProto": Method("fedproto"),
    "Fed-RoD": Method("fedrod"),
}


@cache
def samples_of(scenario: str, raw: Path) -> tuple[Any, Any]:
    """(samples, labels) of a scenario's data set."""
    of = SCENARIOS[scenario].data
    data = datasets.load(root=raw, **of)
    x, y = data.normalised("train"), data.train_y
    if of["name"] == "digits":  # all of its 1,797 images
        x, y = torch.cat([x, data.normalised("test")]), torch.cat([y, data.test_y])
    return x, y


class Split(NamedTuple):
    """The clients' samples, as they see them."""

    train: Samples
    clients: list[Any]  # positions in `train`
    tests: list[Samples]  # of each client: validation or test


def split(name: str, raw: Path, seed: int, part: str) -> Split:
    """The samples of the data set, partitioned, and each client's cut into three parts at random;
    `part`: which one is tested."""
    scenario, (x, y) = SCENARIOS[name], samples_of(name, raw)
    rng = stream(seed, "personalised")
    held = PARTITIONS[scenario.partition](y.numpy(), CLIENTS, rng, **scenario.options)
    train_x, train_y, clients, tests, begin = [], [], [], [], 0
    for k, positions in enumerate(held):
        order = rng.permutation(positions)
        n_train = round(SPLITS["train"] * len(order))
        n_validation = round(SPLITS["validation"] * len(order))
        parts = dict(zip(SPLITS, np.split(order, [n_train, n_train + n_validation]), strict=True))
        seen = {
            name: Samples(turned(x[of], k % 4) if scenario.rotated else x[of], y[of])
            for name, of in ((name, torch.from_numpy(of)) for name, of in parts.items())
        }
        train_x.append(seen["train"].x)
        train_y.append(seen["train"].y)
        clients.append(np.arange(begin, begin + n_train))
        begin += n_train
        tests.append(seen[part])
    return Split(Samples(torch.cat(train_x), torch.cat(train_y)), clients, tests)


def simulation(found: Split, method: Method, lr: float, seed: int) -> Simulation:
    """One run. All clients take part in every round."""
    together = Samples(
        torch.cat([test.x for test in found.tests]), torch.cat([test.y for test in found.tests])
    )
    federation = Federation.from_indices(
        found.train, found.clients, together, tests=lambda: found.tests
    )
    shape = tuple(found.train.x.shape[1:])
    network = build("mlp", shape, 10, {"hidden": HIDDEN, "batch_norm": True})
    # Without the last, short batches: a batch norm makes nothing of one sample.
    local = LocalTraining(lr=lr, epochs=EPOCHS, batch_size=BATCH, drop_last=True)
    plan = Plan(network, local, ROUNDS, CLIENTS, seed, evaluate_every=EVERY)
    return simulate(method.recipe, method.settings, federation, plan)


def run(found: Split, method: Method, lr: float, seed: int) -> dict[str, Any]:
    """Each client's accuracy with its model, and that of all test samples by round. Empty if the
    training diverges."""
    made = simulation(found, method, lr, seed)
    try:
        out = made.run()
    except NonFiniteError:
        return {}
    network = cast("Any", made.loop.start.task.network)
    accuracies = []
    for k, test in enumerate(found.tests):
        model = out.evaluated, out.buffers
        if out.personal:
            model = client_model(*model, out.personal, k)
        accuracies.append(evaluate(network, *model, test).accuracy)
    rounds = {int(row["round"]): row["test_accuracy"] for row in out.rows}
    return {
        "accuracies": accuracies,
        "rounds": {t: value for t, value in rounds.items() if not math.isnan(value)},
    }


class Measurement:
    """Runs what is missing in a work folder."""

    def __init__(self, work: Path, raw: Path) -> None:
        self.work, self.raw = work, raw

    def __call__(self, scenario: str, method: str, lr: float, seed: int, part: str) -> Any:
        """The result of a run, from its file if there is one."""
        name = "-".join([scenario, method, str(lr), str(seed), part]).replace(" ", "_")
        path = self.work / f"{name}.json"
        if not path.exists():
            found = split(scenario, self.raw, seed, part)
            result = run(found, METHODS[method], lr, seed)
            write_whole(path, json.dumps(result).encode())
        return json.loads(path.read_text())

    def tuned(self, scenario: str, method: str) -> tuple[float, list[dict[str, Any]]]:
        """(the step size of the highest mean accuracy on the validation splits, every trial)."""
        rows, means = [], {}
        for lr in RATES:
            found = [self(scenario, method, lr, seed, "validation") for seed in TUNING]
            values = [fmean(one["accuracies"]) if one else 0.0 for one in found]
            means[lr] = fmean(values)
            rows += [
                {
                    "scenario": scenario,
                    "method": method,
                    "lr": lr,
                    "seed": seed,
                    "validation": value,
                }
                for seed, value in zip(TUNING, values, strict=True)
            ]
        return max(means, key=lambda lr: (means[lr], -lr)), rows


def worst_decile(accuracies: Sequence[float]) -> float:
    """The mean of the worst tenth of the clients."""
    return fmean(sorted(accuracies)[: math.ceil(len(accuracies) / 10)])


def measured(work: Path, raw: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables: trials of the step size, runs, and accuracies by round."""
    measure = Measurement(work, raw)
    tables: dict[str, list[dict[str, Any]]] = {"tuning": [], "runs": [], "rounds": []}
    for scenario in SCENARIOS:
        for method in METHODS:
            lr, trials = measure.tuned(scenario, method)
            tables["tuning"] += trials
            for seed in SEEDS:
                found = measure(scenario, method, lr, seed, "test")
                key = {"scenario": scenario, "method": method, "lr": lr, "seed": seed}
                accuracies = found.get("accuracies", [0.0])
                means = {"mean": fmean(accuracies), "worst_decile": worst_decile(accuracies)}
                tables["runs"].append(key | means)
                tables["rounds"] += [
                    key | {"round": int(t), "accuracy": value}
                    for t, value in found.get("rounds", {}).items()
                ]
    return tables


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each scenario and method: means over seeds, and paired differences to the control
    with the ends of their 95 % intervals."""
    rows = []
    for scenario in SCENARIOS:
        by_method = {
            method: {
                one["seed"]: one
                for one in runs
                if (one["scenario"], one["method"]) == (scenario, method)
            }
            for method in METHODS
        }
        for method, mine in by_method.items():
            row: dict[str, Any] = {"scenario": scenario, "method": method}
            row["lr"] = next(iter(mine.values()))["lr"]
            for score in ("mean", "worst_decile"):
                row[score] = fmean(one[score] for one in mine.values())
                if method == CONTROL:
                    continue
                ours, theirs = (
                    {seed: one[score] for seed, one in of.items()}
                    for of in (mine, by_method[CONTROL])
                )
                gain = paired(method, ours, theirs, 0.0)
                row[f"{score}_difference"] = gain.mean
                if gain.interval is not None:
                    row[f"{score}_low"], row[f"{score}_high"] = gain.interval
            rows.append(row)
    return rows


def test_sizes(raw: Path) -> str:
    """The fewest and the most test samples of a client."""
    sizes = [
        len(test.y)
        for name in SCENARIOS
        for seed in SEEDS
        for test in split(name, raw, seed, "test").tests
    ]
    return f"{min(sizes)} to {max(sizes)}"


def words(row: Mapping[str, Any], score: str) -> str:
    """A difference with its interval, in points."""
    if f"{score}_difference" not in row:
        return "-"
    if f"{score}_low" not in row:
        return f"{100 * row[f'{score}_difference']:+.1f} on each seed"
    keys = ("difference", "low", "high")
    middle, low, high = (100 * row[f"{score}_{key}"] for key in keys)
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A table; numbers with six digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    written = csv.DictWriter(text, columns, lineterminator="\n")
    written.writeheader()
    for row in rows:
        written.writerow(
            {
                name: f"{value:.6f}" if isinstance(value, float) and name != "lr" else value
                for name, value in row.items()
            }
        )
    return text.getvalue().encode()


def write(root: Path, work: Path, raw: Path) -> None:
    """Measures what is missing, and writes the tables and the page."""
    watch = machine.Watch()
    tables = measured(work, raw)
    rows = summary(tables["runs"])
    folder = root / "docs" / "results"
    for name, table in (("", rows), *((f"-{name}", table) for name, table in tables.items())):
        write_whole(folder / f"personalised{name}.csv", _csv(table))
    at_ends = [
        f"{row['method']} ({row['scenario']}: {row['lr']})"
        for row in rows
        if row["lr"] in (RATES[0], RATES[-1])
    ]
    better, worse = (
        {
            scenario: [
                row["method"]
                for row in rows
                if row["scenario"] == scenario
                and "mean_low" in row
                and (row["mean_low"] > 0 if above else row["mean_high"] < 0)
            ]
            for scenario in SCENARIOS
        }
        for above in (True, False)
    )
    context = {
        "rows": [
            row | {"mean_words": words(row, "mean"), "worst_words": words(row, "worst_decile")}
            for row in rows
        ],
        "scenarios": list(SCENARIOS),
        "better": better,
        "worse": worse,
        "at_ends": at_ends,
        "rates": RATES,
        "tuning": len(TUNING),
        "seeds": len(SEEDS),
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "epochs": EPOCHS,
        "batch": BATCH,
        "hidden": HIDDEN,
        "machine": machine.line(watch.found()),
        "control": CONTROL,
        "worst": math.ceil(CLIENTS / 10),
        "intervals": 2 * (len(METHODS) - 1) * len(SCENARIOS),
        "expected": round(0.05 * 2 * (len(METHODS) - 1) * len(SCENARIOS)),
        "test_sizes": test_sizes(raw),
    }
    write_whole(folder / "personalised.md", render("personalised.md.j2", context).encode())
