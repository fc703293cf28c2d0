"""Kind `curves`: columns of rounds.csv by round, a line per method, a panel per setting, bands over seeds.

What has seen the test set is marked, and so is a line whose seeds did not all end; no sentence compares them.

Keys: `panels`: a list of {title, study, scenario, column}; `lines`: the paper's name of a method: its recipe, or parts
of an address that differ from the panel's, and `at` ({panel: parts}) those that differ in single panels. `scale`: from
shares to the unit of the axis. `y`: its label. `baseline`: the line that is drawn black. `dashed`: lines that take the
colour of another one and are dashed, while all others are not: {line: the other}.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import MaxNLocator

from pipelines.figures import Values
from pipelines.targets.measured import Measured, series
from pipelines.targets.pictures import legend, line, look, panels, png
from pipelines.targets.spec import Built, Target, address

Drawn = dict[tuple[str, str], tuple[list[int], Values]]  # (panel, line) -> rounds, values [seeds, rounds]


def build(target: Target, measured: Measured) -> Built:
    """The picture and its numbers; lines that are not run at this size, or not yet, are left out and named."""
    spec = target.spec
    lines = {name: of if isinstance(of, Mapping) else {"recipe": of} for name, of in spec["lines"].items()}
    drawn: Drawn = {}
    missing, marks, compared = [], {}, set()
    scale = float(spec.get("scale", 1))
    for panel in spec["panels"]:
        for name, own in lines.items():
            where = address(target.id, str(panel["title"]), panel, own)
            runs = measured.runs(where) if measured.is_wanted(where) else []
            rounds, values = series(runs, str(where.get("column", "test_accuracy"))) if runs else ([], None)
            if values is not None and rounds:
                drawn[str(panel["title"]), name] = rounds, scale * values
                marks[str(panel["title"]), name] = measured.mark(where)
                if measured.compared(where):
                    compared.add((str(panel["title"]), name))
            elif measured.is_wanted(where) and not measured.diverged(where):
                missing.append(f"{panel['title']}, {name}")
    titles = [str(panel["title"]) for panel in spec["panels"] if any(key[0] == str(panel["title"]) for key in drawn)]
    if not titles:
        return Built((), {}, (), tuple(missing) or ("not run at this size",))
    files = {"png": _picture(spec, titles, list(lines), drawn, marks), "csv": _csv(drawn, marks).encode()}
    ends = {place: values for place, (_, values) in drawn.items() if place in compared}
    return Built((), files, tuple(_words(spec, titles, ends)), tuple(missing))


def _picture(
    spec: Mapping[str, Any], titles: list[str], names: list[str], drawn: Drawn, marks: Mapping[tuple[str, str], str]
) -> bytes:
    """All panels share a legend, in which a line has the marks that it has in any of them."""
    labels = {n: n + "".join(dict.fromkeys(marks[t, n] for t in titles if (t, n) in marks)) for n in names}
    looks = _looks(spec, names)
    figure, grid = panels(len(titles), int(spec.get("across", 4)))
    for axes, title in zip(grid, titles, strict=True):
        for name in names:
            if (title, name) in drawn:
                rounds, values = drawn[title, name]
                line(axes, rounds, values, labels[name], looks[name])
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[0].set_ylabel(str(spec.get("y", "test accuracy, %")))
    fullest = max(grid, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    legend(figure, fullest, together=2 if spec.get("dashed") else 1)
    return png(figure)


def _looks(spec: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, object]]:
    """The colour and dashes of each line."""
    baseline, dashed = spec.get("baseline", "FedAvg"), dict(spec.get("dashed", {}))
    if not dashed:
        return {name: look(place, name == baseline) for place, name in enumerate(names)}
    full = [name for name in names if name not in dashed]
    looks = {name: look(place, name == baseline) | {"linestyle": "solid"} for place, name in enumerate(full)}
    return {name: looks[dashed[name]] | {"linestyle": (0, (4, 2))} if name in dashed else looks[name] for name in names}


def _csv(drawn: Drawn, marks: Mapping[tuple[str, str], str]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["panel", "line", "round", "seed_index", "value", "mark"])
    for (panel, name), (rounds, values) in drawn.items():
        for index, row in enumerate(values):
            mark = marks[panel, name].strip(" ;")
            table.writerows([panel, name, t, index, value, mark] for t, value in zip(rounds, row.tolist(), strict=True))
    return text.getvalue()


def _words(spec: Mapping[str, Any], titles: list[str], lines: Mapping[tuple[str, str], Values]) -> list[str]:
    """Who ends where: the highest and the lowest line of each panel, of those that may be compared."""
    found = []
    for title in titles:
        ends = {name: float(values[:, -1].mean()) for (panel, name), values in lines.items() if panel == title}
        if len(ends) > 1:
            high, low = max(ends, key=lambda n: ends[n]), min(ends, key=lambda n: ends[n])
            decimals = int(spec.get("decimals", 2))
            found.append(
                f"{title}: at the end {high} is highest ({ends[high]:.{decimals}f}), {low} lowest "
                f"({ends[low]:.{decimals}f})."
            )
    return found
