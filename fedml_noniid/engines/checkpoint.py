"""Writes and reads the two files from which a killed run goes on, to the same bits.

`<name>.safetensors` has the state between two rounds, under a checksum. It is replaced as a whole.
`<name>.rounds` has what was recorded of each round. It only grows, so a long run does not write all
its rounds again and again; the first file names its length and SHA-256. Both name the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.data import tensor_file
from fedml_noniid.data.files import append
from fedml_noniid.engines.packing import flatten, unflatten

HEAD = (
    "round",
    "stopped",
    "callbacks",
    "differs",
    "notes",
)  # fields of a Checkpoint that are stored as JSON
LENGTH = 8  # bytes of the number before each block of rounds


class Checkpoint(NamedTuple):
    """Holds a run between two rounds."""

    round: int  # rounds done
    trees: Tree  # server, evaluated if it differs, and memory or on_disk, see `engines.memory`
    stopped: str  # why a callback has ended the run; "" if none has
    callbacks: list[dict[str, Any]]  # their states
    rows: list[dict[str, float]]  # of rounds.csv
    recorded: list[Params]  # of each row: what else was recorded, by name
    differs: bool  # whether the evaluated model differs from the sent one
    notes: dict[str, Any] = {}  # noqa: RUF012, never changed in place. As JSON: what a runtime adds


class Checkpoints:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, path: Path, fingerprint: str, run: str = "", private: bool = False) -> None:
        """`fingerprint`: of the run's settings, data and code.

        `run`: its name, if it begins now; by default at random.

        `private`: whether only the owner may read the files.
        """
        self.path, self.rounds, self.private = path, path.with_suffix(".rounds"), private
        self.previous = path.with_suffix(".previous")
        self.made_by = {"recipe": "", "fingerprint": fingerprint}
        self.run = run or secrets.token_hex(8)
        self._written = self._size = 0  # rounds and bytes
        self._digest = hashlib.sha256()

    def set_recipe(self, recipe: str) -> None:
        """Says whose checkpoints they are."""
        self.made_by["recipe"] = recipe

    def exists(self) -> bool:
        """Whether the run has begun already."""
        return self.path.exists()

    def write(self, checkpoint: Checkpoint) -> None:
        """Writes the files.

        If that fails, the run can go on from the checkpoint before. Raises UserError.
        """
        rows, recorded = checkpoint.rows[self._written :], checkpoint.recorded[self._written :]
        new = b"" if self._size else f"{self.run}\n".encode()
        new += _packed(rows, recorded) if rows else b""
        append(self.rounds, self._size, new, self.private)
        size, digest = self._size + len(new), self._digest.copy()
        digest.update(new)
        head = {key: getattr(checkpoint, key) for key in HEAD} | self.made_by
        head |= {"run": self.run, "size": size, "sha256": digest.hexdigest()}
        whole = tensor_file.Tensors(
            head, {key: leaf.detach().cpu() for key, leaf in flatten(checkpoint.trees).items()}
        )
        tensor_file.write(
            self.path, "checkpoint", head, whole.tensors, whole.checksum, self.private
        )
        self._written, self._size, self._digest = len(checkpoint.rows), size, digest

    def keep(self) -> None:
        """Keeps the last checkpoint as `previous`."""
        self.previous.unlink(missing_ok=True)
        os.link(self.path, self.previous)

    def read(self, like: Tree, path: Path | None = None) -> Checkpoint:
        """Reads back into the structure `like`, which has "evaluated", "memory" and "on_disk".

        UserError for a damaged file, or another configuration's. `path`: `previous`, or the last.
        """
        path = path or self.path
        content = tensor_file.read(
            path,
            "checkpoint",
            _state,
            what="a readable checkpoint",
            origin="",
            remedy="delete it to start afresh",
        )
        head, flat = content.head, content.tensors
        made_by = {key: head[key] for key in self.made_by}
        if made_by != self.made_by:
            raise UserError(
                f"{path}: is a checkpoint of another configuration or of other data "
                f"({_shown(made_by)}; this run has "
                f"{_shown(self.made_by)}); delete it, or restore what it was made with"
            )
        other = "memory" if any(key.startswith("on_disk/") for key in flat) else "on_disk"
        like = {
            key: tree
            for key, tree in like.items()
            if key != other and (head["differs"] or key != "evaluated")
        }
        expected = flatten(like)
        if expected.keys() != flat.keys() or any(
            expected[key].shape != flat[key].shape for key in flat
        ):
            raise UserError(
                f"{path}: holds another model than this run trains; delete it to start afresh"
            )
        rows, recorded = self._read_rounds(head)
        # Copies are aligned. The file's tensors need not be, and then matrix products round
        # differently.
        trees = unflatten(
            {key: leaf.to(expected[key].device, copy=True) for key, leaf in flat.items()}, like
        )
        return Checkpoint(
            trees=trees, rows=rows, recorded=recorded, **{key: head[key] for key in HEAD}
        )

    def _read_rounds(self, head: dict[str, Any]) -> tuple[list[dict[str, float]], list[Params]]:
        """What was recorded of the rounds of a checkpoint.

        A killed process may have left more: that is cut off.
        """
        path = self.rounds
        remedy = f"restore it beside {self.path.name}, or delete both to start afresh"
        try:
            with path.open("rb") as file:
                content = file.read(head["size"])
        except OSError as error:
            raise UserError(
                f"{path}: can't be read ({error.strerror or error}); {remedy}"
            ) from None
        first, _, blocks = content.partition(b"\n")
        if first != head["run"].encode():
            raise UserError(
                f"{path}: is not of run {head['run']}, which {self.path.name} is of; {remedy}"
            )
        self._digest = hashlib.sha256(content)
        if self._digest.hexdigest() != head["sha256"]:
            raise UserError(f"{path}: damaged (its content doesn't match its checksum); {remedy}")
        rows, recorded = _unpacked(blocks)
        self.run, self._written, self._size = head["run"], len(rows), head["size"]
        return rows, recorded


def _state(head: dict[str, Any], tensors: Params) -> tensor_file.Tensors:
    """The content of the first file. KeyError if a field is missing."""
    _ = [head[key] for key in (*HEAD, "recipe", "fingerprint", "run", "size", "sha256")]
    return tensor_file.Tensors(head, tensors)


def _shown(made_by: dict[str, str]) -> str:
    return f"recipe {made_by['recipe']!r}, fingerprint {made_by['fingerprint'][:12]!r}"


def _packed(rows: list[dict[str, float]], recorded: list[Params]) -> bytes:
    """A block of rounds: its length, then safetensors with the rows in its metadata."""
    tensors = {
        f"{n}/{key}": leaf.contiguous()
        for n, quantities in enumerate(recorded)
        for key, leaf in quantities.items()
    }
    block: bytes = safetensors.torch.save(tensors, {"rows": json.dumps(rows)})
    return len(block).to_bytes(LENGTH, "little") + block


def _unpacked(blocks: bytes) -> tuple[list[dict[str, float]], list[Params]]:
    """The rows, and the tensors of each row, of all blocks."""
    rows: list[dict[str, float]] = []
    recorded: list[Params] = []
    at = 0
    while at < len(blocks):
        begin = at + LENGTH
        at = begin + int.from_bytes(blocks[at:begin], "little")
        block = blocks[begin:at]
        head = json.loads(block[LENGTH : LENGTH + int.from_bytes(block[:LENGTH], "little")])
        new = json.loads(head["__metadata__"]["rows"])
        tensors: list[Params] = [{} for _ in new]
        for name, leaf in safetensors.torch.load(block).items():
            n, _, key = name.partition("/")
            tensors[int(n)][key] = leaf
        rows += new
        recorded += tensors
    return rows, recorded
