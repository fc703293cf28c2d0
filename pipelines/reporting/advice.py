"""The advisor's section of the report: what it would have advised before training, beside what was
measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.pipelines.advise import base, measures
from fedml_noniid.pipelines.advise.learner import LEVEL, Advice, Learner
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.reporting.summary import Line, Scenario
from fedml_noniid.pipelines.reporting.text import NONE

HEADER = [
    "scenario",
    "advised",
    "expected gain",
    f"{100 * LEVEL:g} % interval",
    "measured gain",
    "best measured",
]
NOTE = (
    "Gains are points of final test accuracy over FedAvg, measured ones as mean ± standard "
    "deviation over the seeds. "
    "The advice comes from the skew measures of the partitions alone. It was learnt from short "
    "runs with the default "
    "hyper-parameters of each method, which may be of the same data set. Other models, rounds "
    "and values may gain "
    "more or less."
)


class Advised(NamedTuple):
    """The advice on one scenario, and the measures that it goes by."""

    advice: Advice
    measures: Mapping[str, float]


def advised(root: Path, settings: Config, learner: Learner) -> dict[str, Advised]:
    """The advice on each scenario of params.yaml, from the statistics of its partitions.

    UserError for a bad file.
    """
    found = {}
    for name in settings.scenario_names:
        paths = [
            root / "partitions" / f"{name}-{seed}" / "statistics.json" for seed in settings.seeds
        ]
        partitions = [results.numbers(results.record(path)) for path in paths if path.is_file()]
        own = measures.of(partitions, measures.share_of(settings.scenarios[name]))
        found[name] = Advised(learner.advise(own), own)
    return found


def base_words(learner: Learner) -> str:
    """What the advice is learnt from, in a sentence."""
    data = ", ".join(dict.fromkeys(one.data for one in learner.known))
    return (
        f"Learnt from {len(learner.known)} scenarios ({data}) with default hyper-parameters; "
        "gains are over FedAvg."
    )


def section(root: Path, settings: Config, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """What the templates need: a table, a line per scenario, and notes."""
    learner = Learner(base.known(base.read()))
    of = advised(root, settings, learner)
    rows = [_row(settings, scenario, of[scenario.name].advice) for scenario in scenarios]
    reasons = [
        f"{one.name}: {of[one.name].advice.reason}."
        for one in scenarios
        if of[one.name].advice.reason
    ]
    return {"table": [HEADER, *rows], "notes": [NOTE, base_words(learner), *reasons]}


def _row(settings: Config, scenario: Scenario, advice: Advice) -> list[str]:
    compared = [line for line in scenario.lines if line.compared]
    top = next((line for line in compared if line.rank), None)
    best = f"{top.recipe} {_measured(top, scenario)}" if top else NONE
    if advice.best is None:
        return [scenario.name, "don't know", NONE, NONE, NONE, best]
    method, gain, low, high = advice.best
    # An entry with the method's own name comes before one that only stands for it.
    own = sorted(
        (line for line in compared if line.composition == method),
        key=lambda line: line.recipe != method,
    )
    measured = _measured(own[0], scenario) if own else "not run"
    return [scenario.name, method, f"{gain:+z.1f}", f"{low:+z.1f} to {high:+z.1f}", measured, best]


def _measured(line: Line, scenario: Scenario) -> str:
    """A method's gain over the baseline, in points.

    A model that is no better than a constant has none.
    """
    if line.is_constant:
        return "constant answer"
    if line is scenario.baseline:
        return "+0.0"
    if line.difference is None:
        return NONE
    spread = "" if line.difference.std is None else f" ± {100 * line.difference.std:.1f}"
    return f"{100 * line.difference.mean:+z.1f}{spread}"
