"""The file of a partition, with the samples of each client.

The partition stage writes it; others read it. It holds arrays: of the lists of all clients, their
positions one behind the other, and where each client's begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.drift import Drift
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.skew import CLEAN, Skew
from fedml_noniid.data.types import Ints

INDICES = "indices.safetensors"  # in the folder of a partition
DRIFT = ("concepts", "rounds", "clients")  # the fields of a Drift
OFFSETS = ".offsets"  # ends the name of the array that says where each client's list begins


@dataclass(frozen=True, eq=False)
class Indices:
    """The index lists of a partition: into the training set, and for `test_clients` into the test
    set."""

    clients: Ragged
    validation: Ints
    public: Ints
    test_clients: Ragged
    skew: Skew = CLEAN  # what the clients see in place of their samples

    @property
    def content(self) -> bytes:
        """The content of the file, safetensors of int64."""
        arrays = {"validation": self.validation, "public": self.public}
        for name in ("clients", "test_clients"):
            lists: Ragged = getattr(self, name)
            arrays |= {name: lists.flat, name + OFFSETS: lists.offsets}
        if self.skew.labels is not None:
            arrays["labels"] = Ragged.from_lists(self.skew.labels).flat
        if self.skew.turns is not None:
            arrays["quarter_turns"] = self.skew.turns
        if (drift := self.skew.drift) is not None:
            arrays |= {f"drift.{key}": getattr(drift, key) for key in DRIFT}
        whole: bytes = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
        return whole


def read_indices(path: Path) -> Indices:
    """The index lists of a partition. UserError if the file is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:  # torch's arrays are views of the mapped file
            arrays = {key: file.get_tensor(key).numpy() for key in sorted(file.keys())}
        for name, array in arrays.items():
            if array.dtype != np.int64:
                raise ValueError(f"{name}: {array.dtype}, expected int64")
        clients, test_clients = (_lists(arrays, key) for key in ("clients", "test_clients"))
        if len(clients) != len(test_clients):
            raise ValueError(f"{len(clients)} clients, but {len(test_clients)} test_clients")
        skew = _skew(arrays, clients)
        return Indices(clients, arrays["validation"], arrays["public"], test_clients, skew)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(
            f"{path}: not a readable partition ({reason}); the partition stage writes it"
        ) from None


def _lists(arrays: dict[str, Ints], name: str) -> Ragged:
    """The lists of the clients in the file. ValueError if they are none."""
    flat, offsets = arrays[name], arrays[name + OFFSETS]
    if flat.ndim != 1 or offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name}: no lists")
    if offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{name}: the offsets do not divide {len(flat)} positions")
    return Ragged(flat, offsets)


def _skew(arrays: dict[str, Ints], clients: Ragged) -> Skew:
    """The skew in the file. ValueError if it doesn't fit the clients."""
    labels, turns = arrays.get("labels"), arrays.get("quarter_turns")
    if labels is not None and labels.shape != clients.flat.shape:
        raise ValueError("labels: not one for each sample of each client")
    if turns is not None and turns.shape != (len(clients),):
        raise ValueError(f"{len(clients)} clients, but {len(turns)} quarter_turns")
    drifts = any(f"drift.{key}" in arrays for key in DRIFT)
    drift = _drift(arrays, len(clients)) if drifts else None
    return Skew(None if labels is None else Ragged(labels, clients.offsets), turns, drift)


def _drift(arrays: dict[str, Ints], n_clients: int) -> Drift:
    """The drift in the file. ValueError if it is none of these clients."""
    drift = Drift(*(arrays[f"drift.{key}"] for key in DRIFT))
    if drift.clients.shape != (len(drift.rounds), n_clients):
        raise ValueError("drift: not one concept for each round and client")
    if not np.isin(drift.clients, np.arange(len(drift.concepts))).all():
        raise ValueError("drift: names a concept that it lacks")
    return drift
