"""The page of verdicts, claims.md and claims.html: a picture and a table per paper, then every
claim."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import cast

from markdown_it import MarkdownIt

from fedml_noniid.pipelines.papers.claims import declared
from fedml_noniid.pipelines.papers.claims.picture import FOREST, PICTURE
from fedml_noniid.pipelines.papers.claims.quantities import Part
from fedml_noniid.pipelines.papers.claims.spec import Claims, Why
from fedml_noniid.pipelines.papers.claims.verdict import (
    HELD,
    NOT_HELD,
    NOT_RUN,
    UNDECIDED,
    VERDICTS,
    Tested,
    Verdict,
)
from fedml_noniid.pipelines.papers.report import TITLES
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.papers.targets.ran import what_ran
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.pages import inline, render
from fedml_noniid.pipelines.reporting.summary import TINY, spread
from fedml_noniid.pipelines.reporting.text import NONE, markdown

COMMITTED = "; its numbers are the committed ones of docs/results, since not all runs are here"
ABOUT = {
    "smoke": "**Size smoke proves nothing.** It runs every claim in seconds, on digits, to test "
    "that the claims can be "
    "run. A verdict on this page says nothing about a paper.",
    "small": 'Size small: real data, scaled down so that two cores decide. "Differs from the '
    'paper" says how. A '
    "verdict is about this setting: it does not refute a paper at its own scale.",
}
READING = """\
{claims} tests of {statements} statements of the papers. The statements are in our words, with \
their place in the paper.
Each test was written in `pipelines/papers/<paper>/claims.yaml` before it ran. A claim says so \
where it was not.

- A number is paired by seed: methods of one seed have the same partition, first weights and \
batches.
- "Measured" is the mean over seeds with the 95 % interval of the t test, before adjustment.
- p is that of the paired t test after Holm's adjustment for all {tests} tested claims of this \
page. A claim without
  all of its runs counts with p = 1. The sign test is beside it and decides nothing.
- **held**: p is below 0.05 and the number is on the claimed side. **not held**: p is below 0.05 \
on the other side.
  **undecided**: neither. {counted} claims are about counted numbers (bytes, equal weights): no \
test, every seed must
  agree.
- A claim of several numbers (each other method, each scenario) holds only if all do. The \
weakest is shown.
- Step sizes and coefficients are the paper's where it gives them, else those of the study. \
Claims that end in `-tuned`
  are the exception: each method tried equally many values on the validation split, with seeds \
of their own.
- "Why?" names a suspected cause of a verdict and an experiment on it, written down before that \
experiment's first run.
  Their tests are adjusted among themselves.
