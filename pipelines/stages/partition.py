"""Stage partition: which client holds which samples, for all recipes alike -> partitions/<scenario>-<seed>/."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fedml_noniid.pipelines.experiment import config, kept
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.provenance import digest, plan
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.heatmap import heatmap
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data import statistics
from fedml_noniid.plugins.data.alike import alike, of_owners
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.data.partitions import BY_OWNER, partition
from fedml_noniid.plugins.data.splits import hold_out
from fedml_noniid.plugins.data.streams import stream
from fedml_noniid.plugins.data.types import Floats, Ints

log = logging.getLogger(__name__)


def run(place: Workspace) -> None:
    """Makes the missing partitions."""
    partitions(place, config.load(place.root))


def partitions(place: Workspace, settings: Config) -> None:
    """Makes one partition for each scenario and seed."""
    hashes = plan(settings)["partition"]
    checksum = kept.sha256(place.dataset(settings.data.name))
    for scenario, seed in itertools.product(settings.scenario_names, settings.seeds):
        folder = place.partition(scenario, seed)
        make = partial(_files, place, settings, scenario, seed)
        if kept.settle(folder, place.repository, digest(hashes[folder.name], checksum), make):
            log.info("%s: %s", folder.name, _told(json.loads((folder / "statistics.json").read_text())))
    kept.keep_only(place.root / "partitions", list(hashes))


def _told(statistics: dict[str, float]) -> str:
    sizes = f"{statistics['size_min']:g} to {statistics['size_max']:g}"
    return f"{statistics['clients']:g} clients with {sizes} samples"


def _files(place: Workspace, settings: Config, name: str, seed: int) -> dict[str, bytes]:
    """Cuts the validation and the public split, partitions the rest, and describes the result."""
    scenario = settings.scenarios[name]
    data = Dataset.read(place.dataset(settings.data.name))
    labels = data.train_y.numpy()
    with blamed("data"):
        split = hold_out(labels, settings.data.validation, settings.data.public, seed)
    with blamed(f"scenarios.{name}"):
        clients = partition(
            scenario.partition, labels, split.train, scenario.clients, seed,
            data.train_owner, f"data set {data.name!r}", **scenario.options,
        )  # fmt: skip
        noise = None if scenario.noise is None else scenario.noise.amounts(len(clients), data).tolist()
    counts = statistics.class_counts(labels, clients, len(data.classes))
    # Some partitions leave samples out by definition.
    described = statistics.summary(counts) | {"samples_left_out": len(split.train) - int(counts.sum())}
    if noise:
        described |= {"noise_mean": sum(noise) / len(noise), "noise_max": max(noise)}
    test_clients = _test_clients(data, clients, counts, scenario.partition in BY_OWNER, seed)
    held = {
        "clients": [part.tolist() for part in clients],
        "validation": split.validation.tolist(),
        "public": split.public.tolist(),
        "test_clients": [part.tolist() for part in test_clients],
    }
    return {
        "indices.json": json.dumps(held).encode(),
        "statistics.json": (json.dumps(described, indent=2) + "\n").encode(),
        "clients.csv": _table(counts, statistics.entropy(counts), data.classes, noise).encode(),
        "heatmap.png": heatmap(counts, data.classes, f"{name}, seed {seed}"),
    }


@contextmanager
def blamed(key: str) -> Iterator[None]:
    """Errors inside get the names of the file and the key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{config.FILE}: {key}: {error}") from None


def _test_clients(data: Dataset, clients: list[Ints], counts: Ints, by_owner: bool, seed: int) -> list[Ints]:
    """Each client's part of the test set. If the data name users, it holds the samples of the client's users."""
    if by_owner and data.train_owner is not None and data.test_owner is not None:
        return of_owners(clients, data.train_owner.numpy(), data.test_owner.numpy())
    return alike(counts, data.test_y.numpy(), stream(seed, "test clients"))


def _table(counts: Ints, entropy: Floats, classes: Sequence[str], noise: list[float] | None) -> str:
    """One line per client: samples, entropy of its labels in bits, noise if there is any, samples per class."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["client", "samples", "entropy", *(["noise"] if noise else []), *classes])
    for client, row in enumerate(counts):
        amount = [f"{noise[client]:.6f}"] if noise else []
        table.writerow([client, row.sum(), f"{entropy[client]:.6f}", *amount, *row])
    return text.getvalue()
