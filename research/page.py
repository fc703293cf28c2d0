"""Writes the page of verdicts, claims.md, its pictures and its numbers as CSV.

claims-details.html has each test in full. The words are in templates/claims.md.j2 and
templates/claims-details.md.j2.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedml_noniid.pipelines.experiment.results import record
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.pages import html_page, render
from fedml_noniid.pipelines.reporting.summary import spread
from fedml_noniid.pipelines.reporting.text import NONE, as_csv
from research import answers, forest
from research import committed as files
from research.claims import BESIDE, Claims, Named
from research.committed import RUNS, TRIALS, VALUES, Committed, stacked
from research.contrasts import by_seed
from research.described import what_ran
from research.runs import Measured
from research.studies import RESULTS, TEMPLATES, TITLES, TUNED
from research.verdicts import (
    COLUMNS,
    HELD,
    NOT_HELD,
    VERDICTS,
    Tested,
    Verdict,
    adjust,
    judge,
    lines,
)

PAGE, DETAILS, PICTURE = "claims.md", "claims-details.html", "claims-{}.png"
SUPPORTED = {HELD: "supported", NOT_HELD: "not supported"}  # the word of a cause
NUMBER = re.compile(r"([\w.]+) ([\d.e-]+)(?:,|$)")  # `fnr.p 0.5` of the values of a trial
OF_A_RUN = ["study", "item"]


class Page:
    """The verdicts on all claims of all papers, and what the page says on them."""

    def __init__(self, claims: Mapping[str, Claims], root: Path, committed: Committed) -> None:
        self.claims, self.root, self.committed = claims, root, committed
        self.size = next(iter(claims.values())).size
        self.measured = {
            paper: Measured(paper, self.size, root, read.studies) for paper, read in claims.items()
        }
        declared = files.declared(root / RESULTS / "claims" / self.size)
        self.facts = {**declared, **committed.facts}
        self.verdicts = self._judged({paper: read.claims for paper, read in claims.items()})
        self.fresh = self._judged({paper: read.fresh for paper, read in claims.items()})
        self.whys = self._judged({paper: read.whys for paper, read in claims.items()})
        self.every = [*self.verdicts, *self.fresh, *self.whys]
        # A line for each value, run and run of a claim, of all papers.
        self.values = _joined(self.every, "all_values", VALUES)
        self.runs = _joined(self.every, "all_runs", RUNS)
        self.trials = self._trials()
        self.what_ran = {
            f"{paper} {name}": self._what_ran(paper, name)
            for paper, read in claims.items()
            for name in read.studies
        }

    def _judged(self, named: Mapping[str, Mapping[str, Named]]) -> list[Verdict]:
        """All claims of a section, of all papers, adjusted together."""
        return adjust(
            [
                judge(
                    claim,
                    self.measured[paper],
                    self.committed,
                    files.is_margin_later(claim, self.facts),
                )
                for paper, claims in named.items()
                for claim in claims.values()
            ]
        )

    @property
    def shown(self) -> list[Verdict]:
        """The verdicts on the claims that were not withdrawn."""
        return [verdict for verdict in self.verdicts if not verdict.claim.withdrawn]

    def verdicts_of(self, paper: str) -> list[Verdict]:
        """The verdicts of a paper."""
        return [verdict for verdict in self.verdicts if verdict.named.paper == paper]

    def _studies(self, is_committed: bool) -> list[tuple[str, str]]:
        """(paper, study) of the claims with committed numbers, or of the others."""
        committed: dict[tuple[str, str], bool] = {}
        for verdict in self.every:
            key = verdict.named.paper, verdict.claim.study
            committed[key] = committed.get(key, False) or verdict.is_committed
        return [key for key in committed if committed[key] == is_committed]

    def _trials(self) -> pd.DataFrame:
        """The trials of tuned studies: of the studies here, and the committed ones."""
        lines = []
        for paper, study in self._studies(False):
            path = self.measured[paper].folder(study) / TUNED
            for recipe, trials in (record(path) if path.is_file() else {}).items():
                for index, (values, accuracy, seeds) in enumerate(trials):
                    chosen = "" if index else "yes"
                    lines.append([paper, study, recipe, values, seeds, accuracy, chosen])
        here = pd.DataFrame(lines, columns=TRIALS)
        return stacked([here, self.committed.trials(self._studies(True))], TRIALS)

    def _what_ran(self, paper: str, study: str) -> str:
        """What was run of a study, in one line: the committed one, if its numbers are."""
        if (paper, study) in self._studies(is_committed=True):
            return self.committed.studies.get(f"{paper} {study}", "")
        measured, plan = self.measured[paper], self.claims[paper].studies[study]
        tuned = self.trials[(self.trials["paper"] == paper) & (self.trials["study"] == study)]
        sentence = ""
        if len(tuned):
            best = tuned[tuned["chosen"] == "yes"]
            each = "; ".join(f"{trial.recipe} {trial.values}" for trial in best.itertuples())
            least = min(tuned["recipe"].value_counts())
            sentence = f"tuned on the validation split, {least} trials for each method: {each}. "
        diverged = measured.diverged_items(study)
        return f"{sentence}{plan.what}: {what_ran(measured.of_study(study), plan.items, diverged)}"

    def files(self) -> dict[str, bytes]:
        """The page and all that lies beside it."""
        forests = {
            paper: forest.drawn(
                [verdict for verdict in (*self.shown, *self.fresh) if verdict.named.paper == paper],
                TITLES[paper],
            )
            for paper in self.claims
        }
        pictures = {PICTURE.format(other): drawn for other, drawn in forests.items() if drawn}
        context = self._context(pictures)
        text = render("claims.md.j2", context, TEMPLATES).rstrip() + "\n"
        html = html_page(f"The tests of the papers' claims, size {self.size}", self.details(), {})
        # The page links to each test.
        html = re.sub(r"<h3>([a-z0-9-]+)</h3>", r'<h3 id="\1">\1</h3>', html)
        tests = {
            verdict.named.id: verdict.named.test for verdict in self.every if not verdict.missing
        }
        facts = {id_: {**self.facts[id_], "test": tests[id_]} for id_ in tests if id_ in self.facts}
        record_ = {"claims": facts, "studies": self.what_ran}
        runs = self.runs.drop_duplicates(["paper", *OF_A_RUN])
        written = {
            PAGE: text.encode(),
            DETAILS: html.encode(),
            **pictures,
            files.FACTS: (json.dumps(record_, indent=1, sort_keys=True) + "\n").encode(),
            "claims.csv": as_csv(
                COLUMNS, (line for verdict in self.every for line in lines(verdict))
            ),
            files.FILES["values"]: _csv(self.values),
            files.FILES["runs"]: _csv(runs.drop(columns="claim")),
        }
        if len(self.trials):
            written[files.FILES["trials"]] = _csv(self.trials, digits=6)
        for paper in self.claims:
            if len(rounds := self._rounds(paper)):
                written[files.FILES["rounds"].format(paper)] = _csv(rounds, digits=6)
        return written

    def details(self) -> str:
        """Markdown: each test with all that the page has no room for."""
        return render("claims-details.md.j2", self._context({}), TEMPLATES).rstrip() + "\n"

    def _rounds(self, paper: str) -> pd.DataFrame:
        """The test accuracy of every round of every run behind the claims of a paper."""
        lines = [
            {"study": study, "item": run.key}
            | {str(t): row["test_accuracy"] for t, row in enumerate(run.rows, start=1)}
            for other, study in self._studies(False)
            if other == paper
            for run in self.measured[paper].of_study(study)
        ]
        committed = [study for other, study in self._studies(True) if other == paper]
        both = [pd.DataFrame(lines), self.committed.rounds(paper, committed)]
        rounds = max((len(table.columns) for table in both), default=2) - 2
        return stacked(both, [*OF_A_RUN, *map(str, range(1, rounds + 1))])

    def _context(self, pictures: Mapping[str, bytes]) -> dict[str, Any]:
        """The numbers of the page, and the functions that write them."""
        tested = [verdict for verdict in self.verdicts if not verdict.counted]
        papers = [
            {
                "id": paper,
                "title": TITLES[paper],
                "picture": picture if (picture := PICTURE.format(paper)) in pictures else "",
                "verdicts": self.verdicts_of(paper),
                "families": [
                    (title, [verdict for verdict in verdicts if verdict.named.paper == paper])
                    for title, verdicts in (("tests", self.shown), ("fresh tests", self.fresh))
                ],
                "whys": [verdict for verdict in self.whys if verdict.named.paper == paper],
                "studies": list(
                    dict.fromkeys(x.claim.study for x in self.every if x.named.paper == paper)
                ),
                "measured": self.measured[paper],
            }
            for paper, claims in self.claims.items()
        ]
        return {
            "size": self.size,
            "papers": papers,
            "n": len(self.verdicts),
            "n_tested": len(tested),
            "n_statements": len({verdict.claim.states for verdict in self.verdicts}),
            "whys": self.whys,
            "what_ran": self.what_ran,
            **self._answers(),
            "summary": self._summary(),
            "tuned": self._tuned(),
            "wanted": lambda verdict: (
                f"{verdict.claim.holds.description} {verdict.claim.unit}".rstrip()
            ),
            "words": lambda verdict: forest.in_words(verdict, self.verdicts),
            "number": _number,
            "span": lambda verdict, ends: " to ".join(
                answers.number(verdict.claim, x) for x in ends
            ),
            "signed": lambda verdict, effect: answers.number(verdict.claim, effect),
            "supported": lambda why: SUPPORTED.get(why.word, why.text),
            "levels": _levels,
            "beside": _beside,
            "hours": lambda verdict: _hours(verdict.runs),
            "written": lambda verdict: files.when_written(
                verdict.named, self.facts, len(verdict.runs) > 0
            ),
            "plain": _plain,
        }

    def _answers(self) -> dict[str, Any]:
        """The first table, and what no scale changes. Size smoke has none."""
        if self.size == "smoke":
            return {"answers": [], "no_scale": []}
        verdicts = {verdict.named.id: verdict for verdict in self.every}
        by_paper = {paper: answers.of_paper(paper, self.root) for paper in self.claims}
        known = {paper: answer for paper, answer in by_paper.items() if answer is not None}
        return {
            "answers": [
                answers.line(answer, verdicts, self.runs[self.runs["paper"] == paper])
                for paper, answer in known.items()
            ],
            "no_scale": [
                answers.filled(text, verdicts)
                for answer in known.values()
                for text in answer.no_scale
            ],
        }

    def _summary(self) -> list[list[str]]:
        """Verdicts and CPU hours by paper, and of all; a run of two claims counts once."""
        rows = [["paper", "claims", *VERDICTS, "CPU hours"]]
        for title, verdicts in [
            *((TITLES[paper], self.verdicts_of(paper)) for paper in self.claims),
            ("all", self.verdicts),
        ]:
            labels = [verdict.word for verdict in verdicts]
            counts = [len(labels), *map(labels.count, VERDICTS)]
            ids = [verdict.named.id for verdict in verdicts]
            runs = self.runs[self.runs["claim"].isin(ids)]
            rows.append([title, *map(str, counts), _hours(runs)])
        return rows

    def _tuned(self) -> list[list[str]]:
        """What was chosen, and which of its numbers lie at an end of those that the study tried."""
        rows = [["paper", "study", "method", "chosen", "trials", "at an end"]]
        for (paper, study), trials in self.trials.groupby(["paper", "study"], sort=False):
            tried: dict[str, set[float]] = {}
            for key, value in itertools.chain(*map(NUMBER.findall, trials["values"])):
                tried.setdefault(key, set()).add(float(value))
            for trial in trials[trials["chosen"] == "yes"].itertuples():
                ends = [
                    f"{key}: the {word}"
                    for key, value in NUMBER.findall(trial.values)
                    for word, end in (("smallest", min), ("largest", max))
                    if len(tried[key]) > 1 and float(value) == end(tried[key])
                ]
                n = str((trials["recipe"] == trial.recipe).sum())
                rows.append(
                    [paper, study, trial.recipe, trial.values, n, ", ".join(ends) or "none"]
                )
        return rows


def _joined(verdicts: Iterable[Verdict], name: str, columns: Sequence[str]) -> pd.DataFrame:
    """The tables `name` of all verdicts, with the paper and the claim of each line."""
    frames = [
        getattr(verdict, name).assign(paper=verdict.named.paper, claim=verdict.named.id)
        for verdict in verdicts
    ]
    return stacked(frames, ["paper", "claim", *columns])


def _csv(frame: pd.DataFrame, digits: int = 10) -> bytes:
    return as_csv(list(frame.columns), frame.itertuples(index=False, name=None), digits)


def _number(verdict: Verdict, tested: Tested | None) -> str:
    """A tested number: its mean, with the interval."""
    if tested is None or tested.mean is None:
        return NONE
    return answers.number(verdict.claim, tested.mean, None if verdict.counted else tested.interval)


def _levels(verdict: Verdict) -> str:
    """What the methods reach: `near: a 73.00, b 63.00; far: a 61.00, b 58.00`."""
    values = verdict.values[verdict.values["role"] != BESIDE].drop_duplicates(["scenario", "item"])
    by_level: dict[str, list[str]] = {}
    for (scenario, recipe), rows in values.groupby(["scenario", "recipe"], sort=False):
        mean = f"{recipe} {fmean(rows['value']):z.{verdict.claim.decimals}f}"
        by_level.setdefault(scenario, []).append(mean)
    return "; ".join(f"{scenario}: {', '.join(means)}" for scenario, means in by_level.items())


def _beside(verdict: Verdict) -> list[str]:
    """The numbers that are not tested: their means over the seeds, with intervals."""
    decimals, texts = verdict.claim.decimals, []
    for part, rows in verdict.values[verdict.values["role"] == BESIDE].groupby("part", sort=False):
        numbers = by_seed(rows).values()
        text, ends = f"{part}, {fmean(numbers):z.{decimals}f}", interval(spread(numbers))
        if ends is not None:
            text += f" ({ends[0]:z.{decimals}f} to {ends[1]:z.{decimals}f})"
        texts.append(text)
    return texts


def _hours(runs: pd.DataFrame) -> str:
    """CPU hours of runs. A run that several studies or claims have counts once."""
    known = runs["fingerprint"].where(runs["fingerprint"] != "", runs["study"] + runs["item"])
    hours = runs[~known.duplicated()]["seconds"].sum() / 3600
    return NONE if not hours else f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"


def _plain(states: str) -> str:
    """One line. Markdown's signs are escaped."""
    text = " ".join(states.split())
    return "".join(f"\\{sign}" if sign in "*_`|<>[]$\\#" else sign for sign in text)
