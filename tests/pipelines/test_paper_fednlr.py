"""FedNLR's tables and figures: they are the paper's, their studies are sound, and pictures say what
the numbers say."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report as stage
from fedml_noniid.pipelines.papers import study
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import DIVERGED, RESULTS, SIZES, of_paper
from fedml_noniid.pipelines.papers.targets import Built, address, build, builder, of_targets
from fedml_noniid.pipelines.reporting.figures import Values
from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.errors import UserError
from papers.fednlr import example, figures
from tests.pipelines import by_hand
from tests.pipelines.by_hand import assert_titles_as_reported, paper, run, sound
from tests.pipelines.small import ROOT

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

TABLES = ["nlr-tab1", "nlr-tab2", "nlr-tab3"]
TARGETS = [*(f"nlr-fig{n}" for n in range(1, 6)), *TABLES, "nlr-tab4"]
PARTS = {
    "FedAvg": set(),
    "FedProx": {"fedprox"},
    "Scaffold": {"scaffold"},
    "FedNova": {"fednova"},
    "FedRS": {"fedrs"},
    "FedLC": {"fedlc"},
    "CCVR": {"ccvr"},
    "FedDyn": {"feddyn"},
    "FedNLR": {"fednlr"},
}
RECIPES = ("as-fedavg", "last-round")  # of table 4
PNG = b"\x89PNG\r\n"


# The paper's own files.
# --------------------------------------------------------------------------------------------------


def test_the_paper_s_tables_and_figures_are_there() -> None:
    found = of_targets("fednlr", ROOT)
    assert sorted(found) == TARGETS
    for target in found.values():
        assert builder(target) is not None and len(target.protocol) > 1


@pytest.mark.parametrize("name", TABLES)
def test_titles_are_those_of_the_reported_numbers(name: str) -> None:
    assert_titles_as_reported(of_targets("fednlr", ROOT)[name])


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_run_of_its_method_in_its_setting(name: str) -> None:
    """Titles of columns end with (n, S) or (n, alpha); table 2 has S or alpha only, n is 20 unless
    said otherwise."""
    target, studies = of_targets("fednlr", ROOT)[name], of_paper("fednlr", "paper", ROOT)
    for row, own in target.spec["rows"].items():
        for column, other in target.spec["columns"].items():
            at = address(name, column, own, other)
            content = studies[at["study"]].content
            assert (
                at["scenario"] in content["scenario_names"]
                and at["recipe"] in content["recipe_names"]
            )
            recipe = content["recipes"][at["recipe"]].get("recipe", at["recipe"])
            assert set(recipes.parse(recipe)) == set.union(
                *(PARTS[word.strip()] for word in row.split("+"))
            )
            assert content["train"]["rounds"] == (200 if "FedDyn" in row else 500)
            data = (
                "cinic10" if name == "nlr-tab2" else column.split(",")[0].replace("-", "").lower()
            )
            assert content["data"]["name"] == data
            last = re.search(r"(?:\((\d+), )?([\d.]+)\)?$", column)
            assert last is not None
            scenario, clients = content["scenarios"][at["scenario"]], int(last[1] or 20)
            assert scenario["clients"] == clients and scenario["participation"] == (
                0.1 if clients == 100 else 0.4
            )
            assert scenario["partition"] == ("shards" if "Shards" in column else "dirichlet")
            assert scenario["classes_per_client" if "Shards" in column else "alpha"] == float(
                last[2]
            )
            if "Shards" not in column:
                assert scenario["cap"] == "off"


@pytest.mark.parametrize(("name", "rounds"), [("nlr-tab1", 5), ("nlr-tab2", 5), ("nlr-tab3", 30)])
def test_cells_are_means_of_the_last_rounds_but_for_ccvr_s(name: str, rounds: int) -> None:
    """CCVR trains its classifier once, after the last round: a mean over rounds would be
    FedAvg's."""
    spec = of_targets("fednlr", ROOT)[name].spec
    for row, own in spec["rows"].items():
        assert own.get("statistic", spec["statistic"]) == (
            "final" if row == "CCVR" else f"last{rounds}"
        )


def test_the_exact_setting_is_the_paper_s(tmp_path: Path) -> None:
    """Section 7.1: VGG-9, E = 2, batches of 64, step size 0.01, SGD without momentum or weight
    decay; appendix A's MLP.

    FedProx 0.01, FedDyn 0.1, FedLC 1, FedRS 0.5, and (a1, a2) = (0.45, 0.3) of the main
    experiments.
    """
    lrs = {"lr-0001": 0.001, "lr-0003": 0.003, "lr-001": 0.01, "lr-003": 0.03, "lr-01": 0.1}
    own = {
        "fedprox": {"mu": 0.01},
        "feddyn": {"alpha": 0.1},
        "fedlc": {"tau": 1.0},
        "fedrs": {"alpha": 0.5},
        "fednlr": {"mu0": 1.0, "a1": 0.45, "a2": 0.3},
    }
    for name, one in of_paper("fednlr", "paper", ROOT).items():
        train = sound(one, tmp_path).train
        assert (train.epochs, train.local_steps, train.batch_size, train.lr) == (
            2,
            0,
            64,
            lrs.get(name, 0.01),
        )
        assert (train.optimizer, train.momentum or 0, train.weight_decay, train.augment) == (
            "sgd",
            0,
            0,
            False,
        )
        if name == "activations":
            assert (train.model, train.model_options) == ("mlp", {"hidden": 25})
            assert one.content["data"]["name"] == "mnist"
            continue
        assert (train.model, train.rounds) == ("vgg9", 200 if name.endswith("-dyn") else 500)
        for title, entry in one.content["recipes"].items():
            if "recipe" not in entry:
                assert entry == {part: own[part] for part in recipes.parse(title) if part in own}, (
                    name,
                    title,
                )


