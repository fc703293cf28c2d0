"""Results of the API: sweeps, comparisons, saved files, seeds that diverge, leaks; and what a run
leaves behind."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from matplotlib import pyplot

import fedml_noniid as nd
from fedml_noniid.data.readers.frames import exactly
from fedml_noniid.pipelines.reporting.figures import NO_RESULT
from tests.files import contents
from tests.leaking import Peek

DATA = nd.load("digits")
SPLIT = nd.partition(DATA, "dirichlet", clients=5, alpha=1.0)
QUIET = {"rounds": 2, "progress": False}


@pytest.fixture(scope="module")
def grid() -> nd.Results:
    """Two recipes at four settings. SCAFFOLD's name has the values of one argument."""
    return nd.sweep(
        ["fedavg", "scaffold"],
        DATA,
        partition="dirichlet",
        clients=5,
        over={"alpha": [0.1, 1.0], "lr": [0.05, 0.1]},
        seeds=[3, 4],
        **QUIET,
    )


def test_a_sweep_has_every_combination(grid: nd.Results) -> None:
    """And each is the run alone."""
    axes = [0.1, 1.0], [0.05, 0.1], ["fedavg", "scaffold"]
    points = [(*result.point.values(), result.recipe) for result in grid]
    assert points == [*itertools.product(*axes)]
    assert len({result.sha256[3] for result in grid}) == 8
    assert list(grid.rounds.columns[:4]) == ["alpha", "lr", "recipe", "seed"]
    sizes = [len(frame) for frame in (grid.rounds, grid.clients, grid.classes)]
    assert sizes == [8 * 2 * 2, 8 * 2 * 5, 8 * 2 * 10]
    how = {"partition": "dirichlet", "clients": 5, "alpha": 1.0, "lr": 0.05}
    alone = nd.run("scaffold", DATA, seeds=[4], **how, **QUIET)
    same = grid[points.index((1.0, 0.05, "scaffold"))]
    assert alone.sha256[4] == same.sha256[4]
    assert all(torch.equal(leaf, same.weights[4][name]) for name, leaf in alone.weights[4].items())


def test_the_summary_is_that_of_the_rounds(grid: nd.Results) -> None:
    key = ["alpha", "lr", "recipe"]
    last = grid.rounds[grid.rounds["round"] == 2].groupby(key)["test_accuracy"]
    assert len(grid.summary) == 8
    for point, row in grid.summary.set_index(key).iterrows():
        accuracies = last.get_group(point)
        assert (row["accuracy"], row["std"]) == pytest.approx((accuracies.mean(), accuracies.std()))
        ends = scipy.stats.t.interval(0.95, 1, accuracies.mean(), scipy.stats.sem(accuracies))
        assert (row["low"], row["high"]) == pytest.approx(tuple(np.clip(ends, 0, 1)))
    for _, group in grid.summary.groupby(["alpha", "lr"]):
        assert group["accuracy"].is_monotonic_decreasing and group["rank"].tolist() == [1, 2]


def test_what_is_printed_is_in_percent_and_what_is_held_are_fractions(grid: nd.Results) -> None:
    table, compared = grid.summary, grid.compare("fedavg")
    assert max(table["high"]) <= 1 and max(table["accuracy"]) <= 1
    row = table[table["recipe"] == grid[0].recipe].iloc[0]
    words = f"accuracy {100 * row['accuracy']:.2f} ± {100 * row['std']:.2f} %"
    assert words in repr(grid[0])
    for frame, title, names in (
        (table, "accuracy, %", ["accuracy", "std", "low", "high", "worst_client"]),
        (compared, "difference, points", ["difference", "low", "high"]),
    ):
        numbers = [f"{100 * number:z.2f}" for number in frame[names].to_numpy().flatten()]
        for text in (repr(frame), frame._repr_html_()):
            assert title in text and not [number for number in numbers if number not in text]


def test_a_mean_without_a_diverged_seed_says_so(grid: nd.Results) -> None:
    left = replace(grid[0], files={3: grid[0].files[3]}, failed={4: "round 1: not finite"})
    notes = nd.Results([left, grid[1]]).summary.set_index("recipe")["note"]
    said = "no result of seed 4, so its means are those of the others"
    assert said in notes[left.recipe] and "no result" not in notes[grid[1].recipe]


def test_compare_pairs_the_seeds(grid: nd.Results) -> None:
    table = grid.compare("fedavg")
    last = grid.rounds[grid.rounds["round"] == 2].set_index(["alpha", "lr", "recipe", "seed"])
    final = last["test_accuracy"]
    for row in table.itertuples():
        gains = final[row.alpha, row.lr, "scaffold"] - final[row.alpha, row.lr, "fedavg"]
        assert row.difference == pytest.approx(gains.mean())
        assert row.higher == (gains > 0).sum() and row.low <= row.difference <= row.high
    back = grid.compare("scaffold")
    assert back["difference"].tolist() == pytest.approx((-table["difference"]).tolist())


def test_save_has_the_files_of_folder(tmp_path: Path, grid: nd.Results) -> None:
    again = nd.run("fedavg", SPLIT, seeds=[0, 1], folder=tmp_path / "during", **QUIET)
    again.save(tmp_path / "after")
    after = contents(tmp_path / "after")
    assert after.pop("summary.csv").decode().startswith("recipe,seeds,accuracy")
    assert contents(tmp_path / "during") == after and len(after) == 2 * 11 + 1
    grid.save(tmp_path / "grid")
    names = [path.name for path in (tmp_path / "grid" / "runs").iterdir()]
    assert len(names) == 16 and "alpha-0_1-lr-0_05-scaffold-4" in names


