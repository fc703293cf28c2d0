"""A checkpoint is one safetensors file. It has everything that a run needs to go on and end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params, Tree
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.engines.packing import flatten, unflatten

RECORDED = "recorded/"  # prefix of the tensors that a run needs for its report, and not to go on
HEAD = ("round", "meter", "rows", "differs", "notes")  # fields of a Checkpoint that are stored as JSON


class Checkpoint(NamedTuple):
    """A run between two rounds."""

    round: int  # rounds done
    trees: Tree  # server, memory, evaluated
    meter: dict[str, list[Any]]  # of traffic, see `plugins.engines.traffic`
    rows: list[dict[str, float]]  # of rounds.csv
    recorded: Params  # what else was recorded, by name
    differs: bool  # whether the evaluated model differs from the sent one
    notes: dict[str, Any] = {}  # noqa: RUF012, never changed in place. As JSON: what a runtime adds


def write(path: Path, checkpoint: Checkpoint, fingerprint: str) -> None:
    """Writes the file; if that fails, none or the old one is left."""
    head = {"fingerprint": fingerprint, **{key: getattr(checkpoint, key) for key in HEAD}}
    everything = flatten(checkpoint.trees) | {RECORDED + key: leaf for key, leaf in checkpoint.recorded.items()}
    # safetensors refuses tensors that share memory, such as those of an evaluated model that is the sent one. The later
    # ones are copied, and only they: the memories of hundreds of clients are gigabytes.
    flat: Params = {}
    seen: set[int] = set()
    for key, leaf in everything.items():
        host = leaf.detach().cpu().contiguous()
        place = host.untyped_storage().data_ptr()
        flat[key] = host.clone() if place in seen else host
        seen.add(place)
    metadata = {"checkpoint": json.dumps(head)}

    def save(name: str) -> None:
        try:
            save_file(flat, name, metadata)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(str(error)) from None

    write_whole(path, save)


def read(path: Path, like: Tree, fingerprint: str) -> Checkpoint:
    """Reads back into the structure `like`. UserError for a damaged file or one of another configuration."""
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads((file.metadata() or {})["checkpoint"])
            made_by, found = str(head["fingerprint"]), {key: head[key] for key in HEAD}
            flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a readable checkpoint ({error}); delete it to start afresh") from None
    if made_by != fingerprint:
        raise UserError(
            f"{path}: is a checkpoint of another configuration (fingerprint {made_by[:12]!r}, "
            f"this run has {fingerprint[:12]!r}); delete it or restore the configuration"
        )
    # Their shapes are not checked: they grow with the rounds.
    recorded = {key.removeprefix(RECORDED): flat.pop(key) for key in list(flat) if key.startswith(RECORDED)}
    expected = flatten(like)
    if expected.keys() != flat.keys() or any(expected[key].shape != flat[key].shape for key in flat):
        raise UserError(f"{path}: holds another model than this run trains; delete it to start afresh")
    # Copies are aligned. The file's tensors need not be, and then matrix products round differently.
    trees = unflatten({key: leaf.to(expected[key].device, copy=True) for key, leaf in flat.items()}, like)
    return Checkpoint(trees=trees, recorded=recorded, **found)