def test_figures_2_to_5_are_of_cifar_100_with_alpha_0_05() -> None:
    studies = of_paper("fednlr", "paper", ROOT)
    for name, target in of_targets("fednlr", ROOT).items():
        if name in ("nlr-fig2", "nlr-fig3", "nlr-fig4", "nlr-fig5"):
            for one in target.studies:
                content = studies[one].content
                scenario = content["scenarios"][target.spec["scenario"]]
                assert (
                    content["data"]["name"] == "cifar100" and scenario["partition"] == "dirichlet"
                )
                assert (scenario["clients"], scenario["alpha"], scenario["participation"]) == (
                    20,
                    0.05,
                    0.4,
                )


def test_recipes_of_figure_4_scale_the_layer_and_by_the_ratio_of_their_point() -> None:
    spec, content = (
        of_targets("fednlr", ROOT)["nlr-fig4"].spec,
        of_paper("fednlr", "paper", ROOT)["layers"].content,
    )
    assert len(spec["layers"]) == 9
    for layer in spec["layers"]:
        for mu, end in spec["ratios"].items():
            entry = content["recipes"][f"{layer}-{end}"]
            assert entry == {
                "recipe": "fednlr",
                "fednlr": {"a1": 0.0, "a2": 0.0, "mu": f"{layer}={mu:g}"},
            }


def test_recipes_of_figure_5_are_those_of_their_titles() -> None:
    spec, content = (
        of_targets("fednlr", ROOT)["nlr-fig5"].spec,
        of_paper("fednlr", "paper", ROOT)["ratios"].content,
    )
    for title, recipe in spec["settings"].items():
        found = {"mu0": 1.0} | content["recipes"][recipe]["fednlr"]
        pair, ratio = (
            re.search(r"\(([\d.]+), ([\d.]+)\)", title),
            re.search(r"mu = ([\d.]+) in all", title),
        )
        if pair:
            assert found == {"mu0": 1.0, "a1": float(pair[1]), "a2": float(pair[2])}, title
        else:
            assert ratio is not None and found == {"mu0": float(ratio[1]), "a1": 0.0, "a2": 0.0}, (
                title
            )


@pytest.mark.parametrize("size", SIZES)
def test_both_methods_of_table_4_train_the_same_model_in_the_last_round(size: str) -> None:
    """FedNLR's rates begin in the last round, and FedAvg's recipe has the ratio 1 in both
    layers."""
    content = of_paper("fednlr", size, ROOT)["activations"].content
    assert content["recipes"]["last-round"]["fednlr"]["since"] == content["train"]["rounds"]
    assert content["recipes"]["as-fedavg"]["fednlr"] == {"mu": "fc1=1 fc2=1"}
    scenario = content["scenarios"]["one-class"]
    assert (scenario["clients"], scenario["classes_per_client"]) == (10, 1) and content["train"][
        "observe"
    ]
    assert "participation" not in scenario


@pytest.mark.parametrize("size", SIZES)
def test_every_study_is_a_sound_experiment(size: str, tmp_path: Path) -> None:
    left_out = set()
    for one in of_paper("fednlr", size, ROOT).values():
        if not one.is_run:
            left_out.add(one.name)
            continue
        settings = sound(one, tmp_path)
        assert all(" " not in name and "leak" not in name for name in settings.recipe_names)
        assert settings.data.validation == 0 or size == "small"
        if size == "smoke":
            assert settings.data.name == "digits" and settings.train.rounds <= 6
        if size == "small":
            assert settings.data.name in ("mnist", "cifar10")
    tables = {"cifar100", "cifar100-dyn", "cinic", "cinic-dyn"}
    assert left_out == (tables if size == "small" else set())


def test_smoke_has_no_more_than_130_items_and_some_of_each_study() -> None:
    contents = [one.content for one in of_paper("fednlr", "smoke", ROOT).values()]
    items = [len(c["seeds"]) * len(c["scenario_names"]) * len(c["recipe_names"]) for c in contents]
    assert sum(items) <= 130 and min(items) > 0


# The pictures, on results made by hand.
# --------------------------------------------------------------------------------------------------


