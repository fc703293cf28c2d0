"""Seconds per round of our transport, plain and with secure sums, and of stock FedML's gRPC, with
the same silos: `python -m benchmarks transport` writes docs/results/transport.*.

Both run FedAvg with a wide MLP and one step on a few samples per silo, so the exchange of the
models takes most of a round. The runs take turns (ours, stock, ours, ...). The first round of a run
counts the start of the processes, so it is dropped. All runs must end with the same weights.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks import report, stock_fedml
from benchmarks.machine import Watch
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings
from fedml_noniid.governance.secure import masks
from fedml_noniid.processes import loopback

OURS, SECURE, STOCK = "ours", "ours, secure sums", "stock FedML"
NUMBERS = 11_181_642  # of ResNet-18
FEATURES, CLASSES, SAMPLES = 64, 10, 8  # samples of a silo, and of the test set


def deployment(silos: int, megabytes: float, rounds: int) -> settings.Deployment:
    """Returns FedAvg with a model of `megabytes` (of 10^6 bytes)."""
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


def random_parts(silos: int) -> Parts:
    """Draws random samples: a few for each silo, and as many for the test."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Samples:
        x = torch.randn(count, 1, 8, FEATURES // 8, generator=generator)
        return Samples(x, torch.randint(0, CLASSES, (count,), generator=generator))

    clients = [np.arange(k * SAMPLES, (k + 1) * SAMPLES) for k in range(silos)]
    return Parts(drawn(silos * SAMPLES), clients, drawn(SAMPLES), None, None, CLASSES)


def ours(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """Returns (SHA-256 of the final weights, seconds of all rounds) under our transport."""
    return loopback.run(terms, parts, folder), stock_fedml.seconds_by_round(folder / "run")


def secure(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """Returns the same with sums over all silos alone."""
    train = terms.train_args.model_copy(update={"secure_sums": terms.silos})
    return ours(terms.model_copy(update={"train_args": train}), parts, folder)


def stock(terms: settings.Deployment, parts: Parts, folder: Path) -> tuple[str, list[float]]:
    """Returns the same under stock FedML."""
    return stock_fedml.run(terms, parts, folder), stock_fedml.seconds_by_round(folder)


TRANSPORTS: Mapping[str, Callable[[settings.Deployment, Parts, Path], tuple[str, list[float]]]] = {
    OURS: ours,
    SECURE: secure,
    STOCK: stock,
}


def mask_seconds(silos: int, numbers: int) -> float:
    """Returns how long a silo masks so many numbers for a sum over so many silos; the least of
    three."""
    own = [X25519PrivateKey.generate() for _ in range(silos)]
    keys = tuple(key.public_key().public_bytes_raw() for key in own)
    exchange, vector = masks.Exchange("run", "terms", 0), torch.zeros(numbers, dtype=torch.int64)
    seconds = []
    for attempt in range(3):
        began = time.perf_counter()
        clients, samples = tuple(range(silos)), (1,) * silos
        request = masks.Request(exchange, attempt, "question", b"", clients, samples, keys)
        masks.mask(vector, own[0], 0, request)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(silos: int, megabytes: float, rounds: int, turns: int) -> tuple[str, pd.DataFrame]:
    """Returns (SHA-256 of the final weights, a row per measured round).

    UserError if two runs end with other weights.
    """
    terms, parts = deployment(silos, megabytes, rounds), random_parts(silos)
    expected, rows = "", []
    for turn in range(1, turns + 1):
        for name, run in TRANSPORTS.items():
            with tempfile.TemporaryDirectory() as folder:
                sha, seconds = run(terms, parts, Path(folder))
            expected = expected or sha
            if sha != expected:
                raise UserError(
                    f"turn {turn}, {name}: the weights {sha} are not those of the first run, "
                    f"{expected}"
                )
            rows += [(turn, name, t, value) for t, value in enumerate(seconds[1:], start=2)]
            sys.stderr.write(f"turn {turn} of {turns}, {name}: {seconds[1:]} s per round\n")
    return expected, pd.DataFrame(rows, columns=["turn", "transport", "round", "seconds"])


def table(rounds: pd.DataFrame) -> list[list[str]]:
    """Returns medians per transport, and how many times as long as ours the others take."""
    medians = rounds.groupby(["turn", "transport"])["seconds"].median().unstack()
    cells = [["transport", "s per round", "range", "times as long as ours", "range over turns"]]
    for name in medians:
        seconds = rounds.loc[rounds["transport"] == name, "seconds"]
        ratios = medians[name] / medians[OURS]
        times = ["1", ""] if name == OURS else [f"{ratios.median():.2f}", _range(ratios)]
        cells.append([name, f"{seconds.median():.2f}", _range(seconds), *times])
    return cells


def _range(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def write(silos: int, megabytes: float, rounds: int, turns: int) -> str:
    """Measures, and writes table and page. Returns the page."""
    watch = Watch()
    sha, seconds = measure(silos, megabytes, rounds, turns)
    context = {
        "silos": silos,
        "megabytes": megabytes,
        "rounds": rounds,
        "turns": turns,
        "fedml": metadata.version("fedml"),
        "samples": SAMPLES,
        "sha": sha,
        "table": table(seconds),
        "masks": [(silos, NUMBERS, mask_seconds(silos, NUMBERS)) for silos in (4, 12)],
        "machine": watch.line(),
    }
    return report.write(report.RESULTS, "transport", context, {"transport": seconds})
