"""Who holds which samples: the partitions by name.

Every partition is a function `(labels [n], n_clients, rng, **params) -> n_clients ascending arrays of positions`, for
those in BY_OWNER `(owners [n], ...)`; no position lies in two of them and none is empty. All positions are dealt unless
the partition's docstring says what is left out. What can't work is refused before anything is drawn; what only a draw
can tell, after a bounded number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from plugins.core.errors import UserError
from plugins.data.checks import known, options_of
from plugins.data.partitions.label import by_classes, dirichlet, shards, shards_equal, similarity
from plugins.data.partitions.label_and_quantity import mixed, two_classes
from plugins.data.partitions.natural import natural, natural_grouped
from plugins.data.partitions.quantity import iid, iid_unbalanced, quantity
from plugins.data.streams import stream
from plugins.data.types import Ints

PARTITIONS: dict[str, Callable[..., list[Ints]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "shards_equal": shards_equal,
    "similarity": similarity,
    "by_classes": by_classes,
    "iid_unbalanced": iid_unbalanced,
    "quantity": quantity,
    "two_classes": two_classes,
    "mixed": mixed,
    "natural": natural,
    "natural_grouped": natural_grouped,
}
BY_OWNER = ("natural", "natural_grouped")  # partitions of users, not of labels


def partition(
    name: str,
    labels: Ints,
    indices: Ints,
    n_clients: int,
    seed: int,
    owners: ArrayLike | None = None,
    source: str = "the data set",
    **params: object,
) -> list[Ints]:
    """Partition `name` of the training samples `indices`, as indices into the training set.

    `labels` are those of the whole training set [n]; `indices` are distinct. `owners` [n] says whose each sample is,
    None that nobody knows; `source` is what a refusal calls the data set. Each client's indices ascend; no index
    lies with two clients, and each with one unless the partition leaves some out. Raises UserError for an unknown
    name or parameter and for values that don't fit the data.
    """
    function = PARTITIONS[known("partition", name, PARTITIONS)]
    options_of(function, f"partition {name}", params)
    indices = np.sort(np.asarray(indices, dtype=np.int64))
    if name not in BY_OWNER:
        of = np.asarray(labels)
    elif owners is not None:
        of = np.asarray(owners)
    else:
        others = ", ".join(other for other in PARTITIONS if other not in BY_OWNER)
        raise UserError(
            f"partition {name}: {source} doesn't say whose samples are whose; allowed: a data set that does (femnist, "
            f"sent140, arrays with client ids), or the partitions {others}"
        )
    clients = function(of[indices], n_clients, stream(seed, "partition"), **params)
    return [indices[positions] for positions in clients]