STUDY = """\
    what: a study
    data: {name: digits, validation: 0, public: 0}
    scenarios: {near: {partition: iid, clients: 2}}
    seeds: [0, 1, 2]
    train: {model: mlp, rounds: 2, epochs: 1, batch_size: 50, lr: 0.1}
"""


def at_hand(
    root: Path, targets: str, names: Sequence[str], studies: Sequence[str] = ("one",)
) -> Path:
    """A paper whose studies have these recipes; size smoke leaves out `other`."""
    entries = ", ".join(f"{name}: {{recipe: fedavg}}" for name in names)
    wanted = ", ".join(name for name in names if name != "other")
    text = f"study_names: [{', '.join(studies)}]\nstudies:\n"
    for one in studies:
        text += (
            f"  {one}:\n{STUDY}    recipes: {{{entries}}}\n    smoke: {{recipe_names: "
            f"[{wanted}]}}\n"
        )
    return paper(root, targets, "f: {columns: [x, y], rows: {Line: [0.5, null]}}\n", text)


def made(root: Path, kind: str) -> Built:
    target = of_targets(by_hand.PAPER, root)["f"]
    found: Built = getattr(figures, kind)(target, Measured(by_hand.PAPER, by_hand.SIZE, root))
    return found


def percent(root: Path, recipe: str, values: Mapping[int, float], study: str = "one") -> None:
    """Runs whose last two rounds have these means, by seed; the round before them was better."""
    for seed, value in values.items():
        run(root, "near", recipe, seed, [0.999, (value - 5) / 100, (value + 5) / 100], study)


def place(root: Path, study: str = "one") -> Path:
    return root / RESULTS / by_hand.PAPER / by_hand.SIZE / "studies" / study


def diverge(root: Path, *keys: str, study: str = "one") -> None:
    place(root, study).mkdir(parents=True, exist_ok=True)
    (place(root, study) / DIVERGED).write_text(
        json.dumps(dict.fromkeys(keys, "round 2: not finite"))
    )


def rows(built: Built) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(built.files["csv"].decode())))


# Two seeds confirm nothing here.
CONFIRMED = "; paired t tests over seeds, with Holm's adjustment for {}, confirm 0"
RATES = """\
f:
  kind: learning-rates
  title: A figure
  protocol: []
  statistic: last2
  scenario: near
  methods: {FedAvg: a, FedNLR: b}
  rates: {0.01: {study: slow}, 0.1: {study: fast}}
"""


def test_gains_at_learning_rates_with_their_intervals(tmp_path: Path) -> None:
    """At 0.01: 53 - 50 = 3 and 41 - 40 = 1, so 2 with a deviation of 2 / sqrt(2) = 1.41.

    Half an interval is 12.706 times 1, and 12.706 times 2. At 0.1: 3 and 39 - 40 = -1, so 1 with 4
    / sqrt(2) = 2.83. Seed 2 has FedNLR alone: in its mean, not in the gain.
    """
    root = at_hand(tmp_path, RATES, "ab", ("slow", "fast"))
    percent(root, "a", {0: 50, 1: 40}, "slow")
    percent(root, "b", {0: 53, 1: 41}, "slow")
    percent(root, "a", {0: 50, 1: 40}, "fast")
    percent(root, "b", {0: 53, 1: 39, 2: 70}, "fast")
    built = made(root, "learning_rates")
    assert built.table == [
        ["learning rate", "FedAvg, %", "FedNLR, %", "FedNLR - FedAvg"],
        ["0.01", "45.00 ± 7.07", "47.00 ± 8.49", "+2.00 ± 1.41"],
        [
            "0.1",
            "45.00 ± 7.07",
            "54.00 ± 15.52",
            "+1.00 ± 2.83",
        ],  # 53, 39, 70: sqrt((1 + 225 + 256) / 2)
    ]
    assert built.words == (
        (
            "At 0.01 FedNLR is not told apart from FedAvg (-10.71 to +14.71 points, 95 % interval "
            "over 2 seeds)."
        ),
        (
            "At 0.1 FedNLR is not told apart from FedAvg (-24.41 to +26.41 points, 95 % interval "
            "over 2 seeds)."
        ),
    )
    assert built.missing == () and built.files["png"].startswith(PNG)
    found = {
        (r["learning_rate"], r["method"], r["seed"]): float(r["accuracy"]) for r in rows(built)
    }
    assert len(found) == 9 and found["0.1", "FedNLR", "2"] == pytest.approx(70)


def test_learning_rates_on_one_seed_and_with_parts_missing(tmp_path: Path) -> None:
    root = at_hand(tmp_path, RATES, "ab", ("slow", "fast"))
    built = made(root, "learning_rates")
    assert built.missing == ("0.01, FedAvg", "0.01, FedNLR", "0.1, FedAvg", "0.1, FedNLR")
    assert (
        built.words == ()
        and "png" not in built.files
        and built.table[1][1:] == ["not run yet", "not run yet", "-"]
    )
    percent(root, "a", {0: 50}, "slow")
    percent(root, "b", {0: 48}, "slow")
    percent(root, "b", {1: 48}, "fast")
    built = made(root, "learning_rates")
    assert built.missing == ("0.1, FedAvg",)
    assert built.words == (
        "At 0.01 FedNLR less FedAvg is -2.00 points on one seed: no evidence either way.",
    )
    assert built.table[1:] == [
        ["0.01", "50.00", "48.00", "-2.00"],
        ["0.1", "not run yet", "48.00", "-"],
    ]


