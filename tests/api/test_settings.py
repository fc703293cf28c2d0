"""The arguments of the API are the settings of params.yaml: the same names, the same defaults."""

from __future__ import annotations

import inspect

import fedml_noniid as nd
from fedml_noniid import models
from fedml_noniid.api import settings
from fedml_noniid.data.partitions import PARTITIONS
from fedml_noniid.pipelines.experiment.config import (
    MachineSettings,
    Scenario,
    TrainSettings,
    read_yaml,
)
from fedml_noniid.plugins.registry import METHODS
from tests.pipelines.small import ROOT


def test_no_name_means_two_settings() -> None:
    """Arguments are flat, but params.yaml has sections: a name may stand in one of them only."""
    sections = {
        "data": {"validation", "public"},
        "scenario": set(Scenario.model_fields),
        "partition": {
            parameter.name
            for partition in PARTITIONS.values()
            for parameter in inspect.signature(partition).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        },
        "train": set(TrainSettings.model_fields),
        "machine": set(MachineSettings.model_fields),
        "method": set(METHODS),
        "own": {"recipe", "recipes", "data", "over", "seed", "progress", "folder"},
        "seeds": {"seeds"},
    }
    names = [name for own in sections.values() for name in own]
    assert not {name for name in names if names.count(name) > 1}
    assert set(settings.sections()) == set(names) - sections["own"]


def test_the_defaults_are_those_of_the_experiment() -> None:
    """Where params.yaml has to give a value, it is that of the default experiment."""
    required = {name for name, field in TrainSettings.model_fields.items() if field.is_required()}
    assert settings.TRAIN.keys() | {"model"} == required
    experiment = read_yaml(ROOT / "params.yaml")["train"]
    digits = {"model": models.model_for(nd.load("digits").dataset.train_x.shape[1:])}
    assert {key: experiment[key] for key in required} == settings.TRAIN | digits
