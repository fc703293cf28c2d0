"""Seconds per round of our transport and of stock FedML's gRPC, with the same silos: `python -m
benchmarks.transport`.

Both run FedAvg with a wide MLP and one step on a few samples per silo, so the exchange of the
models takes most of a round. The runs take turns (ours, stock, ours, ...). The first round of a run
counts the start of the processes, so it is dropped. All runs must end with the same weights.
`--write` writes docs/results/transport.md and .csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

from benchmarks import stock_fedml
from benchmarks.processes import ROOT
from benchmarks.statistics import median
from fedml_noniid.pipelines.experiment import provenance
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.silo import loopback, settings
from fedml_noniid.plugins.silo.shards import Parts

OURS, STOCK = "ours", "stock FedML"
FEATURES, CLASSES, SAMPLES = 64, 10, 8  # samples of a silo, and of the test set
Turn = dict[str, list[float]]  # transport -> seconds of its measured rounds
HOW = f"""The table has the median and the range of the seconds per round, over all measured \
rounds. A turn's ratio
compares the medians of its two runs; the table has the median and the range over the turns. A \
round sends the model to
each silo and back, and has one step of SGD on {SAMPLES} samples per silo. All processes run on \
one machine. Ours
encrypts with TLS, stock FedML does not. All runs ended with the same weights, SHA-256 `{{sha}}`."""


def deployment(silos: int, megabytes: float, rounds: int) -> settings.Deployment:
    """FedAvg with a model of `megabytes` (of 10^6 bytes)."""
    hidden = max(1, round(megabytes * 1e6 / 4 / (FEATURES + 1 + CLASSES)))  # float32
    content = {
        "model_args": {"model": "mlp", "model_options": {"hidden": hidden}},
        "train_args": {
            "recipe": "fedavg",
            "rounds": rounds,
            "client_num_in_total": silos,
            "client_num_per_round": silos,
            "epochs": 1,
            "batch_size": SAMPLES,
            "learning_rate": 1e-4,
        },
    }
    return settings.check(content, "benchmark")


def made_up(silos: int) -> Parts:
    """Random samples: a few for each silo, and as many for the test."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Samples:
        x = torch.randn(count, 1, 8, FEATURES // 8, generator=generator)
        return Samples(x, torch.randint(0, CLASSES, (count,), generator=generator))

    clients = [np.arange(k * SAMPLES, (k + 1) * SAMPLES) for k in range(silos)]
    return Parts(drawn(silos * SAMPLES), clients, drawn(SAMPLES), None, None, CLASSES)


def ours(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """(SHA-256 of the final weights, seconds of all rounds) under our transport."""
    return loopback.run(terms, parts, folder), stock_fedml.seconds_by_round(folder / "run")


def stock(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """The same under stock FedML."""
    return stock_fedml.run(terms, parts, folder), stock_fedml.seconds_by_round(folder)


TRANSPORTS: Mapping[str, Callable[[settings.Deployment, Parts, Path], tuple[str, list[float]]]] = {
    OURS: ours,
    STOCK: stock,
}


def measure(silos: int, megabytes: float, rounds: int, turns: int) -> tuple[str, list[Turn]]:
    """(SHA-256 of the final weights, seconds by turn).

    UserError if two runs end with other weights.
    """
    terms, parts = deployment(silos, megabytes, rounds), made_up(silos)
    expected, found = "", list[Turn]()
    for number in range(1, turns + 1):
        found.append({})
        for name, run in TRANSPORTS.items():
            with tempfile.TemporaryDirectory() as folder:
                sha, seconds = run(terms, parts, Path(folder))
            expected = expected or sha
            if sha != expected:
                raise UserError(
                    f"turn {number}, {name}: the weights {sha} are not those of the first run, "
                    f"{expected}"
                )
            found[-1][name] = seconds[1:]
            sys.stderr.write(
                f"turn {number} of {turns}, {name}: {median(seconds[1:]):.2f} s per round\n"
            )
    return expected, found


def table(turns: Sequence[Turn]) -> str:
    """Medians per transport, and how many times longer stock FedML takes."""
    ratios = [median(turn[STOCK]) / median(turn[OURS]) for turn in turns]
    rows = []
    for name in TRANSPORTS:
        seconds = [value for turn in turns for value in turn[name]]
        rows.append(
            [name, f"{median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}", "1", ""]
        )
    rows[-1][3:] = f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    head = ["transport", "s per round", "range", "times as long as ours", "range over turns"]
    return str(tabulate(rows, head, tablefmt="github", disable_numparse=True))


def rounds_table(turns: Sequence[Turn]) -> str:
    """Every measured round as CSV."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(("turn", "transport", "round", "seconds"))
    for number, turn in enumerate(turns, start=1):
        out.writerows(
            (number, name, t, value)
            for name, seconds in turn.items()
            for t, value in enumerate(seconds, start=2)
        )
    return text.getvalue()


def _count(least: int) -> Callable[[str], int]:
    def parsed(word: str) -> int:
        if not word.isdigit() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number from {least} up")
        return int(word)

    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes with `--write`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--silos", type=_count(1), default=4, help="number of silos (default: 4)")
    parser.add_argument(
        "--megabytes", type=_count(1), default=45, help="size of the model (default: 45)"
    )
    parser.add_argument(
        "--rounds",
        type=_count(2),
        default=3,
        help="rounds per run with the dropped one (default: 3)",
    )
    parser.add_argument(
        "--turns", type=_count(1), default=3, help="runs of each transport (default: 3)"
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/transport.md and .csv"
    )
    given = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    try:
        sha, turns = measure(given.silos, given.megabytes, given.rounds, given.turns)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    found = provenance.machine(torch.device("cpu"))
    command = shlex.join([*parser.prog.split(), *arguments])
    made = (
        f"Made by `{command}`: {given.silos} silos, a model of {given.megabytes} MB, "
        f"{given.turns} turns, {given.rounds - 1} measured rounds each. Code: "
        f"{found['git_commit']}. {found['cpu']}, "
        f"{found['cores']} cores, torch {found['torch']}, fedml {found['fedml']}; load average "
        f"before {load:.1f}."
    )
    text = (
        "\n\n".join(("# Our transport and stock FedML's", made, HOW.format(sha=sha), table(turns)))
        + "\n"
    )
    sys.stdout.write(text)
    if given.write:
        to = ROOT / "docs" / "results"
        write_whole(to / "transport.csv", rounds_table(turns))
        write_whole(
            to / "transport.md", text + "\nEvery measured round: [transport.csv](transport.csv).\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