def test_equal_accuracies_are_neither_above_nor_below(tmp_path: Path) -> None:
    root = at_hand(tmp_path, RATES, "ab", ("slow", "fast"))
    percent(root, "a", {0: 50}, "slow")
    percent(root, "b", {0: 50}, "slow")
    (word,) = made(root, "learning_rates").words
    assert word == "At 0.01 FedNLR less FedAvg is +0.00 points on one seed: no evidence either way."


def test_a_method_that_diverges_on_one_seed_is_not_compared_by_the_others(tmp_path: Path) -> None:
    root = at_hand(tmp_path, RATES, "ab", ("slow", "fast"))
    percent(root, "a", {0: 50, 1: 40}, "fast")
    percent(root, "b", {1: 90}, "fast")
    diverge(root, "near-b-0", study="fast")
    built = made(root, "learning_rates")
    assert built.table[2] == ["0.1", "45.00 ± 7.07", "90.00; 1 of 2 seeds diverges", "-"]
    assert built.words == () and built.missing == ("0.01, FedAvg", "0.01, FedNLR")
    assert {r["method"] for r in rows(built)} == {"FedAvg"}


RATIOS = """\
f:
  kind: ratios
  title: A figure
  protocol: []
  study: one
  scenario: near
  statistic: last2
  baseline: a
  settings: {P: b, Q: c, R: d, S: other}
"""


def test_gains_by_setting_of_mu(tmp_path: Path) -> None:
    """P: 52 - 50 = 2 and 44 - 40 = 4; Q: -1 on both seeds; R diverges on one of them; S is not run
    at this size."""
    root = at_hand(tmp_path, RATIOS, ["a", "b", "c", "d", "other"])
    percent(root, "a", {0: 50, 1: 40})
    percent(root, "b", {0: 52, 1: 44})
    percent(root, "c", {0: 49, 1: 39})
    percent(root, "d", {1: 99})
    diverge(root, "near-d-0")
    built = made(root, "ratios")
    assert built.table == [
        ["setting of mu", "accuracy, %", "gain over FedAvg"],
        ["FedAvg", "45.00 ± 7.07", "-"],
        ["P", "48.00 ± 5.66", "+3.00 ± 1.41"],
        ["Q", "44.00 ± 7.07", "-1.00 ± 0.00"],
        ["R", "99.00; 1 of 2 seeds diverges", "-"],
        ["S", "not run at this size", "-"],
    ]
    assert built.words == (
        f"1 of 2 settings have a higher mean than FedAvg{CONFIRMED.format(2)}.",
        "The highest is P (+3.00 ± 1.41), the lowest Q (-1.00 ± 0.00).",
    )
    assert built.missing == () and built.files["png"].startswith(PNG)
    assert [(r["setting"], r["seed"]) for r in rows(built)] == [
        (s, n) for s in ("FedAvg", "P", "Q") for n in "01"
    ]


def test_ratios_on_one_seed_and_with_parts_missing(tmp_path: Path) -> None:
    root = at_hand(tmp_path, RATIOS, ["a", "b", "c", "d", "other"])
    percent(root, "b", {0: 52})
    built = made(root, "ratios")
    assert built.missing == ("FedAvg", "Q", "R") and built.words == () and "png" not in built.files
    assert built.table[2] == ["P", "52.00", "-"], "a gain needs FedAvg"
    percent(root, "a", {1: 50})
    assert made(root, "ratios").table[2] == ["P", "52.00", "-"], "no seed that both have"
    percent(root, "a", {0: 50})
    built = made(root, "ratios")
    assert built.words == (f"1 of 1 settings have a higher mean than FedAvg{CONFIRMED.format(1)}.",)
    assert built.table[2] == ["P", "52.00", "+2.00"]


def test_ratios_say_that_the_baseline_diverges(tmp_path: Path) -> None:
    root = at_hand(tmp_path, RATIOS, ["a", "b", "c", "d", "other"])
    percent(root, "b", {0: 52})
    diverge(root, "near-a-0")
    built = made(root, "ratios")
    assert (
        built.missing == ("Q", "R")
        and built.table[1] == ["FedAvg", "diverges", "-"]
        and built.words == ()
    )


LAYERS = """\
f:
  kind: layers
  title: A figure
  protocol: []
  study: one
  scenario: near
  statistic: last2
  baseline: a
  layers: [conv1, conv2, fc1, fc2]
  ratios: {1.5: "150", 2: "200"}
"""
POINTS = [
    "conv1-150",
    "conv1-200",
    "conv2-150",
    "conv2-200",
    "fc1-150",
]  # nothing of fc2 at this size


