"""The report's numbers against arithmetic by hand, its words against what the numbers allow, its
files as a whole."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import cache, config, results, search
from fedml_noniid.pipelines.reporting import (
    chosen,
    cost,
    figures,
    method_table,
    pages,
    report,
    summary,
    tables,
)
from fedml_noniid.pipelines.reporting.summary import ScenarioSummary, Spread
from fedml_noniid.pipelines.reporting.text import NONE, plain
from tests.files import contents

MIB = 2**20
SEEDS = (0, 1, 2)
# Final accuracies by seed. fedavg: mean 0.80, deviations -0.02, 0, 0.02: std 0.02.
# scaffold - fedavg: 0.10, 0.12, 0.11: mean 0.11, std 0.01. fnr - fedavg: 0.03, -0.02, -0.01: mean
# 0, std sqrt(0.0007).
FINALS = {"fedavg": (0.78, 0.80, 0.82), "scaffold": (0.88, 0.92, 0.93), "fnr": (0.81, 0.78, 0.81)}

ENTRIES = {"fnr": {"fnr": {"p": 0.5}}, "fnr-leak": {"recipe": "fnr"}}


def write_params(
    root: Path, recipes: Sequence[str], seeds: Sequence[int], scenarios: Sequence[str] = ("skew",)
) -> None:
    settings = {"partition": "dirichlet", "clients": 4, "alpha": 0.1, "participation": 0.5}
    params = {
        "experiment": "toy <b>",
        "data": {"name": "digits", "validation": 0, "public": 0},
        "scenario_names": list(scenarios),
        "scenarios": dict.fromkeys(scenarios, settings),
        "recipe_names": list(recipes),
        "recipes": {name: ENTRIES.get(name, {}) for name in recipes},
        "seeds": list(seeds),
        "train": {
            "model": "mlp",
            "rounds": 6,
            "epochs": 2,
            "batch_size": 32,
            "lr": 0.1,
            "momentum": 0.0,
        },
        "deploy": {"recipe": recipes[0], "scenario": scenarios[0], "silos": 2},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(params))


def write_run(root: Path, recipe: str, seed: int, course: Sequence[float], **options: Any) -> Path:
    """One finished train item that ended each round with the accuracies of `course` (NaN: not
    evaluated)."""
    scenario, composition = options.get("scenario", "skew"), options.get("composition", recipe)
    key = f"{scenario}-{recipe}-{seed}"
    run, evaluation = root / "runs" / key, root / "evaluation" / key
    run.mkdir(parents=True)
    megabytes = options.get("mib", 1)
    lines = [
        f"{t},{'' if math.isnan(x) else x},{megabytes * MIB},{MIB}" for t, x in enumerate(course, 1)
    ]
    (run / "rounds.csv").write_text(
        "\n".join(["round,test_accuracy,bytes_up,bytes_down", *lines]) + "\n"
    )
    record = {
        "scenario": scenario,
        "recipe": recipe,
        "composition": composition,
        "seed": seed,
        "weights_sha256": options.get("weights", f"{recipe} {seed}"),
    }
    about = {
        "params": {"train.rounds": len(course)},
        "rounds": len(course),
        "tags": options.get("tags", {}),
        "final": {},
        "notes": options.get("notes", []),
    }
    (run / "run.json").write_text(json.dumps(record | about))
    if options.get("evaluated", True):
        evaluation.mkdir(parents=True)
        (evaluation / "metrics.json").write_text(json.dumps(options.get("metrics", {})))
        (evaluation / "per_class.csv").write_text(
            "class,samples,accuracy\ncat,40,0.5\ndog,60,0.5\n"
        )
        (evaluation / "per_client.csv").write_text(
            f"client,samples,accuracy\n0,3,0.9\n1,3,{course[-1] / 2}\n2,0,\n"
        )
    return run


def write_runs(root: Path, finals: Mapping[str, Sequence[float]], **options: Any) -> None:
    """Runs of one round each: recipe -> the final accuracy of seed 0, 1, ..."""
    for recipe, of in finals.items():
        for seed, final in enumerate(of):
            write_run(root, recipe, seed, [final], **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three recipes on three seeds, six rounds each; rounds two to six as good as the last."""
    write_params(tmp_path, list(FINALS), SEEDS)
    for recipe, finals in FINALS.items():
        for seed, final in zip(SEEDS, finals, strict=True):
            write_run(
                tmp_path, recipe, seed, [0.1] + [final] * 5, mib=2 if recipe == "scaffold" else 1
            )
    partition = tmp_path / "partitions" / "skew-0"
    partition.mkdir(parents=True)
    (partition / "heatmap.png").write_bytes(b"\x89PNG picture")
    (partition / "clients.csv").write_text(
        "client,samples,entropy,cat,dog\n0,10,0,10,0\n1,30,0.5,10,20\n"
    )
    return tmp_path


SKEW = {
    "label_distance_mean": 0.456,
    "label_distance_max": 0.5,
    "entropy_mean": 0.25,
    "size_gini": 1 / 4,
}


def sum_up(
    root: Path, recipes: Sequence[str] = tuple(FINALS), seeds: Sequence[int] = SEEDS
) -> ScenarioSummary:
    scenario = summary.scenario("skew", results.read(root), recipes, seeds)
    assert scenario is not None
    return scenario


def ranks(scenario: ScenarioSummary) -> list[tuple[str, int]]:
    return [(one.recipe, one.rank) for one in scenario.methods]


def said(scenario: ScenarioSummary) -> str:
    """All sentences of the report on a scenario."""
    of = report.section(scenario)
    return " ".join([*of["warnings"], *of["answer"], *of["notes"]])


