"""The pictures of rFedAvg's paper that are no curves, and its table of sizes."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pipelines.figures import COLOURS, Values
from pipelines.results import Result, table
from pipelines.rfedavg.features import Shown, discrepancy, of_clients
from pipelines.summary import Spread
from pipelines.targets import table as tables
from pipelines.targets.measured import Measured, series
from pipelines.targets.pictures import legend, look, panels, png
from pipelines.targets.spec import Built, Target, address
from plugins.core.errors import UserError

MARKERS = ("o", "^", "s")  # of the classes, as figure 1 has them
WORST = "#d62728"
NOTHING = ("not run at this size",)


def features(target: Target, measured: Measured) -> Built:
    """Figure 1: t-SNE of three clients' features, a row per partition, embedded together within a row.

    Keys: `rows`: {title: address}; `classes`: whose samples.
    """
    classes = list(target.spec["classes"])
    found: dict[str, list[Shown]] = {}
    missing = []
    for title, place in target.spec["rows"].items():
        runs = measured.runs(place) if measured.is_wanted(place) else []
        if not runs:
            missing += [str(title)] if measured.is_wanted(place) else []
            continue
        try:
            found[str(title)] = of_clients(measured, place, runs[0], classes)
        except UserError as error:
            missing.append(f"{title} ({error})")
    if not found:
        return Built((), {}, (), tuple(missing) or NOTHING)
    figure, grid = panels(3 * len(found), 3)
    lines = []
    for row, (title, shown) in enumerate(found.items()):
        points = _embedded(np.concatenate([one.phi for one in shown]))
        begins = np.cumsum([0, *(len(one.label) for one in shown)])
        for place, (axes, one) in enumerate(zip(grid[3 * row : 3 * row + 3], shown, strict=True)):
            own = points[begins[place] : begins[place + 1]]
            for c, marker, colour in zip(classes, MARKERS, COLOURS, strict=False):
                x, y = own[one.label == c].T
                axes.scatter(x, y, s=12, marker=marker, color=colour, label=f"class {c}", alpha=0.7, linewidths=0)
            axes.set_title(f"{title}, client {one.client + 1}", loc="left", fontsize=10)
            axes.set_xlim(*_around(points[:, 0]))
            axes.set_ylim(*_around(points[:, 1]))
            axes.set_xticks([])
            axes.set_yticks([])
            lines += [(title, one.client + 1, int(c), *xy) for c, xy in zip(one.label, own.tolist(), strict=True)]
    legend(figure, grid[0])
    words = [
        f"{title}: the mean features of the three clients are {discrepancy(shown):.2f} apart on average (equation 2)."
        for title, shown in found.items()
    ]
    files = {"png": png(figure), "csv": _csv(("row", "client", "class", "x", "y"), lines)}
    return Built((), files, tuple(words), tuple(missing))


def parameter_study(target: Target, measured: Measured) -> Built:
    """Figure 9: accuracy against one quantity, a line per method, a panel per quantity.

    Keys: `lines`: {method: recipe}; `panels`: {title, x, key, log, points}; a point is an address without its recipe,
    or with `recipes` ({method: recipe}) where the entry has another name. The quantity is read from the run itself
    (`key` of its parameters, with {method}); a run that has none, as FedAvg without lambda, is a level line.
    """
    drawn: dict[tuple[str, str], dict[float, Spread]] = {}
    compared: dict[tuple[str, str], dict[float, Spread]] = {}
    missing = []
    for panel in target.spec["panels"]:
        for name, recipe in target.spec["lines"].items():
            for point in panel["points"]:
                place = {**point, "recipe": point.get("recipes", target.spec["lines"]).get(name)}
                if place["recipe"] is None or not measured.is_wanted(place):
                    continue
                runs = measured.runs(place)
                value = measured.value(place, str(target.spec["statistic"]))
                if not runs or value is None:
                    lost = [] if measured.diverged(place) else [f"{name}, {point['study']} {point['scenario']}"]
                    missing += [f"{panel['title']}, {of}" for of in lost]
                    continue
                x = runs[0].params.get(str(panel["key"]).format(method=recipe), math.nan)
                percent = Spread(100 * value.mean, None if value.std is None else 100 * value.std, value.n)
                for into in (drawn, compared) if measured.compared(place) else (drawn,):
                    into.setdefault((str(panel["title"]), name), {})[float(str(x))] = percent
    wanted = [panel for panel in target.spec["panels"] if any(key[0] == panel["title"] for key in drawn)]
    if not wanted:
        return Built((), {}, (), tuple(missing) or NOTHING)
    figure, grid = panels(len(wanted), 2)
    for axes, panel in zip(grid, wanted, strict=True):
        for index, name in enumerate(target.spec["lines"]):
            if (panel["title"], name) in drawn:
                _along(axes, drawn[panel["title"], name], name, look(index, name == "FedAvg"))
        axes.set_title(panel["title"], loc="left", fontsize=10)
        axes.set_xlabel(panel["x"])
        axes.set_xscale("log" if panel.get("log") else "linear")
    for axes in grid[::2]:
        axes.set_ylabel("test accuracy, %")
    legend(figure, max(grid, key=lambda axes: len(axes.get_legend_handles_labels()[1])))
    lines = [
        (title, name, "" if math.isnan(x) else x, value.mean, "" if value.std is None else value.std, value.n)
        for (title, name), points in drawn.items()
        for x, value in sorted(points.items())
    ]
    files = {"png": png(figure), "csv": _csv(("panel", "line", "x", "mean", "std", "seeds"), lines)}
    words = [_range(title, name, points) for (title, name), points in compared.items() if len(points) > 1]
    return Built((), files, tuple(words), tuple(missing))


def efficiency(target: Target, measured: Measured) -> Built:
    """Figure 10: rounds until shares of the baseline's best accuracy are reached, and seconds per round.

    Keys: `lines`: {method: recipe}; `baseline`: one of them; `levels`: shares of its best accuracy (mean over seeds);
    `rounds`: panels {title, study, scenario}; `seconds`: panels {title, bars: {title: {study, scenario}}}.
    """
    spec, methods = target.spec, dict(target.spec["lines"])
    bars: dict[str, dict[str, dict[str, float]]] = {}  # panel -> group -> method -> height
    missing, words = [], []
    for panel in spec["rounds"]:
        title, wanted = str(panel["title"]), [m for m, r in methods.items() if _wanted(measured, panel, r)]
        curves = {m: _mean_curve(measured, panel, methods[m]) for m in wanted}
        places = {m: {**panel, "recipe": methods[m]} for m in wanted}
        missing += [f"{title}, {m}" for m, curve in curves.items() if not curve and not measured.diverged(places[m])]
        curves = {m: curve for m, curve in curves.items() if curve}
        if spec["baseline"] not in curves:
            continue
        best = max(curves[spec["baseline"]].values())
        for share in spec["levels"]:
            reached = {m: first(curve, share * best) for m, curve in curves.items()}
            bars.setdefault(title, {})[f"{100 * share * best:.1f}"] = reached
        said = (
            f"{m}{measured.mark(places[m])} {'does not' if math.isnan(t) else f'in round {t:.0f}'}"
            for m, t in reached.items()
        )
        words.append(f"{title}: {100 * share * best:.1f} % are reached by {', '.join(said)}.")
    for panel in spec["seconds"]:
        for group, place in panel["bars"].items():
            for m, recipe in methods.items():
                if not _wanted(measured, place, recipe):
                    continue
                value = measured.value({**place, "recipe": recipe}, "seconds_per_round")
                if value is None:
                    lost = not measured.diverged({**place, "recipe": recipe})
                    missing += [f"{panel['title']}, {group}, {m}"] if lost else []
                else:
                    bars.setdefault(str(panel["title"]), {}).setdefault(str(group), {})[m] = value.mean
        words += [_times(str(panel["title"]), g, height) for g, height in bars.get(str(panel["title"]), {}).items()]
    if not bars:
        return Built((), {}, (), tuple(missing) or NOTHING)
    figure, grid = panels(len(bars), 2)
    counted = {str(panel["title"]) for panel in spec["rounds"]}
    for axes, (title, groups) in zip(grid, bars.items(), strict=True):
        _bars(axes, groups, list(methods))
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("test accuracy, %" if title in counted else "")
        axes.set_ylabel("rounds" if title in counted else "seconds per round")
    legend(figure, grid[0])
    lines = [
        (title, group, m, "" if math.isnan(height) else height)
        for title, groups in bars.items()
        for group, heights in groups.items()
        for m, height in heights.items()
    ]
    files = {"png": png(figure), "csv": _csv(("panel", "group", "line", "value"), lines)}
    return Built((), files, tuple(words), tuple(missing))


def fairness(target: Target, measured: Measured) -> Built:
    """Figure 11: each client's accuracy on its own part of the test set, the worst in a red circle; the first seed.

    Keys: `lines`: {method: recipe}; `panels`: {title, study, scenario}.
    """
    drawn: dict[str, dict[str, Values]] = {}
    missing, words = [], []
    for panel in target.spec["panels"]:
        said: list[str] = []
        for name, recipe in target.spec["lines"].items():
            place = {**panel, "recipe": recipe}
            runs = measured.runs(place) if measured.is_wanted(place) else []
            value = measured.value(place, "client_test_worst") if runs else None
            if value is not None:
                drawn.setdefault(str(panel["title"]), {})[name] = _by_client(measured, str(panel["study"]), runs[0])
                said.append(f"{name} {_percent(value)}{measured.mark(place)}")
            elif measured.is_wanted(place) and not measured.diverged(place):
                missing.append(f"{panel['title']}, {name}")
        if said:
            words.append(f"{panel['title']}: the worst client has {', '.join(said)}.")
    if not drawn:
        return Built((), {}, (), tuple(missing) or NOTHING)
    figure, grid = panels(len(drawn), 2)
    for axes, (title, methods) in zip(grid, drawn.items(), strict=True):
        for index, (name, values) in enumerate(methods.items()):
            at, low = np.arange(1, len(values) + 1), int(np.nanargmin(values))
            axes.plot(at, values, MARKERS[index % 3], color=COLOURS[index], markersize=4, label=name)
            label = "worst client" if index == len(methods) - 1 else "_"
            axes.plot(at[low], values[low], "o", color=WORST, markersize=11, fillstyle="none", label=label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("client")
    grid[0].set_ylabel("test accuracy, %")
    legend(figure, grid[0])
    lines = [
        (title, name, client + 1, "" if math.isnan(value) else value)
        for title, methods in drawn.items()
        for name, values in methods.items()
        for client, value in enumerate(values.tolist())
    ]
    files = {"png": png(figure), "csv": _csv(("panel", "line", "client", "test_accuracy"), lines)}
    return Built((), files, tuple(words), tuple(missing))


def delta_sizes(target: Target, measured: Measured) -> Built:
    """Table III as it counts, and below what a client was really sent (the last round).

    Keys: as of kind `table`.
    """
    built = tables.build(target, measured)
    rows, columns = dict(target.spec["rows"]), dict(target.spec["columns"])
    sent: dict[tuple[str, str], float] = {}
    for row in rows:
        for column in columns:
            place = address(target.id, column, rows[row], columns[column])
            runs = measured.runs(place) if measured.is_wanted(place) else []
            found = [run.column(f"{run.composition}_delta_bytes") for run in runs]
            if found:
                sent[row, column] = statistics.fmean(values[-1] for values in found)
    more = [
        [f"{row}, really sent", *(f"{sent[row, c]:.0f}" if (row, c) in sent else "-" for c in columns)] for row in rows
    ]
    lines = [(row, column, value) for (row, column), value in sent.items()]
    words = []
    for column in columns:
        if all((row, column) in sent for row in rows):
            many, one = (sent[row, column] for row in rows)
            names = list(rows)
            words.append(f"{column}: {names[0]} really sends a client {many / one:.0f} times what {names[1]} sends.")
    files = {"csv": built.files["csv"] + _csv(("row", "column", "really_sent"), lines)}
    return Built([*built.table, *more], files, tuple(words), built.missing)


def first(curve: Mapping[int, float], level: float) -> float:
    """The first round in which `level` is reached; NaN if none is."""
    return next((float(t) for t in sorted(curve) if curve[t] >= level), math.nan)


def _embedded(phi: Values) -> Values:
    """t-SNE of features [n, d] in two dimensions, the same for the same features."""
    # Imported here, since it takes seconds and one figure needs it.
    from sklearn.manifold import TSNE

    embedding = TSNE(2, perplexity=min(30.0, (len(phi) - 1) / 3), init="pca", random_state=0)
    return np.asarray(embedding.fit_transform(phi), dtype=np.float64)


def _around(values: Values) -> tuple[float, float]:
    margin = 0.05 * float(np.ptp(values)) or 1.0
    return float(values.min()) - margin, float(values.max()) + margin


def _along(axes: Axes, points: Mapping[float, Spread], name: str, style: Mapping[str, Any]) -> None:
    """A line through the points, with bars of one deviation; a level one for the point that has no x."""
    at = sorted(x for x in points if not math.isnan(x))
    if not at:
        axes.axhline(next(iter(points.values())).mean, label=name, **style)
        return
    spreads = [points[x].std or 0.0 for x in at]
    axes.errorbar(at, [points[x].mean for x in at], spreads, label=name, marker="o", markersize=4, capsize=3, **style)


def _range(title: str, name: str, points: Mapping[float, Spread]) -> str:
    high, low = (pick(points, key=lambda x: points[x].mean) for pick in (max, min))
    ends = (f"{word} at {x:g} ({points[x].mean:.2f} %)" for word, x in (("highest", high), ("lowest", low)))
    return f"{title}, {name}: {', '.join(ends)}."


def _wanted(measured: Measured, place: Mapping[str, Any], recipe: str) -> bool:
    return measured.is_wanted({**place, "recipe": recipe})


def _mean_curve(measured: Measured, place: Mapping[str, Any], recipe: str) -> dict[int, float]:
    """round -> test accuracy, mean over seeds."""
    rounds, values = series(measured.runs({**place, "recipe": recipe}), "test_accuracy")
    return dict(zip(rounds, values.mean(0).tolist(), strict=True)) if rounds else {}


def _times(title: str, group: str, seconds: Mapping[str, float]) -> str:
    slowest = max(seconds, key=lambda m: seconds[m])
    said = (f"{m} takes {seconds[m] / seconds[slowest]:.2f}" for m in seconds if m != slowest)
    return f"{title}, {group}: of {slowest}'s {seconds[slowest]:.3g} s per round {', '.join(said)}."


def _bars(axes: Axes, groups: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> None:
    """Bars side by side for each group; a cross on the floor where there is nothing to draw."""
    width = 0.8 / len(methods)
    for place, method in enumerate(methods):
        heights = np.array([heights.get(method, math.nan) for heights in groups.values()])
        at = np.arange(len(groups)) + (place - (len(methods) - 1) / 2) * width
        axes.bar(at, np.nan_to_num(heights), 0.9 * width, color=COLOURS[place], label=method)
        for x in at[np.isnan(heights)]:
            axes.plot(x, 0, "x", color=COLOURS[place], clip_on=False)
    axes.set_xticks(range(len(groups)), list(groups))


def _by_client(measured: Measured, study: str, run: Result) -> Values:
    """Test accuracy in percent by client; NaN for a client without test samples."""
    lines = table(measured.folder(study) / "evaluation" / run.key / "per_client.csv")
    return np.array([100 * float(line["test_accuracy"] or math.nan) for line in lines])


def _percent(value: Spread) -> str:
    return f"{100 * value.mean:.2f} %" + ("" if value.std is None else f" ± {100 * value.std:.2f}")


def _csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    found = csv.writer(text, lineterminator="\n")
    found.writerow(header)
    found.writerows(lines)
    return text.getvalue().encode()
