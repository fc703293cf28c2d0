"""Kind `table`: the paper's table in its own layout, our numbers beside the paper's, and sentences
on the outcome.

Keys:

`rows`, `columns`        the paper's title -> parts of an address {study, scenario, recipe,
                         statistic}; the parts of a row and of a column together are the address
                         of a cell; `at` in a row ({column: parts}) overrides parts of single cells
`methods`                `rows` or `columns`: the axis of the methods, which are compared
`statistic`              the statistic of cells without one of their own
`scale`, `decimals`      from fractions to the paper's unit
`better`                 higher, lower, none
`claim`                  the method that the paper says is best; a composition with it ("B + A")
                         is no rival
`gains`                  {title: title of another}: rows or columns that show their difference to
                         another, seed by seed
`differences`, `ratios`  {text: [method, other]}: sentences that compare two methods over all
                         settings
`same`                   {method: other}: counts the runs of two methods with equal weights

A row or column may have its own `statistic`, `scale`, `decimals` and `better`. `reported` is the
title of the paper's number if it differs. `compared: false` leaves a method out of the sentences.

A method with a diverged seed has no mean over all its seeds. Its cell shows the mean of the seeds
that ended and the number of seeds that did not. Our ranking puts such methods last, tied with each
other. No sentence compares their mean or gain. A run that has seen the test set (tag `leak`) is
marked and not ranked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from scipy.stats import kendalltau

from fedml_noniid.pipelines.papers import contrasts
from fedml_noniid.pipelines.papers.contrasts import Contrast, by_seed, evaluate
from fedml_noniid.pipelines.papers.marks import Group
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.targets import NOT_HERE, Built, Target, address
from fedml_noniid.pipelines.papers.words import against, confirmed, evidence, plus_minus
from fedml_noniid.pipelines.reporting.summary import Spread
from fedml_noniid.pipelines.reporting.text import as_csv
from fedml_noniid.plugins.data.checks import known

NOT_YET, NO_DATA, NOT_MEASURED = "not run yet", "no data", "not measured"
MIN_RANKED = 3  # methods; a rank correlation over fewer says nothing
CSV = ["row", "column", "measured", "measured_std", "seeds", "diverged", "reported"]
CSV += ["reported_spread", "difference", "leak", "notes"]
CSV_OF_GAINS = ["gain", "gain_std", "gain_reported"]
Place = tuple[str, str]  # row, column


class Cell(NamedTuple):
    """One number of the table, in the paper's unit."""

    measured: Spread | None
    reported: float | None
    reported_spread: float | None
    decimals: int
    instead: str = ""  # the reason for a missing number
    mark: str = ""  # leaks, notes and diverged seeds
    group: Group = Group((), ())
    gain: Spread | None = None  # the difference to another cell, seed by seed
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
        """`98.02 ± 0.03 (97.88)`: our number over seeds, the paper's in brackets.

        The gain is on the next line. Marks stand between the two numbers: `98.02 LEAK [1]; 1 of 3
        seeds diverges (97.88)`.
        """
        number = plus_minus(self.measured, self.decimals) if self.measured else self.instead
        found = number + self.mark
        if self.reported is not None:
            found += f" ({self.reported:g})"
        if self.gain is None:
            return found
        found += f"\ngain {plus_minus(self.gain, self.decimals, '+')}"
        if self.gain_reported is not None:
            found += f" ({self.gain_reported:+.{self.decimals}f})"
        return found

    def line(self, place: Place) -> list[object]:
        """Its line of the CSV file."""
        mean, std, n = self.measured or (None, None, 0)
        both = mean is not None and self.reported is not None
        # `both` says that neither is None; mypy does not follow it.
        difference = mean - self.reported if both else None  # type: ignore[operator]
        notes = "; ".join(note for notes in self.group.notes for note in notes)
        found = [*place, mean, std, n, len(self.group.diverged), self.reported]
        return [*found, self.reported_spread, difference, "; ".join(self.group.leaks), notes]


class Setting(NamedTuple):
    """The methods of one setting. They are compared with each other."""

    better: str  # higher, lower
    cells: Mapping[str, Cell]  # by method


