"""Runs recipes on data in this process: the same computation as the stages `partition`, `train` and
`evaluate`."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedml_noniid.api import settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.result import Files, Result, Results, folder_of
from fedml_noniid.api.split import OF_RUN, Split, check_data
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.measuring import measure
from fedml_noniid.pipelines.experiment.partitioning import assign
from fedml_noniid.pipelines.experiment.progress import Display, RoundReport, report
from fedml_noniid.pipelines.experiment.training import SECONDS, trained
from fedml_noniid.pipelines.experiment.workers import side_by_side
from fedml_noniid.plugins.core.errors import NonFiniteError, UserError, shown
from fedml_noniid.plugins.data.indices import Indices
from fedml_noniid.plugins.engines.callbacks import Callback, OnRow
from fedml_noniid.plugins.engines.simulation import resolve_device

NOT_GIVEN = ("partition", "clients", "validation", "public")  # None means so
OF_ALL = ("seeds", "processes", "progress", "folder")  # arguments that are the same for a sweep
ENTRY = "{'recipe': name, method: {hyper-parameter: value}}"
RECIPES = "a list of recipes, such as ['fedavg', 'fnr'], or a dictionary of name -> entry"


def run(
    recipe: str,
    data: Data | Split,
    *,
    partition: str | None = None,
    clients: int | None = None,
    participation: float = 1.0,
    validation: float | None = None,
    public: int | None = None,
    seeds: Sequence[int] = (0,),
    model: str = "mlp",
    rounds: int = 40,
    epochs: int = 2,
    batch_size: int = 32,
    optimizer: str = "sgd",
    lr: float | Mapping[str, Any] = 0.1,
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Result:
    """Trains and evaluates a recipe, once for each seed.

    `data`: a data set, with `partition` and `clients`; or what `partition` returned, without them.
    Each seed has its partition. `options`: any other setting of params.yaml by its name: of the
    partition (`alpha=0.1`), of its section `train` (`momentum=0.9`), and a method's
    hyper-parameters (`fnr={"p": 0.3}`). `validation` and `public`: what is held out, by default
    nothing. `lr`: a number, or a schedule such as `{"start": 0.1, "decay": "cosine"}`. `callbacks`:
    a list such as `[nd.EarlyStop(patience=5)]`, or names and options as in params.yaml; each run
    has copies of the objects. `processes`: seeds that run side by side on a CPU; the bits stay the
    same. `folder`: where each seed's files are saved as soon as it ends, as `Result.save` does.
    Runs that threads of one process start take turns.

    UserError for mistakes in the arguments, and if a loss stops being finite.

    >>> import fedml_noniid as nd
    >>> data = nd.load("digits")
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.5}
    >>> result = nd.run("scaffold+fnr", data, **how, public=50, rounds=2, fnr={"p": 0.3})
    >>> result.rounds["round"].tolist()
    [1, 2]
    """
    callbacks, options = _callbacks("run", options)
    given = {
        "partition": partition,
        "clients": clients,
        "validation": validation,
        "public": public,
        "participation": participation,
        "model": model,
        "rounds": rounds,
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "lr": lr,
        "processes": processes,
        **options,
    }
    if not isinstance(recipe, str):
        raise UserError(
            f"run: recipe = {shown(recipe)} is refused; allowed: a name, such as 'scaffold+fnr'"
        )
    checked = _settings("run", data, {recipe: {}}, seeds, given)
    (result,) = _executed("run", data, [({}, checked)], progress, folder, callbacks)
    for seed, reason in result.failed.items():
        raise NonFiniteError(f"run: {result.recipe}, seed {seed}: {reason}")
    return result


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
    "fedprox": {"mu": 0.01}}}`. `over`: argument of `run` -> its values; those of a method are
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
    callbacks, options = _callbacks("sweep", options)
    entries, axes = _entries(recipes), _axes(over, options)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    named, taken = [], set()
    for number, point in enumerate(points):
        given = {**options, **point, "processes": processes}
        words = "-".join(f"{key}-{value}" for key, value in point.items())
        name = re.sub(r"[^A-Za-z0-9_+-]+", "_", words)[:60].strip("_")
        name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        named.append((point, _settings("sweep", data, entries, seeds, given, name)))
    results = Results(_executed("sweep", data, named, progress, folder, callbacks))
    if not any(result.files for result in results):
        raise NonFiniteError(
            "\n".join(f"sweep: {what}: {reason}" for what, reason in results.failed.items())
        )
    for what, reason in results.failed.items():
        warnings.warn(f"{what} has no result: {reason}", stacklevel=2)
    return results


def _callbacks(where: str, options: Mapping[str, Any]) -> tuple[list[Callback], dict[str, Any]]:
    """(callbacks that are objects, the other options): a dictionary of names is a setting."""
    given, found = options.get("callbacks"), dict(options)
    if given is None or isinstance(given, Mapping):
        return [], found
    del found["callbacks"]
    if not isinstance(given, list | tuple) or not all(isinstance(one, Callback) for one in given):
        allowed = (
            "a list of nd.Callback objects, such as [nd.EarlyStop(patience=5)], or {name: "
            "{option: value}}"
        )
        raise UserError(f"{where}: callbacks = {shown(given)} is refused; allowed: {allowed}")
    return list(given), found


def _entries(recipes: object) -> settings.Entries:
    """The recipes as entries of params.yaml. UserError unless each has a name of its own."""
    if isinstance(recipes, str) or not isinstance(recipes, Sequence | Mapping) or not recipes:
        raise UserError(f"sweep: recipes = {shown(recipes)} is refused; allowed: {RECIPES}")
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
        raise UserError(f"sweep: recipes: {refused}")
    return entries


def _axes(over: object, options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Argument -> its values.

    UserError unless `over` has lists of different values, and nothing else has them.
    """
    if over is None:
        return {}
    if not isinstance(over, Mapping):
        raise UserError(
            f"sweep: over = {shown(over)} is refused; allowed: argument -> values, such as "
            f"{{'lr': [0.1]}}"
        )
    axes = {}
    for key, values in over.items():
        if not isinstance(key, str) or key in options or key in OF_ALL:
            raise UserError(
                f"sweep: over: {key!r} is refused; allowed: arguments of `run` that are given "
                "only here"
            )
        found = settings.plain(values)
        if (
            not isinstance(found, list)
            or not found
            or any(found.count(value) > 1 for value in found)
        ):
            refused = f"sweep: over: {key} = {shown(values)} is refused"
            raise UserError(f"{refused}; allowed: a list of values, each of them once")
        axes[key] = found
    return axes


