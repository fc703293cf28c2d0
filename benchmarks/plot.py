"""Draws each engine's ratio to the bare loop, by workload."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

OURS, OTHERS = "#0072B2", "#AAAAAA"
COLUMNS = 2  # panels in a row


def picture(workloads: Mapping[str, Any]) -> bytes:
    """Returns a PNG with a panel of bars for each workload."""
    rows = -(-len(workloads) // COLUMNS)
    figure = Figure(figsize=(14, 3.8 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, (name, workload) in zip(panels, workloads.items(), strict=False):
        _bars(axes, name, workload["rows"])
    for axes in panels[len(workloads) :]:
        axes.set_axis_off()
    out = BytesIO()
    figure.savefig(out, dpi=110)
    return out.getvalue()


def _bars(axes: Any, name: str, rows: list[dict[str, Any]]) -> None:
    """Draws the engines of a workload, the fastest on top."""
    ratios = {
        row["engine"]: row["ratio_cpu"]
        for row in rows
        if row.get("ratio_cpu") and not row["problem"]
    }
    ordered = sorted(ratios.items(), key=lambda entry: entry[1])
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
