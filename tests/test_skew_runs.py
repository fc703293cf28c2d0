"""The numbers of docs/results/skew-runs.md, recomputed from the committed runs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_the_page_has_the_numbers_of_the_runs() -> None:
    runs = pd.read_csv(RESULTS / "skew-runs.csv")
    page = (RESULTS / "skew-runs.md").read_text()
    text = " ".join(page.split())
    runs["gain"] = 100 * (runs.accuracy - runs.fedavg_accuracy)
    by_seed = runs.pivot_table(
        index=["data", "scenario"], columns=["seed", "method"], values="gain", sort=False
    )
    gains = by_seed.T.groupby("method", sort=False).mean().T
    by_data = gains.groupby("data", sort=False).mean()
    best = gains.idxmax(axis=1).value_counts()
    for method in gains:
        means = [*by_data[method], gains[method].mean()]
        cells = [method, *(f"{mean:+z.2f}" for mean in means), str(best.get(method, 0))]
        assert f"| {' | '.join(cells)} |" in page
    assert f"{len(runs):,} short runs" in text and not runs.weights_sha256.isna().any()
    fedavg = 100 * runs[runs.method == "fedavg"].groupby("data").accuracy.mean()
    for data, name in {"digits": "digits", "mnist": "MNIST", "cifar": "CIFAR-10"}.items():
        assert f"{fedavg[data]:.1f} % on {name}" in text
        assert f"{name} ({sum(gains.index.get_level_values(0) == data)}" in text

    trials = pd.read_csv(RESULTS / "skew-runs-trials.csv")
    same = trials.advisor_method == trials.average_method
    assert f"In {same.sum()} of {len(trials)} such trials" in text
    unseen = trials[trials.left_out == "data set"]
    assert f"for {unseen.dont_know.notna().sum()} of {len(unseen)} scenarios" in text

    headroom = []
    for scenario, of_seeds in by_seed.iterrows():
        average = gains.drop(index=[scenario]).mean().idxmax()
        for seed in (0, 1, 2):
            others = [other for other in (0, 1, 2) if other != seed]
            found = of_seeds[others].groupby("method").mean().round(9)
            chosen = found.index[found == found.max()]  # equal methods share the choice
            headroom.append(of_seeds[seed][chosen].mean() - of_seeds[seed, average])
    by_scenario = pd.Series(headroom).groupby(lambda row: row // 3).mean()
    half = stats.t.ppf(0.975, len(by_scenario) - 1) * by_scenario.sem()
    assert f"{by_scenario.mean():.2f} points above" in text and f"±{half:.2f}" in text
