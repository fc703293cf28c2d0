"""params.yaml as frozen, checked settings: every error at once, one line each."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from fedml_noniid.pipelines.experiment import facts
from fedml_noniid.pipelines.experiment.facts import Later
from fedml_noniid.plugins.core.errors import UserError, nearest, shown
from fedml_noniid.plugins.data import user_files
from fedml_noniid.plugins.data.checks import known, options_of, refusal
from fedml_noniid.plugins.data.partitions import PARTITIONS
from fedml_noniid.plugins.data.partitions.assigning import ZeroToOne
from fedml_noniid.plugins.data.yaml_files import read_yaml
from fedml_noniid.plugins.engines import absences
from fedml_noniid.plugins.engines.cohort import cohort_size
from fedml_noniid.plugins.own_code import look_in
from fedml_noniid.plugins.settings import (
    CHECKED,
    Count,
    CountOrNone,
    Decay,
    LearningRate,
    LocalSettings,
    Momentum,
    Section,
    mistakes,
    too_large,
    unless_checked,
)

# The modules that import torch are imported when settings are checked.
if TYPE_CHECKING:
    from torch import Tensor

    from fedml_noniid.plugins import models, recipes
    from fedml_noniid.plugins.data import datasets, drift, label_noise, noise, rotation
    from fedml_noniid.plugins.data.dataset import Dataset
    from fedml_noniid.plugins.engines import plan, simulation
    from fedml_noniid.plugins.engines.plan import LocalTraining
else:
    models, recipes = map(Later, ("models", "recipes"))
    datasets, drift, label_noise, noise, rotation = (
        Later(f"data.{name}") for name in ("datasets", "drift", "label_noise", "noise", "rotation")
    )
    plan, simulation = Later("engines.plan"), Later("engines.simulation")

FILE = "params.yaml"
DEPLOYS = (
    "`noniid init --deploy` makes a study with both, the section deploy of params.yaml "
    "and the stage of dvc.yaml"
)
SKEWS = (
    "noise",
    "label_noise",
    "rotation",
    "drift",
)  # of a scenario, beside the options of its partition
# A name is part of file names (at most 255 characters) and of DVC's parameter paths, where a dot
# separates keys.
LONGEST = 200  # bytes of the experiment's name
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_+-]+$", max_length=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class DataSettings(Section):
    """The data set; its reader's own options stand beside these keys."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    root: str = "data/raw"
    validation: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
    public: CountOrNone

    @field_validator("name")
    @classmethod
    @unless_checked
    def _known(cls, name: str) -> str:
        return known("data set", name, datasets.DATASETS)

    @model_validator(mode="after")
    @unless_checked
    def _fits(self) -> DataSettings:
        datasets.check(self.name, self.options)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of the data set's reader and those of all data sets.

        A null counts as not given.
        """
        return {key: value for key, value in (self.model_extra or {}).items() if value is not None}


class NoiseSettings(Section):
    """Gaussian noise on each client's samples: feature skew."""

    sigma: Annotated[
        float, Field(ge=0, allow_inf_nan=False)
    ]  # on the scale where pixels are 0 to 1
    form: str = "level"

    @field_validator("form")
    @classmethod
    @unless_checked
    def _known(cls, form: str) -> str:
        return known("form", form, noise.FORMS)

    def deviations(self, n_clients: int, data: Dataset) -> Tensor:
        """The standard deviation of each client's noise in normalised units, [N, ...].

        UserError for unfit data.
        """
        return noise.deviations(
            self.form, self.sigma, n_clients, tuple(data.train_x.shape[1:]), data.scale
        )

    def amounts(self, n_clients: int, data: Dataset) -> Tensor:
        """Each client's standard deviation on the scale of sigma, averaged over a sample, [N].

        UserError as above.
        """
        return noise.amounts(
            self.form, self.sigma, n_clients, tuple(data.train_x.shape[1:]), data.scale
        )


