"""params.yaml as frozen, checked settings. A UserError has every mistake of the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from fedml_noniid.core.errors import UserError, located, together
from fedml_noniid.core.options import (
    MOST,
    Below1,
    Count,
    CountOrNone,
    Momentum,
    NonNegative,
    OneOf,
    OpenSection,
    Positive,
    Range,
    Section,
    Seed,
    check_options,
    unknown,
    validated,
)
from fedml_noniid.data import datasets
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.engines import callbacks, memory, simulation
from fedml_noniid.engines.device import DEVICES
from fedml_noniid.engines.local_training import LearningRate
from fedml_noniid.engines.run_settings import RunSettings, filled
from fedml_noniid.models import factories
from fedml_noniid.models.embed import EmbedSettings
from fedml_noniid.models.settings import ModelSettings
from fedml_noniid.own_code import (
    defaults_by_name,
    defaults_of,
    is_own,
    look_in,
    names_code,
    source_of,
)
from fedml_noniid.pipelines.experiment.scenario import SKEWS as SKEWS
from fedml_noniid.pipelines.experiment.scenario import Scenario as Scenario
from fedml_noniid.pipelines.experiment.workspace import refuse_without
from fedml_noniid.plugins import registry

FILE = "params.yaml"
RECORDS = "tuned.yaml"  # beside it: how values were chosen
DEPLOYS = (
    "`noniid init --deploy` makes an experiment with both, the section deploy of params.yaml "
    "and the stage of dvc.yaml"
)
LONGEST = 200  # bytes of the experiment's name


def _name(value: str) -> str:
    """It is part of file names and of DVC's parameter paths, where a dot separates keys."""
    if not (value.isascii() and value.translate(dict.fromkeys(b"_+-")).isalnum()):
        allowed = "letters, digits, '_', '+', '-' (DVC splits at dots; a path is for `recipe:`)"
        raise UserError(value=value, allowed=allowed)
    if len(value) > LONGEST_NAME:
        raise UserError(value=value, allowed=f"at most {LONGEST_NAME} characters")
    return value


def _file_name(name: str) -> str:
    """It is part of the names of MLflow's files."""
    if not name.isprintable() or {*name} & {*"/\\"} or not 1 <= len(name.encode()) <= LONGEST:
        raise UserError(value=name, allowed=f"a name without slashes, at most {LONGEST} bytes")
    return name


LONGEST_NAME = 100  # characters of a scenario's or an entry's name
Name = Annotated[str, AfterValidator(_name)]
Names = Annotated[list[Name], Field(min_length=1)]
Seeds = Annotated[list[Seed], Field(min_length=1)]
Silos = Annotated[int, Range(2, MOST)]


def _dataset(name: str) -> str:
    datasets.find(name)
    return name


class DataSettings(OpenSection):
    """The data set; its reader's own options stand beside these keys."""

    name: Annotated[str, AfterValidator(_dataset)]
    root: str = "data/raw"
    validation: Below1
    public: CountOrNone
    # a frozen network turns the samples into vectors
    embed: EmbedSettings | None = Field(default=None, exclude_if=lambda value: value is None)

    @model_validator(mode="after")
    def _fits(self) -> DataSettings:
        datasets.check(self.name, self.options, type(self).model_fields)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of the data set's reader and those of all data sets.

        A null counts as not given.
        """
        return {key: value for key, value in super().options.items() if value is not None}

    @property
    def resolved(self) -> dict[str, Any]:
        """Returns the settings of the data set, defaults too, without its folder. Data that Python
        holds have no reader."""
        is_read = self.name in datasets.DATASETS or names_code(self.name)
        shared = defaults_of(datasets.Preprocessing) if is_read else {}
        options = defaults_by_name(self.name, datasets.DATASETS) | shared
        for key in datasets.LATER if self.name in datasets.DATASETS else ():
            options.pop(key, None)
        return options | self.model_dump(exclude={"root"}, exclude_none=True)

    def reader_code(self) -> dict[str, str]:
        """The user's reader, if it is his own: name -> SHA-256 of its source."""
        return {self.name: source_of(self.name)} if is_own(self.name) else {}

    def own_code(self) -> dict[str, str]:
        """The user's code that the data depend on: the reader, and the network of `embed`."""
        return self.reader_code() | ({} if self.embed is None else self.embed.model_code())


