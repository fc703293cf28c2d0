"""The report of an experiment: reads the results of all items and writes `report/`, whole or not at
all.

`report.html` holds its pictures, `report.md` is the same with links to them. `table.txt` is for the
terminal, and `answer.txt` is its short form. `summary.csv` has every number of the tables,
unrounded. `dvc/` and `curves-<scenario>.csv` are for DVC. The words are in `templates/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import replace_folder
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting import chosen, clock, figures, pages, summary, tables
from fedml_noniid.pipelines.reporting.summary import ScenarioSummary

CLIENTS = (
    "per client after the last round, the clients of all seeds together: a mark per "
    "client, a box around the middle half with the median, a line from the worst to the best"
)
CLOCK = "clock.png"
LOOK_NEXT = (
    ("report/report.html", "this report in a browser, pictures inside"),
    (
        "noniid ui",
        "every run in MLflow, with curves to compare and seconds; the command prints the link",
    ),
    ("report/summary.csv", "all numbers of the tables, unrounded"),
    (
        "runs/<scenario>-<method>-<seed>/rounds.csv",
        "one run, round by round; its final weights are beside it",
    ),
    ("evaluation/<scenario>-<method>-<seed>/", "{by} and per client"),
    ("params.yaml", "what is run: change it, then `noniid run`"),
)


def summarized(root: Path) -> tuple[Config, list[ItemResult], list[ScenarioSummary]]:
    """Reads the settings and all results under `root`, and sums up the scenarios that have any.

    UserError if there are none.
    """
    settings, items = config.load(root), results.read(root)
    summed = (
        summary.scenario(name, items, settings.recipe_names, settings.seeds)
        for name in settings.scenario_names
    )
    scenarios = [scenario for scenario in summed if scenario is not None]
    if not scenarios:
        raise UserError(
            f"{root / 'runs'}: holds no finished run of params.yaml; run `noniid run` first"
        )
    return settings, items, scenarios


def write(root: Path) -> Path:
    """Writes the report of the results under `root` and returns its folder.

    UserError if there are no results.
    """
    settings, items, scenarios = summarized(root)
    pictures: dict[str, bytes] = {}
    sections = []
    for scenario in scenarios:
        drawn = _pictures(root, settings, scenario)
        pictures |= {file: picture for file, (_, picture) in drawn.items()}
        sections.append(
            section(scenario, scenarios)
            | {
                "about": _about(
                    *(root, settings.scenarios[scenario.name]),
                    *(_partition(scenario), _groups(scenario.main)),
                ),
                "captions": {file: caption for file, (caption, _) in drawn.items()},
            }
        )
    context = _facts(settings, scenarios, items) | {"sections": sections}
    curves, metric = (
        clock.read(run for scenario in scenarios for run in scenario.results),
        scenarios[0].metric,
    )
    context["clock"], context["clock_note"] = clock.table(curves, metric), ""
    if curves:
        context["clock_note"] = clock.note(curves, metric)
        pictures[CLOCK] = clock.picture(curves, metric)
    by = f"{scenarios[0].metric.label} per {_groups(scenarios[0].main)[2]}"
    context["next"] = [(source, what.format(by=by)) for source, what in LOOK_NEXT]
    page = pages.render("report.md.j2", context)
    files: dict[str, bytes | str] = {
        **pictures,
        "report.html": pages.html_page(settings.experiment, page, pictures),
        "report.md": page,
        "table.txt": pages.render("table.txt.j2", context),
        "answer.txt": pages.render("answer.txt.j2", context),
        "summary.csv": tables.summary_csv(scenarios),
    }
    files |= {
        f"curves-{s.name}.csv": tables.curves_csv(s, settings.recipe_names) for s in scenarios
    }
    for name, numbers in tables.headline(scenarios).items():
        files[f"dvc/{name}.json"] = json.dumps(numbers, indent=2) + "\n"
    replace_folder(
        root / "report",
        {name: x.encode() if isinstance(x, str) else x for name, x in files.items()},
    )
    return root / "report"


def section(scenario: ScenarioSummary, scenarios: Sequence[ScenarioSummary] = ()) -> dict[str, Any]:
    """The tables and sentences of one of the scenarios, as `scenario.md.j2` takes them."""
    unequal = chosen.unequal(scenario.results)
    return {
        "name": scenario.name,
        "table": tables.cells(scenario),
        "brief": tables.in_brief(scenario),
        "sites": tables.by_site(scenario),
        "unseen": tables.unseen_sites(scenario, scenarios),
        "site_tests": tables.site_tests(scenario),
        "site_tests_notes": pages.sentences(
            "sentences.md.j2", "site_tests_notes", scenario, tables.site_changes(scenario)
        ),
        "sites_note": pages.sentences("sentences.md.j2", "sites_note", scenario)[0],
        "compared": tables.compared(scenario),
        "warnings": pages.sentences("sentences.md.j2", "warnings", scenario),
        "answer": pages.sentences("sentences.md.j2", "answer", scenario),
        "notes": pages.sentences("sentences.md.j2", "notes", scenario, unequal),
        "compared_note": pages.sentences("sentences.md.j2", "compared_note", scenario)[0],
        "missing": scenario.missing,
    }


def _facts(
    settings: Config, scenarios: list[ScenarioSummary], items: list[ItemResult]
) -> dict[str, Any]:
    """What was run, for a reader who has not seen params.yaml."""
    methods = [method for scenario in scenarios for method in scenario.methods]
    by_method = {
        key for name in settings.recipe_names for key in settings.recipes[name].train.overrides
    }
    values = chosen.chosen(settings)
    runs = [run for scenario in scenarios for run in scenario.results]
    n_compared = max(sum(method.compared for method in scenario.methods) for scenario in scenarios)
    return {
        "settings": settings,
        "leaks": any(method.leak for method in methods),
        "metric": scenarios[0].metric.label,
        "data": [settings.data.name, *dict.fromkeys(note for run in items for note in run.notes)],
        "rounds": max(method.rounds for method in methods),
        "seeds": sorted({seed for method in methods for seed in method.seeds}),
        "local_training": pages.sentences(
            "about.md.j2", "local_training", settings.train, sorted(by_method)
        )[0],
        "tuning": pages.sentences(
            "chosen.md.j2", "sentences", values, settings.scenario_names, chosen.unequal(runs)
        ),
        "caution": pages.sentences("chosen.md.j2", "caution", values, n_compared),
        "short_caution": pages.sentences("chosen.md.j2", "caution", values, n_compared, True),
        "values": chosen.table(values),
    }


def _pictures(
    root: Path, settings: Config, scenario: ScenarioSummary
) -> dict[str, tuple[str, bytes]]:
    """The pictures of a scenario by their file: caption and content."""
    recipes, name = settings.recipe_names, scenario.name
    has_band = any(method.final.std is not None for method in scenario.methods)
    band = ": mean over seeds, the band is ± one standard deviation" if has_band else " (one seed)"
    pictures = {
        f"{scenario.main}-{name}.png": (
            f"Test {scenario.metric.label} of the global model after each round" + band,
            figures.accuracy(scenario, recipes),
        ),
    }
    if clients := figures.clients(scenario, recipes):
        label = scenario.metric.label
        pictures[f"clients-{name}.png"] = (f"{label[0].upper()}{label[1:]} {CLIENTS}", clients)
    heatmap = root / "partitions" / _partition(scenario) / "heatmap.png"
    if heatmap.exists():
        caption = f"How many training samples of each {_groups(scenario.main)[1]} each client has"
        caption += " (first seed)"
        pictures[f"partition-{name}.png"] = (caption, heatmap.read_bytes())
    return pictures


def _about(
    root: Path,
    scenario: config.Scenario,
    partition: str,
    groups: Sequence[str] = ("classes", "class"),
) -> str:
    """The clients of a scenario: how the data is split, how many take part, how much they hold.

    `groups`: what the partition goes by, as plural and singular.
    """
    folder = root / "partitions" / partition
    facts: dict[str, Any] = {"sizes": [], "statistics": {}, "groups": groups}
    if (folder / "clients.csv").exists():
        table = _clients(folder / "clients.csv")
        skews = [key for key in config.SKEWS if getattr(scenario, key) is not None]
        # By place, since a class may be called as a column before the classes.
        classes = table.iloc[:, len(["client", "samples", "entropy", *skews]) :]
        facts["sizes"] = table["samples"].astype(int).tolist()
        facts["classes"] = (classes > 0).sum(axis=1).tolist()
        facts["most_bits"] = math.log2(classes.shape[1])
        if (folder / "statistics.json").exists():
            facts["statistics"] = results.record(folder / "statistics.json")
    return " ".join(pages.sentences("about.md.j2", "clients", scenario, facts))


def _clients(path: Path) -> pd.DataFrame:
    """The table of a partition. UserError if it is no table of numbers."""
    try:
        table = pd.read_csv(path)
        # By place, since a class may be called so too.
        owners = [name for name in table.columns[1:2] if name == "owner"]
        return table.drop(columns=owners).astype(float)
    except (OSError, ValueError) as error:  # ParserError is a ValueError
        raise UserError(f"{path}: can't be read ({error}); {results.RERUN}") from None


def _groups(main: str) -> tuple[str, str, str]:
    """What partitions go by, as plural and singular, and what a network has outputs for; `main`:
    the main metric."""
    if main == "accuracy":
        return "classes", "class", "class"
    return "strata of the target", "stratum of the target", "target"


def _partition(scenario: ScenarioSummary) -> str:
    """The partition of the first seed, which stands for the others."""
    return f"{scenario.name}-{min(seed for method in scenario.methods for seed in method.seeds)}"
