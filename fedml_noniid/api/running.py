"""Runs recipes on data in this process: the same computation as the stages `partition`, `train` and
`evaluate`."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.api import saved, settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.result import Result, Results, result_of
from fedml_noniid.api.saved import Files, folder_of
from fedml_noniid.api.split import Split, check_data, without_unseen
from fedml_noniid.core.errors import Mistake, NonFiniteError, UserError, shown
from fedml_noniid.data.indices import Indices
from fedml_noniid.engines.callbacks import Callback, OnRow
from fedml_noniid.engines.device import resolve_device, unusable_gpu
from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.experiment.cache import DIVERGED
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.partitioning import assign
from fedml_noniid.pipelines.experiment.progress import Display, RoundReport, report
from fedml_noniid.pipelines.experiment.training import SECONDS, trained
from fedml_noniid.pipelines.experiment.workers import side_by_side

ENTRY = "{'recipe': name, method: {hyper-parameter: value}}"
RECIPES = "a list of recipes, such as ['fedavg', 'fnr'], or a dictionary of name -> entry"
CALLBACKS = (
    "a list of nd.Callback objects, such as [nd.EarlyStop(patience=5)], or {name: {option: value}}"
)


@in_turn()
def run(
    recipe: str,
    data: Data | Split,
    *,
    seeds: Sequence[int] = (0,),
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Result:
    """Trains and evaluates a recipe, once for each seed.

    `data`: a data set, with `partition` and `clients` among the options; or what `partition`
    returned, without them. Each seed has its partition. `processes`: seeds that run side by side on
    a CPU; the bits stay the same. `folder`: where each seed's files are saved as soon as it ends,
    as `Result.save` does. What lies there of the same settings, code and data is not trained again.
    `progress`: whether to show a bar on a terminal, elsewhere a line on standard error for each
    run. Runs that threads of one process start take turns.

    `options` are settings of params.yaml by their names:

    - of training: `model` ("mlp"; "cnn" for images from 28 x 28 on), `rounds` (40), `epochs` (2),
      `batch_size` (32), `optimizer` ("sgd"), `lr` (0.1: a number, or a schedule such as
      `{"start": 0.1, "decay": "cosine"}`), and all others of the section `train`, such as
      `momentum` and `device`
    - of the data: `participation` (1.0: the share of the clients in a round), `availability` (which
      clients miss rounds), `devices` and `waits` (a virtual clock), `attack` (which lie, and how),
      `partition` and its own options such as `alpha`, `clients`; `validation` (0.0) and `public`
      (0), which are held out; `unseen` (owners of a table that take no part)
    - of a method: its hyper-parameters under its name, such as `fnr={"p": 0.3}`
    - `callbacks`: a list such as `[nd.EarlyStop(patience=5)]`, or names and options as in
      params.yaml. Each run has copies of the objects.
    - `metrics`: functions of yours, `[f1]` or `{f1: {"option": value}}`; `f1(outputs, labels)`
      returns a number, or names with numbers

    UserError for mistakes in the arguments, and if a loss, an update or what a client keeps stops
    being finite.

    >>> import fedml_noniid as nd
    >>> data = nd.load("digits")
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.5}
    >>> result = nd.run("scaffold+fnr", data, **how, public=50, rounds=2, fnr={"p": 0.3})
    >>> result.rounds["round"].tolist()
    [1, 2]
    """
    options = {"seeds": seeds, "processes": processes, **options}
    (result,) = trained_results("run", [recipe], data, options, {}, progress, folder)
    for seed, reason in result.failed.items():
        raise NonFiniteError(f"run: {result.recipe}, seed {seed}: {reason}")
    return result


@in_turn()
def sweep(
    recipes: Sequence[str] | Mapping[str, Mapping[str, Any]],
    data: Data | Split,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Results:
    """Runs several recipes at the same settings, and at each combination of the values in `over`.

    `recipes`: names, or entries as in params.yaml, such as `{"weak": {"recipe": "fedprox",
    "fedprox": {"mu": 0.01}}}`. `over`: option of `run` -> its values; those of a method are
    dictionaries. The other arguments are those of `run`. A method's hyper-parameters go to the
    recipes that have the method. A run whose loss stops being finite is left out, with a warning;
    `Results.failed` has the reason. UserError for mistakes in the arguments, before anything runs.

    >>> import fedml_noniid as nd
    >>> split = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=0.5)
    >>> over = {"lr": [0.05, 0.1]}
    >>> results = nd.sweep(["fedavg", "scaffold"], split, over=over, rounds=2, seeds=[0, 1])
    >>> results.summary[["lr", "recipe", "seeds"]].to_dict("list")["lr"]
    [0.05, 0.05, 0.1, 0.1]
    """
    options = {"seeds": seeds, "processes": processes, **options}
    results = Results(
        trained_results("sweep", recipes, data, options, over or {}, progress, folder)
    )
    if not any(result.files for result in results):
        raise NonFiniteError.from_mistakes(
            Mistake(f"sweep: {what}: {reason}") for what, reason in results.failed.items()
        )
    for what, reason in results.failed.items():
        warnings.warn(f"{what} has no result: {reason}", stacklevel=3)
    return results


def trained_results(
    caller: str,
    recipes: object,
    data: Data | Split,
    options: dict[str, Any],
    over: object,
    progress: bool,
    folder: str | Path | None,
) -> list[Result]:
    """A result for each combination of the values in `over` and each recipe.

    UserError for mistakes in the arguments, before anything runs.
    """
    check_data(caller, data, Data, Split)
    callbacks, options = callbacks_of(caller, options)
    entries, axes = entries_of(caller, recipes), _axes(caller, over, options)
    settings.check_axes(caller, entries, axes)
    if "unseen" in axes:
        raise UserError(f"{caller}: over: unseen is refused; allowed: one value for all")
    data = data if isinstance(data, Split) else without_unseen(caller, data, options)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    named: dict[str, Config] = {}
    for number, point in enumerate(points):
        text = "-".join(f"{key}-{value}" for key, value in point.items())
        name = re.sub(r"[^A-Za-z0-9_+-]+", "_", text)[:60].strip("_")
        name = f"{name}-{number}" if name in named else name
        named[name] = settings_of(caller, data, entries, options | point, name)
    units = [(config, unit) for config in named.values() for unit in config.units()]
    whole = data.data if isinstance(data, Split) else data

    def gathered(outcomes: Iterable[Files]) -> list[Result]:
        """The results of the units with these files."""
        ended: dict[tuple[str, str], dict[int, Files]] = {}
        for (_, unit), files in zip(units, outcomes, strict=True):
            ended.setdefault(unit[:2], {})[unit.seed] = files
        return [
            result_of(recipe, point, config, whole, ended[config.scenario_names[0], recipe])
            for point, config in zip(points, named.values(), strict=True)
            for recipe in config.recipe_names
        ]

    return gathered(
        executed(
            *(caller, data, units, callbacks, progress, folder),
            begun=lambda path, prints: saved.write_record(
                path, gathered(Files({}, {}, (), fingerprint) for fingerprint in prints)
            ),
        )
    )


def callbacks_of(caller: str, options: Mapping[str, Any]) -> tuple[list[Callback], dict[str, Any]]:
    """(callbacks that are objects, the other arguments): a dictionary of names is a setting."""
    callbacks, others = options.get("callbacks"), dict(options)
    if callbacks is None or isinstance(callbacks, Mapping):
        return [], others
    del others["callbacks"]
    if not isinstance(callbacks, list | tuple) or not all(
        isinstance(callback, Callback) for callback in callbacks
    ):
        raise UserError(
            f"{caller}: callbacks = {shown(callbacks)} is refused; allowed: {CALLBACKS}"
        )
    return list(callbacks), others


def entries_of(caller: str, recipes: object) -> settings.Entries:
    """The recipes as entries of params.yaml. UserError unless each has a name of its own."""
    if isinstance(recipes, str) or not isinstance(recipes, Sequence | Mapping) or not recipes:
        raise UserError(f"{caller}: recipes = {shown(recipes)} is refused; allowed: {RECIPES}")
    entries: dict[str, Any] = {}
    for name in recipes:
        entry = recipes[name] if isinstance(recipes, Mapping) else None
        if not isinstance(name, str):
            refused = f"{shown(name)} is refused; allowed: a name, such as 'scaffold+fnr'"
        elif not isinstance(entry, Mapping | None):
            refused = f"{name} = {shown(entry)} is refused; allowed: {ENTRY}"
        elif name in entries:
            refused = f"{name} is named twice; allowed: once"
        else:
            entries[name] = entry or {}
            continue
        raise UserError(f"{caller}: recipe {refused}")
    return entries


def _axes(caller: str, over: object, options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Argument -> its values.

    UserError unless `over` has lists of different values, and nothing else has them.
    """
    if not isinstance(over, Mapping):
        raise UserError(
            f"{caller}: over = {shown(over)} is refused; allowed: argument -> values, such as "
            "{'lr': [0.1]}"
        )
    axes = {}
    for key, values in over.items():
        plain = settings.plain(values)
        if key in options:
            refused = f"{key} is given twice; allowed: once"
        elif (
            not isinstance(plain, list)
            or not plain
            or any(plain.count(value) > 1 for value in plain)
        ):
            refused = (
                f"{key} = {shown(values)} is refused; allowed: a list of values, each of them once"
            )
        else:
            axes[str(key)] = [settings.named_code(key, value) for value in plain]
            continue
        raise UserError(f"{caller}: over: {refused}")
    return axes


