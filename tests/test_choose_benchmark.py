"""The measurement of `noniid choose`: what each way takes and costs, by hand, and its page."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
from fedml_noniid.pipelines.experiment.tuning import Point
from fedml_noniid.pipelines.tools.racing import RECIPES, Decision, Final, Ran

from benchmarks import choosing
from benchmarks.choosing import AVERAGE, CHOOSE, FEDAVG, LEADER, SEARCH, Measured

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def measured(name: str, best: str, elsewhere: str) -> Measured:
    """A scenario with two step sizes, where `best` validates best and `elsewhere` tests best of the
    others."""
    points = {
        f"{recipe}-{lr}": Point(recipe, f"{recipe}-{lr}", {"train": {"lr": lr}})
        for recipe in RECIPES
        for lr in (0.1, 0.3)
    }
    searched = {
        entry: 0.5 + 0.1 * (point.recipe == best) + 0.01 * entry.endswith("0.3")
        for entry, point in points.items()
    }
    truth = {
        entry: 0.6 + 0.2 * (point.recipe == best) + 0.15 * (point.recipe == elsewhere)
        for entry, point in points.items()
        if entry.endswith("0.3")
    }
    base, taken = points["fedavg-0.3"], points[f"{best}-0.3"]
    final = Final(taken, (0.8, 0.8), 0.2, 0.1, 0.3)
    heats = tuple(
        Ran("heat 1", 32, 1, point, searched[point.entry], True) for point in (taken, base)
    )
    search = 2 * len(RECIPES) * 3 * 32
    decision = Decision(
        taken, Final(base, (0.6, 0.6)), (final,), (), heats, 500, search + 128, "accuracy"
    )
    return Measured(name, decision, points, searched, truth, pd.DataFrame())


def test_what_each_way_takes_and_costs() -> None:
    found = [
        measured("a", best="scaffold", elsewhere="fedadam"),
        measured("b", best="scaffold", elsewhere="fedlc"),
        measured("c", best="fedavg", elsewhere="fedlc"),
    ]
    table = choosing.of_policies(found).set_index(["scenario", "policy"])
    assert table.loc["a", "recipe"].to_dict() == {
        CHOOSE: "scaffold",
        LEADER: "scaffold",
        SEARCH: "scaffold",
        AVERAGE: "fedlc",  # in b and c 0.75 and 0.75; scaffold 0.8 and 0.6
        FEDAVG: "fedavg",
    }
    # Where it is measured itself, a method does not count: of a and b, scaffold.
    assert table.loc[("c", AVERAGE), "recipe"] == "scaffold"
    assert table.loc[("c", AVERAGE), "test"] == pytest.approx(0.6)
    search = 2 * len(RECIPES) * 3 * 32
    assert table.loc["a", "rounds"].to_dict() == {
        CHOOSE: 500,
        LEADER: 500 - 2 * 2 * 32,  # a final of two on two seeds
        SEARCH: search,
        AVERAGE: 2 * 3 * 32,
        FEDAVG: 2 * 3 * 32,
    }
    finals = choosing.of_finals(found)
    assert finals["truth"].tolist() == pytest.approx([0.2, 0.2, 0.0])


def test_the_page_has_the_numbers_of_its_tables() -> None:
    page = (RESULTS / "choose.md").read_text()
    (line,) = re.findall(r"^Commit of the code: .*$", page, re.MULTILINE)
    policies, finals = (
        pd.read_csv(RESULTS / f"{name}.csv") for name in ("choose", "choose-finals")
    )
    assert choosing.page_of(policies, finals, line) == page
    runs = pd.read_csv(RESULTS / "choose-runs.csv")
    last = runs[(runs["for"] == "truth") & (runs["round"] == choosing.TRAIN["rounds"])]
    tests = last.groupby(["scenario", "recipe", "lr"])["test"].mean()
    for line in policies.itertuples():
        lr = float(str(line.values).removeprefix("lr "))
        assert tests[line.scenario, line.recipe, lr] == pytest.approx(line.test, abs=1e-4)
