"""FNR-FL's studies, tables and figures: complete, valid at all sizes, and right on small results
made by hand."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report as paper
from fedml_noniid.pipelines.papers import study, table
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import SIZES, of_paper
from fedml_noniid.pipelines.papers.targets import Built, Target, build, builder, of_targets
from fedml_noniid.plugins.data.dataset import Dataset, Raw
from tests.pipelines.by_hand import sound
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

IDS = {
    "fnr-fig1",
    "fnr-fig2",
    "fnr-fig4",
    "fnr-fig5",
    "fnr-tab2",
    "fnr-tab3",
    "fnr-tab4",
    "fnr-tab5",
    "fnr-tab6",
}
# What stands beside the paper's lines: the leak, the controls, the noisy test, what was really
# sent, the methods alone.
OURS = (
    "(leak)",
    "regulariser off",
    "Data sharing",
    ", noisy test",
    ", sent (MiB)",
    " by what was sent",
)
ALONE = {"FedAvg", "FedProx", "SCAFFOLD", "MOON", "FedNova"}
TARGETS = of_targets("fnr", ROOT)
TABLES = sorted(name for name in IDS if "-tab" in name)

STUDIES = {
    "study_names": ["one"],
    "studies": {
        "one": {
            "data": {"name": "digits", "normalise": "none", "validation": 0.0, "public": 20},
            "scenarios": {
                "even": {"partition": "iid", "clients": 3},
                "skew": {"partition": "iid", "clients": 3},
            },
            "recipes": {"fedavg": {}, "fnr": {}, "fnr-leak": {}, "fnr-off": {}, "datasharing": {}},
            "seeds": [0, 1],
            "train": {"model": "mlp", "rounds": 2, "epochs": 1, "batch_size": 32, "lr": 0.1},
        }
    },
}


# The paper's own files.
# --------------------------------------------------------------------------------------------------


def test_every_table_and_figure_with_data_is_a_target() -> None:
    assert set(TARGETS) == IDS
    for target in TARGETS.values():
        assert callable(builder(target))
        notes = target.spec["protocol"]
        assert notes and all(isinstance(note, str) for note in notes), (
            "a colon in YAML makes a key of a sentence"
        )


@pytest.mark.parametrize("name", TABLES)
def test_titles_are_the_paper_s(name: str) -> None:
    """Every line of the paper is there in its order; what is ours is named as such, and its numbers
    are the paper's."""
    target = TARGETS[name]
    assert target.reported is not None
    for axis in ("rows", "columns"):
        ours, theirs = dict(target.spec[axis]), list(target.reported[axis])
        extra = [title for title in ours if title not in theirs]
        assert [title for title in ours if title in theirs] == theirs
        alone = ALONE if name == "fnr-tab5" else set()
        assert [
            title
            for title in extra
            if not any(mark in title for mark in OURS) and title not in alone
        ] == []
        assert {about["reported"] for about in ours.values() if "reported" in about} <= set(theirs)


@pytest.mark.parametrize("size", SIZES)
def test_every_study_is_valid(size: str, tmp_path: Path) -> None:
    """Also that every entry that leaks says so in its name."""
    for one in of_paper("fnr", size, ROOT).values():
        settings = sound(one, tmp_path)
        if size == "paper":
            assert (settings.train.rounds, settings.train.epochs, settings.train.batch_size) == (
                10,
                10,
                64,
            )
            assert {scenario.cohort for scenario in settings.scenarios.values()} == {10}
        if size == "smoke":
            assert settings.data.name == "digits"


def test_every_address_is_run_at_size_paper() -> None:
    """What a table, curve or figure names is in its study."""
    measured = Measured("fnr", "paper", ROOT)
    for name in TABLES:
        spec = TARGETS[name].spec
        wrong = [
            (r, c)
            for r, row in spec["rows"].items()
            for c, column in spec["columns"].items()
            if not measured.is_wanted({**row, **column})
        ]
        assert wrong == []
    for panel in TARGETS["fnr-fig4"].spec["panels"]:
        assert all(
            measured.is_wanted(panel | {"recipe": recipe})
            for recipe in TARGETS["fnr-fig4"].spec["lines"].values()
        )
    assert all(measured.is_wanted(panel) for panel in TARGETS["fnr-fig5"].spec["panels"])
    scenarios = {panel["scenario"] for panel in TARGETS["fnr-fig2"].spec["panels"]}
    assert scenarios <= set(measured.studies["single-resnet"].content["scenario_names"])


