"""Stage deploy: runs one recipe with FedML cross-silo on this machine and in simulation ->
deploy/result.json.

A server and `deploy.silos` silos run as processes over gRPC. Each silo has a file with only its own
samples. The stage fails unless the final weights equal those of the sequential simulation, bit for
bit. Both run with everybody: a scenario's `availability` does not count here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedml_noniid.core.errors import KeyPath, Mistake, UserError, located
from fedml_noniid.data import partitions
from fedml_noniid.data.client_tests import client_tests
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.indices import INDICES, Indices, read_indices
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings as deployments
from fedml_noniid.deploy.settings import Deployment
from fedml_noniid.engines.cohort import cohort_size
from fedml_noniid.engines.run_settings import RunSettings
from fedml_noniid.models.settings import ModelSettings
from fedml_noniid.pipelines.experiment import cache, check, config
from fedml_noniid.pipelines.experiment.partitioning import skewed
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins import registry
from fedml_noniid.processes import loopback

log = logging.getLogger(__name__)


def run(workspace: Workspace) -> None:
    """Runs the silos and the simulation, compares the weights, writes both hashes."""
    settings = config.load(workspace.root)
    wanted = settings.deploy
    if wanted is None:
        raise UserError(f"{config.FILE}: deploy is missing; {config.DEPLOYS}")
    digest = loopback.compare(
        *prepared(workspace, settings), workspace.root / "deploy" / "stage", log.info
    )
    record = {**wanted.model_dump(), "deployed_sha256": digest, "simulated_sha256": digest}
    write_whole(workspace.root / "deploy" / "result.json", json.dumps(record, indent=2) + "\n")


def planned(root: Path, **options: object) -> config.Config:
    """The settings of params.yaml with a section `deploy`, all checked that needs no data.

    UserError, which names the option if the mistake is there.

    `options`: values in place of the section's, unless they are None. `recipe` may be an entry of
    `recipes` or any composition. A file without a section `deploy` has its first recipe, scenario
    and seed here, with at most three silos.
    """
    settings = config.load(root)
    name, scenario = settings.recipe_names[0], settings.scenario_names[0]
    silos = max(2, min(3, settings.scenarios[scenario].clients))
    usual = config.DeploySettings(
        recipe=name, scenario=scenario, seed=settings.seeds[0], silos=silos
    )
    overrides = {key: value for key, value in options.items() if value is not None}
    wanted = (settings.deploy or usual).model_dump() | overrides
    wanted["recipe"], content = registry.entry(wanted["recipe"])
    entries = {wanted["recipe"]: content} | settings.recipes
    named: dict[KeyPath, str] = {("deploy", key): f"--{key.replace('_', '-')}" for key in overrides}
    if "recipe" in overrides:
        named["recipes", wanted["recipe"]] = f"--recipe {wanted['recipe']}"
    try:
        raw = {**dict(settings), "recipes": entries, "deploy": wanted}
        settings = config.checked(raw, config.FILE)
        deploy = config.DeploySettings(**wanted)
        with located("recipes", deploy.recipe, source=config.FILE):
            algorithm = check.compose(settings, deploy.recipe, deploy.scenario, deployed=True)
            if deploy.secure_sums:
                owns = bool(algorithm.needs.personal) or algorithm.own_models
                deployments.refuse_what_reads_more(algorithm, owns)
        deployment_of(settings, deploy)
    except UserError as error:
        raise error.changed(lambda mistake: _of_option(mistake, named)) from error.__cause__
    return settings


def _of_option(mistake: Mistake, named: Mapping[KeyPath, str]) -> Mistake:
    """The mistake, of the option that its key comes from, if there is one."""
    option, rest = named.get(mistake.path[:2]), mistake.path[2:]
    return replace(mistake, path=(option, *rest), source="") if option else mistake


def prepared(workspace: Workspace, settings: config.Config) -> tuple[Deployment, Parts]:
    """The deployment of the section `deploy` with its data. UserError, also if the stages before
    have not run."""
    wanted = settings.deploy
    assert wanted is not None, "a stage has a section"
    cache.check(workspace.partition(wanted.scenario, wanted.seed))
    return deployment_of(settings, wanted), _parts(workspace, settings, wanted)


def deployment_of(settings: config.Config, wanted: config.DeploySettings) -> Deployment:
    """The settings of params.yaml as the configuration of the processes.

    UserError for what FedML does not take.
    """
    train = settings.train_of(wanted.recipe)
    share = settings.scenarios[wanted.scenario].participation
    shared = RunSettings.model_fields.keys() - {"optimizer", "lr"}
    content = {
        "common_args": {"random_seed": wanted.seed},
        "data_args": {"dataset": settings.data.name},
        "model_args": train.model_dump(include={*ModelSettings.model_fields}),
        "train_args": {
            "recipe": settings.composition(wanted.recipe),
            "settings": settings.recipes[wanted.recipe].settings,
            "rounds": wanted.rounds,
            "secure_sums": wanted.secure_sums,
            "cohort": cohort_size(share, wanted.silos),
            "client_num_in_total": wanted.silos,
            "client_num_per_round": wanted.silos,
            "client_optimizer": train.optimizer,
            "learning_rate": train.lr,
            **train.model_dump(include=shared),
        },
        "device_args": {"threads": train.threads},
    }
    try:
        return deployments.check(content, config.FILE)
    except UserError as error:  # it names FedML's sections
        raise error.changed(_of_params) from None


def _of_params(mistake: Mistake) -> Mistake:
    """The mistake, with its key in params.yaml."""
    section = "deploy" if mistake.path[1] in config.DeploySettings.model_fields else "train"
    return replace(mistake, path=(section, *mistake.path[1:]))


def _parts(workspace: Workspace, settings: config.Config, wanted: config.DeploySettings) -> Parts:
    """The scenario's partition.

    If its number of clients is not that of the silos: a new one of the same kind.
    """
    scenario = settings.scenarios[wanted.scenario]
    data = Dataset.read(workspace.dataset_of(settings, wanted.scenario, wanted.seed))
    indices = read_indices(workspace.partition(wanted.scenario, wanted.seed) / INDICES)
    if len(indices.clients) != wanted.silos:
        indices = divided(settings, wanted, data, indices)
    std = None if scenario.noise is None else scenario.noise.deviations(wanted.silos, data)
    return Parts.cut(data, indices, std)


def divided(
    settings: config.Config, wanted: config.DeploySettings, data: Dataset, indices: Indices
) -> Indices:
    """The samples of the clients, divided anew among the silos.

    UserError if the data can't be divided among so many.
    """
    scenario = settings.scenarios[wanted.scenario]
    try:
        held = indices.clients.flat
        clients = partitions.divided(
            scenario.partition, data, held, wanted.silos, wanted.seed, **scenario.options
        )
        tests = client_tests(data, clients, scenario.partition, wanted.seed)
        skew = skewed(scenario, data, clients, wanted.seed)
    except UserError as error:
        raise error.below(source=f"{config.FILE}: deploy.silos = {wanted.silos}") from None
    return replace(indices, clients=clients, test_clients=tests, skew=skew)
