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

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import replace_folder, write_whole
from fedml_noniid.data.user_files import user_files
from fedml_noniid.pipelines.experiment import facts
from fedml_noniid.pipelines.experiment.workspace import Workspace

PACKAGE = Path(__file__).parents[2]
# Two of them are links in a checkout, which a walk does not enter.
CODE = (PACKAGE, PACKAGE / "plugins", PACKAGE / "pipelines")
LAST = Path(".dvc") / "tmp" / "plan.json"  # the last plan, and what it follows from
# Files of drivers in /dev. Without any, no torch finds a GPU.
GPUS = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "kfd", "dxg")


def run(workspace: Workspace) -> None:
    """Writes one file for each stage."""
    record = _last(workspace.root)
    if record is None:
        record = _planned(workspace)
        last = workspace.root / LAST
        last.unlink(missing_ok=True)
        if record.pop("lasts") and last.parent.is_dir():
            write_whole(last, json.dumps(record | {"key": _key(workspace.root)}))
    files = {f"{stage}.json": content(hashes) for stage, hashes in record["plan"].items()}
    replace_folder(workspace.root / "plan", files)


def holds(root: Path) -> bool:
    """Whether the last plan is still that of the settings, code, machine and the user's files.

    UserError for files that can't be read.
    """
    return _last(root) is not None


def _last(root: Path) -> dict[str, Any] | None:
    """What the last plan left in DVC's folder, if it holds."""
    if not (root / LAST).is_file():
        return None
    record: dict[str, Any] = json.loads((root / LAST).read_text())
    same = record["key"] == _key(root) and record["files"] == contents(*record["data"])
    return record if same else None


def content(hashes: Mapping[str, str]) -> bytes:
    """A file of plan/."""
    return (json.dumps(hashes, indent=2) + "\n").encode()


def contents(data: str, root: str, options: Mapping[str, object]) -> dict[str, str]:
    """Name -> SHA-256 of the content of each of the user's data files. UserError for files that
    can't be read."""
    hashes = {}
    for name, path in user_files(data, Path(root), options).items():
        try:
            with path.open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: can't be read ({error.strerror or error})") from None
    return hashes


def _planned(workspace: Workspace) -> dict[str, Any]:
    """The plan, the user's data files with their hashes, and whether it holds while they and the
    key are the same."""
    from fedml_noniid.pipelines.experiment import config
    from fedml_noniid.pipelines.experiment.provenance import plan

    settings = config.load(workspace.root)
    data = settings.data.name, str(workspace.user_folder(settings.data.root)), settings.data.options
    files = contents(*data)
    has_gpu = any(any(Path("/dev").glob(pattern)) for pattern in GPUS)
    lasts = not has_gpu and not settings.own_extras
    return {"data": data, "files": files, "plan": plan(settings, files), "lasts": lasts}


def _key(root: Path) -> str:
    """A hash of all that the plan follows from, beside the user's files and a GPU."""
    settings = [root / name for name in ("params.yaml", "tuned.yaml")]
    torch = importlib.util.find_spec("torch")
    version = Path(str(torch and torch.origin)).with_name("version.py")
    made_of = (
        [file.read_text(errors="replace") if file.is_file() else "" for file in settings],
        facts.sources(CODE),
        version.read_text(),
        facts.readers(),
        sys.version,
        facts.of_cpu("vendor_id"),
        facts.of_cpu("flags"),
        os.environ.get("ATEN_CPU_CAPABILITY"),
    )
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