def test_accuracy_by_scaled_layer(tmp_path: Path) -> None:
    """FedAvg 50.

    conv1: 51, 49; conv2: 56, 52; fc1: 50, which is not above it. conv2 moves by 4, conv1 by 2.
    """
    root = at_hand(tmp_path, LAYERS, ["a", *POINTS])
    percent(root, "a", {0: 49, 1: 51})
    for recipe, value in zip(POINTS, (51, 49, 56, 52, 50), strict=True):
        percent(root, recipe, {0: value - 1, 1: value + 1})
    built = made(root, "layers")
    assert built.table == [
        ["layer", "mu 1.5", "mu 2"],
        ["conv1", "51.00 ± 1.41", "49.00 ± 1.41"],
        ["conv2", "56.00 ± 1.41", "52.00 ± 1.41"],
        ["fc1", "50.00 ± 1.41", "not run at this size"],
    ]
    assert built.words == (
        "3 of 5 points are above FedAvg (50.00 %).",
        "Above it: mu 1.5 in 2 of 3 layers, mu 2 in 1 of 2 layers.",
        (
            "The choice of mu moves the accuracy most in conv2 (by 4.00 points), least in conv1 "
            "(2.00)."
        ),
    )
    assert built.missing == () and built.files["png"].startswith(PNG)
    found = {(r["layer"], r["mu"], r["seed"]): float(r["accuracy"]) for r in rows(built)}
    assert len(found) == 12 and found["conv2", "2", "1"] == pytest.approx(53)
    assert found["FedAvg", "", "0"] == pytest.approx(49)


def test_layers_on_one_seed_with_parts_missing_and_one_that_diverges(tmp_path: Path) -> None:
    """conv1 has one point only, 49: nothing to say of what mu changes there."""
    root = at_hand(tmp_path, LAYERS, ["a", *POINTS])
    percent(root, "conv1-150", {0: 49})
    percent(root, "conv1-200", {1: 99})
    diverge(root, "near-conv1-200-0")
    built = made(root, "layers")
    assert (
        built.missing == ("conv2, mu 1.5", "conv2, mu 2", "fc1, mu 1.5", "FedAvg")
        and built.words == ()
    )
    assert built.table[1:3] == [
        ["conv1", "49.00", "99.00; 1 of 2 seeds diverges"],
        ["conv2", "not run yet", "not run yet"],
    ]
    percent(root, "a", {0: 50})
    assert made(root, "layers").words == (
        "0 of 1 points are above FedAvg (50.00 %).",
        "Above it: mu 1.5 in 0 of 1 layers.",
    )
    diverge(root, "near-conv1-200-0", "near-a-1")
    built = made(root, "layers")
    assert "FedAvg" not in built.missing and built.words == ()


TEMPERATURE = """\
f:
  kind: temperature
  title: A figure
  protocol: []
  study: one
  scenario: near
  methods: {A: a, B: b, C: other}
"""


def temperatures(**layers: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    values = {
        f"fednlr/T/{name}": torch.tensor(t, dtype=torch.float32) for name, t in layers.items()
    }
    ratios = {f"fednlr/mu/{name}": torch.full((2, 2), 1.25) for name in layers}
    return {"round/clients": torch.tensor([[0, 1], [1, 0]])} | values | ratios


def test_temperatures_by_layer(tmp_path: Path) -> None:
    """Rounds are lines.

    conv1: mean 10 / 4, last round 2 and 4, sqrt(2); conv2: 24 / 4, 5 and 9, sqrt(8); fc1: 1.
    """
    root = at_hand(tmp_path, TEMPERATURE, ["a", "b", "other"])
    recorded = temperatures(fc1=[[1, 1], [1, 1]], conv2=[[5, 5], [5, 9]], conv1=[[1, 3], [2, 4]])
    run(root, "near", "a", 0, [0.5, 0.5], recorded=recorded)
    built = made(root, "temperature")
    assert built.table[1:] == [
        ["A", "conv1", "1.250", "2.5", "1", "4", "1.41"],
        ["A", "conv2", "1.250", "6", "5", "9", "2.83"],
        ["A", "fc1", "1.250", "1", "1", "1", "0"],
    ]
    assert built.words == (
        (
            "A: the highest temperature is that of conv2, layer 2 of 3 (6 on average), the lowest "
            "that of fc1 (1)."
        ),
    )
    assert built.missing == ("B",), "C is not run at this size"
    assert built.files["png"].startswith(PNG) and len(rows(built)) == 3 * 2 * 2
    assert rows(built)[2] == {
        "method": "A",
        "layer": "conv1",
        "round": "2",
        "client_index": "0",
        "T": "2.0",
    }


def test_temperatures_without_runs_and_of_a_method_that_diverges(tmp_path: Path) -> None:
    root = at_hand(tmp_path, TEMPERATURE, ["a", "b", "other"])
    assert made(root, "temperature") == Built((), {}, (), ("A", "B"))
    diverge(root, "near-b-0")
    assert made(root, "temperature") == Built((), {}, ("B diverges.",), ("A",))
    diverge(root, "near-a-0", "near-b-0")
    assert made(root, "temperature") == Built((), {}, ("A diverges.", "B diverges."), ())


ACTIVATIONS = """\
f:
  kind: activations
  title: A table
  protocol: []
  study: one
  scenario: near
  methods: {FedAvg: a, FedNLR: b}
  clients: [0, 1]
"""
# Of client 0 in the last round; lines are classes, columns neurons.
BEFORE = [[0.5, 0.2, 0.0, 0.9, 0.8], [0.1, 0.2, 0.0, 0.3, 0.4], [0.3, 0.1, 0.0, 1.0, 0.0]]


def observed(
    after: Sequence[float], before: Sequence[Sequence[float]] = BEFORE
) -> dict[str, Tensor]:
    """Two rounds, two clients, three classes, five neurons; `after` is of class 0.

    What is not to be read is 9.

    Client 0 stands second in the last round.
    """
    shape = (2, 2, 3, 5)
    found = {"before": torch.full(shape, 9.0), "after": torch.full(shape, 9.0)}
    found["before"][1, 1], found["after"][1, 1, 0] = torch.tensor(before), torch.tensor(after)
    bound = torch.ones(shape, dtype=torch.bool)
    bound[1, 1] = False
    bound[1, 1, 2, 3] = True
    clients = torch.tensor([[0, 1], [1, 0]])
    return {"round/clients": clients, "fednlr/bound": bound} | {
        f"fednlr/{key}": x for key, x in found.items()
    }


def holdings(root: Path, seed: int, *clients: str) -> None:
    """Samples of three classes, by client."""
    folder = place(root) / "partitions" / f"near-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{client},7,0.0,{held}" for client, held in enumerate(clients)]
    (folder / "clients.csv").write_text("\n".join(["client,samples,entropy,x,y,z", *lines]) + "\n")


