"""FedNLR's figures 2 to 5: bars by learning rate and by setting of mu, temperatures and accuracy by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pipelines.fednlr.activations import activations
from pipelines.fednlr.example import example_network
from pipelines.figures import COLOURS, Values
from pipelines.summary import Spread, spread
from pipelines.targets.marks import said_of
from pipelines.targets.measured import Measured, number
from pipelines.targets.pictures import legend, look, panels, png
from pipelines.targets.spec import Built, Target
from pipelines.targets.table import as_csv

__all__ = ["activations", "example_network", "layers", "learning_rates", "ratios", "temperature"]

PERCENT = 100
NOT_RUN = "-"
NOT_HERE = "not run at this size"
MARKERS = "osD^v<>P"


def learning_rates(target: Target, measured: Measured) -> Built:
    """Figure 2. Keys: `methods`: name -> recipe, the first being the baseline; `rates`: learning rate -> {study}."""
    spec = target.spec
    names = list(spec["methods"])
    base, wanted, found, missing = names[0], {}, {}, []
    for rate, where in spec["rates"].items():
        for name, recipe in spec["methods"].items():
            address = {**where, "scenario": spec["scenario"], "recipe": recipe}
            wanted[rate, name] = address
            values = _by_seed(measured, address, str(spec["statistic"]))
            if values:
                found[rate, name] = values
            elif measured.is_wanted(address) and not measured.diverged(address):
                missing.append(f"{rate:g}, {name}")
    table = [["learning rate", *(f"{name}, %" for name in names), *(f"{name} - {base}" for name in names[1:])]]
    words = []
    for rate in spec["rates"]:
        gains = {name: _gain(found.get((rate, name)), found.get((rate, base))) for name in names[1:]}
        cells = [_cell(measured, wanted[rate, name], str(spec["statistic"])) for name in names]
        table.append([f"{rate:g}", *cells, *(_text(gain, sign=True) for gain in gains.values())])
        words += [f"At {rate:g} {_against(name, gain, base)}." for name, gain in gains.items() if gain]
    files = {"csv": _csv(["learning_rate", "method", "seed", "accuracy"], found)}
    if found:
        figure, (axes,) = panels(1)
        figure.set_size_inches(6.4, 3.4)
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            style = look(place - 1, place == 0)
            for x, rate in enumerate(spec["rates"]):
                value = spread((found.get((rate, name)) or {}).values())
                if value is not None:
                    at = x + width * (place - (len(names) - 1) / 2)
                    error = None if value.std is None else value.std
                    label = name if not _has_label(axes, name) else None
                    axes.bar(at, value.mean, width, yerr=error, color=str(style["color"]), label=label, capsize=3)
        axes.set_xticks(range(len(spec["rates"])), [f"{rate:g}" for rate in spec["rates"]])
        axes.set_xlabel("learning rate")
        axes.set_ylabel("test accuracy, %")
        axes.grid(visible=False, axis="x")
        legend(figure, axes)
        files["png"] = png(figure)
    return Built(table, files, tuple(words), tuple(missing))


def ratios(target: Target, measured: Measured) -> Built:
    """Figure 5: the gain over `baseline` for each of `settings`: title -> recipe."""
    spec = target.spec
    where, statistic = {"study": spec["study"], "scenario": spec["scenario"]}, str(spec["statistic"])
    base = _by_seed(measured, where | {"recipe": spec["baseline"]}, statistic)
    found, missing = {}, []
    table = [["setting of mu", "accuracy, %", "gain over FedAvg"]]
    if not base and not measured.diverged(where | {"recipe": spec["baseline"]}):
        missing.append("FedAvg")
    table.append(["FedAvg", _cell(measured, where | {"recipe": spec["baseline"]}, statistic), NOT_RUN])
    gains: dict[str, Spread] = {}
    for title, recipe in spec["settings"].items():
        address = where | {"recipe": recipe}
        values = _by_seed(measured, address, statistic)
        gain = _gain(values, base)
        if values:
            found[title, recipe] = values
        elif measured.is_wanted(address) and not measured.diverged(address):
            missing.append(title)
        if gain is not None:
            gains[title] = gain
        table.append([title, _cell(measured, address, statistic), _text(gain, sign=True)])
    files = {"csv": _csv(["setting", "recipe", "seed", "accuracy"], found)}
    words = []
    if gains:
        best, worst = max(gains, key=lambda t: gains[t].mean), min(gains, key=lambda t: gains[t].mean)
        above = sum(gain.mean > 0 for gain in gains.values())
        words.append(f"{above} of {len(gains)} settings are above FedAvg.")
        if len(gains) > 1:
            words.append(
                f"The highest is {best} ({_text(gains[best], True)}), the lowest {worst} ({_text(gains[worst], True)})."
            )
        figure, (axes,) = panels(1)
        figure.set_size_inches(6.4, 0.6 + 0.36 * len(gains))
        titles = list(gains)[::-1]
        errors = [gains[title].std or 0 for title in titles]
        axes.barh(titles, [gains[title].mean for title in titles], xerr=errors, color=COLOURS[0], capsize=3)
        axes.axvline(0, color="#d62728", linewidth=1.2)
        axes.set_xlabel("accuracy above FedAvg, points")
        axes.grid(visible=False, axis="y")
        files["png"] = png(figure)
    return Built(table, files, tuple(words), tuple(missing))


def layers(target: Target, measured: Measured) -> Built:
    """Figure 4: a point for each of `layers` and `ratios` (mu -> end of the recipe's name), a line for `baseline`."""
    spec = target.spec
    where, statistic = {"study": spec["study"], "scenario": spec["scenario"]}, str(spec["statistic"])
    wanted = {
        (layer, mu): where | {"recipe": f"{layer}-{end}"}
        for layer in spec["layers"]
        for mu, end in spec["ratios"].items()
    }
    wanted = {place: address for place, address in wanted.items() if measured.is_wanted(address)}
    names = [layer for layer in spec["layers"] if any(layer == one for one, _ in wanted)]
    mus = [mu for mu in spec["ratios"] if any(mu == one for _, one in wanted)]
    base = _by_seed(measured, where | {"recipe": spec["baseline"]}, statistic)
    values = {place: _by_seed(measured, address, statistic) for place, address in wanted.items()}
    missing = [f"{layer}, mu {mu:g}" for (layer, mu), seeds in values.items()
               if not seeds and not measured.diverged(wanted[layer, mu])]  # fmt: skip
    missing += [] if base or measured.diverged(where | {"recipe": spec["baseline"]}) else ["FedAvg"]
    table = [["layer", *(f"mu {mu:g}" for mu in mus)]]
    for layer in names:
        places = [(layer, mu) for mu in mus]
        table.append([layer, *(_cell(measured, wanted[p], statistic) if p in wanted else NOT_HERE for p in places)])
    found = {place: seeds for place, seeds in values.items() if seeds}
    files = {"csv": _csv(["layer", "mu", "seed", "accuracy"], found | ({("FedAvg", 1): base} if base else {}))}
    means = {place: _mean(seeds) for place, seeds in found.items()}
    words = _layer_words(means, base, names, mus)
    if found:
        figure, (axes,) = panels(1)
        figure.set_size_inches(7, 3.8)
        for number_, mu in enumerate(mus):
            points = [(names.index(layer), value) for (layer, one), value in means.items() if one == mu]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, MARKERS[number_], color=COLOURS[number_], label=f"mu = {mu:g}", alpha=0.85)
        if base:
            axes.axhline(_mean(base), color="#d62728", linewidth=1.4, label="FedAvg")
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("the layer that is scaled")
        axes.set_ylabel("test accuracy, %")
        legend(figure, axes)
        files["png"] = png(figure)
    return Built(table, files, tuple(words), tuple(missing))


