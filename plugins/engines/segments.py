"""Holds clients' memories on disk, where they are too many for RAM.

`<number>.safetensors` is a segment: the rows that changed in a round, leaves [M, ...]. A segment is
written once and never changed. Its head names the clients and has a SHA-256 of each row. If several
segments have a row of one client, the last one counts. A client without a row has the first one.

A checkpoint names the segments that are in use, with their checksums. So the checkpoint is the
manifest, and its rename ends a round. A kill leaves segments that no checkpoint names; they are
removed when the run goes on. No file is locked or changed in place, so the folder may lie on NFS.

If less than half of the stored rows are in use, a round also writes the rows of the emptiest
segments again, at most as many as its cohort has clients.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params, Tree, leaves, row, tree_map
from fedml_noniid.plugins.data import tensor_file
from fedml_noniid.plugins.data.files import remove_abandoned, write_whole
from fedml_noniid.plugins.engines.forks import finalize
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.storage import numbers, replace_row, rows_for, shared

KIND = "memory"  # of the files
MIN_IN_USE = 0.5  # of the stored rows
LENGTH = 8  # bytes of the number before a header
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # names in safetensors
COMPARED = 2**24  # bytes of a leaf that are compared at a time
FIRST = -1  # in place of a segment's number: a client has the first row
REMEDY = "restore it, or delete the checkpoint and this folder to start afresh"
# Of each client in the memory; a range where clients have the numbers from 0.
Places = Mapping[int, int] | range
Digests = np.ndarray[Any, np.dtype[np.uint8]]
Manifest = list[tuple[int, str]]  # segments by number, with their checksums


class _Written(NamedTuple):
    """What a written segment has."""

    number: int
    checksum: str
    clients: list[int]
    digests: list[str]


class _Where(NamedTuple):
    """Says where a client's row is between two rounds."""

    number: int  # of a segment, or FIRST
    at: int
    staged: bool  # it is read from memory: its segment is being written
    digest: bytes  # SHA-256 of the row, if it is read from the disk