- Hours are CPU hours of one core. Reckoned: from the images that are trained on, at a measured \
speed; runs that studies
  or claims share count in each. Measured: the rounds' wall seconds, so other work on the \
machine is in them. The sum
  counts each run once."""


def markdown_of(
    found: Sequence[Verdict],
    whys: Sequence[Verdict],
    files: Mapping[str, Claims],
    measured: Mapping[str, Measured],
    facts: declared.Facts,
    ran: Mapping[str, str],
    pictures: Collection[str],
) -> str:
    """The page.

    `found`: all claims of all papers, adjusted together; `whys`: the experiments on causes.

    `ran`: what was run of "paper study". `pictures`: the papers that have one.
    """
    size = next(iter(files.values())).size
    counted = sum(one.counted for one in found)
    parts = [
        f"# The papers' claims, size {size}",
        ABOUT[size],
        READING.format(
            claims=len(found),
            statements=len({one.named.claim.states for one in found}),
            tests=len(found) - counted,
            counted=counted,
        ),
        f"## All claims\n\n{_summary(found, files)}",
    ]
    for paper, claims in files.items():
        own = [one for one in found if one.named.paper == paper]
        commit = declared.commit_of(claims.path)
        parts.append(f"## {TITLES[paper]}\n\nThe claims file's commit: {commit}.")
        if paper in pictures:
            parts.append(f"![{FOREST.format(TITLES[paper])}]({PICTURE.format(paper)})")
        parts.append(_table(own))
        parts += [_details(one, claims, measured[paper], facts, whys) for one in own]
        used = dict.fromkeys(
            one.named.claim.study for one in (*own, *whys) if one.named.paper == paper
        )
        said = [f"- {name}: {ran[f'{paper} {name}']}." for name in used]
        parts.append(
            f"### What was run for {TITLES[paper]}\n\n" + "\n".join([*said, *_machines(own)])
        )
    return "\n\n".join(parts) + "\n"


def html_of(page: str, size: str, pictures: Mapping[str, bytes]) -> str:
    """The page for a browser, with its pictures inside."""
    body = MarkdownIt("commonmark").enable("table").render(page)
    body = body.replace("<table>", '<div class="wide" tabindex="0"><table>').replace(
        "</table>", "</table></div>"
    )
    # GitHub and the site give a heading the same anchor.
    body = re.sub(r"<h3>([a-z0-9-]+)</h3>", r'<h3 id="\1">\1</h3>', body)
    for name, picture in pictures.items():
        body = body.replace(f'src="{name}"', f'src="{inline(picture)}"')
    return render("page.html.j2", {"title": f"The papers' claims, size {size}", "body": body})


def _summary(found: Sequence[Verdict], files: Mapping[str, Claims]) -> str:
    rows = [["paper", "claims", *VERDICTS, "CPU hours, reckoned", "measured"]]
    totals = [0.0, 0.0]
    for paper, claims in files.items():
        words = Counter(one.word for one in found if one.named.paper == paper)
        reckoned = sum(claims.hours(name) for name in claims.studies)
        taken = _taken([one for one in found if one.named.paper == paper])
        totals = [totals[0] + reckoned, totals[1] + taken]
        counts = [str(words[verdict]) for verdict in VERDICTS]
        rows.append(
            [
                TITLES[paper],
                str(words.total()),
                *counts,
                _hours(reckoned),
                _hours(taken) if taken else NONE,
            ]
        )
    words = Counter(one.word for one in found)
    counts = [str(words[verdict]) for verdict in VERDICTS]
    rows.append(
        [
            "all",
            str(len(found)),
            *counts,
            _hours(totals[0]),
            _hours(totals[1]) if totals[1] else NONE,
        ]
    )
    return markdown(rows)


def _taken(found: Sequence[Verdict]) -> float:
    """CPU hours of all runs that ended. A run of two claims counts once."""
    runs = {ran.fingerprint or (ran.study, ran.item): ran for one in found for ran in one.runs}
    return sum(ran.seconds or 0 for ran in runs.values()) / 3600


def _machines(found: Sequence[Verdict]) -> list[str]:
    """The machines and versions behind a paper's numbers."""
    every = {
        (ran.cpu, ran.torch, ran.commit[:7])
        for one in found
        for ran in one.runs
        if not ran.diverged
    }
    return [
        f"- Made with {cpu or NONE}, torch {torch}, commit {commit}."
        for cpu, torch, commit in sorted(every)
    ]


def _table(found: Sequence[Verdict]) -> str:
    rows = [["claim", "tested", "wanted", "measured", "seeds", "p (Holm)", "sign test", "verdict"]]
    for one in found:
        claim, weakest = one.named.claim, one.weakest
        n = len(weakest.compared.differences) if weakest else 0
        sign = weakest.compared.sign_p if weakest and not one.counted else None
        rows.append(
            [
                f"[{one.named.id}](#{one.named.id})",
                claim.tests,
                f"{claim.holds.words} {claim.unit}".strip(),
                _measured(one, weakest),
                str(n) if n else NONE,
                "counted"
                if one.counted and n
                else NONE
                if weakest is None
                else f"{one.holm_p:.3g}",
                NONE if sign is None else f"{sign:.3g}",
                f"**{one.word}**",
            ]
        )
    return markdown(rows)


def _measured(one: Verdict, tested: Tested | None) -> str:
    claim = one.named.claim
    if tested is None or not tested.compared.differences:
        return NONE
    mean = f"{tested.mean:+z.{claim.decimals}f}"
    if tested.interval is None or one.counted:
        return mean
    low, high = tested.interval
    return f"{mean} ({low:+z.{claim.decimals}f} to {high:+z.{claim.decimals}f})"


