"""The pictures of rFedAvg's paper that are no curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.results import ItemResult, table
from fedml_noniid.pipelines.reporting.figures import COLOURS, Values, look
from fedml_noniid.pipelines.reporting.summary import Spread
from fedml_noniid.pipelines.reporting.text import as_csv, plus_minus
from research import contrasts
from research.papers.pictures import bars, extremes, panels, png
from research.papers.rfedavg.features import Shown, discrepancy, of_clients
from research.runs import Measured, series
from research.targets import Built, Target, nothing

MARKERS = ("o", "^", "s")  # of the classes, as figure 1 has them
WORST = "#d62728"
ACCURACY = "test accuracy, %"


def features(target: Target, measured: Measured) -> Built:
    """Figure 1: t-SNE of three clients' features, a row per partition, embedded together within a
    row.

    Keys: `rows`: {title: address}; `classes`: whose samples.
    """
    classes = list(target.spec["classes"])
    by_title: dict[str, list[Shown]] = {}
    missing: list[str] = []
    for title, source in target.spec["rows"].items():
        runs = measured.finished(source, str(title), missing)
        try:
            by_title |= {str(title): of_clients(measured, source, runs[0], classes)} if runs else {}
        except UserError as error:
            missing.append(f"{title} ({error})")
    if not by_title:
        return nothing(missing)
    shown = [(title, client) for title, three in by_title.items() for client in three]
    points = [
        _embedded(np.concatenate([client.phi for client in three])) for three in by_title.values()
    ]
    begins = np.cumsum([0, *(len(client.label) for _, client in shown)])
    points_of = np.split(np.concatenate(points), begins[1:-1])
    figure, grid = panels(
        [f"{title}, client {client.client + 1}" for title, client in shown], len(classes)
    )
    lines = []
    for index, (axes, (title, client), at) in enumerate(zip(grid, shown, points_of, strict=True)):
        for c, marker, colour in zip(classes, MARKERS, COLOURS, strict=False):
            x, y = at[client.label == c].T
            axes.scatter(
                x, y, s=12, marker=marker, color=colour, label=f"class {c}", alpha=0.7, linewidths=0
            )
        axes.set(
            xlim=_around(points[index // 3][:, 0]),
            ylim=_around(points[index // 3][:, 1]),
            xticks=[],
            yticks=[],
        )
        lines += [
            (title, client.client + 1, int(c), *xy)
            for c, xy in zip(client.label, at.tolist(), strict=True)
        ]
    sentences = [
        (
            f"{title}: the mean features of the three clients are {discrepancy(three):.2f} "
            "apart on "
            "average (equation 2)."
        )
        for title, three in by_title.items()
    ]
    files = {"png": png(figure), "csv": as_csv(("row", "client", "class", "x", "y"), lines)}
    return Built((), files, tuple(sentences), tuple(missing))


def parameter_study(target: Target, measured: Measured) -> Built:
    """Figure 9: accuracy against one quantity, a line per method, a panel per quantity.

    Keys: `lines`: {method: recipe}; `panels`: {title, x, key, log, points}; a point is an address
    without its recipe, or with `recipes` ({method: recipe}) where the entry has another name. The
    quantity is read from the run itself (`key` of its parameters, with {method}); a run that has
    none, as FedAvg without lambda, is a level line.
    """
    methods: Mapping[str, str] = target.spec["lines"]
    drawn: dict[str, dict[str, dict[float, Spread]]] = {}  # panel -> method -> x
    missing: list[str] = []
    sentences: list[str] = []
    for panel in target.spec["panels"]:
        title = str(panel["title"])
        for name, recipe in methods.items():
            points, compared = {}, {}
            for point in panel["points"]:
                source = {**point, "recipe": point.get("recipes", methods).get(name)}
                runs = measured.finished(
                    source, f"{title}, {name}, {point['study']} {point['scenario']}", missing
                )
                value = (
                    contrasts.value(measured, source, str(target.spec["statistic"]), 100)
                    if runs
                    else None
                )
                if value is not None:
                    x = float(
                        str(runs[0].params.get(str(panel["key"]).format(method=recipe), math.nan))
                    )
                    points[x] = value
                    if measured.group(source).is_compared:
                        compared[x] = value.mean
            if points:
                drawn.setdefault(title, {})[name] = points
            if len(compared) > 1:
                ends = zip(("highest", "lowest"), extremes(compared), strict=True)
                texts = ", ".join(f"{word} at {x:g} ({compared[x]:.2f} %)" for word, x in ends)
                sentences.append(f"{title}, {name}: {texts}.")
    if not drawn:
        return nothing(missing)
    figure, grid = panels(list(drawn), 2, y=ACCURACY)
    about = {str(panel["title"]): panel for panel in target.spec["panels"]}
    for axes, (title, lines) in zip(grid, drawn.items(), strict=True):
        for index, name in enumerate(methods):
            if name in lines:
                _along(axes, lines[name], name, look(index, name == "FedAvg"))
        axes.set(xlabel=about[title]["x"], xscale="log" if about[title].get("log") else "linear")
    rows = [
        (title, name, x, *value)
        for title, lines in drawn.items()
        for name, points in lines.items()
        for x, value in sorted(points.items())
    ]
    files = {
        "png": png(figure),
        "csv": as_csv(("panel", "line", "x", "mean", "std", "seeds"), rows),
    }
    return Built((), files, tuple(sentences), tuple(missing))


def efficiency(target: Target, measured: Measured) -> Built:
    """Figure 10: rounds until fractions of the baseline's best accuracy are reached, and seconds
    per round.

    Keys: `lines`: {method: recipe}; `baseline`: one of them; `levels`: fractions of its best
    accuracy (mean over seeds); `rounds`: panels {title, study, scenario}; `seconds`: panels {title,
    bars: {title: {study, scenario}}}.
    """
    spec, methods = target.spec, dict(target.spec["lines"])
    heights: dict[str, dict[str, dict[str, float]]] = {}  # panel -> group -> method
    missing: list[str] = []
    sentences: list[str] = []
    for panel in spec["rounds"]:
        title, places = (
            str(panel["title"]),
            {m: {**panel, "recipe": recipe} for m, recipe in methods.items()},
        )
        runs = {
            m: measured.finished(source, f"{title}, {m}", missing) for m, source in places.items()
        }
        curves = {m: _mean_curve(curve) for m, curve in runs.items() if curve}
        if spec["baseline"] not in curves:
            continue
        best = max(curves[spec["baseline"]].values())
        for level in (level * best for level in spec["levels"]):
            reached = {m: first(curve, level) for m, curve in curves.items()}
            heights.setdefault(title, {})[f"{100 * level:.1f}"] = reached
        texts = (
            f"{m}{measured.mark(places[m])} {'does not' if math.isnan(t) else f'in round {t:.0f}'}"
            for m, t in reached.items()
        )
        sentences.append(f"{title}: {100 * level:.1f} % are reached by {', '.join(texts)}.")
    for panel in spec["seconds"]:
        for group, source in panel["bars"].items():
            name = f"{panel['title']}, {group}"
            seconds: dict[str, float] = {}
            for m, recipe in methods.items():
                if measured.finished({**source, "recipe": recipe}, f"{name}, {m}", missing):
                    value = contrasts.value(
                        measured, {**source, "recipe": recipe}, "seconds_per_round"
                    )
                    seconds |= {m: value.mean} if value else {}
                    missing += [] if value else [f"{name}, {m} (seconds)"]
            if seconds:
                heights.setdefault(str(panel["title"]), {})[str(group)] = seconds
                slow, _ = extremes(seconds)
                others = ", ".join(
                    f"{m} takes {seconds[m] / seconds[slow]:.2f}" for m in seconds if m != slow
                )
                sentences.append(f"{name}: of {slow}'s {seconds[slow]:.3g} s per round {others}.")
    if not heights:
        return nothing(missing)
    figure, grid = panels(list(heights), 2)
    counted = {str(panel["title"]) for panel in spec["rounds"]}
    for axes, (title, groups) in zip(grid, heights.items(), strict=True):
        values = {m: [members.get(m, math.nan) for members in groups.values()] for m in methods}
        standing = bars(
            axes, list(groups), {m: [Spread(x, None, 1) for x in xs] for m, xs in values.items()}
        )
        for (m, at), colour in zip(standing.items(), COLOURS, strict=False):
            for x in at[np.isnan(values[m])]:
                axes.plot(x, 0, "x", color=colour, clip_on=False)
        rounds = title in counted
        axes.set(
            xlabel=ACCURACY if rounds else "", ylabel="rounds" if rounds else "seconds per round"
        )
    lines = [
        (title, group, *pair)
        for title, groups in heights.items()
        for group, pairs in groups.items()
        for pair in pairs.items()
    ]
    files = {"png": png(figure), "csv": as_csv(("panel", "group", "line", "value"), lines)}
    return Built((), files, tuple(sentences), tuple(missing))


def fairness(target: Target, measured: Measured) -> Built:
    """Figure 11: each client's accuracy on its own part of the test set, the worst in a red circle;
    the first seed.

    Keys: `lines`: {method: recipe}; `panels`: {title, study, scenario}.
    """
    drawn: dict[str, dict[str, Values]] = {}
    missing: list[str] = []
    sentences: list[str] = []
    for panel in target.spec["panels"]:
        title, texts = str(panel["title"]), []
        for name, recipe in target.spec["lines"].items():
            source = {**panel, "recipe": recipe}
            runs = measured.finished(source, f"{title}, {name}", missing)
            value = contrasts.value(measured, source, "client_test_worst", 100) if runs else None
            if value is not None:
                drawn.setdefault(title, {})[name] = _by_client(
                    measured, str(panel["study"]), runs[0]
                )
                texts.append(f"{name} {plus_minus(value, unit=' %')}{measured.mark(source)}")
        sentences += [f"{title}: the worst client has {', '.join(texts)}."] if texts else []
    if not drawn:
        return nothing(missing)
    figure, grid = panels(list(drawn), 2, "client", ACCURACY)
    for axes, methods in zip(grid, drawn.values(), strict=True):
        for index, (name, values) in enumerate(methods.items()):
            at, low = np.arange(1, len(values) + 1), int(np.nanargmin(values))
            axes.plot(
                at, values, MARKERS[index % 3], color=COLOURS[index], markersize=4, label=name
            )
            label = "worst client" if index == len(methods) - 1 else "_"
            axes.plot(
                at[low], values[low], "o", color=WORST, markersize=11, fillstyle="none", label=label
            )
    lines = [
        (title, name, client, value)
        for title, methods in drawn.items()
        for name, values in methods.items()
        for client, value in enumerate(values.tolist(), start=1)
    ]
    files = {"png": png(figure), "csv": as_csv(("panel", "line", "client", "test_accuracy"), lines)}
    return Built((), files, tuple(sentences), tuple(missing))


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
    """A line through the points, with bars of one deviation; a level one for the point that has no
    x."""
    at = sorted(x for x in points if not math.isnan(x))
    if not at:
        axes.axhline(next(iter(points.values())).mean, label=name, **style)
        return
    spreads = [points[x].std or 0.0 for x in at]
    axes.errorbar(
        at,
        [points[x].mean for x in at],
        spreads,
        label=name,
        marker="o",
        markersize=4,
        capsize=3,
        **style,
    )


def _mean_curve(runs: Sequence[ItemResult]) -> dict[int, float]:
    """round -> test accuracy, mean over seeds."""
    rounds, values = series(runs, "test_accuracy")
    return dict(zip(rounds, values.mean(0).tolist(), strict=True))


def _by_client(measured: Measured, study: str, run: ItemResult) -> Values:
    """Test accuracy in percent by client; NaN for a client without test samples."""
    lines = table(measured.folder(study) / "evaluation" / run.key / "per_client.csv")
    return np.array([100 * float(line["test_accuracy"] or math.nan) for line in lines])
