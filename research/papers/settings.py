"""Makes kind `settings`: the paper's configuration beside the settings of our studies at this size.

Keys: `rows` and `columns` map the paper's titles to parts of {study, path}. `path` names a key of
the study, such as `train.rounds`. {value: ...} replaces it for a value that no study sets. `words`
beside a path maps a value to the paper's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.reporting.text import as_csv
from research.runs import Measured
from research.targets import Built, Target

NONE = "-"


def settings(target: Target, measured: Measured) -> Built:
    """The table."""
    rows, columns = dict(target.spec["rows"]), dict(target.spec["columns"])
    cells = {
        (r, c): (
            _ours(target, measured, {**rows[r], **columns[c]}),
            _plain(target.printed(r, c, "")),
        )
        for r in rows
        for c in columns
    }
    return compared(cells, "settings")


def compared(cells: Mapping[tuple[str, str], tuple[str, str]], noun: str) -> Built:
    """The table of {(row, column): (ours, the paper's)}, and a sentence on how many are equal.

    The paper's is "" where it prints nothing. A dash of the paper contradicts nothing.
    """
    rows, columns = (list(dict.fromkeys(titles)) for titles in zip(*cells, strict=True))
    numbers = [[*position, *pair] for position, pair in cells.items()]
    lines = [["", *columns], *([r, *(_text(*cells[r, c]) for c in columns)] for r in rows)]
    printed = {position: pair for position, pair in cells.items() if pair[1]}
    other = [f"{r}, {c}" for (r, c), (ours, paper) in printed.items() if paper not in (NONE, ours)]
    ending = f"; not: {'; '.join(other)}." if other else "."
    text = f"{len(printed) - len(other)} of {len(printed)} {noun} are the paper's{ending}"
    return Built(lines, {"csv": as_csv(["row", "column", "ours", "reported"], numbers)}, (text,))


def _ours(target: Target, measured: Measured, address: Mapping[str, Any]) -> str:
    if "value" in address:
        return _plain(address["value"])
    value: Any = measured.studies[address["study"]].content
    for key in str(address["path"]).split("."):
        if not isinstance(value, Mapping):
            raise UserError(
                f"{target.id}: path {address['path']!r} leads nowhere in study {address['study']!r}"
            )
        value = value.get(key, NONE)
    return _plain(dict(address.get("words", {})).get(value, value))


def _plain(value: object) -> str:
    if value is None:
        return NONE
    return (
        f"{value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
    )


def _text(ours: str, reported: str) -> str:
    return ours if reported in ("", ours) else f"{ours} ({reported})"
