"""The last stage: reads the results of all train items and writes `report/`, whole or not at all.

    python -m pipelines.report

`report.html` needs nothing else (pictures are inside), `report.md` is the same with links to the pictures,
`table.txt` is for the terminal and `summary.csv` holds every number of the tables, unrounded.
"""

from __future__ import annotations

import argparse
import base64
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from pipelines import figures, results, summary, tables
from pipelines.summary import Scenario
from plugins.core.errors import UserError
from plugins.data.files import replace_folder

TEMPLATES = Path(__file__).parent / "templates"
INTRO = (
    "Clients train a common model, each on its own data, and a server combines what they send. This page compares "
    "ways of doing so by how well the common model does on test samples that no client has seen."
)
LEAKS = " Lines marked LEAK have seen these samples in training: they show what that is worth."
LOOK_NEXT = (
    ("report/report.html", "this report in a browser, pictures inside"),
    ("make ui", "every run in MLflow, with curves to compare; it prints the link"),
    ("report/summary.csv", "all numbers of the tables, unrounded"),
    ("runs/<scenario>-<method>-<seed>/rounds.csv", "one run, round by round; its final weights are beside it"),
    ("evaluation/<scenario>-<method>-<seed>/", "accuracy per class and per client"),
    ("params.yaml", "what is run: change it, then `make repro`"),
)


def write(root: Path) -> Path:
    """Writes the report of the results under `root` and returns its folder. UserError if there are no results."""
    params, found = _params(root), results.read(root)
    recipes, seeds = params["recipe_names"], params["seeds"]
    summed = (summary.scenario(name, found, recipes, seeds) for name in params["scenario_names"])
    scenarios = [scenario for scenario in summed if scenario is not None]
    if not scenarios:
        raise UserError(f"{root / 'runs'}: holds no finished run of params.yaml; run `make repro` first")
    sections = [_section(root, params, scenario) for scenario in scenarios]
    files = {name: picture for section in sections for name, _, picture in section["pictures"]}
    leaks = any(line.leak for scenario in scenarios for line in scenario.lines)
    intro = INTRO + (LEAKS if leaks else "")
    context = {"title": params["experiment"], "intro": intro, "facts": _facts(params, scenarios, found)}
    context |= {"sections": sections, "next": LOOK_NEXT}
    files["report.html"] = render("report.html.j2", context).encode()
    files["report.md"] = render("report.md.j2", context).encode()
    files["table.txt"] = ("\n".join(_terminal(section) for section in sections) + _places()).encode()
    files["summary.csv"] = tables.summary_csv(scenarios).encode()
    files |= {f"curves-{s.name}.csv": tables.curves_csv(s, recipes).encode() for s in scenarios}
    replace_folder(root / "report", files)
    return root / "report"


def _places() -> str:
    """Where to look next, for the terminal."""
    width = max(len(place) for place, _ in LOOK_NEXT)
    return "\nWhere to look next:\n" + "".join(f"  {place:<{width}}  {what}\n" for place, what in LOOK_NEXT)


def _params(root: Path) -> dict[str, Any]:
    path = root / "params.yaml"
    try:
        params = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: can't be read ({str(error).splitlines()[0]})") from None
    for key in ("experiment", "scenario_names", "recipe_names", "seeds"):
        if not isinstance(params, dict) or key not in params:
            raise UserError(f"{path}: the key {key!r} is missing")
    return dict(params)


def _facts(
    params: Mapping[str, Any], scenarios: Sequence[Scenario], found: Sequence[results.Result]
) -> list[tuple[str, str]]:
    """What was run, for a reader who has not seen params.yaml."""
    data = [str((params.get("data") or {}).get("name", "?")), *dict.fromkeys(note for r in found for note in r.notes)]
    train, seeds = params.get("train") or {}, sorted({s for x in scenarios for line in x.lines for s in line.seeds})
    rounds = max(line.rounds for scenario in scenarios for line in scenario.lines)
    optimiser = " ".join(f"{k} {train[k]:g}" for k in ("lr", "momentum", "weight_decay") if train.get(k))
    local = f"{train.get('epochs', '?')} epochs per round, batches of {train.get('batch_size', '?')}"
    settings = [f"{name} ({_settings(of)})" for name, of in (params.get("recipes") or {}).items() if of]
    return [
        ("Data", "; ".join(data)),
        ("Model", str(train.get("model", "?"))),
        ("Rounds", str(rounds)),
        ("Training on a client", f"{local}, {train.get('optimizer', '?')} {optimiser}".rstrip()),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Methods", ", ".join(params["recipe_names"])),
        *(
            [("Settings", "; ".join(s for s in settings if s.split(" ")[0] in params["recipe_names"]))]
            if settings
            else []
        ),
    ]


