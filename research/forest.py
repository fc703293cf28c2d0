"""Draws the forest plot of a paper: the claims in points of accuracy, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedml_noniid.pipelines.reporting.figures import style
from fedml_noniid.pipelines.reporting.heatmap import as_png
from research.verdicts import HELD, NO_GAIN, NOT_HELD, NOT_TESTABLE, UNDECIDED, Verdict

POINTS = "points"  # the unit of the claims that are drawn
LOOKS = {  # Okabe and Ito's palette
    HELD: ("#009E73", "o"),
    NOT_HELD: ("#D55E00", "s"),
    NO_GAIN: ("#0072B2", "v"),
    UNDECIDED: ("#777777", "D"),
    NOT_TESTABLE: ("#999999", "X"),
}
WORDS, LINE, GAP = 60, 0.14, 0.12  # letters of a line of words; inches of a line, between claims
BAND, BAND_COLOUR = 1.0, "#ececec"  # points
THICK, THIN = 2.8, 0.9
HOLLOW: dict[str, Any] = {"marker": "o", "markersize": 7, "markerfacecolor": "none"}


def in_words(verdict: Verdict, verdicts: Sequence[Verdict]) -> str:
    """What a claim tests. A claim that is tested `as ID, tuned` has that claim's words before; one
    that may end early has fresh seeds."""
    tests = {f"as {other.named.id}": other.claim.tests for other in verdicts}
    head, _, rest = verdict.claim.tests.partition(",")
    text = f"{tests[head]}; here{rest}" if head in tests else verdict.claim.tests
    return f"{text}; fresh seeds" if len(verdict.named.looks) > 1 else text


def drawn(verdicts: Sequence[Verdict], title: str) -> bytes | None:
    """A line for each claim in points: the weakest number, its interval, its bound with an arrow to
    the claimed side.

    None if none has run.
    """
    shown = [
        verdict
        for verdict in reversed(verdicts)
        if verdict.claim.unit == POINTS and verdict.weakest and verdict.weakest.interval
    ]
    if not shown:
        return None
    # A number keeps its sign.
    labels = [
        textwrap.fill(in_words(verdict, verdicts).replace(" %", "\xa0%"), WORDS)
        for verdict in shown
    ]
    heights = [LINE * max(2, 1 + text.count("\n")) + GAP for text in labels]
    figure = Figure(figsize=(8.4, sum(heights) + 1.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-BAND, BAND, color=BAND_COLOUR, linewidth=0, zorder=0)
    places = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for verdict, position in zip(shown, places, strict=True):
        _draw(axes, verdict, position)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_ylim(0, sum(heights))
    axes.set_xlabel("points of accuracy", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    grey: dict[str, Any] = {"color": "#777777"}
    black: dict[str, Any] = {"color": "black", "linewidth": 0}
    handles = [
        Line2D([], [], linewidth=THICK, marker="o", label="measured, 95 %", **grey),
        Line2D([], [], linewidth=THIN, label="95 % for all claims at once", **grey),
        Line2D([], [], **black, **HOLLOW, label="printed in the paper"),
        Line2D([], [], **black, marker=">", markersize=5, label="bound, and the claimed side"),
        Patch(color=BAND_COLOUR, label="one point around no difference"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return as_png(figure)


def _draw(axes: Axes, verdict: Verdict, position: float) -> None:
    """The line of a claim."""
    ends = verdict.weakest and verdict.weakest.interval
    assert verdict.weakest and verdict.weakest.mean is not None and ends, (
        "the caller drops the others"
    )
    colour, marker = LOOKS.get(verdict.word, LOOKS[UNDECIDED])
    for bound, side in verdict.claim.holds.bounds:
        axes.plot([bound] * 2, [position - 0.1, position + 0.1], color="black", linewidth=1)
        flag = ">" if side > 0 else "<"
        axes.plot([bound], [position + 0.1], color="black", marker=flag, markersize=5)
    if verdict.weakest.adjusted is not None:
        axes.plot(verdict.weakest.adjusted, [position, position], color=colour, linewidth=THIN)
    axes.plot(ends, [position, position], color=colour, linewidth=THICK)
    axes.plot([verdict.weakest.mean], [position], color=colour, marker=marker, markersize=6)
    if verdict.printed is not None:
        axes.plot([verdict.printed.effect], [position], color="black", **HOLLOW)
    right = axes.get_yaxis_transform()
    text = (
        f"{verdict.text}\n(post hoc)"
        if verdict.word == NO_GAIN and verdict.is_post_hoc
        else verdict.text
    )
    axes.text(1.01, position, text, color=colour, transform=right, fontsize=8, va="center")
