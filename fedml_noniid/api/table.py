"""The table of a paper: methods by settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fedml_noniid.pipelines.reporting.text import markdown, plain

BEST, ONE_CLASS = " *", " ONE CLASS"  # behind a cell
# What a mark in a cell says.
NOTES = {
    "≈": "can't be told apart from the best mean",
    " =": "the weights or predictions of the best",
    "†": "trains on labelled public samples",
    "‡": "sees public samples without labels",
    ONE_CLASS: "names one class only, on a seed",
    "LEAK": "has seen the test set",
}
SYMBOLS = {"±": r"$\pm$", "≈": r"$\approx$", "†": r"$\dagger$", "‡": r"$\ddagger$"}
LATEX = str.maketrans(SYMBOLS | {special: f"\\{special}" for special in "&%$#_{}"})


@dataclass(frozen=True, repr=False)
class MethodTable:
    """A row for each method, a column for each setting. The best mean of a setting has a `*`."""

    rows: Sequence[Sequence[str]]  # the header first
    title: str  # what the numbers are

    def to_markdown(self) -> str:
        """As Markdown, the best means in bold."""
        return f"{markdown(self._bold('**{}**'))}\n\n{self._notes('bold')}"

    def to_latex(self) -> str:
        """As a `tabular` that needs no package, the best means in bold."""
        escaped = MethodTable([[cell.translate(LATEX) for cell in row] for row in self.rows], "")
        header, *lines = (" & ".join(row) + r" \\" for row in escaped._bold(r"\textbf{{{}}}"))
        first = rf"\begin{{tabular}}{{l{'r' * (len(self.rows[0]) - 1)}}}"
        body = r"\hline", header, r"\hline", *lines, r"\hline", r"\end{tabular}"
        return "\n".join([first, *body, f"% {self._notes('bold')}"])

    def __repr__(self) -> str:
        return plain(self.rows) + self._notes(BEST)

    def _bold(self, form: str) -> list[list[str]]:
        """The rows with `form` around the best means."""
        return [
            [form.format(cell.removesuffix(BEST)) if cell.endswith(BEST) else cell for cell in row]
            for row in self.rows
        ]

    def _notes(self, best: str) -> str:
        """What the numbers are, and the marks that occur."""
        text = " ".join(itertools.chain(*self.rows))
        marks = [f"{mark.strip()}: {note}" for mark, note in NOTES.items() if mark in text]
        return "; ".join([self.title, f"{best.strip()}: the best mean", *marks])
