"""Which values each method ran at, and how they were chosen: a table and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedml_noniid.pipelines.experiment import tuning
from fedml_noniid.pipelines.experiment.config import Config, Tuned
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.text import NONE

NOT_TUNED = (
    "No value was tuned by `noniid tune`. Methods ran at the values in params.yaml or at the "
    "defaults of their files. "
    "How these values were chosen is not known here."
)
TABLE_NOTE = (
    'Values: what a method has for itself. All else is under "What was run", or at the default '
    "of the method's file. "
    "Trials: settings that were tried. Validation: accuracy on the held-out part of the "
    "training set with the chosen "
    "values, and with the second best."
)
TINY = 1e-6  # the record of a tuning has six digits


def table(settings: Config) -> list[list[str]]:
    """The values of each method, and how they were chosen."""
    rows = [["method", "values", "tuned", "trials", "on", "validation, % (second)"]]
    for name in settings.recipe_names:
        tuned, state = settings.recipes[name].tuned, _state(settings, name)
        values = tuning.in_words(_values(settings, name)) or NONE
        if tuned is None:
            rows.append([name, values, state, NONE, NONE, NONE])
            continue
        second = NONE if tuned.runner_up is None else f"{100 * tuned.runner_up:.2f}"
        trials = f"{tuned.trials}" + (f", {tuned.diverged} diverged" if tuned.diverged else "")
        rows.append(
            [name, values, state, trials, _on(tuned), f"{100 * tuned.accuracy:.2f} ({second})"]
        )
    return rows


def sentences(settings: Config, runs: Iterable[ItemResult]) -> list[str]:
    """Whether anything was tuned, with which budgets, what speaks against a fair comparison, and
    unequal settings."""
    tuned = {
        name: of
        for name in settings.recipe_names
        if (of := settings.recipes[name].tuned) is not None
    }
    if not tuned:
        return [NOT_TUNED, _changed(settings), _equal(runs, "")]
    trials: dict[int, list[str]] = {}
    for name, of in tuned.items():
        trials.setdefault(of.trials, []).append(name)
    without = [name for name in settings.recipe_names if name not in tuned]
    states = {name: _state(settings, name) for name in tuned}
    grounds = {_on(of): name for name, of in tuned.items()}
    found = []
    if len(trials) == 1:
        found.append(
            f"Tuned on the validation split, {next(iter(trials))} trials for each method: "
            f"{', '.join(tuned)}."
        )
    else:
        listed = "; ".join(f"{n}: {', '.join(names)}" for n, names in sorted(trials.items()))
        found.append(
            "UNEQUAL budgets, compare with care: numbers of trials on the validation split "
            f"({listed})."
        )
    if without:
        found.append(f"NOT TUNED, while others are, compare with care: {', '.join(without)}.")
    for state in dict.fromkeys(states.values()):
        if state != "yes":
            names = [name for name in tuned if states[name] == state]
            found.append(f"{', '.join(names)}: {_because(state)}.")
    if len(grounds) > 1:
        found.append(
            f"The methods were tuned on different samples, compare with care: {'; '.join(grounds)}."
        )
    elsewhere = [
        name
        for name in settings.scenario_names
        if any(of.scenario != name for of in tuned.values())
    ]
    if elsewhere:
        found.append(f"Values were not chosen on {', '.join(elsewhere)}, which may need others.")
    found += [*_edges(tuned), *_close(tuned)]
    is_fair = not without and len(trials) == len(grounds) == 1 and set(states.values()) == {"yes"}
    return [*found, _equal(runs, "tuned" if is_fair else "")]


def unequal(runs: Iterable[ItemResult]) -> list[str]:
    """`lr (0.1: fedavg; 0.05: scaffold)` for each training setting that was not the same for all,
    by the runs."""
    runs, found = list(runs), []
    for key in sorted({key for run in runs for key in run.params if key.startswith("train.")}):
        methods: dict[str, dict[str, None]] = {}  # by value
        for run in runs:
            methods.setdefault(str(run.params.get(key)), {})[run.recipe] = None
        if len(methods) > 1:
            listed = "; ".join(f"{value}: {', '.join(names)}" for value, names in methods.items())
            found.append(f"{key.removeprefix('train.')} ({listed})")
    return found


def _equal(runs: Iterable[ItemResult], how: str) -> str:
    """Whether all methods were trained alike.

    `how`: "tuned" if each has the values of an equal budget.
    """
    found = unequal(runs)
    if not found:
        return "All methods had the same training settings."
    said = (
        "Each method had its own tuned" if how else "UNEQUAL training settings, compare with care"
    )
    return f"{said}{':' if not how else ''} {', '.join(found)}."


def _values(settings: Config, name: str) -> dict[str, dict[str, object]]:
    """A method's own values. A training setting that any method has for itself is shown for all."""
    entries = [settings.recipes[recipe] for recipe in settings.recipe_names]
    keys = [
        key
        for key in type(entries[0].train).model_fields
        if any(key in entry.train.given for entry in entries)
    ]
    train = settings.train_of(name)
    return {"train": {key: getattr(train, key) for key in keys}, **settings.recipes[name].settings}


