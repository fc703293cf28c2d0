"""Partitions: which client holds which samples, and how uneven that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
from numpy.typing import ArrayLike

from fedml_noniid.api import settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.process import in_turn
from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.checks import whole_number
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.partitions.own import checked as checked_lists
from fedml_noniid.data.types import Ints
from fedml_noniid.own_code import name_of
from fedml_noniid.pipelines.experiment.config import SKEWS
from fedml_noniid.pipelines.experiment.partitioning import Partition, partition_of
from fedml_noniid.pipelines.reporting import heatmap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_NAMED = ("partition", "clients", "validation", "public", *SKEWS)


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """The data of the clients.

    `run` and `sweep` take it in the place of the data. They partition the data anew for each
    seed, by the same settings.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "iid", clients=4, validation=0.1)
    >>> len(split.indices.clients), len(split.indices.validation)
    (4, 144)
    """

    data: Data
    settings: Mapping[str, Any]  # the arguments of `partition`, without the seed
    seed: int
    partition: Partition
    positions: tuple[Ints, ...] | None = None  # the user's own index lists

    @property
    def indices(self) -> Indices:
        """Positions in the training set: `clients`, `validation`, `public`; in the test set:
        `test_clients`."""
        return self.partition.indices

    @property
    def statistics(self) -> pd.Series[Any]:
        """How uneven the split is, as in statistics.json.

        >>> import fedml_noniid as nd
        >>> nd.partition(nd.load("digits"), "iid", clients=4).statistics["samples"]
        1437
        """
        return pd.Series(
            self.partition.statistics,
            dtype=object,
            name=f"{self.settings['partition']}, seed {self.seed}",
        )

    @property
    def table(self) -> pd.DataFrame:
        """Training samples by client (row) and class (column), or by stratum where targets
        are no classes. Rows of clients whose owners have names are called so.

        >>> import fedml_noniid as nd
        >>> nd.partition(nd.load("digits"), "iid", clients=4).table.shape
        (4, 10)
        """
        counts, owners = self.partition.by_owner
        numbers = pd.RangeIndex(len(counts), name="client")
        return pd.DataFrame(
            counts,
            pd.Index(owners, name="owner") if owners else numbers,
            pd.Index(self.data.dataset.strata.names, name=self._groups),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the table as a heat map into `ax`, or into a new figure of pyplot.

        >>> import fedml_noniid as nd
        >>> axes = nd.partition(nd.load("digits"), "iid", clients=4).plot()
        >>> axes.get_ylabel()
        'client'
        """
        counts, owners = self.partition.by_owner
        if ax is None:
            from matplotlib import pyplot

            width, height = heatmap.panel_size(counts)
            ax = pyplot.subplots(figsize=(width + 0.8, height + 0.9), layout="constrained")[1]
        image = heatmap.draw(
            ax,
            counts,
            self.data.dataset.strata.names,
            f"{self._words}, seed {self.seed}",
            owners,
        )
        if not ax.texts:  # the cells carry no numbers
            ax.figure.colorbar(image, ax=ax, label="training samples")
        return ax

    def __repr__(self) -> str:
        facts = self.partition.statistics
        clients = (
            f"{facts['clients']} clients with {facts['size_min']} to {facts['size_max']} samples"
        )
        distance = f"label distance {facts['label_distance_mean']:.2f} on average"
        return f"{self.data.name}, {self._words}, seed {self.seed}: {clients}, {distance}"

    @property
    def _groups(self) -> str:
        """What the columns of the table are."""
        return "class" if self.data.dataset.has_classes else "stratum"

    @property
    def _words(self) -> str:
        """The partition and its own options."""
        options = [
            f"{key} {_short(value)}" for key, value in self.settings.items() if key not in NOT_NAMED
        ]
        return " ".join([str(self.settings["partition"]), *options])


@in_turn()
def partition(
    data: Data,
    partition: str | Callable[..., Any] | None = None,
    clients: int | None = None,
    *,
    indices: Sequence[ArrayLike] | None = None,
    seed: int = 0,
    **options: Any,
) -> Split:
    """Partitions the training set among clients.

    `partition` and its own `options` are those of a scenario in params.yaml. It may be a function
    of yours, which returns for each client its positions in the training set; docs/own_data.md
    says what it gets. `indices` in their place: a partition of your own as lists, the same for all
    seeds.

    Further `options`, by default none. `validation`: the share that is held out. `public`: the
    number of samples that no client holds. With `indices`, both are taken from the samples that no
    client has, and `validation` is a share of these. `noise`: `{"sigma": ...}` adds noise to each
    client's samples. `label_noise`: `{"rate": ...}` makes some labels of the clients wrong.
    `rotation`: `{"degrees": [0, 90]}` turns the images of each client by one angle. `drift`:
    `{"at": 20, "swap": [[1, 7]]}` swaps the clients' labels 1 and 7 from round 20 on.

    UserError for an unknown name or option, for lists that are no partition, and for values that
    don't fit the data.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), indices=[range(100), range(500, 800)])
    >>> split.table.sum(axis=1).tolist()
    [100, 300]
    >>> how = {"clients": 10, "shards_per_client": 2, "public": 100}
    >>> nd.partition(nd.load("digits"), "shards_equal", **how)  # doctest: +NORMALIZE_WHITESPACE
    digits, shards_equal shards_per_client 2, seed 0: 10 clients with 133 to 134 samples, label
    distance 0.79 on average
    """
    check_data("partition", data, Data)
    data = without_unseen("partition", data, options)
    lists, partition = None, name_of(partition) if callable(partition) else partition
    if indices is not None:
        if partition is not None or clients is not None:
            raise UserError("partition: indices are refused beside partition and clients")
        with settings.arguments("partition"):
            lists = checked_lists(indices, len(data.dataset.train_y))
        text = json.dumps([part.tolist() for part in lists])
        partition = settings.GIVEN + hashlib.sha256(text.encode()).hexdigest()[:12]
        clients = len(lists)
    options = {"partition": partition, "clients": clients, **options}
    with settings.arguments("partition"):
        seed = whole_number("seed", seed, 0, 2**63 - 1)
    checked = settings.from_arguments("partition", data, {"fedavg": {}}, options | {"seed": [seed]})
    (name,) = checked.scenario_names
    with settings.arguments("partition"):
        made = partition_of(data.dataset, checked.data, checked.scenarios[name], name, seed, lists)
    return Split(data, options, seed, made, lists)


def _short(value: Any) -> str:
    """A value in a title: a list of many numbers is cut."""
    text = settings.plain(value)
    return text if isinstance(text, str) else shown(text)


def without_unseen(caller: str, data: Data, options: Mapping[str, Any]) -> Data:
    """The data set without the owners that the argument `unseen` leaves out. UserError."""
    if options.get("unseen") is None:
        return data
    with settings.arguments(caller):
        return data.without(options["unseen"])


def check_data(caller: str, value: object, *allowed: type) -> None:
    """UserError unless `value` is of an allowed type."""
    if not isinstance(value, allowed):
        names = "load, from_frame, from_texts, from_arrays, from_dataset" + (
            ", partition" if Split in allowed else ""
        )
        raise UserError(
            f"{caller}: data is of type {type(value).__name__}; allowed: what one of {names} "
            "returned"
        )
