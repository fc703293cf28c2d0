"""rFedAvg's studies, tables and figures: the paper's list and settings, and pictures' numbers
worked out by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies, study
from fedml_noniid.pipelines.papers.report import write
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import SIZES, of_paper
from fedml_noniid.pipelines.papers.targets import Built, Target, address, build, builder, of_targets
from fedml_noniid.plugins.data.datasets import load
from fedml_noniid.plugins.data.readers.cifar import CLASSES as CIFAR10
from papers.rfedavg import figures
from papers.rfedavg.features import Shown, chosen, discrepancy, of_clients
from tests.data import test_leaf as leaf
from tests.data.reading import draw, idx
from tests.pipelines.by_hand import sound
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

FILES = ("params.yaml", "targets.yaml", "reported.yaml")
TARGETS = [*(f"rf-fig{i}" for i in range(1, 13)), "rf-tab1", "rf-tab2", "rf-tab3"]
METHODS = ["fedavg", "fedprox", "scaffold", "qfedavg", "rfedavg", "rfedavg_plus"]
FEMNIST = {"femnist-low", "femnist-high", "femnist-low-fedprox", "femnist-high-fedprox"}
DOWNLOADED = {"sent140-silo", "sent140-device"} | FEMNIST
DEAR = {"cifar-privacy", "cifar-epochs-5", "cifar-epochs-20"}  # for a CPU


# The paper's list and its settings


def test_every_table_and_figure_of_the_paper_is_a_target() -> None:
    assert sorted(of_targets("rfedavg", ROOT)) == sorted(TARGETS)


@pytest.mark.parametrize("name", ["rf-tab1", "rf-tab2", "rf-tab3"])
def test_a_tables_titles_are_the_papers(name: str) -> None:
    target = of_targets("rfedavg", ROOT)[name]
    assert target.reported is not None
    rows = [
        title for title in target.spec["rows"] if not title.endswith(", really sent")
    ]  # which the paper lacks
    assert rows == list(target.reported["rows"])
    assert list(target.spec["columns"]) == list(target.reported["columns"])


def test_what_is_titled_for_single_places_names_places_that_exist() -> None:
    for target in of_targets("rfedavg", ROOT).values():
        panels = {panel["title"] for panel in target.spec.get("panels", ())}
        places = panels | set(target.spec.get("columns", ()))
        lines = [
            *dict(target.spec.get("lines", {})).values(),
            *dict(target.spec.get("rows", {})).values(),
        ]
        for line in lines:
            assert set(line.get("at", {}) if isinstance(line, Mapping) else ()) <= places, target.id


@pytest.mark.parametrize("size", SIZES)
def test_every_study_is_valid_at_every_size(size: str, tmp_path: Path) -> None:
    skipped = set()
    for one in of_paper("rfedavg", size, ROOT).values():
        if not one.is_run:
            skipped.add(one.name)
            continue
        settings = sound(one, tmp_path)
        if size == "smoke":
            assert settings.data.name in ("digits", "made_tweets"), one.name
        if size == "small":
            assert settings.data.name in ("mnist", "cifar10") and len(settings.seeds) == 8, one.name
        if size == "paper":
            assert settings.seeds == [0, 1, 2], one.name
    assert skipped == (DOWNLOADED | DEAR if size == "small" else set())


def test_every_target_reads_runs_that_size_paper_has() -> None:
    """Each address of a table, of curves and of the figures leads to a study that runs it."""
    measured = Measured("rfedavg", "paper", ROOT)
    for target in of_targets("rfedavg", ROOT).values():
        built = build(target, measured)
        assert built.missing and "not run at this size" not in built.missing, target.id
    tables = {
        "rf-tab1": 6 * 8,
        "rf-tab2": 6 * 8,
        "rf-tab3": 4 * 4,
        "rf-fig2": 6 * 4,
        "rf-fig12": 5 * 2,
    }
    for name, n in tables.items():
        assert len(build(of_targets("rfedavg", ROOT)[name], measured).missing) == n, name
    # FedAvg, rFedAvg and rFedAvg+ at 5 + 5 + 4 + 4 points; FedAvg has one for lambda, shared by
    # three panels.
    nine = build(of_targets("rfedavg", ROOT)["rf-fig9"], measured)
    assert len(nine.missing) == 2 * (5 + 5 + 4 + 4) + (1 + 5 + 4 + 4)


@pytest.mark.parametrize(
    ("study", "clients", "share", "epochs", "batch", "rounds", "lr", "optimizer"),
    [
        ("mnist-silo", 20, 1.0, 5, 100, 60, 0.1, "sgd"),
        ("mnist-device", 500, 0.2, 10, 32, 60, 0.1, "sgd"),
        ("mnist-device-fedprox", 500, 0.2, 10, 32, 60, 0.01, "sgd"),
        ("cifar-silo", 20, 1.0, 5, 100, 200, 0.1, "sgd"),
        ("cifar-device", 500, 0.2, 10, 32, 200, 0.1, "sgd"),
        ("cifar-device-fedprox", 500, 0.2, 10, 32, 200, 0.01, "sgd"),
        ("sent140-silo", 20, 1.0, 5, 10, 30, 0.01, "rmsprop"),
        ("sent140-device", 500, 0.2, 10, 10, 30, 0.01, "rmsprop"),
    ],
)
def test_size_paper_is_section_vi_a(
    study: str,
    clients: int,
    share: float,
    epochs: int,
    batch: int,
    rounds: int,
    lr: float,
    optimizer: str,
) -> None:
    content = of_paper("rfedavg", "paper", ROOT)[study].content
    for name in content["scenario_names"]:
        scenario = content["scenarios"][name]
        assert (scenario["clients"], scenario.get("participation", 1.0)) == (clients, share)
        if scenario["partition"] == "similarity":
            assert scenario["s"] == {"sim0": 0, "sim10": 0.1, "sim100": 1}[name]
    train = content["train"]
    assert (train["epochs"], train["batch_size"], train["rounds"], train["lr"]) == (
        epochs,
        batch,
        rounds,
        lr,
    )
    assert train.get("optimizer", "sgd") == optimizer


@pytest.mark.parametrize(
    ("data", "lam", "mu", "q"),
    [("mnist", 1e-4, 1, 1), ("cifar", 1e-5, 1, 1), ("sent140", 0.1, 0.01, 1e-4)],
)
def test_the_methods_coefficients_are_the_papers(
    data: str, lam: float, mu: float, q: float
) -> None:
    found = of_paper("rfedavg", "paper", ROOT)
    for setting in ("silo", "device"):
        recipes = found[f"{data}-{setting}"].content["recipes"]
        assert list(recipes) == METHODS
        assert (
            recipes["rfedavg"]["rfedavg"] == recipes["rfedavg_plus"]["rfedavg_plus"] == {"lam": lam}
        )
        assert recipes["fedprox"]["fedprox"] == {"mu": mu} and recipes["qfedavg"]["qfedavg"] == {
            "q": q
        }
        # Option I under RMSProp.
        scaffold = "scaffold_i" if data == "sent140" else "scaffold"
        assert recipes["scaffold"].get("recipe", "scaffold") == scaffold
        assert recipes["scaffold"][scaffold] == {"server_lr": 1.0}


@pytest.mark.parametrize("size", ["paper", "small"])
def test_fedprox_alone_has_a_tenth_of_the_step_size_across_devices(size: str) -> None:
    """Section VI-A: "SGD with learning rate 0.1 (0.01 for FedProx on cross-device settings
    ...)"."""
    found = set()
    for one in of_paper("rfedavg", size, ROOT).values():
        content, train = one.content, one.content["train"]
        shares = [
            content["scenarios"][name].get("participation", 1.0)
            for name in content["scenario_names"]
        ]
        if not shares or train.get("optimizer", "sgd") != "sgd":
            continue
        methods = {content["recipes"][name].get("recipe", name) for name in content["recipe_names"]}
        across_devices = max(shares) < 1
        assert across_devices or min(shares) == 1, one.name
        slow = {"fedprox"} if across_devices else set()
        assert train["lr"] == (0.01 if methods & slow else 0.1) and methods & slow in (
            set(),
            methods,
        ), one.name
        found |= {(across_devices, content["data"]["name"])} if "fedprox" in methods else set()
    devices = ["mnist", "cifar10", "femnist"] if size == "paper" else ["mnist", "cifar10"]
    assert found >= {(True, name) for name in devices}


