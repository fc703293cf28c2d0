"""What `noniid run` does: checks params.yaml, runs `dvc repro`, shows the table, updates MLflow."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ruamel.yaml import YAML

from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.handover import handed_over
from fedml_noniid.pipelines.tools import warm
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import WRITABLE
from fedml_noniid.plugins.data.yaml_files import read_yaml

LOCK = Path(".dvc") / "tmp" / "repro.lock"
PARAMS = "params.yaml"
CHECKED = Path(".dvc") / "tmp" / "checked"  # the SHA-256 of PARAMS, and a note
STAGE_ENDED = Path(".dvc") / "tmp" / "ended"  # the exit code of the last stage
# at the end of CHECKED if the settings name files of the user, which DVC does not see
USER_FILES = "user files\n"
SOURCES = ("plugins", "pipelines")
CODE = Path(__file__).parents[2]  # holds SOURCES: the checkout, or the installed package
KIND = "plan/machine.json"
NEEDED = ("dvc.yaml", ".dvc")
TABLE = Path("report") / "table.txt"


def repro(place: Workspace, stage: str | None, show: Callable[[str], None]) -> int:
    """Runs the out-of-date stages, up to `stage` if one is named; otherwise it shows the table.

    The table comes before MLflow, which takes seconds. Returns an exit code. UserError.
    """
    root = place.root
    for name in (PARAMS, *NEEDED):
        if not (root / name).exists():
            raise UserError(
                f"{root / name}: is missing; `noniid init` makes the folder of an experiment"
            )
    if not os.access(root, os.W_OK, effective_ids=True):
        raise UserError(f"{root}: can't be written; {WRITABLE}")
    if stage == "deploy" and stage not in (read_yaml(root / "dvc.yaml").get("stages") or ()):
        raise UserError(
            f"{root / 'dvc.yaml'}: has no stage deploy; `noniid init --deploy` makes an "
            "experiment that has it"
        )
    if shutil.which("dvc", path=_path()) is None:
        raise UserError(
            "the program dvc is missing; install it into the environment of noniid: pip install dvc"
        )
    cache.refuse_foreign(root)
    with exclusively(root), _warm(root, stage):
        if not _is_checked(root):
            from fedml_noniid.pipelines.tools import fits

            given = dict(os.environ)
            settings, _ = fits.checked(place)
            # Readers import libraries that set variables (scikit-learn's KMP_*). The stages have
            # those of this command.
            os.environ.clear()
            os.environ.update(given)
            note = USER_FILES if settings.own_files else ""
            (root / CHECKED).write_text(f"{cache.sha256(root / PARAMS)} {note}")
        if not (root / "report").exists() and (root / "dvc.lock").exists():
            # Takes outputs from DVC's cache. It is faster than stages that take them from the
            # store.
            _start(root, "checkout", "--quiet", "--allow-missing").wait()
        code = 0
        if (root / CHECKED).read_text().endswith(USER_FILES) and not _always_plans(root):
            # DVC does not see these files, and it takes an old plan from its cache. The new plan
            # has their hashes.
            code = _dvc(root, "--force", "--single-item", "plan")
        code = code or _dvc(root, *([stage] if stage else []))
        if code == 0:
            if stage is None:
                show(f"\n{table(root)}\n{certificate(root)}\n")
            done = handed_over([warm.SYNC], str(root))
            code = warm.sync(place) if done is None else done
        return code


@contextmanager
def _warm(root: Path, stage: str | None) -> Iterator[None]:
    """Processes in which the stages' imports are done.

    None if `root` has code of its own, which `python` takes.
    """
    theirs = root / "fedml_noniid"
    if theirs.exists() and theirs.resolve() != CODE.resolve():
        yield
        return
    has_silos = "deploy" in (read_yaml(root / "dvc.yaml").get("stages") or ())
    results = ["report", *(["deploy/result.json"] if has_silos else [])]
    eager = not _is_checked(root) or not all((root / name).exists() for name in results)
    if eager:
        from fedml_noniid.pipelines.tools import fits  # noqa: F401  # imports torch for all of them
    deploys = eager and has_silos and stage in (None, "deploy")
    with warm.processes(root, [CODE / folder for folder in SOURCES], deploys, eager):
        yield


def table(root: Path) -> str:
    """The table of the last report, where to look next, and what the methods cost.

    UserError if there is no report.
    """
    if not (root / TABLE).is_file():
        raise UserError(f"{root / TABLE}: is missing; `noniid run` makes the report")
    # Imported here: it imports scipy.
    from fedml_noniid.pipelines.reporting import cost

    return f"{(root / TABLE).read_text()}\n{cost.text(root)}"


def _start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """DVC, for which the programs `dvc` and `python` are those of this environment."""
    environment = os.environ | {"PATH": _path(), edge.ENDED: str((root / STAGE_ENDED).resolve())}
    return subprocess.Popen(["dvc", *arguments], cwd=root, env=environment)


def _dvc(root: Path, *arguments: str) -> int:
    """Runs `dvc repro`.

    Returns the exit code of the stage that failed; 2 if DVC itself refuses its files.
    """
    (root / STAGE_ENDED).unlink(missing_ok=True)
    process = _start(root, "repro", *arguments)
    try:
        if process.wait() == 0:
            return 0
        stage = (root / STAGE_ENDED).read_text() if (root / STAGE_ENDED).exists() else ""
        return int(stage or 0) or edge.WRONG_INPUT
    except KeyboardInterrupt:
        process.wait()  # DVC was interrupted too; wait for its end
        raise


def _always_plans(root: Path) -> bool:
    """Whether DVC runs the stage `plan` every time, as outside a checkout."""
    stages = read_yaml(root / "dvc.yaml").get("stages") or {}
    return bool(stages.get("plan", {}).get("always_changed"))


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def certificate(root: Path) -> str:
    """One line: whether dvc.lock has the bits of the committed dvc.lock."""
    shown = subprocess.run(
        ["git", "show", "HEAD:./dvc.lock"], cwd=root, capture_output=True, text=True
    )
    if shown.returncode:
        return (
            "dvc.lock is the certificate of these bits: commit it, and others can compare theirs."
        )
    theirs, ours = _hashes(shown.stdout), _hashes((root / "dvc.lock").read_text())
    if theirs == ours:
        return "dvc.lock is the committed one: the same bits."
    if theirs.get(KIND) != ours.get(KIND):
        kind = json.loads((root / KIND).read_text())
        here = ", ".join(f"{name} {value}" for name, value in kind.items())
        return (
            "dvc.lock: the committed one was made on another kind of machine than this "
            f"({here}); bits may differ."
        )
    if theirs.get("plan") != ours.get("plan"):
        return "dvc.lock differs from the committed one, as settings or code do."
    other = ", ".join(path for path in ours if ours[path] != theirs.get(path))
    return (
        "WARNING: dvc.lock: settings, code and kind of machine are the committed ones, but "
        f"not the bits of {other}."
    )


def _hashes(lock: str) -> dict[str, str]:
    """Path -> hash of every dependency and output of the stages."""
    stages = YAML(typ="safe", pure=True).load(lock)["stages"].values()
    found = {
        part["path"]: part["md5"]
        for about in stages
        for kind in ("deps", "outs")
        for part in about[kind]
    }
    return {path: md5 for path, md5 in found.items() if path not in SOURCES}


@contextmanager
def exclusively(root: Path) -> Iterator[None]:
    """Allows one `noniid run`, `tune` or `choose` at a time.

    The lock ends with the process, also after a crash.
    """
    path = root / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another `noniid` command runs in {root.resolve()}; wait for its end, or stop it"
            ) from None
        yield


def _is_checked(root: Path) -> bool:
    """Whether params.yaml is what was checked last, and no file of our code was edited since.

    It saves a check, which imports torch and takes seconds.
    """
    if not (root / CHECKED).exists():
        return False
    since, sha256 = (root / CHECKED).stat().st_mtime, cache.sha256(root / PARAMS)
    files = (path for folder in SOURCES for path in (CODE / folder).rglob("*.py"))
    return (root / CHECKED).read_text().split(" ")[0] == sha256 and all(
        path.stat().st_mtime <= since for path in files
    )
