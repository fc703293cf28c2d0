"""What claims.yaml says of the papers' tables, against reported.yaml; and which runs behind a cause
were known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML
from scipy.stats import linregress

from fedml_noniid.pipelines.experiment.results import table
from research.claims import Claims, of_papers
from research.studies import PAPERS
from tests.pipelines.small import ROOT

ALPHA = "\N{GREEK SMALL LETTER ALPHA}"


@pytest.fixture(scope="module")
def ours() -> dict[str, Claims]:
    """Paper -> the repository's claims."""
    return of_papers("small", ROOT)


def printed_by_table() -> dict[str, Any]:
    """The printed effects, from the papers' tables in reported.yaml, or those of each scenario.

    Over several methods the one that is furthest from the claim.
    """
    tables: dict[str, Any] = {}
    for paper in PAPERS:
        tables |= YAML(typ="safe").load(ROOT / f"research/papers/{paper}/reported.yaml")

    def cell(table: str, row: str, column: str) -> float:
        of = tables[table]
        found = of["rows"][row][of["columns"].index(column)]
        return float(found[0] if isinstance(found, list) else found)

    def lead(table: str, of: str, others: str, column: str) -> float:
        return cell(table, of, column) - max(cell(table, o, column) for o in others.split(", "))

    def ccn(method: str, other: str = "Normalized") -> list[float]:
        return [
            cell("ccn-tab1", method, f"{other}, {ALPHA}={alpha}")
            - cell("ccn-tab1", method, f"Original, {ALPHA}={alpha}")
            for alpha in (0.1, 0.5)
        ]

    def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
        return float(linregress(xs, ys).slope)

    adam, (low, high) = f"Original, {ALPHA}=0.1", ccn("FedAvg")
    found: dict[str, Any] = {}
    found["ccn-gain-skew"] = slope([0.1, 0.5], [low, high])
    for method in ("FedAvg", "FedProx", "SCAFFOLD", "SGDM", "FedNova", "FedBABU"):
        gains = ccn(method)
        found[f"ccn-gain-{method.lower()}"] = dict(zip(("alpha01", "alpha05"), gains, strict=True))
    for key in ("ccn-three-points", "ccn-gain-fedavg-tuned", "ccn-why-gain"):
        found[key] = found["ccn-gain-fedavg"]
    found["ccn-fedavg-lowest"] = max(
        cell("ccn-tab1", "FedAvg", adam) - cell("ccn-tab1", other, adam)
        for other in ("FedProx", "FedBABU")
    )
    four, resnet = "FedAvg, FedProx, SCAFFOLD, FedNova", "{} skew, ResNet-18"
    for name in ("Feature distribution", "Label distribution", "Quantity"):
        key = f"fnr-gain-{name.split()[0].lower()}"
        found[key] = 100 * lead("fnr-tab2", "FNR-FL", four, resnet.format(name))
    label = resnet.format("Label distribution")
    found["fnr-gain-label-tuned"] = 100 * lead("fnr-tab2", "FNR-FL", "FedAvg", label)
    found["fnr-ninety"] = 100 * cell("fnr-tab2", "FNR-FL", resnet.format("Feature distribution"))
    mixed = "label+feature skew, noise=0.1"
    found["fnr-gain-mixed"] = 100 * (
        cell("fnr-tab4", mixed, "FNR-FL") - cell("fnr-tab4", mixed, "FedAvg")
    )
    for key, name in (("fnr-with-others", "SCAFFOLD"), ("fnr-with-fedprox", "FedProx")):
        both_ = cell("fnr-tab5", f"{name}+FNR-FL", "Label distribution skew")
        found[key] = 100 * (both_ - cell("fnr-tab2", name, label))
    rows = [f"Label distribution skew, {noise}" for noise in ("0.0", "0.1", "0.5")]
    gains = [cell("fnr-tab6", row, "FNR-FL") - cell("fnr-tab6", row, "FedAvg") for row in rows]
    found["fnr-noise"] = 100 * slope([0, 0.1, 0.5], gains)
    for key, row in (("bytes", "Label {} Traffic (MB)"), ("time", "Feature {} Time (s)")):
        row = row.format("Distribution Skew,")
        found[f"fnr-{key}"] = cell("fnr-tab3", row, "FNR-FL") / cell("fnr-tab3", row, "FedAvg")
    b, ub = "non-IID - B, {}", "non-IID - UB, MNIST"
    rivals = "FedAvg, FedProx"
    for data in ("MNIST", "CIFAR10"):
        gain = lead("nnnn-tab2", "FedNNNN", rivals, b.format(data))
        key = f"nnnn-gain-{data.lower().rstrip('10')}"
        alone = lead("nnnn-tab2", "FedNNNN", "FedAvg", b.format(data))
        found |= {key: gain, f"{key}-tuned": gain, f"{key}-fresh": alone}
    found["nnnn-gain-mnist-ub"] = lead("nnnn-tab2", "FedNNNN", rivals, ub)
    found["nnnn-over-momentum"] = lead("nnnn-tab2", "FedNNNN", "Momentum", b.format("CIFAR10"))
    found["nnnn-over-norm-norm"] = lead("nnnn-tab2", "FedNNNN", "Norm-Norm", b.format("MNIST"))
    found["nnnn-gain-skew"] = lead("nnnn-tab2", "FedNNNN", "FedAvg", b.format("MNIST")) - lead(
        "nnnn-tab2", "FedNNNN", "FedAvg", "IID - B, MNIST"
    )
    shards, dirichlet = "CIFAR-10, Shards (20, 2)", "CIFAR-10, Dirichlet (20, {})"
    six = "FedAvg, FedProx, Scaffold, FedNova, FedRS, FedLC"
    found["nlr-best-shards2"] = lead("nlr-tab1", "FedNLR", six, shards)
    for key in ("nlr-gain-shards2", "nlr-gain-shards2-tuned", "nlr-why-wide"):
        found[key] = lead("nlr-tab1", "FedNLR", "FedAvg", shards)
    ends_ = [lead("nlr-tab1", "FedNLR", "FedAvg", dirichlet.format(a)) for a in (0.05, 0.5)]
    found |= {"nlr-gain-dirichlet": ends_[0], "nlr-gain-skew": slope([0.05, 0.5], ends_)}
    found["nlr-with-feddyn"] = lead("nlr-tab1", "FedDyn + FedNLR", "FedDyn", dirichlet.format(0.5))
    found["nlr-few-clients"] = {
        scenario: lead("nlr-tab3", "FedNLR", "FedAvg", f"CIFAR-10, {column}")
        for scenario, column in (("shards4", "Shards (100, 4)"), ("dir01", "Dirichlet (100, 0.1)"))
    }
    drifts = [
        statistics.fmean(x for x in tables["nlr-tab4"]["rows"][f"Activation Change ({m})"] if x)
        for m in ("FedAvg", "FedNLR")
    ]
    found |= {"nlr-neurons-fall": drifts[0], "nlr-neurons-fall-less": drifts[1] - drifts[0]}
    theirs, plus = "FedAvg, FedProx, Scaffold, q-FedAvg", "rFedAvg+"
    silo = lead("rf-tab1", plus, f"{theirs}, rFedAvg", "MNIST, Sim 0%")
    found |= {"rf-gain-mnist-silo": silo, "rf-gain-mnist-silo-tuned": silo}
    found["rf-gain-mnist-silo-fresh"] = lead("rf-tab1", plus, "FedAvg", "MNIST, Sim 0%")
    found["rf-gain-cifar-silo"] = lead("rf-tab1", plus, theirs, "CIFAR10, Sim 0%")
    for key in ("rf-gain-cifar", "rf-gain-cifar-tuned"):
        found[key] = lead("rf-tab1", plus, "FedAvg", "CIFAR10, Sim 0%")
    found["rf-gain-cifar-device"] = lead("rf-tab2", plus, "FedAvg", "CIFAR10, Sim 0%")
    found["rf-plus-over-rfedavg"] = lead("rf-tab2", plus, "rFedAvg", "CIFAR10, Sim 0%")
    sims = [f"MNIST, Sim {s}%" for s in (0, 10, 100)]
    found["rf-gain-skew"] = slope(
        [0, 0.1, 1], [lead("rf-tab1", plus, "FedAvg", sim) for sim in sims]
    )
    found["rf-similarity-helps"] = slope(
        [0, 0.1, 1], [cell("rf-tab1", "FedAvg", sim) for sim in sims]
    )
    found["rf-alike"] = max(
        lead("rf-tab1", plus, other, sims[2]) for other in [*theirs.split(", "), "rFedAvg"]
    )
    found["rf-baselines-worse"] = lead("rf-tab2", "FedAvg", "FedProx, q-FedAvg", sims[0])
    of = tables["rf-tab2"]
    place = of["columns"].index("CIFAR10, Sim 0%")
    found["rf-stable"] = of["rows"][plus][place][1] - of["rows"]["FedAvg"][place][1]
    size = tables["rf-tab3"]["rows"]["rFedAvg"]
    found |= {"rf-bytes-rfedavg": size[0] / 20, "rf-bytes-plus": 0}
    assert size[0] / 20 == size[2] / 100, "20 and 100 clients"
    return found


