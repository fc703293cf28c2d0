"""Describes the finished runs, one line per study.

The facts are the recorded parameters of each run, not the plan.

If runs of one study have different settings, the line names the runs of each setting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fedml_noniid.pipelines.experiment.config import TrainSettings
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.papers.marks import leak_of, notes_of
from fedml_noniid.plugins.rates import words

# SILENT: settings of the machine, which the line leaves out. WORDED: settings that have words of
# their own.
SILENT = {"train.engine", "train.device", "train.threads"}
WORDED = {
    "data.name",
    "data.size",
    "data.validation",
    "data.public",
    "train.model",
    "train.model_options",
    "train.rounds",
    "train.epochs",
    "train.local_steps",
    "train.batch_size",
    "train.optimizer",
    "train.lr",
    "scenario.partition",
    "scenario.clients",
    "scenario.participation",
    "scenario.noise",
    "scenario.availability",
}
DEFAULTS = {f"train.{key}": field.default for key, field in TrainSettings.model_fields.items()}
MAX_NAMES = 8  # in a list


def what_ran(
    runs: Sequence[ItemResult], planned: Collection[str], diverged: Collection[str]
) -> str:
    """The settings of finished `runs`, the number of `planned` items among them, and the items
    without a model."""
    if not runs:
        return f"none of {len(planned)} planned runs has ended with a model{_without(diverged)}"
    scenarios = [
        _variants(_of(runs, "scenario", name), _scenario, f"{name} ")
        for name in _names(runs, "scenario")
    ]
    recipes = [
        _variants(_of(runs, "recipe", name), _recipe, name) for name in _names(runs, "recipe")
    ]
    parts = [
        _variants(runs, _settings),
        f"scenarios {', '.join(scenarios)}",
        f"methods {', '.join(recipes)}",
        f"seeds {', '.join(map(str, sorted({run.seed for run in runs})))}",
        f"{len(runs)} runs (planned: {len(planned)})" + _without(diverged),
    ]
    keys = {run.key for run in runs}
    missing = [key for key in planned if key not in keys and key not in diverged]
    parts += [f"missing: {_list(missing)}"] if missing else []
    other = [key for key in sorted(keys) if key not in planned]
    parts += [f"not in the plan: {_list(other)}"] if other else []
    notes = _variants(runs, lambda run: ", ".join(notes_of(run)))
    parts += [f"notes on the data: {notes}"] if notes else []
    leaks = _variants(runs, leak_of)
    parts += [f"LEAK: {leaks}"] if leaks else []
    return "; ".join(parts)


def _settings(run: ItemResult) -> str:
    """Data and training of a run. The number of rounds is that of its rounds.csv."""
    at = run.params
    pixels = at.get("data.size")
    size = f" at {'x'.join(map(str, pixels))}" if isinstance(pixels, Sequence) else ""
    validation = (
        f", {100 * _number(at['data.validation']):g} % of it held out"
        if at.get("data.validation")
        else ""
    )
    public = f", D_public of {at['data.public']} samples" if at.get("data.public") else ""
    options = at.get("train.model_options")
    network = f" ({_pairs(options)})" if isinstance(options, Mapping) and options else ""
    local = (
        f"{at['train.local_steps']} steps"
        if at.get("train.local_steps")
        else f"{at.get('train.epochs')} epochs"
    )
    return (
        f"{at.get('data.name')}{size}{_rest(at, 'data.')}{validation}{public}, "
        f"{at.get('train.model')}{network}, "
        f"{len(run.rows)} rounds of {local}, batches of {at.get('train.batch_size')}, "
        f"{at.get('train.optimizer')} {words(at.get('train.lr', 0.0))}{_rest(at, 'train.')}"
    )


def _scenario(run: ItemResult) -> str:
    """The partition of a run's data."""
    at = run.params
    share, noise = _number(at.get("scenario.participation", 1)), at.get("scenario.noise")
    part = f" of which {100 * share:g} % take part in a round" if share != 1 else ""
    noisy = f", noise {_pairs(noise)}" if isinstance(noise, Mapping) else ""
    missing = ""
    if isinstance(available := at.get("scenario.availability"), Mapping):
        missing = (
            ", availability "
            f"{_pairs({key: value for key, value in available.items() if key != 'sha256'})}"
        )
    rest = _rest(at, "scenario.")
    return (
        f"({at.get('scenario.partition')}, {at.get('scenario.clients')} "
        f"clients{part}{rest}{noisy}{missing})"
    )


def _recipe(run: ItemResult) -> str:
    """The hyper-parameters that the run's entry has set."""
    shared = ("data.", "scenario.", "train.")
    values = {
        key.removeprefix(f"{run.composition}."): value
        for key, value in run.params.items()
        if "." in key and not key.startswith(shared)
    }
    parts = [] if run.composition == run.recipe else [run.composition]
    parts += [_pairs(values)] if values else []
    return f" ({': '.join(parts)})" if parts else ""


def _variants(
    runs: Sequence[ItemResult], words_of: Callable[[ItemResult], str], before: str = ""
) -> str:
    """The text that all runs share.

    If they differ, each variant with its runs; empty variants are left out.
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(before + words_of(run), []).append(run.key)
    if len(found) == 1:
        return next(iter(found))
    return " / ".join(f"{text} [{_list(keys)}]" for text, keys in found.items() if text)


def _rest(at: Mapping[str, object], section: str) -> str:
    """The settings of a section that have no words of their own: `, augment, momentum 0.9`."""
    rest = {
        key.removeprefix(section): value
        for key, value in at.items()
        if key.startswith(section) and key not in SILENT | WORDED and value not in (None, False)
        if key not in DEFAULTS or value != DEFAULTS[key]
    }
    return f", {_pairs(rest)}" if rest else ""


def _pairs(values: Mapping[str, object]) -> str:
    """`channels 8, batch_norm`. A flag that is on has only its name."""
    return ", ".join(
        key if value is True else f"{key} {_plain(value)}" for key, value in values.items()
    )


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: object) -> float:
    return float(str(value))


def _of(runs: Sequence[ItemResult], kind: str, name: str) -> list[ItemResult]:
    return [run for run in runs if getattr(run, kind) == name]


def _names(runs: Sequence[ItemResult], kind: str) -> list[str]:
    return list(dict.fromkeys(getattr(run, kind) for run in runs))


def _without(diverged: Collection[str]) -> str:
    return f", {len(diverged)} diverged ({_list(sorted(diverged))})" if diverged else ""


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