class OnDisk:
    """Holds the rows of all clients in segments, and those of a cohort in this process's memory.

    Two threads write a round's segment and read the rows of the next cohort while clients train.
    Its methods are those of `engines.memory.InMemory`.
    """

    def __init__(self, first: Tree, places: Places, cohort: int) -> None:
        """`first`: the row of a client that was never asked. `places`: client -> its number."""
        n = len(places)
        self.first, self.at_once, self._places = first, cohort, places
        self._folder: Path | None = None
        self._clients = np.fromiter(places, np.int64)
        self._window = rows_for(first, cohort)  # [cohort, ...], rows of this round
        self._slots: dict[int, int] = {}  # client -> row of the window
        self._changed: set[int] = set()  # clients
        self._loading: dict[int, Future[None]] = {}  # by client: its row comes into the window
        # The rows that are being written: new ones, and behind them those that are moved.
        self._staging: Tree = tree_map(
            lambda leaf: torch.empty((2 * cohort, *leaf.shape), dtype=leaf.dtype), first
        )
        self._writing: Future[_Written] | None = None
        self._staged: int | None = None  # the segment that is being written
        self._segment = np.full(n, FIRST, np.int64)  # by place: the segment that has the row
        self._at = np.zeros(n, np.int64)  # its place in there
        self._digests = np.empty((n, hashlib.sha256().digest_size), np.uint8)
        self._digests[:] = _bytes(
            row_digests(tree_map(lambda leaf: leaf.unsqueeze(0), first), (0,))[0]
        )
        self._sizes: dict[int, int] = {}  # rows by segment
        self._in_use: dict[int, int] = {}  # rows by segment
        self._checksums: dict[int, str] = {}
        self._unused: set[int] = set()  # segments whose file is still there
        self._manifest: set[int] = set()  # the segments that the last checkpoint names
        self._next = 0
        self._threads = ThreadPoolExecutor(2, "clients-memory")

    def row(self, client: int) -> Tree:
        slot = self._slot(client)
        if slot is None:
            return row(self.rows((client,)), 0)
        return row(self._window, slot)

    def rows(self, clients: Sequence[int]) -> Tree:
        slots = [self._slot(client) for client in clients]
        if None not in slots:
            index = numbers((slot for slot in slots if slot is not None), self._device)
            return row(self._window, index)
        found = tree_map(lambda leaf: leaf.new_empty((len(clients), *leaf.shape)), self.first)
        for position, (client, slot) in enumerate(zip(clients, slots, strict=True)):
            if slot is None:
                self._load(self._where(client), found, position)
            else:
                replace_row(found, position, row(self._window, slot))
        return found

    def put_row(self, client: int, row: Tree) -> None:
        (slot,) = self._enter((client,), row.keys() != self.first.keys())
        replace_row({name: self._window[name] for name in row}, slot, row)

    def put(self, clients: Sequence[int], rows: Tree) -> None:
        stored = {name: self._window[name] for name in rows}
        for at in range(0, len(clients), self.at_once):
            part = slice(at, at + self.at_once)
            slots = self._enter(clients[part], rows.keys() != self.first.keys())
            index = numbers(slots, self._device)
            tree_map(
                lambda leaf, new, index=index: leaf.index_copy_(0, index, new),
                stored,
                row(rows, part),
            )

    def whole(self, *names: str) -> Tree:
        kept = {name: tree for name, tree in self.first.items() if not names or name in names}
        n, clients = len(self._places), list(self._places)
        found = tree_map(lambda leaf: leaf.new_empty((n, *leaf.shape)), kept)
        if any(True for _ in leaves(kept)):
            for at, client in enumerate(clients):
                one = self.row(client)
                replace_row(found, at, {name: one[name] for name in kept})
        return found

    def restore(self, whole: Tree) -> None:
        for at, client in enumerate(self._places):
            self.put_row(client, row(whole, at))
        self._flush()
        self._finish_writing()

    def share(self) -> None:
        self._window = rows_for(self.first, self.at_once, shared)

    def hold(self, clients: Sequence[int]) -> Mapping[int, int]:
        self._enter(clients, load=True)
        return self._slots

    def follow(self, held: Mapping[int, int]) -> None:
        self._slots = dict(held)

    def keep_in(self, folder: Path, fresh: bool) -> None:
        self._folder = folder
        if fresh:
            self._remove_others(())

    def end_round(self, cohort: Sequence[int]) -> None:
        self._flush()
        self._read_ahead(cohort)

    def state(self) -> Tree:
        return {}

    def manifest(self) -> Manifest:
        self._finish_writing()
        return sorted(self._checksums.items())

    def committed(self) -> None:
        self._manifest = {*self._checksums}

    def resume(self, manifest: Manifest) -> None:
        assert self._folder is not None, "a checkpoint has a folder"
        self._remove_others({number for number, _ in manifest})
        for number, checksum in manifest:
            clients, digests = self._head(number, checksum)
            self._register(_Written(number, checksum, clients, digests))
        self._manifest = {*self._checksums}
        self._next = max(self._checksums, default=-1) + 1

    def sha256(self) -> str:
        self._flush()
        self._finish_writing()
        return memory_sha256(self.first, self._digests.tobytes())

    @property
    def _device(self) -> torch.device:
        return next(leaves(self.first)).device

    def _slot(self, client: int) -> int | None:
        """A client's row in the window, once it is there. None: it is not in the window."""
        loading = self._loading.pop(client, None)
        if loading is not None:
            loading.result()
        return self._slots.get(client)

    def _enter(self, clients: Sequence[int], load: bool) -> list[int]:
        """The rows of the window for clients whose rows change. `load`: not as a whole."""
        if len({*clients, *self._slots}) > self.at_once:
            self._flush()
        if load:
            self._read_ahead(clients)
        self._changed.update(clients)
        for client in clients:
            if self._slot(client) is None:
                self._slots[client] = len(self._slots)
        return [self._slots[client] for client in clients]

    def _read_ahead(self, clients: Sequence[int]) -> None:
        """Gives clients rows of the window, and has them filled by a thread."""
        for client in clients:
            if client not in self._slots and len(self._slots) < self.at_once:
                slot = self._slots[client] = len(self._slots)
                self._loading[client] = self._threads.submit(
                    self._load, self._where(client), self._window, slot
                )

    def _where(self, client: int) -> _Where:
        place = self._places[client]
        number, at = int(self._segment[place]), int(self._at[place])
        return _Where(number, at, number == self._staged, self._digests[place].tobytes())

    def _load(self, where: _Where, into: Tree, position: int) -> None:
        """Puts a row into a stacked tree, in any thread."""
        if where.number == FIRST:
            replace_row(into, position, self.first)
        elif where.staged:
            replace_row(into, position, row(self._staging, where.at))
        else:
            self._read(where, row(into, position))

    def _read(self, where: _Where, out: Tree) -> None:
        """Reads a row of a segment into `out`. UserError if it is another one."""
        path, at, found = self._path(where.number), where.at, hashlib.sha256()
        with _opened(path) as (file, head, begin):
            for name, leaf in sorted(flatten(out).items()):
                # Not mapped: mapped pages count as this process's memory, and cost page faults.
                here = leaf if leaf.device.type == "cpu" else torch.empty_like(leaf, device="cpu")
                content = _bytes_of(here)
                file.seek(begin + head[name]["data_offsets"][0] + at * content.nbytes)
                if file.readinto(content) != content.nbytes:
                    raise ValueError("it was cut")
                found.update(content)
                if here is not leaf:
                    leaf.copy_(here)
        if found.digest() != where.digest:
            raise UserError(f"{path}: damaged (row {at} doesn't match its checksum); {REMEDY}")

    def _flush(self) -> None:
        """Empties the window. The changed rows become a segment, which a thread writes."""
        for client in list(self._loading):
            self._slot(client)
        self._finish_writing()
        self._remove_unused()
        new = [client for client in self._slots if client in self._changed]
        if new:
            for position, client in enumerate(new):  # row by row: fresh memory costs page faults
                replace_row(self._staging, position, row(self._window, self._slots[client]))
            number = self._next
            self._next += 1
            self._staged = number
            self._point([self._places[client] for client in new], number)
            self._sizes[number] = len(new)
            moved = self._to_move(number)
            self._writing = self._threads.submit(self._write, number, new, moved)
        self._slots, self._changed = {}, set()

    def _to_move(self, new: int) -> dict[int, _Where]:
        """The clients whose rows are written again, so that segments become empty."""
        counts = self._in_use
        if sum(counts.values()) >= MIN_IN_USE * sum(self._sizes.values()):
            return {}
        moved: list[int] = []
        for number in sorted(counts, key=lambda number: counts[number] / self._sizes[number]):
            if number == new or len(moved) + counts[number] > self.at_once:
                break
            moved += self._clients[self._segment == number].tolist()
        return {client: self._where(client) for client in moved}

    def _write(self, number: int, new: list[int], moved: dict[int, _Where]) -> _Written:
        """Writes a segment, in a thread."""
        for position, where in enumerate(moved.values(), start=len(new)):
            self._load(where, self._staging, position)
        clients = [*new, *moved]
        tensors = flatten(row(self._staging, slice(len(clients))))
        digests = [digest.hex() for digest in row_digests(tensors, range(len(clients)))]
        head = {"number": number, "clients": clients, "rows": digests}
        checksum = tensor_file.checksum(head, {})
        metadata = {KIND: json.dumps({"head": head, "checksum": checksum})}
        layout, _ = _layout(self.first, len(clients))
        header = {"__metadata__": metadata} | layout
        write_whole(self._path(number), lambda name: _save(name, header, tensors))
        return _Written(number, checksum, clients, digests)

    def _finish_writing(self) -> None:
        """Waits until the last segment is on the disk. Raises UserError if it can't be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._register(writing.result())

    def _register(self, written: _Written) -> None:
        """From here on, the rows of a segment are read from the disk."""
        places = np.fromiter((self._places[client] for client in written.clients), np.int64)
        self._point(places, written.number)
        self._digests[places] = [list(bytes.fromhex(digest)) for digest in written.digests]
        self._sizes[written.number] = len(places)
        self._checksums[written.number] = written.checksum
        self._staged = None

    def _point(self, places: Any, number: int) -> None:
        """The rows of these places are those of a segment, in this order."""
        for before in self._segment[places].tolist():
            if before != FIRST:
                self._in_use[before] -= 1
        self._segment[places], self._at[places] = number, np.arange(len(places))
        self._in_use[number] = len(places)

    def _remove_unused(self) -> None:
        """Removes the segments without a row in use, but not those that the checkpoint names."""
        for number in [n for n, count in self._in_use.items() if not count]:
            self._unused.add(number)
            for found in (self._in_use, self._sizes, self._checksums):
                found.pop(number, None)
        for number in self._unused - self._manifest:
            self._path(number).unlink(missing_ok=True)
            self._unused.discard(number)

    def _remove_others(self, numbers: Collection[int]) -> None:
        """Removes what killed processes have left beside these segments."""
        if self._folder is not None:
            remove_abandoned(self._folder, ["*"])
            for path in self._folder.glob("*.safetensors"):
                if path.stem.isdecimal() and int(path.stem) not in numbers:
                    path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="noniid-memory-"))
            finalize(self, shutil.rmtree, self._folder, True)
        return self._folder / f"{number:08}.safetensors"

    def _head(self, number: int, checksum: str) -> tuple[list[int], list[str]]:
        """(clients, SHA-256 of their rows) of a segment. UserError if it is another one."""
        path = self._path(number)
        with _opened(path) as (file, layout, begin):
            stored = json.loads(layout.pop("__metadata__")[KIND])
            head, n = stored["head"], len(stored["head"]["clients"])
            expected, size = _layout(self.first, n)
            if layout != expected or os.fstat(file.fileno()).st_size != begin + size:
                raise ValueError("it was cut, or has the tensors of another model")
            clients, rows = [*head["clients"]], [*head["rows"]]
        if not checksum == stored["checksum"] == tensor_file.checksum(head, {}):
            raise UserError(
                f"{path}: damaged, or of another run (its content doesn't match the checksum in "
                f"the checkpoint); {REMEDY}"
            )
        return clients, rows


def row_digests(stacked: Tree, rows: Iterable[int]) -> list[bytes]:
    """The SHA-256 of these rows: over their bytes, leaf by leaf, in the order of the names."""
    parts, found = _rows_of_bytes(stacked), []
    for at in rows:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part[at])
        found.append(digest.digest())
    return found


def memory_digests(stacked: Tree, first: Tree, n: int) -> Digests:
    """The SHA-256 of each of `n` rows, [n, 32]; those with the bytes of `first` cost no hash."""
    alone = tree_map(lambda leaf: leaf.unsqueeze(0), first)
    parts, firsts = _rows_of_bytes(stacked), _rows_of_bytes(alone)
    changed = np.zeros(n, bool)
    for part, its_first in zip(parts, firsts, strict=True):
        size = max(1, COMPARED // max(1, part.shape[1]))
        for at in range(0, n, size):
            changed[at : at + size] |= (part[at : at + size] != its_first).any(1)
    found = np.empty((n, hashlib.sha256().digest_size), np.uint8)
    found[:] = _bytes(row_digests(alone, (0,))[0])
    rows = np.flatnonzero(changed)
    for at, digest in zip(rows, row_digests(stacked, rows), strict=True):
        found[at] = _bytes(digest)
    return found


def memory_sha256(first: Tree, digests: bytes) -> str:
    """SHA-256 of the memories of all clients: over the leaves' names, types and shapes, and over
    the SHA-256 of each row."""
    found = hashlib.sha256()
    for name, leaf in sorted(flatten(first).items()):
        found.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
    found.update(digests)
    return found.hexdigest()


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


def _bytes(digest: bytes) -> Digests:
    return np.frombuffer(digest, np.uint8)


def _bytes_of(leaf: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; numpy has no bfloat16."""
    content: memoryview = leaf.reshape(-1).view(torch.uint8).numpy().data
    return content


