"""What a result depends on: the code of its own methods and of the simulation, found by what files
import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedml_noniid import extras
from fedml_noniid.engines.device import resolve_device
from fedml_noniid.pipelines.cluster import traits
from fedml_noniid.pipelines.experiment import config, provenance
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import plan
from fedml_noniid.plugins import registry
from tests import own_package
from tests.files import contents
from tests.pipelines.small import PARAMS, ROOT, environment

TRAINING = "fedml_noniid.pipelines.experiment.training"
SHARED = {
    "core/algorithm.py",
    "core/randomness.py",
    "engines/simulation.py",
    "engines/vectorized.py",
    "models/layers.py",
    "models/recurrent.py",
    "data/batches.py",
    "data/noise.py",
    "data/streams.py",
    "registry.py",
}
# Files that no training depends on: that change no result, that act through the prepared data and
# the partition alone, or that deploy.
NO_TRAINING = (
    *(name.removeprefix("fedml_noniid.").replace(".", "/") for name in provenance.NO_CODE),
    *(
        "privacy/chained",
        "data/checks",
        "data/datasets",
        "data/partitions",
        "data/readers",
        "data/rounding",
    ),
    *("data/client_tests", "data/feature_skew", "data/label_noise", "data/shards", "data/splits"),
    *(
        "data/statistics",
        "data/subsample",
        "data/yaml_files",
        "foreign",
        "models/embed",
        "data/owners",
        "data/unseen",
    ),
    *("credentials/", "deploy/", "governance/", "privacy/ledger", "privacy/local", "processes/"),
)


def files(recipe: str) -> set[str]:
    """The files of `plugins` that a training of the recipe depends on."""
    modules = [registry.METHODS[name].__module__ for name in registry.parse(recipe)]
    found = provenance.files(TRAINING, *modules)
    return {
        path.relative_to(provenance.ROOT)
        .as_posix()
        .removeprefix("fedml_noniid/")
        .removeprefix("plugins/")
        for path in found
    }


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        ("fedavg", set()),
        ("scaffold", {"baselines/__init__.py", "baselines/scaffold.py"}),
        ("fnr", {"fnr/__init__.py", "fnr/algorithm.py", "fnr/recorded.py"}),
        ("fedftg", {"baselines/__init__.py", "baselines/fedftg.py", "baselines/generators.py"}),
        ("rfedavg_plus", {"rfedavg/__init__.py", "rfedavg/algorithm.py"}),
    ],
)
def test_a_recipe_depends_on_its_own_methods_only(recipe: str, own: set[str]) -> None:
    found = files(recipe)
    assert found >= SHARED
    methods = {
        name
        for name in found
        if name.split("/")[0] in ("baselines", "fnr", "ccn", "fednlr", "fednnnn", "rfedavg")
    }
    assert methods == own
    assert not [
        name for name in found if name.startswith(("deploy/", "data/readers", "data/partitions"))
    ]


def test_nothing_that_a_training_may_run_is_left_out() -> None:
    """Every module of ours that a training loads, and every file of methods and machinery, is a
    dependency of some recipe, or is known to change no training."""
    code = f"import sys, {TRAINING}\nprint(*(name for name in sys.modules if name.count('.') > 1))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    every = files("+".join(registry.METHODS))
    tops = ROOT / "fedml_noniid", ROOT / "plugins"
    ours = {
        path.relative_to(top).as_posix()
        for top in tops
        for path in top.rglob("*.*[yp]")
        if path.is_file() and path.relative_to(top).parts[0] not in ("api", "cli", "contract")
    }
    for name in loaded:
        if name.startswith("fedml_noniid."):
            inside = name.removeprefix("fedml_noniid.").removeprefix("plugins.")
            ours.add(f"{inside.replace('.', '/')}.py")
    rest = {name for name in ours - every if any((top / name).is_file() for top in tops)}
    assert {
        name for name in rest if not name.startswith(NO_TRAINING) and not name.endswith("/pair.py")
    } == {"__main__.py"}
    assert len(loaded) > 100 and len(ours) > 150


@pytest.mark.parametrize(
    ("holder", "name", "value", "changed"),
    [
        # NumPy draws partitions, cohorts and batches, and does not promise the same draws.
        (np, "__version__", "9.9", {"machine", "partition", "train", "deploy", "worker"}),
        # Two makers' CPUs with the same instructions were measured to give other bits.
        (provenance, "of_cpu", str, {"machine", "partition", "train", "deploy", "worker"}),
        # scikit-learn splits the digits.
        (extras, "version", str, {"prepare"}),
    ],
    ids=["numpy", "cpu", "readers"],
)
def test_one_list_decides_in_the_store_in_the_cluster_and_in_the_certificate(
    monkeypatch: pytest.MonkeyPatch, holder: object, name: str, value: object, changed: set[str]
) -> None:
    settings = config.load(ROOT)

    def stages() -> dict[str, object]:
        """The hashes of each stage, and what a worker of a cluster has to be like."""
        worker = traits.traits(resolve_device(settings.train.device), settings.train.threads)
        return {**provenance.plan(settings), "worker": worker}

    before = stages()
    assert before["worker"].keys() - before["machine"].keys() == {"code"}
    monkeypatch.setattr(holder, name, value)
    after = stages()
    assert {stage for stage in before if before[stage] != after[stage]} == changed
    for stage in changed & {"partition", "train"}:
        assert all(after[stage][key] != value for key, value in before[stage].items())


def test_an_edit_of_a_users_partition_makes_it_again(tmp_path: Path) -> None:
    name = f"dealing_{tmp_path.name.replace('-', '_')}"
    scenario = f"partition: '{name}:deal', clients: 4"
    text = PARAMS.replace("partition: dirichlet, clients: 4, alpha: 0.5", scenario)
    (tmp_path / "params.yaml").write_text(text)
    plans = []
    for end in (100, 200):
        body = f"return [range(k, {end}, n_clients) for k in range(n_clients)]"
        (tmp_path / f"{name}.py").write_text(f"def deal(samples, n_clients):\n    {body}\n")
        own_package.forget(name)
        plans.append(provenance.plan(config.load(tmp_path)))
    first, second = plans
    assert {stage for stage in first if first[stage] != second[stage]} == {"partition", "deploy"}


HOLDS = """
import sys
from fedml_noniid.pipelines.stages.__main__ import main
sys.exit(main(["plan"]) or 10 * ("torch" in sys.modules))
"""


def test_the_last_plan_holds_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it holds, the stage imports no torch."""
    rows = "".join(f"{i % 5},{i % 2}\n" for i in range(40))
    (tmp_path / "mine.csv").write_text(f"x,ill\n{rows}")
    mine = PARAMS.replace(
        "name: digits, root: data/raw", "name: table, root: ., file: mine.csv, label: ill"
    ).replace("device: cpu", "device: auto")
    (tmp_path / "params.yaml").write_text(mine)
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    place = Workspace.from_environment(tmp_path, {})

    def planned(imports: bool) -> dict[str, bytes]:
        """The files of the plan, which is made again if the stage `imports` torch."""
        with monkeypatch.context() as patch:
            if not imports:
                patch.setattr(plan, "_planned", lambda _: pytest.fail("made again"))
            plan.run(place)
        return contents(tmp_path / "plan")

    first = planned(True)
    assert planned(False) == first
    named = environment() | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", HOLDS], cwd=tmp_path, env=named).returncode == 0
    (tmp_path / "mine.csv").write_text(f"x,ill\n{rows}1,1\n")
    second = planned(True)
    assert {name for name in first if first[name] != second[name]} == {"prepare.json"}
    (tmp_path / "params.yaml").write_text(mine.replace("p: 0.5", "p: 0.6"))
    assert planned(True)["train.json"] != second["train.json"]
    for change in (
        lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default"),
        lambda: monkeypatch.setattr(extras, "version", lambda name: "9.9"),
    ):
        change()
        with pytest.raises(pytest.fail.Exception):
            planned(False)
        planned(True)


def test_what_a_run_writes_does_not_make_the_tree_a_modified_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    for name in ("dvc.lock", "code.py"):
        (tmp_path / name).write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "dvc.lock").write_text("2")
    commit = provenance.git_commit.__wrapped__()
    assert len(commit) == 40
    (tmp_path / "code.py").write_text("2")
    assert provenance.git_commit.__wrapped__() == f"{commit}-modified"
