"""FedNNNN's tables and figures: all are there, they read what they should, and say what follows
from the numbers."""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report as paper
from fedml_noniid.pipelines.papers import study
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import SIZES, of_paper
from fedml_noniid.pipelines.papers.targets import Target, build, builder, of_targets
from fedml_noniid.plugins.core.errors import UserError
from papers.fednnnn import figures
from tests.pipelines.by_hand import sound
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

FOLDER = ROOT / "pipelines" / "papers" / "fednnnn"
# 1, 2, 5 and 6 are drawings without data.
FIGURES = [3, 4, *range(7, 34)]
TABLES = [1, 2, 3, 4, 5]
SCENARIOS = ("iid-b", "noniid-b", "iid-ub", "noniid-ub")
STUDIES = [
    "mnist-single",
    *(f"{data}-{scenario}" for data in ("mnist", "cifar") for scenario in SCENARIOS),
]
METHODS = ("FedAvg", "FedProx", "Norm-Norm", "Momentum", "FedNNNN")

TOY = """\
study_names: [toy]
studies:
  toy:
    data: {name: digits, validation: 0, public: 0}
    scenarios: {some: {partition: iid, clients: 2}}
    recipes: {fedavg: {}, fedprox: {}, fednnnn: {}, scaffold: {}}
    seeds: [0]
    train: {model: mlp, rounds: 4, epochs: 1, batch_size: 50, lr: 0.1}
"""
LINES = {"FedAvg": "fedavg", "FedProx": "fedprox", "FedNNNN": "fednnnn"}
WHERE = {"study": "toy", "scenario": "some"}


