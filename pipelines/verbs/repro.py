"""What `noniid run` does: checks params.yaml, runs the stages that DVC finds out of date, shows the
table, updates MLflow. All in this process: the stages share their imports."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from fedml_noniid.core.errors import UserError, one_line
from fedml_noniid.data.files import WRITABLE
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.workspace import Workspace, refuse_without
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.pipelines.stages import plan
from fedml_noniid.pipelines.tracking import verbs as tracking
from fedml_noniid.pipelines.tracking.store import spared

log = logging.getLogger(__name__)
LOCK = Path(".dvc") / "tmp" / "repro.lock"
PARAMS = "params.yaml"
# Dependencies of stage `plan` in a checkout, beside params.yaml.
SOURCES = ("fedml_noniid", "plugins", "pipelines", "tuned.yaml")
KIND = "plan/machine.json"
ANSWER, TABLE = Path("report") / "answer.txt", Path("report") / "table.txt"
BEFORE_RUNS = ("plan", "prepare", "partition")  # stages without anything for MLflow
COMMAND = "python -m fedml_noniid.pipelines.stages "  # and a stage, in dvc.yaml


def repro(
    workspace: Workspace, stage: str | None, show: Callable[[str], None], details: bool = False
) -> None:
    """Runs the out-of-date stages, up to `stage` if one is named; otherwise it shows the table.

    The table comes before MLflow, which takes seconds. UserError.
    """
    root = workspace.root
    refuse_without(root, PARAMS, "dvc.yaml", ".dvc")
    if not os.access(root, os.W_OK, effective_ids=True):
        raise UserError(f"{root}: can't be written; {WRITABLE}")
    if stage == "deploy" and stage not in _stages(root / "dvc.yaml"):
        raise UserError(
            f"{root / 'dvc.yaml'}: has no stage deploy; `noniid init --deploy` makes an "
            "experiment that has it"
        )
    cache.refuse_foreign(root)
    with exclusively(root):
        is_planned = plan.holds(root)
        with _dvc(workspace, is_planned) as repository:
            if not is_planned:
                from fedml_noniid.pipelines.verbs import fits  # imports torch

                fits.checked(workspace)
            made = _stages(root / "dvc.lock") & _stages(root / "dvc.yaml")
            if made and not (root / "report").exists():
                # Takes outputs from DVC's cache. It is faster than stages that take them from the
                # store.
                repository.checkout([*made], allow_missing=True)
            if not is_planned:
                # DVC does not see the user's own files, and it takes an old plan from its cache.
                # The new plan has their hashes.
                repository.reproduce("plan", force=True, single_item=True)
            if {done.name for done in repository.reproduce(stage)} <= {"plan"} and is_planned:
                log.info("All stages are up to date.")
        if stage is None:
            show(f"\n{table(root, details)}\n{certificate(root)}\n")
        if stage not in BEFORE_RUNS:
            with spared("the new results"):
                tracking.bring_up_to_date(workspace)


def quiet_dvc() -> None:
    """DVC's warnings alone. Its import sets lines up on each stage, each file, and git."""
    import dvc.logger  # noqa: F401  # it sets up what is changed here

    dvc_log = logging.getLogger("dvc")
    dvc_log.setLevel(logging.WARNING)
    dvc_log.propagate = False


@contextlib.contextmanager
def _dvc(workspace: Workspace, is_planned: bool = False) -> Iterator[Any]:
    """DVC's repository, whose `reproduce` calls our stages in this process.

    Each stage is announced once, and `plan` only if it has something to plan.

    A stage's error is raised as it is, DVC's own as UserError. Commands that are not ours are
    started, as DVC does.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.stage import run as running

    quiet_dvc()
    root, started = workspace.root, running.cmd_run
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names = {f"{COMMAND}{name}": name for name in stages.STAGES}
    failed: list[Exception] = []  # of our stages
    announced = {"plan"} if is_planned else set[str]()

    def run(stage: Any, dry: bool = False, run_env: Any = None) -> None:
        name = names.get(stage.cmd) if isinstance(stage.cmd, str) else None
        if stage.addressing not in announced:
            log.info("Running stage '%s'", stage.addressing)
            announced.add(stage.addressing)
        if name is None or Path(stage.wdir).resolve() != root:
            started(stage, dry, {**(run_env or {}), "PATH": programs})
            return
        try:
            stages.run(name, workspace)
        except Exception as error:
            failed.append(error)
            raise

    running.cmd_run = run
    sys.path.insert(0, str(root))  # as for `python -m` there
    try:
        with Repo(str(root)) as repository:
            yield repository
    except DvcException as error:
        if failed:
            raise failed[0] from None
        causes = [str(error)]
        while (cause := error.__cause__) is not None:
            causes.append(str(cause))
            error = cause
        raise UserError(f"{root / 'dvc.yaml'}: DVC: {one_line(': '.join(causes), 500)}") from None
    finally:
        sys.path.remove(str(root))
        running.cmd_run = started


def table(root: Path, details: bool) -> str:
    """The answer of the last report. With `details`, all of its tables in its place, and where to
    look next.

    UserError if there is no report.
    """
    path = root / (TABLE if details else ANSWER)
    if not path.is_file():
        raise UserError(f"{path}: is missing; `noniid run` makes the report")
    return path.read_text()


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
        here = ", ".join(
            f"{name} {value}" for name, value in json.loads((root / KIND).read_text()).items()
        )
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


def _stages(path: Path) -> set[str]:
    """The stages that a file of DVC names; none without the file."""
    return {*(read_yaml(path).get("stages") or ())} if path.exists() else set()


def _hashes(lock: str) -> dict[str, str]:
    """Path -> hash of every dependency and output of the stages, but those of a checkout."""
    return {
        part["path"]: part["md5"]
        for about in YAML(typ="safe", pure=True).load(lock)["stages"].values()
        for kind in ("deps", "outs")
        for part in about[kind]
        if part["path"] not in SOURCES
    }


@contextlib.contextmanager
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
