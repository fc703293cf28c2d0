"""The report of an experiment: reads the results of all items and writes `report/`, whole or not at
all.

`report.html` holds its pictures, `report.md` is the same with links to them, and `table.txt` is for
the terminal. `summary.csv` has every number of the tables, unrounded. `metrics.json` and
`curves-<scenario>.csv` are for DVC.
"""

from __future__ import annotations

import base64
import json
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.reporting import chosen, figures, summary, tables
from fedml_noniid.pipelines.reporting.summary import Scenario
from fedml_noniid.pipelines.reporting.text import markdown, plain
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import replace_folder
from fedml_noniid.plugins.rates import words

TEMPLATES = Path(__file__).parent / "templates"
INTRO = (
    "Clients train a common model, each on its own data, and a server combines what they send. "
    "This page compares "
    "methods by the accuracy of the common model on test samples that no client has seen."
)
LEAKS = " Lines marked LEAK have seen these samples in training. They show how much that helps."
CLIENTS = (
    "Accuracy per client after the last round, the clients of all seeds together: a mark per "
    "client, a box around the "
    "middle half with the median, a line from the worst to the best"
)
DRIFT_NOTE = (
    "Each round's accuracy is on the labels of that round: the mean over all clients, each with "
    "its own labels. The "
    "best of any round may be one before the drift. The counts of classes are those of the true "
    "labels."
)
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
    ("evaluation/<scenario>-<method>-<seed>/", "accuracy per class and per client"),
    ("params.yaml", "what is run: change it, then `noniid run`"),
)


def write(root: Path) -> Path:
    """Writes the report of the results under `root` and returns its folder.

    UserError if there are no results.
    """
    settings, found = config.load(root), results.read(root)
    recipes, seeds = settings.recipe_names, settings.seeds
    summed = (summary.scenario(name, found, recipes, seeds) for name in settings.scenario_names)
    scenarios = [scenario for scenario in summed if scenario is not None]
    if not scenarios:
        raise UserError(
            f"{root / 'runs'}: holds no finished run of params.yaml; run `noniid run` first"
        )
    sections = [_section(root, settings, scenario) for scenario in scenarios]
    files = {name: picture for section in sections for name, _, picture in section["pictures"]}
    leaks = any(line.leak for scenario in scenarios for line in scenario.lines)
    intro = INTRO + (LEAKS if leaks else "")
    facts = _facts(settings, scenarios, found)
    context = {
        "title": settings.experiment,
        "intro": intro,
        "facts": facts,
        "values": chosen.table(settings),
        "values_note": chosen.TABLE_NOTE,
        "sections": sections,
        "next": LOOK_NEXT,
    }
    files |= {name: render(f"{name}.j2", context).encode() for name in ("report.html", "report.md")}
    files["table.txt"] = (
        "\n".join(_terminal(section) for section in sections) + _places()
    ).encode()
    files["metrics.json"] = (json.dumps(tables.headline(scenarios), indent=2) + "\n").encode()
    files["summary.csv"] = tables.summary_csv(scenarios)
    files |= {f"curves-{s.name}.csv": tables.curves_csv(s, recipes) for s in scenarios}
    replace_folder(root / "report", files)
    return root / "report"


def _places() -> str:
    """Where to look next, for the terminal."""
    width = max(len(place) for place, _ in LOOK_NEXT)
    return "\nWhere to look next:\n" + "".join(
        f"  {place:<{width}}  {what}\n" for place, what in LOOK_NEXT
    )


def _facts(
    settings: Config, scenarios: Sequence[Scenario], found: Sequence[results.ItemResult]
) -> list[tuple[str, str]]:
    """What was run, for a reader who has not seen params.yaml."""
    data = [settings.data.name, *dict.fromkeys(note for result in found for note in result.notes)]
    train, seeds = (
        settings.train,
        sorted({s for x in scenarios for line in x.lines for s in line.seeds}),
    )
    rounds = max(line.rounds for scenario in scenarios for line in scenario.lines)
    own = {key for name in settings.recipe_names for key in settings.recipes[name].train.given}
    numbers = {
        key: getattr(train, key) for key in ("lr", "momentum", "weight_decay") if key not in own
    }
    optimiser = " ".join(f"{key} {words(value)}" for key, value in numbers.items() if value)
    optimiser += f"; {', '.join(sorted(own))} by method" if own else ""
    count, unit = (train.local_steps, "step") if train.local_steps else (train.epochs, "epoch")
    work = f"{count} {unit}{'s' if count > 1 else ''}"
    local = f"{work} per round, batches of {train.batch_size}"
    return [
        ("Data", "; ".join(data)),
        ("Model", train.model),
        ("Rounds", str(rounds)),
        ("Training on a client", f"{local}, {train.optimizer} {optimiser}".replace(" ;", ";")),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Methods", ", ".join(settings.recipe_names)),
        (
            "Tuning",
            " ".join(
                chosen.sentences(
                    settings, (run for scenario in scenarios for run in scenario.results)
                )
            ),
        ),
    ]


