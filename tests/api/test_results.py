"""Results of the API: sweeps, comparisons, saved files, seeds that diverge, leaks; and what a run
leaves behind."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from contextlib import nullcontext
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


@pytest.mark.parametrize(("clients", "rounds"), [(50, [2, 3]), (51, [])])
def test_tested_rounds_have_the_accuracy_of_each_of_a_few_clients(
    clients: int, rounds: list[int]
) -> None:
    options = {**QUIET, "rounds": 3, "evaluate_every": 2, "partition": "iid"}
    measured = nd.run("fedavg", DATA, clients=clients, **options).rounds
    by_client = measured.set_index("round").filter(like="client_accuracy/")
    assert by_client.shape[1] == (clients if rounds else 0)
    tested = by_client.notna().any(axis=1)
    assert by_client.index[tested].tolist() == rounds


def test_a_sweep_has_every_combination(grid: nd.Results) -> None:
    points = [
        (alpha, lr, recipe)
        for alpha in (0.1, 1.0)
        for lr in (0.05, 0.1)
        for recipe in ("fedavg", "scaffold")
    ]
    assert [(result.point["alpha"], result.point["lr"], result.recipe) for result in grid] == points
    assert len({result.sha256[3] for result in grid}) == 8
    assert list(grid.rounds.columns[:4]) == ["alpha", "lr", "recipe", "seed"]
    sizes = [len(frame) for frame in (grid.rounds, grid.clients, grid.classes)]
    assert sizes == [8 * 2 * 2, 8 * 2 * 5, 8 * 2 * 10]


def test_a_run_of_a_sweep_is_the_run_alone(grid: nd.Results) -> None:
    alone = nd.run(
        "scaffold",
        DATA,
        partition="dirichlet",
        clients=5,
        alpha=1.0,
        lr=0.05,
        seeds=[3, 4],
        **QUIET,
    )
    same = next(
        found
        for found in grid
        if found.recipe == "scaffold" and found.point == {"alpha": 1.0, "lr": 0.05}
    )
    assert alone.sha256 == same.sha256
    assert all(torch.equal(leaf, same.weights[4][name]) for name, leaf in alone.weights[4].items())


def test_the_summary_is_that_of_the_rounds(grid: nd.Results) -> None:
    last = grid.rounds[grid.rounds["round"] == 2].groupby(["alpha", "lr", "recipe"])[
        "test_accuracy"
    ]
    rows = grid.summary.set_index(["alpha", "lr", "recipe"])
    assert len(rows) == 8
    for point, row in rows.iterrows():
        accuracies = last.get_group(point)
        assert row["accuracy"] == pytest.approx(accuracies.mean())
        assert row["std"] == pytest.approx(accuracies.std())
        ends = scipy.stats.t.interval(0.95, 1, accuracies.mean(), scipy.stats.sem(accuracies))
        assert (row["low"], row["high"]) == pytest.approx(tuple(np.clip(ends, 0, 1)))
    for _, group in grid.summary.groupby(["alpha", "lr"]):
        assert group["accuracy"].is_monotonic_decreasing
        assert group["rank"].tolist() == [1, 2]


def test_what_is_printed_is_in_percent_and_what_is_held_are_fractions(grid: nd.Results) -> None:
    one, table, compared = grid[0], grid.summary, grid.compare("fedavg")
    assert max(table["high"]) <= 1 and max(table["accuracy"]) <= 1
    row = table[table["recipe"] == one.recipe].iloc[0]
    words = f"accuracy {100 * row['accuracy']:.2f} ± {100 * row['std']:.2f} %"
    assert words in repr(one)
    texts, title = (repr(table), table._repr_html_()), "accuracy, %"
    for number in (row["accuracy"], row["std"], row["low"], row["high"], row["worst_client"]):
        assert all(f"{100 * number:.2f}" in text and title in text for text in texts)
    texts, title = (repr(compared), compared._repr_html_()), "difference, points"
    for number in compared[["difference", "low", "high"]].to_numpy().flatten():
        assert all(f"{100 * number:z.2f}" in text and title in text for text in texts)
    assert f"{compared['p'].iloc[0]:.4g}" in repr(compared)


def test_a_mean_without_a_diverged_seed_says_so(grid: nd.Results) -> None:
    first, second = grid[0], grid[1]
    left = replace(first, files={3: first.files[3]}, failed={4: "round 1: not finite"})
    notes = nd.Results([left, second]).summary.set_index("recipe")["note"]
    assert "no result of seed 4, so its means are those of the others" in notes[first.recipe]
    assert "no result" not in notes[second.recipe]


def test_compare_pairs_the_seeds(grid: nd.Results) -> None:
    table = grid.compare("fedavg")
    assert table[["alpha", "lr", "recipe"]].drop_duplicates().shape == (4, 3)
    assert set(table["recipe"]) == {"scaffold"}
    last = grid.rounds[grid.rounds["round"] == 2].set_index(["alpha", "lr", "recipe", "seed"])[
        "test_accuracy"
    ]
    for row in table.itertuples():
        pairs = [
            last[row.alpha, row.lr, "scaffold", s] - last[row.alpha, row.lr, "fedavg", s]
            for s in (3, 4)
        ]
        assert row.difference == pytest.approx(np.mean(pairs))
        assert row.higher == sum(pair > 0 for pair in pairs)
        assert row.low <= row.difference <= row.high
    back = grid.compare("scaffold")
    assert back["difference"].tolist() == pytest.approx((-table["difference"]).tolist())


def test_save_has_the_files_of_folder(tmp_path: Path, grid: nd.Results) -> None:
    again = nd.run("fedavg", SPLIT, seeds=[0, 1], folder=tmp_path / "during", **QUIET)
    again.save(tmp_path / "after")
    after = contents(tmp_path / "after")
    assert after.pop("summary.csv").decode().startswith("recipe,seeds,accuracy")
    assert contents(tmp_path / "during") == after
    assert len(after) == 2 * 11 + 1
    grid.save(tmp_path / "grid")
    names = [path.name for path in (tmp_path / "grid" / "runs").iterdir()]
    assert len(names) == 16 and "alpha-0_1-lr-0_05-scaffold-4" in names
    assert len(pd.read_csv(tmp_path / "grid" / "summary.csv")) == 8


def test_recipes_may_be_entries_of_params_yaml() -> None:
    entries = {
        "weak": {"recipe": "fedprox", "fedprox": {"mu": 0.0}},
        "fedprox": None,
        "slow": {"recipe": "fedavg"},
    }
    results = nd.sweep(entries, SPLIT, fedprox={"mu": 1.0}, **QUIET)
    weak, strong, slow = (result.sha256[0] for result in results)
    assert weak == slow != strong  # mu = 0 is FedAvg; the entry's own value comes first
    half = {"half": {"recipe": "fednnnn", "fednnnn": {"beta": 0.5}}}
    results = nd.sweep(half, SPLIT, over={"fednnnn": [{"gamma": 0.0}, {"gamma": 0.9}]}, **QUIET)
    ran = [result.settings.recipes["half"].settings["fednnnn"] for result in results]
    assert ran == [{"beta": 0.5, "gamma": 0.0}, {"beta": 0.5, "gamma": 0.9}]


def test_the_table_of_a_paper(grid: nd.Results) -> None:
    table, verdicts = grid.table(by="lr"), grid.compare().set_index(["alpha", "lr"])["verdict"]
    rows = {name: dict(zip((0.05, 0.1), cells, strict=True)) for name, *cells in table.rows[1:]}
    for row in grid.summary.itertuples():
        mean, undecided = row.accuracy * 100, verdicts[row.alpha, row.lr] == "undecided"
        cell = f"{mean:.1f} ± {100 * row.std:.1f}"
        mark = " *" if row.rank == 1 else " ≈" if undecided else ""
        assert rows[f"{row.recipe}, alpha {row.alpha}"][row.lr] == cell + mark
        assert (f"| **{cell}** |" in table.to_markdown()) == (row.rank == 1)
        in_latex = cell.replace("±", r"$\pm$")
        assert (rf"\textbf{{{in_latex}}} " in table.to_latex()) == (row.rank == 1)
    assert grid.table().rows[0][:3] == ["method", "alpha 0.1, lr 0.05", "alpha 0.1, lr 0.1"]
    in_csv = pd.read_csv(io.StringIO(grid.table(by="lr").to_csv()), **exactly())
    assert sorted(in_csv["mean"]) == sorted(grid.summary["accuracy"])
    assert set(in_csv["setting"]) == {"lr 0.05", "lr 0.1"}
    half = nd.Results([replace(grid[0], files={3: grid[0].files[3]})])
    assert half.table().rows[1][1].endswith(" (n=1)")
    with pytest.raises(nd.UserError, match=r"^table: by = 'alfa' is refused .*'alpha'.*alpha, lr"):
        grid.table(by="alfa")


@pytest.mark.filterwarnings("ignore:lr-1e.30-.* has no result")
def test_a_seed_that_diverges_is_left_out_and_named(tmp_path: Path) -> None:
    mpl.use("agg")
    results = nd.sweep(["fedavg", "fedbabu"], SPLIT, over={"lr": [0.1, 1e30]}, **QUIET)
    assert list(results.failed) == ["lr-1e+30-fedavg-0", "lr-1e+30-fedbabu-0"]
    assert all(
        "round 1, client 0" in reason and "not finite" in reason
        for reason in results.failed.values()
    )
    gone = results[2]
    assert repr(gone) == "fedavg, lr 1e+30, no result of seed 0"
    assert (gone.seeds, gone.weights, gone.sha256) == ((), {}, {})
    assert all(
        frame.empty
        for frame in (gone.rounds, gone.clients, gone.classes, gone.metrics, gone.summary)
    )
    assert set(results.summary["lr"]) == set(results.compare("fedavg")["lr"]) == {0.1}
    results.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "lr-0_1-fedavg-0",
        "lr-0_1-fedbabu-0",
    ]
    # The panels share an axis: those of the other setting keep their curves and names.
    there, empty = results.plot().axes
    assert len(there.get_lines()) == 2
    assert [text.get_text() for text in empty.texts] == [NO_RESULT]
    there, empty = results.plot_clients().axes
    assert [label.get_text() for label in there.get_yticklabels()] == ["fedavg", "fedbabu"]
    assert there.get_ylim() == empty.get_ylim()
    assert not there.texts
    assert [text.get_text() for text in empty.texts] == [NO_RESULT, NO_RESULT]
    pyplot.close("all")


def test_a_leak_is_in_every_name() -> None:
    nd.register(Peek)
    split = nd.partition(DATA, "iid", clients=5, public=50)
    results = nd.sweep(["fedavg", "fnr", "peek"], split, seeds=[0, 1], **QUIET)
    assert [result.recipe for result in results] == ["fedavg", "fnr", "peek-leak"]
    rows = results.summary.set_index("recipe")
    assert rows["note"].to_dict() == {
        "fedavg": "",
        "fnr": "sees labelled public data",
        "peek-leak": "LEAK: peek trains on the test set",
    }
    assert rows["rank"].isna().to_dict() == {
        "fedavg": False,
        "fnr": False,
        "peek-leak": True,
    }
    assert results.compare("fedavg")["recipe"].tolist() == ["fnr"]
    assert nd.run("peek", split, **QUIET).recipe == "peek-leak"


def test_a_method_without_effect_says_so_in_every_result() -> None:
    split = nd.partition(DATA, "iid", clients=5)
    idle, plain = nd.sweep(["fedbn", "fedavg"], split, model="mlp", **QUIET)
    reason = "NO EFFECT: mlp has no batch norms that a client could keep to itself, so it trains as"
    assert repr(idle).splitlines()[1:] == [f"{reason} fedavg"]
    assert idle.summary["note"].tolist() == [f"{reason} fedavg"]
    assert idle.sha256 == plain.sha256 and "NO EFFECT" not in repr(plain)


def test_columns_may_have_numbers_as_names() -> None:
    frame = pd.DataFrame(np.random.default_rng(0).random((60, 3))).assign(label=np.arange(60) % 2)
    by_number = frame.set_axis(range(4), axis=1)
    data = nd.from_frame(by_number, label=3, features=[0, 1, 2])
    assert data.dataset.checksum == nd.from_frame(frame, label="label").dataset.checksum


def test_arrays_may_be_lists_and_tensors() -> None:
    x, y = np.random.default_rng(0).random((40, 3)), np.arange(40) % 2
    wanted = nd.from_arrays(x, y, x[:9], y[:9], owner=y, test_owner=y[:9]).dataset.checksum
    test_x, test_y = torch.from_numpy(x[:9]), torch.from_numpy(y[:9])
    own, test_own = pd.Series(y), pd.Series(y[:9])
    given = nd.from_arrays(x.tolist(), y.tolist(), test_x, test_y, owner=own, test_owner=test_own)
    assert given.dataset.checksum == wanted


@pytest.mark.parametrize("lr", [0.1, 1e30])  # the second run ends in an error
@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_global_stays_changed(lr: float, processes: int) -> None:

    def state() -> list[object]:
        backends = torch.backends
        return [
            torch.get_num_threads(),
            backends.cuda.matmul.allow_tf32,
            backends.cudnn.allow_tf32,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state()),
        ]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.backends.cudnn.allow_tf32 = True
    try:
        before = state()
        with pytest.raises(nd.UserError, match="not finite") if lr > 1 else nullcontext():
            nd.run("fedavg", SPLIT, lr=lr, seeds=[0, 1], processes=processes, threads=1, **QUIET)
        assert state() == before
    finally:
        torch.set_num_threads(threads)


def test_the_package_is_imported_without_torch() -> None:
    program = """
import sys, fedml_noniid
assert fedml_noniid.__version__ and "run" in dir(fedml_noniid)
heavy = {"torch", "numpy", "pandas", "matplotlib", "sklearn"} & sys.modules.keys()
assert not heavy, heavy
from fedml_noniid import run
assert "torch" in sys.modules and not {"mlflow", "sklearn", "fedml"} & sys.modules.keys()
try:
    fedml_noniid.runn
except AttributeError as error:
    assert "'runn'" in str(error)
    assert error.name == "runn" and error.obj is fedml_noniid  # by these, Python names the near \
miss
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
