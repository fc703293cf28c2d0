"""Draws the forest plot of a paper: the claims in points of accuracy, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedml_noniid.pipelines.papers.verdicts import HELD, NOT_HELD, UNDECIDED, Verdict
from fedml_noniid.pipelines.reporting.figures import style
from fedml_noniid.pipelines.reporting.heatmap import as_png

POINTS = "points"  # the unit of the claims that are drawn
LOOKS = {  # Okabe and Ito's palette
    HELD: ("#009E73", "o"),
    NOT_HELD: ("#D55E00", "s"),
    UNDECIDED: ("#777777", "D"),
}
WORDS, LINE, GAP = 60, 0.14, 0.12  # letters of a line of words; inches of a line, between claims
BAND = 1.0  # points


def in_words(one: Verdict, found: Sequence[Verdict]) -> str:
    """What a claim tests. A claim that is tested `as ID` has that claim's words."""
    tests = {f"as {other.named.id},": f"{other.claim.tests}," for other in found}
    head, comma, rest = one.claim.tests.partition(",")
    return tests.get(head + comma, head + comma) + rest


def drawn(found: Sequence[Verdict], title: str) -> bytes | None:
    """A line for each claim in points: the weakest number, its interval, its bound with an arrow to
    the claimed side.

    None if none has run.
    """
    shown = [
        one
        for one in reversed(found)
        if one.claim.unit == POINTS and one.weakest and one.weakest.interval
    ]
    if not shown:
        return None
    # A number keeps its sign.
    words = [textwrap.fill(in_words(one, found).replace(" %", "\xa0%"), WORDS) for one in shown]
    heights = [LINE * max(2, 1 + text.count("\n")) + GAP for text in words]
    figure = Figure(figsize=(8.4, sum(heights) + 1.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-BAND, BAND, color="#ececec", linewidth=0, zorder=0)
    places = [sum(heights[:i]) + height / 2 for i, height in enumerate(heights)]
    for one, place in zip(shown, places, strict=True):
        assert one.weakest is not None and one.weakest.interval is not None, "filtered above"
        colour, marker = LOOKS.get(one.word, LOOKS[UNDECIDED])
        for bound, side in one.claim.holds.bounds:
            axes.plot([bound, bound], [place - 0.1, place + 0.1], color="black", linewidth=1)
            axes.plot(
                [bound], [place + 0.1], color="black", marker=">" if side > 0 else "<", markersize=5
            )
        axes.plot(one.weakest.interval, [place, place], color=colour, linewidth=2.6)
        axes.plot([one.weakest.mean], [place], color=colour, marker=marker, markersize=6)
        axes.text(
            1.01,
            place,
            one.word,
            color=colour,
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            va="center",
        )
    axes.set_yticks(places, words, fontsize=8)
    axes.set_ylim(0, sum(heights))
    axes.set_xlabel("points of accuracy", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    handles = [
        Line2D([], [], color="#777777", linewidth=2.6, marker="o", label="measured, 95 %"),
        Line2D(
            [],
            [],
            color="black",
            linewidth=0,
            marker=">",
            markersize=5,
            label="bound, and the claimed side",
        ),
        Patch(color="#ececec", label="one point around no difference"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return as_png(figure)
