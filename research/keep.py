"""Writes a result into docs/results/, with the facts to check it: rounds, seeds, machine, versions.

python -m research.keep fnr-tab2 --size small  # after `... papers build fnr-tab2 ...`
python -m research.keep digits-methods         # the results of params.yaml, after `noniid run`

It writes <name>.md, <name>.csv, <name>-rounds.csv (one line per run and round) and <name>-runs.csv
(one line per run). A figure also has a PNG. All facts come from the runs' own records. The new page
replaces the whole old page, including text that was added by hand.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines import edge
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting import chosen, pages, report, summary, tables
from fedml_noniid.pipelines.reporting.pages import render
from fedml_noniid.pipelines.reporting.summary import LAST_ROUNDS
from fedml_noniid.pipelines.reporting.text import as_csv, markdown
from fedml_noniid.pipelines.stages import tune
from research import replicas
from research import report as paper
from research.described import what_ran
from research.report import build
from research.runs import Address, Group, Measured, leak_of, notes_of
from research.studies import SIZES
from research.targets import of_targets, paper_of

log = logging.getLogger(__name__)
FOLDER = Path("docs") / "results"
MAX_CSV_BYTES = 1_000_000  # bytes of a CSV file
STRIDES = (1, 2, 5, 10, 20, 50, 100)
# Tag of a run -> its name on the page.
FACTS = {
    "git_commit": "commit of the code",
    "cpu": "CPU",
    "gpu": "GPU",
    "cores": "cores",
    "device": "device",
    "python": "Python",
    "torch": "torch",
    "fedml": "FedML",
}
OPTIONAL = {"gpu"}

Ends = Mapping[str, Mapping[str, str]]  # study -> item that has diverged -> why


def of_target(name: str, size: str, root: Path) -> dict[str, bytes]:
    """The files of a paper's table or figure. UserError if none of its runs has ended."""
    owner = paper_of(name, root)
    target = of_targets(owner, root)[name]
    measured = Measured(owner, size, root)
    built = build(target, measured)
    # A copy, since `measured` also notes the runs that the text below reads.
    used = dict(measured.used)
    base, facts = f"{name}-{size}", paper.what_was_run(measured, [target])
    ends = {study: measured.diverged_items(study) for study in target.studies}
    columns = ("test_accuracy", *sorted(set(_columns(target.spec)) - {"test_accuracy"}))
    files = _files(
        base,
        used,
        ends,
        columns,
        f"python -m research papers build {name} --size {size}",
        f"{name} --size {size}",
    )
    page = paper.text(target, built, size, facts, f"{base}.png")
    tables_of = {f"{base}.{ending}": content for ending, content in built.files.items()}
    return tables_of | files | {f"{base}.md": page.encode() + b"\n" + files[f"{base}.md"]}


def of_experiment(name: str, root: Path, more: Sequence[str] = ()) -> dict[str, bytes]:
    """The files of the experiment in params.yaml, called `name`.

    `more`: columns by round beside the test accuracy. UserError if none of its runs has ended.
    """
    replicas.register()
    settings = config.load(root)
    planned = [unit.key for unit in settings.units()]
    runs = [run for run in results.read(root) if run.key in planned]
    for run in runs:
        if settings.params(config.Unit(run.scenario, run.recipe, run.seed)) != run.params:
            raise UserError(f"{run.key}: has other settings than params.yaml now; run it again")
    used: dict[Address, Group] = {}
    for run in runs:
        address = Address(settings.experiment, run.scenario, run.recipe)
        used[address] = Group((*used.get(address, Group((), ())).runs, run), ())
    command = " ".join([name, *(["--columns", *more] if more else [])])
    files = _files(name, used, {}, ("test_accuracy", *more), "noniid run", command)
    parts = [f"# {name}", f"{settings.experiment}: {what_ran(runs, planned, ())}."]
    summed = [
        summary.scenario(scenario_name, runs, settings.recipe_names, settings.seeds)
        for scenario_name in settings.scenario_names
    ]
    scenarios = [scenario for scenario in summed if scenario is not None]
    values = chosen.chosen(settings)
    for scenario in scenarios:
        section = report.section(scenario)
        parts += [f"## {scenario.name}", *section["warnings"], " ".join(section["answer"])]
        compared = sum(method.compared for method in scenario.methods)
        parts += pages.sentences("chosen.md.j2", "caution", values, compared)
        parts.append(render("scenario.md.j2", {"section": section}).strip())
    if any(value.tuned for value in values):
        unequal = chosen.unequal(runs)
        arguments = ("sentences", values, settings.scenario_names, unequal)
        parts += ["## The values of each method", *pages.sentences("chosen.md.j2", *arguments)]
        parts.append(markdown(chosen.table(values)))
        trials = root / tune.FOLDER / tune.TRIALS
        if trials.is_file():
            files[f"{name}-trials.csv"] = trials.read_bytes()
            parts.append(f"All trials: [{name}-trials.csv]({name}-trials.csv).")
    page = "\n\n".join(parts).encode() + b"\n\n" + files[f"{name}.md"]
    return files | {f"{name}.csv": tables.summary_csv(scenarios).encode(), f"{name}.md": page}


