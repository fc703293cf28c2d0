"""Says which clients miss a round: none, a random fraction, or those of a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.files import write_whole
from fedml_noniid.data.streams import stream

# (round, exchange within the round from 0, clients asked) -> clients that do not answer. Round 0 is
# before the first.
Absent = Callable[[int, int, tuple[int, ...]], Collection[int]]
Missing = Mapping[tuple[int, int], Collection[int]]  # (round, exchange) -> clients
COLUMNS = ("round", "exchange", "client")
DIGITS = 9  # of a number in a file


def nobody(round_: int, exchange: int, asked: tuple[int, ...]) -> tuple[()]:
    """Every client answers."""
    return ()


def listed(missing: Missing) -> Absent:
    """The clients of a list, whether they are asked or not."""
    return lambda round_, exchange, asked: missing.get((round_, exchange), ())


def sometimes(rate: float, seed: int) -> Absent:
    """Every client misses a round with probability `rate`, independently; in round 0 everybody is
    there.

    The draws depend on seed, round and client, so they are the same for every recipe. If all that
    are asked would be missing, the one with the highest draw stays, for the whole round.
    """
    stays: set[int] = set()  # in this round, in spite of its draw

    def absent(round_: int, exchange: int, asked: tuple[int, ...]) -> set[int]:
        if round_ == 0:
            return set()
        if exchange == 0:
            stays.clear()
        draws = stream(seed, "absent", round_).random(max(asked) + 1).tolist()
        missing = {client for client in asked if draws[client] < rate} - stays
        if len(missing) == len(asked):
            stays.add(max(asked, key=lambda client: draws[client]))
        return missing - stays

    return absent


def text(missing: Missing) -> str:
    """The file of a list: one line per missing answer, sorted."""
    lines = sorted((*key, client) for key, clients in missing.items() for client in clients)
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
    return file.getvalue()


def write(path: Path, missing: Missing) -> None:
    """Writes the file, whole or not at all. UserError if that can't be done."""
    write_whole(path, text(missing))


def read(
    path: Path, rounds: int | None = None, n_clients: int | None = None
) -> dict[tuple[int, int], frozenset[int]]:
    """Reads a file as `write` makes it.

    An empty cell for the exchange is 0, the whole round; empty lines do not count.

    UserError with file and line for anything else, and for a round or a client that does not exist.
    `rounds`, `n_clients`: how many there are, if that is known.
    """
    most = (rounds, None, None if n_clients is None else n_clients - 1)
    absent: dict[tuple[int, int], set[int]] = {}
    for source, (round_, exchange, client) in whole_numbers(path, COLUMNS, most, COLUMNS[1]):
        clients = absent.setdefault((round_, exchange), set())
        if client in clients:
            raise UserError(
                f"{source}: client {client} is named twice for round {round_}, exchange {exchange}"
            )
        clients.add(client)
    return {key: frozenset(clients) for key, clients in absent.items()}


def whole_numbers(
    path: Path,
    columns: Sequence[str],
    most: Sequence[int | None],
    blank: str = "",
    named: str = "",
) -> Iterator[tuple[str, list[Any]]]:
    """(file and line, numbers) of each line of a CSV file; empty lines do not count.

    `most`: by column; None: no limit. `blank`: the column where an empty cell is 0. `named`: a
    column of names that may stand in place of the first one. UserError with file and line for
    anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({getattr(error, 'strerror', error)})") from None
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if named and rows[:1] == [[named, *columns[1:]]]:
        columns = rows[0]
    if rows[:1] != [[*columns]]:
        raise UserError(
            f"{path}, line 1: {shown(''.join(lines[:1]))} is refused; allowed: {','.join(columns)}"
        )
    for number, row in enumerate(rows[1:], start=2):
        if not any(row):
            continue
        source = f"{path}, line {number}"
        if len(row) != len(columns):
            raise UserError(
                f"{source}: has {len(row)} cells; allowed: {len(columns)} ({','.join(columns)})"
            )
        cells = [
            cell or "0" if name == blank else cell for name, cell in zip(columns, row, strict=True)
        ]
        yield (
            source,
            [
                cell if name == named else _number(source, name, cell, limit)
                for name, cell, limit in zip(columns, cells, most, strict=True)
            ],
        )


def _number(source: str, column: str, cell: str, most: int | None) -> int:
    """The number in a cell, 0 to `most`."""
    short = cell.isascii() and cell.isdigit() and len(cell) <= DIGITS
    if short and (most is None or int(cell) <= most):
        return int(cell)
    allowed = "a whole number from 0 up" if most is None else f"0 to {most}"
    raise UserError(f"{source}: {column} = {shown(cell)} is refused; allowed: {allowed}")