def columns(table: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Title -> cells of the rows below."""
    header, *rows = table
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def close(spread: Spread | None, mean: float, std: float | None, n: int) -> bool:
    assert spread is not None
    return spread == (pytest.approx(mean), std if std is None else pytest.approx(std), n)


def test_means_and_sample_standard_deviations_by_hand(root: Path) -> None:
    spreads = {one.recipe: one.spreads for one in sum_up(root).methods}
    wanted = {
        ("fedavg", "final"): (0.80, 0.02),
        ("fnr", "final"): (0.80, math.sqrt(0.0006 / 2)),  # deviations 0.01, -0.02, 0.01
        ("scaffold", "vs_baseline"): (0.11, 0.01),
        ("fnr", "vs_baseline"): (0.0, math.sqrt((0.03**2 + 0.02**2 + 0.01**2) / 2)),
        ("fedavg", "worst_client"): (0.40, 0.01),  # half of each final accuracy
        ("scaffold", "traffic_round_bytes"): (3 * MIB, 0),
        ("scaffold", "traffic_total_bytes"): (18 * MIB, 0),
    }
    for (recipe, what), (mean, std) in wanted.items():
        assert close(spreads[recipe][what], mean, std, 3), (recipe, what)
    assert "vs_baseline" not in spreads["fedavg"]
    assert "noisy test, %" not in tables.cells(sum_up(root))[0]


def test_the_noisy_test_has_a_column_where_there_is_one(tmp_path: Path) -> None:
    """fedavg: 0.3, 0.4, 0.5 in noise; fnr was evaluated before there was any."""
    for seed, noisy in zip(SEEDS, (0.3, 0.4, 0.5), strict=True):
        write_run(tmp_path, "fedavg", seed, [0.5], metrics={"accuracy_noisy": noisy})
    write_run(tmp_path, "fnr", 0, [0.6])
    scenario = sum_up(tmp_path)
    shown = columns(tables.cells(scenario))
    assert shown["method"] == ("fnr", "fedavg"), "ranked by the clean test"
    assert shown["noisy test, %"] == ("-", "40.00 ± 10.00")
    assert "Noisy test: on one copy of the test set per client" in said(scenario)


def test_last_five_and_best_count_evaluated_rounds_only(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.9, 0.1, math.nan, 0.2, 0.3, 0.4, 0.5, math.nan])
    (one,) = sum_up(tmp_path).methods
    assert close(one.final, 0.5, None, 1) and close(one.spreads["best"], 0.9, None, 1)
    assert close(one.spreads["last_5_rounds"], (0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5, None, 1)
    assert one.rounds == 8


def test_ranks_mark_what_cannot_be_told_apart_from_the_best(tmp_path: Path) -> None:
    """a - b: 0.04 and 0.02, one degree of freedom, t = 3: p = 1 - 2 atan(3) / pi = 0.2.

    a - c: 0.3 and 0.31, t = 61. d is no worse than c.
    """
    finals = {"a": (0.54, 0.53), "b": (0.50, 0.51), "c": (0.24, 0.22), "d": (0.24, 0.22)}
    write_runs(tmp_path, finals)
    scenario = sum_up(tmp_path, ["c", "b", "a", "d"], [0, 1])
    shown = columns(tables.cells(scenario))
    assert shown["method"] == ("a", "b", "c", "d") and shown["rank"] == ("1", "2 ≈", "3", "3")
    assert "≈ can't be told apart from the best mean." in said(scenario)


RARE = {"majority_accuracy": 0.97, "balanced_accuracy": 0.5, "macro_f1": 0.49, "classes_named": 1.0}
TWO = RARE | {"classes_named": 2.0}


def test_a_constant_answer_is_not_praised(tmp_path: Path) -> None:
    """fnr is above FedAvg on every seed, but not above always naming the most frequent class."""
    write_params(tmp_path, ["fedavg", "scaffold", "fnr"], SEEDS)
    write_runs(tmp_path, {"fedavg": [0.90] * 3, "fnr": [0.96]}, metrics=TWO)
    write_runs(tmp_path, {"scaffold": [0.97] * 3}, metrics=RARE)
    write_run(tmp_path, "fnr", 1, [0.96], metrics=RARE)
    write_run(tmp_path, "fnr", 2, [0.96], metrics=TWO)
    scenario = sum_up(tmp_path)
    assert ranks(scenario) == [("scaffold", 0), ("fnr", 0), ("fedavg", 0)]
    of = report.section(scenario)
    one_class, low = of["warnings"]
    assert one_class.startswith("WARNING, ONE CLASS: ")
    assert one_class.endswith(": scaffold (seeds 0, 1, 2); fnr (seed 1).")
    assert low.endswith("class (majority class: 97.00 ± 0.00 %): scaffold, fnr, fedavg.")
    assert of["answer"] == ["No method can be recommended, as each has a warning."]
    ((_, compared),) = of["compared"]
    assert set(columns(compared)["verdict"]) == {"above, but with a warning"}
    shown = columns(of["table"])
    labels = ("scaffold ONE CLASS", "fnr ONE CLASS", "fedavg", "majority class")
    assert shown["method"] == labels and set(shown["rank"]) == {NONE}
    assert shown["last round, %"][-1] == "97.00 ± 0.00"
    assert (shown["balanced, %"][0], shown["macro-F1, %"][0]) == ("50.00 ± 0.00", "49.00 ± 0.00")
    folder = report.write(tmp_path)
    for name in ("report.html", "report.md", "table.txt"):
        page = re.sub(r"\s+", " ", (folder / name).read_text())
        assert page.count("WARNING, ONE CLASS") == 1 and "fnr (seed 1)." in page
        assert page.index("WARNING, ONE CLASS") < page.index("No method can be recommended")
    assert not (folder / "dvc" / "best.json").exists()
    row = results.table(folder / "summary.csv")[0]
    assert (row["recipe"], row["rank"], row["one_class_seeds"]) == ("scaffold", "0", "0 1 2")


def test_a_method_that_beats_the_majority_is_named_with_those_that_do_not(tmp_path: Path) -> None:
    """a leads but names one class on seed 2.

    c is above the majority class by one of 100 test samples.
    """
    finals = {"a": (0.96, 0.97), "b": (0.90, 0.91, 0.89), "c": [0.81] * 3}
    write_runs(tmp_path, finals, metrics=TWO | {"majority_accuracy": 0.80})
    write_run(tmp_path, "a", 2, [0.80], metrics=RARE | {"majority_accuracy": 0.80})
    scenario = sum_up(tmp_path, ["a", "b", "c"])
    assert ranks(scenario) == [("a", 0), ("b", 1), ("c", 0)]
    of = report.section(scenario)
    one, low = of["warnings"]
    assert one.endswith(": a (seed 2).") and low.endswith("(majority class: 80.00 ± 0.00 %): c.")
    assert of["answer"][0].startswith(
        "b has the best mean test accuracy after the last round of the methods without a warning,"
    )


def test_personal_models_have_a_constant_answer_of_their_own(tmp_path: Path) -> None:
    """A client that has one class is right to name it, but that is no merit of the method."""
    tags = {"own_models": "accuracies are those of the clients' own models"}
    for recipe, final, majority in (("fedavg", 0.6, 0.25), ("fedbn", 0.98, 0.95)):
        metrics = RARE | {"majority_accuracy": majority, "classes_named": 4.0}
        of = tags if recipe == "fedbn" else {}
        write_run(tmp_path, recipe, 0, [final], metrics=metrics, tags=of)
    scenario = sum_up(tmp_path, ["fedavg", "fedbn"], [0])
    assert [row[:2] for row in tables.cells(scenario)[-2:]] == [
        ["majority class", "25.00"],
        ["local majority class", "95.00"],
    ]
    assert ranks(scenario) == [("fedavg", 1), ("fedbn", 0)], "it is another test"
    assert "vs_baseline" not in scenario.methods[1].spreads
    assert f"fedbn: {tags['own_models']}." in said(scenario)
    section = report.section(scenario)
    assert section["answer"][0].endswith("it is the only method that can be compared.")
    two, *_ = section["warnings"]
    assert two.startswith("WARNING, TWO TESTS: the accuracy of fedbn is that of the clients' own")
    for alone in ("fedavg", "fedbn"):
        of = sum_up(tmp_path, [alone], [0])
        assert ranks(of) == [(alone, 1)] and not report.section(of)["warnings"]


def test_epsilon_is_the_largest_of_the_seeds_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    tags = {"privacy": "per sample at delta 1e-05; per client at delta 0.001"}
    write_runs(tmp_path, {"dpsgd": (0.6, 0.7)}, tags=tags)
    for path, sample in zip(sorted(tmp_path.glob("runs/*/rounds.csv")), (2.5, 3.25), strict=True):
        head, *lines = path.read_text().splitlines()
        found = [f"{head},epsilon_per_sample,epsilon_per_client"]
        found += [f"{line},{sample},inf" for line in lines]
        path.write_text("\n".join(found) + "\n")
    notes = said(sum_up(tmp_path, ["dpsgd"], [0, 1]))
    assert "dpsgd: epsilon 3.25 per sample at delta 1e-05, epsilon inf per client at " in notes
    assert "not covered: numbers of samples and steps, losses, tests on own samples" in notes


def test_comparisons_say_no_more_than_the_intervals(root: Path) -> None:
    """Half an interval of the last test is 4.3027 / sqrt(3) = 2.4841 deviations; of the first of
    two, at 97.5 %, 6.2053 / sqrt(3) = 3.5826.

    11 - 3.58 = 7.42; 2.6458 * 2.4841 = 6.57; -11 + 3.6056 * 2.4841 = -2.04.

    scaffold - fnr: 7, 14, 12 points: t = 11 sqrt(3) / sqrt(13) = 5.28, p = 1 - 5.28 / sqrt(27.92 +
    2) = 0.034.
    """
    of = report.section(sum_up(root))
    assert of["answer"] == [
        "scaffold has the best mean test accuracy after the last round, 91.00 % (3 seeds).",
        "The 2 others are worse at 5 % (paired t tests over seeds, Holm's adjustment for 2).",
    ]
    assert "100 test samples: one sample is 1 points." in " ".join(of["notes"])
    (base, with_base), (best, with_best) = of["compared"]
    rows = {(name, *row[:1]): row[1:] for name, table in of["compared"] for row in table[1:]}
    assert (base, best) == ("fedavg", "scaffold") and with_base[0] == with_best[0]
    low, high = "+7.42 to +14.58", "-19.96 to -2.04"
    assert rows["fedavg", "scaffold"] == ["+11.00", low, "0.003", "0.005", "3 of 3", "better"]
    assert rows["scaffold", "fnr"] == ["-11.00", high, "0.034", "0.034", "0 of 3", "worse"]
    assert rows["fedavg", "fnr"][1] == "-6.57 to +6.57" and rows["fedavg", "fnr"][-1] == "undecided"


def test_an_interval_that_holms_adjustment_does_not_confirm_decides_nothing(tmp_path: Path) -> None:
    """1, 2 and 2 of 100 samples: t = 5, p = 1 - 5 / sqrt(27) = 0.038, and twice that.

    At 97.5 %: 1.667 +- 3.5826 * 0.5774. What follows has the same level: 10 * 3.5826.
    """
    of = {"fedavg": [0.5] * 3, "fnr": (0.51, 0.52, 0.52), "scaffold": (0.6, 0.5, 0.4)}
    write_runs(tmp_path, of)
    fnr, scaffold = tables.compared(sum_up(tmp_path))[0][1][1:]
    assert fnr[2:5] == ["-0.40 to +3.74", "0.038", "0.075"] and fnr[-1] == "undecided"
    assert scaffold[2] == "-35.83 to +35.83" and scaffold[-1] == "undecided"


def test_methods_that_differ_by_one_sample_are_not_told_apart(tmp_path: Path) -> None:
    """One of the 100 test samples on each of four seeds: no seeds would help."""
    write_runs(tmp_path, {"fedavg": [0.5] * 4, "fnr": [0.51] * 4})
    scenario = sum_up(tmp_path, ["fedavg", "fnr"], range(4))
    assert tables.compared(scenario)[0][1][1][-1] == "within one sample"
    _, undecided, needed = report.section(scenario)["answer"]
    assert undecided.startswith("These seeds can't tell it apart from fedavg at 5 % (paired t")
    assert needed.endswith("only a larger test set could tell them apart.")


def test_methods_with_the_same_weights_are_equal_not_undecided(tmp_path: Path) -> None:
    """b is fedavg under another name.

    The comparison with it is no test, so Holm counts one test of fnr, not two. c only has the same
    accuracies.
    """
    for seed, final in enumerate(FINALS["fedavg"]):
        for recipe in ("fedavg", "b"):
            write_run(tmp_path, recipe, seed, [final], weights=f"same {seed}")
        write_run(tmp_path, "c", seed, [final], weights=f"same {seed}" if seed else "other")
        write_run(tmp_path, "fnr", seed, [final - 0.01 * (2 + seed)])
    scenario = sum_up(tmp_path, ["fedavg", "b", "fnr"])
    best, worse = report.section(scenario)["answer"]
    assert best.startswith("fedavg has the best mean test accuracy after the last round, 80.00 %")
    assert best.endswith(", and b ends with the same weights.")
    assert worse.startswith("The other one is worse at 5 %") and "adjustment for 1)" in worse
    shown = columns(tables.cells(scenario))
    assert shown["method"] == ("fedavg", "b", "fnr") and shown["rank"] == ("1", "1 =", "3")
    assert "= ends with the same weights as the best mean, so it is the same" in said(scenario)
    row = tables.compared(scenario)[0][1][1]
    assert row == ["b", "+0.00", "-", "-", "-", "0 of 3", "same weights"]
    only = sum_up(tmp_path, ["fedavg", "b"], [0])
    assert len(report.section(only)["answer"]) == 1, "equal methods need no more seeds"
    assert tables.compared(sum_up(tmp_path, ["fedavg", "c"]))[0][1][1][-1] == "undecided"


@pytest.mark.parametrize(
    ("differences", "needed"),
    [
        # Deviation sqrt(7) points: 4 * sqrt(n) / sqrt(7) exceeds t for n = 5 (3.38 > 2.78) but not
        # for 4 (3.02 < 3.18).
        ((0.01, 0.05, 0.06), "4.00 points to fedavg, would need about 5 seeds, if"),
        # Deviation 17.3 points.
        ((0.22, -0.08, -0.08), "2.00 points to fedavg, would need more than 100 seeds."),
    ],
)
def test_the_answer_says_how_many_seeds_would_decide(
    tmp_path: Path, differences: Sequence[float], needed: str
) -> None:
    write_runs(tmp_path, {"fedavg": [0.5] * 3, "fnr": [0.5 + one for one in differences]})
    answer = report.section(sum_up(tmp_path))["answer"]
    assert len(answer) == 3 and answer[2].startswith(
        f"The smallest gap above one test sample, {needed}"
    )


def test_a_long_list_of_equals_is_a_number(tmp_path: Path) -> None:
    finals = {f"m{i}": (0.5, 0.5, 0.5) for i in range(9)} | {"bad": (0.10, 0.11, 0.12)}
    write_runs(tmp_path, finals)
    answer = report.section(sum_up(tmp_path, list(finals)))["answer"]
    assert "apart from 8 others (marked ≈) at 5 %" in answer[1]


def test_one_seed_claims_nothing(tmp_path: Path) -> None:
    write_runs(tmp_path, FINALS)
    scenario = sum_up(tmp_path, seeds=[0])
    assert "Fewer than two seeds in common can't tell methods apart" in said(scenario)
    assert not {"±", "≈"} & set(plain(tables.cells(scenario)))
    row = tables.compared(scenario)[0][1][1]
    assert row == ["scaffold", "+10.00", "-", "-", "-", "1 of 1", "one seed"]


def test_uneven_seeds_are_paired_by_seed_and_missing_runs_are_named(tmp_path: Path) -> None:
    for seed, final in ((0, 0.6), (1, 0.8)):
        write_run(tmp_path, "fedavg", seed, [final])
    for seed, final in ((1, 0.9), (2, 0.5)):
        write_run(tmp_path, "fnr", seed, [final], evaluated=False)
    scenario = sum_up(tmp_path, ["fedavg", "fnr"])
    fnr = next(one.spreads for one in scenario.methods if one.recipe == "fnr")
    assert close(fnr["vs_baseline"], 0.1, None, 1) and "worst_client" not in fnr  # seed 1 is common
    assert scenario.missing == ("skew-fedavg-2", "skew-fnr-0")
    assert "Not finished, so not in the table: skew-fedavg-2, skew-fnr-0." in said(scenario)
    assert "The methods have different seeds" in said(scenario)


def test_without_fedavg_or_a_common_seed_nothing_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "fnr", 1, [0.6])
    scenario = sum_up(tmp_path)
    assert scenario.baseline is None and tables.compared(scenario) == []
    assert "no results of plain FedAvg" in said(scenario) and "only method here" in said(scenario)
    write_run(tmp_path, "fedavg", 0, [0.5])
    assert tables.compared(sum_up(tmp_path))[0][1][1] == ["fnr", *["-"] * 5, "no seed"]


def test_without_an_evaluation_the_size_of_the_test_set_is_not_known(tmp_path: Path) -> None:
    """Equal differences then prove nothing, since one sample's worth is unknown."""
    write_runs(tmp_path, {"fedavg": [0.5] * 3, "fnr": [0.625] * 3}, evaluated=False)
    scenario = sum_up(tmp_path)
    assert "Nothing is evaluated: the size of the test set" in said(scenario)
    assert tables.compared(scenario)[0][1][1][-1] == "undecided"
    assert figures.clients(scenario, list(FINALS)) is None


def test_a_renamed_fedavg_is_still_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path, "plain", 0, [0.5], composition="fedavg")
    write_run(tmp_path, "fnr", 0, [0.6])
    scenario = sum_up(tmp_path, ["fnr", "plain"], [0])
    assert scenario.baseline is not None and scenario.baseline.recipe == "plain"
    assert "vs plain" in tables.cells(scenario)[0]
    assert "plain: a named variant, fedavg." in said(scenario)