def test_every_panel_of_femnist_has_fedprox_with_its_step_size() -> None:
    spec = of_targets("rfedavg", ROOT)["rf-fig8"].spec
    found = of_paper("rfedavg", "paper", ROOT)
    for panel in spec["panels"]:
        rates = {}
        for title, line in spec["lines"].items():
            own = line if isinstance(line, Mapping) else {"recipe": line}
            read = address("rf-fig8", panel["title"], panel, own)
            content = found[str(read["study"])].content
            assert (
                read["recipe"] in content["recipe_names"]
                and read["scenario"] in content["scenario_names"]
            )
            rates[title] = content["train"]["lr"]
        assert rates == dict.fromkeys(rates, 0.1) | {"FedProx": 0.01} and len(rates) == 6


# The authors' code: datasets.MNIST with Normalize((0.1307,), (0.3081,)), CIFAR10 and EMNIST with
# 0.5 and 0.5.
PIXELS = {
    "mnist": ((0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081),
    "cifar10": (-1.0, 1.0),
    "femnist": (-1.0, 1.0),
}


@pytest.fixture(scope="module")
def black_and_white(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of MNIST, CIFAR-10 (as images) and FEMNIST with a black and a white test image, among
    more white ones."""
    root = tmp_path_factory.mktemp("raw")
    both = [0, 255]
    for part, values in (("train", [0, *[255] * 9]), ("t10k", both)):
        images = np.repeat(values, 28 * 28).reshape(-1, 28, 28)
        (root / "MNIST" / "raw").mkdir(parents=True, exist_ok=True)
        (root / "MNIST" / "raw" / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (root / "MNIST" / "raw" / f"{part}-labels-idx1-ubyte").write_bytes(
            idx(np.arange(len(values)))
        )
    for part in ("train", "test"):
        for name in CIFAR10:
            for value in both:
                draw(root / "cifar10" / part / name / f"{value}.png", size=(32, 32), value=value)
        writers = {"f0": (np.repeat([both], 784, 0).T, [0, 1])}
        leaf.write(root / "femnist" / part / "all_data.json", writers)
    return root


@pytest.mark.parametrize("size", ["paper", "small"])
def test_pixels_are_normalised_as_in_the_authors_code(size: str, black_and_white: Path) -> None:
    """The whole range of the test images of every study, by what they hold and not by how it is
    written."""
    found = set()
    for one in of_paper("rfedavg", size, ROOT).values():
        data = dict(one.content["data"])
        if data["name"] not in PIXELS:
            continue
        others = ("name", "root", "validation", "public", "samples")
        options = {key: value for key, value in data.items() if key not in others}
        for part in ("train", "test"):
            x = load(data["name"], black_and_white, **options).normalised(part)
            assert (x.min().item(), x.max().item()) == pytest.approx(
                PIXELS[data["name"]], rel=1e-6
            ), one.name
        found.add(data["name"])
    assert found == set(PIXELS)


def test_noise_is_scaled_by_the_batch_of_its_study() -> None:
    """`L` is not read from the training: its default of 100 has to be the study's batch."""
    for name in ("mnist-privacy", "cifar-privacy"):
        content = of_paper("rfedavg", "paper", ROOT)[name].content
        assert content["train"]["batch_size"] == 100
        sigmas = [entry["rfedavg_plus"].get("sigma", 0) for entry in content["recipes"].values()]
        assert sigmas == [0, 1, 5, 10, 20]


# Results made by hand


def made(root: Path, content: str) -> Measured:
    """A repository with one paper whose params.yaml is `content`, and no results yet."""
    folder = root / "pipelines" / "papers" / "rfedavg"
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text(content)
    return Measured("rfedavg", "paper", root)


def run(
    measured: Measured,
    study: str,
    key: tuple[str, str, int],
    accuracies: Sequence[float],
    params: Mapping[str, object] | None = None,
    evaluation: Mapping[str, float] | None = None,
    clients: Sequence[float | str] = (),
    columns: Mapping[str, Sequence[float]] | None = None,
    seconds: float = 0,
) -> None:
    """A finished run of (scenario, recipe, seed) with these accuracies by round."""
    scenario, recipe, seed = key
    name = f"{scenario}-{recipe}-{seed}"
    folder, out = (measured.folder(study) / kind / name for kind in ("runs", "evaluation"))
    folder.mkdir(parents=True)
    out.mkdir(parents=True)
    record = {
        "scenario": scenario,
        "recipe": recipe,
        "composition": recipe.split("-")[0],
        "seed": seed,
        "final": {},
    }
    own = {"train.rounds": len(accuracies), **(params or {})}
    record |= {
        "params": own,
        "tags": {"fingerprint": name},
        "weights_sha256": "",
        "notes": [],
        "rounds": len(accuracies),
    }
    if seconds:
        made = cache.folder_of(measured.root, name) / cache.MADE
        made.parent.mkdir(parents=True)
        made.write_text(json.dumps({"seconds": [seconds] * len(accuracies)}))
    (folder / "run.json").write_text(json.dumps(record))
    by_column = {"round": range(1, len(accuracies) + 1), "test_accuracy": accuracies}
    by_column |= {name: [0] * len(accuracies) for name in ("bytes_up", "bytes_down")} | dict(
        columns or {}
    )
    lines = [
        ",".join(by_column),
        *(",".join(map(str, row)) for row in zip(*by_column.values(), strict=True)),
    ]
    (folder / "rounds.csv").write_text("\n".join(lines) + "\n")
    (out / "metrics.json").write_text(json.dumps(dict(evaluation or {})))
    lines = ["client,samples,accuracy,test_samples,test_accuracy"]
    lines += [f"{client},1,0.5,1,{value}" for client, value in enumerate(clients)]
    (out / "per_client.csv").write_text("\n".join(lines) + "\n")


def target(kind: str, spec: Mapping[str, Any]) -> Target:
    return Target("rf-x", "rfedavg", kind, "x", (), spec, spec.get("reported"))


def cells(built: Built) -> list[list[str]]:
    return list(csv.reader(io.StringIO(built.files["csv"].decode())))[1:]


def is_picture(built: Built) -> bool:
    return built.files["png"].startswith(b"\x89PNG") and len(built.files["png"]) < 200_000


THREE = """
study_names: [s]
studies:
  s:
    data: {name: digits}
    scenarios: {a: {clients: 2}, b: {clients: 2}}
    recipes: {fedavg: , rfedavg: , rfedavg_plus: }
"""
LINES = {"FedAvg": "fedavg", "rFedAvg": "rfedavg", "rFedAvg+": "rfedavg_plus"}


def test_rounds_to_a_level_and_times(tmp_path: Path) -> None:
    """FedAvg's mean curve is 10, 20, 30, 40 %: half of its best is 20 %."""
    measured = made(tmp_path, THREE)
    for seed, curve in enumerate([(0.05, 0.2, 0.25, 0.35), (0.15, 0.2, 0.35, 0.45)]):
        run(measured, "s", ("a", "fedavg", seed), curve, seconds=1 + 2 * seed)
    run(measured, "s", ("a", "rfedavg", 0), (0.05, 0.1, 0.15, 0.25), seconds=8)
    run(measured, "s", ("a", "rfedavg_plus", 0), (0.2, 0.41, 0.3, 0.5), seconds=4)
    place = {"study": "s", "scenario": "a"}
    spec = {
        "lines": LINES,
        "baseline": "FedAvg",
        "levels": [0.5, 1.0],
        "rounds": [{"title": "r", **place}],
        "seconds": [{"title": "t", "bars": {"sim": place}}],
    }
    built = figures.efficiency(target("efficiency", spec), measured)
    assert cells(built) == [
        ["r", "20.0", "FedAvg", "2.0"],
        ["r", "20.0", "rFedAvg", "4.0"],
        ["r", "20.0", "rFedAvg+", "1.0"],
        ["r", "40.0", "FedAvg", "4.0"],
        ["r", "40.0", "rFedAvg", ""],
        ["r", "40.0", "rFedAvg+", "2.0"],
        ["t", "sim", "FedAvg", "2.0"],
        ["t", "sim", "rFedAvg", "8.0"],
        ["t", "sim", "rFedAvg+", "4.0"],
    ]
    assert built.words == (
        "r: 40.0 % are reached by FedAvg in round 4, rFedAvg does not, rFedAvg+ in round 2.",
        "t, sim: of rFedAvg's 8 s per round FedAvg takes 0.25, rFedAvg+ takes 0.50.",
    )
    assert is_picture(built) and built.missing == ()


def test_a_parameters_points_lie_where_their_runs_say(tmp_path: Path) -> None:
    """The means of the last five of six rounds; FedAvg has no lambda and is a level line."""
    measured = made(tmp_path, THREE)
    for seed, last in enumerate((0.3, 0.5)):
        run(measured, "s", ("a", "fedavg", seed), (0.9, *[last] * 5), {"scenario.clients": 50})
    run(measured, "s", ("a", "rfedavg", 0), (0.9, 0.1, 0.2, 0.3, 0.4, 0.5), {"rfedavg.lam": 1e-5})
    run(measured, "s", ("b", "rfedavg", 0), (0.9, 0.2, 0.2, 0.2, 0.2, 0.2), {"rfedavg.lam": 1e-3})
    points = [
        {"study": "s", "scenario": "a"},
        {"study": "s", "scenario": "b", "recipes": {"rFedAvg": "rfedavg"}},
    ]
    panel = {"title": "p", "x": "lambda", "key": "{method}.lam", "log": True, "points": points}
    spec = {
        "statistic": "last5",
        "lines": {"FedAvg": "fedavg", "rFedAvg": "rfedavg"},
        "panels": [panel],
    }
    built = figures.parameter_study(target("parameter-study", spec), measured)
    found = {(row[1], row[2]): row[3:] for row in cells(built)}
    assert set(found) == {("FedAvg", ""), ("rFedAvg", "1e-05"), ("rFedAvg", "0.001")}
    mean, std, n = map(float, found["FedAvg", ""])
    assert (mean, std, n) == pytest.approx((40, statistics.stdev([30, 50]), 2))
    assert float(found["rFedAvg", "1e-05"][0]) == pytest.approx(30) and found["rFedAvg", "1e-05"][
        1:
    ] == ["", "1"]
    assert built.words == ("p, rFedAvg: highest at 1e-05 (30.00 %), lowest at 0.001 (20.00 %).",)
    assert is_picture(built) and built.missing == ()
    # One that is wanted and not there.
    spec["lines"] = {"rFedAvg+": "rfedavg_plus"}
    nothing = figures.parameter_study(target("parameter-study", spec), measured)
    assert nothing.files == {} and nothing.missing == ("p, rFedAvg+, s a",)


def test_the_worst_client_is_that_of_the_first_seed_and_the_sentence_is_of_all(
    tmp_path: Path,
) -> None:
    measured = made(tmp_path, THREE)
    run(
        measured, "s", ("a", "fedavg", 0), [0.5], None, {"client_test_worst": 0.25}, [0.5, "", 0.25]
    )
    run(
        measured,
        "s",
        ("a", "fedavg", 1),
        [0.5],
        None,
        {"client_test_worst": 0.35},
        [0.75, 0.5, 0.35],
    )
    run(
        measured,
        "s",
        ("a", "rfedavg_plus", 0),
        [0.5],
        None,
        {"client_test_worst": 0.5},
        [0.5, 1.0, 0.75],
    )
    panels = [
        {"title": "p", "study": "s", "scenario": "a"},
        {"title": "q", "study": "s", "scenario": "b"},
    ]
    spec = {"lines": {"FedAvg": "fedavg", "rFedAvg+": "rfedavg_plus"}, "panels": panels}
    built = figures.fairness(target("fairness", spec), measured)
    assert [row[1:] for row in cells(built)] == [
        ["FedAvg", "1", "50.0"],
        ["FedAvg", "2", ""],
        ["FedAvg", "3", "25.0"],
        ["rFedAvg+", "1", "50.0"],
        ["rFedAvg+", "2", "100.0"],
        ["rFedAvg+", "3", "75.0"],
    ]
    # Mean 30, deviation |35 - 25| / sqrt(2).
    assert built.words == ("p: the worst client has FedAvg 30.00 % ± 7.07, rFedAvg+ 50.00 %.",)
    assert is_picture(built) and built.missing == ("q, FedAvg", "q, rFedAvg+")


def test_the_size_of_delta_as_counted_and_as_sent(tmp_path: Path) -> None:
    """Three clients of 10 drawn, 4 floats each: counted 3 vectors, sent those of the 9 others, from
    round 2 on."""
    measured = made(tmp_path, THREE)
    sent = {"rfedavg": (0, 144), "rfedavg_plus": (0, 16)}
    for recipe, counted in (("rfedavg", 48), ("rfedavg_plus", 16)):
        columns = {f"{recipe}_delta_bytes": sent[recipe]}
        run(
            measured,
            "s",
            ("a", recipe, 0),
            [0, 0],
            None,
            {"delta_bytes_as_rfedavg_counts": counted},
            columns=columns,
        )
    many, one = "rFedAvg, really sent", "rFedAvg+, really sent"
    spec = {
        "decimals": 0,
        "statistic": "delta_bytes_as_rfedavg_counts",
        "better": "none",
        "ratios": {"Sent": [many, one]},
        "rows": {
            "rFedAvg": {"recipe": "rfedavg"},
            "rFedAvg+": {"recipe": "rfedavg_plus"},
            many: {"recipe": "rfedavg", "statistic": "rfedavg_delta_bytes"},
            one: {"recipe": "rfedavg_plus", "statistic": "rfedavg_plus_delta_bytes"},
        },
        "columns": {"CNN": {"study": "s", "scenario": "a"}, "RNN": {"study": "s", "scenario": "b"}},
        "reported": {
            "rows": {"rFedAvg": [2328, 1], "rFedAvg+": [776, 1]},
            "columns": ["CNN", "RNN"],
        },
    }
    built = build(target("table", spec), measured)
    assert built.table == [
        ["", "CNN", "RNN"],
        ["rFedAvg", "48 (2328)", "not run yet (1)"],
        ["rFedAvg+", "16 (776)", "not run yet (1)"],
        [many, "144", "not run yet"],
        [one, "16", "not run yet"],
    ]
    assert built.words == (f"Sent ({many} by {one}): CNN 9.",)
    assert built.missing == tuple(f"{row}, RNN" for row in spec["rows"])
    assert [row[:3] for row in cells(built)[4::2]] == [[many, "CNN", "144.0"], [one, "CNN", "16.0"]]


def test_what_a_size_does_not_run_is_no_picture_and_not_missing(tmp_path: Path) -> None:
    measured = made(tmp_path, THREE.replace("fedavg: , rfedavg: , rfedavg_plus: ", "other: "))
    place = {"title": "p", "study": "s", "scenario": "a"}
    spec = {
        "lines": LINES,
        "baseline": "FedAvg",
        "levels": [1],
        "rounds": [place],
        "statistic": "last5",
        "classes": [0],
        "seconds": [{"title": "t", "bars": {"x": place}}],
        "rows": {"IID": place | {"recipe": "fedavg"}},
        "panels": [place | {"points": [place], "x": "x", "key": "x"}],
    }
    for kind in ("efficiency", "parameter-study", "fairness", "features"):
        built = builder(target(kind, spec))(target(kind, spec), measured)
        assert (built.files, built.words, built.missing) == ({}, (), ("not run at this size",)), (
            kind
        )


def test_the_client_with_most_of_a_class_is_shown_and_none_twice() -> None:
    """Client 1 has most of class 0, then of class 1 too; class 2 goes to the first of two that have
    as many."""
    counts = [np.array(c) for c in ([5, 0, 1], [9, 9, 0], [8, 4, 7], [0, 3, 7], [0, 0, 7])]
    assert chosen(counts, [0, 1, 2]) == [1, 2, 3]


def test_the_discrepancy_of_three_clients() -> None:
    """Means (0, 0), (3, 4) and (0, 4): 5, 4 and 3 apart."""
    phi = [np.array([[-1.0, 0], [1, 0]]), np.array([[3.0, 4]]), np.array([[0.0, 3], [0, 5]])]
    assert discrepancy(
        [Shown(0, np.zeros(len(one), dtype=np.int64), one) for one in phi]
    ) == pytest.approx(4)


@pytest.mark.parametrize(("level", "round_"), [(0.1, 1.0), (0.3, 3.0), (0.31, math.nan)])
def test_the_first_round_at_a_level(level: float, round_: float) -> None:
    found = figures.first({3: 0.3, 1: 0.2, 2: 0.1}, level)
    assert found == round_ or (math.isnan(found) and math.isnan(round_))


# What the studies and targets of any paper may say


def test_a_methods_own_settings_at_single_places() -> None:
    row = {"recipe": "x", "at": {"B": {"study": "own"}}}
    assert address("t", "A", row, {"study": "s"})["study"] == "s"
    assert address("t", "B", row, {"study": "s"}) == {"recipe": "x", "study": "own"}
    assert address("t", "A", {"recipe": "x"}, {"recipe": "y"})["recipe"] == "y"


LIKE = """
study_names: [one, two]
studies:
  one:
    data: {name: digits, validation: 0, public: 0}
    scenarios: {a: {partition: iid, clients: 2}, b: {partition: iid, clients: 3}}
    scenario_names: [a]
    recipes: {fedavg: {}}
    seeds: [0]
    train: {model: mlp, rounds: 1, epochs: 1, batch_size: 32, lr: 0.1}
    small: {scenario_names: []}
    smoke: {scenarios: {a: {clients: 4}}, scenario_names: [b], train: {rounds: 2}}
  two:
    like: one
    scenarios: {c: {partition: iid, clients: 5}}
    train: {momentum: 0.5}
    smoke: {train: {momentum: null}}
"""


def test_a_list_of_ones_own_replaces_names_and_sizes_of_the_other_list(tmp_path: Path) -> None:
    made(tmp_path, LIKE)
    one, two = (of_paper("rfedavg", "smoke", tmp_path)[name].content for name in ("one", "two"))
    assert one["scenario_names"] == ["b"] and one["scenarios"]["a"]["clients"] == 4
    assert (
        two["scenario_names"] == ["c"]
        and list(two["scenarios"]) == ["c"]
        and two["train"]["rounds"] == 2
    )
    assert of_paper("rfedavg", "paper", tmp_path)["one"].content["scenario_names"] == ["a"]


def test_null_at_a_size_takes_away_what_the_study_has(tmp_path: Path) -> None:
    """Also where the study is like another that has that size."""
    made(tmp_path, LIKE)
    train = {size: of_paper("rfedavg", size, tmp_path)["two"].content["train"] for size in SIZES}
    assert (
        train["paper"]["momentum"] == train["small"]["momentum"] == 0.5
        and "momentum" not in train["smoke"]
    )
    assert (train["smoke"]["rounds"], train["paper"]["rounds"]) == (2, 1)


def test_a_size_may_leave_a_study_out(tmp_path: Path) -> None:
    made(tmp_path, LIKE)
    small = of_paper("rfedavg", "small", tmp_path)
    assert not small["one"].is_run and small["two"].is_run
    study.execute(Workspace.of(tmp_path, {}), small["one"])
    assert [path.name for path in (tmp_path / small["one"].folder).iterdir()] == ["params.yaml"]


# From data to a report


def test_features_and_tables_from_what_was_trained(tmp_path: Path) -> None:
    """Two methods of cifar-silo at size smoke: table I has them, and figure 1 the features of its
    models."""
    folder = tmp_path / "pipelines" / "papers" / "rfedavg"
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / "pipelines" / "papers" / "rfedavg" / name, folder)
    content = read_yaml(folder / "params.yaml")
    smoke = content["studies"]["cifar-silo"]["smoke"]
    smoke |= {"recipe_names": ["fedavg", "rfedavg_plus"], "scenario_names": ["sim10", "sim100"]}
    (folder / "params.yaml").write_text(json.dumps(content))  # JSON is YAML
    study.execute(Workspace.of(tmp_path, {}), of_paper("rfedavg", "smoke", tmp_path)["cifar-silo"])
    targets = of_targets("rfedavg", tmp_path)
    place = write(
        "rfedavg",
        "smoke",
        tmp_path,
        {name: targets[name] for name in ("rf-tab1", "rf-fig1")},
        "report",
    ).folder
    report = (place / "report.html").read_text()
    assert "rf-tab1" in report and "rf-fig1" in report
    measured = Measured("rfedavg", "smoke", tmp_path)
    where = {"study": "cifar-silo", "scenario": "sim10", "recipe": "fedavg"}
    (only,) = measured.runs(where)
    rows = {(line["row"], line["column"]): line for line in table(place / "rf-tab1.csv")}
    mean = 100 * statistics.fmean(
        row["test_accuracy"] for row in only.rows
    )  # two rounds, fewer than five
    cell = rows["FedAvg", "CIFAR10, Sim 10%"]
    assert float(cell["measured"]) == pytest.approx(mean) and cell["reported"] == "60.44"
    assert rows["Scaffold", "CIFAR10, Sim 10%"]["measured"] == ""

    # The features by hand: the paper's CNN on 8x8 digits, pixels of 0 to 16 on [-1, 1].
    weights = load_file(measured.folder("cifar-silo") / "runs" / only.key / "model.safetensors")
    w = {key.removeprefix("params/"): leaf for key, leaf in weights.items()}
    held = json.loads(
        (measured.folder("cifar-silo") / "partitions" / "sim10-0" / "indices.json").read_text()
    )
    digits = load_digits()
    images = {
        tuple(image.flatten().astype(int)): y
        for image, y in zip(digits.images, digits.target, strict=True)
    }
    shown = of_clients(measured, where, only, [0, 1, 2])
    assert len({one.client for one in shown}) == 3
    prepared = load_file(next((tmp_path / "data" / "papers").glob("digits-*/digits.safetensors")))
    for c, one in enumerate(shown):
        own = [i for i in held["clients"][one.client] if prepared["train_y"][i] in (0, 1, 2)]
        assert len(own) <= 300 and one.label.tolist() == prepared["train_y"][own].tolist()
        assert np.bincount(one.label, minlength=3).argmax() == c  # a majority of its class
        x = prepared["train_x"][own].float()
        assert all(
            images[tuple(i.flatten().int().tolist())] == y
            for i, y in zip(x, one.label, strict=True)
        )
        x = x / 8 - 1
        for name in ("conv1", "conv2"):
            x = F.max_pool2d(
                F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=2).relu(), 2
            )
        phi = F.linear(x.flatten(1), w["fc1.weight"], w["fc1.bias"]).relu()
        assert np.allclose(one.phi, phi.numpy(), atol=1e-5)
    drawn = table(place / "rf-fig1.csv")
    assert sum(line["row"] == "non-IID" for line in drawn) == sum(len(one.label) for one in shown)
    assert {line["class"] for line in drawn} == {"0", "1", "2"}
    assert all(math.isfinite(float(line["x"]) + float(line["y"])) for line in drawn)
    assert (place / "rf-fig1.png").stat().st_size < 200_000


def test_the_studies_file_names_every_study_once() -> None:
    content = read_yaml(ROOT / "pipelines" / "papers" / "rfedavg" / "params.yaml")
    assert sorted(content["study_names"]) == sorted(content["studies"])
    assert studies.PAPERS[-1] == "rfedavg"
