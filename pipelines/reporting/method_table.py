"""Writes the table of a paper: a row per method, a column per setting, the mean over seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedml_noniid.metrics import METRICS
from fedml_noniid.pipelines.reporting.comparison import against
from fedml_noniid.pipelines.reporting.summary import ScenarioSummary, Spread
from fedml_noniid.pipelines.reporting.text import NONE, as_csv, markdown, plain, plus_minus

BEST, ONE_CLASS = " *", " ONE CLASS"  # behind a cell
# What a mark in a cell says.
NOTES = {
    "≈": "can't be told apart from the best mean",
    " =": "the weights or predictions of the best",
    "†": "trains on labelled public samples",
    "‡": "sees public samples without labels",
    "§": "chooses its clients, so pairs by seed have not the same ones",
    ONE_CLASS: "names one class only, on a seed",
    "LEAK": "has seen the test set",
}
SYMBOLS = {
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "§": r"\S",
}
LATEX = str.maketrans(SYMBOLS | {special: f"\\{special}" for special in "&%$#_{}"})


class Cell(NamedTuple):
    """The scores of a method at a setting."""

    method: str
    setting: str
    scores: Spread
    text: str  # `82.4 ± 1.8`, with its marks
    is_best: bool


@dataclass(frozen=True, repr=False)
class MethodTable:
    """Holds a row for each method and a column for each setting. The best mean of a setting has a
    `*`."""

    cells: Sequence[Cell]
    title: str  # what the numbers are

    @property
    def rows(self) -> list[list[str]]:
        """The cells as text, the header first."""
        return self._rows("{}" + BEST)

    def to_markdown(self) -> str:
        """As Markdown, the best means in bold."""
        return f"{markdown(self._rows('**{}**'))}\n\n{self._notes('bold')}"

    def to_latex(self) -> str:
        """As a `tabular` that needs no package, the best means in bold."""
        escaped = [
            cell._replace(
                **{
                    name: getattr(cell, name).translate(LATEX)
                    for name in ("method", "setting", "text")
                }
            )
            for cell in self.cells
        ]
        rows = MethodTable(escaped, "")._rows(r"\textbf{{{}}}")
        header, *lines = (" & ".join(row) + r" \\" for row in rows)
        first = rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
        body = r"\hline", header, r"\hline", *lines, r"\hline", r"\end{tabular}"
        return "\n".join([first, *body, f"% {self._notes('bold')}"])

    def to_csv(self) -> str:
        """As CSV: a line for each method and setting, unrounded, with the cell's text last."""
        header = ("method", "setting", "mean", "std", "seeds", "shown")
        lines = (
            (cell.method, cell.setting, *cell.scores, cell.text + BEST * cell.is_best)
            for cell in self.cells
        )
        return as_csv(header, lines, digits=None).decode()

    def __repr__(self) -> str:
        return plain(self.rows) + self._notes(BEST)

    def _rows(self, form_of_best: str) -> list[list[str]]:
        settings = [*dict.fromkeys(cell.setting for cell in self.cells)]
        texts: dict[str, dict[str, str]] = {}
        for cell in self.cells:
            text = form_of_best.format(cell.text) if cell.is_best else cell.text
            texts.setdefault(cell.method, {})[cell.setting] = text
        rows = [
            [method, *(row.get(setting, NONE) for setting in settings)]
            for method, row in texts.items()
        ]
        return [["method", *settings], *rows]

    def _notes(self, best: str) -> str:
        """What the numbers are, and the marks that occur."""
        text = " ".join(itertools.chain(*self.rows))
        marks = [f"{mark.strip()}: {note}" for mark, note in NOTES.items() if mark in text]
        return "; ".join([self.title, f"{best.strip()}: the best mean", *marks])


def from_scenarios(
    scenarios: Iterable[tuple[str, str, ScenarioSummary]], recipes: Sequence[str], n_seeds: int
) -> MethodTable:
    """Makes the table of the main metric after the last round.

    `scenarios`: the title of the column, what follows the method's name in the row, the numbers.
    `recipes`: in the order of the rows. `n_seeds`: a cell over fewer seeds says so.
    """
    cells, metric = [], METRICS["accuracy"]
    for setting, suffix, scenario in scenarios:
        metric, tests = scenario.metric, against(scenario, scenario.best)
        for method in sorted(scenario.methods, key=lambda each: recipes.index(each.recipe)):
            test = tests.get(method.recipe) if method.rank else None
            parts = [
                plus_minus(method.final, metric.decimals - 1, scale=metric.factor),
                f" (n={method.final.n})" if method.final.n < n_seeds else "",
                ONE_CLASS if method.one_class else "",
                test.mark if test else "",
            ]
            name = ", ".join(filter(None, [method.label.removesuffix(ONE_CLASS), suffix]))
            is_best = method.rank == 1 and len(scenario.methods) > 1
            cells.append(Cell(name, setting or metric.label, method.final, "".join(parts), is_best))
    title = f"{metric.label}{metric.unit} after the last round, mean ± deviation over seeds"
    return MethodTable(cells, title)


def from_results(root: Path) -> MethodTable:
    """Makes the table of the results under `root`, a column for each scenario of params.yaml.

    UserError if there are no results.
    """
    # Imported here: it imports jinja2, which a Python session may lack.
    from fedml_noniid.pipelines.reporting.report import summarized

    settings, _, scenarios = summarized(root)
    columns = ((scenario.name, "", scenario) for scenario in scenarios)
    return from_scenarios(columns, settings.recipe_names, len(settings.seeds))