def targets() -> dict[str, Target]:
    return of_targets("fednnnn", ROOT)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository with one study of the paper, of which nothing has been run."""
    (tmp_path / "pipelines" / "papers" / "fednnnn").mkdir(parents=True)
    (tmp_path / "pipelines" / "papers" / "fednnnn" / "params.yaml").write_text(TOY)
    return tmp_path


def ran(root: Path, recipe: str, seed: int = 0, **columns: Sequence[float]) -> None:
    """A finished run of the toy study with these columns of rounds.csv."""
    folder = (
        root
        / "papers"
        / "built"
        / "fednnnn"
        / "smoke"
        / "studies"
        / "toy"
        / "runs"
        / f"some-{recipe}-{seed}"
    )
    folder.mkdir(parents=True)
    columns = {"test_accuracy": [0.5] * len(next(iter(columns.values()))), **columns}
    names = ["round", "bytes_up", "bytes_down", *columns]
    lines = [",".join(names)]
    for t, values in enumerate(zip(*columns.values(), strict=True), start=1):
        lines.append(",".join(map(str, (t, 1, 1, *values))))
    (folder / "rounds.csv").write_text("\n".join(lines) + "\n")
    record = {
        "scenario": "some",
        "recipe": recipe,
        "composition": recipe,
        "seed": seed,
        "weights_sha256": "0",
    }
    (folder / "run.json").write_text(
        json.dumps(
            record | {"params": {}, "rounds": len(lines) - 1, "tags": {}, "final": {}, "notes": []}
        )
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def target(kind: str, panels: Sequence[Mapping[str, str]], **spec: Any) -> Target:
    whole = {
        "kind": kind,
        "panels": [{**WHERE, **panel} for panel in panels],
        "lines": LINES,
        **spec,
    }
    return Target("nnnn-fig0", "fednnnn", kind, "Toy", (), whole, None)


def test_every_table_and_figure_with_data_is_there() -> None:
    found = targets()
    assert sorted(found) == sorted(
        [f"nnnn-tab{n}" for n in TABLES] + [f"nnnn-fig{n}" for n in FIGURES]
    )
    for one in found.values():
        assert callable(builder(one)) and one.protocol and one.title


def test_the_paper_s_titles_and_ours_are_the_same() -> None:
    """But for the columns of the last round, which the paper lacks."""
    found, reported = targets(), read_yaml(FOLDER / "reported.yaml")
    assert sorted(reported) == [f"nnnn-tab{n}" for n in TABLES]
    for name in ("nnnn-tab1", "nnnn-tab2", "nnnn-tab5"):
        assert list(found[name].spec["rows"]) == list(reported[name]["rows"])
        ours = [
            title for title in found[name].spec["columns"] if not title.endswith(", last round")
        ]
        assert ours == reported[name]["columns"]
    last = {
        title: of
        for title, of in found["nnnn-tab2"].spec["columns"].items()
        if title.endswith(", last round")
    }
    assert [title.removesuffix(", last round") for title in last] == reported["nnnn-tab2"][
        "columns"
    ]
    assert {of["statistic"] for of in last.values()} == {"final"}


def test_each_column_of_table_2_reads_its_own_study() -> None:
    scenarios = {
        "IID - B": "iid-b",
        "non-IID - B": "noniid-b",
        "IID - UB": "iid-ub",
        "non-IID - UB": "noniid-ub",
    }
    one = targets()["nnnn-tab2"]
    for title, of in one.spec["columns"].items():
        scenario, data = title.removesuffix(", last round").split(", ")
        study_name = f"{'mnist' if data == 'MNIST' else 'cifar'}-{scenarios[scenario]}"
        assert (of["study"], of["scenario"]) == (study_name, scenarios[scenario])
    recipes = {
        "FedAvg": "fedavg",
        "FedProx": "fedprox",
        "Norm-Norm": "norm-norm",
        "Momentum": "momentum",
    }
    assert one.spec["rows"] == {
        name: {"recipe": recipe} for name, recipe in (recipes | {"FedNNNN": "fednnnn"}).items()
    }
    assert one.spec["claim"] == "FedNNNN" and one.spec["statistic"] == "best"


def test_a_table_without_a_unit_is_introduced_without_one() -> None:
    assert (
        paper.about(targets()["nnnn-tab1"])
        == "Table 1 of the paper. In brackets what the paper reports."
    )
    assert "(%)" in paper.about(targets()["nnnn-tab2"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_valid_experiment(name: str, size: str, tmp_path: Path) -> None:
    found = of_paper("fednnnn", size, ROOT)
    assert sorted(found) == sorted(STUDIES)
    settings = sound(found[name], tmp_path)
    assert settings.data.validation == 0 or size == "small"
    if size == "paper":
        assert settings.seeds == [0, 1, 2]
    if size == "smoke":
        assert settings.data.name == "digits" and settings.train.rounds == 2


@pytest.mark.parametrize(("name", "cells"), [("nnnn-tab1", 16), ("nnnn-tab5", 40)])
def test_the_paper_s_settings_are_those_that_are_run(name: str, cells: int) -> None:
    built = build(targets()[name], Measured("fednnnn", "paper", ROOT))
    assert built.words == (f"{cells} of {cells} settings are the paper's.",)
    assert not any("(" in cell for row in built.table[1:] for cell in row[1:])


def test_the_methods_are_the_paper_s_variants() -> None:
    """Equation 8 is norm_norm, equations 10 and 11 are momentum; weights are uniform wherever sizes
    differ."""
    for name, one in of_paper("fednnnn", "paper", ROOT).items():
        recipes = one.content["recipes"]
        if name == "mnist-single":
            assert recipes == {"fedavg": {}}
            continue
        assert recipes["norm-norm"]["fednnnn"]["variant"] == "norm_norm"
        assert recipes["momentum"]["fednnnn"]["variant"] == "momentum"
        assert "variant" not in recipes["fednnnn"]["fednnnn"]
        uniform = {"variant": "momentum", "gamma": 0.0}
        if name.endswith("-ub"):
            assert recipes["fedavg"] == {"recipe": "fednnnn", "fednnnn": uniform}
            assert (
                recipes["fedprox"]["recipe"] == "fedprox+fednnnn"
                and recipes["fedprox"]["fednnnn"] == uniform
            )
            assert recipes["fedavg-by-size"] == {"recipe": "fedavg"}
        else:
            assert recipes["fedavg"] == {} and list(recipes["fedprox"]) == ["fedprox"]


@pytest.mark.parametrize("size", SIZES)
def test_every_address_leads_to_a_run(size: str) -> None:
    """At size paper all of them; a smaller size may leave methods out, but names nothing that does
    not exist."""
    measured = Measured("fednnnn", size, ROOT)
    for one in targets().values():
        if one.kind not in ("accuracy", "norms", "path"):
            continue
        for panel in one.spec["panels"]:
            for of in one.spec["lines"].values():
                address = {**panel, **(of if isinstance(of, Mapping) else {"recipe": of})}
                content = measured.studies[address["study"]].content
                assert (
                    address["scenario"] in content["scenarios"]
                    and address["recipe"] in content["recipes"]
                )
                assert measured.is_wanted(address) or size == "small"


def test_each_figure_of_the_appendix_has_its_scenario() -> None:
    """Figures 10 to 33: two data sets, four scenarios, and of each accuracy, dense layers,
    convolutions."""
    found, number = targets(), 10
    for data in ("mnist", "cifar"):
        for scenario in SCENARIOS:
            parts = ((None,), ("fc",), ("conv",))
            for (group,), kind in zip(parts, ("accuracy", "norms", "norms"), strict=True):
                one = found[f"nnnn-fig{number}"]
                assert one.kind == kind and one.studies == (f"{data}-{scenario}",)
                columns = [panel.get("column") for panel in one.spec["panels"]]
                server, client = f"update_norm_server_{group}", f"update_norm_client_{group}"
                assert columns == ([None] if group is None else [server, client])
                assert tuple(one.spec["lines"])[:5] == METHODS
                number += 1
    for main, appendix in ((7, 25), (8, 26), (9, 27)):
        ours, other = (copy.deepcopy(dict(found[f"nnnn-fig{n}"].spec)) for n in (main, appendix))
        assert ours == other


def test_accuracy_says_who_reaches_the_baseline_first(toy: Path) -> None:
    """FedAvg's mean over seeds is 0.125, 0.5, 0.25, 0.375: at best 0.5."""
    ran(toy, "fedavg", 0, test_accuracy=[0.125, 0.25, 0.25, 0.25])
    ran(toy, "fedavg", 1, test_accuracy=[0.125, 0.75, 0.25, 0.5])
    ran(toy, "fedprox", 0, test_accuracy=[0.125, 0.25, 0.375, 0.25])
    ran(toy, "fednnnn", 0, test_accuracy=[0.25, 0.25, 0.5, 0.625])
    built = build(
        target("accuracy", [{"title": "P"}], scale=100), Measured("fednnnn", "smoke", toy)
    )
    assert built.words[:2] == (
        (
            "FedAvg's best over the rounds, 50.00, is first reached in round: FedAvg 2, FedProx "
            "never, FedNNNN 3."
        ),
        "Best over the rounds: FedNNNN (62.50).",
    )
    assert built.missing == () and built.files["png"].startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(built.files["csv"].decode())))
    assert len(rows) == 4 * 4 and rows[0]["value"] == "12.5"