class RecipeTraining(Section):
    """The settings of `train` that an entry of `recipes` may have for itself.

    A null counts as not given. They cost neither computation nor traffic. All others are the same
    for all methods: data, model, rounds, local work.
    """

    lr: LearningRate | None = None
    momentum: Momentum | None = None
    weight_decay: NonNegative | None = None

    @property
    def overrides(self) -> dict[str, float]:
        """Key -> value."""
        return self.model_dump(exclude_none=True)


Values = dict[str, dict[str, Any]]  # "train" or a method -> key -> value
Axes = dict[str, dict[str, list[Any]]]  # the same with a list of values


class Tuned(Section):
    """How an entry's values were chosen. `noniid tune` writes it into tuned.yaml."""

    chosen: Values
    trials: Count
    extended: CountOrNone = 0  # those of them that lie beyond the grid
    tried: Axes  # all values that the trials had
    diverged: CountOrNone = 0  # trials that ended without a model
    scenario: str
    seeds: Seeds
    metric: str  # of the two numbers below
    # mean validation loss, which chose them; None: an earlier release chose by the metric
    loss: float | None = None
    validation: float  # on the validation split after the last round, mean over seeds
    runner_up: float | None  # the same of the second best; None if no other trial has a model
    samples: Count  # of the validation split
    settings: str  # hash of the other settings at that time


class Recipe(OpenSection):
    """A method or composition with its hyper-parameters by method.

    `recipe` names it if the entry has another name.
    """

    recipe: str | None = None
    train: RecipeTraining = RecipeTraining()
    tuned: Tuned | None = None

    @property
    def settings(self) -> dict[str, dict[str, object]]:
        """method -> hyper-parameter -> value."""
        return self.options

    @property
    def values(self) -> Values:
        """All that it sets: its training settings and its hyper-parameters."""
        every: Values = {"train": dict(self.train.overrides)}
        every |= {method: dict(keys) for method, keys in self.settings.items()}
        return {section: keys for section, keys in every.items() if keys}


SAVED = "all", "trained"


class TrainSettings(RunSettings, ModelSettings):
    """How all recipes train."""

    rounds: Count
    # virtual seconds at which a run ends, in place of its last rounds
    until_s: Positive | None = Field(default=None, exclude_if=lambda value: value is None)
    observe: bool = False
    engine: Annotated[str, OneOf(lambda: simulation.ENGINES)] = "auto"
    device: Annotated[str, OneOf(lambda: DEVICES)] = "auto"
    threads: Annotated[int, Range(1, 256)] = 1
    evaluate_every: Count = 1
    # What model.safetensors has: all parameters, or those that are not frozen.
    save: Annotated[str, OneOf(lambda: SAVED)] = Field(
        default="all", exclude_if=lambda value: value == "all"
    )

    @property
    def resolved(self) -> dict[str, Any]:
        """All settings, with the defaults of what stands in them: of the network, the optimiser,
        the schedule, the loss, callbacks and metrics."""
        values = self.model_dump() | {"momentum": self.build().momentum}
        of_model = defaults_by_name(self.model, factories.MODELS, factories.FACTS)
        values["model_options"] = of_model | self.model_options
        for key, kind in (("lr", type(self.rate)), ("loss", type(self.built_loss))):
            if isinstance(values.get(key), Mapping):
                values[key] = defaults_of(kind) | values[key]
        for key, ours in (("callbacks", callbacks.CALLBACKS), ("metrics", {})):
            for name, options in values.get(key, {}).items():
                values[key][name] = defaults_by_name(name, ours) | options
        return values

    def own_code(self) -> dict[str, str]:
        """The user's code and files that a run depends on: name -> SHA-256."""
        return super().own_code() | self.model_code()