@pytest.mark.parametrize(("public", "mark"), [("labelled", "†"), ("unlabelled", "‡"), ("none", "")])
def test_recipes_that_see_public_data_are_marked(tmp_path: Path, public: str, mark: str) -> None:
    write_run(tmp_path, "variant", 0, [0.5], tags={"public": public})
    scenario = sum_up(tmp_path, ["variant"], [0])
    table, notes = plain(tables.cells(scenario)), said(scenario)
    for each in ("†", "‡"):
        assert (each in table) is (each in notes) is (each == mark)
    assert ("without their labels" in notes) is (mark == "‡")


def test_unpaired_cohorts_are_said(tmp_path: Path) -> None:
    write_runs(tmp_path, {"fedavg": (0.5, 0.5)})
    write_runs(tmp_path, {"oort": (0.6, 0.6)}, tags={"cohorts": "oort chooses"})
    scenario = sum_up(tmp_path, ["fedavg", "oort"], [0, 1])
    notes = said(scenario)
    assert "oort §" in plain(tables.cells(scenario)) and "§ oort: oort chooses." in notes
    assert "the same clients in each round (but for §)" in notes
    table = method_table.from_scenarios([("", "", scenario)], ["fedavg", "oort"], 2)
    assert "§: chooses its clients" in repr(table) and r"oort \S" in table.to_latex()


