"""The pipeline as DVC runs it, in a copy of the repository: nothing runs twice, and a kill changes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.provenance import code
from pipelines.stage import STAGES
from pipelines.studies import PAPERS
from plugins.recipes import METHODS
from tests.pipelines.small import PARAMS, ROOT, Repository, repository

KILLS = 10
SEED = 2026
KEY = "skewed-scaffold+fnr-0"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A copy in which the small experiment has run, but for the deployment."""
    with repository(tmp_path_factory.mktemp("repository")) as made:
        made.run("dvc", "repro", "report")
        yield made


def repro(small: Repository, params: str = PARAMS) -> list[str]:
    """The stages that DVC really ran."""
    (small.folder / "params.yaml").write_text(params)
    said = small.run("dvc", "repro", "report")
    return [line.split("'")[1] for line in said.splitlines() if line.startswith("Running stage")]


def stages() -> dict[str, Any]:
    """Every stage of every dvc.yaml, by file and name."""
    files = [ROOT / "dvc.yaml", *sorted((ROOT / "pipelines").glob("*/dvc.yaml"))]
    parsed = {str(file.relative_to(ROOT)): YAML(typ="safe", pure=True).load(file.read_text()) for file in files}
    return {f"{file}:{name}": about for file, content in parsed.items() for name, about in content["stages"].items()}


def test_every_stage_is_a_module_and_every_paper_has_its_own() -> None:
    names = [name.split(":")[1] for name in stages()]
    assert list(dict.fromkeys(names)) == list(STAGES)
    assert names.count("study") == names.count("paper") == len(PAPERS)


def test_every_output_metric_and_plot_is_cached() -> None:
    """One output that is not would switch DVC's run cache off for its stage."""
    for about in stages().values():
        outputs = [out for kind in ("outs", "metrics", "plots") for out in about.get(kind, [])]
        assert outputs
        assert all(isinstance(out, str) for out in outputs), "options stand in a mapping"


def test_every_dependency_of_the_stages_exists() -> None:
    files = [dep for about in stages().values() for dep in about["deps"] if dep.startswith(("plugins", "pipelines"))]
    assert [dep for dep in files if not (ROOT / dep).exists()] == []


def test_trainings_depend_on_the_files_of_every_method() -> None:
    """Of a paper's package it is single files, since its FedML pair changes no training."""
    deps = stages()["dvc.yaml:train"]["deps"]
    folders = {str(Path(*METHODS[method].__module__.split(".")[:-1])) for method in METHODS}
    used = {str(path.relative_to(ROOT)) for method in METHODS for path in code(method)}
    own = {file for file in used if str(Path(file).parent) in folders and not file.endswith("__init__.py")}
    assert [file for file in sorted(own) if not any(file == dep or file.startswith(f"{dep}/") for dep in deps)] == []


@pytest.mark.slow
def test_a_second_run_does_nothing(small: Repository) -> None:
    assert repro(small) == []


@pytest.mark.slow
def test_compiled_modules_are_no_change(small: Repository) -> None:
    (small.folder / "plugins" / "core" / "__pycache__").mkdir(exist_ok=True)
    (small.folder / "plugins" / "core" / "__pycache__" / "trees.cpython-399.pyc").write_bytes(b"compiled")
    assert repro(small) == []


@pytest.mark.slow
def test_a_recipe_s_change_reruns_that_recipe_and_its_way_back_nothing(small: Repository) -> None:
    changed = repro(small, PARAMS.replace("{p: 0.5}", "{p: 1.0}"))
    assert set(changed) == {f"train@{KEY}", f"evaluate@{KEY}", "report"}
    assert repro(small) == []


@pytest.mark.slow
def test_a_seed_more_leaves_the_others_alone(small: Repository) -> None:
    added = repro(small, PARAMS.replace("seeds: [0]", "seeds: [0, 1]"))
    # Sorted: DVC keeps no order between stages that do not depend on each other.
    assert sorted(name for name in added if name.startswith(("partition", "train"))) == [
        "partition@skewed-1", "train@skewed-fedavg-1", "train@skewed-scaffold+fnr-1",
    ]  # fmt: skip
    # The folder of all runs, which the report reads, now holds more.
    assert repro(small) == ["report"]


@pytest.mark.slow
def test_what_does_not_change_a_result_reruns_no_training(small: Repository) -> None:
    """The name of the experiment, and a scenario that is not run."""
    other = "scenarios:\n  other: {partition: iid, clients: 3}"
    ran = repro(small, PARAMS.replace("experiment: small", "experiment: large").replace("scenarios:", other))
    assert [name for name in ran if name.startswith(("prepare", "partition", "train"))] == []


@pytest.mark.slow
def test_changed_code_of_a_plugin_reruns_training(small: Repository) -> None:
    path = small.folder / "plugins" / "fnr" / "algorithm.py"
    before = path.read_text()
    path.write_text(before + "\n# changed\n")
    stale = small.run("dvc", "status", f"train@{KEY}")
    path.write_text(before)
    assert "plugins/fnr/algorithm.py" in stale


@pytest.mark.slow
def test_metrics_and_plots_are_there_to_look_at(small: Repository) -> None:
    repro(small)
    shown = small.run("dvc", "metrics", "show", "--md")
    assert f"evaluation/{KEY}/metrics.json" in shown
    assert "accuracy_last5_mean" in shown
    small.run("dvc", "plots", "show", "--out", "plots")
    assert "scaffold+fnr" in (small.folder / "plots" / "index.html").read_text()


@pytest.mark.slow
def test_an_error_of_a_stage_is_one_line(small: Repository) -> None:
    (small.folder / "params.yaml").write_text(PARAMS.replace("clients: 4", "clients: 2000"))
    said = small.run("dvc", "repro", "report", code=255)
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [
        "error: params.yaml: scenarios.skewed: clients=2000 is refused; allowed: 1 to 1243 (1243 training samples)"
    ]
    assert "Traceback" not in said
    assert repro(small) == []


def stages_below(pid: int) -> Iterator[int]:
    """Ids of the processes below `pid` that run a training stage."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(row[0]), int(row[1]), row[2]) for row in (line.split(None, 2) for line in listed.splitlines())]
    below = {pid}
    for _ in rows:
        below |= {child for child, parent, _ in rows if parent in below}
    yield from (child for child, _, command in rows if child in below and "pipelines.stage train" in command)


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(small: Repository) -> None:
    """`kill -9` at random moments, and `dvc repro` after each: the hash of the final weights is the undisturbed one."""
    repro(small, PARAMS.replace("rounds: 3", "rounds: 40"))
    record = small.folder / "runs" / KEY / "run.json"
    expected = json.loads(record.read_text())["weights_sha256"]
    # Forced, or the run cache would answer at once.
    command = ["dvc", "repro", "--force", "--single-item", f"train@{KEY}"]
    began = time.monotonic()
    small.run(*command)
    undisturbed = time.monotonic() - began
    source = random.Random(SEED)
    killed = 0
    while killed < KILLS:
        process = small.start(*command)
        victim = None
        while victim is None and process.poll() is None:
            victim = next(stages_below(process.pid), None)
        time.sleep(source.uniform(0, undisturbed))
        if victim is not None and process.poll() is None:
            try:
                os.kill(victim, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        process.communicate(timeout=100)
        if record.exists():
            assert json.loads(record.read_text())["weights_sha256"] == expected
    small.run(*command)
    assert json.loads(record.read_text())["weights_sha256"] == expected
    assert list((small.folder / ".resume").iterdir()) == []