class MachineSettings(Section):
    """How this machine runs the work. Nothing here changes a result, but `clients_at_once` may
    change its last bits: torch multiplies batches of another size otherwise. So it is in the
    fingerprint."""

    clients_at_once: Annotated[int, Range(1, 1_000_000)] | None = None
    memory_mb: Count = 2048
    clients_memory: Annotated[str, OneOf(lambda: memory.FORMS)] = "auto"
    checkpoint_every: Count = 5
    processes: Annotated[int, Range(1, 1024)] | None = None


class DeploySettings(Section):
    """The run that FedML repeats as processes."""

    recipe: str
    scenario: str
    seed: Seed = 0
    silos: Silos = 3
    rounds: Count = 2
    secure_sums: CountOrNone = 0  # silos of the smallest sum that the server sees; 0: all uploads


def _grid(grid: Axes) -> Axes:
    """Values of `train` for all recipes, and of methods, that can be tried."""
    kinds: dict[str, type] = {"train": RecipeTraining, **registry.loaded()}
    with together() as checked:
        for section, keys in grid.items():
            with checked():
                unknown((section,), section, kinds)
            for key, values in keys.items():
                with checked(section, key):
                    if not values or any(values.count(value) > 1 for value in values):
                        raise UserError(value=values, allowed="values, each of them once")
                for value in values if section in kinds else ():
                    with checked(section):
                        check_options(kinds[section], {key: value})
    return grid


Grid = Annotated[Axes, Field(min_length=1), AfterValidator(_grid)]


class SearchSettings(Section):
    """Where a search looks."""

    scenario: Name | None = None  # None: the first
    recipes: Names | None = None  # None: all of recipe_names; FedAvg always takes part in `choose`


class TuneSettings(SearchSettings):
    """What `noniid tune` tries: `grid` has the values of `train` for all recipes, and those of
    methods."""

    trials: Annotated[int, Range(2, MOST)] | None = None  # per recipe; None: its whole grid
    seeds: Seeds  # none of the experiment's
    grid: Grid


class ChooseSettings(SearchSettings):
    """What `noniid choose` tries, and how many recipes it compares with FedAvg."""

    grid: Grid | None = None  # None: a third of train.lr, train.lr, three times train.lr
    seeds: Seeds = Field(default_factory=lambda: [1000, 1001, 1002])  # of the search
    fresh: Seeds = Field(default_factory=lambda: [*range(2000, 2005)])  # of the final
    finalists: Annotated[int, Range(1, 100)] = 2  # recipes that meet FedAvg in the final

    @model_validator(mode="after")
    def _apart(self) -> ChooseSettings:
        """The final has seeds of its own, which chose nothing."""
        for key, seeds, others in (("seeds", self.seeds, []), ("fresh", self.fresh, self.seeds)):
            shared = [seed for seed in seeds if seed in others or seeds.count(seed) > 1]
            if shared:
                twice = ", ".join(map(str, dict.fromkeys(shared)))
                raise UserError(f"{twice} is named twice", path=(key,), allowed="once")
        if len(self.fresh) < 2:
            raise UserError(path=("fresh",), value=self.fresh, allowed="two seeds or more")
        return self


