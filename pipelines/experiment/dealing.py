"""Deals a data set in memory to clients: cuts the held-out parts, partitions the rest, describes the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.config import DataSettings, Scenario
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data import statistics
from fedml_noniid.plugins.data.alike import alike, of_owners
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.data.indices import Indices
from fedml_noniid.plugins.data.partitions import BY_OWNER, partition
from fedml_noniid.plugins.data.splits import hold_out
from fedml_noniid.plugins.data.streams import stream
from fedml_noniid.plugins.data.types import Ints


class Dealt(NamedTuple):
    """Who holds what, and how uneven that is."""

    indices: Indices
    counts: Ints  # training samples by client and class, [N, C]
    statistics: dict[str, float]
    noise: list[float] | None  # mean deviation of each client's noise, [N]; None without noise


def deal(data: Dataset, held_out: DataSettings, scenario: Scenario, name: str, seed: int) -> Dealt:
    """The partition of a scenario with a seed. UserErrors name the key: `data` or `scenarios.<name>`."""
    labels = data.train_y.numpy()
    with blamed("data"):
        split = hold_out(labels, held_out.validation, held_out.public, seed)
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
    return Dealt(Indices(clients, split.validation, split.public, test_clients), counts, described, noise)


@contextmanager
def blamed(key: str) -> Iterator[None]:
    """Errors inside get the name of the key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _test_clients(data: Dataset, clients: list[Ints], counts: Ints, by_owner: bool, seed: int) -> list[Ints]:
    """Each client's part of the test set. If the data name users, it holds the samples of the client's users."""
    if by_owner and data.train_owner is not None and data.test_owner is not None:
        return of_owners(clients, data.train_owner.numpy(), data.test_owner.numpy())
    return alike(counts, data.test_y.numpy(), stream(seed, "test clients"))
