"""Clients' own models and models for all on the sites' own test samples, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fedml_noniid.pipelines.experiment.results import ItemResult, Site
from fedml_noniid.pipelines.reporting import figures, report, tables
from fedml_noniid.pipelines.reporting.summary import ScenarioSummary, scenario
from fedml_noniid.pipelines.reporting.text import NONE

TESTS = {"A": 10, "B": 30}  # samples of each site; the others have one each
OWN = {"own_models": "accuracies are those of the clients' own models"}
NATURAL = {"scenario.partition": "natural", "scenario.noise": None}
# Recipe -> scores of A and B, by seed.
# Means over sites: fedavg 0.70, 0.75, 0.80; finetune - fedavg: 0.1 on each seed; fedper - fedavg:
# 0.10, 0.05, 0.
SCORES = {
    "fedavg": [(0.5, 0.9), (0.6, 0.9), (0.7, 0.9)],
    "finetune": [(0.7, 0.9), (0.8, 0.9), (0.9, 0.9)],
    "fedper": [(0.81, 0.79)] * 3,
}


def result(recipe: str, seed: int, sites: Mapping[str, float], **fields: Any) -> ItemResult:
    """A run of one round; clients have an accuracy of 0.25 on the samples of all clients."""
    item = {
        "key": f"hospitals-{recipe}-{seed}",
        "scenario": "hospitals",
        "recipe": recipe,
        "composition": recipe,
        "seed": seed,
        "params": NATURAL,
        "tags": {"weights_sha256": f"{recipe} {seed}"} | ({} if recipe == "fedavg" else OWN),
        "final": {},
        "rows": ({"round": 1, "bytes_up": 1, "bytes_down": 1, "test_accuracy": 0.8},),
        "made": {},
        "evaluation": {},
        "client_accuracy": (0.25,),
        "files": (),
        "notes": (),
        "sites": {name: Site(5, TESTS.get(name, 1), score) for name, score in sites.items()},
    }
    return ItemResult(**item | fields)


def summed(
    scores: Mapping[str, Sequence[Sequence[float]]] = SCORES, n_tested: int = 40, **fields: Any
) -> ScenarioSummary:
    """`n_tested`: the size of the test set; `fields`: of all results."""
    runs = [
        result(recipe, seed, dict(zip("AB", pair, strict=True)), **fields)
        for recipe, pairs in scores.items()
        for seed, pair in enumerate(pairs)
    ]
    sums = scenario("hospitals", runs, list(scores), (0, 1, 2), n_tested)
    assert sums is not None
    return sums


def test_the_table_pairs_means_over_sites_by_seed() -> None:
    """finetune: the deviation is one of 40 samples on one of 3 seeds, 1 / 40 / sqrt(3) = 0.0144;
    t = 12, p = 1 - 12 / sqrt(146) = 0.007, Holm's is twice that. At 97.5 %, half an interval is
    6.2053 / sqrt(3) * 0.0144 = 0.0517.

    fedper: mean and deviation 0.05, t = sqrt(3), p = 1 - sqrt(3 / 5) = 0.225; 4.3027 / sqrt(3) *
    0.05 = 0.1242.
    """
    sums = summed()
    header, *rows = tables.site_tests(sums)
    assert header[:4] == ["method", "mean over sites, %", "vs fedavg", "interval"]
    assert [row[0] for row in rows] == ["finetune", "fedper", "fedavg"]
    finetune, fedper, fedavg = (row[1:] for row in rows)
    low, high = "+4.83 to +15.17", "-7.42 to +17.42"
    better = ["+10.00", low, "0.007", "0.014", "3 of 3", "better"]
    undecided = ["+5.00", high, "0.225", "0.225", "2 of 3", "undecided"]
    assert finetune == ["85.00 ± 5.00", *better, "A: 80.00"]
    assert fedper == ["80.00 ± 0.00", *undecided, "B: 79.00"]
    assert fedavg == ["75.00 ± 5.00", *[NONE] * 6, "A: 60.00"]
    notes = report.section(sums)["site_tests_notes"]
    assert "finetune: above fedavg on 1 (A), below on 0 of the sites, in the mean over seeds." in (
        notes
    )
    assert any(
        note.startswith("fedper: above fedavg on 1 (A), below on 1 (B) of") for note in notes
    )


def test_a_site_is_compared_on_the_seeds_that_both_methods_have() -> None:
    """fedper - fedavg at A: 0.05 and -0.04. Against all seeds of fedavg it would be 0.555 - 0.6."""
    sums = summed(SCORES | {"fedper": [(0.55, 0.9), (0.56, 0.9)]})
    fedper = next(row for row in tables.site_tests(sums) if row[0] == "fedper")
    assert fedper[2] == "+0.25" and fedper[6] == "1 of 2"
    assert tables.site_changes(sums)[-1] == ("fedper", "1 (A)", "0")


@pytest.mark.parametrize(
    ("n_tested", "params", "has_table", "is_one_test"),
    [
        (40, {}, True, True),
        (50, {}, True, False),  # ten test samples are of no site
        (40, {"scenario.availability": "days.csv"}, True, False),
        (40, {"scenario.partition": "dirichlet"}, False, False),
        (40, {"scenario.noise": {"sigma": 0.1}}, False, False),
        (40, {"scenario.rotation": {"degrees": 90}}, False, False),
        (40, {"scenario.drift": {"round": 1}}, False, False),
    ],
)
def test_methods_are_ranked_together_only_where_they_have_one_test(
    n_tested: int, params: dict[str, Any], has_table: bool, is_one_test: bool
) -> None:
    sums = summed(n_tested=n_tested, params=NATURAL | params)
    section = report.section(sums)
    assert bool(section["site_tests"]) == has_table
    ranks = {method.recipe: method.rank for method in sums.methods}
    assert ranks == (
        dict.fromkeys(SCORES, 1) if is_one_test else {**dict.fromkeys(SCORES, 0), "fedavg": 1}
    )
    warnings = " ".join(section["warnings"])
    assert ("TWO TESTS" in warnings) != is_one_test
    assert ("The table on the sites' own test samples" in warnings) == (
        has_table and not is_one_test
    )
    worst = {method.recipe: method.spreads["worst_client"].mean for method in sums.methods}
    # The mean over seeds of the lower score: 0.5, 0.6, 0.7.
    assert worst["fedavg"] == pytest.approx(0.6 if has_table else 0.25)


def test_leaks_and_bounds_are_shown_and_not_compared() -> None:
    """So Holm's adjustment is for one comparison."""
    runs = [*summed().results]
    for seed in range(3):
        tags = {"weights_sha256": f"x {seed}", "federated": "no", **OWN}
        runs.append(result("alone", seed, {"A": 0.9, "B": 0.9}, tags=tags))
        leaking = {"weights_sha256": f"y {seed}", "leak": "has seen the test set"}
        runs.append(result("leaking", seed, {"A": 1.0, "B": 1.0}, tags=leaking))
    sums = scenario("hospitals", runs, ["fedavg", "finetune", "alone", "leaking"], (0, 1, 2), 40)
    assert sums is not None
    rows = {row[0]: row[1:] for row in tables.site_tests(sums)[1:]}
    assert rows["leaking LEAK"] == ["100.00 ± 0.00", *[NONE] * 6, "A: 100.00"]
    assert rows["alone"][1:7] == [NONE] * 6
    assert rows["finetune"][3:5] == ["0.007", "0.007"]


def test_the_picture_has_the_clients_on_the_sites_own_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The samples of all clients, with 0.25, are another test."""
    drawn: dict[str, list[float]] = {}

    def draw(axes: object, rows: Sequence[tuple[str, str, Any]], metric: object) -> None:
        drawn.update({label: values.tolist() for label, _, values in rows})

    monkeypatch.setattr(figures, "draw_clients", draw)
    figures.clients(summed(), list(SCORES))
    assert drawn["fedavg"] == pytest.approx([50, 90, 60, 90, 70, 90])