def test_accuracy_without_the_baseline_says_what_is_missing(toy: Path) -> None:
    ran(toy, "fednnnn", 0, test_accuracy=[0.25, 0.5])
    built = build(target("accuracy", [{"title": "P"}]), Measured("fednnnn", "smoke", toy))
    assert (
        built.missing == ("P, FedAvg", "P, FedProx") and built.words == () and "png" in built.files
    )


def test_norms_compare_the_claim_and_give_n_over_e(toy: Path) -> None:
    """N: 2/1, 3/1, 3/2, 2/4: above in three rounds, 2.5 times and once.

    E: 1/2, 1/4, 8/4, 4/16. N / E by hand.
    """
    ran(toy, "fedavg", n=[1, 1, 2, 4], e=[2, 4, 4, 16])  # N / E: 1/2, 1/4, 1/2, 1/4
    ran(toy, "fednnnn", n=[2, 3, 3, 2], e=[1, 1, 8, 4])  # 2, 3, 3/8, 1/2
    panels = [{"title": "N", "column": "n"}, {"title": "E", "column": "e"}]
    one = target("norms", panels, claim="FedNNNN", against=["FedAvg", "FedProx"])
    built = build(one, Measured("fednnnn", "smoke", toy))
    assert built.words[:3] == (
        "N: FedNNNN is above FedAvg in 3 of 4 rounds, 2.50 times as large in the first half of "
        "them on average, 1.00 "
        "times in the second.",
        "E: FedNNNN is above FedAvg in 1 of 4 rounds, 0.38 times as large in the first half of "
        "them on average, 1.12 "
        "times in the second.",
        "N / E, mean over the rounds: FedAvg 0.375, FedNNNN 1.47.",
    )
    assert built.missing == ("N, FedProx", "E, FedProx")


def test_norms_without_any_run_are_missing(toy: Path) -> None:
    panels = [{"title": "N", "column": "n"}, {"title": "E", "column": "e"}]
    built = build(target("norms", panels), Measured("fednnnn", "smoke", toy))
    assert built.files == {} and len(built.missing) == 6 and built.words == ()


