"""Clients of named owners keep their names from the table to the report, in one order for all
seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import fedml_noniid as nd
from fedml_noniid.data.types import Floats
from fedml_noniid.pipelines.experiment import results
from tests.pipelines.small import run_stages

PARAMS = """\
experiment: sites
data: {name: table, root: ., file: sites.csv, label: ill, owner: site, validation: 0, public: 0}
scenario_names: [natural]
scenarios: {natural: {partition: natural, clients: 3}}
recipe_names: [fedavg, finetune, fedper]
recipes: {fedavg: {}, finetune: {}, fedper: {}}
seeds: [0, 1, 2]
train: {model: mlp, rounds: 3, epochs: 1, batch_size: 32, lr: 0.1, device: cpu}
machine: {processes: 1}
"""
RECIPES = ["fedavg", "finetune", "fedper"]
NAMES = ["Klinik 2", "Klinik 10", "Köln | <b>"]
COLUMNS = ["Klinik_2", "Klinik_10", "Köln____b_"]  # of rounds.csv


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all stages have run on a table of three sites.

    The labels of the last site say the opposite of its values.
    """
    folder = tmp_path_factory.mktemp("sites")
    value, site = np.random.default_rng(0).normal(size=300).round(3), np.arange(300) % 3
    frame = {"value": value, "site": np.array(NAMES)[site], "ill": (value > 0) != (site == 2)}
    pd.DataFrame(frame).to_csv(folder / "sites.csv", index=False)
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare", "partition", "train", "evaluate", "report"))
    return folder


@pytest.mark.parametrize("file", ["partitions/*/clients.csv", "evaluation/*/per_client.csv"])
def test_lines_are_in_the_order_of_the_names(sites: Path, file: str) -> None:
    """Whatever number a site's client has."""
    tables = [results.table(path) for path in sorted(sites.glob(file))]
    assert [[line["owner"] for line in table] for table in tables] == [NAMES] * len(tables)
    numbers = {tuple(line["client"] for line in table) for table in tables}
    assert len(numbers) > 1 and all({*one} == {"0", "1", "2"} for one in numbers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_round_has_the_accuracy_of_each_site(sites: Path, recipe: str) -> None:
    """By its name; the last one is that of the evaluation, which measures the model again."""
    for seed in range(3):
        key = f"natural-{recipe}-{seed}"
        rows = pd.read_csv(sites / "runs" / key / "rounds.csv")
        clients = pd.read_csv(sites / "evaluation" / key / "per_client.csv")
        assert list(clients["owner"]) == NAMES
        by_site = rows[[f"client_accuracy/{name}" for name in COLUMNS]]
        assert by_site.iloc[-1].tolist() == pytest.approx(clients["test_accuracy"].tolist())
        hits = (by_site.to_numpy() * clients["test_samples"].to_numpy()).sum(1)
        together = hits / clients["test_samples"].sum()
        assert rows["test_accuracy"].tolist() == pytest.approx(together)


def test_the_report_has_the_accuracy_of_each_site(sites: Path) -> None:
    """The short answer has the worst site alone."""
    report = {name: (sites / "report" / name).read_text() for name in ("report.md", "answer.txt")}
    title = next(line for line in report["report.md"].splitlines() if line.startswith("| client |"))
    recipes = title.removesuffix(" |").split(" | ")[4:]
    assert sorted(recipes) == sorted(RECIPES)
    runs = {recipe: scores_of(sites, recipe) for recipe in recipes}  # [seeds, sites]
    for k, name in enumerate(NAMES):
        scores = [f"{100 * runs[recipe][:, k].mean():.2f}" for recipe in recipes]
        cells = name.replace("|", r"\|"), "80", "20", "3", *scores
        assert f"\n| {' | '.join(cells)} |\n" in report["report.md"]
    assert "<b>" not in (sites / "report" / "report.html").read_text()
    worst = 100 * runs["fedavg"][:, 2].mean()
    assert f"{NAMES[2]}: {worst:.2f}" in report["answer.txt"] and worst < 50


def scores_of(folder: Path, recipe: str) -> Floats:
    """The accuracy on the sites' own test samples by per_client.csv, [seeds, sites]."""
    paths = [folder / f"evaluation/natural-{recipe}-{seed}/per_client.csv" for seed in range(3)]
    tables = [pd.read_csv(path).set_index("owner") for path in paths]
    return np.array([table.loc[NAMES, "test_accuracy"] for table in tables])


def test_own_models_are_compared_with_the_common_one_on_the_sites_own_samples(sites: Path) -> None:
    """SciPy has a paired t test too. Both kinds of models have the same test: of 20 samples from
    each of three sites, the mean over sites is the test accuracy."""
    scores = {recipe: scores_of(sites, recipe).mean(1) for recipe in RECIPES}
    page = (sites / "report" / "report.md").read_text()
    assert "TWO TESTS" not in page
    assert "On the sites' own test samples" in (sites / "report" / "table.txt").read_text()
    for run in results.read(sites):
        assert run.tested[-1] == pytest.approx(scores[run.recipe][run.seed])
    table = page.split("### On the sites' own test samples")[1].split("### By client")[0]
    for recipe in ("finetune", "fedper"):
        row = next(line for line in table.splitlines() if line.startswith(f"| {recipe} |"))
        mean, difference, _, p = row.split(" | ")[1:5]
        gap = scores[recipe] - scores["fedavg"]
        wanted = ttest_rel(scores[recipe], scores["fedavg"]).pvalue
        assert mean.startswith(f"{100 * scores[recipe].mean():.2f} ± ")
        assert difference == f"{100 * gap.mean():+.2f}"
        assert p == (f"{wanted:.3f}" if wanted >= 0.001 else "<0.001")
        assert gap.mean() > 0.2 and f"- {recipe}: above fedavg on 3 (Köln | <b>, " in table


def test_python_ranks_own_models_as_the_report_does(sites: Path) -> None:
    data = nd.from_frame(pd.read_csv(sites / "sites.csv"), label="ill", owner="site")
    split = nd.partition(data, "natural", clients=3)
    swept = nd.sweep(["fedavg", "fedper"], split, rounds=3)
    summary = swept.summary.set_index("recipe")
    assert summary["rank"].to_dict() == {"fedper": 1, "fedavg": 2}
    assert summary.loc["fedavg", "worst_client"] < 0.5 < summary.loc["fedper", "worst_client"]
    marks = [line for line in swept.plot_clients().axes[0].lines if line.get_marker() == "|"]
    assert len(marks) == 2
    for result, line in zip(swept, marks, strict=True):
        assert sorted(line.get_xdata()) == sorted(100 * result.clients["test_accuracy"])
        if result.recipe == "fedavg":
            assert {*line.get_xdata()} != {*(100 * result.clients["accuracy"])}
