"""Each silo's own data file, and the server's: `noniid deploy shards`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.data import noise as noises
from fedml_noniid.data import tensor_file
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.drift import Drift
from fedml_noniid.data.indices import DRIFT, Indices, read_indices
from fedml_noniid.data.types import Ints

COUNTS = ("rank", "silos", "n_classes")  # in the head of a file
OPTIONAL = ("noise", "embedding")  # tensors of a shard
READ_TWICE = 64  # samples: two readings of what draws random numbers differ in them
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Parts:
    """The data of one experiment, normalised."""

    train: Samples
    clients: Sequence[Ints]  # positions in `train`
    test: Samples
    validation: Samples | None
    public: Samples | None
    n_classes: int
    # [V, width], for text only: every process has it, none sends it
    embedding: torch.Tensor | None = None
    drift: Drift | None = None  # how the labels of all clients change with the round
    # each client's own test samples, as it sees them without noise and drift
    tests: Sequence[Samples] | None = None

    @staticmethod
    def cut(data: Dataset, indices: Indices, std: torch.Tensor | None = None) -> Parts:
        """The parts of a data set in a partition; an empty list leaves its part out.

        `std`: the standard deviations [N, ...] of the clients' noise, if they have any
        (`data.noise`).
        """
        x, y, clients = data.normalised("train"), data.train_y, indices.clients
        train = Samples(
            *indices.skew.applied(clients, x, y),
            None if std is None else noises.per_sample(std, clients, x),
        )

        def samples(indices: Ints) -> Samples | None:
            return Samples(x[indices], y[indices]) if len(indices) else None

        test = Samples(data.normalised("test"), data.test_y)
        return Parts(
            train,
            clients,
            test,
            samples(indices.validation),
            samples(indices.public),
            len(data.classes),
            data.embedding,
            indices.skew.drift,
            indices.skew.tests(indices.test_clients, test.x, test.y),
        )

    def client_tests(self) -> list[Samples]:
        """Each client's own test samples in its noise, without any drift; none if nobody has
        some."""
        noise = self.train.noise
        return [
            own if noise is None else own._replace(noise=noises.for_client(noise.std[k], own.x))
            for k, own in enumerate(self.tests or [])
        ]


@dataclass(frozen=True, eq=False)
class Shard:
    """The data of one process: rank 0 has the server's test and validation data, rank k + 1 the
    samples of client k."""

    rank: int
    silos: int
    n_classes: int
    parts: dict[
        str, Samples
        # test and perhaps validation on rank 0, train and perhaps test on others, on all perhaps
        # public
    ]
    # standard deviations [...] of the client's noise, if there is any
    noise: torch.Tensor | None = None
    embedding: torch.Tensor | None = None  # as in `Parts`
    drift: Drift | None = None  # of all clients on rank 0, on others of the client

    @property
    def n_public(self) -> int:
        """Samples of the public split."""
        return len(self.parts["public"].y) if "public" in self.parts else 0

    def with_train(self, train: Samples) -> Shard:
        """The shard with other training samples."""
        return replace(self, parts={**self.parts, "train": train})

    def in_noise(self, part: str) -> Samples:
        """The samples of a part as the client reads them."""
        samples = self.parts[part]
        noise = None if self.noise is None else noises.for_client(self.noise, samples.x)
        return samples._replace(noise=noise)

    @property
    def checksum(self) -> str:
        """SHA-256 over all of it, hexadecimal."""
        return tensor_file.checksum(self.head, self.tensors)

    @property
    def head(self) -> dict[str, Any]:
        """What its file holds beside the tensors."""
        return {key: getattr(self, key) for key in COUNTS} | {"parts": sorted(self.parts)}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of its file, by name."""
        leaves = {
            f"{part}/{axis}": getattr(self.parts[part], axis)
            for part in sorted(self.parts)
            for axis in "xy"
        }
        leaves |= {key: leaf for key in OPTIONAL if (leaf := getattr(self, key)) is not None}
        if self.drift is not None:
            leaves |= {f"drift/{key}": torch.from_numpy(getattr(self.drift, key)) for key in DRIFT}
        return leaves


def of_loaders(rank: int, silos: int, n_classes: int, **parts: Batches) -> Shard:
    """The data of one process, from batches (x, y) such as those of a DataLoader.

    `parts`: `test` and perhaps `validation` on rank 0, `train` and perhaps `test` on others, and
    `public` on all if the recipe needs it. A loader that shuffles is read in the order of its data
    set, as a silo shuffles in each round. UserError for a loader that draws in another way.
    """
    read = {name: samples_of(name, batches) for name, batches in parts.items()}
    if isinstance(parts.get("train"), DataLoader):
        logging.getLogger().info(
            "train: %d samples, in the order of the loader's data set; the silo shuffles them in "
            "each round, into batches of args.batch_size",
            len(read["train"].y),
        )
    return Shard(rank, silos, n_classes, read)


