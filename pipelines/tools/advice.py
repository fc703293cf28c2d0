"""What `noniid advise` does: advice on the scenarios of params.yaml, the base of runs, and what the
advice is worth."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.advise import base, measures, validation
from fedml_noniid.pipelines.advise.base import BASELINE, Row
from fedml_noniid.pipelines.advise.learner import LEVEL, Advice, Learner
from fedml_noniid.pipelines.advise.validation import Trial
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies
from fedml_noniid.pipelines.reporting.advice import advised, base_words
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.summary import spread
from fedml_noniid.pipelines.reporting.text import as_csv, markdown, plain
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.yaml_files import read_yaml

log = logging.getLogger(__name__)
STUDY = Path(base.__file__).with_name("study.yaml")
NAME, SIZE = "advice", "paper"  # of the studies' folders
FILES = ("advice-base.csv", "advice.csv", "advice.md")
SHOWN = 6  # methods of a scenario that the command shows
STRATEGIES = ("advisor", "best on average", "FedAvg")
WAYS = {"scenario": validation.scenarios, "data set": validation.data_sets}
WORTH = (
    "Regret: how many points of final test accuracy a choice ends below the best method of that "
    "scenario. The best "
    "method is picked by the same three seeds, so every regret looks somewhat too large. "
    "Brackets: the 95 % interval "
    "of the mean over scenarios (t). Scenarios of one data set share its samples, so the "
    "interval is rather too short."
)


def text(root: Path) -> str:
    """The advice on each scenario of params.yaml, for a terminal. Needs the partitions."""
    settings = config.load(root)
    learner = Learner(base.known(base.read()))
    parts = [
        words(name, found.advice) + "\n" for name, found in advised(root, settings, learner).items()
    ]
    return "\n".join([*parts, base_words(learner)])


def words(name: str, advice: Advice) -> str:
    """What is said of one scenario, for a terminal."""
    if advice.best is None:
        return f"{name}: don't know ({advice.reason})"
    shown = [["method", "expected gain, points", f"{100 * LEVEL:g} % interval"], *_ranked(advice)]
    return f"{name}: most like {advice.nearest}\n{plain(shown)}".rstrip("\n")


def _ranked(advice: Advice) -> list[list[str]]:
    return [
        [one.method, f"{one.gain:+z.1f}", f"{one.low:+z.1f} to {one.high:+z.1f}"]
        for one in advice.ranked[:SHOWN]
    ]


def study_names() -> list[str]:
    """The studies of the base."""
    return [str(name) for name in read_yaml(STUDY)["study_names"]]


def make(place: Workspace, folder: Path, only: str | None, running: bool) -> None:
    """Runs what is left of the studies, or of one, and writes the base and its page into `folder`.

    UserError.
    """
    content = read_yaml(STUDY)["studies"]
    names = study_names()
    chosen = names if only is None else [known("study", only, names)]
    found = {
        name: studies.resolved(NAME, name, SIZE, content, f"{STUDY.name}: study") for name in names
    }
    if running:
        # Imported here: it imports mlflow, which takes seconds.
        from fedml_noniid.pipelines.papers.study import execute

        for name in chosen:
            execute(place, found[name])
    rows = [
        row
        for name, study in found.items()
        for row in rows_of(name, place.root / study.folder, place.root)
    ]
    if not rows:
        raise UserError(
            f"{place.root / studies.RESULTS / NAME}: holds no finished study; run `noniid "
            "advise --make-base`"
        )
    scenarios = base.known(rows)
    header, *lines = base.as_lines(rows)
    trials = {way: left_out(scenarios) for way, left_out in WAYS.items()}
    files = {
        FILES[0]: as_csv([str(cell) for cell in header], lines),
        FILES[1]: trials_csv(trials),
        FILES[2]: page(rows, trials).encode(),
    }
    for file, written in files.items():
        write_whole(folder / file, written)
        log.info("%s is written", folder / file)


def rows_of(name: str, root: Path, repository: Path) -> list[Row]:
    """The rows of one study; none if it has not ended."""
    if not (root / studies.DIVERGED).is_file():
        return []
    settings, failed = config.load(root), results.record(root / studies.DIVERGED)
    runs = {run.key: run for run in results.read(root, repository)}
    found = []
    for unit in settings.units():
        scenario = settings.scenarios[unit.scenario]
        described = results.record(
            root / "partitions" / f"{unit.scenario}-{unit.seed}" / "statistics.json"
        )
        own = measures.of([results.numbers(described)], measures.share_of(scenario))
        if unit.key not in runs and unit.key not in failed:
            raise UserError(
                f"{root}: run {unit.key} is missing; run `noniid advise --make-base --study {name}`"
            )
        worst = 1 / own["classes"]
        run, fedavg = (
            runs.get(unit._replace(recipe=recipe).key) for recipe in (unit.recipe, BASELINE)
        )
        found.append(
            Row(
                name,
                unit.scenario,
                unit.recipe,
                unit.seed,
                own,
                _final(run, worst),
                _final(fedavg, worst),
                "" if run is None else run.tags["weights_sha256"],
                "" if run is None else run.tags.get("git_commit", "not recorded"),
            )
        )
    return found


def _final(run: ItemResult | None, without: float) -> float:
    return without if run is None else run.column("test_accuracy")[-1]


def trials_csv(trials: Mapping[str, Sequence[Trial]]) -> bytes:
    """One line per scenario that was left out: what each strategy chose, and its regret in
    points."""
    header = ["left_out", "data", "scenario", "dont_know"]
    header += [
        f"{key}_{part}" for key in ("advisor", "average", "fedavg") for part in ("method", "regret")
    ]
    lines: list[list[object]] = []
    for way, found in trials.items():
        for trial in found:
            chosen = [trial.choices[strategy] for strategy in STRATEGIES]
            cells = [cell for method in chosen for cell in (method, trial.regret(method))]
            lines.append([way, trial.known.data, trial.known.scenario, trial.reason, *cells])
    return as_csv(header, lines, digits=6)


def page(rows: Sequence[Row], trials: Mapping[str, Sequence[Trial]]) -> str:
    """docs/results/advice.md."""
    scenarios = base.known(rows)
    methods = [method for method in scenarios[0].gains if method != BASELINE]
    seeds, failed = (
        sorted({row.seed for row in rows}),
        [row for row in rows if not row.weights_sha256],
    )
    of_data = {
        data: sum(one.data == data for one in scenarios)
        for data in dict.fromkeys(row.data for row in rows)
    }
    parts = [
        "# What the advice is worth",
        f"The base has {len(rows)} runs: "
        f"{', '.join(f'{data} ({n} scenarios)' for data, n in of_data.items())}; "
        f"methods {BASELINE}, {', '.join(methods)}; seeds {', '.join(map(str, seeds))}. "
        f"{len(failed)} runs ended without a model. They count as a model that names one class "
        "for all samples. "
        f"[{FILES[0]}]({FILES[0]}) has a line per run, [{FILES[1]}]({FILES[1]}) a line per "
        "scenario that was left out. "
        "[Advice](../advise.md) says how the advisor works.",
        WORTH,
    ]
    for way, found in trials.items():
        parts += [f"## Leave one {way} out", *_worth(found)]
    parts += ["## Scenarios of the base", _scenarios(scenarios, methods)]
    parts += ["## Made with", _made(rows)]
    return "\n\n".join(parts) + "\n"


def _worth(trials: Sequence[Trial]) -> list[str]:
    """The table and sentences on one way of leaving out."""
    if not trials:
        return ["The base has too few data sets for that."]
    answered = [trial for trial in trials if not trial.reason]
    table = [
        [
            "choice",
            f"regret, all {len(trials)} scenarios",
            f"regret, the {len(answered)} that it answers",
        ]
    ]
    table += [[name, _regret(trials, name), _regret(answered, name)] for name in STRATEGIES]
    inside, of = (sum(part) for part in zip(*(trial.inside for trial in trials), strict=True))
    sentences = [_compared(trials, other) for other in STRATEGIES[1:]]
    covered = (
        f"{100 * inside / of:.0f} % of the {of} measured gains lie in their "
        f"{100 * LEVEL:g} % interval."
    )
    unknown = (
        f"It does not know {len(trials) - len(answered)} of {len(trials)} scenarios; the "
        "first column has its guess."
    )
    return [markdown(table), " ".join([unknown, covered, *sentences])]


def _regret(trials: Sequence[Trial], strategy: str) -> str:
    found = spread(trial.regret(trial.choices[strategy]) for trial in trials)
    if found is None:
        return "-"
    ends = interval(found)
    return f"{found.mean:.2f}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


def _compared(trials: Sequence[Trial], other: str) -> str:
    """One sentence: the advisor's regret less another's, scenario by scenario."""
    found = spread(
        trial.regret(trial.choices["advisor"]) - trial.regret(trial.choices[other])
        for trial in trials
    )
    ends = interval(found)
    if found is None or ends is None:
        return f"One scenario says nothing about the advisor and {other}."
    said = (
        f"(advisor less {other}: {found.mean:+z.2f} points, 95 %: {ends[0]:+z.2f} to "
        f"{ends[1]:+z.2f})"
    )
    if ends[1] < 0:
        return f"The advisor has less regret than {other} {said}."
    if ends[0] > 0:
        return f"The advisor has more regret than {other} {said}."
    return f"These scenarios can't tell the advisor from {other} {said}."


def _scenarios(scenarios: Sequence[base.Known], methods: Sequence[str]) -> str:
    """Markdown: each scenario's measures, and its best method."""
    names = list(measures.MEASURES)
    table: list[list[str]] = [
        ["scenario", *(measures.MEASURES[name].title for name in names), "best method", "gain"]
    ]
    for one in scenarios:
        best = max((BASELINE, *methods), key=lambda method: one.gains[method])
        values = [f"{one.measures[name]:.3g}" for name in names]
        table.append([one.name, *values, best, f"{one.gains[best]:+z.2f}"])
    return markdown(table)


def _made(rows: Sequence[Row]) -> str:
    commits = dict.fromkeys(row.code for row in rows if row.code)
    accuracy = {
        data: [row.fedavg_accuracy for row in rows if row.data == data]
        for data in {row.data for row in rows}
    }
    means = [
        f"{data} {100 * statistics.fmean(found):.1f} %" for data, found in sorted(accuracy.items())
    ]
    lines = [
        "Command: `noniid advise --make-base`.",
        f"Commit of the code: {', '.join(commits)}.",
        f"FedAvg's mean accuracy: {', '.join(means)}.",
    ]
    return "".join(f"- {line}\n" for line in lines).rstrip()


def of_split(found: Mapping[str, Any], share: float) -> Advice:
    """Advice on one partition, from its statistics. `share`: the fraction of clients in a round."""
    return Learner(base.known(base.read())).advise(measures.of([results.numbers(found)], share))