def _files(
    base: str,
    used: Mapping[Address, Group],
    ends: Ends,
    columns: Sequence[str],
    command: str,
    name: str,
) -> dict[str, bytes]:
    """The files that every result has beside its own table.

    The page's entry holds only its last section.
    """
    runs = [run for group in used.values() for run in group.runs]
    if not runs:
        raise UserError(f"{base}: none of its runs has ended; run `{command}` first")
    rounds, stride = rounds_csv(used, columns)
    every = "every round" if stride == 1 else f"every {stride} rounds and the last"
    measured = "Accuracy" if len(columns) == 1 else ", ".join(columns)
    facts = [
        f"Command: `{command}`; kept by `python -m research.keep {name}`.",
        *(
            f"{title}: {_values(runs, tag)}."
            for tag, title in FACTS.items()
            if _is_shown(runs, tag)
        ),
        f"Seeds: {', '.join(map(str, sorted({run.seed for run in runs})))}.",
        f"{measured} after {every}, by run: [{base}-rounds.csv]({base}-rounds.csv). Outcome of "
        "each run, SHA-256 of its "
        f"weights, seconds, commit: [{base}-runs.csv]({base}-runs.csv).",
    ]
    section = "## Made with\n\n" + "".join(f"- {line[0].upper()}{line[1:]}\n" for line in facts)
    return {
        f"{base}-rounds.csv": rounds,
        f"{base}-runs.csv": runs_csv(used, ends),
        f"{base}.md": section.encode(),
    }


def rounds_csv(
    used: Mapping[Address, Group], columns: Sequence[str], most_bytes: int = MAX_CSV_BYTES
) -> tuple[bytes, int]:
    """(CSV text, stride): the columns of rounds.csv to six digits, every `stride` rounds, as many
    lines as fit."""
    for stride in STRIDES:
        lines = [
            [*address, run.seed, int(row["round"]), *(row.get(column) for column in columns)]
            for address, group in used.items()
            for run in group.runs
            for row in _rows(run)
            if int(row["round"]) % stride == 0 or row["round"] == run.rows[-1]["round"]
        ]
        text = as_csv(("study", "scenario", "recipe", "seed", "round", *columns), lines, digits=6)
        if len(text) < most_bytes:
            return text, stride
    raise UserError(
        f"one round in {stride} of all its runs takes {len(text)} bytes; allowed: less than "
        f"{most_bytes}"
    )


def _rows(run: ItemResult) -> list[dict[str, Any]]:
    """The rows of rounds.csv, each with the wall time of its round; None where it is not known."""
    times = run.seconds or [None] * len(run.rows)
    return [{**row, "seconds": x} for row, x in zip(run.rows, times, strict=True)]


def runs_csv(used: Mapping[Address, Group], ends: Ends) -> bytes:
    """One line per run, including runs that diverged and have no model."""
    lines: list[list[object]] = []
    for (study, scenario, recipe), group in used.items():
        lines += [
            [study, scenario, recipe, run.seed, "ended", *_outcome(run)] for run in group.runs
        ]
        for seed in group.diverged:
            why = " ".join(ends[study][f"{scenario}-{recipe}-{seed}"].split())
            lines.append([study, scenario, recipe, seed, f"diverged: {why}", *[""] * 8])
    header = (
        "final",
        "best",
        f"last{LAST_ROUNDS}",
        "seconds",
        "leak",
        "notes",
        "weights_sha256",
        "commit",
    )
    return as_csv(("study", "scenario", "recipe", "seed", "outcome", *header), lines, digits=6)


def _outcome(run: ItemResult) -> list[object]:
    accuracies = run.column("test_accuracy")
    numbers = (accuracies[-1], max(accuracies), statistics.fmean(accuracies[-LAST_ROUNDS:]))
    seconds = None if run.seconds is None else sum(run.seconds)
    sha, commit = run.tags["weights_sha256"], run.tags.get("git_commit", "not recorded")
    return [*numbers, seconds, leak_of(run), "; ".join(notes_of(run)), sha, commit]


def _is_shown(runs: Sequence[ItemResult], tag: str) -> bool:
    return tag not in OPTIONAL or any(tag in run.tags for run in runs)


def _values(runs: Sequence[ItemResult], tag: str) -> str:
    """The value of a tag. If the runs differ: each value with its number of runs."""
    recorded = [run.tags.get(tag, "not recorded") for run in runs]
    values = list(dict.fromkeys(recorded))
    counts = {value: recorded.count(value) for value in values}
    counted = (f"{value} ({n} run{'s' if n > 1 else ''})" for value, n in counts.items())
    return values[0] if len(values) == 1 else ", ".join(counted)


def _columns(tree: Any) -> Iterator[str]:
    """The columns of rounds.csv that a target draws: the values of its keys `column` at any
    depth."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from [str(value)] if key == "column" else _columns(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _columns(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files of a paper's table or figure, or of the experiment in params.yaml."""
    options = argparse.ArgumentParser(prog="python -m research.keep", description=__doc__)
    options.add_argument("name", help="a table or figure with --size, else a name for the result")
    options.add_argument("--size", choices=SIZES, help="size of the table or figure")
    options.add_argument(
        "--columns", nargs="+", default=[], help="of rounds.csv, or seconds; of params.yaml's runs"
    )
    options.add_argument("--root", type=Path, default=Path(), help="folder of params.yaml")
    parsed = options.parse_args(arguments)

    def write() -> None:
        files = (
            of_experiment(parsed.name, parsed.root, parsed.columns)
            if parsed.size is None
            else of_target(parsed.name, parsed.size, parsed.root)
        )
        for file, content in files.items():
            write_whole(parsed.root / FOLDER / file, content)
            log.info("%s", FOLDER / file)

    return edge.guarded(write)


if __name__ == "__main__":
    sys.exit(main())
