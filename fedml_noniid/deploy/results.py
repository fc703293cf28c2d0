"""The files that a run writes into its folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save

from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.engines.run import Outcome

ROUNDS, ABSENT = "rounds.csv", "absent.csv"
MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"


class RunFile(NamedTuple):
    """A file that a process goes on from when it is started again."""

    path: Path
    run: str  # the name of the run


def write_model(path: Path, outcome: Outcome) -> str:
    """Writes model.safetensors; returns the SHA-256 of the weights."""
    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers, outcome.models)
    digest = weights_sha256(tensors)
    write_whole(path, save(tensors, metadata={"weights_sha256": digest}))
    return digest