def test_a_leak_is_named_everywhere_and_has_no_rank(tmp_path: Path) -> None:
    """Nor has centralised training; the leader and its lead are those of what can be compared."""
    leak = {"public": "labelled", "leak": "fnr trains on the test set"}
    names = ["fedavg", "fnr", "fnr-leak", "centralised"]
    write_runs(tmp_path, {"fedavg": (0.5, 0.5)}, tags={"no_effect": "mu is 0"})
    write_runs(tmp_path, {"fnr": (0.6, 0.6)}, tags={"public": "labelled"})
    write_runs(tmp_path, {"fnr-leak": (0.99, 0.99)}, composition="fnr", tags=leak)
    write_runs(tmp_path, {"centralised": (0.9, 0.9)}, tags={"federated": "no"})
    scenario = sum_up(tmp_path, names, [0, 1])
    assert ranks(scenario) == [("fnr", 1), ("fedavg", 2), ("fnr-leak", 0), ("centralised", 0)]
    of = report.section(scenario)
    assert {
        "LEAK: fnr-leak: fnr trains on the test set; its accuracy says nothing.",
        "centralised: is not federated. It is a bound on what the others can reach, so it has no "
        "rank.",
        "NO EFFECT: fedavg: mu is 0.",
    } <= set(of["notes"])
    drawn = [curve.label for curve in figures._curves(scenario)]
    assert drawn == ["fnr-leak LEAK", "centralised", "fnr †", "fedavg"], "a picture goes by height"
    assert of["answer"][0].startswith("fnr has the best mean")
    assert not {"fnr-leak", "centralised"} & set(re.findall(r"[\w-]+", " ".join(of["answer"])))
    assert [row[0] for _, rows in of["compared"] for row in rows[1:]] == ["fnr", "fedavg"]
    write_params(tmp_path, names, [0, 1])
    folder = report.write(tmp_path)
    for name in ("report.html", "report.md", "table.txt"):
        assert "fnr-leak LEAK" in (folder / name).read_text()
    assert "Lines marked LEAK have seen these samples" in (folder / "report.md").read_text()


