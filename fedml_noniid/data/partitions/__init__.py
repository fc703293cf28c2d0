"""The partitions by name. A partition decides which client holds which samples.

Every partition of ours is a function `(labels [n], n_clients, rng, **params) -> n_clients ascending
arrays of positions`, for 1 to n clients; those in BY_OWNER take `(owners [n], ...)`. No position is
in two arrays, and no array is empty. All positions are assigned unless the partition's docstring
says what is left out. Values that can't work are refused before anything is drawn; if only a draw
can tell, they are refused after a bounded number of draws. `own.py` says what a partition of a
user's own is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from fedml_noniid.core.errors import UserError, known
from fedml_noniid.core.options import check_options
from fedml_noniid.data.checks import class_numbers, whole_number
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.partitions import own
from fedml_noniid.data.partitions.label import (
    by_classes,
    dirichlet,
    shards,
    shards_equal,
    similarity,
)
from fedml_noniid.data.partitions.label_and_quantity import mixed, two_classes
from fedml_noniid.data.partitions.natural import natural, natural_grouped
from fedml_noniid.data.partitions.quantity import by_sizes, iid, iid_unbalanced, quantity
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints
from fedml_noniid.own_code import check_arguments, function_of, names_code

Partition = Callable[..., Sequence[Ints]]


BY_LABEL: dict[str, Partition] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "shards_equal": shards_equal,
    "similarity": similarity,
    "by_classes": by_classes,
    "iid_unbalanced": iid_unbalanced,
    "by_sizes": by_sizes,
    "quantity": quantity,
    "two_classes": two_classes,
    "mixed": mixed,
}
# Their clients are users or groups of users.
BY_OWNER: dict[str, Partition] = {"natural": natural, "natural_grouped": natural_grouped}
PARTITIONS = BY_LABEL | BY_OWNER


def find(name: str) -> Callable[..., object]:
    """The partition of a name: one of ours, or a function as `package.module:name`. UserError."""
    return function_of("partition", name, PARTITIONS)


def check(name: str, options: Mapping[str, object], also: Iterable[str] = ()) -> None:
    """UserError unless the partition exists and takes these options.

    `also`: keys that may stand beside them. Only the data can tell whether the values fit.
    """
    if name in PARTITIONS:
        check_options(PARTITIONS[name], options, also)
    else:
        check_arguments(find(name), options, own.FILLED)


def goes_by_owner(name: str) -> bool:
    """Whether clients are made of owners."""
    return name in BY_OWNER or (names_code(name) and "owners" in own.asks_for(find(name)))


def reads_samples(name: str) -> bool:
    """Whether a partition goes by the samples themselves: one of a user's own may."""
    return names_code(name) and "samples" in own.asks_for(find(name))


def divided(
    name: str, data: Dataset, indices: Ints, n_clients: int, seed: int, **params: object
) -> Ragged:
    """Partition `name`, also a user's own, of the training samples `indices` of a data set.

    As `partition`.
    """
    labels, source = data.strata.train, f"data set {data.name!r}"
    owners = None if data.train_owner is None else data.train_owner.numpy()
    if name == "by_classes":
        check(name, params)
        params["classes"] = [
            class_numbers(("classes", k), data.strata.names, classes)
            for k, classes in enumerate(cast("list[list[object]]", params["classes"]))
        ]
    if not names_code(name):
        return partition(name, labels, indices, n_clients, seed, owners, source, **params)
    function = find(name)
    check(name, params)
    indices = np.sort(np.asarray(indices, dtype=np.int64))
    if owners is None and goes_by_owner(name):
        raise _ownerless(name, source)
    whole_number("clients", n_clients, 1, len(indices), _left(indices, labels))
    values = {
        "labels": labels[indices],
        "n_clients": n_clients,
        "owners": None if owners is None else owners[indices],
        "samples": data.train_x.numpy()[indices] if reads_samples(name) else None,
    }
    return _of(indices, own.assigned(function, values, seed, params))


def _of(indices: Ints, clients: Sequence[Ints]) -> Ragged:
    """The clients' entries of `indices` [n] in place of the positions there."""
    positions = Ragged.from_lists(clients)
    return Ragged(indices[positions.flat], positions.offsets)


def _left(indices: Ints, labels: Ints) -> str:
    """How many samples there are to assign, and why not all."""
    text = f" ({len(indices)} training samples"
    if len(indices) == len(labels):
        return f"{text})"
    held_out = len(labels) - len(indices)
    return f"{text}; validation and public hold out {held_out} of {len(labels)})"


def _ownerless(name: str, source: str) -> UserError:
    return UserError(
        f"partition {name}: {source} doesn't say whose samples are whose; allowed: a data "
        "set that does (femnist, "
        "sent140, a table, texts or arrays with an `owner`), or the partitions "
        f"{', '.join(BY_LABEL)}"
    )


def partition(
    name: str,
    labels: Ints,
    indices: Ints,
    n_clients: int,
    seed: int,
    owners: ArrayLike | None = None,
    source: str = "the data set",
    **params: object,
) -> Ragged:
    """Partition `name` of the training samples `indices`, as indices into the training set.

    `labels` [n] and `owners` [n] belong to the whole training set; `owners` is None if they are
    unknown. `indices` are distinct. `source` names the data set in errors. Each client's indices
    ascend. No index is given to two clients; each is given to one, unless the partition leaves some
    out. Raises UserError for an unknown name or parameter and for values that don't fit the data.
    """
    function = PARTITIONS[known("partition", name, PARTITIONS)]
    check_options(function, params)
    indices = np.sort(np.asarray(indices, dtype=np.int64))
    if name in BY_OWNER and owners is None:
        raise _ownerless(name, source)
    if name in BY_LABEL:
        left = _left(indices, labels)
        n_clients = whole_number("clients", n_clients, 1, len(indices), left)
    groups = np.asarray(owners if name in BY_OWNER else labels)
    clients = function(groups[indices], n_clients, stream(seed, "partition"), **params)
    return _of(indices, clients)