FEDAVG, FEDNLR = [0.3, 0.1, 0.0, 0.95, 0.9], [0.4, 0.1, 0.0, 0.9, 0.84]


def test_activations_of_bound_neurons(tmp_path: Path) -> None:
    """C-1 has class 2, C-2 class 0.

    Neurons 1 and 5 are bound to class 0, neuron 4 to class 2; 2 ties, 3 is dead.

    FedAvg: 0.3 - 0.5 = -0.2 and 0.9 - 0.8 = +0.1, mean -0.05. FedNLR: -0.1 and +0.04, mean -0.03.
    More active on class 0 than on class 2 are neurons 1, 5 and 2, which goes from 0.2 to 0.1: means
    -0.2 / 3 and -0.16 / 3.
    """
    root = at_hand(tmp_path, ACTIVATIONS, "ab")
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR))
    holdings(root, 0, "0,0,7", "7,0,0")
    built = made(root, "activations")
    assert built.table[1:] == [
        ["1", "0.30", "0.50*", "0.30*", "-0.200", "0.40*", "-0.100"],
        ["2", "0.10", "0.20", "0.10", "", "0.10", ""],
        ["3", "0.00", "0.00", "0.00", "", "0.00", ""],
        ["4", "1.00*", "0.90", "0.95", "", "0.90", ""],
        ["5", "0.00", "0.80*", "0.90*", "+0.100", "0.84*", "+0.040"],
    ]
    assert built.words == (
        "Shown is seed 0.",
        "Seed 0 (classes 2 and 0, accuracy before the round 70.0%): on C-2, 2 neurons bound to "
        "its class: on average "
        "-0.050 by FedAvg (1 fall) and -0.030 by FedNLR (1 fall), less with FedNLR; on C-2, 3 "
        "neurons more active "
        "there than on C-1: on average -0.067 by FedAvg (2 fall) and -0.053 by FedNLR (2 fall), "
        "less with FedNLR. By "
        "definition 1, sample by sample, 1 of 5 neurons are bound to any class.",
    )
    assert built.missing == () and built.files["png"].startswith(PNG)
    assert [r["bound_to"] for r in rows(built)] == ["0", "0", "", "", "", "", "2", "2", "0", "0"]
    assert (
        float(rows(built)[1]["c2_after"]) == pytest.approx(0.4)
        and rows(built)[1]["method"] == "FedNLR"
    )
    assert built.printed == [["", "x", "y"], ["Line", "0.5", ""]]


def test_activations_are_told_seed_by_seed(tmp_path: Path) -> None:
    """On seed 1 the methods change places; on seed 2 C-2 has class 1, which no neuron is bound
    to."""
    root = at_hand(tmp_path, ACTIVATIONS, "ab")
    for seed, (one, other) in enumerate([(FEDAVG, FEDNLR), (FEDNLR, FEDAVG), (FEDAVG, FEDNLR)]):
        run(root, "near", "a", seed, [0.7, 0.2], recorded=observed(one))
        run(root, "near", "b", seed, [0.7, 0.3], recorded=observed(other))
        holdings(root, seed, "0,0,7", "0,7,0" if seed == 2 else "7,0,0")
    built = made(root, "activations")
    assert built.words[0] == "Shown is seed 0." and len(built.words) == 4
    assert (
        "(1 fall), less with FedNLR; " in built.words[1]
        and "(1 fall), not less with FedNLR; " in built.words[2]
    )
    assert (
        "70.0%): no neuron is bound to its class; on C-2, 2 neurons more active there"
        in built.words[3]
    )
    assert len(rows(built)) == 3 * 5 * 2