def test_the_report_is_whole_and_needs_nothing_from_outside(root: Path) -> None:
    (root / "report").mkdir()
    (root / "report" / "from an older report.png").write_bytes(b"")
    (root / "partitions" / "skew-0" / "statistics.json").write_text(json.dumps(SKEW))
    folder = report.write(root)
    pictures = {"accuracy-skew.png", "clients-skew.png", "partition-skew.png"}
    texts = {"report.md", "report.html", "table.txt", "answer.txt", "summary.csv", "dvc"}
    assert {path.name for path in folder.iterdir()} == pictures | texts | {"curves-skew.csv"}
    assert not [name for name in os.listdir(root) if name.startswith(".report")]
    html = (folder / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == html.count("src=") == 3
    assert "href" not in html and "http" not in html and "`" not in html
    assert "toy &lt;b&gt;" in html and "<b>" not in html and "<code>noniid run</code>" in html
    style, body = html.split("</style>")
    colours = re.search(r"#[0-9a-f]{3,6}\b", style.partition("body {")[2])
    assert "@media (prefers-color-scheme: dark)" in style and not colours, "a dark page has its own"
    assert body.count("<table>") == body.count('<div class="wide" tabindex="0"><table>') == 4
    page = (folder / "report.md").read_text()
    assert all(f"]({name})" in page for name in pictures)
    order = [
        "scaffold has the best mean test accuracy",
        "2 epochs per round, batches of 32, sgd lr 0.1\n",
        "No value was tuned",
        "All methods had the same training settings.",
        "4 clients, partition dirichlet (alpha 0.1), 50% of them take part in each round.",
        "A client has 10 to 30 (median 20) training samples of 1 to 2 (median 1.5) classes.",
        "label distance 0.46 on average and 0.50 at most",
        "entropy of a client's labels 0.25 bits on average (1.00: all classes alike",
        "Gini coefficient of the sizes 0.25",
        "| scaffold | 91.00 ± 2.65 |",
        "### Compared with fedavg",
        "### Compared with scaffold",
        "| fnr | fnr.p 0.5 |",
    ]
    assert sorted(order, key=page.index) == order
    table = (folder / "table.txt").read_text()
    assert "scaffold has the best mean" in table and "Compared with fedavg" in table
    assert "noniid ui" in table and max(map(len, table.splitlines())) <= 130


def test_the_answer_for_the_terminal_is_short(root: Path) -> None:
    """At most three sentences, one table, one line that says where the rest is."""
    said, table, rest = (report.write(root) / "answer.txt").read_text().split("\n\n")
    assert said.replace("\n", " ") == (
        "scaffold has the best mean test accuracy after the last round, 91.00 % (3 seeds). The 2 "
        "others are worse at 5 % (paired t tests over seeds, Holm's adjustment for 2). Not all "
        "methods were tuned alike, so this does not say which one to use: `noniid choose` tunes "
        "each and compares on fresh seeds."
    )
    header, _, *rows = (re.split("  +", line) for line in table.splitlines())
    assert header == ["method", "last round, %", "vs fedavg", "worst client, %", "seeds"]
    assert rows[0][:3] == ["scaffold", "91.00 ± 2.65", "+11.00 ± 1.00, better"]
    assert {row[2] for row in rows[1:]} == {"-", "+0.00 ± 2.65, undecided"}
    assert "noniid table --details" in rest and "\n" not in rest.strip()


def test_the_answer_for_the_terminal_names_scenarios_and_what_is_missing(tmp_path: Path) -> None:
    write_params(tmp_path, ["fedavg", "fnr"], SEEDS, scenarios=("skew", "other"))
    write_runs(tmp_path, {"fedavg": (0.7, 0.8, 0.9)}, scenario="other")
    write_runs(tmp_path, {"fedavg": (0.7, 0.8, 0.9), "fnr": (0.7, 0.8)})
    said = (report.write(tmp_path) / "answer.txt").read_text()
    assert "skew: fedavg has the best" in said and "other: fedavg has the best" in said
    assert "Not finished, so not in the table: skew-fnr-2." in said
    assert said.count("Not all methods were tuned alike") == 1


def test_methods_with_the_same_predictions_are_called_so(tmp_path: Path) -> None:
    """fnr differs from fedavg in its weights alone.

    Its test counts for Holm's adjustment, as it is a test of another method.
    """
    for seed, final in enumerate(FINALS["fedavg"]):
        for recipe, less in (("fedavg", 0.0), ("fnr", 0.0), ("c", 0.01 * (10 + seed))):
            metrics = {"predictions_sha256": f"{less} {seed}"}
            write_run(tmp_path, recipe, seed, [final - less], metrics=metrics)
    scenario = sum_up(tmp_path, ["fedavg", "fnr", "c"])
    best, worse = report.section(scenario)["answer"]
    assert best.endswith(", and fnr makes the same predictions.")
    assert worse.startswith("The other one is worse at 5 %") and "adjustment for 2)" in worse
    shown = columns(tables.cells(scenario))
    assert shown["method"] == ("fedavg", "fnr", "c") and shown["rank"][:2] == ("1", "1 =")
    assert shown["vs fedavg"][:2] == ("-", "same predictions")
    row = tables.compared(scenario)[0][1][1]
    assert row[0] == "fnr" and row[-1] == "same predictions" and row[4] == "1.000"
    assert "fnr: makes the same predictions as the best mean, with other weights." in said(scenario)
    assert columns(tables.in_brief(scenario))["vs fedavg"][1] == "same predictions"


def test_the_same_results_give_the_same_bytes(root: Path) -> None:
    """How long they took, and on which machine, is no part of the report."""
    path = root / "runs" / "skew-fnr-0" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tags": {"fingerprint": "f" * 64}}))
    made = cache.folder_of(root, "f" * 64) / cache.MADE
    made.parent.mkdir(parents=True)
    written = []
    for seconds, commit in ((1.5, "c0ffee"), (9.0, "bad")):
        made.write_text(json.dumps({"seconds": [seconds] * 6, "tags": {"git_commit": commit}}))
        (result,) = (one for one in results.read(root) if one.key == "skew-fnr-0")
        assert result.seconds == (seconds,) * 6 and result.tags["git_commit"] == commit
        written.append(contents(report.write(root)))
    assert written[0] == written[1]


def test_cost_stands_beside_accuracy_with_the_seconds_of_this_machine(root: Path) -> None:
    """scaffold: 6 and 12 seconds on two of three seeds, six rounds of 3 MiB; the others were
    trained elsewhere."""
    for seed, seconds in ((0, 1.0), (1, 2.0)):
        path = root / "runs" / f"skew-scaffold-{seed}" / "run.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"tags": {"fingerprint": f"{seed}" * 64}})
        )
        made = cache.folder_of(root, f"{seed}" * 64) / cache.MADE
        made.parent.mkdir(parents=True)
        made.write_text(json.dumps({"seconds": [seconds] * 6}))
    report.write(root)
    said = cost.text(root).splitlines()
    rows = [line.split() for line in said[4:7]]
    assert said[0] == "skew: cost" and rows[0] == ["scaffold", "91.00", "9", "18"]
    assert sorted(rows[1:]) == [["fedavg", "80.00", "-", "12"], ["fnr", "80.00", "-", "12"]]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("latex", r"scaffold & \textbf{91.0 $\pm$ 2.6} \\"),
        ("markdown", "| scaffold | **91.0 ± 2.6** |"),
        ("csv", "scaffold,skew,0.91,0.02645751311064593,3,91.0 ± 2.6 *"),
    ],
)
def test_the_table_of_a_paper_by_the_command(
    root: Path, capsys: pytest.CaptureFixture[str], option: str, line: str
) -> None:
    """scaffold: mean 0.91, deviation sqrt(0.0007)."""
    assert main(["table", "--root", str(root), f"--{option}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert line in shown
    assert main(["table", "--root", str(root), f"--{option}", "--details"]) == 2
    assert f"--details and --{option} are refused together" in capsys.readouterr().err


def dvc_metrics(root: Path) -> dict[str, dict[str, float]]:
    """The files for `dvc metrics`, by name."""
    paths = (report.write(root) / "dvc").iterdir()
    return {path.stem: json.loads(path.read_text()) for path in paths}


def test_dvcs_metrics_by_hand(root: Path) -> None:
    """The worst client has half the accuracy; six rounds of 3 or 2 MiB."""
    assert dvc_metrics(root) == {
        "scaffold": {"accuracy": 0.91, "worst": 0.455, "gain": 0.11, "mib": 18},
        "fedavg": {"accuracy": 0.8, "worst": 0.4, "mib": 12},
        "fnr": {"accuracy": 0.8, "worst": 0.4, "gain": 0, "mib": 12},
        "best": {"best": 0.91},
    }


def test_dvcs_metrics_leave_out_what_is_not_known_and_go_by_scenario(tmp_path: Path) -> None:
    write_params(tmp_path, ["fedavg"], [0], scenarios=["skew", "even"])
    write_run(tmp_path, "fedavg", 0, [0.25], evaluated=False)
    write_run(tmp_path, "fedavg", 0, [0.125], scenario="even", mib=4)
    assert dvc_metrics(tmp_path) == {
        "skew-fedavg": {"accuracy": 0.25, "mib": 2},
        "even-fedavg": {"accuracy": 0.125, "worst": 0.0625, "mib": 5},
        "best": {"skew-best": 0.25, "even-best": 0.125},
    }


def test_summary_csv_holds_unrounded_numbers(root: Path) -> None:
    rows = list(csv.DictReader(tables.summary_csv([sum_up(root)]).splitlines()))
    scaffold = next(row for row in rows if row["recipe"] == "scaffold")
    assert float(scaffold["final_mean"]) == pytest.approx(0.91) and scaffold["rank"] == "1"
    assert (
        float(scaffold["vs_baseline_std"]) == pytest.approx(0.01)
        and scaffold["vs_baseline_seeds"] == "3"
    )
    assert float(scaffold["traffic_total_bytes_mean"]) == 18 * MIB
    # One degree of freedom less than two: p = 1 - t / sqrt(t^2 + 2), t = 11 sqrt(3).
    p = 1 - 11 * math.sqrt(3) / math.sqrt(365)
    assert float(scaffold["vs_baseline_p"]) == pytest.approx(p) and scaffold["vs_best_p"] == ""
    assert float(scaffold["vs_baseline_p_holm"]) == pytest.approx(2 * p)
    assert float(scaffold["vs_baseline_low"]) == pytest.approx(
        0.11 - 0.01 * 6.205346817 / math.sqrt(3)
    )
    fedavg: Mapping[str, str] = next(row for row in rows if row["recipe"] == "fedavg")
    assert (fedavg["vs_baseline_mean"], fedavg["vs_baseline_seeds"]) == ("", "0")


def test_curves_csv_holds_means_over_seeds_by_round(tmp_path: Path) -> None:
    """A round that one of the seeds did not reach has no mean."""
    for seed, course in ((0, [0.5, math.nan, 0.75, 0.9]), (1, [0.25, math.nan, 0.25])):
        write_run(tmp_path, "fedavg", seed, course)
    write_run(tmp_path, "fnr", 0, [0.5])
    names = ["fedavg", "fnr"]
    content = tables.curves_csv(sum_up(tmp_path, names, [0, 1]), names)
    assert content.splitlines() == ["round,fedavg,fnr", "1,0.375,0.5", "2,,", "3,0.5,", "4,,"]


def test_unequal_training_settings_are_named(root: Path) -> None:
    """A run that an older params.yaml has made."""
    for path in (root / "runs").glob("*/run.json"):
        content = json.loads(path.read_text())
        lr = 0.5 if path.parent.name == "skew-fnr-0" else 0.1
        path.write_text(json.dumps(content | {"params": content["params"] | {"train.lr": lr}}))
    folder = report.write(root)
    unequal = "lr (0.1: fedavg, fnr, scaffold; 0.5: fnr)."
    page = (folder / "report.md").read_text()
    assert f"UNEQUAL training settings, compare with care: {unequal}" in page
    terminal = " ".join((folder / "table.txt").read_text().split())
    assert f"Training settings that were not the same for all methods: {unequal}" in terminal


def tuned(root: Path, values: Mapping[str, Any], **records: Mapping[str, Any] | None) -> list[str]:
    """What the report says on tuning, with these values of recipes, tuned with these records (None:
    not tuned)."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["recipes"] |= values
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    plain, written = config.load(root), {}
    for name in params["recipes"]:
        entry = plain.recipes[name].values
        record = {
            "chosen": entry,
            "trials": 3,
            "tried": {k: {key: [0.1, v, 0.9] for key, v in of.items()} for k, of in entry.items()},
            "scenario": "skew",
            "seeds": [100],
            "metric": "accuracy",
            "validation": 0.9,
            "runner_up": 0.8,
            "samples": 100,
            "settings": search.fingerprint(plain, name, entry, "skew"),
        }
        changed = records.get(name, {})
        if changed is not None:
            written[name] = record | dict(changed)
    (root / config.RECORDS).write_text(yaml.safe_dump(written))
    settings = config.load(root)
    of = chosen.chosen(settings), settings.scenario_names, chosen.unequal(results.read(root))
    return pages.sentences("chosen.md.j2", "sentences", *of)


VALUES = {
    "fedavg": {"train": {"lr": 0.2}},
    "scaffold": {"train": {"lr": 0.3}},
    "fnr": {"fnr": {"p": 0.5}},
}


def test_equal_budgets_are_said_and_nothing_is_warned_of(root: Path) -> None:
    """The middle of three values, a tenth ahead of the second."""
    first, last = tuned(root, VALUES)
    assert (
        first == "Tuned on the validation split, 3 trials for each method: fedavg, scaffold, fnr."
    )
    assert last == "All methods had the same training settings.", "by the runs, which are older"
    lines = {row[0]: row[1:] for row in chosen.table(chosen.chosen(config.load(root)))}
    about = ["yes", "3 of 3", "skew, seed 100, 100 samples", "90.00 (80.00)"]
    assert lines["scaffold"] == ["lr 0.3", *about] and lines["fnr"] == ["lr 0.1, fnr.p 0.5", *about]
    page = (report.write(root) / "report.md").read_text()
    assert "| scaffold | lr 0.3 | yes | 3 of 3 |" in page and "sgd; lr by method" in page
    answer = page.partition("## Which method should I use?")[2].partition("\n## ")[0]
    assert "The best of 3 means is too high on average" in answer
    assert "can't say which method to use" not in answer


@pytest.mark.parametrize("record", [None, {"trials": 9}, {"seeds": [100, 101]}, {"settings": "0"}])
def test_an_answer_needs_methods_that_were_tuned_alike(
    root: Path, record: dict[str, Any] | None
) -> None:
    tuned(root, VALUES, fnr=record)
    folder = report.write(root)
    answer = (folder / "report.md").read_text().partition("\n## What was run")[0]
    for text in (answer, (folder / "table.txt").read_text()):
        assert "can't say which method to use" in " ".join(text.split())
    short = " ".join((folder / "answer.txt").read_text().split())
    assert "Not all methods were tuned alike, so this does not say which one to use" in short


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (
            {"fnr": {"trials": 9}},
            "UNEQUAL budgets, compare with care: numbers of trials on the validation split (3: "
            "fedavg, scaffold; 9: fnr).",
        ),
        ({"fnr": None}, "NOT TUNED, while others are, compare with care: fnr."),
        (
            {"fnr": {"chosen": {"fnr": {"p": 0.3}}}},
            "fnr: params.yaml no longer has the values that tuning chose.",
        ),
        ({"fnr": {"settings": "0"}}, "fnr: tuned at other settings than those of this experiment."),
        (
            {"fnr": {"seeds": [100, 101]}},
            "The methods were tuned on different samples, compare with care: skew, seed "
            "100, 100 samples; skew, seeds 100, 101, 100 samples.",
        ),
        ({"fnr": {"scenario": "other"}}, "Values were not chosen on skew, which may need others."),
        (
            {
                "fnr": {"tried": {"fnr": {"p": [0.1, 0.5]}}},
                "fedavg": {"tried": {"train": {"lr": [0.2, 0.5]}}},
            },
            "At the edge of what was tried, so other values may be better: fedavg (lr 0.2 is "
            "the smallest), fnr (fnr.p "
            "0.5 is the largest).",
        ),
        (
            {"fnr": {"runner_up": 0.89}, "fedavg": {"runner_up": 0.889}},
            "At most one validation sample ahead of the second best, which may be as good: fnr.",
        ),
        (
            {"fnr": {"trials": 5, "extended": 2}},
            "The grid of fnr was extended, as its best value was at an edge: 2 more trials.",
        ),
        (
            {"fnr": {"trials": 5, "extended": 2}},
            "Tuned on the validation split, 3 trials for each method: fedavg, scaffold, fnr.",
        ),
    ],
)
def test_what_speaks_against_a_fair_comparison_is_said(
    root: Path, records: Mapping[str, Mapping[str, Any] | None], told: str
) -> None:
    assert told in tuned(root, VALUES, **records)


@pytest.mark.parametrize(
    ("runner", "how"), [({}, "Each method has its tuned"), ({"fnr": None}, "UNEQUAL training")]
)
def test_unequal_values_of_an_equal_tuning_are_no_warning(
    root: Path, runner: Mapping[str, Any], how: str
) -> None:
    for path in (root / "runs").glob("*/run.json"):
        content = json.loads(path.read_text())
        lr = 0.3 if "scaffold" in path.parent.name else 0.2
        path.write_text(json.dumps(content | {"params": content["params"] | {"train.lr": lr}}))
    said = tuned(root, VALUES, **runner)[-1]
    assert said.startswith(how) and said.endswith("lr (0.2: fedavg, fnr; 0.3: scaffold).")


def test_values_that_differ_from_the_defaults_are_named(root: Path) -> None:
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["recipes"]["fnr"] = {"fnr": {"p": 0.5, "lam": 3.0}}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    text = (report.write(root) / "report.md").read_text()
    assert "Not at their default: fnr lam 3.0 (default 1.0)." in text


def test_scenarios_without_results_are_left_out(root: Path) -> None:
    write_params(root, list(FINALS), SEEDS, scenarios=["skew", "later"])
    assert not (report.write(root) / "accuracy-later.png").exists()


@pytest.mark.parametrize("course", [[0.5], [0.5, 0.6], [math.nan, 0.5]])
def test_pictures_of_very_short_runs(tmp_path: Path, course: list[float]) -> None:
    write_run(tmp_path, "fedavg", 0, course)
    write_run(tmp_path, "fnr", 0, course)
    scenario = sum_up(tmp_path)
    for draw in (figures.accuracy, figures.clients):
        picture = draw(scenario, list(FINALS))
        assert picture is not None and picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (
            "runs/skew-fnr-0/rounds.csv",
            "round,test_accuracy,bytes_up,bytes_down\n" + "1,much,1,1\n" * 6,
            "line 2: could not convert string to float: 'much'",
        ),
        (
            "runs/skew-fnr-0/rounds.csv",
            "round,test_accuracy,bytes_up\n" + "1,1,1\n" * 6,
            "has no column bytes_down",
        ),
        (
            "runs/skew-fnr-0/rounds.csv",
            "round,test_accuracy,bytes_up,bytes_down\n" + "1,1,1,1\n" * 5,
            "runs/skew-fnr-0/rounds.csv: has 5 rounds, expected 6",
        ),
        ("runs/skew-fnr-0/rounds.csv", "", "has no lines"),
        ("runs/skew-fnr-0/run.json", '{"scenario": "skew"', "can't be read as JSON"),
        (
            "runs/skew-fnr-0/run.json",
            '{"tags": {}, "scenario": "skew"}',
            "the key 'recipe' is missing",
        ),
        ("evaluation/skew-fnr-0/metrics.json", "[1]", "expected a JSON object"),
        (
            "evaluation/skew-fedavg-0/per_class.csv",
            "class,samples\ncat,many\n",
            "no column samples of whole numbers",
        ),
        ("params.yaml", "seeds: [1", "is not YAML"),
    ],
)
def test_a_file_that_is_not_understood_is_named_and_nothing_is_written(
    root: Path, file: str, content: str, told: str
) -> None:
    (root / file).write_text(content)
    with pytest.raises(UserError) as caught:
        report.write(root)
    message = str(caught.value)
    assert Path(file).name in message and told in message and "\n" not in message
    assert not (root / "report").exists()


def test_no_results_is_an_error_that_says_what_to_run(tmp_path: Path) -> None:
    write_params(tmp_path, ["fedavg"], [0])
    with pytest.raises(UserError, match="holds no finished run"):
        report.write(tmp_path)


def test_a_failed_write_leaves_the_old_report(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = report.write(root)
    before = contents(folder)

    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        report.write(root)
    assert before == contents(folder)
    assert not [name for name in os.listdir(root) if name.startswith(".report")]
