"""FedNNNN's tables of settings and networks, and what its curves say of the numbers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.plugins import registry
from research import claims
from research.report import build
from research.runs import Measured
from research.studies import of_paper
from research.targets import Built, Target, of_targets
from tests.pipelines.small import ROOT
from tests.research import by_hand
from tests.research.by_hand import is_picture, rows, run


def targets() -> dict[str, Target]:
    return of_targets("fednnnn", ROOT)


def ran(root: Path, recipe: str, seed: int = 0, **columns: Sequence[float]) -> None:
    accuracies = columns.pop("test_accuracy", [0.5] * 4)
    run(root, "near", recipe, seed, accuracies, columns=columns)


def built(root: Path, kind: str, panels: Sequence[Mapping[str, str]], **spec: Any) -> Built:
    at = {
        "panels": [{"study": "one", "scenario": "near", **panel} for panel in panels],
        "lines": {"FedAvg": "fedavg", "FedProx": "fedprox", "FedNNNN": "fednnnn"},
    }
    return by_hand.built(root, kind, {**at, **spec}, "fednnnn")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    names = {"a:": "fedavg:", "b:": "fedprox:", "c:": "fednnnn:"}
    params = by_hand.PARAMS
    for old, new in names.items():
        params = params.replace(f"{old} {{recipe", f"{new} {{recipe")
    return by_hand.paper(tmp_path, params=params)


@pytest.mark.parametrize(("name", "cells"), [("nnnn-tab1", 16), ("nnnn-tab5", 40)])
def test_the_paper_s_settings_are_those_that_are_run(name: str, cells: int) -> None:
    of = build(targets()[name], Measured("fednnnn", "paper", ROOT))
    assert of.sentences == (f"{cells} of {cells} settings are the paper's.",)
    assert not any("(" in cell for row in of.table[1:] for cell in row[1:])


COUNTS = {
    # (inputs * 5 * 5 + 1) * outputs of convolutions, (inputs + 1) * outputs of the others.
    "nnnn-tab3": [0, 520, 0, 0, 25_050, 0, 0, 400_500, 0, 5_010],
    # Kernels of 3, 2 numbers per channel for a batch norm.
    "nnnn-tab4": [
        *(0, 896, 64, 9_248, 64, 0, 18_496, 128, 36_928, 128, 0),
        *(73_856, 256, 147_584, 256, 0, 782_718, 0, 73_536, 0, 1_930),
    ],
}


@pytest.mark.parametrize(("name", "entries"), [("nnnn-tab3", 21), ("nnnn-tab4", 43)])
def test_the_networks_are_the_paper_s(name: str, entries: int) -> None:
    of = build(targets()[name], Measured("fednnnn", "smoke", ROOT))
    assert of.sentences == (f"{entries} of {entries} entries are the paper's.",)
    assert [row[-1] for row in of.table[1:]] == [f"{n:,}" if n else "-" for n in COUNTS[name]]


def test_a_network_that_differs_from_the_paper_is_said() -> None:
    reported = copy.deepcopy(dict(targets()["nnnn-tab4"].reported or {}))
    changed = dataclasses.replace(targets()["nnnn-tab4"], reported=reported)
    reported["rows"]["Fc1"][1] = 384
    of = build(changed, Measured("fednnnn", "smoke", ROOT))
    assert of.sentences == ("42 of 43 entries are the paper's; not: Fc1, Output (c, w, h).",)
    assert next(row for row in of.table if row[0] == "Fc1")[2] == "382 (384)"
    del reported["rows"]["Fc2"]
    with pytest.raises(UserError, match=r"nnnn-tab4: the rows of reported\.yaml are Input, Conv11"):
        build(changed, Measured("fednnnn", "smoke", ROOT))


def test_accuracy_says_who_reaches_the_baseline_first(toy: Path) -> None:
    """FedAvg's mean over seeds is 0.125, 0.5, 0.25, 0.375: at best 0.5."""
    ran(toy, "fedavg", 0, test_accuracy=[0.125, 0.25, 0.25, 0.25])
    ran(toy, "fedavg", 1, test_accuracy=[0.125, 0.75, 0.25, 0.5])
    ran(toy, "fedprox", 0, test_accuracy=[0.125, 0.25, 0.375, 0.25])
    ran(toy, "fednnnn", 0, test_accuracy=[0.25, 0.25, 0.5, 0.625])
    of = built(toy, "accuracy", [{"title": "P"}], scale=100)
    assert of.sentences[:2] == (
        (
            "FedAvg's best over the rounds, 50.00, is first reached in round: FedAvg 2, FedProx "
            "never, FedNNNN 3."
        ),
        "Best over the rounds: FedNNNN (62.50).",
    )
    assert of.missing == () and is_picture(of)
    assert len(rows(of)) == 4 * 4 and rows(of)[0]["value"] == "12.5"


