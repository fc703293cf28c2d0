"""Fingerprints: one hash over everything that a result depends on.

Also the facts of a run that change no result.

Code counts as its syntax tree without docstrings, so a comment changes nothing. Only imported files
count, and other files that code names beside itself, such as C++ and templates. Of the methods,
only those of the recipe count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedml_noniid import extras, own_code
from fedml_noniid.engines.device import facts, resolve_device
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.facts import of_cpu, readers
from fedml_noniid.pipelines.experiment.scenario import OF_RUN
from fedml_noniid.plugins import registry

ROOT = Path(__file__).parents[3]  # holds the package: the checkout, or site-packages
PACKAGE = "fedml_noniid"
REGISTRY = "fedml_noniid.plugins.registry"
# These count without their imports, but for each other: they name every method, data set and
# partition, or are imported only where they are used. What is used counts elsewhere.
LISTS = (
    REGISTRY,
    "fedml_noniid.pipelines.experiment.config",
    "fedml_noniid.pipelines.experiment.devices",
    "fedml_noniid.pipelines.experiment.embedding",
    "fedml_noniid.pipelines.experiment.left_out",
    "fedml_noniid.pipelines.experiment.scenario",
    "fedml_noniid.engines.local_training",
    "fedml_noniid.engines.metrics",
    "fedml_noniid.engines.run_settings",
    "fedml_noniid.losses",
    "fedml_noniid.rates",
)
# Modules that change no result: they only observe or move files.
NO_CODE = tuple(
    f"fedml_noniid.{name}"
    for name in (
        "pipelines.edge",
        "pipelines.experiment.cache",
        "pipelines.experiment.progress",
        "pipelines.experiment.provenance",
        "pipelines.experiment.workers",
        "pipelines.experiment.facts",
        "pipelines.experiment.workspace",
        "pipelines.tracking",
    )
)
SILO = "fedml_noniid.deploy"
EMBED = "fedml_noniid.models.embed"


def plan(
    settings: Config, user_files: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Stage -> output -> hash of the settings and the code that the output depends on.

    `user_files`: SHA-256 of the user's files by name, see `contents`; only the hash of `prepare`
    has them. The hashes leave out prepared data and earlier results. DVC tracks those as
    dependencies of the stages.
    """
    data = _read(settings)
    split = [settings.data.validation, settings.data.public]
    used = {name: settings.scenarios[name].model_dump() for name in settings.scenario_names}
    entries = {name: settings.recipes[name].model_dump() for name in settings.recipe_names}
    local = settings.train.model_dump()
    reported = [data, split, used, entries, settings.seeds, local, settings.experiment]
    cut = [code("fedml_noniid.pipelines.stages.partition"), kind_of(torch.device("cpu"), 1)]
    scenarios = {name: settings.scenarios[name].model_dump(exclude={*OF_RUN}) for name in used}
    prepared = preparing(settings, user_files)
    # Without some owners, the data are read anew.
    reads = {name: [prepared] * (settings.scenarios[name].unseen is not None) for name in used}
    owns = {name: settings.scenarios[name].own_code() for name in used}
    return {
        "machine": machine_kind(settings),
        "prepare": prepared,
        "partition": {
            f"{name}-{seed}": digest(scenarios[name], split, seed, *cut, owns[name], *reads[name])
            for name in used
            for seed in settings.seeds
        },
        "train": {unit.key: of_training(settings, unit) for unit in settings.units()},
        "evaluate": {"code": code("fedml_noniid.pipelines.stages.evaluate")},
        "report": {"all": digest(reported, code("fedml_noniid.pipelines.stages.report"))},
        "deploy": _deploying(settings, split),
    }


def preparing(settings: Config, user_files: Mapping[str, str] | None = None) -> dict[str, str]:
    """The entry `prepare` of `plan`."""
    made_of: list[object] = [_read(settings), user_files or {}, readers()]
    made_of += [code("fedml_noniid.pipelines.stages.prepare"), settings.data.reader_code()]
    embed = settings.data.embed
    if embed is not None:
        made_of += [embed.model_code(), machine_kind(settings), code(EMBED)]
    return {settings.data.name: digest(*made_of)}


def _read(settings: Config) -> dict[str, object]:
    """The settings that decide what is read; the rest of the section `data` decides what is held
    out."""
    return settings.data.model_dump(exclude={"validation", "public"})


def _deploying(settings: Config, split: list[float]) -> dict[str, str]:
    """The entry `deploy` of `plan`; empty without a deployment."""
    deploy = settings.deploy
    if deploy is None:
        return {}
    scenario = settings.scenarios[deploy.scenario]
    deployed = [
        *(deploy.model_dump(), scenario.model_dump(), scenario.own_code(), split),
        *(settings.train_of(deploy.recipe).model_dump(), settings.composition(deploy.recipe)),
        *(settings.recipes[deploy.recipe].settings, settings.own_code(deploy.recipe)),
        machine_kind(settings),
    ]
    modules = _modules(settings, deploy.recipe)
    stage = code("fedml_noniid.pipelines.stages.deploy", *modules, silo=True)
    return {deploy.recipe: digest(deployed, stage)}


def of_training(settings: Config, unit: Unit) -> str:
    """The hash of settings, code, versions and kind of machine of one item."""
    training = code("fedml_noniid.pipelines.experiment.training", *_modules(settings, unit.recipe))
    return digest(settings.params(unit), machine_kind(settings), training)


