"""Who holds which samples: the partitions by name.

Every partition is a function `(labels [n], n_clients, rng, **params) -> n_clients ascending arrays of positions`; no
position lies in two of them and none is empty. All positions are dealt unless the partition's docstring says what is
left out. What can't work is refused before anything is drawn; what only a draw can tell, after a bounded number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plugins.data.checks import known, options_of
from plugins.data.partitions.label import dirichlet, shards, shards_equal, similarity
from plugins.data.partitions.label_and_quantity import mixed, two_classes
from plugins.data.partitions.quantity import iid, iid_unbalanced, quantity
from plugins.data.randomness import stream
from plugins.data.types import Ints

PARTITIONS: dict[str, Callable[..., list[Ints]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "shards_equal": shards_equal,
    "similarity": similarity,
    "iid_unbalanced": iid_unbalanced,
    "quantity": quantity,
    "two_classes": two_classes,
    "mixed": mixed,
}


def partition(name: str, labels: Ints, indices: Ints, n_clients: int, seed: int, **params: object) -> list[Ints]:
    """Partition `name` of the training samples `indices`, as indices into the training set.

    `labels` are those of the whole training set [n]; `indices` are distinct. Each client's indices ascend; no index
    lies with two clients, and each with one unless the partition leaves some out. Raises UserError for an unknown
    name or parameter and for values that don't fit the data.
    """
    function = PARTITIONS[known("partition", name, PARTITIONS)]
    options_of(function, f"partition {name}", params)
    indices = np.sort(np.asarray(indices, dtype=np.int64))
    clients = function(np.asarray(labels)[indices], n_clients, stream(seed, "partition"), **params)
    return [indices[positions] for positions in clients]
