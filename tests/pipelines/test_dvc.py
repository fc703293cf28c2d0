"""The pipeline as DVC runs it: what depends on what, that nothing runs twice, and that DVC's own
commands work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.stages.__main__ import STAGES
from fedml_noniid.plugins import registry
from tests.pipelines.small import PARAMS, ROOT, Repository, copy, run_stages
from tests.processes import alive

FEDAVG, FNR = "skewed-fedavg-0", "skewed-scaffold+fnr-0"
BOTH = {FEDAVG, FNR}


def stages(file: str = "dvc.yaml") -> dict[str, Any]:
    """The stages of a file, by name."""
    content: dict[str, Any] = YAML(typ="safe", pure=True).load((ROOT / file).read_text())["stages"]
    return content


@pytest.mark.slow
def test_a_dry_run_works_in_a_fresh_clone(tmp_path: Path) -> None:
    """As docs/experiments.md has it: nothing was made or pulled."""
    command = "dvc repro --dry --allow-missing"
    assert f"\n{command} " in (ROOT / "docs" / "experiments.md").read_text()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    said = Repository(tmp_path / "clone").run(*command.split())
    assert all(f"'{name}'" in said for name in STAGES)


def test_dvc_yaml_names_what_the_stages_depend_on() -> None:
    """`machine`, `tune` and `choose` are no parameters; everything else in params.yaml is one."""
    keys = {*config.Config.model_fields} - {*stages()["plan"]["params"]}
    assert keys == {"machine", "tune", "choose"}
    assert all(
        f"plan/{name}.json" in about["deps"] for name, about in stages().items() if name != "plan"
    )
    assert "cache: false" not in (ROOT / "dvc.yaml").read_text(), "all outputs can be pulled"


# What changes which stage's dependencies. `plan` decides it, and DVC compares what `plan` writes.


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the code of this repository, to change."""
    folder = tmp_path_factory.mktemp("code")
    for name in ("pipelines", "plugins"):  # the package has links to them
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "fedml_noniid", folder / "fedml_noniid", symlinks=True)
    parse = provenance._source.__wrapped__
    parsed = cache(lambda path, content: parse(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "ROOT", folder)
        # Only a file that was changed is parsed again.
        patch.setattr(provenance, "_source", lambda path: parsed(path, path.read_bytes()))
        provenance.files.cache_clear()
        yield folder
    provenance.files.cache_clear()


def planned(folder: Path, settings: str = PARAMS) -> dict[str, dict[str, str]]:
    """What the plan stage writes with these settings."""
    (folder / "params.yaml").write_text(settings)
    return provenance.plan(config.load(folder))


Edits = Mapping[str, str | Sequence[tuple[str, str]]]  # file -> new last lines, or (old, new) words


@contextmanager
def edited(folder: Path, edits: Edits) -> Iterator[None]:
    """Files are changed, and as they were afterwards."""
    before = {name: (folder / name).read_text() for name in edits if (folder / name).exists()}
    for name, change in edits.items():
        text = before.get(name, "") + (f"{change}\n" if isinstance(change, str) else "")
        for old, new in () if isinstance(change, str) else change:
            assert old in text, f"{name}: {old}"
            text = text.replace(old, new, 1)
        (folder / name).write_text(text)
    provenance.files.cache_clear()
    yield
    for name in edits:
        (folder / name).unlink()
    for name, text in before.items():
        (folder / name).write_text(text)
    provenance.files.cache_clear()


def params(*changes: tuple[str, str]) -> str:
    text = PARAMS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


STATEMENT = "_NEW = 1"
REGISTERED: Edits = {  # a method of one's own
    "plugins/baselines/mine.py": "class Mine:\n    name = 'mine'",
    "plugins/registry.py": [
        (
            "from fedml_noniid.plugins.baselines.moon",
            "from fedml_noniid.plugins.baselines.mine import Mine\nfrom plugins.baselines.moon",
        ),
        ("        MOON,", "        Mine,\n        MOON,"),
    ],
}
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
ROWS: dict[str, tuple[Edits, tuple[tuple[str, str], ...], Mapping[str, set[str]]]] = {
    "a comment in a method that runs": (
        {"plugins/fnr/algorithm.py": "# a comment"},
        (),
        {},
    ),
    "another docstring of a function": (
        {"fedml_noniid/engines/record.py": [('    """', '    """Other words. ')]},
        (),
        {},
    ),
    "the machine": (
        {},
        (("{checkpoint_every: 1}", "{memory_mb: 64, clients_memory: disk, processes: 2}"),),
        {},
    ),
    "a scenario that is not run": (
        {},
        (("scenarios:", "scenarios:\n  other: {partition: iid, clients: 3}"),),
        {},
    ),
    "a recipe that is not run": ({}, (("recipes:\n", "recipes:\n  moon: {}\n"),), {}),
    "the experiment's name": (
        {},
        (("experiment: small", "experiment: large"),),
        {"report": {"all"}},
    ),
    "a hyper-parameter of one recipe": (
        {},
        (("p: 0.5", "p: 1.0"),),
        {"train": {FNR}, "report": {"all"}},
    ),
    "another recipe": (
        {},
        (("[fedavg, ", "[fedavg, moon, "), ("recipes:\n", "recipes:\n  moon: {}\n")),
        {"train": {"skewed-moon-0"}, "report": {"all"}},
    ),
    "another seed": (
        {},
        (("seeds: [0]", "seeds: [0, 1]"),),
        {
            "partition": {"skewed-1"},
            "train": {"skewed-fedavg-1", "skewed-scaffold+fnr-1"},
            "report": {"all"},
        },
    ),
    "a method is registered and run": (
        REGISTERED,
        WITH_MINE,
        {"train": {"skewed-mine-0"}, "report": {"all"}},
    ),
    "the learning rate": (
        {},
        (("lr: 0.1", "lr: 0.2"),),
        {"train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "the concentration": (
        {},
        (("alpha: 0.5", "alpha: 0.6"),),
        {"partition": {"skewed-0"}, "train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "how the data are normalised": (
        {},
        (("name: digits", "name: digits, normalise: half"),),
        {"prepare": {"digits"}, "train": BOTH, "report": {"all"}},
    ),
    "the public split": (
        {},
        (("public: 50", "public: 60"),),
        {"partition": {"skewed-0"}, "train": BOTH, "report": {"all"}, "deploy": {"fedavg"}},
    ),
    "the rounds of the deployment": (
        {},
        (("silos: 2, rounds: 1", "silos: 2, rounds: 2"),),
        {"deploy": {"fedavg"}},
    ),
    "the code of one method": (
        {"plugins/fnr/algorithm.py": STATEMENT},
        (),
        {"train": {FNR}},
    ),
    "the code of a method that does not run": (
        {"plugins/baselines/moon.py": STATEMENT},
        (),
        {},
    ),
    "the code of all trainings": (
        {"fedml_noniid/core/algorithm.py": STATEMENT},
        (),
        {"train": BOTH, "evaluate": {"code"}, "deploy": {"fedavg"}},
    ),
    "the sums in C++": (
        {"fedml_noniid/core/sums.cpp": "// words"},
        (),
        {"train": BOTH, "evaluate": {"code"}, "deploy": {"fedavg"}},
    ),
    "what settings mean": ({"pipelines/experiment/config.py": STATEMENT}, (), EVERYTHING),
    "what a schedule means": ({"fedml_noniid/rates.py": STATEMENT}, (), EVERYTHING),
    "the code of a partition": (
        {"fedml_noniid/data/partitions/label.py": STATEMENT},
        (),
        {"partition": {"skewed-0"}, "deploy": {"fedavg"}},
    ),
    "the code of the evaluation": (
        {"pipelines/stages/evaluate.py": STATEMENT},
        (),
        {"evaluate": {"code"}},
    ),
    "the code of the tables": (
        {"pipelines/reporting/tables.py": STATEMENT},
        (),
        {"report": {"all"}},
    ),
    "a template": (
        {"pipelines/reporting/templates/report.md.j2": "words"},
        (),
        {"report": {"all"}},
    ),
    "the code of MLflow's runs": ({"pipelines/tracking/runs.py": STATEMENT}, (), {}),
    "the code of the silos": (
        {"fedml_noniid/deploy/wire.py": STATEMENT},
        (),
        {"deploy": {"fedavg"}},
    ),
}


@pytest.fixture(scope="module")
def before(code: Path) -> dict[str, dict[str, str]]:
    return planned(code)


@pytest.mark.parametrize("what", ROWS)
def test_what_a_change_makes_out_of_date(
    code: Path, before: dict[str, dict[str, str]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits, changes, expected = ROWS[what]
    if changes == WITH_MINE:
        module = {"__module__": "fedml_noniid.plugins.baselines.mine", "name": "mine"}
        mine = type("Mine", (registry.METHODS["moon"],), module)
        monkeypatch.setitem(registry.METHODS, "mine", mine)
    with edited(code, edits):
        after = planned(code, params(*changes))
    changed = {
        stage: {name for name, value in hashes.items() if before[stage].get(name) != value}
        for stage, hashes in after.items()
    }
    assert {stage: names for stage, names in changed.items() if names} == expected


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