def _settings(
    where: str,
    data: Data | Split,
    entries: settings.Entries,
    seeds: object,
    given: Mapping[str, Any],
    name: str = "",
) -> Config:
    """The checked settings. What a split has already can't be given again."""
    check_data(where, data, Data, Split)
    known = {
        key: value for key, value in given.items() if value is not None or key not in NOT_GIVEN
    }
    if isinstance(data, Split):
        sections = settings.options()
        for key in known:
            if sections.get(key) in ("data", "scenario") and key not in OF_RUN:
                raise UserError(
                    f"{where}: {key} is given twice, as data is a split; allowed: in "
                    "`partition` only"
                )
        known |= data.settings
        data = data.data
    return settings.of(where, data.settings, data.from_memory, entries, seeds, known, name)


class _Job(NamedTuple):
    """An item, and all that it needs."""

    settings: Config
    unit: Unit
    data: Data
    indices: Indices
    workers: int  # processes for the clients of a round
    callbacks: Sequence[Callback]  # copied for the run


def _executed(
    where: str,
    data: Data | Split,
    points: Sequence[tuple[Mapping[str, Any], Config]],
    progress: bool,
    folder: str | Path | None,
    callbacks: Sequence[Callback],
) -> list[Result]:
    """A result for each point and recipe."""
    place = None if folder is None else folder_of(where, folder)
    whole, first = data.data if isinstance(data, Split) else data, points[0][1]
    processes = first.machine.processes or 1
    with settings.arguments(where):
        on_gpu = any(resolve_device(checked.train.device).type == "cuda" for _, checked in points)
    if on_gpu and processes > 1:
        raise UserError(f"{where}: processes = {processes} is refused on a GPU; allowed: 1")
    units = [(checked, unit) for _, checked in points for unit in checked.units()]
    workers = processes if len(units) == 1 and first.train.threads == 1 else 1
    known: dict[str, Indices] = {}
    found: dict[int, Files | str] = {}  # the files of a job, or why there are none
    with (
        in_turn(),
        settings.arguments(where),
        Display(where, len(units), bars=progress, lines=False) as display,
    ):
        jobs = [
            _Job(checked, unit, whole, _indices(data, checked, unit, known), workers, callbacks)
            for checked, unit in units
        ]
        for number, files in side_by_side(
            lambda number: _done(jobs[number]),
            range(len(jobs)),
            1 if workers > 1 else processes,
            display,
        ):
            found[number], key = files, jobs[number].unit.key
            if place is not None and isinstance(files, Files):
                files.write(place, key)
            display.done(key, files if isinstance(files, str) else "", known=False)
    results = []
    for point, checked in points:
        for recipe in checked.recipe_names:
            of_recipe = {
                job.unit.seed: found[number]
                for number, job in enumerate(jobs)
                if job.settings is checked and job.unit.recipe == recipe
            }
            made = {seed: one for seed, one in of_recipe.items() if isinstance(one, Files)}
            failed = {seed: one for seed, one in of_recipe.items() if isinstance(one, str)}
            results.append(Result(recipe, dict(point), checked, whole, made, failed))
    return results