def test_activations_with_parts_missing_and_of_a_method_that_diverges(tmp_path: Path) -> None:
    root = at_hand(tmp_path, ACTIVATIONS, "ab")
    assert made(root, "activations").missing == ("FedAvg", "FedNLR")
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    assert made(root, "activations") == Built((), {}, (), ("FedNLR",))
    diverge(root, "near-b-0")
    assert made(root, "activations") == Built((), {}, ("FedNLR diverges.",), ())
    (place(root) / DIVERGED).unlink()
    run(root, "near", "b", 1, [0.7, 0.2], recorded=observed(FEDNLR))
    assert made(root, "activations").missing == ("a seed of both",)


def test_activations_of_different_models_are_not_compared(tmp_path: Path) -> None:
    root = at_hand(tmp_path, ACTIVATIONS, "ab")
    other = [[x + 0.001 for x in line] for line in BEFORE]
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR, other))
    holdings(root, 0, "0,0,7", "7,0,0")
    assert (
        made(root, "activations")
        .words[1]
        .endswith(
            ": the methods do not start from the same model, so that nothing can be compared."
        )
    )


def test_activations_want_clients_with_one_class(tmp_path: Path) -> None:
    root = at_hand(tmp_path, ACTIVATIONS, "ab")
    run(root, "near", "a", 0, [0.7, 0.2], recorded=observed(FEDAVG))
    run(root, "near", "b", 0, [0.7, 0.3], recorded=observed(FEDNLR))
    holdings(root, 0, "0,0,7", "3,4,0")
    with pytest.raises(UserError, match="client 1 has 2 classes"):
        made(root, "activations")


# Example 1, by differences of the loss.
# --------------------------------------------------------------------------------------------------


CENTRES = np.array([[1, 1 / 3], [1 / 3, 1]])  # of classes 1 and 2, as example 1 has them
START = np.concatenate(
    [CENTRES.flatten(), (CENTRES @ CENTRES).flatten()]
)  # eq. 2 with A = 1, CENTRES is symmetric


def network(w: Values, x: Values) -> tuple[Values, Values]:
    """ReLU(W x) and softmax(V ReLU(W x)); `w` holds W, then V."""
    h = np.maximum(w[:4].reshape(2, 2) @ x, 0)
    score = np.exp(w[4:].reshape(2, 2) @ h)
    return h, np.asarray(score / score.sum())


def stepped(label: int, factors: Values | None = None) -> Values:
    """The weights after a step of 0.5 against central differences of -log p of `label` at its
    centre."""
    gradient, eps = np.zeros(8), 1e-5
    for i, unit in enumerate(np.eye(8)):
        up, down = (
            -math.log(network(START + s * eps * unit, CENTRES[label])[1][label]) for s in (1, -1)
        )
        gradient[i] = (up - down) / (2 * eps)
    return np.asarray(START - 0.5 * gradient * (1 if factors is None else factors))


def flat(weights: example.Weights) -> Values:
    return np.concatenate([weights.hidden.flatten(), weights.classes.flatten()])


def nlr_factors() -> Values:
    """Eqs. 14-17 on client 1: mu_l = 1 + 0.45 l / 2 + 0.3 log10 2.

    Of two neurons the more active one has 2 mu / (1 + mu), the other one 2 / (1 + mu). In both
    layers that is the first: hidden 10/9 against 2/3, scores 136/81 against 40/27.
    """
    found = []
    for l in (1, 2):  # noqa: E741, the paper's letter
        mu = 1 + 0.45 * l / 2 + 0.3 * math.log10(2)
        found += [2 * mu / (1 + mu)] * 2 + [2 / (1 + mu)] * 2  # a row of two weights per neuron
    return np.array(found)


def test_example_1_starts_where_its_hidden_activations_are_the_classifier_s_rows() -> None:
    """Eq. 2 with A = 1: the activations on the centres are (10/9, 2/3) and (2/3, 10/9)."""
    np.testing.assert_allclose(flat(example.START), START)
    np.testing.assert_allclose(START[4:], [10 / 9, 2 / 3, 2 / 3, 10 / 9])


def test_example_1_gives_eq_9() -> None:
    before, after = network(START, CENTRES[1]), network(stepped(0), CENTRES[1])
    assert [f"{x:.2f}" for x in (*before[0], *before[1])] == ["0.67", "1.11", "0.45", "0.55"]
    assert [f"{x:.2f}" for x in (*after[0], *after[1])] == ["0.73", "1.04", "0.63", "0.37"]