class LabelNoiseSettings(Section):
    """Wrong labels among each client's training samples."""

    rate: Annotated[
        float, Field(ge=0, le=1, allow_inf_nan=False)
    ]  # the probability that a label is wrong
    form: str = "equal"
    kind: str = "symmetric"

    @field_validator("form", "kind")
    @classmethod
    @unless_checked
    def _known(cls, value: str, info: Any) -> str:
        return known(
            info.field_name,
            value,
            {"form": label_noise.FORMS, "kind": label_noise.KINDS}[info.field_name],
        )

    @property
    def words(self) -> str:
        """`equal label noise, rate 0.2, symmetric`."""
        return f"{self.form} label noise, rate {self.rate:g}, {self.kind}"


class RotationSettings(Section):
    """An angle for each client's images: feature skew."""

    degrees: list[int]  # client i has the angle number i modulo their number

    @field_validator("degrees")
    @classmethod
    @unless_checked
    def _exact(cls, degrees: list[int]) -> list[int]:
        rotation.check(degrees)
        return degrees

    @property
    def words(self) -> str:
        """`images rotated by 0, 90 degrees`."""
        return f"images rotated by {', '.join(map(str, self.degrees))} degrees"


class DriftSettings(Section):
    """Concept drift: clients swap the labels of two classes from some round on."""

    at: Count  # the first round with other labels
    swap: list[
        list[int]
    ]  # client i swaps the pair number i modulo their number; an empty one swaps nothing
    kind: str = "sudden"
    # rounds from one group of clients to the next, or until the first labels come back
    every: Count | None = None

    @model_validator(mode="after")
    @unless_checked
    def _fits(self) -> DriftSettings:
        drift.check(self.kind, self.every, self.swap)
        return self

    @property
    def last(self) -> int:
        """The last round in which labels change."""
        steps = {"incremental": len(self.swap) - 1, "recurrent": 1}.get(self.kind, 0)
        return self.at + steps * (self.every or 0)

    @property
    def words(self) -> str:
        """`sudden drift from round 20, swapped classes 1-7, 3-4`."""
        pairs = ", ".join("-".join(map(str, pair)) or "none" for pair in self.swap)
        often = "" if self.every is None else f" every {self.every}"
        return f"{self.kind} drift from round {self.at}{often}, swapped classes {pairs}"


class AvailabilitySettings(Section):
    """The clients that are missing from rounds: at random, or as a file lists them."""

    # the share that misses a round
    rate: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    file: str | None = None  # relative to the experiment's root; columns as `absences.COLUMNS`
    _missing: absences.Missing | None = PrivateAttr(None)  # what the file lists, once it is read

    @model_validator(mode="after")
    def _one(self) -> AvailabilitySettings:
        if (self.rate is None) is (self.file is None):
            found = "both are" if self.file is not None else "neither is"
            raise UserError(f"one of rate and file is needed; {found} given")
        return self

    @model_serializer
    def _shown(self) -> dict[str, object]:
        """What is given; of a file also the hash of what it lists, so that items depend on it."""
        if self.file is None:
            return {"rate": self.rate}
        listed = None if self._missing is None else absences.text(self._missing)
        return {"file": self.file, "sha256": listed and hashlib.sha256(listed.encode()).hexdigest()}

    def read(self, root: Path, rounds: int, n_clients: int) -> None:
        """Reads the file, if there is one. UserError for its mistakes."""
        if self.file is not None:
            self._missing = absences.read(root / self.file, rounds, n_clients)

    def absent(self, seed: int) -> absences.Absent:
        """The clients that do not answer in a run with this seed."""
        if self.rate is not None:
            return absences.sometimes(self.rate, seed)
        assert self._missing is not None, "`load` reads the file"
        return absences.listed(self._missing)

    @property
    def words(self) -> str:
        """`20 % of the clients missing per round`."""
        if self.rate is not None:
            return f"{100 * self.rate:g} % of the clients missing per round"
        return f"clients missing as in {self.file}"


