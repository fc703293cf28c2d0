"""The file of a partition, with the samples of each client. The partition stage writes it; others read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.types import Ints


@dataclass(frozen=True, eq=False)
class Indices:
    """The index lists of a partition: into the training set, and for `test_clients` into the test set."""

    clients: list[Ints]
    validation: Ints
    public: Ints
    test_clients: list[Ints]


def read_indices(path: Path) -> Indices:
    """The index lists of a partition. UserError if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        clients, test_clients = ([_indices(part) for part in found[key]] for key in ("clients", "test_clients"))
        if len(clients) != len(test_clients):
            raise ValueError(f"{len(clients)} clients, but {len(test_clients)} test_clients")
        return Indices(clients, _indices(found["validation"]), _indices(found["public"]), test_clients)
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{path}: not a readable partition ({reason}); the partition stage writes it") from None


def _indices(part: object) -> Ints:
    return np.asarray(part, dtype=np.int64)
