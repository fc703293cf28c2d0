"""FNR-FL's figures that are no curves, and its tables with what the controls say.

Kinds: `accuracy` (a table), `noise_samples` (figure 1), `heat_maps` (figure 2), `refinement` (figure 5).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import kendalltau
from torch import Tensor

from pipelines import heatmap, results
from pipelines.figures import COLOURS, Values
from pipelines.results import Result
from pipelines.targets import table
from pipelines.targets.measured import Measured
from pipelines.targets.pictures import panels, png
from pipelines.targets.spec import Built, Target, address
from plugins.core.data import Samples
from plugins.data import noise
from plugins.data.dataset import Dataset
from plugins.data.reading import Read
from plugins.data.streams import key
from plugins.data.types import Ints

METHODS = ("fnr", "fnr_authors")  # which refine
ABOUT_CLIENTS = ("client", "samples", "entropy", "noise")  # columns of clients.csv before those of the classes


def accuracy(target: Target, measured: Measured) -> Built:
    """Kind `table`, and the paper's method against its controls.

    Key beside those of a table: `controls`: {method, leak, off, sharing}, titles of rows or columns, of which all but
    the first may be left out.
    """
    built, spec = table.build(target, measured), target.spec
    by_rows = spec.get("methods", "rows") == "rows"
    settings = list(spec["columns" if by_rows else "rows"])
    controls = {role: str(title) for role, title in spec["controls"].items()}

    def at(role: str, setting: str) -> dict[str, Any]:
        row, column = (controls[role], setting) if by_rows else (setting, controls[role])
        return address(target.id, column, spec["rows"][row], spec["columns"][column])

    def differences(one: str, other: str) -> str:
        """Of two roles, by setting, mean and spread of what they differ with the same seed."""
        found = []
        for setting in settings:
            pair = at(one, setting), at(other, setting)
            if all(measured.is_wanted(where) for where in pair):
                gain = measured.gain(*pair, str(pair[0].get("statistic", spec.get("statistic", "final"))))
                if gain is not None:
                    spread = "" if gain.std is None else f" ± {gain.std:.4f}"
                    found.append(f"{setting} {gain.mean:+.4f}{spread}")
        return "; ".join(found)

    words = list(built.words)
    for says, one, other in (
        ("What the leak is worth", "leak", "method"),
        ("What refining is worth beyond having the public samples", "method", "sharing"),
    ):
        found = differences(one, other) if one in controls and other in controls else ""
        words += [f"{says} ({controls[one]} less {controls[other]}): {found}."] if found else []
    if "off" in controls:
        words += _same_weights(measured, [(at("method", s), at("off", s)) for s in settings], controls["off"])
    return built._replace(words=tuple(words))


def _same_weights(
    measured: Measured, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], off: str
) -> list[str]:
    """How many pairs of runs end with the same bits; rows that read the same runs count once."""
    hashes: dict[tuple[object, ...], bool] = {}
    for one, other in pairs:
        found = [
            {run.seed: run.tags["weights_sha256"] for run in measured.runs(where)} if measured.is_wanted(where) else {}
            for where in (one, other)
        ]
        for seed in found[0].keys() & found[1].keys():
            hashes[one["study"], one["scenario"], seed] = found[0][seed] == found[1][seed]
    same = sum(hashes.values())
    return [f"{off}: the same final weights, to the bit, in {same} of {len(hashes)} runs."] if hashes else []


def noise_samples(target: Target, measured: Measured) -> Built:
    """Figure 1: one test sample as a client sees it at several noise levels, by the code that training reads with.

    Keys: `study`: whose data; `deviations`: of the noise, where pixels are 0 to 1; `sample`: its place in the test set.
    """
    study = measured.studies[target.spec["study"]]
    path = measured.root / study.data_folder / f"{study.content['data']['name']}.safetensors"
    if not path.is_file():
        return Built((), {}, (), (f"the data of study {study.name}",))
    data, place = Dataset.read(path), int(target.spec["sample"])
    one = data.normalised("test")[place : place + 1]
    figure, grid = panels(len(target.spec["deviations"]), 3)
    lines, words = [["noise", "pixel", "value"]], []
    for axes, letter, sigma in zip(grid, "abcdefghij", target.spec["deviations"], strict=False):
        seen = _on_scale(data, _seen(data, one, float(sigma)))
        lines += [[f"{sigma:g}", str(n), f"{value:.6f}"] for n, value in enumerate(seen.flatten().tolist())]
        image = seen.clamp(0, 1)[0].permute(1, 2, 0).numpy()
        axes.imshow(image if image.shape[2] == 3 else image[:, :, 0], cmap="gray", vmin=0, vmax=1)
        axes.set_title(f"({letter}) " + (f"noise ~ Gau({sigma:g})" if sigma else "original"), fontsize=11)
        axes.grid(False)
        axes.set_axis_off()
        if sigma:
            outside = 100 * ((seen < 0) | (seen > 1)).double().mean().item()
            words.append(f"{outside:.0f} % at {sigma:g}")
    name = data.classes[int(data.test_y[place])]
    about = f"Test sample {place} of {data.name}, class {name}. Outside 0 to 1, and cut off here: {', '.join(words)}."
    return Built((), {"png": png(figure), "csv": _csv(lines)}, (about,))


def _seen(data: Dataset, x: Tensor, sigma: float) -> Tensor:
    """A sample [1, ...] with noise, as a client of deviation `sigma` reads it."""
    std = noise.deviations("equal", sigma, 1, tuple(x.shape[1:]), data.scale)[0]
    drawn = torch.tensor(key(0, "figure 1", round(1000 * sigma)))
    one = torch.zeros(1, dtype=torch.int64)
    return Read(drawn)(Samples(x, one, noise.alone(std, x)), one, 0)


def _on_scale(data: Dataset, x: Tensor) -> Tensor:
    """Normalised samples on the scale on which images are 0 to 1."""
    shape = (-1, *[1] * (x.ndim - 2))
    mean, std = (torch.tensor(values).view(shape) for values in (data.mean, data.std))
    return (x * std + mean) / data.unit


class Held(NamedTuple):
    """Who holds what in a partition."""

    counts: Ints  # [N, C]
    classes: tuple[str, ...]


def held(folder: Path, scenario: str, seed: int) -> Held | None:
    """The class counts of a partition of a study; None if it is not there."""
    path = folder / "partitions" / f"{scenario}-{seed}" / "clients.csv"
    if not path.is_file():
        return None
    rows = results.table(path)
    classes = tuple(name for name in rows[0] if name not in ABOUT_CLIENTS)
    return Held(np.array([[int(row[name]) for name in classes] for row in rows]), classes)


def heat_maps(target: Target, measured: Measured) -> Built:
    """Figure 2: clients x classes, of each panel's scenario ({title, study, scenario}) with the study's first seed."""
    found: dict[str, Held] = {}
    missing = []
    for panel in target.spec["panels"]:
        seed = measured.studies[panel["study"]].content["seeds"][0]
        one = held(measured.folder(panel["study"]), panel["scenario"], seed)
        if one is None:
            missing.append(str(panel["title"]))
        else:
            found[str(panel["title"])] = one
    if not found:
        return Built((), {}, (), tuple(missing))
    widths, heights = zip(*(heatmap.panel_size(one.counts) for one in found.values()), strict=True)
    figure = Figure(figsize=(sum(widths) + 0.9 * len(found), max(heights) + 1.3), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(found), squeeze=False, width_ratios=widths)[0]
    lines, words = [["panel", "client", "class", "samples"]], []
    for axes, (title, one) in zip(grid, found.items(), strict=True):
        heatmap.draw(axes, one.counts, one.classes, title)
        lines += [
            [title, str(client), name, str(n)]
            for client, row in enumerate(one.counts.tolist())
            for name, n in zip(one.classes, row, strict=True)
        ]
        words.append(f"{title}: {_uneven(one)}")
    return Built((), {"png": png(figure), "csv": _csv(lines)}, tuple(words), tuple(missing))


def _uneven(one: Held) -> str:
    """What is uneven about a partition: its fullest cell, its empty ones, sizes of clients, shares of classes."""
    client, label = np.unravel_index(one.counts.argmax(), one.counts.shape)
    sizes = one.counts.sum(1)
    shares = one.counts / sizes[:, None]
    empty = np.flatnonzero(one.counts[client] == 0)
    without = f", and none of {', '.join(one.classes[c] for c in empty)}" if len(empty) else ""
    return (
        f"client {client} holds the most of one class, {one.counts.max()} of {one.classes[int(label)]}{without}; "
        f"{(one.counts == 0).sum()} of {one.counts.size} cells are empty; clients hold {sizes.min()} to {sizes.max()} "
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

    Keys: `panels`: {title, study, scenario, recipe, on: test or public}. Shown is the client with the lowest accuracy
    on D_public (of equal ones the lowest id) in the last round of the first seed.
    """
    found: dict[str, Refined] = {}
    missing = []
    for panel in target.spec["panels"]:
        runs = measured.runs(panel) if measured.is_wanted(panel) else []
        one = _worst(measured, panel, runs[0]) if runs else None
        if one is not None:
            found[str(panel["title"])] = one
        elif measured.is_wanted(panel):
            missing.append(str(panel["title"]))
    if not found:
        return Built((), {}, (), tuple(missing) or ("not run at this size",))
    figure, grid = panels(len(found), 1)
    figure.set_size_inches(7.6, 3.1 * len(found))
    lines, words = [["panel", "client", "class", "samples", "before", "after"]], []
    for axes, (title, one) in zip(grid, found.items(), strict=True):
        x = np.arange(len(one.classes))
        axes.bar(x - 0.2, one.before, 0.38, label="before", color=COLOURS[5])
        axes.bar(x + 0.2, one.after, 0.38, label="after", color=COLOURS[0])
        axes.set_xticks(x, [f"{name}\n{n}" for name, n in zip(one.classes, one.samples, strict=True)], fontsize=8)
        axes.set_ylim(0, 1)
        axes.set_ylabel("accuracy")
        axes.set_title(f"{title} (client {one.client})", loc="left", fontsize=10)
        axes.grid(False, axis="x")
        cells = zip(one.classes, one.samples, one.before.tolist(), one.after.tolist(), strict=True)
        lines += [[title, str(one.client), c, str(n), f"{b:.6f}", f"{a:.6f}"] for c, n, b, a in cells]
        words.append(f"{title}: {_gain(one)}")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return Built((), {"png": png(figure), "csv": _csv(lines)}, tuple(words), tuple(missing))