class Table:
    """A table's cells, by row and column."""

    def __init__(self, target: Target, measured: Measured) -> None:
        self.target, self.spec, self.measured = target, target.spec, measured
        self.reported = target.reported or {"rows": {}, "columns": []}
        self.at = addresses(target)
        self.cells = {place: self._cell(place) for place in self.at}
        for place, base in self._bases().items():
            self.cells[place] = self._with_gain(place, base)

    def _option(self, place: Place, key: str, default: Any) -> Any:
        """The value of `key` for a cell. The default is the value for the whole table."""
        return self.at[place].get(key, self.spec.get(key, default))

    def _statistic(self, place: Place) -> tuple[str, float]:
        """The name and the scale of a cell's statistic."""
        name, scale = self._option(place, "statistic", "final"), self._option(place, "scale", 1)
        return str(name), float(scale)

    def _cell(self, place: Place) -> Cell:
        at, decimals = self.at[place], int(self._option(place, "decimals", 2))
        in_paper = *self._reported(place), decimals
        if "study" not in at:  # a row or column of the paper that can't be run
            return Cell(None, *in_paper, "-")
        if not self.measured.is_wanted(at):
            return Cell(None, *in_paper, NOT_HERE)
        found = contrasts.value(self.measured, at, *self._statistic(place))
        group = self.measured.group(at)
        if found is not None:
            return Cell(found, *in_paper, "", self.measured.mark(at), group)
        absent = NO_DATA if self.measured.skipped(at["study"]) else NOT_YET
        instead = group.divergence or (NOT_MEASURED if group.runs else absent)
        return Cell(None, *in_paper, instead, group=group)

    def _reported(self, place: Place) -> tuple[float | None, float | None]:
        """The paper's number and the spread beside it."""
        titles = (
            str(self.spec[axis][title].get("reported", title))
            for axis, title in zip(("rows", "columns"), place, strict=True)
        )
        number = self.target.printed(*titles)
        number, spread = number if isinstance(number, list) else (number, None)
        is_number = isinstance(number, int | float)
        return float(number) if is_number else None, None if spread is None else float(spread)

    def _bases(self) -> dict[Place, Place]:
        """The cells of rows or columns of `gains` -> the cell that each is compared with."""
        bases: Mapping[str, str] = self.spec.get("gains", {})
        for title in (*bases, *bases.values()):
            allowed = (*self.spec["rows"], *self.spec["columns"])
            known(f"{self.target.id}: gains: row or column", title, allowed)
        found = {(r, c): (bases.get(r, r), bases.get(c, c)) for r, c in self.at}
        return {place: base for place, base in found.items() if base != place}

    def _with_gain(self, place: Place, base: Place) -> Cell:
        """The paper's gain is the printed one, else the difference."""
        cell, other = self.cells[place], self.cells[base]
        gain = None
        if cell.measured is not None and other.measured is not None:
            at, less = self.at[place], self.at[base]
            gain = contrasts.gain(self.measured, at, less, *self._statistic(place))
        printed = self.reported.get("gains", {}).get(place[0])
        reported = printed and printed[list(self.reported["columns"]).index(place[1])]
        if reported is None and cell.reported is not None and other.reported is not None:
            reported = cell.reported - other.reported
        return cell._replace(gain=gain, gain_reported=reported)

    def settings(self) -> dict[str, Setting]:
        """Each column (or row, if the methods are columns) that ranks its methods, with the
        compared methods."""
        compared = [name for name, of in self.axis("methods").items() if of.get("compared", True)]
        found = {}
        for name, of in self.axis("settings").items():
            better = str(of.get("better", self.spec.get("better", "higher")))
            if better != "none":
                found[name] = Setting(
                    better, {m: self.cells[self.place(m, name)] for m in compared}
                )
        return found

    def axis(self, name: str) -> Mapping[str, Any]:
        """The `methods` or the `settings`: rows or columns."""
        is_rows = (self.spec.get("methods", "rows") == "rows") == (name == "methods")
        found: Mapping[str, Any] = self.spec["rows" if is_rows else "columns"]
        return found

    def place(self, method: str, setting: str) -> Place:
        """The row and column of a method in a setting."""
        is_row = self.spec.get("methods", "rows") == "rows"
        return (method, setting) if is_row else (setting, method)

    def agreement(self) -> dict[str, tuple[float, int]]:
        """For each setting that has one: Kendall's τ between our ranking and the paper's, and the
        number of methods.

        Methods with a diverged seed tie for the last place of our ranking.
        """
        found = {}
        for setting, line in self.settings().items():
            last = math.inf if line.better == "lower" else -math.inf
            pairs = [
                (last if cell.is_last else cell.mean, cell.reported) for cell in line.cells.values()
            ]
            pairs = [pair for pair in pairs if None not in pair]
            if len(pairs) >= MIN_RANKED:
                tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
                if math.isfinite(tau):
                    found[setting] = tau, len(pairs)
        return found

    def words(self) -> Iterator[str]:
        """For each setting: the agreement of the rankings, and the claimed method against the
        others."""
        agreement = self.agreement()
        for setting, line in self.settings().items():
            parts = []
            if setting in agreement:
                tau, n = agreement[setting]
                parts.append(
                    f"the order of {n} methods agrees with the paper's to Kendall τ = {tau:.2f}"
                )
            last = [m for m, cell in line.cells.items() if cell.is_last]
            if last:
                parts.append(f"ranked last, as a seed diverges or all do: {', '.join(last)}")
            parts += self._against_rival(setting, line)
            if parts:
                yield f"{setting}: {'; '.join(parts)}."

    def _against_rival(self, setting: str, line: Setting) -> Iterator[str]:
        claim = str(self.spec.get("claim"))
        means = {m: cell.mean for m, cell in line.cells.items() if cell.mean is not None}
        rivals = [m for m in means if claim not in (m, *map(str.strip, m.split("+")))]
        if claim in means and rivals:
            sign = -1 if line.better == "lower" else 1
            rival = max(rivals, key=lambda m: sign * means[m])
            place, other = self.place(claim, setting), self.place(rival, setting)
            at, less = self.at[place], self.at[other]
            gain = contrasts.gain(self.measured, at, less, *self._statistic(place))
            best = f"the best other ({rival})"
            if gain is None:
                yield f"{claim} and {best} have no seed in common"
            else:
                yield against(claim, best, gain, line.cells[claim].decimals)

    def words_on_gains(self) -> Iterator[str]:
        """For each row or column of `gains`: our mean over methods, the paper's mean, and the gains
        that seeds confirm."""
        decimals = int(self.spec.get("decimals", 2))
        bases = self._bases()
        for title, base in self.spec.get("gains", {}).items():
            cells = [self.cells[place] for place in bases if title in place]
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
            if any(gain.std is None for gain in gains):
                yield f"{text}, on one seed: no evidence either way."
                continue
            up, down = confirmed(gains)
            yield (
                f"{text}; paired t tests over seeds, with Holm's adjustment for {len(gains)}, find "
                f"it above 0 for {up} and below 0 for {down} of them."
            )

    def words_on_pairs(self) -> Iterator[str]:
        """A sentence for each of `differences`, `ratios` and `same`, over the settings that have
        both methods."""
        for text, (one, other) in self.spec.get("differences", {}).items():
            gains = (
                (s, contrasts.gain(self.measured, self.at[a], self.at[b], *self._statistic(a)))
                for s, a, b in self._pairs(one, other)
            )
            decimals = int(self.spec.get("decimals", 2))
            found = [f"{s} {evidence(gain, decimals)}" for s, gain in gains if gain is not None]
            if found:
                yield f"{text} ({one} less {other}): {'; '.join(found)}."
        for text, (one, other) in self.spec.get("ratios", {}).items():
            pairs = self._pairs(one, other)
            means = ((s, self.cells[a].mean, self.cells[b].mean) for s, a, b in pairs)
            found = [f"{s} {a / b:.3g}" for s, a, b in means if a is not None and b]
            if found:
                yield f"{text} ({one} by {other}): {'; '.join(found)}."
        for one, other in self.spec.get("same", {}).items():
            same: dict[tuple[object, ...], float] = {}  # settings with the same runs count once
            for _, a, b in self._pairs(one, other):
                places = (("of", self.at[a]), ("less", self.at[b]))
                equal = by_seed(evaluate(Contrast("", "same", places), self.measured))
                where = self.at[a]["study"], self.at[a]["scenario"]
                same |= {(*where, seed): number for seed, number in equal.items()}
            if same:
                yield (
                    f"{one}: the same final weights as {other}, to the bit, in "
                    f"{sum(same.values()):.0f} of {len(same)} runs."
                )

    def _pairs(self, one: str, other: str) -> Iterator[tuple[str, Place, Place]]:
        for setting in self.axis("settings"):
            pair = self.place(one, setting), self.place(other, setting)
            if all(self.measured.is_wanted(self.at[place]) for place in pair):
                yield setting, *pair


def build(target: Target, measured: Measured) -> Built:
    """The table. A cell without a number says why."""
    of, header = Table(target, measured), CSV
    lines = [cell.line(place) for place, cell in of.cells.items()]
    if "gains" in target.spec:
        header = CSV + CSV_OF_GAINS
        for line, cell in zip(lines, of.cells.values(), strict=True):
            line += [*(cell.gain or (None, None))[:2], cell.gain_reported]
    rows, columns = target.spec["rows"], target.spec["columns"]
    return Built(
        [["", *columns], *([row, *(of.cells[row, c].text for c in columns)] for row in rows)],
        {"csv": as_csv(header, lines)},
        (*of.words_on_gains(), *of.words(), *of.words_on_pairs()),
        tuple(", ".join(p) for p, cell in of.cells.items() if cell.instead in (NOT_YET, NO_DATA)),
        tuple(tau for tau, _ in of.agreement().values()),
    )


def addresses(target: Target) -> dict[Place, dict[str, Any]]:
    """The address of each cell."""
    rows, columns = dict(target.spec["rows"]), dict(target.spec["columns"])
    return {(r, c): address(target.id, c, rows[r], columns[c]) for r in rows for c in columns}
