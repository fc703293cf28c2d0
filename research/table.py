"""Kind `table`: the paper's table in its own layout, our numbers beside the paper's, and sentences
on the outcome.

A method with a diverged seed has no mean over all its seeds. Its cell shows the mean of the seeds
that ended and the number of seeds that did not. Our ranking puts such methods last, tied with each
other. No sentence compares their mean or gain. A run that has seen the test set (tag `leak`) is
marked and not ranked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field
from scipy.stats import kendalltau

from fedml_noniid.core.errors import located
from fedml_noniid.core.options import validated
from fedml_noniid.data.checks import known
from fedml_noniid.pipelines.reporting.comparison import Comparison, confirmed, evidence
from fedml_noniid.pipelines.reporting.summary import Spread
from fedml_noniid.pipelines.reporting.text import as_csv, plus_minus
from research import contrasts
from research.drawing import Picture, draw
from research.runs import Group, Measured
from research.targets import NOT_HERE, Built, Head, Target, address, as_printed

NOT_YET, NOT_MEASURED = "not run yet", "not measured"
MIN_RANKED = 3  # methods; a rank correlation over fewer says nothing
CSV = (
    *("row", "column", "measured", "measured_std", "seeds", "diverged"),
    *("reported", "reported_spread", "difference", "leak", "notes"),
)
CSV_OF_GAINS = ["gain", "gain_std", "gain_reported"]
Place = tuple[str, str]  # row, column
Axis = dict[str, dict[str, Any]]


class Spec(Head):
    """The keys of a table.

    A row or column is {the paper's title: parts of an address {study, scenario, recipe}}. The parts
    of a row and of a column together are the address of a cell; `at` in a row ({column: parts})
    overrides parts of single cells. A row or column may have its own `statistic`, `scale`,
    `decimals` and `better`. `reported` is the title of the paper's number if it differs. `compared:
    false` leaves a method out of the sentences.
    """

    rows: Axis
    columns: Axis
    methods: Literal["rows", "columns"] = "rows"  # the axis of the methods, which are compared
    statistic: str = "final"
    scale: float | int = 1  # from fractions to the paper's unit
    decimals: int = 2
    better: Literal["higher", "lower", "none"] = "higher"
    # The method that the paper says is best; a composition with it ("B + A") is no rival.
    claim: str = ""
    # Rows or columns that show their difference to another, seed by seed.
    gains: dict[str, str] = Field(default_factory=dict)
    picture: Picture | None = None  # a picture of the numbers beside the table


class Cell(NamedTuple):
    """One number of the table, in the paper's unit."""

    decimals: int
    reported: float | None
    reported_spread: float | None
    printed: str = ""  # both, with the paper's digits
    instead: str = "-"  # of a missing number: the reason
    measured: Spread | None = None
    mark: str = ""  # leaks, notes and diverged seeds
    group: Group = Group((), ())
    gain: Comparison | None = None  # the difference to another cell, seed by seed
    gain_reported: float | None = None

    @property
    def mean(self) -> float | None:
        """The mean that sentences compare.

        None if training has seen the test set or a seed diverged.
        """
        return self.measured.mean if self.measured and self.group.is_compared else None

    @property
    def is_last(self) -> bool:
        """Whether it ranks behind all methods without diverged seeds: it has one, and no leak."""
        return bool(self.group.diverged) and not self.group.leaks

    @property
    def text(self) -> str:
        """`98.02 ± 0.03 (97.88 ± 0.07)`: our number over seeds, the paper's in brackets as printed.

        The gain is on the next line. Marks stand between the two numbers: `98.02 LEAK [1]; 1 of 3
        seeds diverges (97.88)`.
        """
        number = plus_minus(self.measured, self.decimals) if self.measured else self.instead
        cell = number + self.mark
        if self.printed:
            cell += f" ({self.printed})"
        if self.gain is None:
            return cell
        cell += f"\ngain {plus_minus(self.gain.spread, self.decimals, '+')}"
        if self.gain_reported is not None:
            cell += f" ({self.gain_reported:+.{self.decimals}f})"
        return cell

    def line(self, position: Place) -> list[object]:
        """Its line of the CSV file."""
        mean, std, n = self.measured or (None, None, 0)
        difference = None if mean is None or self.reported is None else mean - self.reported
        notes = "; ".join(note for notes in self.group.notes for note in notes)
        cells = [*position, mean, std, n, len(self.group.diverged), self.reported]
        cells += [self.reported_spread, difference, "; ".join(self.group.leaks), notes]
        gain = (self.gain and self.gain.spread) or (None, None)
        return [*cells, *gain[:2], self.gain_reported]


class Table:
    """A table's cells, by row and column."""

    def __init__(self, target: Target, measured: Measured) -> None:
        with located(source=target.id):
            self.spec = validated(Spec, target.spec)
        self.target, self.measured = target, measured
        options = self.spec.model_dump(include={"statistic", "scale", "decimals"})
        self.at = {position: options | at for position, at in addresses(target).items()}
        axes = self.spec.rows, self.spec.columns
        self.methods, self.settings = axes if self.spec.methods == "rows" else axes[::-1]
        self.bases = self._bases()
        self.cells = {position: self._cell(position) for position in self.at}
        self.agreement = self._agreement()

    def position(self, method: str, setting: str) -> Place:
        """The row and column of a method in a setting."""
        return (method, setting) if self.spec.methods == "rows" else (setting, method)

    def _bases(self) -> dict[Place, Place]:
        """The cells of rows or columns of `gains` -> the cell that each is compared with."""
        bases = self.spec.gains
        for title in (*bases, *bases.values()):
            allowed = (*self.spec.rows, *self.spec.columns)
            known(f"{self.target.id}: gains: row or column", title, allowed)
        base_of = {(r, c): (bases.get(r, r), bases.get(c, c)) for r, c in self.at}
        return {position: base for position, base in base_of.items() if base != position}

    def _cell(self, position: Place) -> Cell:
        at, base = self.at[position], self.bases.get(position)
        cell = Cell(at["decimals"], *self._reported(position))
        if base is not None:
            cell = cell._replace(gain_reported=self._reported_gain(position, base))
        if "study" not in at:  # a row or column of the paper that can't be run
            return cell
        if not self.measured.is_wanted(at):
            return cell._replace(instead=NOT_HERE)
        group = self.measured.group(at)
        value = contrasts.value(self.measured, at, at["statistic"], at["scale"])
        if value is None:
            instead = group.divergence or (NOT_MEASURED if group.runs else NOT_YET)
            return cell._replace(instead=instead, group=group)
        gain = None if base is None or "study" not in self.at[base] else self._gain(position, base)
        mark = self.measured.mark(at)
        return cell._replace(instead="", measured=value, mark=mark, group=group, gain=gain)

    def _gain(self, position: Place, base: Place) -> Comparison | None:
        """The difference of two cells, seed by seed."""
        at = self.at[position]
        return contrasts.gain(self.measured, at, self.at[base], at["statistic"], at["scale"])

    def _reported(self, position: Place) -> tuple[float | None, float | None, str]:
        """The paper's number, the spread beside it, and both as printed."""
        axes = self.spec.rows[position[0]], self.spec.columns[position[1]]
        titles = [axis.get("reported", title) for axis, title in zip(axes, position, strict=True)]
        number = self.target.printed(*titles)
        number, spread = number if isinstance(number, list) else (number, None)
        if not isinstance(number, int | float):
            return None, None, ""
        if spread is None:
            return float(number), None, as_printed(number)
        printed = f"{as_printed(number)} ± {as_printed(spread)}"
        return float(number), float(spread), printed

    def _reported_gain(self, position: Place, base: Place) -> float | None:
        """The paper's gain: the printed one, else the difference of its numbers."""
        reported = self.target.reported or {}
        printed = reported.get("gains", {}).get(position[0])
        if printed and printed[list(reported["columns"]).index(position[1])] is not None:
            return float(printed[list(reported["columns"]).index(position[1])])
        (gain, *_), (other, *_) = self._reported(position), self._reported(base)
        return None if gain is None or other is None else gain - other

    def ranked(self) -> Iterator[tuple[str, int, dict[str, Cell]]]:
        """(title, sign, compared methods) of each setting that ranks its methods. `sign` is -1 if
        lower is better."""
        for setting, column in self.settings.items():
            better = column.get("better", self.spec.better)
            if better != "none":
                yield (
                    setting,
                    -1 if better == "lower" else 1,
                    {
                        name: self.cells[self.position(name, setting)]
                        for name, method in self.methods.items()
                        if method.get("compared", True)
                    },
                )

    def _agreement(self) -> dict[str, tuple[float, int]]:
        """For each setting that has one: Kendall's τ between our ranking and the paper's, and the
        number of methods.

        Methods with a diverged seed tie for the last place of our ranking.
        """
        agreement = {}
        for setting, sign, cells in self.ranked():
            pairs = [
                (-sign * math.inf if cell.is_last else cell.mean, cell.reported)
                for cell in cells.values()
            ]
            pairs = [pair for pair in pairs if None not in pair]
            if len(pairs) >= MIN_RANKED:
                tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
                if math.isfinite(tau):
                    agreement[setting] = tau, len(pairs)
        return agreement

    def sentences(self) -> Iterator[str]:
        """For each setting: the agreement of the rankings, and the claimed method against the
        others."""
        for setting, sign, cells in self.ranked():
            parts = []
            if setting in self.agreement:
                tau, n = self.agreement[setting]
                parts.append(
                    f"the order of {n} methods agrees with the paper's to Kendall τ = {tau:.2f}"
                )
            if last := [name for name, cell in cells.items() if cell.is_last]:
                parts.append(f"ranked last, as a seed diverges or all do: {', '.join(last)}")
            claim, means = self.spec.claim, {}
            for name, cell in cells.items():
                if cell.mean is not None and claim not in map(str.strip, name.split("+")):
                    means[name] = sign * cell.mean
            if means and claim in cells and cells[claim].mean is not None:
                rival = max(means, key=lambda name: means[name])
                gain = self._gain(self.position(claim, setting), self.position(rival, setting))
                best = f"the best other ({rival})"
                parts.append(
                    f"{claim} less {best} is {evidence(gain, cells[claim].decimals)}"
                    if gain
                    else f"{claim} and {best} have no seed in common"
                )
            if parts:
                yield f"{setting}: {'; '.join(parts)}."

    def sentences_on_gains(self) -> Iterator[str]:
        """For each row or column of `gains`: our mean over methods, the paper's mean, and the gains
        that seeds confirm."""
        decimals = self.spec.decimals
        for title, base in self.spec.gains.items():
            cells = [self.cells[position] for position in self.bases if title in position]
            gains = [cell.gain for cell in cells if cell.gain is not None]
            if not gains:
                continue
            printed = [c.gain_reported for c in cells if c.gain and c.gain_reported is not None]
            beside = f" (in the paper {statistics.fmean(printed):+.{decimals}f})" if printed else ""
            text = (
                f"{title}{' LEAK' if any(cell.group.leaks for cell in cells) else ''} against "
                f"{base}: the mean gain of {len(gains)} methods is "
                f"{statistics.fmean(gain.mean for gain in gains):+.{decimals}f}{beside}"
            )
            if any(gain.p is None for gain in gains):
                yield f"{text}, on one seed: no evidence either way."
                continue
            up, down = confirmed(gains)
            yield (
                f"{text}; paired t tests over seeds, with Holm's adjustment for {len(gains)}, find "
                f"it above 0 for {up} and below 0 for {down} of them."
            )


def build(target: Target, measured: Measured) -> Built:
    """The table. A cell without a number says why."""
    table = Table(target, measured)
    header = [*CSV, *(CSV_OF_GAINS if table.spec.gains else ())]
    lines = [cell.line(position)[: len(header)] for position, cell in table.cells.items()]
    rows, columns = table.spec.rows, table.spec.columns
    picture = draw(table.spec.picture, table) if table.spec.picture else {}
    return Built(
        [["", *columns], *([row, *(table.cells[row, c].text for c in columns)] for row in rows)],
        {"csv": as_csv(header, lines), **picture},
        (*table.sentences_on_gains(), *table.sentences()),
        tuple(", ".join(p) for p, cell in table.cells.items() if cell.instead == NOT_YET),
    )


def addresses(target: Target) -> dict[Place, dict[str, Any]]:
    """The address of each cell."""
    rows, columns = dict(target.spec["rows"]), dict(target.spec["columns"])
    return {(r, c): address(target.id, c, rows[r], columns[c]) for r in rows for c in columns}