def settings_of(
    caller: str,
    data: Data | Split,
    entries: settings.Entries,
    options: Mapping[str, Any],
    name: str,
) -> Config:
    """The checked settings. What a split has already can't be given again."""
    if isinstance(data, Data):
        return settings.from_arguments(caller, data, entries, options, name)
    of_split = settings.sections("partition").keys() - {"seed"}
    for key, value in options.items():
        if key in of_split and value is not None:
            instead = "as data is a split; allowed: in `partition` only"
            raise UserError(f"{caller}: {key} is given twice, {instead}")
    return settings.from_arguments(caller, data.data, entries, {**options, **data.settings}, name)


def executed(
    caller: str,
    data: Data | Split,
    units: Sequence[tuple[Config, Unit]],
    callbacks: Sequence[Callback],
    progress: bool,
    folder: str | Path | None,
    begun: Callable[[Path, list[str]], None] = lambda *_: None,
) -> list[Files]:
    """Trains and evaluates each item that the folder lacks. Returns the files of all.

    `begun` is called with the folder and the fingerprints of all, before the first is trained.
    """
    path = None if folder is None else folder_of(caller, folder)
    first = units[0][0]
    processes = first.machine.processes or 1
    with settings.arguments(caller):
        on_gpu = any(resolve_device(config.train.device).type == "cuda" for config, _ in units)
    if any(config.train.device == "auto" for config, _ in units) and (reason := unusable_gpu()):
        warnings.warn(f"{caller} uses the CPU, as torch can't use the GPU: {reason}", stacklevel=5)
    if on_gpu and processes > 1:
        raise UserError(f"{caller}: processes = {processes} is refused on a GPU; allowed: 1")
    whole = data.data if isinstance(data, Split) else data
    known: dict[str, Indices] = {}
    with settings.arguments(caller):
        indices = [indices_of(data, *unit, known) for unit in units]
        prints = [
            saved.fingerprint(*unit, whole, partition, callbacks) if path else ""
            for unit, partition in zip(units, indices, strict=True)
        ]
        if path:
            begun(path, prints)
        outcomes = {
            number: files
            for number, (_, unit) in enumerate(units)
            if path and (files := Files.read(path, unit.key, prints[number]))
        }
        todo = [number for number in range(len(units)) if number not in outcomes]
    workers = processes if len(todo) == 1 and first.train.threads == 1 else 1
    with (
        settings.arguments(caller),
        Display(caller, len(units), bars=progress, lines=False) as display,
    ):
        for number in outcomes:
            display.done(units[number][1].key, "", known=True)

        def work(number: int) -> Files:
            item = Item.from_parts(*units[number], whole.dataset, indices[number])
            return _trained(item, callbacks, workers)._replace(fingerprint=prints[number])

        for number, files in side_by_side(work, todo, processes, display):
            outcomes[number], key = files, units[number][1].key
            if path:
                files.write(path, key)
            main = units[number][0].train.built_loss.metric
            scored = files.reason or metric_of(main).shown(
                files.final.get(f"test_{main}", math.nan)
            )
            display.done(key, scored, known=False)
    return [outcomes[number] for number in range(len(units))]


