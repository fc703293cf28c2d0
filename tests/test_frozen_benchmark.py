"""The measurement of frozen features: its tables say what its rows say, and Fed3R goes first."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import frozen

ROOT = Path(__file__).parents[1]


def rows(accuracies: dict[str, list[float]]) -> list[dict[str, str]]:
    """The same accuracies in each partition, one for each seed."""
    return [
        dict(zip(frozen.COLUMNS, map(str, found), strict=True))
        for way, listed in accuracies.items()
        for partition in frozen.PARTITIONS
        for seed, accuracy in enumerate(listed)
        for found in [
            (partition, way, seed, frozen.WAYS[way].rounds, accuracy, 3, 50 + seed, 1.5, 0.1)
        ]
    ]


def test_means_intervals_and_differences_are_those_of_the_rows() -> None:
    """Three seeds: t is 4.303 for two degrees of freedom. Deviation 1 point: 4.303 / sqrt(3)."""
    assert next(iter(frozen.WAYS)) == "Fed3R", "the others are compared with it"
    listed = {way: [0.5, 0.5, 0.5] for way in frozen.WAYS} | {"linear probe": [0.51, 0.52, 0.53]}
    page = frozen.page(rows(listed), "")
    assert f"| linear probe |{' 52.0 ± 2.5 |' * len(frozen.PARTITIONS)}" in page
    assert f"| linear probe |{' +2.0 ± 2.5 |' * len(frozen.PARTITIONS)}" in page
    assert f"| Fed3R |{' 50.0 ± 0.0 |' * len(frozen.PARTITIONS)}" in page
    assert "| linear probe | 30 | 51 | 1.5 | lr 0.1 | 15 of 15, in round 3 (median) |" in page


def test_the_page_is_that_of_its_table() -> None:
    table = ROOT / frozen.FILE
    made = frozen.page(list(csv.DictReader(table.read_text().splitlines())), "Commit of ")
    committed = table.with_suffix(".md").read_text()
    assert made.partition("Commit of")[0] == committed.partition("Commit of")[0]


@pytest.mark.parametrize("way", frozen.WAYS)
def test_only_the_tuned_number_of_a_way_changes(way: str) -> None:
    of = frozen.WAYS[way]
    one, other = (of.options(value, Path("body.pt")) for value in of.grid[:2])
    changed = {key for key in one if one[key] != other[key]}
    assert changed == ({"fed3r"} if of.tuned == "lam" else {"lr"})
    assert ("init" in one) == of.body and one["rounds"] == of.rounds