def test_norms_compare_the_claim_and_give_n_over_e(toy: Path) -> None:
    """N: 2/1, 3/1, 3/2, 2/4: above in three rounds, 2.5 times and once.

    E: 1/2, 1/4, 8/4, 4/16. N / E by hand.
    """
    ran(toy, "fedavg", n=[1, 1, 2, 4], e=[2, 4, 4, 16])  # N / E: 1/2, 1/4, 1/2, 1/4
    ran(toy, "fednnnn", n=[2, 3, 3, 2], e=[1, 1, 8, 4])  # 2, 3, 3/8, 1/2
    panels = [{"title": "N", "column": "n"}, {"title": "E", "column": "e"}]
    of = built(toy, "norms", panels, claim="FedNNNN", against=["FedAvg", "FedProx"])
    assert of.sentences[:3] == (
        "N: FedNNNN is above FedAvg in 3 of 4 rounds, 2.50 times as large in the first half of "
        "them on average, 1.00 "
        "times in the second.",
        "E: FedNNNN is above FedAvg in 1 of 4 rounds, 0.38 times as large in the first half of "
        "them on average, 1.12 "
        "times in the second.",
        "N / E, mean over the rounds: FedAvg 0.375, FedNNNN 1.47.",
    )
    assert of.missing == ("N, FedProx", "E, FedProx")


def test_path_tells_a_line_that_stops_from_one_that_goes_on(toy: Path) -> None:
    """After two of four rounds FedAvg has gone 2 of 8, FedNNNN 9 of 10."""
    ran(toy, "fedavg", s=[1, 2, 4, 8])
    ran(toy, "fednnnn", s=[5, 9, 9.5, 10])
    of = built(toy, "path", [{"title": "S", "column": "s"}])
    said = (
        "Fraction of the whole way that lies in the second half of the rounds: FedAvg 75 %, "
        "FedNNNN 10 %."
    )
    assert of.sentences[0] == said


EVEN = ("single", "iid-b", "noniid-b")  # scenarios whose clients have equally many samples


def test_figures_and_claims_read_e_only_where_the_average_weighs_clients_alike() -> None:
    """The recorded E has q_k = 1/m (eq. 5), so a method that weighs by size has another one where
    sizes differ, and its N may be above it."""
    own = claims.of_paper("fednnnn", "small", ROOT)
    plans = {"paper": of_paper("fednnnn", "paper", ROOT), "claims": own.studies}
    reads = []
    for spec in (target.spec for target in targets().values()):
        lines = spec.get("lines", {}).values()
        for panel, line in itertools.product(spec.get("panels", ()), lines):
            at = {**panel, **({"recipe": line} if isinstance(line, str) else line)}
            reads.append((panel.get("column", ""), at, "paper"))
    for named in own.every.values():
        for scenario, recipe in named.claim.cells:
            at = {"study": named.claim.study, "scenario": scenario, "recipe": recipe}
            reads.append((named.claim.statistic, at, "claims"))
    seen = [
        (at["scenario"], registry.parse(entry.get("recipe", at["recipe"])))
        for statistic, at, plan in reads
        if "update_norm_client" in statistic or statistic == "n_over_e"
        for entry in [plans[plan][at["study"]].content["recipes"][at["recipe"]] or {}]
    ]
    assert len(seen) > 80
    assert all(scenario in EVEN or "fednnnn" in methods for scenario, methods in seen)
    assert registry.loaded()["fednnnn"].weights == "uniform"
