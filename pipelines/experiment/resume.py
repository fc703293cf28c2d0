"""Where the checkpoints of unfinished items lie: `.resume/<fingerprint>/`.

A worker of a cluster writes into a folder of its attempt below that. So a worker that was taken for
dead and still computes disturbs nobody. Whoever goes on takes the newest checkpoint of all.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.checkpoint import Checkpoints

RESUME = ".resume"
STATE, ROUNDS = "checkpoint.safetensors", "checkpoint.rounds"  # the two files of a checkpoint
MEMORY = "checkpoint.memory"  # and its file, where clients' memories lie on disk


def checkpoints(folder: Path, fingerprint: str, attempt: str = "") -> Checkpoints:
    """The checkpoints of an attempt, of the process in front by default.

    `folder`: of the item. They begin with a copy of its newest checkpoint. Raises UserError.
    """
    own = folder / attempt
    every = [folder, *(path for path in folder.glob("*") if path.is_dir())]
    newest = max(every, key=rounds_at)
    if rounds_at(newest) > rounds_at(own):
        # The state comes first: what the other attempt adds to its rounds meanwhile is cut off.
        state, rounds = (newest / STATE).read_bytes(), (newest / ROUNDS).read_bytes()
        if (newest / MEMORY).exists():
            write_whole(own / MEMORY, partial(_copy_sparse, newest / MEMORY))
        if (newest / STATE).read_bytes() != state:
            # It still runs, and may have replaced rows before they were copied.
            return checkpoints(folder, fingerprint, attempt)
        write_whole(own / ROUNDS, rounds)
        write_whole(own / STATE, state)
    return Checkpoints(own / STATE, fingerprint)


def _copy_sparse(source: Path, target: str) -> None:
    """Copies a file without its holes, as `cp` does: clients that were never asked take no
    space."""
    done = subprocess.run(["cp", str(source), target], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


def rounds_at(folder: Path) -> int:
    """The rounds that are done at a checkpoint; 0 without a readable one."""
    try:
        with safe_open(str(folder / STATE), "pt") as file:
            return int(json.loads(file.metadata()["checkpoint"])["head"]["round"])
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        return 0  # reading it says what is wrong, if no other is there