def test_the_printed_effects_are_those_of_the_tables(ours: dict[str, Claims]) -> None:
    """FedAvg's accuracy is that of a cell of the paper's tables."""
    for paper, claims in ours.items():
        tables = YAML(typ="safe").load(ROOT / f"research/papers/{paper}/reported.yaml")
        scale = 100 if paper == "fnr" else 1
        cells = [
            scale * (cell[0] if isinstance(cell, list) else cell)
            for of in tables.values()
            for row, found in of["rows"].items()
            for cell in found
            if "FedAvg" in (row, *of["columns"]) and isinstance(cell, int | float | list)
        ]
        for one in claims.every.values():
            printed = one.claim.printed
            assert not isinstance(printed, dict) or {*one.claim.scenarios} <= {*printed}, one.id
            for of in printed.values() if isinstance(printed, dict) else [printed]:
                if of is not None and of.fedavg is not None:
                    assert min(abs(cell - of.fedavg) for cell in cells) < 1e-9, one.id
    every = [one for claims in ours.values() for one in claims.every.values()]
    stated = {one.id: one.claim.printed for one in every if one.claim.printed}
    expected = printed_by_table()
    by_id = {one.id: one for one in every}
    expected |= {
        f"{key}-fresh": expected[key]
        for key in {*expected}
        if f"{key}-fresh" in stated and by_id[f"{key}-fresh"].claim.less == by_id[key].claim.less
    }
    assert stated.keys() == expected.keys()
    for key, one in stated.items():
        by = {of: x.effect for of, x in one.items()} if isinstance(one, dict) else one.effect
        assert by == pytest.approx(expected[key], abs=5e-3), key


def test_known_runs_behind_a_cause_are_named(ours: dict[str, Claims]) -> None:
    """A run of a study of claims has the same fingerprint, so its numbers had been seen."""
    runs = pd.DataFrame(table(ROOT / "docs" / "results" / "claims-runs.csv"))
    runs["cell"] = runs["item"].str.rsplit("-", n=1).str[0]
    for paper, claims in ours.items():
        own = runs[(runs["paper"] == paper) & (runs["fingerprint"] != "")]
        read = {
            (one.claim.study, f"{s}-{r}")
            for one in claims.claims.values()
            for s, r in one.claim.cells
        }
        is_read = [place in read for place in zip(own["study"], own["cell"], strict=True)]
        known = set(own[is_read]["fingerprint"])
        for why in claims.whys.values():
            seen = own[(own["study"] == why.claim.study) & own["fingerprint"].isin(known)]
            cells = {f"{s}-{r}": r for s, r in why.claim.cells}
            found = {cells[cell] for cell in set(seen["cell"]) & set(cells)}
            assert found == set(why.claim.seen), why.id