class Scenario(Section):
    """How the data are divided among the clients.

    The partition's own parameters stand beside these keys.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    partition: str
    clients: Count
    participation: Share = 1.0
    noise: NoiseSettings | None = None
    label_noise: LabelNoiseSettings | None = None
    rotation: RotationSettings | None = None
    drift: DriftSettings | None = None
    availability: AvailabilitySettings | None = None

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        partition = PARTITIONS[known("partition", self.partition, PARTITIONS)]
        # A key that resembles one of the scenario's own is a slip of it.
        meant = [
            name
            for name in type(self).model_fields
            if any(nearest(key, [name]) for key in self.options)
        ]
        options_of(partition, self.partition, self.options, meant)
        kinds = get_type_hints(partition, include_extras=True)
        # Finds mistakes before the first stage. Only the partition itself can check its parameters
        # on the data.
        allowed = {key: _instead(value, kinds[key]) for key, value in self.options.items()}
        wrong = [refusal(key, self.options[key], text) for key, text in allowed.items() if text]
        if wrong:
            raise UserError("\n".join(map(str, wrong)))
        if self.rotation is not None and len(self.rotation.degrees) > self.clients:
            raise refusal(
                "rotation.degrees",
                self.rotation.degrees,
                f"at most one angle per client, {self.clients}",
            )
        if self.drift is not None and len(self.drift.swap) > self.clients:
            raise refusal(
                "drift.swap", self.drift.swap, f"at most one pair per client, {self.clients}"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The partition's own parameters."""
        return dict(self.model_extra or {})

    @property
    def cohort(self) -> int:
        """M, clients per round."""
        return cohort_size(self.participation, self.clients)


class OwnTrain(Section):
    """The settings of `train` that an entry of `recipes` may have for itself.

    A null counts as not given.

    They cost neither computation nor traffic. All others are the same for all methods: data, model,
    rounds, local work.
    """

    lr: LearningRate | None = None
    momentum: Momentum | None = None
    weight_decay: Decay | None = None

    @model_validator(mode="before")
    @classmethod
    def _only(cls, values: object) -> object:
        own = list(cls.model_fields)
        for key in values if isinstance(values, dict) else ():
            if key not in own:
                raise UserError(
                    f"{key!r} can't be set for one recipe{nearest(str(key), own)}; allowed: "
                    f"{', '.join(own)}"
                )
        return values

    @property
    def given(self) -> dict[str, float]:
        """Key -> value."""
        return self.model_dump(exclude_none=True)


Values = dict[str, dict[str, Any]]  # "train" or a method -> key -> value
Axes = dict[str, dict[str, list[Any]]]  # the same with a list of values


class Tuned(Section):
    """How an entry's values were chosen. `noniid tune` writes it beside them."""

    chosen: Values
    trials: Count
    tried: Axes  # all values that the trials had
    diverged: CountOrNone = 0  # trials that ended without a model
    scenario: str
    seeds: Annotated[list[Seed], Field(min_length=1)]
    accuracy: float  # on the validation split after the last round, mean over seeds, a fraction
    runner_up: float | None  # the same of the second best; None if no other trial has a model
    samples: Count  # of the validation split
    settings: str  # hash of the other settings at that time


