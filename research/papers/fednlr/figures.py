"""FedNLR's figure 3: the temperatures of the layers.

Table 4 and figure 1 have files of their own. Figures 2, 4 and 5 are tables with a picture.
"""

from __future__ import annotations

import numpy as np

from fedml_noniid.pipelines.reporting.figures import COLOURS, Values
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers.fednlr.activations import activations
from research.papers.fednlr.example import example_network
from research.papers.pictures import extremes, panels, png
from research.runs import Measured
from research.targets import Built, Target, nothing

__all__ = ["activations", "example_network", "temperature"]


def temperature(target: Target, measured: Measured) -> Built:
    """Figure 3: T_l by layer for each of `methods`, over clients and rounds, from the run of the
    first seed."""
    spec, source = target.spec, {key: target.spec[key] for key in ("study", "scenario")}
    drawn: dict[str, dict[str, Values]] = {}  # method -> layer -> T [rounds, clients]
    sentences: list[str] = []
    missing: list[str] = []
    table = [
        [
            "method",
            "layer",
            "mu_l",
            "T_l, mean",
            "smallest",
            "largest",
            "deviation over clients, last round",
        ]
    ]
    for name, recipe in spec["methods"].items():
        runs = measured.finished(source | {"recipe": recipe}, name, missing)
        sentences += measured.group(source | {"recipe": recipe}).divergence_of(name)
        if not runs:
            continue
        recorded = measured.recorded(runs[0], str(spec["study"]))
        names = [key.removeprefix("fednlr/T/") for key in recorded if key.startswith("fednlr/T/")]
        # In the papers' networks, convolutions come before dense layers.
        order = sorted(names, key=lambda layer: (not layer.startswith("conv"), layer))
        drawn[name] = {layer: recorded[f"fednlr/T/{layer}"].double().numpy() for layer in order}
        for layer, t in drawn[name].items():
            last = t[-1].std(ddof=1) if t.shape[1] > 1 else float("nan")
            mu = float(recorded[f"fednlr/mu/{layer}"].flatten()[0])
            table.append(
                [
                    name,
                    layer,
                    f"{mu:.3f}",
                    *(f"{x:.3g}" for x in (t.mean(), t.min(), t.max(), last)),
                ]
            )
        means = {layer: float(t.mean()) for layer, t in drawn[name].items()}
        high, low = extremes(means)
        sentences.append(
            f"{name}: the highest temperature is that of {high}, layer {order.index(high) + 1} "
            f"of {len(order)} "
            f"({means[high]:.3g} on average), the lowest that of {low} ({means[low]:.3g})."
        )
    if not drawn:
        return nothing(missing, sentences)
    figure, grid = panels(list(drawn), y="T_l: clients (dots) and their mean")
    for axes, of_layer in zip(grid, drawn.values(), strict=True):
        t = np.stack(list(of_layer.values()))  # [L, rounds, clients]
        x = np.arange(len(t))
        for colour, round_ in zip(
            COLOURS, sorted({0, t.shape[1] // 2, t.shape[1] - 1}), strict=False
        ):
            axes.plot(
                np.repeat(x, t.shape[2]), t[:, round_].flatten(), ".", color=colour, alpha=0.35
            )
            axes.plot(
                x, t[:, round_].mean(1), color=colour, label=f"round {round_ + 1}", linewidth=1.6
            )
        axes.set_xticks(x, list(of_layer), rotation=0 if len(t) < 7 else 45)
        axes.set_ylim(bottom=0)
    lines = [
        [name, layer, r + 1, k, float(x)]
        for name, of_layer in drawn.items()
        for layer, t in of_layer.items()
        for (r, k), x in np.ndenumerate(t)
    ]
    content = as_csv(["method", "layer", "round", "client_index", "T"], lines)
    return Built(table, {"png": png(figure), "csv": content}, tuple(sentences), tuple(missing))
