"""The measurement of `noniid choose`: what each way takes and costs, by hand, and its page."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from benchmarks import choosing, report
from benchmarks.choosing import AVERAGE, CHOOSE, FEDAVG, LEADER, SEARCH, Measured
from fedml_noniid.pipelines.experiment.search import Point, Result, Trial
from fedml_noniid.pipelines.reporting.decision import RECIPES, Decision, Finalist

RESULTS = report.RESULTS


def measured(name: str, best: str, elsewhere: str) -> Measured:
    """A scenario with two step sizes, where `best` validates best and `elsewhere` tests best of the
    others. The exhaustive search differs from `choose` in the step size of `fedlc`."""

    def trial(recipe: str, lr: float, loss: float) -> Trial:
        point = Point(recipe, f"{recipe}-{lr}", {"train": {"lr": lr}})
        return Trial("rung 1", point, (loss,), 0.5)

    def loss(recipe: str, lr: float) -> float:
        return 0.5 - 0.1 * (recipe == best) - 0.01 * (lr == 0.3)

    pairs = [(recipe, lr) for recipe in RECIPES for lr in (0.1, 0.3)]
    searched = {f"{recipe}-{lr}": trial(recipe, lr, loss(recipe, lr)) for recipe, lr in pairs}
    truth = {
        f"{recipe}-0.3": 0.6 + 0.2 * (recipe == best) + 0.15 * (recipe == elsewhere)
        for recipe in RECIPES
    }
    trials = [trial(r, lr, 0.3 if (r, lr) == ("fedlc", 0.1) else loss(r, lr)) for r, lr in pairs]
    trials.sort(key=lambda one: (one.point.recipe != best, one.rank))
    taken = Finalist(searched[f"{best}-0.3"], (0.8, 0.8), 0.2, 0.1, 0.3)
    base = Finalist(searched["fedavg-0.3"], (0.6, 0.6))
    search = 2 * len(RECIPES) * 3 * 32
    result = Result(tuple(trials), (), 372)
    decision = Decision(base, (taken,), (), result, 500, search + 128, "accuracy", 46)
    return Measured(name, decision, searched, truth, pd.DataFrame())


def test_what_each_way_takes_and_costs() -> None:
    scenarios = [
        measured("a", best="scaffold", elsewhere="fedadam"),
        measured("b", best="scaffold", elsewhere="fednova"),
        measured("c", best="fedavg", elsewhere="fednova"),
    ]
    table = choosing.of_policies(scenarios).set_index(["scenario", "policy"])
    assert table.loc["a", "recipe"].to_dict() == {
        CHOOSE: "scaffold",
        LEADER: "fedlc",  # its loss is the lowest in the search of `choose`
        SEARCH: "scaffold",
        AVERAGE: "fednova",  # in b and c 0.75 and 0.75; scaffold 0.8 and 0.6
        FEDAVG: "fedavg",
    }
    # Where it is measured itself, a method does not count: of a and b, scaffold.
    assert table.loc[("c", AVERAGE), "recipe"] == "scaffold"
    assert table.loc[("c", AVERAGE), "test"] == pytest.approx(0.6)
    search = 2 * len(RECIPES) * 3 * 32
    assert table.loc["a", "rounds"].to_dict() == {
        CHOOSE: 500,
        LEADER: 372,
        SEARCH: search + 128 - (500 - 372),
        AVERAGE: 2 * 3 * 32,
        FEDAVG: 2 * 3 * 32,
    }
    assert choosing.of_finals(scenarios)["truth"].tolist() == pytest.approx([0.2, 0.2, 0.0])
    values = choosing.values_of(scenarios[0]).set_index("recipe")
    assert not values.loc["fedlc", "is_same"] and values["is_same"].sum() == len(RECIPES) - 1
    assert values.loc["fedlc", "loss_above"] == pytest.approx(0.01)


@pytest.mark.parametrize("name", choosing.TABLES)
def test_small_tables_have_40_to_150_validation_samples(name: str) -> None:
    """Four in five rows are for training, of which a part is held out."""
    table = choosing.table(name)
    assert 40 <= 0.8 * len(table) * choosing.TABLES[name] <= 150
    assert table["owner"].nunique() == choosing.SKEWS["owner"]["clients"]
    assert table["label"].value_counts().min() >= 10


def test_the_page_has_the_numbers_of_its_tables() -> None:
    page = (RESULTS / "choose.md").read_text()
    (line,) = re.findall(r"^Commit of the code: .*$", page, re.MULTILINE)
    tables = {name: pd.read_csv(RESULTS / f"{name}.csv") for name in choosing.OF_PAGE}
    assert report.render("choose", choosing.context_of(tables, line)) == page
    policies, runs = tables["choose"], pd.read_csv(RESULTS / "choose-runs.csv")
    last = runs[(runs["for"] == "truth") & (runs["round"] == choosing.TRAIN["rounds"])]
    tests = last.groupby(["scenario", "recipe", "lr"])["test"].mean()
    for line in policies.itertuples():
        lr = float(str(line.values).removeprefix("lr "))
        assert tests[line.scenario, line.recipe, lr] == pytest.approx(line.test, abs=1e-4)


def test_the_example_of_the_readme_is_answered_as_by_the_exhaustive_search() -> None:
    """Over 20 sets of seeds: of each recipe at least nine in ten step sizes are the same, and
    FedProx is never shown to be worse than FedAvg, of which it is a neighbour."""
    lines = pd.read_csv(RESULTS / "choose-example.csv")
    assert lines["set"].nunique() == 20
    assert (lines.groupby("recipe")["is_same"].mean() >= 0.9).all()
    assert not (lines.loc[lines["recipe"] == "fedprox", "high"] < 0).any()
