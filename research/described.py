"""Describes the finished runs, one line per study.

The settings are the recorded parameters of each run, not the plan. Where runs have different
settings, the line names the runs of each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedml_noniid.pipelines.experiment.config import TrainSettings
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.plugins import registry
from research import replicas
from research.runs import leak_of, notes_of

# Settings that are left out: those of the machine, and the defaults.
SILENT = {"train.engine", "train.device", "train.threads", "train.observe"}
DEFAULTS = {f"train.{key}": field.default for key, field in TrainSettings.model_fields.items()}
MAX_NAMES = 8  # in a list


def what_ran(
    runs: Sequence[ItemResult], planned: Collection[str], diverged: Collection[str]
) -> str:
    """The settings of finished `runs`, the number of `planned` items among them, and the items
    without a model."""
    replicas.register()
    lost = f", {len(diverged)} diverged ({_list(sorted(diverged))})" if diverged else ""
    if not runs:
        return f"none of {len(planned)} planned runs has ended with a model{lost}"
    parts = [f"data: {_settings(runs, 'data.')}", f"training: {_settings(runs, 'train.')}"]
    for title, kind in (("scenario", "scenario"), ("method", "recipe")):
        for name in dict.fromkeys(getattr(run, kind) for run in runs):
            own_runs = [run for run in runs if getattr(run, kind) == name]
            methods = own_runs[0].composition.split("+")
            sections = ["scenario."] if kind == "scenario" else [f"{method}." for method in methods]
            variant = (
                ""
                if name in (own_runs[0].scenario, own_runs[0].composition)
                else own_runs[0].composition
            )
            own = ", ".join(filter(None, [variant, _settings(own_runs, *sections)]))
            parts.append(f"{title} {name} ({own})" if own else f"{title} {name}")
    keys = {run.key for run in runs}
    missing = [key for key in planned if key not in keys and key not in diverged]
    other = [key for key in sorted(keys) if key not in planned]
    parts += [
        f"seeds {', '.join(map(str, sorted({run.seed for run in runs})))}",
        f"{len(runs)} runs (planned: {len(planned)}){lost}",
        f"missing: {_list(missing)}" if missing else "",
        f"not in the plan: {_list(other)}" if other else "",
    ]
    notes = _by_run({run.key: ", ".join(notes_of(run)) for run in runs})
    leaks = _by_run({run.key: leak_of(run) for run in runs})
    parts += [f"notes on the data: {notes}" if notes else "", f"LEAK: {leaks}" if leaks else ""]
    return "; ".join(filter(None, parts))


def _settings(runs: Sequence[ItemResult], *sections: str) -> str:
    """`lr 0.1, augment True`, without defaults."""
    settings = {}
    for key in dict.fromkeys(key for run in runs for key in run.params if key.startswith(sections)):
        values = {run.key: run.params.get(key) for run in runs}
        section, _, name = key.partition(".")
        # Of a method, 0 may be a choice. Elsewhere it is none.
        silent = [None, False, DEFAULTS.get(key)]
        if section in registry.loaded():
            silent = [registry.hyper_parameters(section).get(name)]
        shown = {run: "" if value in silent else str(value) for run, value in values.items()}
        if key not in SILENT and any(shown.values()):
            name = key.removeprefix(sections[0]) if len(sections) == 1 else key
            settings[name] = _by_run(shown)
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _by_run(texts: Mapping[str, str]) -> str:
    """The text that all runs share. If they differ, each text with its runs."""
    runs: dict[str, list[str]] = {}
    for run, text in texts.items():
        runs.setdefault(text, []).append(run)
    if len(runs) == 1:
        return next(iter(runs))
    return " / ".join(f"{text} [{_list(keys)}]" for text, keys in runs.items() if text)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