def test_recipes_may_be_entries_of_params_yaml() -> None:
    """What an entry has itself comes first: mu = 0 is FedAvg."""
    weak = {"recipe": "fedprox", "fedprox": {"mu": 0.0}}
    entries = {"weak": weak, "fedprox": None, "slow": {"recipe": "fedavg"}}
    results = nd.sweep(entries, SPLIT, fedprox={"mu": 1.0}, **QUIET)
    weak_sha, strong, slow = (result.sha256[0] for result in results)
    assert weak_sha == slow != strong
    half = {"half": {"recipe": "fednnnn", "fednnnn": {"beta": 0.5}}}
    results = nd.sweep(half, SPLIT, over={"fednnnn": [{"gamma": 0.0}, {"gamma": 0.9}]}, **QUIET)
    ran = [result.settings.recipes["half"].settings["fednnnn"] for result in results]
    assert ran == [{"beta": 0.5, "gamma": 0.0}, {"beta": 0.5, "gamma": 0.9}]


def test_the_table_of_a_paper(grid: nd.Results) -> None:
    table, verdicts = grid.table(by="lr"), grid.compare().set_index(["alpha", "lr"])["verdict"]
    rows = {name: dict(zip((0.05, 0.1), cells, strict=True)) for name, *cells in table.rows[1:]}
    for row in grid.summary.itertuples():
        cell = f"{100 * row.accuracy:.1f} ± {100 * row.std:.1f}"
        mark = " *" if row.rank == 1 else " ≈" * (verdicts[row.alpha, row.lr] == "undecided")
        assert rows[f"{row.recipe}, alpha {row.alpha}"][row.lr] == cell + mark
        assert (f"| **{cell}** |" in table.to_markdown()) == (row.rank == 1)
    assert grid.table().rows[0][:3] == ["method", "alpha 0.1, lr 0.05", "alpha 0.1, lr 0.1"]
    in_csv = pd.read_csv(io.StringIO(table.to_csv()), **exactly())
    assert sorted(in_csv["mean"]) == sorted(grid.summary["accuracy"])
    half = nd.Results([replace(grid[0], files={3: grid[0].files[3]})])
    assert half.table().rows[1][1].endswith(" (n=1)")
    with pytest.raises(nd.UserError, match=r"^table: by = 'alfa' is refused .*'alpha'.*alpha, lr"):
        grid.table(by="alfa")


@pytest.mark.filterwarnings("ignore:lr-1e.30-.* has no result")
def test_a_seed_that_diverges_is_left_out_and_named(tmp_path: Path) -> None:
    mpl.use("agg")
    results = nd.sweep(["fedavg", "fedbabu"], SPLIT, over={"lr": [0.1, 1e30]}, **QUIET)
    assert list(results.failed) == ["lr-1e+30-fedavg-0", "lr-1e+30-fedbabu-0"]
    assert "round 1, client 0" in results.failed["lr-1e+30-fedavg-0"]
    gone = results[2]
    assert repr(gone) == "fedavg, lr 1e+30, no result of seed 0"
    assert (gone.seeds, gone.weights, gone.sha256) == ((), {}, {})
    frames = (gone.rounds, gone.clients, gone.classes, gone.metrics, gone.summary)
    assert all(frame.empty for frame in frames)
    assert set(results.summary["lr"]) == set(results.compare("fedavg")["lr"]) == {0.1}
    results.save(tmp_path)
    saved = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert saved == ["lr-0_1-fedavg-0", "lr-0_1-fedbabu-0"]
    # The panels share an axis: those of the other setting keep their curves and names.
    for figure in (results.plot(), results.plot_clients()):
        there, empty = figure.axes
        assert len(there.get_lines()) >= 2 and not there.texts
        assert [text.get_text() for text in empty.texts] == [NO_RESULT]
        assert there.get_ylim() == empty.get_ylim()
    pyplot.close("all")


def test_a_leak_is_in_every_name() -> None:
    nd.register(Peek)
    split = nd.partition(DATA, "iid", clients=5, public=50)
    results = nd.sweep(["fedavg", "fnr", "peek"], split, seeds=[0, 1], **QUIET)
    rows = results.summary.set_index("recipe").sort_index()
    assert [result.recipe for result in results] == [*rows.index] == ["fedavg", "fnr", "peek-leak"]
    notes = ["", "sees labelled public data", "LEAK: peek trains on the test set"]
    assert rows["note"].tolist() == notes and rows["rank"].isna().tolist() == [False, False, True]
    assert results.compare("fedavg")["recipe"].tolist() == ["fnr"]


def test_a_method_without_effect_says_so_in_every_result() -> None:
    split = nd.partition(DATA, "iid", clients=5)
    idle, plain = nd.sweep(["fedbn", "fedavg"], split, model="mlp", **QUIET)
    reason = "NO EFFECT: mlp has no batch norms that a client could keep to itself, so it trains as"
    assert repr(idle).splitlines()[1:] == [f"{reason} fedavg"]
    assert idle.summary["note"].tolist() == [f"{reason} fedavg"]
    assert idle.sha256 == plain.sha256 and "NO EFFECT" not in repr(plain)
