"""Draws the numbers: ratios to the bare loop by workload, and seconds per round by scale."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

OURS, OTHERS = "#0072B2", "#AAAAAA"
COLUMNS = 2  # panels in a row


def picture(found: dict[str, Any]) -> bytes:
    """A PNG with a panel of bars for each workload, and one for scaling."""
    rows = len(found["workloads"]) // COLUMNS + 1
    figure = Figure(figsize=(14, 3.8 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (name, one) in zip(panels, found["workloads"].items(), strict=False):
        _bars(axes, name, one["rows"])
    _lines(panels[len(found["workloads"])], found["scaling"])
    for axes in panels[len(found["workloads"]) + 1 :]:
        axes.set_axis_off()
    out = BytesIO()
    figure.savefig(out, dpi=110)
    return out.getvalue()


def _bars(axes: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """The engines of a workload, the fastest on top."""
    ratios = {
        row["engine"]: row["ratio_cpu"]
        for row in rows
        if row.get("ratio_cpu") and not row["problem"]
    }
    ordered = sorted(ratios.items(), key=lambda one: one[1])
    colours = [OURS if engine.startswith("ours") else OTHERS for engine, _ in ordered]
    bars = axes.barh(
        [engine for engine, _ in ordered], [ratio for _, ratio in ordered], color=colours
    )
    axes.bar_label(bars, [f" {ratio:.2f}" for _, ratio in ordered], fontsize="small")
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title(name, loc="left")
    axes.set_xlabel("steps per CPU second, by those of the bare loop", fontsize="small")


def _lines(axes: Any, scaling: dict[str, Any]) -> None:
    for name, sweep in scaling.items():
        for engine, of in sweep["engines"].items():
            style = "-" if "vectorized" in engine else "--"
            axes.plot(
                sweep["values"], of["wall_s"], style, marker="o", label=f"by {name}, {engine}"
            )
    axes.set_xlabel(
        "clients a round (cohort), clients in total (clients), width (hidden), processes (workers)"
    )
    axes.set_ylabel("seconds per round, MLP")
    if scaling:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize="x-small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
