"""FNR-FL's figures that are no curves.

Kinds: `heat_maps` (figure 2), `refinement` (figure 5). Figure 1 shows an image in noise; it has no
result and is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import kendalltau

from fedml_noniid.data.types import Ints
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting import heatmap
from fedml_noniid.pipelines.reporting.figures import COLOURS, Values
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers.pictures import bars, panels, png
from research.runs import ClientSamples, Measured
from research.targets import Built, Target, nothing

METHODS = ("fnr", "fnr_authors")  # which refine


def heat_maps(target: Target, measured: Measured) -> Built:
    """Figure 2: clients x classes, of each panel's scenario ({title, study, scenario}) with the
    study's first seed."""
    maps, missing = {}, []
    for panel in target.spec["panels"]:
        seed = measured.studies[panel["study"]].content["seeds"][0]
        samples = measured.client_samples(panel["study"], panel["scenario"], seed)
        if samples is None:
            missing.append(str(panel["title"]))
        else:
            maps[str(panel["title"])] = samples
    if not maps:
        return nothing(missing)
    widths, heights = zip(
        *(heatmap.panel_size(samples.counts) for samples in maps.values()), strict=True
    )
    figure = Figure(
        figsize=(sum(widths) + 0.9 * len(maps), max(heights) + 1.3), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(maps), squeeze=False, width_ratios=widths)[0]
    for axes, (title, samples) in zip(grid, maps.items(), strict=True):
        heatmap.draw(axes, samples.counts, samples.classes, title)
    lines = [
        [title, client, samples.classes[c], n]
        for title, samples in maps.items()
        for (client, c), n in np.ndenumerate(samples.counts)
    ]
    files = {"png": png(figure), "csv": as_csv(["panel", "client", "class", "samples"], lines)}
    return Built(
        (),
        files,
        tuple(f"{title}: {_uneven(samples)}" for title, samples in maps.items()),
        tuple(missing),
    )


def _uneven(samples: ClientSamples) -> str:
    """What is uneven about a partition: its fullest cell, its empty ones, sizes of clients, shares
    of classes."""
    client, label = np.unravel_index(samples.counts.argmax(), samples.counts.shape)
    sizes = samples.counts.sum(1)
    shares = samples.counts / sizes[:, None]
    empty = np.flatnonzero(samples.counts[client] == 0)
    without = f", and none of {', '.join(samples.classes[c] for c in empty)}" if len(empty) else ""
    return (
        f"client {client} holds the most of one class, {samples.counts.max()} of "
        f"{samples.classes[int(label)]}{without}; "
        f"{(samples.counts == 0).sum()} of {samples.counts.size} cells are empty; clients hold "
        f"{sizes.min()} to {sizes.max()} "
        f"samples; a class is {100 * shares.min():.1f} to {100 * shares.max():.1f} % of a client's."
    )


class Refined(NamedTuple):
    """A client whose model was refined."""

    client: int
    samples: Ints  # [C], what it holds
    classes: tuple[str, ...]
    before: Values  # [C], accuracy; NaN where a class has no samples
    after: Values


def refinement(target: Target, measured: Measured) -> Built:
    """Figure 5: accuracy of one client's model by class, before and after its refinement.

    Keys: `panels`: {title, study, scenario, recipe, on: test or public}. Shown is the client with
    the lowest accuracy on D_public (of equal ones the lowest id) in the last round of the first
    seed.
    """
    refined: dict[str, Refined] = {}
    missing: list[str] = []
    for panel in target.spec["panels"]:
        title = str(panel["title"])
        runs = measured.finished(panel, title, missing)
        client = _worst(measured, panel, runs[0]) if runs else None
        if client is not None:
            refined[title] = client
        elif runs:
            missing.append(title)
    if not refined:
        return nothing(missing)
    titles = [f"{title} (client {client.client})" for title, client in refined.items()]
    figure, grid = panels(titles, 1, y="accuracy", size=(7.6, 3.1 * len(refined)))
    for axes, client in zip(grid, refined.values(), strict=True):
        names = [f"{name}\n{n}" for name, n in zip(client.classes, client.samples, strict=True)]
        heights = {"before": client.before.tolist(), "after": client.after.tolist()}
        bars(axes, names, heights, (COLOURS[5], COLOURS[0]))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(0, 1)
    lines = [
        [title, client.client, c, n, f"{before:.6f}", f"{after:.6f}"]
        for title, client in refined.items()
        for c, n, before, after in zip(
            client.classes, client.samples, client.before, client.after, strict=True
        )
    ]
    files = {
        "png": png(figure),
        "csv": as_csv(["panel", "client", "class", "samples", "before", "after"], lines),
    }
    return Built(
        (),
        files,
        tuple(f"{title}: {_gain(client)}" for title, client in refined.items()),
        tuple(missing),
    )


def _worst(measured: Measured, panel: Mapping[str, Any], run: ItemResult) -> Refined | None:
    """The refined client of lowest accuracy in the last round; None where nobody was refined or
    looked at."""
    recorded, name = (
        measured.recorded(run, panel["study"]),
        "test_" if panel["on"] == "test" else "",
    )
    samples = measured.client_samples(panel["study"], panel["scenario"], run.seed)
    method = next((method for method in run.composition.split("+") if method in METHODS), "")
    if samples is None or f"{method}/refine.{name}before" not in recorded:
        return None
    refined = (
        recorded[f"{method}/refined"][-1].nonzero().flatten()
    )  # rows of the round's clients, ascending
    worst = int(recorded[f"{method}/A"][-1][refined].argmin())
    client = int(recorded["round/clients"][-1][refined[worst]])
    before, after = (
        recorded[f"{method}/refine.{name}{when}"][-1, worst].double().numpy()
        for when in ("before", "after")
    )
    return Refined(client, samples.counts[client], samples.classes, before, after)


def _gain(refined: Refined) -> str:
    """The mean gain, where it is largest, and whether it falls with the number of samples, as the
    paper says."""
    gain = refined.after - refined.before
    known = ~np.isnan(gain)
    most, least = int(np.nanargmax(gain)), int(np.nanargmin(gain))
    text = (
        f"client {refined.client} gains {gain[known].mean():+.4f} on average, most in "
        f"{refined.classes[most]} "
        f"({gain[most]:+.4f}, {refined.samples[most]} samples), least in {refined.classes[least]} "
        f"({gain[least]:+.4f}, "
        f"{refined.samples[least]} samples)"
    )
    tau = kendalltau(refined.samples[known], gain[known])
    if not math.isfinite(tau.statistic):
        return f"{text}."
    clear = "told apart from none" if tau.pvalue < 0.05 else "not told apart from none"
    return (
        f"{text}; gains and samples by class have Kendall τ = {tau.statistic:+.2f} (p = "
        f"{tau.pvalue:.2f}, {clear}; the "
        "paper says that classes with fewer samples gain more, which would be below 0)."
    )