class Config(Section):
    """The whole file."""

    experiment: Annotated[str, AfterValidator(_file_name)]
    data: DataSettings
    scenario_names: Names
    scenarios: Annotated[dict[Name, Scenario], BeforeValidator(filled)]
    recipe_names: Names
    recipes: Annotated[dict[Name, Recipe], BeforeValidator(filled)]
    seeds: Seeds
    train: TrainSettings
    machine: MachineSettings = MachineSettings()
    deploy: DeploySettings | None = None
    tune: TuneSettings | None = None
    choose: ChooseSettings | None = None

    @field_validator("recipes")
    @classmethod
    def _recipes(cls, entries: dict[str, Recipe]) -> dict[str, Recipe]:
        with together() as checked:
            for name, entry in entries.items():
                with checked(name):
                    registry.check_settings(entry.recipe or name, entry.settings)
        return entries

    @model_validator(mode="after")
    def _names(self) -> Config:
        """The mistakes that only several sections show."""
        with together() as checked:
            for path, names, allowed in self._lists():
                for number, name in enumerate(names):
                    with checked():
                        unknown((*path, number) if len(names) > 1 else path, name, allowed)
                twice = dict.fromkeys(str(name) for name in names if names.count(name) > 1)
                with checked(*path):
                    if twice:
                        raise UserError(f"{', '.join(twice)} is named twice", allowed="once")
            for path, seeds in self._other_seeds():
                shared = [str(seed) for seed in seeds if seed in self.seeds]
                with checked(*path):
                    if shared:
                        raise UserError(
                            f"{', '.join(shared)} is refused, as `seeds` has it too",
                            allowed="other seeds",
                        )
            methods = {method for name in self.recipes for method in self.methods_of(name)}
            for key, tried in (("tune", self.tune), ("choose", self.choose)):
                for method in ((tried and tried.grid) or {}).keys() - methods - {"train"}:
                    with checked(key, "grid", method):
                        allowed = ", ".join(("train", *sorted(methods)))
                        raise UserError("is a method of no entry of recipes", allowed=allowed)
            pairs = {unit[:2] for unit in self.units()}
            keys = ["-".join(pair) for pair in pairs]  # `Unit.key` without the seed
            with checked("recipe_names"):
                if same := sorted({key for key in keys if keys.count(key) > 1}):
                    raise UserError(
                        f"{', '.join(same)} would be two items, as scenario-recipe",
                        allowed="other names",
                    )
            with checked("deploy"):
                self._deployable()
            with checked("train"):
                known = [k for k in self.scenario_names if k in self.scenarios]
                timeless = [k for k in known if self.scenarios[k].devices is None]
                if self.train.until_s is not None and timeless:
                    raise UserError(
                        f"scenario {timeless[0]} has no devices",
                        path=("until_s",),
                        allowed="null",
                    )
        return self

    def _lists(self) -> Iterable[tuple[tuple[str, ...], list[Any], Iterable[Any]]]:
        """(key, names that it holds, those that are allowed), of all that name something."""
        yield ("scenario_names",), self.scenario_names, self.scenarios
        yield ("recipe_names",), self.recipe_names, self.recipes
        yield ("seeds",), self.seeds, self.seeds
        for key, tried in (("tune", self.tune), ("choose", self.choose)):
            if tried is not None:
                yield (key, "recipes"), tried.recipes or [], self.recipes
                scenario = [] if tried.scenario is None else [tried.scenario]
                yield (key, "scenario"), scenario, self.scenarios
        for path, seeds in self._other_seeds():
            yield path, seeds, seeds
        if self.deploy is not None:  # it needs the partition of another stage
            yield ("deploy", "scenario"), [self.deploy.scenario], self.scenario_names
            yield ("deploy", "recipe"), [self.deploy.recipe], self.recipes

    def _other_seeds(self) -> Iterable[tuple[tuple[str, ...], list[int]]]:
        """(key, seeds), of all that are not the experiment's."""
        if self.tune is not None:
            yield ("tune", "seeds"), self.tune.seeds
        if self.choose is not None:
            yield ("choose", "seeds"), self.choose.seeds
            yield ("choose", "fresh"), self.choose.fresh

    def _deployable(self) -> None:
        deploy = self.deploy
        if deploy is None:
            return
        if deploy.seed not in self.seeds:
            allowed = ", ".join(map(str, self.seeds))
            raise UserError(path=("seed",), value=deploy.seed, allowed=allowed)
        scenario = self.scenarios.get(deploy.scenario)
        if scenario is not None and scenario.attack is not None:
            raise UserError(
                path=("scenario",),
                value=deploy.scenario,
                allowed="a scenario without attack, as silos decide themselves what they send",
            )
        if scenario is not None and deploy.silos > max(2, scenario.clients):
            most = f"2 to {scenario.clients}, the clients of scenario {deploy.scenario!r}"
            raise UserError(path=("silos",), value=deploy.silos, allowed=most)

    @property
    def own_extras(self) -> bool:
        """Whether results depend on files of the user beside data: on missing clients, or code."""
        scenarios = [self.scenarios[name] for name in self.scenario_names]
        listed = any(scenario.files for scenario in scenarios)
        own = self.data.own_code() or any(scenario.own_code() for scenario in scenarios)
        return listed or bool(own) or any(map(self.own_code, self.recipe_names))

    def composition(self, recipe: str) -> str:
        """The recipe that an entry stands for."""
        return self.recipes[recipe].recipe or recipe

    def train_of(self, recipe: str) -> TrainSettings:
        """`train` with the values that an entry has for itself."""
        own = self.recipes[recipe].train
        return (
            self.train.model_copy(update={key: getattr(own, key) for key in own.overrides})
            if own.overrides
            else self.train
        )

    def own_code(self, recipe: str) -> dict[str, str]:
        """The classes of the user's own that an entry trains with: name -> SHA-256 of their
        source."""
        return self.train_of(recipe).own_code() | registry.own_code(self.composition(recipe))

    def methods_of(self, recipe: str) -> Sequence[str]:
        """The methods of an entry."""
        return registry.parse(self.composition(recipe))

    def units(self) -> list[Unit]:
        """All items, ordered by seed, so that the first items already fill a table."""
        return [
            Unit(scenario, recipe, seed)
            for seed in self.seeds
            for scenario in self.scenario_names
            for recipe in self.recipe_names
        ]

    def params(self, unit: Unit) -> dict[str, object]:
        """All settings that determine an item's result, flat, as JSON has them. What params.yaml
        leaves out has its default.

        run.json and MLflow show them, and the fingerprint covers them.
        """
        composition, scenario = self.composition(unit.recipe), self.scenarios[unit.scenario]
        sections: dict[str, Mapping[str, object]] = {
            "data": self.data.resolved,
            "scenario": scenario.resolved,
            "train": self.train_of(unit.recipe).resolved,
            **registry.resolved(composition, self.recipes[unit.recipe].settings),
        }
        flat: dict[str, object] = unit._asdict() | {"composition": composition}
        if own := self.own_code(unit.recipe):
            flat["own_code"] = own
        for section, values in sections.items():
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        shown: dict[str, object] = json.loads(json.dumps(flat))
        return shown


