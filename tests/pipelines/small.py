"""A small experiment for the tests of the pipeline: seconds instead of minutes."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedml_noniid.pipelines.experiment.workspace import Workspace

ROOT = Path(__file__).parents[2]
PARAMS = """\
experiment: small
data: {name: digits, root: data/raw, validation: 0.1, public: 50}
scenario_names: [skewed]
scenarios:
  skewed: {partition: dirichlet, clients: 4, alpha: 0.5, participation: 1.0}
recipe_names: [fedavg, scaffold+fnr]
recipes:
  fedavg: {}
  scaffold+fnr: {fnr: {p: 0.5}}
seeds: [0]
train: {model: mlp, rounds: 3, epochs: 1, batch_size: 32, optimizer: sgd, lr: 0.1, device: cpu}
machine: {checkpoint_every: 1}
deploy: {recipe: fedavg, scenario: skewed, seed: 0, silos: 2, rounds: 1}
"""
# What would send a stage or git elsewhere, or slow a start down.
UNSET = ("DVC_ROOT", "MLFLOW_TRACKING_URI", "PYTHONDONTWRITEBYTECODE")
NAMED = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def environment() -> dict[str, str]:
    """Ours, with this interpreter's programs first, and without what would send a stage
    elsewhere."""
    kept = {key: value for key, value in os.environ.items() if key not in UNSET}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run_stages(folder: Path, names: Sequence[str]) -> None:
    """Runs stages of the experiment in `folder`, in this process."""
    place = Workspace.from_environment(folder, {})
    for name in names:
        importlib.import_module(f"fedml_noniid.pipelines.stages.{name}").run(place)


def copy(folder: Path) -> Path:
    """A copy of this repository, as git sees its files, with the small experiment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listed, cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        is_there = (ROOT / name).is_file() or (
            ROOT / name
        ).is_symlink()  # links of the package to its folders
        if is_there and name != "dvc.lock":  # which is of the whole experiment
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    (folder / "params.yaml").write_text(PARAMS)
    (folder / "tuned.yaml").write_text("{}\n")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


@dataclass(frozen=True)
class Repository:
    """A copy of this repository."""

    folder: Path

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the copy, as the leader of a group of processes."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, code: int = 0) -> str:
        """What a command prints, standard output and errors together; it has to end with exit code
        `code`."""
        process = self.start(*command)
        said = process.communicate(timeout=1200)[0]
        assert process.returncode == code, said
        return said

    def commit(self) -> None:
        """Commits all files that git does not ignore."""
        self.run("git", "add", "--all")
        self.run("git", *NAMED, "commit", "--quiet", "--message", "all")

    def repro(self, params: str = PARAMS) -> list[str]:
        """The stages that `dvc repro report` really runs with these settings."""
        (self.folder / "params.yaml").write_text(params)
        return self.ran("dvc", "repro", "report")

    def ran(self, *command: str) -> list[str]:
        """The stages that a command really runs."""
        said = self.run(*command)
        return [
            line.split("'")[1] for line in said.splitlines() if line.startswith("Running stage")
        ]

    def trained(self) -> set[str]:
        """The trainings that the store of finished work has."""
        return {path.parent.name for path in self.folder.glob(".items/*/made.json")}
