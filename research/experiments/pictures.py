"""Draws the pictures of docs/time_and_attacks.md, of committed tables: `python -m
research.experiments.pictures`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fedml_noniid.pipelines.reporting.figures import look, style
from fedml_noniid.pipelines.reporting.heatmap import as_png

FOLDER = Path("docs/results")
SKEWS = {
    "iid": "alike clients",
    "dirichlet05": "labels Dirichlet(0.5)",
    "dirichlet01": "labels Dirichlet(0.1)",
}
GROUPS = {"rotated": "rotated images", "swapped": "swapped labels"}
RULES = (
    *("fedavg", "median", "trimmed_mean", "krum", "multi-krum", "rfa", "centred_clipping"),
    *("bucketing+median", "bucketing+krum"),
)
METHODS = {
    "fedavg": "FedAvg",
    "finetune": "FedAvg + fine-tuning",
    "ditto": "Ditto",
    "ifca2": "IFCA, K = 2",
    "ifca4": "IFCA, K = 4",
    "cfl": "CFL",
}


def attacks(table: pd.DataFrame) -> Figure:
    """Accuracy in % by rule and skew: a grey bar without an attack, a point for each attack.

    `table`: the columns of robust.csv.
    """
    figure = Figure(figsize=(6.4, 8.4), dpi=150, layout="constrained")
    panels = figure.subplots(len(SKEWS), sharex=True)
    kinds = [kind for kind in dict.fromkeys(table["attack"]) if kind != "none"]
    for axes, (skew, title) in zip(panels, SKEWS.items(), strict=True):
        style(axes)
        means = table[table["skew"] == skew].pivot(
            index="rule", columns="attack", values="accuracy"
        )
        means = 100 * means.loc[[*reversed(RULES)]]
        axes.barh(means.index, means["none"], color="0.88", label="no attack")
        for number, kind in enumerate(kinds):
            colour = look(number)["color"]
            marker = "osD^vX"[number]
            axes.plot(means[kind], means.index, marker, color=colour, markersize=5, label=kind)
        axes.set_title(title, loc="left", fontsize=11)
    panels[-1].set_xlabel("test accuracy, %")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def clusters(table: pd.DataFrame) -> Figure:
    """Accuracy in % on the test set as each client sees it: a point for each seed, a line for the
    mean. `table`: the columns of clusters-values.csv."""
    figure = Figure(figsize=(6.4, 5.0), dpi=150, layout="constrained")
    panels = figure.subplots(len(GROUPS), sharex=True)
    for axes, (scenario, title) in zip(panels, GROUPS.items(), strict=True):
        style(axes)
        for row, (recipe, name) in enumerate(reversed(METHODS.items())):
            is_it = (table["scenario"] == scenario) & (table["recipe"] == recipe)
            values = 100 * table.loc[is_it, "accuracy"]
            axes.plot(values, [name] * len(values), "o", color=look(0)["color"], alpha=0.6)
            axes.vlines(values.mean(), row - 0.3, row + 0.3, color="black", linewidth=2)
        axes.set_title(title, loc="left", fontsize=11)
    panels[-1].set_xlabel("accuracy as each client sees the test set, %")
    return figure


def main() -> None:
    """Writes the pictures beside their tables."""
    pictures = {
        "robust.png": attacks(pd.read_csv(FOLDER / "robust.csv")),
        "clusters.png": clusters(pd.read_csv(FOLDER / "clusters-values.csv")),
    }
    for name, figure in pictures.items():
        (FOLDER / name).write_bytes(as_png(figure))


if __name__ == "__main__":
    main()
