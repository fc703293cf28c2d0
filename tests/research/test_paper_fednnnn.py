"""FedNNNN's tables of settings and networks, and what its curves say of the numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedml_noniid.core.errors import UserError
from fedml_noniid.plugins import registry
from research import claims, report
from research.papers.fednnnn import figures
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


def test_a_table_without_a_unit_is_introduced_without_one() -> None:
    for name, words in (("nnnn-tab1", "Table 1 of the paper. In brackets"), ("nnnn-tab2", "(%)")):
        target = targets()[name]
        facts = dict.fromkeys(target.studies, "")
        assert words in report.text(target, Built((), {}, ()), "paper", facts)


@pytest.mark.parametrize(("name", "cells"), [("nnnn-tab1", 16), ("nnnn-tab5", 40)])
def test_the_paper_s_settings_are_those_that_are_run(name: str, cells: int) -> None:
    of = build(targets()[name], Measured("fednnnn", "paper", ROOT))
    assert of.sentences == (f"{cells} of {cells} settings are the paper's.",)
    assert not any("(" in cell for row in of.table[1:] for cell in row[1:])


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
    reads = []
    for target in targets().values():
        spec = target.spec
        for panel, line in itertools.product(
            spec.get("panels", ()), spec.get("lines", {}).values()
        ):
            own = {"recipe": line} if isinstance(line, str) else line
            reads.append((panel.get("column", ""), {**panel, **own}, "paper"))
    for one in claims.of_paper("fednnnn", "small", ROOT).every.values():
        for scenario, recipe in itertools.product(
            one.study.content["scenario_names"], [*one.claim.of, *one.claim.less]
        ):
            at = {"study": one.claim.study, "scenario": scenario, "recipe": recipe}
            reads.append((one.claim.statistic, at, "claims"))
    plans = {
        "paper": of_paper("fednnnn", "paper", ROOT),
        "claims": claims.of_paper("fednnnn", "small", ROOT).studies,
    }
    seen = [
        (at["scenario"], registry.parse(entry.get("recipe", at["recipe"])))
        for statistic, at, plan in reads
        if "update_norm_client" in statistic or statistic == "n_over_e"
        for entry in [plans[plan][at["study"]].content["recipes"][at["recipe"]] or {}]
    ]
    assert len(seen) > 80
    assert all(scenario in EVEN or "fednnnn" in methods for scenario, methods in seen)
    assert registry.loaded()["fednnnn"].weights == "uniform"


def by_torch(name: str) -> list[nn.Module]:
    """The paper's tables 3 and 4 as torch's modules, in which each pair of batch norm and ReLU is
    one."""
    if name == "nnnn-tab3":
        first = [
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        return [*first, nn.Linear(50 * 4 * 4, 500), nn.ReLU(), nn.Linear(500, 10)]
    modules: list[nn.Module] = []
    for n_in, n_out in ((3, 32), (32, 64), (64, 128)):
        for before in (n_in, n_out):
            modules += [nn.Conv2d(before, n_out, 3, padding=1), nn.BatchNorm2d(n_out)]
        modules += [nn.MaxPool2d(2)]
    return [
        *modules,
        nn.Linear(2048, 382),
        nn.ReLU(),
        nn.Linear(382, 192),
        nn.ReLU(),
        nn.Linear(192, 10),
    ]


@pytest.mark.parametrize(
    ("name", "entries", "total"), [("nnnn-tab3", 21, "431,080"), ("nnnn-tab4", 43, "1,146,088")]
)
def test_the_networks_are_the_paper_s(name: str, entries: int, total: str) -> None:
    of = build(targets()[name], Measured("fednnnn", "smoke", ROOT))
    assert (
        of.sentences[0]
        == f"{entries} of the {entries} entries that the paper prints are this network's."
    )
    assert of.sentences[1].startswith(f"{total} parameters")
    counts = [sum(p.numel() for p in module.parameters()) for module in by_torch(name)]
    ours = [row[-1] for row in of.table[2:]]  # below the header and the input
    assert ours == [f"{count:,}" if count else "-" for count in counts]


def test_a_network_that_differs_from_the_paper_is_said() -> None:
    one = targets()["nnnn-tab4"]
    other = copy.deepcopy(dict(one.reported or {}))
    other["rows"]["Fc1"][1] = 384
    changed = Target(one.id, one.paper, one.kind, one.title, one.protocol, one.spec, other)
    of = figures.network(changed, Measured("fednnnn", "smoke", ROOT))
    assert (
        of.sentences[0].startswith("42 of the 43 entries")
        and "not: Fc1, Output (c, w, h)." in of.sentences[0]
    )
    assert next(row for row in of.table if row[0] == "Fc1")[2] == "382 (384)"
    del other["rows"]["Fc2"]
    with pytest.raises(UserError, match=r"nnnn-tab4: the rows of reported\.yaml are Input, Conv11"):
        figures.network(changed, Measured("fednnnn", "smoke", ROOT))
