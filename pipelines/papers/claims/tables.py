"""The numbers of the page as CSV: by tested number, by value of a seed, by run and by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedml_noniid.pipelines.papers.claims import trials
from fedml_noniid.pipelines.papers.claims.published import (
    PER_RUN,
    PER_VALUE,
    ROUNDS,
    RUNS,
    VALUES,
    Published,
)
from fedml_noniid.pipelines.papers.claims.runs import Ran
from fedml_noniid.pipelines.papers.claims.trials import PER_TRIAL, TRIALS
from fedml_noniid.pipelines.papers.claims.verdict import Verdict
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.reporting.text import as_csv

TESTS = "claims.csv"
PER_TEST = [
    "paper",
    "claim",
    "part",
    "statistic",
    "wanted",
    "mean",
    "low",
    "high",
    "seeds",
    "p",
    "sign_p",
    "holm_p",
    "weakest",
    "verdict",
]


def files_of(
    found: Sequence[Verdict], measured: Mapping[str, Measured], published: Published
) -> dict[str, bytes]:
    """File name -> content. `found`: all claims of all papers, adjusted together."""
    runs = {(one.named.paper, ran.study, ran.item): ran for one in found for ran in one.runs}
    files = {
        TESTS: as_csv(PER_TEST, (line for one in found for line in _tests(one))),
        VALUES: as_csv(PER_VALUE, (line for one in found for line in _values(one))),
        RUNS: as_csv(["paper", *Ran._fields], ([paper, *ran] for (paper, *_), ran in runs.items())),
    }
    if tried := trials_of(found, measured, published):
        files[TRIALS] = as_csv(PER_TRIAL, tried, digits=6)
    for paper in dict.fromkeys(one.named.paper for one in found):
        own = [one for one in found if one.named.paper == paper]
        lines = _rounds(own, measured[paper], published, paper)
        if lines:
            most = max(map(len, lines))
            header = [*PER_RUN, *map(str, range(1, most - len(PER_RUN) + 1))]
            padded = ([*line, *[None] * (most - len(line))] for line in lines)
            files[ROUNDS.format(paper)] = as_csv(header, padded, digits=6)
    return files


def trials_of(
    found: Sequence[Verdict], measured: Mapping[str, Measured], published: Published
) -> list[list[object]]:
    """The lines on tuning: of the studies here, and the committed ones."""
    kept = dict.fromkeys((one.named.paper, one.named.claim.study) for one in found if one.published)
    every = dict.fromkeys(
        (one.named.paper, one.named.claim.study) for one in found if not one.published
    )
    tried = [line for paper, study in every for line in _trials(measured[paper], paper, study)]
    return tried + published.trials(kept)


def _trials(measured: Measured, paper: str, study: str) -> list[list[object]]:
    return trials.lines(paper, study, trials.read(measured.root, measured.studies[study]))


def _tests(one: Verdict) -> Iterator[list[object]]:
    claim, of = one.named.claim, one.named
    if not one.tested:
        yield [of.paper, of.id, None, claim.statistic, claim.holds.words, *[None] * 8, one.word]
    for tested in one.tested:
        low, high = tested.interval or (None, None)
        own = tested.compared
        wanted = f"{'above' if tested.side > 0 else 'below'} {tested.bound:g}"
        mean = tested.mean if own.differences else None
        ps = (None, None, None) if one.counted else (own.p, own.sign_p, one.holm_p)
        yield [
            of.paper,
            of.id,
            tested.part.words,
            claim.statistic,
            wanted,
            mean,
            low,
            high,
            len(own.differences),
            *ps,
            "yes" if tested is one.weakest else "",
            one.word,
        ]


def _values(one: Verdict) -> Iterator[list[object]]:
    for part in (*one.parts, *one.beside):
        for seed, cells in part.cells.items():
            for cell in cells:
                yield [
                    one.named.paper,
                    one.named.id,
                    part.words,
                    seed,
                    part.values[seed],
                    cell.role,
                    cell.scenario,
                    cell.recipe,
                    cell.value,
                    cell.run.item,
                ]


def _rounds(
    found: Sequence[Verdict], measured: Measured, published: Published, paper: str
) -> list[list[object]]:
    """Study, item and accuracy of each round of every run behind the claims: of this folder, and
    the committed ones."""
    studies = dict.fromkeys(one.named.claim.study for one in found)
    kept = dict.fromkeys(one.named.claim.study for one in found if one.published)
    lines: list[list[object]] = []
    for study in studies:
        runs = [] if study in kept else measured.of_study(study)
        lines += [[study, run.key, *(row["test_accuracy"] for row in run.rows)] for run in runs]
    return lines + published.rounds(paper, list(kept))