def _details(
    one: Verdict, claims: Claims, measured: Measured, facts: declared.Facts, whys: Sequence[Verdict]
) -> str:
    claim = one.named.claim
    taken = sum(ran.seconds or 0 for ran in one.runs) / 3600
    hours = f"about {_hours(claims.hours(claim.study, claim.cells))} CPU hours"
    hours += f", measured {_hours(taken)}" if taken else ""
    lines = [
        f"Tested: {claim.tests}. Statistic `{claim.statistic}`.",
        f"Held if {claim.holds.words} {claim.unit}".rstrip() + ".",
        f"Differs from the paper: {claim.differs}",
        f"Test: {declared.words(one.named, facts, bool(one.runs))}.",
        (
            f"Runs: {len(one.named.items)} of study {claim.study}, "
            f"{hours}{COMMITTED if one.published else ''}."
        ),
        f"Verdict: **{one.word}**. {_why(one, measured)}".rstrip(),
    ]
    if claim.contrast not in ("level", "same") and one.weakest:
        lines.append(f"Means over the seeds: {_levels(one)}.")
    late, every = one.never
    if late and one.weakest:
        lines.append(
            f"{late} of {every} runs never reach the accuracy. Each counts as a round more than "
            "all."
        )
    if len(one.tested) > 1 and one.weakest:
        lines += [f"{part.part.words}: {_measured(one, part)}." for part in one.tested]
    lines += [
        f"Beside it, not tested: {part.words}, {_shown(one, part)}."
        for part in one.beside
        if part.values
    ]
    lines += [
        _cause(why, facts) for why in whys if cast("Why", why.named.claim).explains == one.named.id
    ]
    said = f"The paper states: {_plain(claim.states)} ({claim.where})"
    return f"### {one.named.id}\n\n{said}\n\n" + "\n".join(f"- {x}" for x in lines)


def _levels(one: Verdict) -> str:
    """What the methods reach: `near: a 73.00, b 63.00; far: a 61.00, b 58.00`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for part in one.parts:
        for cell in (cell for cells in part.cells.values() for cell in cells):
            found.setdefault(cell.scenario, {}).setdefault(cell.recipe, {})[cell.run.item] = (
                cell.value
            )
    decimals = one.named.claim.decimals
    return "; ".join(
        f"{scenario}: "
        + ", ".join(
            f"{recipe} {fmean(own.values()):z.{decimals}f}" for recipe, own in recipes.items()
        )
        for scenario, recipes in found.items()
    )


def _shown(one: Verdict, part: Part) -> str:
    """A number that is not tested: its mean over the seeds, with the interval."""
    decimals, ends = one.named.claim.decimals, interval(spread(part.values.values()))
    mean = f"{fmean(part.values.values()):z.{decimals}f}"
    return mean if ends is None else f"{mean} ({ends[0]:z.{decimals}f} to {ends[1]:z.{decimals}f})"


def _cause(why: Verdict, facts: declared.Facts) -> str:
    """One experiment on the cause of a verdict."""
    claim = cast("Why", why.named.claim)
    word = {HELD: "supported", NOT_HELD: "not supported"}.get(why.word, why.word)
    wanted = f"{claim.holds.words} {claim.unit}".strip()
    return (
        f"Why? {claim.cause} Tested: {claim.tests}; supported if {wanted}. Measured: "
        f"{_measured(why, why.weakest)}. "
        f"**{word}** ({declared.words(why.named, facts, bool(why.runs))}, {why.named.id})"
    )


def _why(one: Verdict, measured: Measured) -> str:
    """What the verdict needs beside the table."""
    if one.word == NOT_RUN:
        skipped = measured.skipped(one.named.claim.study)
        if skipped:
            return f"Its data are not there ({skipped})."
        some = ", ".join(one.missing[:3]) + (
            f" and {len(one.missing) - 3} more" if len(one.missing) > 3 else ""
        )
        return f"{len(one.missing)} of {len(one.named.items)} runs are missing: {some}."
    if one.diverged:
        return f"{len(one.diverged)} runs diverge: {', '.join(one.diverged)}."
    if one.weakest is None and one.never[0]:
        return "Where no run reaches the accuracy, nothing is compared."
    if one.weakest is None:
        have = min((len(one.compared.differences) for one in one.tested), default=0)
        return f"{have} of {len(one.named.study.content['seeds'])} seeds have the number."
    if one.word in (HELD, NOT_HELD):
        return f"Weakest number: {one.weakest.part.words}." if len(one.tested) > 1 else ""
    if one.word == UNDECIDED and not one.counted:
        if one.weakest.compared.deviation < TINY:
            return "The number is the same on every seed, so there is no t test."
        needed = one.seeds_needed
        return (
            f"About {needed} seeds would decide it."
            if needed
            else "More than 100 seeds would be needed."
        )
    return ""


def what_was_run(claims: Claims, name: str, measured: Measured) -> str:
    """One line on a study."""
    study = claims.studies[name]
    return f"{study.what}: {what_ran(measured.of_study(name), study.items, measured.ends(name))}"


def _hours(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"


def _plain(states: str) -> str:
    """One line. Markdown's signs are escaped."""
    text = " ".join(states.split())
    return "".join(f"\\{sign}" if sign in "*_`|<>[]$\\#" else sign for sign in text)
