"""A small experiment for the tests of the pipeline: seconds instead of minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.stage import ADDRESS

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
train: {model: mlp, rounds: 3, epochs: 1, batch_size: 32, optimizer: sgd, lr: 0.1, device: cpu, checkpoint_every: 1}
deploy: {recipe: fedavg, scenario: skewed, seed: 0, silos: 2, rounds: 1}
"""


def environment() -> dict[str, str]:
    """Ours, with this interpreter's programs first, and without what would send a stage elsewhere."""
    kept = {key: value for key, value in os.environ.items() if key not in ("DVC_ROOT", "PYTHONDONTWRITEBYTECODE")}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def copy(folder: Path) -> Path:
    """A copy of this repository, as git sees its files, with the small experiment."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "params.yaml").write_text(PARAMS)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


@dataclass(frozen=True)
class Repository:
    """A copy of this repository, and a process that has the slow imports done and is forked for each stage."""

    folder: Path
    environment: dict[str, str]

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command in the copy."""
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, code: int = 0) -> str:
        """What a command prints, standard output and errors together; it has to end with exit code `code`."""
        process = self.start(*command)
        said = process.communicate(timeout=400)[0]
        assert process.returncode == code, said
        return said


@contextmanager
def repository(folder: Path) -> Iterator[Repository]:
    """Copies this repository into `folder` and keeps a warm process beside it."""
    copy(folder)
    wait = f"import os, time; print(os.environ[{ADDRESS!r}], flush=True); time.sleep(3600)"
    command = [sys.executable, "-m", "pipelines.warm", sys.executable, "-c", wait]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Repository(folder, environment() | {ADDRESS: process.stdout.readline().strip()})
        process.terminate()