def _section(root: Path, settings: Config, scenario: Scenario) -> dict[str, Any]:
    """What the templates need of one scenario."""
    recipes, name, table = settings.recipe_names, scenario.name, tables.cells(scenario)
    accuracy, traffic = figures.accuracy(scenario, recipes), figures.traffic(scenario, recipes)
    pictures = [
        (
            f"accuracy-{name}.png",
            "Test accuracy of the global model after each round" + _band(scenario),
            accuracy,
        ),
        (f"traffic-{name}.png", "Test accuracy against the data transferred so far", traffic),
    ]
    if clients := figures.clients(scenario, recipes):
        pictures.append((f"clients-{name}.png", CLIENTS, clients))
    seed = min(s for line in scenario.lines for s in line.seeds)
    heatmap = root / "partitions" / f"{name}-{seed}" / "heatmap.png"
    if heatmap.exists():
        caption = f"How many training samples of each class each client holds (seed {seed})"
        pictures.append((f"partition-{name}.png", caption, heatmap.read_bytes()))
    return {
        "name": name,
        "about": _about(root, settings.scenarios[name], f"{name}-{seed}"),
        "warnings": tables.warnings(scenario),
        "answer": tables.answer(scenario),
        "table": table,
        "compared": tables.compared(scenario),
        "compared_note": tables.COMPARED_NOTE,
        "words": tables.details(scenario),
        "notes": tables.notes(scenario),
        "pictures": pictures,
    }


def _band(scenario: Scenario) -> str:
    spread = any(line.final.std is not None for line in scenario.lines)
    return ": mean over seeds, the band is ± one standard deviation" if spread else " (one seed)"


def _about(root: Path, scenario: config.Scenario, partition: str) -> str:
    """The clients of a scenario: how the data is split, how many take part, how much they hold."""
    options = (
        f" ({', '.join(f'{k} {v}' for k, v in scenario.options.items())})"
        if scenario.options
        else ""
    )
    part = "all" if scenario.participation == 1 else f"{scenario.participation:.0%} of them"
    text = (
        f"{scenario.clients} clients, partition {scenario.partition}{options}, {part} take "
        "part in each round."
    )
    if scenario.noise is not None:
        noise = f"{scenario.noise.form} noise, sigma {scenario.noise.sigma:g}"
        text += f" Each client's samples have Gaussian noise of its own ({noise})."
    if scenario.label_noise is not None:
        text += f" Some training labels of the clients are wrong ({scenario.label_noise.words})."
    if scenario.rotation is not None:
        text += f" Each client has one angle ({scenario.rotation.words})."
    if scenario.drift is not None:
        text += f" The clients' labels change with the round ({scenario.drift.words}). {DRIFT_NOTE}"
    if scenario.availability is not None:
        text += f" Availability: {scenario.availability.words}."
    path = root / "partitions" / partition / "clients.csv"
    if not path.exists():
        return text
    rows = results.table(path)
    sizes = sorted(int(row["samples"]) for row in rows)
    classes = [
        column
        for column in rows[0]
        if column not in ("client", "samples", "classes", "entropy", *config.SKEWS)
    ]
    held = [sum(int(row[column]) > 0 for column in classes) for row in rows]
    text += f" A client holds {_range(sizes)} training samples of {_range(held)} classes."
    return text + _skew(root / "partitions" / partition / "statistics.json", len(classes))


def _range(values: Sequence[int]) -> str:
    """`10 to 30 (median 20)`, or the one value that all have."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high} (median {statistics.median(values):g})"


def _skew(path: Path, n_classes: int) -> str:
    """The measures of a partition in words."""
    if not path.exists():
        return ""
    found = results.numbers(results.record(path))
    try:
        return (
            f" Heterogeneity: label distance {found['label_distance_mean']:.2f} on average and "
            f"{found['label_distance_max']:.2f} at most (0: a client has the class mix of all "
            "clients together, 1: no "
            f"class in common), entropy of a client's labels {found['entropy_mean']:.2f} bits "
            "on average "
            f"({math.log2(n_classes):.2f}: all classes alike, 0: one class), Gini coefficient "
            "of the sizes "
            f"{found['size_gini']:.2f} (0: all equal)."
        )
    except KeyError as error:
        raise UserError(f"{path}: the key {error} is missing; {results.RERUN}") from None


def inline(picture: bytes) -> str:
    """The address of a picture that lies in the page itself."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def as_code(text: object) -> Markup:
    """Text for a page of HTML. What stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def render(name: str, context: Mapping[str, Any]) -> str:
    """A template of TEMPLATES, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"markdown": markdown, "inline": inline, "code": as_code}
    return environment.get_template(name).render(context) + "\n"


def _terminal(section: Mapping[str, Any]) -> str:
    def filled(text: str) -> str:
        return textwrap.fill(text, 110, subsequent_indent="  ") + "\n"

    compared = "".join(f"\n{title}\n\n{plain(table)}" for title, table in section["compared"][:1])
    return (
        textwrap.fill(f"{section['name']}: {section['about']}", 110)
        + "\n\n"
        + "".join(map(filled, section["warnings"]))
        + f"{filled(' '.join(section['answer']))}\n{plain(section['table'])}"
        + "".join(map(filled, section["notes"]))
        + (compared and compared + filled(section["compared_note"]))
    )
