"""Draws the numbers: ratios to the bare loop by workload, and seconds per round by scale."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.figure import Figure


def picture(found: dict[str, Any]) -> bytes:
    """A PNG with bars and one panel for scaling beside them."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(bars, found["workloads"])
    _lines(lines, found["scaling"])
    out = BytesIO()
    figure.savefig(out, dpi=120)
    return out.getvalue()


def _bars(axes: Any, workloads: dict[str, Any]) -> None:
    measured = [
        {row["engine"]: row["ratio_cpu"] for row in one["rows"] if row.get("ratio_cpu") and not row["problem"]}
        for one in workloads.values()
    ]
    engines = list(dict.fromkeys(engine for one in measured for engine in one))
    width = 0.8 / max(len(engines), 1)
    for number, engine in enumerate(engines):
        at = [(place + number * width, one[engine]) for place, one in enumerate(measured) if engine in one]
        axes.bar([x for x, _ in at], [height for _, height in at], width, label=engine)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_yscale("log")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(measured))], list(workloads))
    axes.set_ylabel("steps per CPU second, relative to the bare loop")
    axes.legend(fontsize="small")


def _lines(axes: Any, scaling: dict[str, Any]) -> None:
    for name, sweep in scaling.items():
        for engine, of in sweep["engines"].items():
            style = "-" if "vectorized" in engine else "--"
            axes.plot(sweep["values"], of["wall_s"], style, marker="o", label=f"by {name}, {engine}")
    axes.set_xlabel("clients a round (cohort), clients in total (clients), width (hidden)")
    axes.set_ylabel("seconds per round, MLP")
    if scaling:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
