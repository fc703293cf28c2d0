"""Each silo's own data file, and the server's: `python -m plugins.silo.shards --data ... --indices ... --out ...`."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from plugins.core.data import Samples
from plugins.core.errors import UserError
from plugins.data import noise
from plugins.data.dataset import Dataset
from plugins.data.files import write_whole
from plugins.data.indices import read_indices

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Parts:
    """The data of one experiment, normalised."""

    train: Samples
    clients: Sequence[Ints]  # positions in `train`
    test: Samples
    validation: Samples | None
    public: Samples | None
    n_classes: int
    embedding: torch.Tensor | None = None  # [V, width], of text: every process has it, nobody sends it

    @staticmethod
    def cut(
        data: Dataset, clients: Sequence[Ints], validation: Ints, public: Ints, std: torch.Tensor | None = None
    ) -> Parts:
        """All arrays are indices into the training set; an empty one means that there is no such part.

        `std`: the standard deviations [N, ...] of the clients' noise, if they have any (`plugins.data.noise`).
        """
        x, y = data.normalised("train"), data.train_y
        train = Samples(x, y, None if std is None else noise.held(std, clients, x))

        def samples(indices: Ints) -> Samples | None:
            return Samples(x[indices], y[indices]) if len(indices) else None

        test = Samples(data.normalised("test"), data.test_y)
        n_classes = len(data.classes)
        return Parts(train, clients, test, samples(validation), samples(public), n_classes, data.embedding)


@dataclass(frozen=True, eq=False)
class Shard:
    """What one process has: rank 0 the server's test and validation data, rank k + 1 the samples of client k."""

    rank: int
    silos: int
    n_classes: int
    parts: dict[str, Samples]  # rank 0: test, perhaps validation; else train; both: perhaps public
    noise: torch.Tensor | None = None  # standard deviations [...] of the client's noise, if there is any
    embedding: torch.Tensor | None = None  # as in `Parts`

    @property
    def n_public(self) -> int:
        """Samples of the public split."""
        return len(self.parts["public"].y) if "public" in self.parts else 0


def write(template: str, parts: Parts) -> None:
    """Writes the files of all ranks; `template` contains {rank}. Without a public part none is written."""
    for rank in range(len(parts.clients) + 1):
        std = None
        if rank == 0:
            held = {"test": parts.test, "validation": parts.validation, "public": parts.public}
        else:
            index = torch.from_numpy(np.asarray(parts.clients[rank - 1], dtype=np.int64))
            held = {"train": Samples(parts.train.x[index], parts.train.y[index]), "public": parts.public}
            std = None if parts.train.noise is None else parts.train.noise.std[rank - 1]
        present = {key: samples for key, samples in held.items() if samples is not None}
        shard = Shard(rank, len(parts.clients), parts.n_classes, present, std, parts.embedding)
        tensors = _tensors(shard)
        metadata = {"shard": json.dumps(_head(shard)), "checksum": _checksum(shard)}
        write_whole(Path(template.replace("{rank}", str(rank))), safetensors.torch.save(tensors, metadata))


def read(path: Path, rank: int, silos: int) -> Shard:
    """The file of a process. UserError if it is missing, damaged, or another process's."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; data_args.shard names the data file of rank {rank}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            head = json.loads(metadata["shard"])
            # Copies: the file's tensors lie at addresses of any alignment, and matrix products round differently there.
            parts = {
                key: Samples(file.get_tensor(f"{key}/x").clone(), file.get_tensor(f"{key}/y").clone())
                for key in head["parts"]
            }
            there = set(file.keys())
            std, vectors = (file.get_tensor(key).clone() if key in there else None for key in ("noise", "embedding"))
        shard = Shard(int(head["rank"]), int(head["silos"]), int(head["n_classes"]), parts, std, vectors)
        whole = _checksum(shard) == metadata["checksum"]
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: damaged, or not a shard ({reason}); write the shards again") from None
    if not whole:
        raise UserError(f"{path}: damaged (its content doesn't match its checksum); write the shards again")
    if (shard.rank, shard.silos) != (rank, silos):
        raise UserError(
            f"{path}: is the shard of rank {shard.rank} of {shard.silos} silos; this is rank {rank} of {silos} silos"
        )
    return shard


def _head(shard: Shard) -> dict[str, object]:
    return {
        "rank": shard.rank, "silos": shard.silos, "n_classes": shard.n_classes,
        "parts": sorted(shard.parts),
    }  # fmt: skip


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    optional = {"noise": shard.noise, "embedding": shard.embedding}
    found = {
        f"{part}/{axis}": leaf
        for part, samples in sorted(shard.parts.items())
        for axis, leaf in (("x", samples.x), ("y", samples.y))
    } | {key: leaf for key, leaf in optional.items() if leaf is not None}
    return {key: leaf.contiguous() for key, leaf in found.items()}


def _checksum(shard: Shard) -> str:
    digest = hashlib.sha256(json.dumps(_head(shard), sort_keys=True).encode())
    for key, leaf in _tensors(shard).items():
        digest.update(f"{key} {leaf.dtype} {list(leaf.shape)}".encode())
        digest.update(leaf.numpy().data)
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m plugins.silo.shards", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data/<data set>.safetensors")
    parser.add_argument("--indices", type=Path, required=True, help="partitions/<scenario>-<seed>/indices.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for <rank>.safetensors; 0 is the server's")
    parser.add_argument("--public", action="store_true", help="give every silo the public split (FNR-FL needs it)")
    parser.add_argument("--sigma", type=float, help="let the silos' samples be noisy: the scenario's noise.sigma")
    parser.add_argument("--form", default=noise.FORMS[0], help=f"the scenario's noise.form: {', '.join(noise.FORMS)}")
    options = parser.parse_args(arguments)
    try:
        held, data = read_indices(options.indices), Dataset.read(options.data)
        std = None
        if options.sigma is not None:
            shape = tuple(data.train_x.shape[1:])
            std = noise.deviations(options.form, options.sigma, len(held.clients), shape, data.scale)
        parts = Parts.cut(
            data, held.clients, held.validation, held.public if options.public else held.public[:0], std
        )  # fmt: skip
        write(str(options.out / "{rank}.safetensors"), parts)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{len(held.clients)} shards and the server's file are in {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