def samples_of(name: str, batches: Batches) -> Samples:
    """The samples of batches (x, y), on the CPU; of a DataLoader, in the order of its data set.

    A single batch is not copied. UserError unless a second reading would give the same.
    """
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
        batches = _in_order(name, batches)
    try:
        x, y = (
            leaves[0] if len(leaves) == 1 else torch.cat(leaves)
            for leaves in zip(*batches, strict=True)
        )
        start = 0
        for again_x, again_y in () if iter(batches) is batches else batches:
            end = start + len(again_y)
            if not (_same(again_x, x[start:end]) and _same(again_y, y[start:end])):
                raise UserError(
                    f"{name}: two readings differ: the data set, a transform or collate_fn draws "
                    "random numbers, so each start would train on other samples",
                    allowed="data without, such as TensorDataset(x, y); train_args.augment crops "
                    "and flips images",
                )
            if (start := end) >= READ_TWICE:
                break
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"{name}: its batches can't be joined to one tensor of inputs and one of labels "
            f"({' '.join(str(error).split())[:200]})",
            allowed="batches (x, y) of tensors",
        ) from None
    return Samples(x, y)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def _in_order(name: str, loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same batch size that reads the same samples, each once, in a fixed order.

    UserError for a sampler that decides how often a sample is drawn.
    """
    batched, size, dataset = loader.batch_sampler, loader.batch_size, loader.dataset
    sampler: Any = loader.sampler
    if type(batched) is BatchSampler:
        sampler, size = batched.sampler, batched.batch_size
    n = len(dataset)  # type: ignore[arg-type]  # not an IterableDataset
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == n
    order: Sequence[int] | None = None
    if shuffles or type(sampler) is SequentialSampler:
        order = range(n)
    elif type(sampler) is SubsetRandomSampler:
        order = sampler.indices
    elif isinstance(sampler, list | tuple | range):
        order = sampler
    if order is None or type(batched) not in (BatchSampler, type(None)):
        kind = type(batched if order is not None else sampler).__name__
        raise UserError(
            f"{name}: its DataLoader draws samples by {kind}, so each start would train on others",
            allowed="shuffle, SubsetRandomSampler, or a loader of Subset(data, indices)",
        )
    # A generator of its own: the caller's is left alone.
    options: dict[str, Any] = {"sampler": order, "batch_size": size}
    return DataLoader(dataset, collate_fn=loader.collate_fn, generator=torch.Generator(), **options)


def split(parts: Parts) -> Iterator[Shard]:
    """The data of every process, by rank; a part that is None is left out."""
    silos, noise = len(parts.clients), parts.train.noise
    held = {"test": parts.test, "validation": parts.validation, "public": parts.public}
    std, drift = None, parts.drift
    for rank in range(silos + 1):
        if rank:
            index = torch.from_numpy(np.asarray(parts.clients[rank - 1], dtype=np.int64))
            train = Samples(parts.train.x[index], parts.train.y[index])
            test = None if parts.tests is None else parts.tests[rank - 1]
            held = {"train": train, "test": test, "public": parts.public}
            std = None if noise is None else noise.std[rank - 1]
            drift = None if parts.drift is None else parts.drift.only(rank - 1)
        present = {key: samples for key, samples in held.items() if samples is not None}
        yield Shard(rank, silos, parts.n_classes, present, std, parts.embedding, drift)


def write(template: str, parts: Parts) -> None:
    """Writes the files of all ranks; `template` contains {rank}."""
    for shard in split(parts):
        save(Path(template.replace("{rank}", str(shard.rank))), shard)


def save(path: Path, shard: Shard) -> None:
    """Writes one process's file; only its owner may read it."""
    tensor_file.write(path, "shard", shard.head, shard.tensors, shard.checksum, private=True)


def read(path: Path, rank: int, silos: int) -> Shard:
    """The file of a process. UserError if it is missing, damaged, or another process's."""
    shard = tensor_file.read(
        path,
        "shard",
        _shard,
        what="a shard",
        origin=f"data_args.shard names the data file of rank {rank}",
        remedy="write the shards again",
    )
    if (shard.rank, shard.silos) != (rank, silos):
        raise UserError(
            f"{path}: is the shard of rank {shard.rank} of {shard.silos} silos; this is rank "
            f"{rank} of {silos} silos"
        )
    return shard


def _shard(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Shard:
    # Copies: the file's tensors lie at addresses of any alignment, and matrix products round
    # differently there.
    leaves = {key: leaf.clone() for key, leaf in tensors.items()}
    parts = {key: Samples(leaves[f"{key}/x"], leaves[f"{key}/y"]) for key in head["parts"]}
    noise, embedding = (leaves.get(key) for key in OPTIONAL)
    rank, silos, n_classes = (int(head[key]) for key in COUNTS)
    drift = None
    if f"drift/{DRIFT[0]}" in leaves:
        drift = Drift(*(leaves[f"drift/{key}"].numpy() for key in DRIFT))
    return Shard(rank, silos, n_classes, parts, noise, embedding, drift)


def cut(data: Path, indices: Path, out: Path) -> int:
    """Writes <out>/<rank>.safetensors for every process of a partition; returns the number of
    silos. UserError.

    `data`: a prepared data set. `indices`: indices.safetensors of the partition, where label noise,
    rotation and drift stand too.
    """
    indices_ = read_indices(indices)
    write(str(out / "{rank}.safetensors"), Parts.cut(Dataset.read(data), indices_))
    return len(indices_.clients)