def _settings(tree: Mapping[str, Any]) -> str:
    """`p 0.5` for `{fnr: {p: 0.5}}`."""
    flat = [
        " ".join(f"{key} {value}" for key, value in part.items()) if isinstance(part, Mapping) else f"{name} {part}"
        for name, part in tree.items()
    ]
    return ", ".join(flat)


def _section(root: Path, params: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Everything that the templates say about one scenario."""
    recipes, name = params["recipe_names"], scenario.name
    accuracy = figures.accuracy(scenario, recipes)
    pictures = [
        (f"accuracy-{name}.png", "Test accuracy of the global model after each round" + _band(scenario), accuracy),
        (
            f"traffic-{name}.png",
            "Test accuracy against the data transferred so far",
            figures.traffic(scenario, recipes),
        ),
    ]
    seed = min(s for line in scenario.lines for s in line.seeds)
    heatmap = root / "partitions" / f"{name}-{seed}" / "heatmap.png"
    if heatmap.exists():
        caption = f"How many training samples of each class each client holds (seed {seed})"
        pictures.append((f"partition-{name}.png", caption, heatmap.read_bytes()))
    return {
        "name": name,
        "about": _about(root, (params.get("scenarios") or {}).get(name) or {}, f"{name}-{seed}"),
        "header": tables.header(scenario),
        "rows": tables.cells(scenario),
        "markdown": tables.markdown(scenario),
        "plain": tables.plain(scenario),
        "words": tables.words(scenario),
        "notes": tables.notes(scenario),
        "pictures": pictures,
    }


def _band(scenario: Scenario) -> str:
    spread = any(line.final.std is not None for line in scenario.lines)
    return ": mean over seeds, the band is ± one standard deviation" if spread else " (one seed)"


def _about(root: Path, settings: Mapping[str, Any], partition: str) -> str:
    """The clients of a scenario: how the data was split, how many take part, how much they hold."""
    split = {k: v for k, v in settings.items() if k not in ("partition", "clients", "participation", "noise")}
    options = f" ({', '.join(f'{k} {v}' for k, v in split.items())})" if split else ""
    share = float(settings.get("participation", 1))
    text = f"{settings.get('clients', '?')} clients, partition {settings.get('partition', '?')}{options}, "
    text += "all take part in each round." if share == 1 else f"{share:.0%} of them take part in each round."
    if noise := settings.get("noise"):
        text += (
            f" Each sees its samples in Gaussian noise of its own ({', '.join(f'{k} {v}' for k, v in noise.items())})."
        )
    path = root / "partitions" / partition / "clients.csv"
    if not path.exists():
        return text
    rows = results.table(path)
    sizes = sorted(int(row["samples"]) for row in rows)
    classes = [column for column in rows[0] if column not in ("client", "samples", "classes", "entropy", "noise")]
    held = [sum(int(row[column]) > 0 for column in classes) for row in rows]
    text += f" A client holds {sizes[0]} to {sizes[-1]} training samples (median {statistics.median(sizes):g})"
    text += f" of {min(held)} to {max(held)} classes (median {statistics.median(held):g})."
    return text + _skew(root / "partitions" / partition / "statistics.json", len(classes))


def _skew(path: Path, n_classes: int) -> str:
    """The measures of a partition in words."""
    if not path.exists():
        return ""
    found = results.numbers(results.record(path))
    try:
        return (
            f" How unlike they are: label distance {found['label_distance_mean']:.2f} on average and "
            f"{found['label_distance_max']:.2f} at most (0: a client's classes are mixed as those of all, 1: nothing "
            f"in common), entropy of a client's labels {found['entropy_mean']:.2f} bits on average "
            f"({math.log2(n_classes):.2f}: all classes alike, 0: one class), Gini coefficient of the sizes "
            f"{found['size_gini']:.2f} (0: all equal)."
        )
    except KeyError as error:
        raise UserError(f"{path}: the key {error} is missing; {results.RERUN}") from None


def render(name: str, context: Mapping[str, Any]) -> str:
    """A template of TEMPLATES, filled in; `inline` makes a picture's bytes an address."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = lambda picture: "data:image/png;base64," + base64.b64encode(picture).decode()
    return environment.get_template(name).render(context) + "\n"


def _terminal(section: Mapping[str, Any]) -> str:
    marks = "".join(textwrap.fill(note, 110, subsequent_indent="  ") + "\n" for note in section["notes"])
    return f"{textwrap.fill(section['name'] + ': ' + section['about'], 110)}\n\n{section['plain']}\n{marks}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.stage report", description="Writes report/.")
    parser.add_argument("--root", type=Path, default=Path(), help="repository (the current folder)")
    options = parser.parse_args(arguments)
    try:
        folder = write(options.root)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{folder / 'report.html'} is written, and the same as text in {folder / 'table.txt'}\n")
    return 0
