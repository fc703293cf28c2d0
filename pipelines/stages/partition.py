"""Stage partition: which client holds which samples, for all recipes alike ->
partitions/<scenario>-<seed>/."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fedml_noniid.core.errors import located
from fedml_noniid.data import statistics
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES
from fedml_noniid.data.owners import order_of
from fedml_noniid.pipelines.experiment import cache, config
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.partitioning import Partition, partition_of
from fedml_noniid.pipelines.experiment.provenance import digest, plan
from fedml_noniid.pipelines.experiment.workspace import DATASET, Workspace
from fedml_noniid.pipelines.reporting.heatmap import heatmap

log = logging.getLogger(__name__)


def run(workspace: Workspace) -> None:
    """Makes the missing partitions."""
    partitions(workspace, config.load(workspace.root))


def partitions(workspace: Workspace, settings: Config) -> None:
    """Makes one partition for each scenario and seed."""
    cache.refuse_foreign(workspace.root, "partitions")
    hashes = plan(settings)["partition"]
    checksum = cache.sha256(workspace.dataset(settings.data.name))
    for scenario, seed in itertools.product(settings.scenario_names, settings.seeds):
        folder = workspace.partition(scenario, seed)
        make = partial(_files, workspace, settings, scenario, seed)
        if cache.get_or_create(
            folder, workspace.repository, digest(hashes[folder.name], checksum), make
        ):
            log.info(
                "%s: %s", folder.name, _sizes(json.loads((folder / "statistics.json").read_text()))
            )
    cache.keep_only(workspace.root / "partitions", list(hashes))


def _sizes(statistics: dict[str, float]) -> str:
    sizes = f"{statistics['size_min']:g} to {statistics['size_max']:g}"
    return f"{statistics['clients']:g} clients with {sizes} samples"


def _files(workspace: Workspace, settings: Config, name: str, seed: int) -> dict[str, bytes]:
    """Partitions the data and describes the partition."""
    files = dict[str, bytes]()
    if settings.scenarios[name].unseen is None:
        data = Dataset.read(workspace.dataset(settings.data.name))
    else:
        from fedml_noniid.pipelines.experiment import left_out

        with TemporaryDirectory() as folder:
            data = left_out.read(workspace, settings, name)
            data.save(path := Path(folder, DATASET))
            files[DATASET] = path.read_bytes()
    with located(source=config.FILE):
        made = partition_of(data, settings.data, settings.scenarios[name], name, seed)
    counts, owners = made.by_owner
    return files | {
        INDICES: made.indices.content,
        "statistics.json": (json.dumps(made.statistics, indent=2) + "\n").encode(),
        "clients.csv": clients_csv(made, data.strata.names).encode(),
        "heatmap.png": heatmap(counts, data.strata.names, f"{name}, seed {seed}", owners),
    }


def clients_csv(made: Partition, classes: Sequence[str]) -> str:
    """One line per client: its owner, samples, entropy of its true labels in bits, its skews by
    name, samples per class.

    Without names there is no column of owners. The lines are in the order of the names.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    counts, owners = made.counts, {"owner": made.owners} if made.owners else {}
    table.writerow(["client", *owners, "samples", "entropy", *made.columns, *classes])
    rounded = [
        [f"{value:.6f}" for value in column] if isinstance(column[0], float) else column
        for column in (statistics.entropy(counts).tolist(), *made.columns.values())
    ]
    by_class = [column.tolist() for column in counts.T]
    sizes = counts.sum(1).tolist()
    clients = range(len(sizes))
    rows = zip(clients, *owners.values(), sizes, *rounded, *by_class, strict=True)
    table.writerows(rows if not owners else map([*rows].__getitem__, order_of(made.owners)))
    return text.getvalue()