def test_path_tells_a_line_that_stops_from_one_that_goes_on(toy: Path) -> None:
    """After two of four rounds FedAvg has gone 2 of 8, FedNNNN 9 of 10."""
    ran(toy, "fedavg", s=[1, 2, 4, 8])
    ran(toy, "fednnnn", s=[5, 9, 9.5, 10])
    built = build(
        target("path", [{"title": "S", "column": "s"}]), Measured("fednnnn", "smoke", toy)
    )
    said = (
        "Fraction of the whole way that lies in the second half of the rounds: FedAvg 75 %, "
        "FedNNNN 10 %."
    )
    assert built.words[0] == said


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
    built = build(targets()[name], Measured("fednnnn", "smoke", ROOT))
    assert (
        built.words[0]
        == f"{entries} of the {entries} entries that the paper prints are this network's."
    )
    assert built.words[1].startswith(f"{total} parameters")
    counts = [sum(p.numel() for p in module.parameters()) for module in by_torch(name)]
    ours = [row[-1] for row in built.table[2:]]  # below the header and the input
    assert ours == [f"{count:,}" if count else "-" for count in counts]


def test_a_network_that_differs_from_the_paper_is_said() -> None:
    one = targets()["nnnn-tab4"]
    other = copy.deepcopy(dict(one.reported or {}))
    other["rows"]["Fc1"][1] = 384
    changed = Target(one.id, one.paper, one.kind, one.title, one.protocol, one.spec, other)
    built = figures.network(changed, Measured("fednnnn", "smoke", ROOT))
    assert (
        built.words[0].startswith("42 of the 43 entries")
        and "not: Fc1, Output (c, w, h)." in built.words[0]
    )
    assert next(row for row in built.table if row[0] == "Fc1")[2] == "382 (384)"
    del other["rows"]["Fc2"]
    with pytest.raises(UserError, match=r"nnnn-tab4: the rows of reported\.yaml are Input, Conv11"):
        figures.network(changed, Measured("fednnnn", "smoke", ROOT))


def test_a_network_with_other_blocks_is_refused() -> None:
    one = targets()["nnnn-tab4"]
    spec = {**one.spec, "model": "resnet18"}
    changed = Target(one.id, one.paper, one.kind, one.title, one.protocol, spec, one.reported)
    with pytest.raises(UserError, match="nnnn-tab4: model 'resnet18' is refused"):
        figures.network(changed, Measured("fednnnn", "smoke", ROOT))


def test_a_smoke_study_becomes_cells_and_curves(tmp_path: Path) -> None:
    """One of the eight studies of table 2: its cells have numbers, the others say that they are not
    run yet."""
    shutil.copytree(
        FOLDER,
        tmp_path / "pipelines" / "papers" / "fednnnn",
        ignore=shutil.ignore_patterns("__pycache__", "dvc.lock"),
    )
    one = of_paper("fednnnn", "smoke", tmp_path)["mnist-noniid-ub"]
    study.execute(Workspace.of(tmp_path, {}), one)
    found = of_targets("fednnnn", tmp_path)
    wanted = {name: found[name] for name in ("nnnn-tab2", "nnnn-fig19", "nnnn-fig20")}
    place = paper.write("fednnnn", "smoke", tmp_path, wanted).folder
    rows = table(place / "nnnn-tab2.csv")
    run = [row for row in rows if row["measured"]]
    assert {row["column"] for row in run} == {
        "non-IID - UB, MNIST",
        "non-IID - UB, MNIST, last round",
    }
    assert [row["row"] for row in run] == [method for method in METHODS for _ in range(2)]
    for best, last in zip(run[::2], run[1::2], strict=True):
        assert float(best["measured"]) >= float(last["measured"])
    assert "not run yet (81.3)" in (place / "nnnn-tab2.md").read_text()
    # FedAvg's N is at most its E; FedNNNN stretches the same first average by beta E / N, which is
    # above 1 here.
    norms: dict[tuple[str, str], list[float]] = {}
    for row in table(place / "nnnn-fig20.csv"):
        norms.setdefault((row["panel"][0], row["line"]), []).append(float(row["value"]))
    assert all(
        n <= e * (1 + 1e-6) for n, e in zip(norms["N", "FedAvg"], norms["E", "FedAvg"], strict=True)
    )
    assert norms["N", "FedNNNN"][0] > norms["N", "FedAvg"][0]
    assert norms["E", "FedNNNN"][0] == pytest.approx(
        norms["E", "FedAvg"][0]
    )  # the first round trains the same model
    for name in ("nnnn-fig19", "nnnn-fig20"):
        assert 1000 < len((place / f"{name}.png").read_bytes()) < 200_000
    curves = {row["line"] for row in table(place / "nnnn-fig19.csv")}
    assert curves == {*METHODS, "FedAvg by size"}