@pytest.mark.parametrize("client", [0, 1])
def test_example_1_s_steps_are_those_of_the_loss_s_differences(client: int) -> None:
    np.testing.assert_allclose(flat(example.trained(client)), stepped(client), atol=1e-9)


def test_example_1_s_step_with_fednlr_s_rates() -> None:
    np.testing.assert_allclose(
        flat(example.trained(0, own_rates=True)), stepped(0, nlr_factors()), atol=1e-9
    )


def test_figure_1_says_what_the_differences_say() -> None:
    built = build(of_targets("fednlr", ROOT)["nlr-fig1"], Measured("fednlr", "smoke", ROOT))
    start = network(START, CENTRES[1])[0][1]
    plain, own = (
        network(w, CENTRES[1])[0][1] - start for w in (stepped(0), stepped(0, nlr_factors()))
    )
    assert plain < own < 0, "both lower the bound neuron, FedNLR less"
    assert built.words == (
        "8 of 8 numbers are those that eq. 9 prints, to two decimals.",
        (
            f"The neuron that is bound to class 2 changes by {plain:+.4f} with FedAvg and by "
            f"{own:+.4f} with FedNLR."
        ),
    )
    assert [line[1][-6:] + line[2][-6:] for line in built.table[1:]] == [
        "(0.67)(0.73)",
        "(1.11)(1.04)",
        "(0.45)(0.63)",
        "(0.55)(0.37)",
    ]
    assert built.missing == () and built.files["png"].startswith(PNG)


# From digits to the report.
# --------------------------------------------------------------------------------------------------


def test_table_4_end_to_end(tmp_path: Path) -> None:
    """In a folder of its own; before the last round both methods are FedAvg, so that table 4
    compares one model."""
    own = Path("pipelines", "papers", "fednlr")
    shutil.copytree(ROOT / own, tmp_path / own, ignore=shutil.ignore_patterns("dvc.lock"))
    here = Workspace.of(tmp_path, {})
    study.execute(here, of_paper("fednlr", "smoke", tmp_path)["activations"])
    stage.run(here, "fednlr", "smoke")
    folder = tmp_path / "papers" / "built" / "fednlr" / "smoke"
    assert {f"{name}.md" for name in TARGETS} < set(os.listdir(folder / "report"))
    assert (folder / "report" / "nlr-tab4.png").stat().st_size < 200_000
    assert (
        "Not there yet: FedAvg, CIFAR-10, Shards (20, 2)"
        in (folder / "report" / "nlr-tab1.md").read_text()
    )
    runs = folder / "studies" / "activations" / "runs"
    found = results.table(folder / "report" / "nlr-tab4.csv")
    assert len(found) == 2 * 25 * 2
    for seed in (0, 1):
        base, own = (
            load_file(runs / f"one-class-{name}-{seed}" / "recorded.safetensors")
            for name in RECIPES
        )
        first, second = (
            results.rows(runs / f"one-class-{name}-{seed}" / "rounds.csv", 6) for name in RECIPES
        )
        columns = ("test_accuracy", "bytes_up", "local_loss")
        assert [[row[c] for c in columns] for row in first[:5]] == [
            [row[c] for c in columns] for row in second[:5]
        ]
        for key in ("before", "after", "bound"):
            assert base[f"fednlr/{key}"].shape == (6, 10, 10, 25), (
                "rounds, clients, classes, neurons"
            )
            assert torch.equal(base[f"fednlr/{key}"][:5], own[f"fednlr/{key}"][:5])
        assert torch.equal(base["fednlr/before"][5], own["fednlr/before"][5])
        assert not torch.equal(base["fednlr/after"][5], own["fednlr/after"][5])
        # All clients receive the same model and are looked at on the same samples.
        assert torch.equal(
            base["fednlr/before"][5], base["fednlr/before"][5, :1].expand(10, -1, -1)
        )
        assert torch.all(own["fednlr/factor/fc1"][:5] == 1) and torch.all(
            base["fednlr/factor/fc1"] == 1
        )
        torch.testing.assert_close(own["fednlr/factor/fc1"][5].mean(1), torch.ones(10))
        # Definition 1 is stricter than the mean by which the table binds.
        before, bound = base["fednlr/before"][5, 0], base["fednlr/bound"][5, 0].bool()
        assert all(before[:, m].argmax() == c for c, m in bound.nonzero().tolist())
        held = results.table(runs.parent / "partitions" / f"one-class-{seed}" / "clients.csv")
        c1, c2 = (next(c for c in range(10) if int(held[client][str(c)])) for client in (0, 1))
        for line in (line for line in found if line["seed"] == str(seed)):
            m, after = (
                int(line["neuron"]) - 1,
                (base if line["method"] == "FedAvg" else own)["fednlr/after"],
            )
            assert float(line["c1_before"]) == pytest.approx(before[c1, m].item())
            assert float(line["c2_before"]) == pytest.approx(before[c2, m].item())
            assert float(line["c2_after"]) == pytest.approx(after[5, 0, c2, m].item())