def _on(tuned: Tuned) -> str:
    seeds = f"seed{'s' if len(tuned.seeds) > 1 else ''} {', '.join(map(str, tuned.seeds))}"
    return f"{tuned.scenario}, {seeds}, {tuned.samples} samples"


def _state(settings: Config, name: str) -> str:
    """`no`, `yes`, `values changed since` or `other settings`."""
    entry = settings.recipes[name]
    tuned = entry.tuned
    if tuned is None:
        return "no"
    if any(
        entry.values.get(section, {}).get(key) != value
        for section, keys in tuned.chosen.items()
        for key, value in keys.items()
    ):
        return "values changed since"
    now = tuning.fingerprint(settings, name, tuned.chosen, tuned.scenario)
    return "yes" if now == tuned.settings else "other settings"


def _because(state: str) -> str:
    if state == "values changed since":
        return "params.yaml no longer has the values that tuning chose"
    return "tuned at other settings than those of this experiment"


def _edges(tuned: Mapping[str, Tuned]) -> list[str]:
    """The chosen numbers that are the smallest or the largest of those tried."""
    found = []
    for name, of in tuned.items():
        edges = []
        for section, keys in of.chosen.items():
            for key, value in keys.items():
                tried = [one for one in of.tried[section][key] if isinstance(one, int | float)]
                if (
                    len(tried) > 1
                    and value in (min(tried), max(tried))
                    and not isinstance(value, bool)
                ):
                    where = "smallest" if value == min(tried) else "largest"
                    edges.append(f"{tuning.in_words({section: {key: value}})} is the {where}")
        found += [f"{name} ({', '.join(edges)})"] if edges else []
    return (
        [f"At the edge of what was tried, so other values may be better: {', '.join(found)}."]
        if found
        else []
    )


def _close(tuned: Mapping[str, Tuned]) -> list[str]:
    """The choices that one validation sample decides."""
    close = [
        name
        for name, of in tuned.items()
        if of.runner_up is not None and of.accuracy - of.runner_up <= 1 / of.samples + TINY
    ]
    said = "Chosen by at most one validation sample, so the second best may be as good"
    return [f"{said}: {', '.join(close)}."] if close else []


def _changed(settings: Config) -> str:
    """The hyper-parameters that are not at the default of their method's file."""
    values = [
        (name, key, value, settings.methods_of(name)[method].defaults[key])
        for name in settings.recipe_names
        for method, own in settings.recipes[name].settings.items()
        for key, value in own.items()
    ]
    changed = [
        f"{name} {key} {value} (default {default})"
        for name, key, value, default in values
        if value != default
    ]
    return (
        f"Not at their default: {', '.join(changed)}." if changed else "All are at their default."
    )
