"""Checks that an experiment fits its data: what the stages would refuse is refused before the first
of them runs.

The data are read as stage `prepare` reads them, each partition is made, and each recipe is set up
with the model on the clients of a round, of one sample each. With devices, one client trains one
batch, to count bytes. Nothing is written or downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError, located, together
from fedml_noniid.data import datasets
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import Indices
from fedml_noniid.data.partitions import reads_samples
from fedml_noniid.data.readers.download import DownloadNeededError, forbidden
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.engines.device import be_deterministic, resolve_device
from fedml_noniid.engines.evaluation import check_measured
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Plan
from fedml_noniid.models.model import Model
from fedml_noniid.models.settings import build_network
from fedml_noniid.pipelines.experiment import check, config, left_out
from fedml_noniid.pipelines.experiment.config import FILE, Config
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.partitioning import assign
from fedml_noniid.pipelines.experiment.provenance import preparing
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import plan
from fedml_noniid.simulate import simulate

CLIENTS = 2  # of the trial at least; rFedAvg compares clients


def checked(workspace: Workspace) -> tuple[Config, list[str]]:
    """The settings of an experiment that its stages take, and notes on what could not be checked
    and on rounds in which nobody would be in time.

    UserError with a line per mistake.
    """
    settings, notes = config.load(workspace.root), list[str]()
    with together() as each:
        with each():
            if (workspace.root / "dvc.yaml").is_file():
                _deploys(read_yaml(workspace.root / "dvc.yaml"), settings)
        with each():
            check.check(settings)
            be_deterministic()
            with located("train", "device", source=FILE):
                resolve_device(settings.train.device)
            try:
                notes += fits(settings, *_prepared(workspace, settings))
                for name in settings.scenario_names:
                    if settings.scenarios[name].unseen is not None:
                        alone = {"scenario_names": [name], "deploy": None}
                        data = left_out.read(workspace, settings, name)
                        notes += fits(settings.model_copy(update=alone), data)
            except DownloadNeededError as error:
                notes.append(f"{error} by stage prepare; the data were not checked")
    return settings, notes


def fits(settings: Config, data: Dataset, is_outline: bool = False) -> list[str]:
    """UserError with every scenario, model and recipe that the data do not allow. Returns notes on
    rounds in which nobody would be in time.

    `is_outline`: zeros stand in place of the samples, so no partition that reads them is made.
    """
    partitions: dict[tuple[str, int], Indices] = {}
    shape, train = tuple(data.train_x.shape[1:]), settings.train
    with together(source=FILE) as checked:
        for name, seed in itertools.product(settings.scenario_names, settings.seeds):
            with checked():
                scenario = settings.scenarios[name]
                if scenario.unseen is not None and not data.unseen_names:
                    continue  # its data are others
                if is_outline and reads_samples(scenario.partition):
                    continue
                partitions[name, seed] = assign(data, settings.data, scenario, name, seed)
        network = None
        with checked("train"):
            network = build_network(train, shape, len(data.classes), data.embedding)
        for recipe in settings.recipe_names if network is not None else ():
            with checked("recipes", recipe):
                _set_up(settings, recipe, network, data)
    notes = []
    with together(source=FILE) as checked:
        for unit in settings.units():
            indices = partitions.get((unit.scenario, unit.seed))
            if indices is not None and settings.scenarios[unit.scenario].devices is not None:
                with checked("scenarios", unit.scenario):
                    simulation = Item.from_parts(settings, unit, data, indices).simulation()
                    if late := simulation.remarks.get("clock"):
                        notes.append(f"{unit.key}: {late}")
    for held in partitions.values() if settings.data.validation else ():
        with located("data", "validation", source=FILE):
            check_measured(train.built_loss, validation=data.train_y[held.validation])
    wanted = settings.deploy
    if wanted is not None:
        from fedml_noniid.pipelines.stages import deploy  # with gRPC, which few experiments need

        deploy.deployment_of(settings, wanted)
        if indices := partitions.get((wanted.scenario, wanted.seed)):
            deploy.divided(settings, wanted, data, indices)
    return notes


def _set_up(settings: Config, recipe: str, network: Model, data: Dataset) -> None:
    """Makes the run of a recipe on a few samples on the CPU, without a round of it.

    UserError for what it refuses.
    """
    train = settings.train_of(recipe)
    train.check(tuple(data.train_x.shape[1:]), resolve_device(settings.train.device))
    train = train.model_copy(update={"precision": "float32"})  # on the CPU, which has no tf32
    scenarios = [settings.scenarios[name] for name in settings.scenario_names]
    # A robust rule needs its cohort.
    n = min(max(scenario.cohort, min(CLIENTS, scenario.clients)) for scenario in scenarios)
    rows = np.arange(n) % len(data.train_y)
    samples = Samples(data.train_x[rows].to(torch.float32), data.train_y[rows])
    # Targets decide about the metrics.
    x = samples.x[:1].expand(len(data.test_y), *samples.x.shape[1:])
    test = Samples(x, data.test_y)
    clients: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]] = [
        np.array([k]) for k in range(n)
    ]
    public = samples if settings.data.public else None
    engine = "sequential" if train.engine == "auto" else train.engine
    memory_mb = settings.machine.memory_mb
    plan = Plan(network, train, train.rounds, n, 0, engine=engine, memory_mb=memory_mb)
    federation = Federation.from_indices(
        samples, clients, test, validation=test if settings.data.validation else None, public=public
    )
    methods = settings.recipes[recipe].settings
    simulate(
        settings.composition(recipe), methods, federation, plan, train.built_callbacks()
    ).loop.kept()


def _prepared(workspace: Workspace, settings: Config) -> tuple[Dataset, bool]:
    """The prepared data if they are those of the settings, otherwise what stage `prepare` would
    make, or its outline; whether it is one. UserError."""
    data, lock = settings.data, workspace.root / "dvc.lock"
    user = plan.contents(data.name, str(workspace.user_folder(data.root)), data.options)
    if lock.is_file() and workspace.dataset(data.name).is_file():
        content = plan.content(preparing(settings, user))
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        stages = read_yaml(lock).get("stages") or {}
        made_of = (stages.get("prepare") or {}).get("deps") or ()
        if any((part["path"], part["md5"]) == ("plan/prepare.json", md5) for part in made_of):
            return Dataset.read(workspace.dataset(data.name)), False
    with forbidden():
        dataset = datasets.load_once(data.name, workspace.user_folder(data.root), data.options)
    if data.embed is None:
        return dataset, False
    with located("data", "embed", source=FILE):
        return data.embed.outline(dataset), True


def _deploys(dvc: Mapping[str, object], settings: Config) -> None:
    """UserError unless dvc.yaml has the stage `deploy` exactly if params.yaml has its section."""
    stage = "deploy" in (dvc.get("stages") or ())  # type: ignore[operator]  # of a file
    if stage != (settings.deploy is not None):
        said, has = ("missing", "the") if stage else ("set", "no")
        raise UserError(
            f"{FILE}: deploy is {said}, but dvc.yaml has {has} stage deploy; {config.DEPLOYS}"
        )