class Recipe(Section):
    """A method or composition with its hyper-parameters by method.

    `recipe` names it if the entry has another name.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    recipe: str | None = None
    train: OwnTrain = OwnTrain()
    tuned: Tuned | None = None

    @property
    def settings(self) -> dict[str, dict[str, object]]:
        """method -> hyper-parameter -> value."""
        return dict(self.model_extra or {})

    @property
    def values(self) -> Values:
        """All that it sets: its own training settings and its hyper-parameters."""
        every: Values = {"train": dict(self.train.given)}
        every |= {method: dict(keys) for method, keys in self.settings.items()}
        return {section: keys for section, keys in every.items() if keys}


class TrainSettings(LocalSettings):
    model: str
    model_options: dict[str, int | bool] = Field(default={})
    rounds: Count
    optimizer: str = "sgd"
    lr: LearningRate
    observe: bool = False
    engine: str = "auto"
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    evaluate_every: Count = 1
    portable: bool = False
    cuda_graphs: bool = False

    @field_validator("model", "optimizer", "engine", "device")
    @classmethod
    @unless_checked
    def _known(cls, value: str, info: Any) -> str:
        allowed = {
            "model": [*models.MODELS],
            "optimizer": [*plan.OPTIMIZERS],
            "engine": [*simulation.ENGINES],
            "device": [*simulation.DEVICES],
        }
        return known(info.field_name, value, allowed[info.field_name])

    @model_validator(mode="after")
    @unless_checked
    def _fits(self) -> TrainSettings:
        models.check(self.model, self.model_options)
        return self

    @property
    def local(self) -> LocalTraining:
        """What a client does in a round."""
        return replace(self.training(self.optimizer, self.lr), cuda_graphs=self.cuda_graphs)


class MachineSettings(Section):
    """How this machine runs the work. Nothing here changes a result."""

    memory_mb: Count = 2048
    checkpoint_every: Count = 5
    processes: Annotated[int, Field(ge=1, le=1024)] | None = None


class DeploySettings(Section):
    recipe: str
    scenario: str
    seed: Seed = 0
    silos: Annotated[int, Field(ge=2)] = 3
    rounds: Count = 2


class TuneSettings(Section):
    """What `noniid tune` tries: `grid` has the values of `train` for all recipes, and those of
    methods."""

    trials: Annotated[int, Field(ge=2)] | None = None  # per recipe; None: all points of its grid
    scenario: Name | None = None  # None: the first
    seeds: Annotated[list[Seed], Field(min_length=1)]  # none of the experiment's
    recipes: Annotated[list[Name], Field(min_length=1)] | None = None  # None: all of recipe_names
    grid: Annotated[Axes, Field(min_length=1)]

    @field_validator("grid")
    @classmethod
    @unless_checked
    def _values(cls, grid: Axes) -> Axes:
        errors: list[str] = []
        for section, keys in grid.items():
            known("section", section, ("train", *recipes.METHODS))
            for key, values in keys.items():
                if not values or any(values.count(value) > 1 for value in values):
                    errors.append(
                        f"{section}.{key} = {values!r} is refused; allowed: values, each of "
                        "them once"
                    )
                errors += [line for value in values for line in _refused(section, key, value)]
        if errors:
            raise UserError("\n".join(dict.fromkeys(errors)))
        return grid


class Config(Section):
    """The whole file."""

    experiment: str
    data: DataSettings
    scenario_names: Annotated[list[Name], Field(min_length=1)]
    scenarios: dict[Name, Scenario]
    recipe_names: Annotated[list[Name], Field(min_length=1)]
    recipes: dict[Name, Recipe]
    seeds: Annotated[list[Seed], Field(min_length=1)]
    train: TrainSettings
    machine: MachineSettings = MachineSettings()
    deploy: DeploySettings | None = None
    tune: TuneSettings | None = None
    _facts: dict[str, Any] = PrivateAttr(default_factory=dict)  # see `experiment.facts`

    @field_validator("experiment")
    @classmethod
    def _file_name(cls, name: str) -> str:
        """It is part of the names of MLflow's files."""
        if (
            not name.isprintable()
            or set("/\\") & set(name)
            or not 1 <= len(name.encode()) <= LONGEST
        ):
            raise UserError(
                f"{shown(name)} is refused; allowed: a name without slashes, at most {LONGEST} "
                "bytes"
            )
        return name

    @field_validator("scenarios", "recipes", mode="before")
    @classmethod
    def _empty(cls, entries: object) -> object:
        """`name:` with nothing behind it is an entry without settings."""
        return (
            {key: value or {} for key, value in entries.items()}
            if isinstance(entries, dict)
            else entries
        )

    @field_validator("recipes")
    @classmethod
    @unless_checked
    def _recipes(cls, entries: dict[str, Recipe]) -> dict[str, Recipe]:
        checked = {
            name: _mistakes(entry.recipe or name, entry.settings) for name, entry in entries.items()
        }
        errors = [f"{name}: {error}" for name, found in checked.items() for error in found]
        if errors:
            raise UserError("\n".join(errors))
        return entries

    @model_validator(mode="after")
    def _names(self) -> Config:
        errors = _unknown("scenario_names", self.scenario_names, self.scenarios)
        errors += _unknown("recipe_names", self.recipe_names, self.recipes)
        if self.deploy is not None:
            errors += self._undeployable(self.deploy)
        lists: dict[str, list[Any]] = {
            "scenario_names": self.scenario_names,
            "recipe_names": self.recipe_names,
            "seeds": self.seeds,
        }
        if self.tune is not None:
            lists |= {"tune.recipes": self.tune.recipes or [], "tune.seeds": self.tune.seeds}
            errors += self._untunable(self.tune)
        for key, values in lists.items():
            twice = [str(value) for value in dict.fromkeys(values) if values.count(value) > 1]
            if twice:
                errors.append(f"{key}: {', '.join(twice)} is named twice; allowed: once")
        if errors:
            raise UserError("\n".join(errors))
        return self

    def _undeployable(self, deploy: DeploySettings) -> list[str]:
        """The mistakes of `deploy` that only the other sections show."""
        # A deployment needs the partition of another stage.
        errors = _unknown("deploy.scenario", [deploy.scenario], self.scenario_names)
        errors += _unknown("deploy.recipe", [deploy.recipe], self.recipes)
        if deploy.seed not in self.seeds:
            errors.append(
                f"deploy.seed = {deploy.seed} is refused; allowed: "
                f"{', '.join(map(str, self.seeds))}"
            )
        scenario = self.scenarios.get(deploy.scenario)
        if scenario is not None and deploy.silos > max(2, scenario.clients):
            most = f"2 to {scenario.clients}, the clients of scenario {deploy.scenario!r}"
            errors.append(f"deploy.silos = {deploy.silos} is refused; allowed: {most}")
        return errors

    def _untunable(self, tune: TuneSettings) -> list[str]:
        """The mistakes of `tune` that only the other sections show."""
        errors = _unknown("tune.scenario", [tune.scenario] if tune.scenario else [], self.scenarios)
        errors += _unknown("tune.recipes", tune.recipes or [], self.recipes)
        shared = [str(seed) for seed in tune.seeds if seed in self.seeds]
        if shared:
            errors.append(
                f"tune.seeds: {', '.join(shared)} is refused, as `seeds` has it too; allowed: "
                "other seeds"
            )
        return errors

    @property
    def own_files(self) -> bool:
        """Whether results depend on files of the user: on own data, or on a file of missing
        clients."""
        scenarios = [self.scenarios[name].availability for name in self.scenario_names]
        own = self.data.name in user_files.OF_USER or any(
            given is not None and given.file for given in scenarios
        )
        return own or any(map(self.own_code, self.recipe_names))

    def late(self) -> list[str]:
        """A line for each drift that would go on after the last round."""
        drifts = {name: self.scenarios[name].drift for name in self.scenario_names}
        return [
            f"scenarios.{name}.drift: labels change until round {given.last}; allowed: until "
            f"{self.train.rounds}, the "
            "last round"
            for name, given in drifts.items()
            if given is not None and given.last > self.train.rounds
        ]

    def composition(self, recipe: str) -> str:
        """The recipe that an entry stands for."""
        return self.recipes[recipe].recipe or recipe

    def train_of(self, recipe: str) -> TrainSettings:
        """`train` with the values that an entry has for itself."""
        own = self.recipes[recipe].train
        return (
            self.train.model_copy(update={key: getattr(own, key) for key in own.given})
            if own.given
            else self.train
        )

    def own_code(self, recipe: str) -> dict[str, str]:
        """The classes of the user's own that an entry trains with: name -> SHA-256 of their
        source."""
        train = self.train_of(recipe)
        return train.own_code(train.lr)

    def methods_of(self, recipe: str) -> dict[str, Method]:
        """The methods of an entry, by name."""
        composition = self.composition(recipe)
        known = self.facts["methods"] if self.facts else facts.methods([composition])
        return {name: Method(*about) for name, about in known[composition].items()}

    @property
    def facts(self) -> dict[str, Any]:
        """What only torch can tell. Empty if it has to be asked."""
        return self._facts

    def units(self) -> list[Unit]:
        """All items, ordered by seed, so that the first items already fill a table."""
        return [
            Unit(scenario, recipe, seed)
            for seed in self.seeds
            for scenario in self.scenario_names
            for recipe in self.recipe_names
        ]

    def params(self, unit: Unit) -> dict[str, object]:
        """All settings that determine an item's result, flat.

        MLflow shows them, and the fingerprint covers them.
        """
        sections: dict[str, Mapping[str, object]] = {
            "data": self.data.model_dump(exclude={"root"}),
            "scenario": self.scenarios[unit.scenario].model_dump(),
            "train": self.train_of(unit.recipe).model_dump(),
            **self.recipes[unit.recipe].settings,
        }
        flat: dict[str, object] = unit._asdict() | {"composition": self.composition(unit.recipe)}
        if own := self.own_code(unit.recipe):
            flat["own_code"] = own
        for section, values in sections.items():
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        return flat


