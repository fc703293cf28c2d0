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


def in_words(one: Verdict, verdicts: Sequence[Verdict]) -> str:
    """What a claim tests. A claim that is tested `as ID, tuned` has that claim's words before; one
    that may end early has fresh seeds."""
    tests = {f"as {other.named.id}": other.claim.tests for other in verdicts}
    head, _, rest = one.claim.tests.partition(",")
    words = f"{tests[head]}; here{rest}" if head in tests else one.claim.tests
    return f"{words}; fresh seeds" if len(one.named.looks) > 1 else words


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
    words = [textwrap.fill(in_words(one, verdicts).replace(" %", "\xa0%"), WORDS) for one in shown]
    heights = [LINE * max(2, 1 + text.count("\n")) + GAP for text in words]
    figure = Figure(figsize=(8.4, sum(heights) + 1.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-BAND, BAND, color=BAND_COLOUR, linewidth=0, zorder=0)
    places = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for one, place in zip(shown, places, strict=True):
        _draw(axes, one, place)
    axes.set_yticks(places, words, fontsize=8)
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


def _draw(axes: Axes, one: Verdict, place: float) -> None:
    """The line of a claim."""
    ends = one.weakest and one.weakest.interval
    assert one.weakest and one.weakest.mean is not None and ends, "the caller drops the others"
    colour, marker = LOOKS.get(one.word, LOOKS[UNDECIDED])
    for bound, side in one.claim.holds.bounds:
        axes.plot([bound] * 2, [place - 0.1, place + 0.1], color="black", linewidth=1)
        flag = ">" if side > 0 else "<"
        axes.plot([bound], [place + 0.1], color="black", marker=flag, markersize=5)
    if one.weakest.adjusted is not None:
        axes.plot(one.weakest.adjusted, [place, place], color=colour, linewidth=THIN)
    axes.plot(ends, [place, place], color=colour, linewidth=THICK)
    axes.plot([one.weakest.mean], [place], color=colour, marker=marker, markersize=6)
    if one.printed is not None:
        axes.plot([one.printed.effect], [place], color="black", **HOLLOW)
    right = axes.get_yaxis_transform()
    text = f"{one.text}\n(post hoc)" if one.word == NO_GAIN and one.is_post_hoc else one.text
    axes.text(1.01, place, text, color=colour, transform=right, fontsize=8, va="center")
