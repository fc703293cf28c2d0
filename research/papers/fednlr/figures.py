"""FedNLR's figures 2 to 5: bars by learning rate and by setting of mu, temperatures and accuracy by
layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedml_noniid.pipelines.reporting.comparison import Comparison, confirmed, evidence, paired
from fedml_noniid.pipelines.reporting.figures import BASELINE_COLOUR, COLOURS, Values
from fedml_noniid.pipelines.reporting.summary import spread
from fedml_noniid.pipelines.reporting.text import as_csv, plus_minus
from research import contrasts
from research.papers.fednlr.activations import activations
from research.papers.fednlr.example import example_network
from research.papers.pictures import bars, extremes, panels, png
from research.runs import Measured
from research.table import NOT_YET
from research.targets import NOT_HERE, Built, Target, nothing

__all__ = ["activations", "example_network", "layers", "learning_rates", "ratios", "temperature"]

ACCURACY = "test accuracy, %"
MARKERS = "osD^v<>P"
RED = "#d62728"
Place = tuple[str, ...]


class _Found(NamedTuple):
    """Accuracies in percent."""

    seeds: Mapping[
        Place, Mapping[int, float]
    ]  # no place with a diverged seed: the others would flatter it
    cells: Mapping[
        Place, str
    ]  # mean and spread over the seeds that ended, with marks, or the reason for a missing one
    missing: tuple[str, ...]
    step: float  # one test sample

    def gain(self, position: Place, base: Place) -> Comparison | None:
        """The difference on the same seeds; None without one."""
        gain = paired("", self.seeds.get(position, {}), self.seeds.get(base, {}), self.step)
        return gain if gain.differences else None

    def csv(self, *header: str) -> bytes:
        """CSV text with one line per place and seed."""
        lines = [
            [*(part.removeprefix("mu ") for part in position), seed, value]
            for position, values in self.seeds.items()
            for seed, value in values.items()
        ]
        return as_csv([*header, "seed", "accuracy"], lines)


def _gained(gain: Comparison | None) -> str:
    return plus_minus(gain and gain.spread, sign="+")


def _read(target: Target, measured: Measured, places: Mapping[Place, Mapping[str, Any]]) -> _Found:
    """Reads the results at `places`.

    Each place has parts of an address, which add to those of the target.
    """
    seeds, cells, step = {}, {}, 0.0
    missing: list[str] = []
    for position, parts in places.items():
        at = {"study": target.spec.get("study"), "scenario": target.spec["scenario"], **parts}
        cells[position] = NOT_HERE
        if measured.is_wanted(at):
            measured.finished(at, ", ".join(filter(None, position)), missing)
            statistic = str(target.spec["statistic"])
            values = contrasts.level(measured, at, statistic, 100)
            step = max(step, 100 * contrasts.step(statistic, measured.group(at).runs))
            without = "diverges" if measured.group(at).diverged else NOT_YET
            cells[position] = (
                plus_minus(spread(values.values())) + measured.mark(at) if values else without
            )
            if values and not measured.group(at).diverged:
                seeds[position] = values
    return _Found(seeds, cells, tuple(missing), step)


def learning_rates(target: Target, measured: Measured) -> Built:
    """Figure 2.

    Keys: `methods`: name -> recipe, the first is the baseline; `rates`: learning rate -> {study}.
    """
    base, *others = names = list(target.spec["methods"])
    rates = {f"{rate:g}": source for rate, source in target.spec["rates"].items()}
    recipes = target.spec["methods"].items()
    groups = _read(
        target,
        measured,
        {(r, m): {**rates[r], "recipe": recipe} for r in rates for m, recipe in recipes},
    )
    gains = {(r, m): groups.gain((r, m), (r, base)) for r in rates for m in others}
    table = [["learning rate", *(f"{m}, %" for m in names), *(f"{m} - {base}" for m in others)]]
    for r in rates:
        table.append(
            [
                r,
                *(groups.cells[r, m] for m in names),
                *(_gained(gains[r, m]) for m in others),
            ]
        )
    sentences = [
        f"At {r} {m} less {base} is {evidence(gain, unit=' points')}."
        for (r, m), gain in gains.items()
        if gain
    ]
    files = {"csv": groups.csv("learning_rate", "method")}
    if groups.seeds:
        figure, (axes,) = panels([""], x="learning rate", y=ACCURACY, size=(6.4, 3.4))
        heights = {m: [spread(groups.seeds.get((r, m), {}).values()) for r in rates] for m in names}
        bars(axes, list(rates), heights, (BASELINE_COLOUR, *COLOURS))
        files["png"] = png(figure)
    return Built(table, files, tuple(sentences), groups.missing)


def ratios(target: Target, measured: Measured) -> Built:
    """Figure 5: the gain over `baseline` for each of `settings`: title -> recipe."""
    recipes = {"FedAvg": target.spec["baseline"], **target.spec["settings"]}
    groups = _read(
        target, measured, {(title,): {"recipe": recipe} for title, recipe in recipes.items()}
    )
    every = {
        title: groups.gain((title,), ("FedAvg",)) if title in target.spec["settings"] else None
        for title in recipes
    }
    gains = {title: gain for title, gain in every.items() if gain is not None}
    table = [["setting of mu", "accuracy, %", "gain over FedAvg"]]
    table += [[title, groups.cells[title,], _gained(gain)] for title, gain in every.items()]
    files = {"csv": groups.csv("setting")}
    sentences = []
    if gains:
        means = {title: gain.mean for title, gain in gains.items()}
        high, low = extremes(means)
        sentences.append(
            f"{sum(mean > 0 for mean in means.values())} of {len(gains)} settings have a higher "
            "mean than FedAvg; "
            f"paired t tests over seeds, with Holm's adjustment for {len(gains)}, confirm "
            f"{confirmed([*gains.values()])[0]}."
        )
        if len(gains) > 1:
            ends = (f"{title} ({_gained(gains[title])})" for title in (high, low))
            sentences.append(f"The highest is {', the lowest '.join(ends)}.")
        figure, (axes,) = panels(
            [""], x="accuracy above FedAvg, points", size=(6.4, 0.6 + 0.36 * len(gains))
        )
        errors = [(gain.spread and gain.spread.std) or 0 for gain in gains.values()]
        axes.barh(list(gains), list(means.values()), xerr=errors, color=COLOURS[0], capsize=3)
        axes.invert_yaxis()
        axes.axvline(0, color=RED, linewidth=1.2)
        axes.grid(visible=False, axis="y")
        files["png"] = png(figure)
    return Built(table, files, tuple(sentences), groups.missing)


def layers(target: Target, measured: Measured) -> Built:
    """Figure 4: a point for each of `layers` and `ratios` (mu -> end of the recipe's name), a line
    for `baseline`."""
    ends = {f"mu {mu:g}": end for mu, end in target.spec["ratios"].items()}
    points = {
        (layer, mu): {"recipe": f"{layer}-{end}"}
        for layer in target.spec["layers"]
        for mu, end in ends.items()
    }
    base = ("FedAvg", "")
    groups = _read(target, measured, dict(points) | {base: {"recipe": target.spec["baseline"]}})
    here = [position for position in points if groups.cells[position] != NOT_HERE]
    names, mus = (
        (list(dict.fromkeys(axis)) for axis in zip(*here, strict=True)) if here else ([], [])
    )
    means = {
        position: statistics.fmean(values.values()) for position, values in groups.seeds.items()
    }
    line = means.pop(base, None)
    table = [
        ["layer", *mus],
        *([layer, *(groups.cells[layer, mu] for mu in mus)] for layer in names),
    ]
    files = {"csv": groups.csv("layer", "mu")}
    if means:
        figure, (axes,) = panels([""], x="the layer that is scaled", y=ACCURACY, size=(7, 3.8))
        for marker, colour, mu in zip(MARKERS, COLOURS, mus, strict=False):
            points_of = {
                names.index(layer): value
                for (layer, strength), value in means.items()
                if strength == mu
            }
            axes.plot(
                list(points_of),
                list(points_of.values()),
                marker,
                color=colour,
                label=mu.replace(" ", " = "),
                alpha=0.85,
            )
        if line is not None:
            axes.axhline(line, color=RED, linewidth=1.4, label="FedAvg")
        axes.set_xticks(range(len(names)), names)
        files["png"] = png(figure)
    return Built(table, files, tuple(_layer_words(means, line)), groups.missing)


def _layer_words(means: Mapping[Place, float], line: float | None) -> Iterator[str]:
    """The number of points above FedAvg, also by mu, and the layer that the choice of mu moves
    most."""
    if line is not None and means:
        above = {position: value > line for position, value in means.items()}
        yield f"{sum(above.values())} of {len(means)} points are above FedAvg ({line:.2f} %)."
        by_mu = {
            mu: [up for (_, strength), up in above.items() if strength == mu]
            for mu in sorted({mu for _, mu in means})
        }
        yield (
            "Above it: "
            f"{', '.join(f'{mu} in {sum(up)} of {len(up)} layers' for mu, up in by_mu.items())}."
        )
    by_layer = {
        layer: [value for (strength, _), value in means.items() if strength == layer]
        for layer, _ in means
    }
    moved = {
        layer: max(values) - min(values) for layer, values in by_layer.items() if len(values) > 1
    }
    if moved:
        most, least = extremes(moved)
        yield (
            f"The choice of mu moves the accuracy most in {most} (by {moved[most]:.2f} points), "
            f"least in {least} "
            f"({moved[least]:.2f})."
        )


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