class Method(NamedTuple):
    """A method of a recipe."""

    module: str
    defaults: dict[str, object]  # of its hyper-parameters


class Unit(NamedTuple):
    """An item of the experiment, by name."""

    scenario: str
    recipe: str  # name of the entry in params.yaml
    seed: int

    @property
    def key(self) -> str:
        """The item's name in folders and MLflow."""
        return f"{self.scenario}-{self.recipe}-{self.seed}"


def _unknown(key: str, names: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """A line for each of `names` that is not among `allowed`."""
    there = list(allowed)
    return [
        f"{key}: {name!r} is unknown{nearest(name, there)}; allowed: {', '.join(there)}"
        for name in names
        if name not in there
    ]


def _instead(value: object, kind: object) -> str | None:
    """The allowed values of a partition's parameter in words, or None if `value` is allowed."""
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else ", ".join(get_args(kind))
    if value is None and NoneType in get_args(kind):
        return None
    if not {int, float} & {kind, *get_args(kind)}:
        return None
    number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )
    if kind == ZeroToOne:
        return None if number and 0 <= cast(float, value) <= 1 else "a number from 0 to 1"
    return None if number and cast(float, value) > 0 else "a number above 0"


def _mistakes(recipe: str, settings: Mapping[str, object]) -> list[str]:
    """All errors of one entry of `recipes`. `check_settings` stops at the first."""
    pieces: list[recipes.Settings] = [{}]
    found = []
    for method, values in settings.items():
        if isinstance(values, dict):
            pieces += [{method: {key: value}} for key, value in values.items()] or [{method: {}}]
        else:
            found.append(
                f"recipe {recipe!r}: {method} = {values!r} is refused; allowed: "
                f"{{hyper-parameter: value}}"
            )
    for piece in pieces:
        try:
            recipes.check_settings(recipe, piece)
        except UserError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _refused(section: str, key: str, value: object) -> list[str]:
    """The errors of one value of a grid."""
    if section != "train":
        return _mistakes(section, {section: {key: value}})
    try:
        OwnTrain.model_validate({key: value})
    except ValidationError as error:
        return [
            f"train{'.' if line.startswith(key) else ': '}{line}" for line in mistakes(error, {})
        ]
    return []


