"""FNR-FL's figures and its table with controls, on results made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from research.targets import Built
from tests.research import by_hand
from tests.research.by_hand import clients, is_picture, rows, run

STUDIES = {
    "studies": {
        "one": {
            "data": {"name": "digits", "normalise": "none", "validation": 0.0, "public": 20},
            "scenarios": {
                "even": {"partition": "iid", "clients": 3},
                "skew": {"partition": "iid", "clients": 3},
            },
            "recipes": {"fedavg": {}, "fnr": {}, "fnr-leak": {}, "datasharing": {}},
            "seeds": [0, 1],
            "train": {"model": "mlp", "rounds": 2, "epochs": 1, "batch_size": 32, "lr": 0.1},
        }
    },
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return by_hand.paper(tmp_path, params=yaml.safe_dump(STUDIES))


def built(root: Path, kind: str, spec: dict[str, Any], reported: Any = None) -> Built:
    return by_hand.built(root, kind, spec, "fnr", reported)


def test_a_table_beside_its_controls_by_columns(root: Path) -> None:
    """Accuracies on two seeds: FNR-FL 0.70 and 0.74, its leak 0.98, data sharing 0.71 and 0.75,
    FedAvg 0.50. Neither the leak nor data sharing is the rival. Of seconds the lower is better, and
    what a paper counts is not compared."""
    for recipe, ends in (
        ("fnr", [0.70, 0.74]),
        ("fnr-leak", [0.98, 0.98]),
        ("datasharing", [0.71, 0.75]),
        ("fedavg", [0.50, 0.50]),
    ):
        for seed, end in enumerate(ends):
            run(root, "even", recipe, seed, [0.1, end], metrics={"price": 10 * end, "counted": 7.0})
    at = {"study": "one", "scenario": "even"}
    rows = {
        "Even": at,
        "Time": at | {"statistic": "price", "better": "lower", "decimals": 1, "reported": "Even"},
        "Counted": at | {"statistic": "counted", "better": "none"},
    }
    columns = {
        "FNR-FL": {"recipe": "fnr"},
        "FNR-FL (leak)": {"recipe": "fnr-leak", "reported": "FNR-FL", "compared": False},
        "Data sharing": {"recipe": "datasharing", "compared": False},
        "FedAvg": {"recipe": "fedavg"},
    }
    spec = {
        "decimals": 4,
        "claim": "FNR-FL",
        "methods": "columns",
        "rows": rows,
        "columns": columns,
    }
    reported = {"columns": ["FNR-FL", "FedAvg"], "rows": {"Even": [0.9, 0.6]}}
    of = built(root, "table", spec, reported)
    # Means and deviations over two seeds: 0.72 and 0.04 / sqrt(2).
    assert [line[1:4] for line in of.table[1:]] == [
        ["0.7200 ± 0.0283 (0.9)", "0.9800 ± 0.0000 (0.9)", "0.7300 ± 0.0283"],
        ["7.2 ± 0.3 (0.9)", "9.8 ± 0.0 (0.9)", "7.3 ± 0.3"],
        ["7.0000 ± 0.0000", "7.0000 ± 0.0000", "7.0000 ± 0.0000"],
    ]
    # 0.20 and 0.24: half an interval is 12.706 * 0.02.
    assert of.sentences == (
        "Even: FNR-FL less the best other (FedAvg) is +0.2200, 95 % interval -0.0341 to +0.4741 "
        "over 2 seeds: undecided.",
        "Time: FNR-FL less the best other (FedAvg) is +2.2, 95 % interval -0.3 to +4.7 over 2 "
        "seeds: undecided.",
    )


def test_heat_maps_count_what_clients_hold(root: Path) -> None:
    """Of two panels the first is there: 3 clients, 3 classes, two empty cells."""
    clients(root, "even", 0, [[10, 30, 0], [20, 20, 60], [0, 40, 10]])
    at = {"study": "one"}
    panels = [at | {"title": "(a)", "scenario": "even"}, at | {"title": "(b)", "scenario": "skew"}]
    of = built(root, "heat-maps", {"panels": panels})
    assert of.missing == ("(b)",) and is_picture(of)
    assert of.sentences == (
        "(a): client 1 holds the most of one class, 60 of owl; 2 of 9 cells are empty; clients "
        "hold 40 to 100 samples; a class is 0.0 to 80.0 % of a client's.",
    )
    cells = rows(of)
    assert [int(cell["samples"]) for cell in cells] == [10, 30, 0, 20, 20, 60, 0, 40, 10]
    assert cells[5] == {"panel": "(a)", "client": "1", "class": "owl", "samples": "60"}


def test_the_bars_are_of_the_worst_refined_client(root: Path) -> None:
    """Of clients 3, 5, 8 in the last of two rounds, 5 and 8 are refined; 8 is the worse of them, 3
    is worse yet."""
    clients(root, "even", 0, [[1, 1, 1]] * 8 + [[30, 20, 10]])
    nan = float("nan")
    recorded = {
        "fnr/refined": torch.tensor([[True, True, False], [False, True, True]]),
        "fnr/A": torch.tensor([[0.1, 0.1, 0.9], [0.2, 0.6, 0.5]]),
        "round/clients": torch.tensor([[0, 1, 2], [3, 5, 8]]),
        "fnr/refine.before": torch.tensor([[[0.0] * 3] * 2, [[0.1, 0.1, 0.1], [0.5, 0.4, nan]]]),
        "fnr/refine.after": torch.tensor([[[0.0] * 3] * 2, [[0.1, 0.1, 0.1], [0.75, 1.0, nan]]]),
        "fnr/refine.test_before": torch.tensor(
            [[[0.0] * 3] * 2, [[0.1, 0.1, 0.1], [0.5, 0.5, 0.25]]]
        ),
        "fnr/refine.test_after": torch.tensor(
            [[[0.0] * 3] * 2, [[0.1, 0.1, 0.1], [0.625, 0.75, 0.75]]]
        ),
    }
    run(root, "even", "fnr", 0, [0.1, 0.5], recorded=recorded)
    at = {"study": "one", "scenario": "even", "recipe": "fnr"}
    panels = [at | {"title": "T", "on": "test"}, at | {"title": "P", "on": "public"}]
    panels.append(at | {"title": "L", "on": "test", "recipe": "fnr-leak"})
    of = built(root, "refinement", {"panels": panels})
    assert of.missing == ("L",), "nobody looked at it"
    found = rows(of)
    assert {line["client"] for line in found} == {"8"}
    assert [
        (line["class"], line["samples"], line["before"], line["after"]) for line in found[:3]
    ] == [
        ("cat", "30", "0.500000", "0.625000"),
        ("dog", "20", "0.500000", "0.750000"),
        ("owl", "10", "0.250000", "0.750000"),
    ]
    # Gains of 1/8, 1/4, 1/2 with 30, 20, 10 samples: wholly discordant, and of 6 orders 2 are as
    # extreme.
    assert of.sentences[0] == (
        "T: client 8 gains +0.2917 on average, most in owl (+0.5000, 10 samples), least in cat "
        "(+0.1250, 30 samples); "
        "gains and samples by class have Kendall τ = -1.00 (p = 0.33, not told apart from none; "
        "the paper says that "
        "classes with fewer samples gain more, which would be below 0)."
    )
    assert "gains +0.4250 on average, most in dog (+0.6000, 20 samples)" in of.sentences[1], (
        "the class without samples"
    )
    assert is_picture(of)
