"""What a run leaves in its folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from plugins.data.files import write_whole
from plugins.engines.hashing import model_tensors, weights_sha256
from plugins.engines.record import rounds_csv
from plugins.engines.run import Outcome

ROUNDS, MODEL = "rounds.csv", "model.safetensors"


def write_rounds(path: Path, rows: list[dict[str, float]]) -> None:
    """rounds.csv, as far as the run has come."""
    write_whole(path, rounds_csv(rows))


def write_model(path: Path, outcome: Outcome) -> str:
    """model.safetensors; returns the SHA-256 of the weights."""
    tensors = model_tensors(outcome.params, outcome.evaluated, outcome.buffers)
    digest = weights_sha256(tensors)
    write_whole(path, save(tensors, metadata={"weights_sha256": digest}))
    return digest