def _indices(data: Data | Split, checked: Config, unit: Unit, known: dict[str, Indices]) -> Indices:
    """The partition of an item. Items whose settings make the same partition share one."""
    scenario, held_out = checked.scenarios[unit.scenario], checked.data
    partitioned = scenario.model_dump(exclude={"availability", "participation"})
    key = json.dumps([partitioned, held_out.validation, held_out.public, unit.seed], sort_keys=True)
    if isinstance(data, Split) and data.seed == unit.seed:
        known.setdefault(key, data.indices)
    if key not in known:
        whole, given = (data.data, data.given) if isinstance(data, Split) else (data, None)
        known[key] = assign(whole.dataset, held_out, scenario, unit.scenario, unit.seed, given)
    return known[key]


def _done(job: _Job) -> Files | str:
    """Trains and evaluates one item. Returns its files, or why there are none."""
    item = Item.of(job.settings, job.unit, job.data.dataset, job.indices)

    def on_round(row: Mapping[str, float]) -> None:
        rounds = job.settings.train.rounds
        report(RoundReport(job.unit.key, int(row["round"]), rounds, row["test_accuracy"]))

    try:
        callbacks = copy.deepcopy(list(job.callbacks))
    except Exception as error:  # of any kind: the code is the user's
        raise UserError(
            f"callbacks: can't be copied for a run ({type(error).__name__}: {error})"
        ) from None
    simulation = item.simulation([*callbacks, OnRow(on_round)], job.workers)
    try:
        made = trained(item, simulation, "")
    except NonFiniteError as error:
        return str(error)
    tensors = {name: leaf.to(item.device) for name, leaf in made.tensors.items()}
    measured = measure(item, tensors, made.rows)
    return Files(made.files(), measured.files(), tuple(row[SECONDS] for row in made.rows))


_turn = threading.RLock()  # held by the run that this process works on


def _no_turn() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(
    after_in_child=_no_turn
)  # nobody would give back what a thread of the parent holds


@contextmanager
def in_turn() -> Iterator[None]:
    """Waits for the runs of other threads. Sets back what a run sets for the whole process.

    torch's threads and precision are settings of the process, and they decide about bits.
    """
    with _turn:
        # torch counts threads for each thread. A new thread has the number that was set last, by
        # any of them.
        with ThreadPoolExecutor(1) as new:
            threads = new.submit(torch.get_num_threads).result()
        matmul, convolutions = (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = (
                matmul,
                convolutions,
            )