def _layer_words(
    means: Mapping[tuple[str, float], float], base: Mapping[int, float], names: Sequence[str], mus: Sequence[float]
) -> list[str]:
    """How many points are above FedAvg, by mu too, and which layer the choice of mu moves most."""
    words = []
    if base and means:
        line = _mean(base)
        above = [place for place, value in means.items() if value > line]
        words.append(f"{len(above)} of {len(means)} points are above FedAvg ({line:.2f} %).")
        per_mu = {mu: (sum(one == mu for _, one in above), sum(one == mu for _, one in means)) for mu in mus}
        parts = [f"mu {mu:g} in {up} of {n} layers" for mu, (up, n) in per_mu.items() if n]
        words.append(f"Above it: {', '.join(parts)}.")
    moved = {}
    for layer in names:
        own = [value for (one, _), value in means.items() if one == layer]
        if len(own) > 1:
            moved[layer] = max(own) - min(own)
    if moved:
        most, least = max(moved, key=lambda n: moved[n]), min(moved, key=lambda n: moved[n])
        words.append(
            f"The choice of mu moves the accuracy most in {most} (by {moved[most]:.2f} points), least in {least} "
            f"({moved[least]:.2f})."
        )
    return words


def temperature(target: Target, measured: Measured) -> Built:
    """Figure 3: T_l by layer of each of `methods`, over clients and rounds, from what the run of a seed recorded."""
    spec = target.spec
    drawn: dict[str, dict[str, tuple[float, Values]]] = {}  # method -> layer -> mu, T [rounds, clients]
    words, missing = [], []
    for name, recipe in spec["methods"].items():
        address = {"study": spec["study"], "scenario": spec["scenario"], "recipe": recipe}
        runs = measured.runs(address)
        words += said_of(name, measured.group(address))
        if not runs:
            missing += [name] if measured.is_wanted(address) and not measured.diverged(address) else []
            continue
        recorded = measured.recorded(runs[0], str(spec["study"]))
        order = [key.removeprefix("fednlr/T/") for key in recorded if key.startswith("fednlr/T/")]
        drawn[name] = {
            layer: (float(recorded[f"fednlr/mu/{layer}"].flatten()[0]), recorded[f"fednlr/T/{layer}"].double().numpy())
            for layer in sorted(order, key=_depth)
        }
    if not drawn:
        return Built((), {}, tuple(words), tuple(missing) or (() if words else ("not run at this size",)))
    table = [["method", "layer", "mu_l", "T_l, mean", "smallest", "largest", "deviation over clients, last round"]]
    lines = []
    for name, of_layer in drawn.items():
        for layer, (mu, t) in of_layer.items():
            last = t[-1].std(ddof=1) if t.shape[1] > 1 else float("nan")
            table.append([name, layer, f"{mu:.3f}", *(f"{x:.3g}" for x in (t.mean(), t.min(), t.max(), last))])
            lines += [[name, layer, r + 1, k, x] for (r, k), x in np.ndenumerate(t)]
        means = {layer: float(t.mean()) for layer, (_, t) in of_layer.items()}
        high, low = max(means, key=lambda n: means[n]), min(means, key=lambda n: means[n])
        words.append(
            f"{name}: the highest temperature is that of {high}, layer {list(means).index(high) + 1} of {len(means)} "
            f"({means[high]:.3g} on average), the lowest that of {low} ({means[low]:.3g})."
        )
    figure, grid = panels(len(drawn))
    for axes, (name, of_layer) in zip(grid, drawn.items(), strict=True):
        t = np.stack([values for _, values in of_layer.values()])  # [L, rounds, clients]
        x = np.arange(len(t))
        for place, round_ in enumerate(sorted({0, t.shape[1] // 2, t.shape[1] - 1})):
            color = COLOURS[place]
            axes.plot(np.repeat(x, t.shape[2]), t[:, round_].flatten(), ".", color=color, alpha=0.35)
            axes.plot(x, t[:, round_].mean(1), color=color, label=f"round {round_ + 1}", linewidth=1.6)
        axes.set_xticks(x, list(of_layer), rotation=0 if len(t) < 7 else 45)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
    grid[0].set_ylabel("T_l: clients (dots) and their mean")
    legend(figure, grid[0])
    header = ["method", "layer", "round", "client_index", "T"]
    return Built(table, {"png": png(figure), "csv": as_csv(header, lines)}, tuple(words), tuple(missing))


def _by_seed(measured: Measured, address: Mapping[str, Any], statistic: str) -> dict[int, float]:
    """Percent by seed, for sentences and bars; empty if it is not run, and if a seed diverges: the others would flatter
    it."""
    return {} if measured.diverged(address) else _ended(measured, address, statistic)


def _ended(measured: Measured, address: Mapping[str, Any], statistic: str) -> dict[int, float]:
    """Percent by seed, of those that ended with a model."""
    if not measured.is_wanted(address):
        return {}
    values = {run.seed: number(run, statistic) for run in measured.runs(address)}
    return {seed: PERCENT * value for seed, value in values.items() if value is not None}


def _gain(values: Mapping[int, float] | None, base: Mapping[int, float] | None) -> Spread | None:
    """The difference on the same seeds."""
    common = sorted(set(values or {}) & set(base or {}))
    return spread((values or {})[seed] - (base or {})[seed] for seed in common)


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values)


def _cell(measured: Measured, address: Mapping[str, Any], statistic: str) -> str:
    """Mean and spread over the seeds that ended, with marks, or why there is none."""
    if not measured.is_wanted(address):
        return NOT_HERE
    values = _ended(measured, address, statistic)
    if not values:
        return "diverges" if measured.diverged(address) else "not run yet"
    return _text(spread(values.values())) + measured.mark(address)


def _text(value: Spread | None, sign: bool = False) -> str:
    if value is None:
        return NOT_RUN
    mean = f"{value.mean:+.2f}" if sign else f"{value.mean:.2f}"
    return mean if value.std is None else f"{mean} ± {value.std:.2f}"


def _against(name: str, gain: Spread, base: str) -> str:
    """How a method fares against the baseline."""
    how = f"{name} is {abs(gain.mean):.2f} points {'above' if gain.mean > 0 else 'below'} {base}"
    if gain.mean == 0:
        how = f"{name} is as good as {base}"
    if gain.std is None:
        return f"{how}, on one seed: no evidence either way"
    if abs(gain.mean) <= gain.std:
        return f"{how}, which is within the deviation over seeds ({gain.std:.2f}): not told apart"
    return f"{how}, more than the deviation over seeds ({gain.std:.2f})"


def _csv(header: Sequence[str], found: Mapping[tuple[Any, Any], Mapping[int, float]]) -> bytes:
    return as_csv(header, [[*place, seed, value] for place, seeds in found.items() for seed, value in seeds.items()])


def _has_label(axes: Axes, name: str) -> bool:
    return name in axes.get_legend_handles_labels()[1]


def _depth(layer: str) -> tuple[bool, str]:
    """Convolutions come before dense layers, in the papers' networks."""
    return not layer.startswith("conv"), layer
