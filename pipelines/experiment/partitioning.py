"""Partitions a data set in memory among clients.

Cuts the held-out parts, assigns the rest, describes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedml_noniid.core.errors import UserError, located
from fedml_noniid.data import drift, feature_skew, label_noise, rotation, statistics
from fedml_noniid.data.checks import class_numbers
from fedml_noniid.data.client_tests import client_tests
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.owners import client_names, order_of
from fedml_noniid.data.partitions import divided
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.skew import Skew
from fedml_noniid.data.splits import TrainingParts, hold_out
from fedml_noniid.data.types import Ints
from fedml_noniid.pipelines.experiment.config import DataSettings, Scenario


class Partition(NamedTuple):
    """Who holds what, and how uneven that is."""

    indices: Indices
    counts: Ints  # training samples by client and true class or stratum, [N, C]
    statistics: dict[str, float]
    columns: Mapping[
        str, Sequence[float]
    ]  # what the scenario's skews are for each client, [N] by name
    owners: Sequence[str]  # the owner of each client, [N]; empty where clients have no names

    @property
    def by_owner(self) -> tuple[Ints, list[str]]:
        """The counts and the names in the order of the names; without names, that of the
        clients."""
        order = order_of(self.owners)
        return (self.counts[order] if order else self.counts), [self.owners[k] for k in order]


def assign(
    data: Dataset,
    held_out: DataSettings,
    scenario: Scenario,
    name: str,
    seed: int,
    positions: Sequence[Ints] | None = None,
) -> Indices:
    """The partition of a scenario with a seed.

    UserErrors name the key: `data` or `scenarios.<name>`.

    `positions`: those of the clients, in place of the partition. Held-out parts are then drawn
    from the samples that no client has.
    """
    labels = data.strata.train
    with located("data"):
        split = _held_out(labels, held_out, positions, seed)
    with located("scenarios", name):
        clients = (
            Ragged.from_lists(positions)
            if positions is not None
            else divided(
                scenario.partition, data, split.train, scenario.clients, seed, **scenario.options
            )
        )
        skew = skewed(scenario, data, clients, seed)
        if scenario.noise is not None:
            scenario.noise.deviations(len(clients), data)  # refuses data without a scale
        if scenario.attack is not None:
            scenario.attack.drawn(data, len(clients), seed)  # likewise
    return Indices(
        clients,
        split.validation,
        split.public,
        client_tests(data, clients, scenario.partition, seed),
        skew,
    )


def partition_of(
    data: Dataset,
    held_out: DataSettings,
    scenario: Scenario,
    name: str,
    seed: int,
    positions: Sequence[Ints] | None = None,
) -> Partition:
    """The partition of a scenario with a seed, described.

    Arguments and UserErrors as in `assign`.
    """
    indices, labels = assign(data, held_out, scenario, name, seed, positions), data.strata.train
    clients, skew, columns, deviations = (
        indices.clients,
        indices.skew,
        dict[str, list[float]](),
        None,
    )
    if scenario.noise is not None:
        columns["noise"] = scenario.noise.amounts(len(clients), data).tolist()  # mean deviation
        deviations = scenario.noise.deviations(len(clients), data)
    counts = statistics.class_counts(labels, clients, len(data.strata.names))
    # Some partitions leave samples out by definition.
    left_out = len(labels) - len(indices.validation) - len(indices.public) - int(counts.sum())
    described = statistics.summary(counts) | {"samples_left_out": left_out}
    described |= feature_skew.measured(data, clients, skew, deviations, seed)
    if skew.labels is not None:  # the share of labels that are wrong
        lists = Ragged.from_lists(clients)
        wrong = Ragged.from_lists(skew.labels).flat != labels[lists.flat]
        n_wrong = np.bincount(lists.holder, wrong, len(lists))
        columns["label_noise"] = (n_wrong / lists.sizes).tolist()
    for key, values in columns.items():
        described |= {f"{key}_mean": sum(values) / len(values), f"{key}_max": max(values)}
    if skew.turns is not None:
        columns["rotation"] = (skew.turns * rotation.QUARTER).tolist()  # degrees
        described["rotations"] = len(set(columns["rotation"]))
    if skew.drift is not None:
        columns["drift"] = [*skew.drift.first()]  # rounds
        described["drifting"] = int(np.count_nonzero(columns["drift"]))
    return Partition(indices, counts, described, columns, client_names(data, clients))


def _held_out(
    labels: Ints, held_out: DataSettings, positions: Sequence[Ints] | None, seed: int
) -> TrainingParts:
    """Cuts the held-out parts, from the samples that no client has if they have `positions`."""
    every = np.arange(len(labels))
    free = every if positions is None else np.setdiff1d(every, Ragged.from_lists(positions).flat)
    if not len(free):
        for key in ("validation", "public"):
            if value := getattr(held_out, key):
                allowed = "0, as the clients have all samples"
                raise UserError(path=(key,), value=value, allowed=allowed)
        return TrainingParts(every, free, free)
    cut = hold_out(labels[free], held_out.validation, held_out.public, seed)
    validation, public = free[cut.validation], free[cut.public]
    return TrainingParts(
        np.setdiff1d(every, np.concatenate([validation, public])), validation, public
    )


def skewed(scenario: Scenario, data: Dataset, clients: Sequence[Ints], seed: int) -> Skew:
    """What the clients of a scenario see in place of their samples. UserError for unfit data."""
    labels = turns = None
    for key in ("label_noise", "drift"):
        if getattr(scenario, key) is not None and not data.has_classes:
            raise UserError(f"{key} is refused: it swaps classes, and the targets are none")
    if (wrong := scenario.label_noise) is not None:
        rates, n_classes = (
            label_noise.rates(wrong.form, wrong.rate, len(clients)),
            len(data.classes),
        )
        labels = label_noise.flipped(
            wrong.kind, rates, data.train_y.numpy(), clients, n_classes, seed
        )
    if scenario.rotation is not None:
        turns = rotation.turns(scenario.rotation.degrees, len(clients), data.train_x.shape[1:])
    drifts = None
    if (change := scenario.drift) is not None:
        swap = [class_numbers(("drift", "swap"), data.classes, pair) for pair in change.swap]
        drifts = drift.drift(
            change.kind, change.at, change.every, swap, len(clients), len(data.classes)
        )
    return Skew(labels, turns, drifts)
