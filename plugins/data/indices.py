"""The file that says who holds which samples: the partition stage writes it, trainers and silos read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.core.errors import UserError
from plugins.data.types import Ints


@dataclass(frozen=True, eq=False)
class Indices:
    """The partition stage's index lists into the training set."""

    clients: list[Ints]
    validation: Ints
    public: Ints


def read_indices(path: Path) -> Indices:
    """The index lists of a partition. UserError if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        lists = [np.asarray(part, dtype=np.int64) for part in (*found["clients"], found["validation"], found["public"])]
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"{path}: not a readable partition ({reason}); the partition stage writes it") from None
    return Indices(lists[:-2], lists[-2], lists[-1])
