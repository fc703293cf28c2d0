"""The picture of a paper's claims: every accuracy that is tested, with its interval and its
bound."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedml_noniid.pipelines.papers.claims.verdict import HELD, NOT_HELD, UNDECIDED, Verdict
from fedml_noniid.pipelines.reporting.figures import LABEL, style
from fedml_noniid.pipelines.reporting.heatmap import as_png

FOREST = "{}: the claims in points of accuracy, 95 % intervals"
PICTURE = "claims-{}.png"
UNIT = "points"
LOOKS = {
    HELD: ("#009E73", "o"),
    NOT_HELD: ("#D55E00", "s"),
    UNDECIDED: ("#777777", "D"),
}  # Okabe and Ito's palette


def forest(found: Sequence[Verdict], title: str) -> bytes | None:
    """The claims in points, by their weakest number; None if none has run."""
    shown = [
        one
        for one in found
        if one.named.claim.unit == UNIT and one.weakest and one.weakest.interval
    ]
    if not shown:
        return None
    figure = Figure(figsize=(6.4, LABEL * len(shown) + 1.1), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style(axes)
    for place, one in enumerate(reversed(shown)):
        assert one.weakest is not None and one.weakest.interval is not None
        mean, (low, high) = one.weakest.mean, one.weakest.interval
        colour, marker = LOOKS.get(one.word, LOOKS[UNDECIDED])
        axes.plot([low, high], [place, place], color=colour, linewidth=1.6)
        axes.plot([mean], [place], color=colour, marker=marker, markersize=5)
        bound = one.weakest.bound
        axes.plot([bound, bound], [place - 0.35, place + 0.35], color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [f"{one.named.id}: {one.word}" for one in reversed(shown)])
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_xlabel("points; black: the bound of the claim")
    axes.set_title(title, loc="left", fontsize=11)
    return as_png(figure)