class Unit(NamedTuple):
    """An item of the experiment, by name."""

    scenario: str
    recipe: str  # name of the entry in params.yaml
    seed: int

    @property
    def key(self) -> str:
        """The item's name in folders and MLflow."""
        return f"{self.scenario}-{self.recipe}-{self.seed}"


def load(root: Path) -> Config:
    """Reads and checks params.yaml in `root`, and the files that it names.

    UserError with every mistake.
    """
    look_in(root)
    refuse_without(root, FILE)
    content = read_yaml(root / FILE, f"allowed keys: {', '.join(Config.model_fields)}")
    settings = _with_records(checked(content, FILE), root / RECORDS)
    with together(source=FILE) as each:
        for name in settings.scenario_names:
            with each("scenarios", name):
                settings.scenarios[name].read_files(root, settings.train.rounds)
    return settings


def _with_records(settings: Config, path: Path) -> Config:
    """The settings with what a file says of recipes that they have. UserError for wrong records."""
    records = read_yaml(path) if path.is_file() else {}
    entries = dict(settings.recipes)
    for name, entry in entries.items():
        if entry.tuned is not None:
            allowed = f"such records in {RECORDS}, where `noniid tune` writes them"
            raise UserError(f"{FILE}: recipes.{name}.tuned is refused", allowed=allowed)
    for name in entries.keys() & records.keys():
        with located(name, source=path.name):
            tuned = validated(Tuned, records[name])
        entries[name] = entries[name].model_copy(update={"tuned": tuned})
    return settings.model_copy(update={"recipes": entries})


def checked(content: Mapping[str, Any], name: str) -> Config:
    """Checks settings that were read from a file called `name`. UserError with every mistake."""
    with located(source=name):
        return validated(Config, content)