def _worst(measured: Measured, panel: Mapping[str, Any], run: Result) -> Refined | None:
    """The refined client of lowest accuracy in the last round; None where nobody was refined or looked at."""
    recorded, name = measured.recorded(run, panel["study"]), "test_" if panel["on"] == "test" else ""
    one = held(measured.folder(panel["study"]), panel["scenario"], run.seed)
    method = next((method for method in run.composition.split("+") if method in METHODS), "")
    if one is None or f"{method}/refine.{name}before" not in recorded:
        return None
    refined = recorded[f"{method}/refined"][-1].nonzero().flatten()  # rows of the round's clients, ascending
    worst = int(recorded[f"{method}/A"][-1][refined].argmin())
    client = int(recorded["round/clients"][-1][refined[worst]])
    before, after = (
        recorded[f"{method}/refine.{name}{when}"][-1, worst].double().numpy() for when in ("before", "after")
    )
    return Refined(client, one.counts[client], one.classes, before, after)


def _gain(one: Refined) -> str:
    """The mean gain, where it is largest, and whether it falls with the number of samples, as the paper says."""
    gain = one.after - one.before
    known = ~np.isnan(gain)
    most, least = int(np.nanargmax(gain)), int(np.nanargmin(gain))
    text = (
        f"client {one.client} gains {gain[known].mean():+.4f} on average, most in {one.classes[most]} "
        f"({gain[most]:+.4f}, {one.samples[most]} samples), least in {one.classes[least]} ({gain[least]:+.4f}, "
        f"{one.samples[least]} samples)"
    )
    tau = kendalltau(one.samples[known], gain[known])
    if not math.isfinite(tau.statistic):
        return f"{text}."
    clear = "told apart from none" if tau.pvalue < 0.05 else "not told apart from none"
    return (
        f"{text}; gains and samples by class have Kendall τ = {tau.statistic:+.2f} (p = {tau.pvalue:.2f}, {clear}; the "
        "paper says that classes with fewer samples gain more, which would be below 0)."
    )


def _csv(lines: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