# Results made by hand.
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pipelines" / "papers" / "fnr").mkdir(parents=True)
    (tmp_path / "pipelines" / "papers" / "fnr" / "params.yaml").write_text(yaml.safe_dump(STUDIES))
    return tmp_path


def folder(root: Path) -> Path:
    return root / "papers" / "built" / "fnr" / "smoke" / "studies" / "one"


def write_run(
    root: Path,
    recipe: str,
    seed: int,
    accuracy: float,
    scenario: str = "even",
    sha: str = "0",
    **metrics: float,
) -> Path:
    """A finished item that ends with this accuracy."""
    key = f"{scenario}-{recipe}-{seed}"
    run, evaluation = folder(root) / "runs" / key, folder(root) / "evaluation" / key
    run.mkdir(parents=True)
    evaluation.mkdir(parents=True)
    lines = ["round,test_accuracy,bytes_up,bytes_down", "1,0.1,1,1", f"2,{accuracy},1,1"]
    (run / "rounds.csv").write_text("\n".join(lines) + "\n")
    record = {
        "scenario": scenario,
        "recipe": recipe,
        "composition": recipe,
        "seed": seed,
        "weights_sha256": sha,
        "params": {"train.rounds": 2},
        "rounds": 2,
        "tags": {},
        "final": {},
        "notes": [],
    }
    (run / "run.json").write_text(json.dumps(record))
    (evaluation / "metrics.json").write_text(json.dumps(metrics))
    return run


def write_clients(
    root: Path, counts: Sequence[Sequence[int]], scenario: str = "even", seed: int = 0
) -> None:
    """A partition's table, with a column of noise as scenarios with noise have it."""
    place = folder(root) / "partitions" / f"{scenario}-{seed}"
    place.mkdir(parents=True)
    lines = ["client,samples,entropy,noise,cat,dog,owl"]
    lines += [f"{k},{sum(row)},1.5,0.1,{','.join(map(str, row))}" for k, row in enumerate(counts)]
    (place / "clients.csv").write_text("\n".join(lines) + "\n")


def target(kind: str, spec: Mapping[str, Any], reported: Mapping[str, Any] | None = None) -> Target:
    return Target("fnr-x", "fnr", kind, "title", (), spec, reported)


def built(root: Path, of: Target) -> Built:
    return build(of, Measured("fnr", "smoke", root))