def training_fingerprint(
    settings: Config, unit: Unit, data: str | None, indices: str | None
) -> str:
    """The fingerprint of one item. `data`, `indices`: the SHA-256 of its files."""
    return digest(of_training(settings, unit), data, indices)


def machine_kind(settings: Config) -> dict[str, str]:
    """What decides about the bits of a training, beside its settings, code and data."""
    device = resolve_device(settings.train.device)
    at_once = settings.machine.clients_at_once
    asked = {} if at_once is None else {"clients_at_once": str(at_once)}
    return kind_of(device, settings.train.threads) | asked


def kind_of(device: torch.device, threads: int) -> dict[str, str]:
    """All facts of a machine and its libraries that may change what they compute.

    Fingerprints, the workers of a cluster and the certificate have this one list.
    """
    kind = {
        "device": device.type,
        "torch": torch.__version__,
        "numpy": np.__version__,  # draws partitions, cohorts, batches and first weights
        "python": ".".join(platform.python_version_tuple()[:2]),
        "threads": str(threads),
        # Measured: an AMD EPYC gives other bits than an Intel Xeon with the same instructions.
        "vendor": of_cpu("vendor_id"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    return kind | facts(device)


def digest(*parts: object) -> str:
    """SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def code(*modules: str, silo: bool = False) -> str:
    """The hash of our modules and all their imports.

    `silo`: whether the FedML pairs and `deploy` count too.
    """
    hashes = {
        path: _source(path).hash
        if path.suffix == ".py"
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files(*modules, silo=silo)
    }
    return digest({path.relative_to(ROOT).as_posix(): hashed for path, hashed in hashes.items()})


@cache
def files(*modules: str, silo: bool = False) -> tuple[Path, ...]:
    """The files of some modules and of all their imports, with the files that they name beside
    themselves."""
    paths: set[Path] = set()
    seen, todo = {"", PACKAGE}, list(modules)
    while todo:
        name = todo.pop()
        is_silo = name.startswith(SILO) or name.endswith(".pair")
        if name in seen or name.startswith(NO_CODE) or (is_silo and not silo):
            continue
        seen.add(name)
        if path := _file(name):
            source = _source(path)
            paths |= {path, *source.beside}
            # An import of a module also runs the packages around it.
            todo.append(name.rpartition(".")[0])
            todo += [other for other in source.imports if name not in LISTS or other in LISTS]
    return tuple(sorted(paths))


def _modules(settings: Config, recipe: str) -> list[str]:
    """Our modules that the methods of an entry are in. Of a method of another package, they are
    those that the package imports."""
    modules = []
    for kind in map(registry.method, settings.methods_of(recipe)):
        if kind.__module__.startswith(f"{PACKAGE}."):
            modules.append(kind.__module__)
        else:
            for top in own_code.packages_of(kind):
                for path in own_code.files_of(top, (".py",)):
                    modules += _source(path).imports
    return modules


def _file(name: str) -> Path | None:
    """The file of one of our modules or packages."""
    stem = ROOT.joinpath(*name.split("."))
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


class _Source(NamedTuple):
    """What counts of a Python file."""

    hash: str  # of its code
    imports: tuple[str, ...]  # our modules among its imports
    beside: tuple[Path, ...]  # files that are no modules, which it names, or whose folder it names


@cache
def _source(path: Path) -> _Source:
    """Parses a Python file. The registry counts without its imports and its table of methods."""
    tree, imports, texts = ast.parse(path.read_bytes()), list[str](), set[object]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            texts.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            del node.body[0]
    if path == _file(REGISTRY):
        names = ast.Import | ast.ImportFrom | ast.AnnAssign
        tree.body = [node for node in tree.body if not isinstance(node, names)]
    return _Source(
        hashlib.sha256(ast.dump(tree).encode()).hexdigest(),
        tuple(name for name in imports if name.split(".")[0] == PACKAGE),
        tuple(_beside(path, texts)),
    )


def _beside(path: Path, names: set[object]) -> Iterator[Path]:
    """The files beside a module that are no modules, and that have one of the names, themselves or
    their folder."""
    for neighbour in path.parent.iterdir():
        is_module = neighbour.suffix == ".py" or (neighbour / "__init__.py").exists()
        if neighbour.name in names and not is_module:
            yield from sorted(neighbour.iterdir()) if neighbour.is_dir() else (neighbour,)


@cache
def git_commit() -> str:
    """The commit, with "-modified" if a file of it has changed, but for dvc.lock, which a run
    writes.

    Outside a checkout the version of the package.
    """
    if not (ROOT / ".git").exists():
        return f"fedml-noniid {extras.version('fedml-noniid')}"
    try:
        outputs = [
            subprocess.run(["git", *command.split()], capture_output=True, check=True, cwd=ROOT)
            for command in ("rev-parse HEAD", "diff --name-only HEAD -- . :!dvc.lock")
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    commit, changed = (done.stdout.decode().strip() for done in outputs)
    return f"{commit}-modified" if changed else commit


def machine(device: torch.device) -> dict[str, str]:
    """The facts that a run's seconds depend on, beside its settings: processor, cores, versions."""
    return {
        "git_commit": git_commit(),
        "cpu": cpu(),
        **facts(device),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "fedml": extras.version("fedml"),
    }


def cpu() -> str:
    """The processor's model. "unknown CPU" if the system does not name it."""
    return of_cpu("model name")
