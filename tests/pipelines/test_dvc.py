"""The pipeline as DVC runs it: what depends on what, that nothing runs twice, and that DVC's own
commands work."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.reporting import report
from fedml_noniid.pipelines.stages.__main__ import STAGES
from fedml_noniid.plugins import registry
from tests.pipelines.small import PARAMS, ROOT, Repository, copy, run_stages
from tests.pipelines.test_report import write_params, write_run, write_runs
from tests.processes import alive

FEDAVG, FNR = "skewed-fedavg-0", "skewed-scaffold+fnr-0"
BOTH = {FEDAVG, FNR}


def stages(file: str = "dvc.yaml") -> dict[str, Any]:
    """The stages of a file, by name."""
    content: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / file).read_text())["stages"]
    return content


def test_a_dry_run_works_in_a_fresh_clone(tmp_path: Path) -> None:
    """As docs/experiments.md has it: nothing was made or pulled."""
    command = "dvc repro --dry --allow-missing"
    assert f"\n{command} " in (ROOT / "docs" / "experiments.md").read_text()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    said = Repository(tmp_path / "clone").run(*command.split())
    assert all(f"'{name}'" in said for name in STAGES)


def test_machine_is_no_parameter_of_dvc() -> None:
    """Nor are `tune` and `choose`. Everything else that stands in params.yaml is one."""
    others = {"machine", "tune", "choose"}
    assert set(config.Config.model_fields) - set(stages()["plan"]["params"]) == others


def test_every_stage_depends_on_its_part_of_the_plan_and_all_outputs_can_be_pulled() -> None:
    assert all(
        f"plan/{name}.json" in about["deps"] for name, about in stages().items() if name != "plan"
    )
    assert "cache: false" not in (ROOT / "dvc.yaml").read_text()


def test_dvcs_tables_of_metrics_fit_a_terminal(tmp_path: Path) -> None:
    """Of all recipes of the default experiment. The difference shows what changed alone."""
    recipes = config.load(ROOT).recipe_names
    finals = {name: [0.7123456 + 0.01 * place] for place, name in enumerate(recipes)}
    small = Repository(tmp_path)
    write_params(tmp_path, recipes, [0])
    write_runs(tmp_path, finals, mib=1234.567)
    content = {"metrics": YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["metrics"]}
    (tmp_path / "dvc.yaml").write_text(json.dumps(content))
    report.write(tmp_path)
    small.run("git", "init", "--quiet")
    small.run("dvc", "init", "--quiet")
    small.commit()
    for name in ("runs", "evaluation"):
        shutil.rmtree(tmp_path / name / "skew-fnr-0")
    write_run(tmp_path, "fnr", 0, [0.5], mib=1234.567)
    report.write(tmp_path)
    shown, changed = (small.run("dvc", "metrics", name).splitlines() for name in ("show", "diff"))
    assert len(shown) == 1 + len(recipes) + 1 and "accuracy" in shown[0]
    lines = [line.split()[:2] for line in changed[1:]]
    assert lines == [["report/dvc/fnr.json", name] for name in ("accuracy", "gain", "worst")]
    assert max(map(len, shown + changed)) <= 80


# What changes which stage's dependencies. `plan` decides it, and DVC compares what `plan` writes.


class Copy:
    """The code of this repository in a folder of its own, to change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def planned(self, params: str = PARAMS) -> dict[str, dict[str, str]]:
        """What the plan stage writes with these settings."""
        (self.folder / "params.yaml").write_text(params)
        return provenance.plan(config.load(self.folder))

    def edit(self, file: str, old: str, new: str) -> None:
        text = (self.folder / file).read_text()
        assert old in text, f"{file}: {old}"
        (self.folder / file).write_text(text.replace(old, new, 1))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    folder = tmp_path_factory.mktemp("code")
    for name in ("pipelines", "plugins"):  # the package has links to them
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "fedml_noniid", folder / "fedml_noniid", symlinks=True)
    made = Copy(folder)
    parse = provenance._source.__wrapped__
    parsed = cache(lambda path, content: parse(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "ROOT", folder)
        # Only a file that was changed is parsed again.
        patch.setattr(provenance, "_source", lambda path: parsed(path, path.read_bytes()))
        provenance.files.cache_clear()
        yield made
    provenance.files.cache_clear()


def params(*changes: tuple[str, str]) -> str:
    text = PARAMS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def registered(code: Copy) -> None:
    """A method of one's own: its file and its lines in the registry."""
    (code.folder / "plugins" / "baselines" / "mine.py").write_text(
        "class Mine:\n    name = 'mine'\n"
    )
    code.edit(
        "plugins/registry.py",
        "from fedml_noniid.plugins.baselines.moon",
        "from fedml_noniid.plugins.baselines.mine import Mine\nfrom plugins.baselines.moon",
    )
    code.edit("plugins/registry.py", "        MOON,", "        Mine,\n        MOON,")


@contextmanager
def restored(folder: Path) -> Iterator[None]:
    """Every file is as it was afterwards, and no other is there."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    for path in folder.rglob("*"):
        if path.is_file() and path not in before:
            path.unlink()
    for path, content in before.items():
        if path.read_bytes() != content:
            path.write_bytes(content)


def at_the_end(file: str, text: str) -> Callable[[Copy], None]:
    """Adds lines to a file."""

    def add(code: Copy) -> None:
        path = code.folder / file
        path.write_text(f"{path.read_text()}\n{text}\n")

    return add


STATEMENT = "_NEW = 1"
WITH_MINE = (("[fedavg, ", "[fedavg, mine, "), ("recipes:\n", "recipes:\n  mine: {}\n"))
EVERYTHING = {
    "prepare": {"digits"},
    "partition": {"skewed-0"},
    "train": BOTH,
    "evaluate": {"code"},
    "report": {"all"},
    "deploy": {"fedavg"},
}
# What changed: in the code, in params.yaml, and the parts of the plan that are others than before.
ROWS: dict[
    str, tuple[Callable[[Copy], None] | None, tuple[tuple[str, str], ...], Mapping[str, set[str]]]
] = {
    "a comment in a method that runs": (
        at_the_end("plugins/fnr/algorithm.py", "# a comment"),
        (),
        {},
    ),
    "another docstring of a function": (
        lambda code: code.edit("fedml_noniid/engines/record.py", '    """', '    """Other words. '),
        (),
        {},
    ),
    "memory_mb": (None, (("{checkpoint_every: 1}", "{memory_mb: 64}"),), {}),
    "clients_memory": (None, (("{checkpoint_every: 1}", "{clients_memory: disk}"),), {}),
    "checkpoint_every": (None, (("{checkpoint_every: 1}", "{checkpoint_every: 7}"),), {}),
    "processes": (None, (("{checkpoint_every: 1}", "{processes: 2}"),), {}),
    "a scenario that is not run": (
        None,
        (("scenarios:", "scenarios:\n  other: {partition: iid, clients: 3}"),),
        {},
    ),
    "a recipe that is not run": (None, (("recipes:\n", "recipes:\n  moon: {}\n"),), {}),
    "the experiment's name": (
        None,
        (("experiment: small", "experiment: large"),),
        {"report": {"all"}},
    ),
    "a hyper-parameter of one recipe": (
        None,
        (("p: 0.5", "p: 1.0"),),
        {"train": {FNR}, "report": {"all"}},
    ),
    "another recipe": (
        None,
        (("[fedavg, ", "[fedavg, moon, "), ("recipes:\n", "recipes:\n  moon: {}\n")),
        {"train": {"skewed-moon-0"}, "report": {"all"}},
    ),
    "another seed": (
        None,
        (("seeds: [0]", "seeds: [0, 1]"),),
        {
            "partition": {"skewed-1"},
            "train": {"skewed-fedavg-1", "skewed-scaffold+fnr-1"},
            "report": {"all"},
        },
    ),
    "a method is registered and run": (
        registered,
        WITH_MINE,
        {"train": {"skewed-mine-0"}, "report": {"all"}},
    ),
    "the learning rate": (
        None,
        (("lr: 0.1", "lr: 0.2"),),
        {"train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "the rounds": (
        None,
        (("rounds: 3", "rounds: 4"),),
        {"train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "the concentration": (
        None,
        (("alpha: 0.5", "alpha: 0.6"),),
        {"partition": {"skewed-0"}, "train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "how the data are normalised": (
        None,
        (("name: digits", "name: digits, normalise: half"),),
        {"prepare": {"digits"}, "train": BOTH, "report": {"all"}},
    ),
    "the public split": (
        None,
        (("public: 50", "public: 60"),),
        {"partition": {"skewed-0"}, "train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "the rounds of the deployment": (
        None,
        (("silos: 2, rounds: 1", "silos: 2, rounds: 2"),),
        {"deploy": {"fedavg"}},
    ),
    "the code of one method": (
        at_the_end("plugins/fnr/algorithm.py", STATEMENT),
        (),
        {"train": {FNR}},
    ),
    "the code of a method that does not run": (
        at_the_end("plugins/baselines/moon.py", STATEMENT),
        (),
        {},
    ),
    "the code of all trainings": (
        at_the_end("fedml_noniid/core/algorithm.py", STATEMENT),
        (),
        {"train": BOTH, "evaluate": {"code"}, "deploy": {"fedavg"}},
    ),
    "the sums in C++": (
        at_the_end("fedml_noniid/core/sums.cpp", "// words"),
        (),
        {"train": BOTH, "evaluate": {"code"}, "deploy": {"fedavg"}},
    ),
    "what settings mean": (at_the_end("pipelines/experiment/config.py", STATEMENT), (), EVERYTHING),
    "what settings of a scenario mean": (
        at_the_end("pipelines/experiment/scenario.py", STATEMENT),
        (),
        EVERYTHING,
    ),
    "what settings of local training mean": (
        at_the_end("fedml_noniid/engines/local_training.py", STATEMENT),
        (),
        EVERYTHING,
    ),
    "what a schedule means": (at_the_end("fedml_noniid/rates.py", STATEMENT), (), EVERYTHING),
    "the code of a partition": (
        at_the_end("fedml_noniid/data/partitions/label.py", STATEMENT),
        (),
        {"partition": {"skewed-0"}, "deploy": {"fedavg"}},
    ),
    "the code of the evaluation": (
        at_the_end("pipelines/stages/evaluate.py", STATEMENT),
        (),
        {"evaluate": {"code"}},
    ),
    "the code of the tables": (
        at_the_end("pipelines/reporting/tables.py", STATEMENT),
        (),
        {"report": {"all"}},
    ),
    "a template": (
        at_the_end("pipelines/reporting/templates/report.md.j2", "words"),
        (),
        {"report": {"all"}},
    ),
    "the code of MLflow's runs": (at_the_end("pipelines/tracking/runs.py", STATEMENT), (), {}),
    "the code of the silos": (
        at_the_end("fedml_noniid/deploy/wire.py", STATEMENT),
        (),
        {"deploy": {"fedavg"}},
    ),
}


@pytest.fixture(scope="module")
def before(code: Copy) -> dict[str, dict[str, str]]:
    return code.planned(PARAMS)


@pytest.mark.parametrize("what", ROWS)
def test_what_a_change_makes_out_of_date(
    code: Copy, before: dict[str, dict[str, str]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, changes, expected = ROWS[what]
    mine = type(
        "Mine",
        (registry.METHODS["moon"],),
        {"__module__": "fedml_noniid.plugins.baselines.mine", "name": "mine"},
    )
    if changes == WITH_MINE:
        monkeypatch.setitem(registry.METHODS, "mine", mine)
    with restored(code.folder):
        if edit is not None:
            edit(code)
            provenance.files.cache_clear()
        after = code.planned(params(*changes))
    if edit is not None:
        provenance.files.cache_clear()
    found = {
        stage: {name for name, value in hashes.items() if before[stage].get(name) != value}
        for stage, hashes in after.items()
    }
    assert {stage: names for stage, names in found.items() if names} == expected


# With DVC itself.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A committed copy in which the small experiment has run, but for the deployment."""
    made = Repository(copy(tmp_path_factory.mktemp("repository") / "small"))
    made.repro()
    made.commit()
    return made


@pytest.mark.slow
def test_what_dvc_runs(small: Repository) -> None:
    """One change after the other: the stages that run, and how many items are trained."""
    moon = small.folder / "plugins" / "baselines" / "moon.py"
    original, results = moon.read_text(), ["train", "evaluate", "report"]
    steps: list[tuple[str, Callable[[], object], str, list[str], int]] = [
        ("nothing", lambda: None, PARAMS, [], 0),
        (
            "a comment",
            lambda: moon.write_text(f"{moon.read_text()}# a comment\n"),
            PARAMS,
            ["plan"],
            0,
        ),
        (
            "the machine",
            lambda: None,
            params(("{checkpoint_every: 1}", "{memory_mb: 99, processes: 1}")),
            [],
            0,
        ),
        (
            "the name",
            lambda: None,
            params(("experiment: small", "experiment: other")),
            ["plan", "report"],
            0,
        ),
        ("a setting", lambda: None, params(("p: 0.5", "p: 1.0")), ["plan", *results], 1),
        (
            "damage",
            lambda: (small.folder / "runs" / FNR / "rounds.csv").write_text("half"),
            params(("p: 0.5", "p: 1.0")),
            ["train", "evaluate"],
            0,
        ),
        (
            "a seed",
            lambda: None,
            params(("seeds: [0]", "seeds: [0, 1]")),
            ["plan", "partition", *results],
            2,
        ),
        ("all back", lambda: moon.write_text(original), PARAMS, ["plan", "partition", *results], 0),
    ]
    for what, change, settings, expected, trainings in steps:
        change()
        before = small.trained()
        ran = small.repro(settings)
        assert set(ran) <= set(expected), what
        assert len(small.trained() - before) == trainings, what
        # What DVC has seen before it takes from its cache of runs.
        assert ran == expected or trainings == 0, what
        assert {path.name for path in (small.folder / "runs").iterdir()} == (
            {FEDAVG, FNR, "skewed-fedavg-1", "skewed-scaffold+fnr-1"} if what == "a seed" else BOTH
        ), what
    assert small.run("git", "status", "--porcelain", "dvc.lock") == "", (
        "the way back ends where it began"
    )


@pytest.mark.slow
def test_an_experiment_of_the_queue_runs_in_a_copy_with_the_store_of_the_repository(
    small: Repository,
) -> None:
    small.repro()
    before = small.trained()
    queued = ("--queue", "--name", "queued", "--set-param", "train.lr=0.025")
    small.run("dvc", "exp", "run", "report", *queued)
    small.run("dvc", "queue", "start")
    while "Running" in (said := small.run("dvc", "queue", "status")) or "Queued" in said:
        time.sleep(2)
    assert "Success" in said, small.run("dvc", "queue", "logs", "queued")
    assert len(small.trained() - before) == 2
    rule = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "exp show" in line)
    shown = small.run(*shlex.split(rule.strip("\t@")), "--no-pager").splitlines()
    assert max(map(len, shown)) <= 80
    assert {"Experiment", "best", "train.lr"} <= {*shown[1].split()}
    assert any("[queued]" in line and "0.025" in line.split() for line in shown)


def below(process: int) -> set[int]:
    """Ids of the processes that a process has started, and those that they have."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = {process}
    for _ in pairs:
        found |= {child for child, parent in pairs if parent in found}
    return found - {process}


@pytest.mark.slow
def test_an_interrupt_ends_everything_in_one_line(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the training. The next run goes on."""
    small = Repository(copy(tmp_path / "small"))
    long = params(
        ("rounds: 3", "rounds: 100000"),
        ("{checkpoint_every: 1}", "{checkpoint_every: 1, processes: 2}"),
    )
    (small.folder / "params.yaml").write_text(long)
    run_stages(small.folder, ("prepare", "partition"))
    process = small.start("python", "-m", "fedml_noniid.pipelines.stages", "train")
    while len(list(small.folder.glob(".resume/*/checkpoint.safetensors"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = below(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    # Above it is progress, if enough time has passed.
    assert (
        said.splitlines()[-1] == "interrupted; the same command goes on from here"
        and "Traceback" not in said
    )
    assert len(children) >= 2 and not any(alive(child) for child in children)
    assert not (small.folder / "runs").exists()
    assert len(list(small.folder.glob(".resume/*/checkpoint.safetensors"))) == 2
