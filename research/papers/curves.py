"""Kind `curves`: a column of rounds.csv by round, with a line per method, a panel per setting,
bands over seeds.

A line is marked if its runs have seen the test set, or if one of its seeds diverged. No sentence
compares such a line.

Keys:

`panels`    a list of {title, study, scenario, column}
`lines`     the paper's name of a method -> its recipe, or the parts of an address that differ from
            the panel's; `at` ({panel: parts}) has the parts that differ in single panels
`scale`     the factor from fractions to the unit of the y axis
`y`         the label of the y axis
`baseline`  the line that is drawn black
`dashed`    {line: other}: the line is dashed and takes the colour of the other; all other lines are
            then solid
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from fedml_noniid.pipelines.reporting.figures import Values, look
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers.pictures import extremes, line, panels, png
from research.runs import Measured, series
from research.targets import Built, Target, address, nothing


class Line(NamedTuple):
    """A line of a panel, in the unit of the axis."""

    rounds: list[int]
    values: Values  # [seeds, rounds]
    seeds: list[int]
    mark: str = ""
    is_compared: bool = True

    @property
    def mean(self) -> Values:
        """Over seeds, [rounds]."""
        mean: Values = self.values.mean(0)
        return mean


Panels = Mapping[str, Mapping[str, Line]]  # title -> method -> line
Says = Callable[[Mapping[str, Any], Panels], Iterable[str]]


def ends(spec: Mapping[str, Any], lines: Panels) -> Iterable[str]:
    """For each panel, the line that ends highest and the line that ends lowest."""
    for title, by_name in lines.items():
        last = {name: float(curve.mean[-1]) for name, curve in by_name.items()}
        if len(last) > 1:
            (high, low), decimals = extremes(last), int(spec.get("decimals", 2))
            yield (
                f"{title}: at the end {high} is highest ({last[high]:.{decimals}f}), {low} lowest "
                f"({last[low]:.{decimals}f})."
            )


def curves(target: Target, measured: Measured, sentences: Sequence[Says] = (ends,)) -> Built:
    """The picture and its numbers.

    `missing` names lines without runs. `sentences`: functions that make the sentences.
    """
    spec = target.spec
    methods = {
        str(name): method if isinstance(method, Mapping) else {"recipe": method}
        for name, method in spec["lines"].items()
    }
    drawn: dict[str, dict[str, Line]] = {str(panel["title"]): {} for panel in spec["panels"]}
    missing: list[str] = []
    for title, panel in zip(drawn, spec["panels"], strict=True):
        for name, method in methods.items():
            source = address(target.id, title, panel, method)
            runs = measured.finished(source, f"{title}, {name}", missing)
            rounds, values = series(runs, str(source.get("column", "test_accuracy")))
            if rounds:
                values, seeds = float(spec.get("scale", 1)) * values, [run.seed for run in runs]
                drawn[title][name] = Line(
                    rounds, values, seeds, measured.mark(source), measured.group(source).is_compared
                )
            elif runs:
                missing.append(f"{title}, {name}")
    if not any(drawn.values()):
        return nothing(missing)
    rows = [
        [title, name, t, seed, value, curve.mark.strip(" ;")]
        for title, lines in drawn.items()
        for name, curve in lines.items()
        for seed, row in enumerate(curve.values.tolist())
        for t, value in zip(curve.rounds, row, strict=True)
    ]
    header = ["panel", "line", "round", "seed_index", "value", "mark"]
    picture = _picture(
        spec, list(methods), {title: lines for title, lines in drawn.items() if lines}
    )
    compared = {
        title: {name: curve for name, curve in by_name.items() if curve.is_compared}
        for title, by_name in drawn.items()
    }
    texts = tuple(sentence for sentence_of in sentences for sentence in sentence_of(spec, compared))
    return Built((), {"png": picture, "csv": as_csv(header, rows)}, texts, tuple(missing))


def _picture(spec: Mapping[str, Any], names: Sequence[str], drawn: Panels) -> bytes:
    """All panels share one legend. There a line has its marks from all panels."""
    labels = {
        n: n + "".join(dict.fromkeys(by_name[n].mark for by_name in drawn.values() if n in by_name))
        for n in names
    }
    looks = _looks(spec, names)
    y = str(spec.get("y", "test accuracy, %"))
    figure, grid = panels(list(drawn), int(spec.get("across", 4)), "round", y)
    for axes, lines in zip(grid, drawn.values(), strict=True):
        for name, curve in lines.items():
            line(axes, curve.rounds, curve.values, labels[name], looks[name])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return png(figure, together=2 if spec.get("dashed") else 1)


def _looks(spec: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, object]]:
    """The colour and dashes of each line."""
    baseline, dashed = spec.get("baseline", "FedAvg"), dict(spec.get("dashed", {}))
    full = {
        name: look(index, name == baseline)
        for index, name in enumerate(n for n in names if n not in dashed)
    }
    if dashed:
        full = {name: style | {"linestyle": "solid"} for name, style in full.items()}
    return full | {name: full[other] | {"linestyle": (0, (4, 2))} for name, other in dashed.items()}
