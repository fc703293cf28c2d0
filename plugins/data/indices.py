"""The file of a partition, with the samples of each client.

The partition stage writes it; others read it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.drift import Drift
from fedml_noniid.plugins.data.skew import CLEAN, Skew
from fedml_noniid.plugins.data.types import Ints

DRIFT = ("concepts", "rounds", "clients")  # the fields of a Drift


@dataclass(frozen=True, eq=False)
class Indices:
    """The index lists of a partition: into the training set, and for `test_clients` into the test
    set."""

    clients: list[Ints]
    validation: Ints
    public: Ints
    test_clients: list[Ints]
    skew: Skew = CLEAN  # what the clients see in place of their samples

    @property
    def text(self) -> str:
        """The content of the file, JSON."""
        content: dict[str, object] = {
            "clients": [part.tolist() for part in self.clients],
            "validation": self.validation.tolist(),
            "public": self.public.tolist(),
            "test_clients": [part.tolist() for part in self.test_clients],
        }
        if self.skew.labels is not None:
            content["labels"] = [part.tolist() for part in self.skew.labels]
        if self.skew.turns is not None:
            content["quarter_turns"] = self.skew.turns.tolist()
        if (drift := self.skew.drift) is not None:
            content["drift"] = {key: getattr(drift, key).tolist() for key in DRIFT}
        return json.dumps(content)


def read_indices(path: Path) -> Indices:
    """The index lists of a partition. UserError if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        clients, test_clients = (
            [_indices(part) for part in found[key]] for key in ("clients", "test_clients")
        )
        if len(clients) != len(test_clients):
            raise ValueError(f"{len(clients)} clients, but {len(test_clients)} test_clients")
        skew = _skew(found, [len(part) for part in clients])
        return Indices(
            clients, _indices(found["validation"]), _indices(found["public"]), test_clients, skew
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(
            f"{path}: not a readable partition ({reason}); the partition stage writes it"
        ) from None


def _skew(found: dict[str, Any], sizes: list[int]) -> Skew:
    """The skew in the file. ValueError if it doesn't fit the clients."""
    labels = [_indices(part) for part in found["labels"]] if "labels" in found else None
    turns = _indices(found["quarter_turns"]) if "quarter_turns" in found else None
    if labels is not None and [len(part) for part in labels] != sizes:
        raise ValueError("labels: not one for each sample of each client")
    if turns is not None and len(turns) != len(sizes):
        raise ValueError(f"{len(sizes)} clients, but {len(turns)} quarter_turns")
    drift = _drift(found["drift"], len(sizes)) if "drift" in found else None
    return Skew(labels, turns, drift)


def _drift(found: dict[str, Any], n_clients: int) -> Drift:
    """The drift in the file. ValueError if it is none of these clients."""
    drift = Drift(*(_indices(found[key]) for key in DRIFT))
    if drift.clients.shape != (len(drift.rounds), n_clients):
        raise ValueError("drift: not one concept for each round and client")
    if not np.isin(drift.clients, np.arange(len(drift.concepts))).all():
        raise ValueError("drift: names a concept that it lacks")
    return drift


def _indices(part: object) -> Ints:
    return np.asarray(part, dtype=np.int64)