def load(root: Path) -> Config:
    """Reads and checks params.yaml in `root`, and the files that it names.

    UserError with one line per error.
    """
    look_in(root)
    content = read_yaml(root / FILE, f"allowed keys: {', '.join(Config.model_fields)}")
    known = facts.read(root, content)
    CHECKED.set(bool(known))
    try:
        settings = checked(content, FILE)
    finally:
        CHECKED.set(False)
    settings._facts = known
    errors = []
    for name in settings.scenario_names:
        scenario = settings.scenarios[name]
        if scenario.availability is not None:
            try:
                scenario.availability.read(root, settings.train.rounds, scenario.clients)
            except UserError as error:
                errors.append(f"{FILE}: scenarios.{name}.availability.file: {error}")
    if errors:
        raise UserError("\n".join(errors))
    if not known:
        facts.write(root, content, map(settings.composition, settings.recipes))
    return settings


def checked(content: Mapping[str, Any], name: str) -> Config:
    """Checks settings that were read from a file called `name`.

    UserError with one line per error.
    """
    try:
        settings, wrong = Config.model_validate(content), too_large(content)
    except ValidationError as error:
        wrong = mistakes(error, SECTIONS)
    if wrong:
        raise UserError("\n".join(f"{name}: {line}" for line in wrong))
    return settings


SECTIONS: dict[str, type[BaseModel]] = {
    "": Config,
    "data": DataSettings,
    "train": TrainSettings,
    "machine": MachineSettings,
    "deploy": DeploySettings,
    "noise": NoiseSettings,
    "label_noise": LabelNoiseSettings,
    "rotation": RotationSettings,
    "drift": DriftSettings,
    "availability": AvailabilitySettings,
    "tune": TuneSettings,
    "tuned": Tuned,
}
