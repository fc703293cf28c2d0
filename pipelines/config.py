"""params.yaml as frozen, checked settings: every error at once, one line each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from plugins import models, recipes
from plugins.core.errors import UserError, nearest
from plugins.core.optimizers import OPTIMIZERS
from plugins.data.checks import known, options_of
from plugins.data.datasets import DATASETS
from plugins.data.partitions import PARTITIONS
from plugins.engines.clients import LocalTraining
from plugins.engines.simulation import DEVICES, ENGINES

FILE = "params.yaml"
# Part of file names and of DVC's addresses of parameters, in which a dot separates keys.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_+-]+$")]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A section of params.yaml: unknown keys and values of the wrong kind are errors, nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class DataSettings(Section):
    name: str
    root: str = "data/raw"
    size: list[int] | None = None
    validation: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1
    public: Annotated[int, Field(ge=0)] = 0

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return known("data set", name, DATASETS)

    @property
    def options(self) -> dict[str, object]:
        """What the data set's loader takes beside the folder."""
        return {} if self.size is None else {"size": self.size}


class Scenario(Section):
    """How the data lie with the clients; the partition's own parameters stand beside these keys."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    partition: str
    clients: Count
    participation: Share = 1.0

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        options_of(PARTITIONS[known("partition", self.partition, PARTITIONS)], self.partition, self.options)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The partition's own parameters."""
        return dict(self.model_extra or {})

    @property
    def cohort(self) -> int:
        """m = max(1, round(C N)), clients per round."""
        return max(1, round(self.participation * self.clients))


class Recipe(Section):
    """A method or composition with its hyper-parameters, by method; `recipe` where the entry's name is another."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    recipe: str | None = None

    @property
    def settings(self) -> dict[str, dict[str, object]]:
        """method -> hyper-parameter -> value."""
        return dict(self.model_extra or {})


class TrainSettings(Section):
    model: str
    model_options: dict[str, int | bool] = {}
    rounds: Count
    epochs: Count
    batch_size: Count
    optimizer: str = "sgd"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    engine: str = "auto"
    device: str = "auto"
    threads: Count = 1
    memory_mb: Count = 2048
    checkpoint_every: Count = 5
    evaluate_every: Count = 1

    @field_validator("optimizer", "engine", "device")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        allowed = {"optimizer": tuple(OPTIMIZERS), "engine": ENGINES, "device": DEVICES}[info.field_name]
        return known(info.field_name, value, allowed)

    @model_validator(mode="after")
    def _fits(self) -> TrainSettings:
        models.check(self.model, self.model_options)
        return self

    @property
    def local(self) -> LocalTraining:
        """What a client does in a round."""
        return LocalTraining(self.optimizer, self.lr, self.epochs, self.batch_size, self.momentum, self.weight_decay)


class DeploySettings(Section):
    recipe: str
    scenario: str
    seed: Annotated[int, Field(ge=0)] = 0
    silos: Annotated[int, Field(ge=2)] = 3
    rounds: Count = 2


class Config(Section):
    """The whole file."""

    experiment: Annotated[str, Field(min_length=1)]
    data: DataSettings
    scenario_names: Annotated[list[Name], Field(min_length=1)]
    scenarios: dict[Name, Scenario]
    recipe_names: Annotated[list[Name], Field(min_length=1)]
    recipes: dict[Name, Recipe]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    train: TrainSettings
    deploy: DeploySettings

    @field_validator("scenarios", "recipes", mode="before")
    @classmethod
    def _empty(cls, entries: object) -> object:
        """`name:` with nothing behind it is an entry without settings."""
        return {key: value or {} for key, value in entries.items()} if isinstance(entries, dict) else entries

    @field_validator("recipes")
    @classmethod
    def _recipes(cls, entries: dict[str, Recipe]) -> dict[str, Recipe]:
        for name, entry in entries.items():
            for method, values in entry.settings.items():
                if not isinstance(values, dict):
                    raise UserError(f"{name}.{method}: {values!r} must be a mapping of hyper-parameters")
            recipes.check_settings(entry.recipe or name, entry.settings)
        return entries

    @model_validator(mode="after")
    def _names(self) -> Config:
        for key, names, entries in (
            ("scenario_names", self.scenario_names, self.scenarios),
            ("recipe_names", self.recipe_names, self.recipes),
            ("deploy.scenario", [self.deploy.scenario], self.scenarios),
            ("deploy.recipe", [self.deploy.recipe], self.recipes),
        ):
            for name in names:
                known(f"{key}:", name, entries)
        for key, values in (("scenario_names", self.scenario_names), ("recipe_names", self.recipe_names)):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise UserError(f"{key}: {', '.join(twice)} named twice; allowed: each name once")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds: {self.seeds} names a seed twice; allowed: each seed once")
        return self

    def composition(self, recipe: str) -> str:
        """The recipe that an entry stands for."""
        return self.recipes[recipe].recipe or recipe


def root() -> Path:
    """The repository. DVC runs queued experiments in copies, where the current folder is the right one."""
    return Path.cwd()


def store() -> Path:
    """Where MLflow's store lies: always in the repository itself, also when DVC runs a copy."""
    return Path(os.environ.get("DVC_ROOT") or Path.cwd())


def load(path: Path | None = None) -> Config:
    """Reads and checks params.yaml. UserError with one line per error."""
    path = path or root() / FILE
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(
            f"{path.name}: can't be read ({error.strerror or error}); it belongs into {path.parent}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.name}: holds no settings; allowed keys: {', '.join(Config.model_fields)}")
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(f"{path.name}: {_line(e)}" for e in error.errors(include_url=False))) from None


SECTIONS: dict[str, type[BaseModel]] = {"data": DataSettings, "train": TrainSettings, "deploy": DeploySettings}


def _line(error: Any) -> str:
    """One error of pydantic as key, value, and what is allowed."""
    key = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        allowed = list(SECTIONS.get(str(error["loc"][0]), Config).model_fields)
        return f"unknown key {key!r}{nearest(str(error['loc'][-1]), allowed)}; allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key} = {error['input']!r} is refused: {message}"
