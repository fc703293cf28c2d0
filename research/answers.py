"""Reads answers: for each method of a paper "use it?", what was shown, what it costs, a caveat.

`research/papers/<paper>/answer.yaml` has the words. The numbers are filled in from the verdicts:

- `{ID}`: the weakest number of a claim, with its 95 % interval.
- `{ID: PART}`: the number of the part whose name ends with PART, tested or shown beside.
- `{ID: RECIPE|level}`: what a method reaches, its mean over the seeds.
- `{ID: PART|%}`: the number in percent. `{ID|seeds}`: how many seeds it has.
- `{ID|printed}`: the paper's number. `{ID|verdict}`: the verdict, and of how many seeds a test that
  may end early had it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pandas as pd
from pydantic import Field

from fedml_noniid.core.errors import located
from fedml_noniid.core.options import Section, validated
from fedml_noniid.data.checks import known
from fedml_noniid.data.yaml_files import read_yaml
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.summary import Spread, spread
from fedml_noniid.pipelines.reporting.text import NONE
from research.claims import BESIDE, Claim
from research.contrasts import by_seed
from research.studies import folder_of
from research.verdicts import Verdict

FILE = "answer.yaml"
YES, ONLY_IF, NO, NOT_SHOWN = "yes", "only if", "no", "not shown"
NUMBER = re.compile(r"\{([a-z0-9-]+)(?:: ([^{}|]+))?(?:\|(level|seeds|printed|verdict|%))?\}")
SIGNED = ("difference", "trend")  # contrasts whose numbers are written with their sign


class Cost(Section):
    """Runs whose seconds and bytes are divided by those of FedAvg, seed by seed."""

    where: str  # a few words for people
    study: str
    scenario: str
    of: str
    less: str = "fedavg"


class Answer(Section):
    """The words of a line of the page's first table."""

    method: str  # with its link and recipe
    idea: str
    use: Literal["yes", "only if", "no", "not shown"]
    condition: str = ""  # or a reason, behind `use`
    because: Annotated[list[str], Field(min_length=1)]  # the claims that decide `use`
    shown: Annotated[list[str], Field(min_length=1)]  # lines of the cell
    costs: Annotated[list[Cost], Field(min_length=1)]
    caveat: Annotated[list[str], Field(min_length=1)]
    no_scale: list[str] = Field(default_factory=list)  # what holds at every scale, in sentences


class Line(NamedTuple):
    """A line of the table, with its numbers."""

    method: str
    use: str
    shown: str
    costs: str
    caveat: str


def of_paper(paper: str, root: Path) -> Answer | None:
    """The answer on a paper's methods; None without a file. UserError for a bad one."""
    path = folder_of(paper, root) / FILE
    if not path.is_file():
        return None
    with located(source=str(path)):
        return validated(Answer, read_yaml(path))


def line(answer: Answer, verdicts: Mapping[str, Verdict], runs: pd.DataFrame) -> Line:
    """The line of the table. `runs`: those of the paper."""
    use = " ".join(filter(None, (f"**{answer.use}**", answer.condition)))
    costs = "<br>".join(_cost(cost, runs) for cost in answer.costs)
    shown, caveat = (
        "<br>".join(filled(text, verdicts) for text in cell)
        for cell in (answer.shown, answer.caveat)
    )
    return Line(f"{answer.method}: {answer.idea}", use, shown, costs, caveat)


def filled(text: str, verdicts: Mapping[str, Verdict]) -> str:
    """One line, with the numbers of the claims: `-` for one that has not run, or an unknown part.

    UserError for an unknown claim.
    """
    return NUMBER.sub(lambda matched: _number(matched, verdicts), " ".join(text.split()))


def number(claim: Claim, mean: float, ends: tuple[float, float] | None = None) -> str:
    """`+2.50 (+1.00 to +4.00)`; levels and ratios have no sign."""
    sign = "+" if claim.contrast in SIGNED else ""
    return _spanned([f"{x:{sign}z.{claim.decimals}f}" for x in (mean, *(ends or ()))])


def _number(matched: re.Match[str], verdicts: Mapping[str, Verdict]) -> str:
    id_, part, form = matched.groups()
    verdict = verdicts[known("claim", id_, verdicts)]
    if form == "verdict":
        looks, n = verdict.named.looks, verdict.look
        so_many = f"{looks[n]} of {looks[-1]}" if looks[n + 1 :] else f"all {looks[-1]}"
        return verdict.text + (f" after {so_many} seeds" if looks[1:] and n >= 0 else "")
    if form == "printed":
        return number(verdict.claim, verdict.printed.effect) if verdict.printed else NONE
    values, is_level = verdict.values, form == "level"
    if is_level:
        values = values[values["role"] != BESIDE].drop_duplicates(["scenario", "item"])
        values = values.assign(
            part=values["scenario"] + ": " + values["recipe"], number=values["value"]
        )
    elif part is None:
        part = verdict.weakest.part if verdict.weakest else ""
    rows = values[(values["part"] == part) | values["part"].str.endswith(f": {part}")]
    measured = spread(by_seed(rows).values())
    if measured is None or rows["part"].nunique() > 1:
        return NONE
    if form == "seeds":
        return str(measured.n)
    if is_level:
        return f"{measured.mean:z.{verdict.claim.decimals}f}"
    if form == "%":
        return _times(measured, 100, 1, " %")
    return number(verdict.claim, measured.mean, interval(measured))


def _cost(cost: Cost, runs: pd.DataFrame) -> str:
    method, less = (
        runs[runs["study"] == cost.study]
        .set_index("item")
        .filter(regex=f"^{re.escape(f'{cost.scenario}-{name}-')}\\d+$", axis=0)[["seconds", "mib"]]
        .rename(index=lambda item: item.rsplit("-", 1)[1])
        for name in (cost.of, cost.less)
    )
    ratios = (method[~method.index.duplicated()] / less[~less.index.duplicated()]).dropna()
    if not len(ratios):
        return NONE
    seconds, mib = (_times(spread(ratios[column])) for column in ("seconds", "mib"))
    return f"{cost.where}: time {seconds}, bytes {mib}"


def _times(times: Spread | None, scale: float = 1, decimals: int = 2, unit: str = "") -> str:
    assert times is not None, "the caller has values"
    numbers = (times.mean, *(interval(times) or ()))
    return _spanned([f"{scale * x:.{decimals}f}" for x in numbers], unit)


def _spanned(texts: Sequence[str], unit: str = "") -> str:
    """`1.60 (1.53 to 1.68)`, of a mean and its ends; without ends that are the mean."""
    mean, *ends = texts
    return f"{mean}{unit}" + ("" if set(ends) <= {mean} else f" ({' to '.join(ends)})")
