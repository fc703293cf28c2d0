"""Stage partition: who holds what, the same for every recipe -> partitions/<scenario>-<seed>/."""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging

from pipelines import cli, config
from pipelines.heatmap import heatmap
from plugins.core.errors import UserError
from plugins.data import statistics
from plugins.data.alike import alike, of_owners
from plugins.data.checks import known
from plugins.data.dataset import Dataset
from plugins.data.files import replace_folder
from plugins.data.partitions import BY_OWNER, partition
from plugins.data.splits import hold_out
from plugins.data.streams import stream
from plugins.data.types import Floats, Ints

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Cuts the validation and the public split, partitions the rest, and describes the result."""
    settings = config.load()
    scenario = settings.scenarios[known(f"{config.FILE}: scenario", options.scenario, settings.scenarios)]
    data = Dataset.read(config.root() / "data" / f"{settings.data.name}.safetensors")
    labels = data.train_y.numpy()
    try:
        split = hold_out(labels, settings.data.validation, settings.data.public, options.seed)
    except UserError as error:
        raise UserError(f"{config.FILE}: data: {error}") from None
    try:
        clients = partition(
            scenario.partition, labels, split.train, scenario.clients, options.seed,
            data.train_owner, f"data set {data.name!r}", **scenario.options,
        )  # fmt: skip
    except UserError as error:
        raise UserError(f"{config.FILE}: scenarios.{options.scenario}: {error}") from None

    noise = None
    if scenario.noise is not None:
        try:
            noise = scenario.noise.amounts(len(clients), data).tolist()
        except UserError as error:
            raise UserError(f"{config.FILE}: scenarios.{options.scenario}: {error}") from None
    counts = statistics.class_counts(labels, clients, len(data.classes))
    # Some partitions leave samples out by definition.
    described = statistics.summary(counts) | {"samples_left_out": len(split.train) - int(counts.sum())}
    if noise:
        described |= {"noise_mean": sum(noise) / len(noise), "noise_max": max(noise)}
    test_clients = _test_clients(data, clients, counts, scenario.partition in BY_OWNER, options.seed)
    held = {
        "clients": [part.tolist() for part in clients],
        "validation": split.validation.tolist(),
        "public": split.public.tolist(),
        "test_clients": [part.tolist() for part in test_clients],
    }
    files = {
        "indices.json": json.dumps(held).encode(),
        "statistics.json": (json.dumps(described, indent=2) + "\n").encode(),
        "clients.csv": _table(counts, statistics.entropy(counts), data.classes, noise).encode(),
        "heatmap.png": heatmap(counts, data.classes, f"{options.scenario}, seed {options.seed}"),
    }
    replace_folder(config.root() / "partitions" / f"{options.scenario}-{options.seed}", files)
    log.info("%d clients with %d to %d samples", len(clients), counts.sum(1).min(), counts.sum(1).max())


def _test_clients(data: Dataset, clients: list[Ints], counts: Ints, by_owner: bool, seed: int) -> list[Ints]:
    """Each client's part of the test set: its own users' samples where the data say whose they are."""
    if by_owner and data.train_owner is not None and data.test_owner is not None:
        return of_owners(clients, data.train_owner.numpy(), data.test_owner.numpy())
    return alike(counts, data.test_y.numpy(), stream(seed, "test clients"))


def _table(counts: Ints, entropy: Floats, classes: tuple[str, ...], noise: list[float] | None) -> str:
    """One line per client: samples, entropy of its labels in bits, noise if there is any, samples per class."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["client", "samples", "entropy", *(["noise"] if noise else []), *classes])
    for client, row in enumerate(counts):
        amount = [f"{noise[client]:.6f}"] if noise else []
        table.writerow([client, row.sum(), f"{entropy[client]:.6f}", *amount, *row])
    return text.getvalue()


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    return cli.run(run, __doc__, arguments, "scenario", "seed")
