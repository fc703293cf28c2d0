"""Stage plan: hashes of the settings, code and the user's files of each stage -> plan/<stage>.json.

DVC compares these small files. So if a comment or a setting changes no result, only this stage runs
again. While nothing has changed at all, the last plan holds, and torch is not imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import user_cache
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import replace_folder
from fedml_noniid.plugins.data.user_files import user_files

PACKAGE = Path(__file__).parents[2]
CODE = tuple(PACKAGE / folder for folder in ("plugins", "pipelines"))
LAST = Path(".dvc") / "tmp" / "plan"  # the last plan
# Files of drivers in /dev. Without any, no torch finds a GPU.
GPUS = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "kfd", "dxg")


def run(place: Workspace) -> None:
    """Writes one file for each stage."""
    name, key = str((place.root / LAST).resolve()), _key(place.root)
    known = user_cache.read(name, key)
    if known is None or known["files"] != contents(*known["data"]):
        known = _planned(place)
        settled = all(map(user_cache.is_settled, user_cache.stamps(CODE).values()))
        if known["lasts"] and settled and (place.root / LAST).parent.is_dir():
            user_cache.write(name, key, known)
    files = {f"{stage}.json": content(hashes) for stage, hashes in known["plan"].items()}
    replace_folder(place.root / "plan", files)


def content(hashes: Mapping[str, str]) -> bytes:
    """A file of plan/."""
    return (json.dumps(hashes, indent=2) + "\n").encode()


def contents(data: str, root: str, options: Mapping[str, object]) -> dict[str, str]:
    """Name -> SHA-256 of the content of each of the user's data files. UserError for files that
    can't be read."""
    found = {}
    for name, path in user_files(data, Path(root), options).items():
        try:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: can't be read ({error.strerror or error})") from None
    return found


def _planned(place: Workspace) -> dict[str, Any]:
    """The plan, the user's data files with their hashes, and whether it holds while they and the
    key are the same."""
    from fedml_noniid.pipelines.experiment import config
    from fedml_noniid.pipelines.experiment.provenance import plan

    settings = config.load(place.root)
    data = settings.data.name, str(place.given(settings.data.root)), settings.data.options
    files = contents(*data)
    has_gpu = any(any(Path("/dev").glob(pattern)) for pattern in GPUS)
    lasts = not has_gpu and not settings.own_extras
    return {"data": data, "files": files, "plan": plan(settings, files), "lasts": lasts}


def _key(root: Path) -> str:
    """A hash of all that the plan follows from, beside the user's files and a GPU."""
    settings, torch = root / "params.yaml", importlib.util.find_spec("torch")
    about = (
        settings.read_text(errors="replace") if settings.is_file() else "",
        user_cache.stamps(CODE),
        user_cache.stamp(Path(str(torch and torch.origin)).with_name("version.py")),
        user_cache.readers(),
        sys.version,
        user_cache.of_cpu("vendor_id"),
        user_cache.of_cpu("flags"),
        os.environ.get("ATEN_CPU_CAPABILITY"),
    )
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