def _layout(first: Tree, n: int) -> tuple[dict[str, Any], int]:
    """(where safetensors has the leaves of `n` rows, as in its header; bytes)."""
    found: dict[str, Any] = {}
    end = 0
    for name, leaf in sorted(flatten(first).items()):
        begin, end = end, end + n * leaf.numel() * leaf.element_size()
        found[name] = {
            "dtype": DTYPES[leaf.dtype],
            "shape": [n, *leaf.shape],
            "data_offsets": [begin, end],
        }
    return found, end


def _save(name: str, header: dict[str, Any], tensors: Params) -> None:
    """Writes a safetensors file, in a quarter of the time of `save_file`."""
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % LENGTH)
    with open(name, "wb") as file:
        file.write(len(head).to_bytes(LENGTH, "little") + head)
        for _, leaf in sorted(tensors.items()):
            file.write(_bytes_of(leaf))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, dict[str, Any], int]]:
    """(a segment, its header, where its data begin). UserError if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            n = int.from_bytes(file.read(LENGTH), "little")
            if n > os.fstat(file.fileno()).st_size:
                raise ValueError("it was cut")
            yield file, json.loads(file.read(n)), LENGTH + n
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: missing, damaged, or not a segment of clients' memories ({reason}); {REMEDY}"
        ) from None