def indices_of(
    data: Data | Split, config: Config, unit: Unit, known: dict[str, Indices]
) -> Indices:
    """The partition of an item. Items whose settings make the same partition share one."""
    scenario, held_out = config.scenarios[unit.scenario], config.data
    partitioned = scenario.model_dump(exclude={*settings.OF_RUN})
    key = json.dumps([partitioned, held_out.validation, held_out.public, unit.seed], sort_keys=True)
    if isinstance(data, Split) and data.seed == unit.seed:
        known.setdefault(key, data.indices)
    if key not in known:
        whole, lists = (data.data, data.positions) if isinstance(data, Split) else (data, None)
        known[key] = assign(whole.dataset, held_out, scenario, unit.scenario, unit.seed, lists)
    return known[key]


def _trained(item: Item, callbacks: Sequence[Callback], workers: int) -> Files:
    """Trains and evaluates one item, its clients in `workers` processes."""
    rounds = item.settings.train.rounds

    def on_round(row: Mapping[str, float]) -> None:
        metric = item.loss.metric
        now = row[f"test_{metric}"]
        report(RoundReport(item.unit.key, int(row["round"]), rounds, now, metric))

    try:
        copies = copy.deepcopy(list(callbacks))
    except Exception as error:  # of any kind: the code is the user's
        raise UserError(
            f"callbacks: can't be copied for a run ({type(error).__name__}: {error})"
        ) from None
    simulation = item.simulation([*copies, OnRow(on_round)], workers)
    try:
        made = trained(item, simulation, "")
    except NonFiniteError as error:
        return Files({DIVERGED: str(error).encode()}, {}, ())
    tensors = {name: leaf.to(item.device) for name, leaf in made.tensors.items()}
    measured = measure(item, tensors, made.rows)
    return Files(made.files(), measured.files(), tuple(row[SECONDS] for row in made.rows))
