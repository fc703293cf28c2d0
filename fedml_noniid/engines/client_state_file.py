"""Holds clients' memories on disk, where they are too many for RAM.

The file has two slots for each client, [N, 2, row]. The last checkpoint says which slot of a client
counts, and has the SHA-256 of the row in it. A new row goes to the other slot, so the rename of the
next checkpoint ends a round, and a kill before it loses nothing. A client that was never asked has
the first row, and takes no space.

Rows are read and written at their offsets. The file is not mapped: a full or damaged disk would end
the process by a signal, and mapped pages count as its memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Tree, n_bytes, row, tree_map
from fedml_noniid.data.files import writing
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.storage import replace_row, shared

NEVER = -1  # in place of a slot: the client was never asked, and has the first row
DIGEST = hashlib.sha256().digest_size
REMEDY = "restore it, or delete the checkpoint and this file to start afresh"
# Of each client in the memory; a range where clients have the numbers from 0.
Places = Mapping[int, int] | range
Digests = np.ndarray[Any, np.dtype[np.uint8]]


class ClientStateFile:
    """Holds the rows of all clients in a file.

    Slots and digests lie in memory that forked processes share, so each of them reads and writes
    rows. Its methods are those of `engines.memory.InMemory`.
    """

    def __init__(self, first: Tree, places: Places) -> None:
        """`first`: the row of a client that was never asked. `places`: client -> its number."""
        n = len(places)
        self.first, self._places = first, places
        self._width = n_bytes(first)
        # By place: the slot of each row, the slot in the checkpoint, and the digest of the row.
        self._slots, self._committed = (shared(n).numpy()[:n].view(np.int8) for _ in range(2))
        self._slots[:] = self._committed[:] = NEVER
        self._digests = shared(n * DIGEST).numpy()[: n * DIGEST].reshape(n, DIGEST)
        self._digests[:] = _digest(_buffers(first))
        self._path = Path(tempfile.gettempdir())
        with writing(self._path):
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, has no name
        weakref.finalize(self, self._file.close)

    def row(self, client: int) -> Tree:
        position = self._places[client]
        if self._slots[position] == NEVER:
            return self.first
        stored = tree_map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype), self.first)
        buffers = _buffers(stored)
        try:
            self._transfer(os.preadv, buffers, self._offset(position, self._slots[position]))
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self._path}: can't be read ({reason}); {REMEDY}") from None
        if not np.array_equal(_digest(buffers), self._digests[position]):
            raise UserError(
                f"{self._path}: damaged (the row of client {client} doesn't match its checksum); "
                f"{REMEDY}"
            )
        return tree_map(lambda leaf, like: leaf.to(like.device), stored, self.first)

    def rows(self, clients: Sequence[int], *names: str) -> Tree:
        """Those of some methods, if they are named."""
        first = {name: tree for name, tree in self.first.items() if not names or name in names}
        stacked = tree_map(lambda leaf: leaf.new_empty((len(clients), *leaf.shape)), first)
        for position, client in enumerate(clients if first else ()):
            whole = self.row(client)
            replace_row(stacked, position, {name: whole[name] for name in first})
        return stacked

    def put_row(self, client: int, row: Tree) -> None:
        if row.keys() != self.first.keys():
            row = self.row(client) | row
        stored = tree_map(lambda leaf, new: new.to(leaf.dtype).expand_as(leaf), self.first, row)
        position, buffers = self._places[client], _buffers(stored)
        slot = int(self._committed[position] == 0)
        with writing(self._path):
            self._transfer(os.pwritev, buffers, self._offset(position, slot))
        self._slots[position], self._digests[position] = slot, _digest(buffers)

    def put(self, clients: Sequence[int], rows: Tree) -> None:
        for position, client in enumerate(clients):
            self.put_row(client, row(rows, position))

    def whole(self, *names: str) -> Tree:
        return self.rows([*self._places], *names)

    def restore(self, whole: Tree) -> None:
        self.put([*self._places], whole)

    def share(self) -> None:
        """Does nothing: forked processes share the file, its slots and its digests."""

    def keep_in(self, path: Path, fresh: bool) -> None:
        self._path = path
        self._file.close()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "r+b", buffering=0, opener=_opener)  # noqa: SIM115, of the run
            weakref.finalize(self, self._file.close)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise UserError(
                    f"{path}: another run uses it; wait until that run ends, or stop it"
                ) from None
            if fresh:
                self._file.truncate(0)

    def state(self) -> Tree:
        with writing(self._path):
            os.fsync(self._file.fileno())
        table = {"slots": self._slots, "digests": self._digests}
        return {"on_disk": {name: torch.from_numpy(column) for name, column in table.items()}}

    def committed(self) -> None:
        self._committed[:] = self._slots

    def resume(self, on_disk: Tree) -> None:
        self._slots[:], self._digests[:] = on_disk["slots"].cpu(), on_disk["digests"].cpu()
        self.committed()
        end = sum(
            self._offset(position, self._slots[position]) + self._width
            for position in np.flatnonzero(self._slots != NEVER)[-1:]
        )
        if os.fstat(self._file.fileno()).st_size < end:
            raise UserError(f"{self._path}: missing or cut; {REMEDY}")

    def sha256(self) -> str:
        return memory_sha256(self.first, self._digests.tobytes())

    def _offset(self, position: int, slot: int) -> int:
        return (2 * int(position) + int(slot)) * self._width

    def _transfer(
        self, operation: Callable[..., int], buffers: list[memoryview], offset: int
    ) -> None:
        """Reads or writes a row. Raises OSError. The system may take a part of a leaf at a time."""
        for buffer in buffers:
            while buffer:
                n = operation(self._file.fileno(), [buffer], offset)
                if not n:
                    raise OSError("it was cut")
                buffer, offset = buffer[n:], offset + n


def structure(n: int) -> Tree:
    """The structure of the "on_disk" that a checkpoint has of `n` clients."""
    slots, digests = torch.empty(n, dtype=torch.int8), torch.empty(n, DIGEST, dtype=torch.uint8)
    return {"slots": slots, "digests": digests}


def memory_digests(stacked: Tree, n: int) -> Digests:
    """The SHA-256 of each of `n` rows, [n, 32]."""
    parts = _rows_of_bytes(stacked)
    digests = np.empty((n, DIGEST), np.uint8)
    for at in range(n):
        digests[at] = _digest(part[at] for part in parts)
    return digests


def memory_sha256(first: Tree, digests: bytes) -> str:
    """SHA-256 of the memories of all clients: over the leaves' names, types and shapes, and over
    the SHA-256 of each row."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(first).items()):
        digest.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
    digest.update(digests)
    return digest.hexdigest()


def _digest(parts: Iterable[Any]) -> Digests:
    """The SHA-256 of a row: over the bytes of its leaves, in the order of their names."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return np.frombuffer(digest.digest(), np.uint8)


def _buffers(row: Tree) -> list[memoryview]:
    """The memory of the leaves in the order of their names; of copies where they lie elsewhere."""
    alone = tree_map(lambda leaf: leaf.unsqueeze(0), row)
    return [part.reshape(-1).data for part in _rows_of_bytes(alone)]


def _rows_of_bytes(stacked: Tree) -> list[Digests]:
    """The leaves [M, ...] in the order of their names, as bytes [M, ...]."""
    return [
        leaf.detach()
        .cpu()
        .contiguous()
        .view(len(leaf), leaf.shape[1:].numel())
        .view(torch.uint8)
        .numpy()
        for _, leaf in sorted(flatten(stacked).items())
    ]


def _opener(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