def lines(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


def size(picture: bytes) -> tuple[int, int]:
    assert len(picture) < 200_000
    return Image.open(io.BytesIO(picture)).size


METHODS = {
    "FNR-FL": {"recipe": "fnr"},
    "FNR-FL (leak)": {"recipe": "fnr-leak", "reported": "FNR-FL", "compared": False},
    "Off": {"recipe": "fnr-off", "compared": False},
    "Data sharing": {"recipe": "datasharing", "compared": False},
    "FedAvg": {"recipe": "fedavg"},
}
SETTINGS = {
    "Even": {"study": "one", "scenario": "even"},
    "Even, noisy": {
        "study": "one",
        "scenario": "even",
        "statistic": "accuracy_noisy",
        "reported": "Even",
        "decimals": 1,
    },
}
CONTROLS = {
    "differences": {
        "What the leak is worth": ["FNR-FL (leak)", "FNR-FL"],
        "What refining is worth beyond having the public samples": ["FNR-FL", "Data sharing"],
    },
    "same": {"Off": "FNR-FL"},
}
REPORTED = {"columns": ["Even"], "rows": {"FNR-FL": [0.9], "FedAvg": [0.6]}}


def write_all(root: Path) -> None:
    """Accuracies on two seeds: FNR-FL 0.70 and 0.74, its leak 0.98, data sharing 0.71 and 0.75,
    FedAvg 0.50."""
    for seed in (0, 1):
        noisy = {"accuracy_noisy": 0.25}
        write_run(root, "fnr", seed, 0.70 + 0.04 * seed, sha=f"fnr {seed}", **noisy)
        write_run(root, "fnr-leak", seed, 0.98, sha="leak", **noisy)
        write_run(
            root,
            "fnr-off",
            seed,
            0.70 + 0.04 * seed,
            sha=f"fnr {seed}" if seed else "other",
            **noisy,
        )
        write_run(root, "datasharing", seed, 0.71 + 0.04 * seed, **noisy)
        write_run(root, "fedavg", seed, 0.50, **noisy)


@pytest.mark.parametrize("methods", ["rows", "columns"])
def test_a_table_beside_its_controls(root: Path, methods: str) -> None:
    write_all(root)
    spec: dict[str, Any] = {"decimals": 4, "claim": "FNR-FL", "methods": methods, **CONTROLS}
    reported: dict[str, Any] = REPORTED
    if methods == "rows":
        spec |= {"rows": METHODS, "columns": SETTINGS}
    else:
        spec |= {"rows": SETTINGS, "columns": METHODS}
        reported = {"columns": ["FNR-FL", "FedAvg"], "rows": {"Even": [0.9, 0.6]}}
    of = built(root, target("table", spec, reported))
    cells = np.array(of.table)[1:, 1:] if methods == "rows" else np.array(of.table)[1:, 1:].T
    assert of.missing == ()
    # Means and deviations over two seeds: 0.72 and 0.04 / sqrt(2).
    assert cells.tolist() == [
        ["0.7200 ± 0.0283 (0.9)", "0.2 ± 0.0 (0.9)"],
        ["0.9800 ± 0.0000 (0.9)", "0.2 ± 0.0 (0.9)"],
        ["0.7200 ± 0.0283", "0.2 ± 0.0"],
        ["0.7300 ± 0.0283", "0.2 ± 0.0"],
        ["0.5000 ± 0.0000 (0.6)", "0.2 ± 0.0 (0.6)"],
    ]
    assert of.words == (
        # Neither the leak (0.98) nor data sharing (0.73) is the rival.
        # 0.20 and 0.24: half an interval is 12.706 * 0.02.
        (
            "Even: FNR-FL is not told apart from the best other (FedAvg) (-0.0341 to +0.4741, 95 % "
            "interval over 2 seeds)."
        ),
        "Even, noisy: FNR-FL less the best other (FedAvg) is +0.0 on each of 2 seeds.",
        # 0.28 and 0.24, seed by seed; -0.01 on both.
        "What the leak is worth (FNR-FL (leak) less FNR-FL): Even +0.2600, 95 % interval "
        "+0.0059 to +0.5141 over 2 "
        "seeds; Even, noisy +0.0000 on each of 2 seeds.",
        "What refining is worth beyond having the public samples (FNR-FL less Data sharing): "
        "Even -0.0100 on each of 2 "
        "seeds; Even, noisy +0.0000 on each of 2 seeds.",
        # Both settings read the same two runs, of which the one of seed 1 is equal.
        "Off: the same final weights as FNR-FL, to the bit, in 1 of 2 runs.",
    )


def test_a_table_says_what_is_not_run_yet(root: Path) -> None:
    write_run(root, "fnr", 0, 0.5, accuracy_noisy=0.25)
    spec = {"rows": METHODS, "columns": SETTINGS, **CONTROLS}
    of = built(root, target("table", spec, REPORTED))
    assert len(of.missing) == 8 and of.missing[0] == "FNR-FL (leak), Even"
    assert of.table[2][1] == "not run yet (0.9)"
    assert of.words == ()


def test_better_may_differ_by_line(root: Path) -> None:
    """Of seconds the lower is better, what a paper counts is not compared, and the claim is told by
    each."""
    for recipe, seconds in (("fnr", 12.0), ("fedavg", 10.0)):
        write_run(root, recipe, 0, 0.5, price=seconds, counted=7.0)
    about = {"study": "one", "scenario": "even"}
    rows = {
        "Time": about | {"statistic": "price", "better": "lower", "decimals": 1},
        "Counted": about | {"statistic": "counted", "better": "none"},
    }
    columns = {"FNR-FL": {"recipe": "fnr"}, "FedAvg": {"recipe": "fedavg"}}
    spec = {"rows": rows, "columns": columns, "methods": "columns", "claim": "FNR-FL"}
    of = table.build(target("table", spec), Measured("fnr", "smoke", root))
    assert of.table[1:] == [["Time", "12.0", "10.0"], ["Counted", "7.00", "7.00"]]
    (said,) = of.words
    assert said.startswith("Time: FNR-FL less the best other (FedAvg) is +2.0 on one seed")


def test_heat_maps_count_what_clients_hold(root: Path) -> None:
    """Of two panels the first is there: 3 clients, 3 classes, two empty cells."""
    write_clients(root, [[10, 30, 0], [20, 20, 60], [0, 40, 10]])
    panels = [
        {"title": "(a)", "study": "one", "scenario": "even"},
        {"title": "(b)", "study": "one", "scenario": "skew"},
    ]
    of = built(root, target("heat-maps", {"panels": panels}))
    assert of.missing == ("(b)",)
    assert of.words == (
        "(a): client 1 holds the most of one class, 60 of owl; 2 of 9 cells are empty; clients "
        "hold 40 to 100 samples; "
        "a class is 0.0 to 80.0 % of a client's.",
    )
    cells = lines(of.files["csv"])
    assert [int(cell["samples"]) for cell in cells] == [10, 30, 0, 20, 20, 60, 0, 40, 10]
    assert cells[5] == {"panel": "(a)", "client": "1", "class": "owl", "samples": "60"}
    one = size(of.files["png"])
    write_clients(root, [[5, 0, 0], [1, 1, 1], [1, 1, 1]], "skew")
    both = built(root, target("heat-maps", {"panels": panels}))
    assert both.missing == () and size(both.files["png"])[0] > 1.8 * one[0]
    assert both.words[1].startswith(
        "(b): client 0 holds the most of one class, 5 of cat, and none of dog, owl; 2 of 9"
    )


def test_no_heat_map_without_a_partition(root: Path) -> None:
    of = built(
        root,
        target("heat-maps", {"panels": [{"title": "(a)", "study": "one", "scenario": "even"}]}),
    )
    assert (of.files, of.missing) == ({}, ("(a)",))


def test_the_bars_are_of_the_worst_refined_client(root: Path) -> None:
    """Of clients 3, 5, 8 in the last of two rounds, 5 and 8 are refined; 8 is the worse of them, 3
    is worse yet."""
    write_clients(root, [[1, 1, 1]] * 8 + [[30, 20, 10]])
    run = write_run(root, "fnr", 0, 0.5)
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
    save_file(recorded, run / "recorded.safetensors")
    at = {"study": "one", "scenario": "even", "recipe": "fnr"}
    panels = [at | {"title": "T", "on": "test"}, at | {"title": "P", "on": "public"}]
    panels.append(at | {"title": "L", "on": "test", "recipe": "fnr-leak"})
    of = built(root, target("refinement", {"panels": panels}))
    assert of.missing == ("L",)
    found = lines(of.files["csv"])
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
    assert of.words[0] == (
        "T: client 8 gains +0.2917 on average, most in owl (+0.5000, 10 samples), least in cat "
        "(+0.1250, 30 samples); "
        "gains and samples by class have Kendall τ = -1.00 (p = 0.33, not told apart from none; "
        "the paper says that "
        "classes with fewer samples gain more, which would be below 0)."
    )
    assert "gains +0.4250 on average, most in dog (+0.6000, 20 samples)" in of.words[1], (
        "the class without samples"
    )
    size(of.files["png"])


def test_no_bars_where_nobody_looked(root: Path) -> None:
    write_clients(root, [[1, 1, 1]] * 3)
    run = write_run(root, "fnr", 0, 0.5)
    save_file({"fnr/A": torch.zeros(1, 3)}, run / "recorded.safetensors")
    panel = {"title": "T", "study": "one", "scenario": "even", "recipe": "fnr", "on": "test"}
    of = built(root, target("refinement", {"panels": [panel]}))
    assert (of.files, of.missing) == ({}, ("T",))


def test_a_sample_in_noise(root: Path) -> None:
    """The grey image of 0.5 at deviation 0 is itself, at 0.5 it has that deviation, whatever the
    normalisation."""
    spec = {"study": "one", "deviations": [0, 0.5], "sample": 1}
    assert built(root, target("noise-samples", spec)).missing == ("the data of study one",)
    x = torch.stack(
        [torch.zeros(1, 64, 64, dtype=torch.uint8), torch.full((1, 64, 64), 8, dtype=torch.uint8)]
    )
    raw = Raw(x, torch.tensor([0, 1]), x.clone(), torch.tensor([0, 1]), ["cat", "dog"], unit=16)
    measured = Measured("fnr", "smoke", root)
    place = root / measured.studies["one"].data_folder / "digits.safetensors"
    for normalise in ("none", "channel"):
        Dataset.of("digits", raw, normalise).save(place)
        of = built(root, target("noise-samples", spec))
        clean = [float(v["value"]) for v in lines(of.files["csv"]) if v["noise"] == "0"]
        assert len(clean) == 4096 and set(clean) == {0.5}
        noisy = np.array([float(v["value"]) for v in lines(of.files["csv"]) if v["noise"] == "0.5"])
        # The standard error of the mean is 0.5 / 64, that of the deviation 0.5 / sqrt(2 * 4096).
        assert noisy.mean() == pytest.approx(0.5, abs=5 * 0.5 / 64)
        assert noisy.std() == pytest.approx(0.5, abs=5 * 0.5 / 90)
        (words,) = of.words
        said = re.fullmatch(
            r"Test sample 1 of digits, class dog\. Outside 0 to 1, .*: (\d+) % at 0\.5\.", words
        )
        # P(|N(0, 1)| > 1) = 31.7 %, with a standard error of 0.7.
        assert said and abs(int(said[1]) - 31.7) < 4
        size(of.files["png"])


# One table from training to report.
# --------------------------------------------------------------------------------------------------


def test_a_table_end_to_end(tmp_path: Path) -> None:
    """Table 4's line with much noise, on digits: trained, tested, laid out, with the words of its
    controls."""
    shutil.copytree(
        ROOT / "pipelines" / "papers" / "fnr", tmp_path / "pipelines" / "papers" / "fnr"
    )
    params = tmp_path / "pipelines" / "papers" / "fnr" / "params.yaml"
    content = read_yaml(params)
    recipes = ["fedavg", "fnr", "fnr-leak", "fnr-off"]
    content["studies"]["mixed"]["smoke"] |= {
        "scenario_names": ["label-noise05"],
        "recipe_names": recipes,
    }
    params.write_text(yaml.safe_dump(content))
    study.execute(Workspace.of(tmp_path, {}), of_paper("fnr", "smoke", tmp_path)["mixed"])
    of = of_targets("fnr", tmp_path)["fnr-tab4"]
    place = paper.write("fnr", "smoke", tmp_path, {"fnr-tab4": of}).folder
    cells = {
        (cell["row"], cell["column"]): cell for cell in lines((place / "fnr-tab4.csv").read_bytes())
    }
    row = "label+feature skew, noise=0.5"
    for name, entry in (("FNR-FL", "fnr"), ("FNR-FL (leak)", "fnr-leak"), ("FedAvg", "fedavg")):
        evaluation = (
            tmp_path
            / "papers/built/fnr/smoke/studies/mixed/evaluation"
            / f"label-noise05-{entry}-0"
        )
        metrics = json.loads((evaluation / "metrics.json").read_text())
        assert float(cells[row, name]["measured"]) == pytest.approx(metrics["accuracy"])
        assert float(cells[f"{row}, noisy test", name]["measured"]) == pytest.approx(
            metrics["accuracy_noisy"]
        )
        reported = {"FNR-FL": 0.9111, "FNR-FL (leak)": 0.9111, "FedAvg": 0.4504}[name]
        assert (
            float(cells[row, name]["reported"])
            == float(cells[f"{row}, noisy test", name]["reported"])
            == reported
        )
    text = (place / "fnr-tab4.md").read_text()
    assert (
        "FNR-FL, regulariser off: the same final weights as FNR-FL, to the bit, in 1 of 1 runs."
        in text
    )
    assert (
        "What the leak is worth (FNR-FL (leak) less FNR-FL): label+feature skew, noise=0.5 " in text
    )
    assert "not run at this size" in text and "Not there yet" not in text
