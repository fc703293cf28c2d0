"""The files that a run writes into its folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.plugins.engines.run import Outcome

ROUNDS, MODEL, ABSENT, CHECKPOINT = (
    "rounds.csv",
    "model.safetensors",
    "absent.csv",
    "checkpoint.safetensors",
)


def write_model(path: Path, outcome: Outcome) -> str:
    """Writes model.safetensors; returns the SHA-256 of the weights."""
    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers)
    digest = weights_sha256(tensors)
    write_whole(path, save(tensors, metadata={"weights_sha256": digest}))
    return digest
