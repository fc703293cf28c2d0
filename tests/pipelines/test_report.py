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

from fedml_noniid.pipelines.experiment import cache, config, results, tuning
from fedml_noniid.pipelines.reporting import chosen, cost, figures, report, summary, tables
from fedml_noniid.pipelines.reporting.summary import Scenario, Spread
from fedml_noniid.pipelines.reporting.text import plain
from fedml_noniid.pipelines.stages import __main__ as stages
from fedml_noniid.plugins.core.errors import UserError

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
        "client,samples,classes,entropy,cat,dog\n0,10,1,0,10,0\n1,30,2,0.5,10,20\n"
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
) -> Scenario:
    scenario = summary.scenario("skew", results.read(root), recipes, seeds)
    assert scenario is not None
    return scenario


def close(spread: Spread | None, mean: float, std: float | None, n: int) -> bool:
    assert spread is not None
    same_std = (
        spread.std == std if std is None or spread.std is None else spread.std == pytest.approx(std)
    )
    return spread.mean == pytest.approx(mean) and same_std and spread.n == n


def test_means_and_sample_standard_deviations_by_hand(root: Path) -> None:
    lines = {line.recipe: line for line in sum_up(root).lines}
    assert close(lines["fedavg"].final, 0.80, 0.02, 3)
    assert close(lines["fnr"].final, 0.80, math.sqrt(0.0006 / 2), 3)  # deviations 0.01, -0.02, 0.01
    assert close(lines["scaffold"].difference, 0.11, 0.01, 3)
    assert close(lines["fnr"].difference, 0.0, math.sqrt((0.03**2 + 0.02**2 + 0.01**2) / 2), 3)
    assert lines["fedavg"].difference is None
    assert close(lines["fedavg"].worst, 0.40, 0.01, 3)  # half of each final accuracy
    assert close(lines["scaffold"].traffic_round, 3 * MIB, 0, 3) and close(
        lines["scaffold"].traffic_total, 18 * MIB, 0, 3
    )


def test_the_noisy_test_has_a_column_where_there_is_one(tmp_path: Path) -> None:
    """fedavg: 0.3, 0.4, 0.5 in noise; fnr was evaluated before there was any."""
    for seed, noisy in zip(SEEDS, (0.3, 0.4, 0.5), strict=True):
        write_run(tmp_path, "fedavg", seed, [0.5], metrics={"accuracy_noisy": noisy})
    write_run(tmp_path, "fnr", 0, [0.6])
    scenario = sum_up(tmp_path)
    lines = {line.recipe: line for line in scenario.lines}
    assert close(lines["fedavg"].noisy, 0.4, 0.1, 3) and lines["fnr"].noisy is None
    header, *rows = tables.cells(scenario)
    column = header.index("noisy test, %")
    shown = {row[0]: row[column] for row in rows}
    assert shown == {"fedavg": "40.00 ± 10.00", "fnr": "-"}
    assert header[column + 1] == "MiB total"
    assert tables.NOISY_NOTE in tables.notes(scenario)
    assert [line.recipe for line in scenario.lines] == ["fnr", "fedavg"], "ranked by the clean test"


def test_without_noise_there_is_no_column_for_it(root: Path) -> None:
    scenario = sum_up(root)
    text = plain(tables.cells(scenario)) + "".join(tables.notes(scenario))
    assert "oisy" not in text
    assert {len(row) for row in tables.cells(scenario)} == {10}


def test_last_five_and_best_count_evaluated_rounds_only(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.9, 0.1, math.nan, 0.2, 0.3, 0.4, 0.5, math.nan])
    line = sum_up(tmp_path).lines[0]
    assert close(line.final, 0.5, None, 1) and close(line.best, 0.9, None, 1)
    assert close(line.last, (0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5, None, 1) and line.rounds == 8


def test_ranks_mark_what_cannot_be_told_apart_from_the_best(tmp_path: Path) -> None:
    """a - b: 0.04 and 0.02, one degree of freedom, t = 3: p = 1 - 2 atan(3) / pi = 0.2.

    a - c: 0.3 and 0.31, t = 61.
    """
    for recipe, finals in {"a": (0.54, 0.53), "b": (0.50, 0.51), "c": (0.24, 0.22)}.items():
        for seed, final in enumerate(finals):
            write_run(tmp_path, recipe, seed, [final])
    scenario = sum_up(tmp_path, ["c", "b", "a"], [0, 1])
    assert [(row[0], row[5]) for row in tables.cells(scenario)[1:]] == [
        ("a", "1"),
        ("b", "2 ≈"),
        ("c", "3"),
    ]
    assert "≈ can't be told apart from the best mean." in tables.notes(scenario)


def test_equal_means_share_a_rank(tmp_path: Path) -> None:
    for recipe, final in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
        write_run(tmp_path, recipe, 0, [final])
    assert [line.rank for line in sum_up(tmp_path, ["c", "b", "a"]).lines] == [1, 1, 3]


RARE = {"majority_accuracy": 0.97, "balanced_accuracy": 0.5, "macro_f1": 0.49, "classes_named": 1.0}


def answers(scenario: Scenario) -> str:
    """All that the report says of which method is good."""
    titles = [title for title, _ in tables.compared(scenario)]
    return " ".join(
        [*tables.warnings(scenario), *tables.answer(scenario), *titles, *tables.details(scenario)]
    )


def test_a_constant_answer_is_not_praised(tmp_path: Path) -> None:
    """fnr is above FedAvg on every seed, but not above always naming the most frequent class."""
    write_params(tmp_path, ["fedavg", "scaffold", "fnr"], SEEDS)
    for seed in SEEDS:
        write_run(tmp_path, "fedavg", seed, [0.90], metrics=RARE | {"classes_named": 2.0})
        write_run(tmp_path, "scaffold", seed, [0.97], metrics=RARE)
        write_run(
            tmp_path, "fnr", seed, [0.96], metrics=RARE | {"classes_named": 1.0 + (seed != 1)}
        )
    scenario = sum_up(tmp_path)
    assert {line.rank for line in scenario.lines} == {0}
    said = answers(scenario)
    assert "WARNING, ONE CLASS: the model names one class for all test samples: " in said
    assert "scaffold (seeds 0, 1, 2); fnr (seed 1)." in said
    assert (
        "the most frequent class (majority class: 97.00 ± 0.00 %): scaffold, fnr, fedavg." in said
    )
    assert (
        "No method can be recommended" in said
        and "Above fedavg, but with a warning: scaffold" in said
    )
    assert not re.search("best|better than fedavg|gain", said, re.IGNORECASE)
    header, *rows = tables.cells(scenario)
    assert [row[0] for row in rows] == [
        "scaffold ONE CLASS",
        "fnr ONE CLASS",
        "fedavg",
        "majority class",
    ]
    shown = dict(zip(header, zip(*rows, strict=True), strict=True))
    assert shown["last round, %"][-1] == "97.00 ± 0.00" and set(shown["rank"]) == {tables.NONE}
    assert shown["balanced, %"][0] == "50.00 ± 0.00" and shown["macro-F1, %"][0] == "49.00 ± 0.00"
    folder = report.write(tmp_path)
    for name in ("report.html", "report.md", "table.txt"):
        page = re.sub(r"\s+", " ", (folder / name).read_text())
        assert page.count("WARNING, ONE CLASS") == 1 and "fnr (seed 1)." in page
        assert page.index("WARNING, ONE CLASS") < page.index("No method can be recommended")
    metrics = json.loads((folder / "metrics.json").read_text())["scaffold"]
    assert (metrics["majority_accuracy"], metrics["balanced_accuracy"], metrics["macro_f1"]) == (
        97,
        50,
        49,
    )
    row = next(csv.DictReader((folder / "summary.csv").read_text().splitlines()))
    assert (row["recipe"], row["rank"], row["one_class_seeds"]) == ("scaffold", "0", "0 1 2")


def test_a_method_that_beats_the_majority_is_named_with_those_that_do_not(tmp_path: Path) -> None:
    """a leads but names one class on seed 2.

    c is above the majority class by one of 100 test samples.
    """
    for seed, (a, b) in enumerate([(0.96, 0.90), (0.97, 0.91), (0.80, 0.89)]):
        named = {"majority_accuracy": 0.80, "balanced_accuracy": 0.5, "macro_f1": 0.5}
        write_run(
            tmp_path, "a", seed, [a], metrics=named | {"classes_named": 1.0 if seed == 2 else 2.0}
        )
        write_run(tmp_path, "b", seed, [b], metrics=named | {"classes_named": 2.0})
        write_run(tmp_path, "c", seed, [0.81], metrics=named | {"classes_named": 2.0})
    scenario = sum_up(tmp_path, ["a", "b", "c"])
    assert [(line.recipe, line.rank) for line in scenario.lines] == [("a", 0), ("b", 1), ("c", 0)]
    one, low, first, *_ = [*tables.warnings(scenario), *tables.answer(scenario)]
    assert one.endswith(": a (seed 2).") and low.endswith("(majority class: 80.00 ± 0.00 %): c.")
    assert first.startswith(
        "b has the best mean test accuracy after the last round of the methods without a warning,"
    )


def test_own_models_have_a_constant_answer_of_their_own(tmp_path: Path) -> None:
    """A client that has one class is right to name it, but that is no merit of the method."""
    own = {"own_models": "accuracies are those of the clients' own models"}
    write_run(
        tmp_path,
        "fedavg",
        0,
        [0.6],
        metrics=RARE | {"majority_accuracy": 0.25, "classes_named": 4.0},
    )
    write_run(
        tmp_path,
        "fedbn",
        0,
        [0.9],
        metrics=RARE | {"majority_accuracy": 0.95, "classes_named": 4.0},
        tags=own,
    )
    scenario = sum_up(tmp_path, ["fedavg", "fedbn"], [0])
    assert [row[:2] for row in tables.cells(scenario)[-2:]] == [
        ["majority class", "25.00"],
        ["own majority class", "95.00"],
    ]
    assert [(line.recipe, line.rank) for line in scenario.lines] == [("fedbn", 0), ("fedavg", 1)]


def test_words_claim_no_more_than_the_intervals(root: Path) -> None:
    """Half an interval is 4.3027 / sqrt(3) = 2.4841 deviations.

    11 - 2.48 = 8.52; 2.6458 * 2.4841 = 6.57.

    scaffold - fnr: 7, 14, 12 points: t = 11 sqrt(3) / sqrt(13) = 5.28, p = 1 - 5.28 / sqrt(27.92 +
    2) = 0.034.
    """
    scenario = sum_up(root)
    text = " ".join(tables.details(scenario))
    assert "100 test samples: one sample is 1 points." in text
    assert "Better than fedavg: scaffold (by 8.52 to 13.48 points)." in text
    assert "Undecided against fedavg: fnr (from -6.57 to +6.57 points)." in text
    assert "Worse than" not in text and "scaffold 1.5 times as much" in text
    assert (
        "at least 2.5 standard deviations" in text
        and "sign test is 0.25, so it can never reach 5 %" in text
    )
    assert tables.answer(scenario) == [
        "scaffold has the best mean test accuracy after the last round, 91.00 % (3 seeds).",
        "The 2 others are worse at 5 % (paired t tests over seeds, Holm's adjustment for 2).",
    ]
    with_fedavg, with_scaffold = tables.compared(scenario)
    assert with_fedavg[1][1] == [
        "scaffold",
        "+11.00",
        "+8.52 to +13.48",
        "0.003",
        "0.005",
        "3 of 3",
        "0.250",
        "better",
    ]
    rows = {row[0]: row for row in with_scaffold[1]}
    assert rows["fnr"] == [
        "fnr",
        "-11.00",
        "-19.96 to -2.04",
        "0.034",
        "0.034",
        "0 of 3",
        "0.250",
        "worse",
    ]


def test_an_interval_that_holms_adjustment_does_not_confirm(tmp_path: Path) -> None:
    """1, 2 and 2 of 100 samples: t = 5, p = 1 - 5 / sqrt(27) = 0.038, and twice that.

    1.667 +- 2.4841 * 0.5774.

    The clearer one of two needs 97.5 % = t / sqrt(t^2 + 2): t = 6.205, which is 3.583 sqrt(3).
    """
    for seed, samples in enumerate((1, 2, 2)):
        write_run(tmp_path, "fedavg", seed, [0.5])
        write_run(tmp_path, "fnr", seed, [0.5 + samples / 100])
        write_run(tmp_path, "scaffold", seed, [0.5 - (seed - 1) / 10])
    said = tables.details(sum_up(tmp_path))
    told = (
        "Undecided against fedavg, since Holm's adjustment does not confirm the interval: "
        "fnr (from +0.23 to +3.10"
    )
    assert (
        f"{told} points)." in said
        and "of 2 comparisons, the clearest one needs 3.6 for Holm." in said[-2]
    )
    assert "Undecided against fedavg: scaffold (from -24.84 to +24.84 points)." in said


@pytest.mark.parametrize(
    ("n", "told"), [(5, "0.062, so it can never reach 5 %"), (6, "0.031, so it can reach 5 %")]
)
def test_what_the_number_of_seeds_can_show(tmp_path: Path, n: int, told: str) -> None:
    """All of five seeds on one side: 2 / 32. All of six: 2 / 64."""
    for seed in range(n):
        write_run(tmp_path, "fedavg", seed, [0.5])
    assert (
        f"The smallest p of the sign test is {told}."
        in tables.details(sum_up(tmp_path, ["fedavg"], range(n)))[-1]
    )


def test_methods_that_differ_by_one_sample_are_not_told_apart(tmp_path: Path) -> None:
    """One of the 100 test samples on every seed: no seeds would help."""
    for seed in SEEDS:
        write_run(tmp_path, "fedavg", seed, [0.5])
        write_run(tmp_path, "fnr", seed, [0.51])
    scenario = sum_up(tmp_path)
    told = "No difference to fedavg that this test set can show: fnr "
    assert f"{told}(+1.00 points on each of 3 seeds: they do not vary)." in tables.details(scenario)
    assert tables.answer(scenario)[1:] == [
        (
            "These seeds can't tell it apart from fedavg at 5 % (paired t tests over seeds, Holm's "
            "adjustment for 1)."
        ),
        (
            "Their mean differences are at most one test sample: only a larger test set could tell "
            "them apart."
        ),
    ]


def test_methods_with_the_same_weights_are_equal_not_undecided(tmp_path: Path) -> None:
    """b is fedavg under another name.

    The comparison with it is no test, so Holm counts one test of fnr, not two.
    """
    for seed, final in enumerate(FINALS["fedavg"]):
        for recipe in ("fedavg", "b"):
            write_run(tmp_path, recipe, seed, [final], weights=f"same {seed}")
        write_run(tmp_path, "fnr", seed, [final - 0.01 * (2 + seed)])
    scenario = sum_up(tmp_path, ["fedavg", "b", "fnr"])
    best, worse = tables.answer(scenario)
    assert best.startswith(
        "fedavg has the best mean test accuracy after the last round, 80.00 % (3 seeds)"
    )
    assert best.endswith(", and b ends with the same weights.")
    assert (
        worse
        == "The other one is worse at 5 % (paired t tests over seeds, Holm's adjustment for 1)."
    )
    assert [(row[0], row[5]) for row in tables.cells(scenario)[1:]] == [
        ("fedavg", "1"),
        ("b", "1 ="),
        ("fnr", "3"),
    ]
    assert (
        "= ends with the same weights as the best mean, so it is the same method here."
        in tables.notes(scenario)
    )
    assert (
        "Equal to fedavg, with the same weights on all seeds that both have: b."
        in tables.details(scenario)
    )
    row = tables.compared(scenario)[0][1][1]
    assert row == ["b", "+0.00", "+0.00 to +0.00", "-", "-", "0 of 3", "-", "same weights"]


def test_equal_accuracies_of_other_weights_are_not_equal_methods(tmp_path: Path) -> None:
    for seed in SEEDS:
        write_run(tmp_path, "fedavg", seed, [0.5], weights=f"same {seed}")
        write_run(tmp_path, "b", seed, [0.5], weights=f"same {seed}" if seed else "other")
    scenario = sum_up(tmp_path, ["fedavg", "b"])
    assert "No difference to fedavg that this test set can show: b" in " ".join(
        tables.details(scenario)
    )
    assert "same weights" not in " ".join(tables.words(scenario))


def test_only_equal_methods_need_no_more_seeds(tmp_path: Path) -> None:
    for recipe in ("fedavg", "b"):
        write_run(tmp_path, recipe, 0, [0.5], weights="same")
    (said,) = tables.answer(sum_up(tmp_path, ["fedavg", "b"]))
    assert said.endswith("50.00 % (1 seed), and b ends with the same weights.")


@pytest.mark.parametrize(
    ("differences", "needed"),
    [
        # Deviation sqrt(7) points: 4 * sqrt(n) / sqrt(7) exceeds t for n = 5 (3.38 > 2.78) but not
        # for 4 (3.02 < 3.18).
        (
            (0.01, 0.05, 0.06),
            "The smallest gap, 4.00 points to fedavg, would need about 5 seeds, if",
        ),
        # Deviation 17.3 points.
        (
            (0.22, -0.08, -0.08),
            "The smallest gap, 2.00 points to fedavg, would need more than 100 seeds.",
        ),
    ],
)
def test_the_answer_says_how_many_seeds_would_decide(
    tmp_path: Path, differences: Sequence[float], needed: str
) -> None:
    for seed, difference in enumerate(differences):
        write_run(tmp_path, "fedavg", seed, [0.5])
        write_run(tmp_path, "fnr", seed, [0.5 + difference])
    said = tables.answer(sum_up(tmp_path))
    assert len(said) == 3 and said[2].startswith(needed)


def test_a_long_list_of_equals_is_cut(tmp_path: Path) -> None:
    names = [f"m{i}" for i in range(9)]
    for recipe in [*names, "bad"]:
        for seed in SEEDS:
            write_run(tmp_path, recipe, seed, [0.5 if recipe != "bad" else 0.1 + seed / 100])
    said = tables.answer(sum_up(tmp_path, [*names, "bad"]))[1]
    assert "apart from m1, m2, m3, m4, m5, m6 and 2 more (marked ≈) at 5 %" in said


def test_one_seed_claims_nothing(tmp_path: Path) -> None:
    for recipe, finals in FINALS.items():
        write_run(tmp_path, recipe, 0, [finals[0]])
    scenario = sum_up(tmp_path, seeds=[0])
    few = "Fewer than two seeds in common can't tell methods apart: any difference may be chance."
    assert few in tables.answer(scenario)
    text = " ".join(tables.details(scenario))
    told = (
        "One seed in common with fedavg, so no interval: scaffold (+10.00 points), fnr "
        "(+3.00 points)."
    )
    assert told in text and "no interval and no test" in text
    assert not {"±", "≈"} & set(plain(tables.cells(scenario)))
    assert tables.compared(scenario)[0][1][1] == [
        "scaffold",
        "+10.00",
        "-",
        "-",
        "-",
        "1 of 1",
        "-",
        "one seed",
    ]


def test_uneven_seeds_are_paired_by_seed_and_missing_runs_are_named(tmp_path: Path) -> None:
    for seed, final in ((0, 0.6), (1, 0.8)):
        write_run(tmp_path, "fedavg", seed, [final])
    for seed, final in ((1, 0.9), (2, 0.5)):
        write_run(tmp_path, "fnr", seed, [final], evaluated=False)
    scenario = sum_up(tmp_path)
    line = next(line for line in scenario.lines if line.recipe == "fnr")
    assert close(line.difference, 0.1, None, 1) and line.worst is None  # only seed 1 is common
    assert scenario.missing == (
        "skew-fedavg-2",
        "skew-scaffold-0",
        "skew-scaffold-1",
        "skew-scaffold-2",
        "skew-fnr-0",
    )
    notes = " ".join(tables.notes(scenario))
    assert "Not finished, so not in the table: skew-fedavg-2, skew-scaffold-0" in notes
    assert tables.cells(scenario)[-1][7] == tables.NONE


def test_without_fedavg_nothing_is_compared_with_it(tmp_path: Path) -> None:
    write_run(tmp_path, "fnr", 0, [0.5])
    scenario = sum_up(tmp_path)
    assert scenario.baseline is None and "no results of plain FedAvg" in " ".join(
        tables.words(scenario)
    )
    assert "the only method here" in tables.words(scenario)[0] and tables.compared(scenario) == []


def test_without_a_common_seed_nothing_is_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.5])
    write_run(tmp_path, "fnr", 1, [0.6])
    scenario = sum_up(tmp_path)
    assert "No seed in common with fedavg: fnr." in tables.details(scenario)
    assert tables.compared(scenario)[0][1][1] == ["fnr", *["-"] * 6, "no seed"]


def test_without_an_evaluation_the_size_of_the_test_set_is_not_known(tmp_path: Path) -> None:
    """Equal differences then prove nothing, since one sample's worth is unknown."""
    for seed in SEEDS:
        write_run(tmp_path, "fedavg", seed, [0.5], evaluated=False)
        write_run(tmp_path, "fnr", seed, [0.625], evaluated=False)
    scenario = sum_up(tmp_path)
    assert "The size of the test set is not known" in tables.details(scenario)[0]
    assert tables.compared(scenario)[0][1][1][-1] == "undecided"
    assert "no accuracy of single clients" in " ".join(tables.notes(scenario))
    assert figures.clients(scenario, list(FINALS)) is None


def test_a_renamed_fedavg_is_still_the_baseline(tmp_path: Path) -> None:
    write_run(tmp_path, "plain", 0, [0.5], composition="fedavg")
    write_run(tmp_path, "fnr", 0, [0.6])
    scenario = sum_up(tmp_path, ["fnr", "plain"], [0])
    assert scenario.baseline is not None and scenario.baseline.recipe == "plain"
    assert "vs plain" in tables.cells(scenario)[0] and "Named variants: plain = fedavg" in " ".join(
        tables.notes(scenario)
    )


@pytest.mark.parametrize(("public", "mark"), [("labelled", "†"), ("unlabelled", "‡"), ("none", "")])
def test_recipes_that_see_public_data_are_marked(tmp_path: Path, public: str, mark: str) -> None:
    write_run(tmp_path, "variant", 0, [0.5], tags={"public": public})
    scenario = sum_up(tmp_path, ["variant"], [0])
    table, notes = plain(tables.cells(scenario)), " ".join(tables.notes(scenario))
    for each in ("†", "‡"):
        assert (each in table) is (each in notes) is (each == mark)
    assert ("without their labels" in notes) is (mark == "‡")


def test_a_leak_is_named_everywhere_and_has_no_rank(tmp_path: Path) -> None:
    """Nor has centralised training; the leader and its lead are those of what can be compared."""
    leak = {"public": "labelled", "leak": "fnr trains on the test set"}
    for seed in (0, 1):
        write_run(tmp_path, "fedavg", seed, [0.5])
        write_run(tmp_path, "fnr", seed, [0.6], tags={"public": "labelled"})
        write_run(tmp_path, "fnr-leak", seed, [0.99], composition="fnr", tags=leak)
        write_run(tmp_path, "centralised", seed, [0.9], tags={"federated": "no"})
    scenario = sum_up(tmp_path, ["fedavg", "fnr", "fnr-leak", "centralised"], [0, 1])
    assert [(line.recipe, line.rank) for line in scenario.lines] == [
        ("fnr", 1),
        ("fedavg", 2),
        ("fnr-leak", 0),
        ("centralised", 0),
    ]
    notes = tables.notes(scenario)
    assert "LEAK: fnr-leak: fnr trains on the test set; its accuracy says nothing." in notes
    assert (
        "centralised: is not federated. It is a bound on what the others can reach, so it has "
        "no rank."
    ) in notes
    drawn = [curve.label for curve in figures._curves(scenario)]
    assert drawn == ["fnr-leak LEAK", "centralised", "fnr †", "fedavg"], "a picture goes by height"
    write_params(tmp_path, ["fedavg", "fnr", "fnr-leak", "centralised"], [0, 1])
    report.write(tmp_path)
    pages = [
        (tmp_path / "report" / name).read_text()
        for name in ("report.html", "report.md", "table.txt")
    ]
    assert (
        all("fnr-leak LEAK" in page for page in pages)
        and "Lines marked LEAK have seen these samples" in pages[0]
    )
    said = " ".join(tables.answer(scenario))
    assert "fnr has the best mean" in said and "leak" not in said and "centralised" not in said
    assert [row[0] for _, rows in tables.compared(scenario) for row in rows[1:]] == [
        "fnr",
        "fedavg",
    ]


def test_the_report_is_whole_and_needs_nothing_from_outside(root: Path) -> None:
    (root / "report").mkdir()
    (root / "report" / "from an older report.png").write_bytes(b"")
    (root / "partitions" / "skew-0" / "statistics.json").write_text(json.dumps(SKEW))
    report.write(root)
    pictures = {"accuracy-skew.png", "traffic-skew.png", "clients-skew.png", "partition-skew.png"}
    texts = {
        "report.md",
        "report.html",
        "table.txt",
        "summary.csv",
        "curves-skew.csv",
        "metrics.json",
    }
    assert {path.name for path in (root / "report").iterdir()} == pictures | texts
    assert not [name for name in os.listdir(root) if name.startswith(".report")]
    html = (root / "report" / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == html.count("src=") == 4
    assert (
        "href" not in html
        and "http" not in html
        and "toy &lt;b&gt;" in html
        and 'name="viewport"' in html
    )
    text = re.sub(r"\s+", " ", html)
    assert (
        "4 clients, partition dirichlet (alpha 0.1), 50% of them take part in each round." in text
    )
    assert (
        "A client holds 10 to 30 (median 20) training samples of 1 to 2 (median 1.5) classes."
        in text
    )
    assert (
        "2 epochs per round, batches of 32, sgd lr 0.1" in text
        and "<td>fnr</td><td>fnr.p 0.5</td>" in text
    )
    assert (
        "label distance 0.46 on average and 0.50 at most" in text
        and "Gini coefficient of the sizes 0.25" in text
    )
    assert (
        "entropy of a client's labels 0.25 bits on average (1.00: all classes alike"
        in text.replace("&#39;", "'")
    )
    order = [
        "scaffold has the best mean test accuracy",
        "<dl>",
        "4 clients",
        "<td>scaffold</td><td>91.00 ± 2.65</td>",
        "<td>fnr</td><td>fnr.p 0.5</td>",
    ]
    assert sorted(order, key=text.index) == order, (
        "the values of the methods stand behind the result"
    )
    assert (
        "`" not in html and "<code>noniid tune</code>" in html and "<code>noniid run</code>" in html
    )
    assert "@media (prefers-color-scheme: dark)" in html
    style, body = html.split("</style>")
    assert not re.search(r"#[0-9a-f]{3,6}\b", style.partition("body {")[2]), (
        "the dark page has a colour for each"
    )
    assert body.count("<table>") == body.count('<div class="wide" tabindex="0"><table>') > 0
    assert "No value was tuned" in text and "All methods had the same training settings." in text
    assert text.count("<h3>Compared with ") == 2
    markdown = (root / "report" / "report.md").read_text()
    assert all(f"]({name})" in markdown for name in pictures) and "| 91.00 ± 2.65 |" in markdown
    table = (root / "report" / "table.txt").read_text()
    assert "scaffold has the best mean" in table and "Compared with fedavg" in table
    assert "noniid ui" in table and max(map(len, table.splitlines())) <= 130


def test_code_in_a_sentence_is_escaped_like_all_else() -> None:
    assert (
        report.as_code("`a < b` & `c`, one `")
        == "<code>a &lt; b</code> &amp; <code>c</code>, one `"
    )


def test_the_stage_refuses_a_file_that_was_cut_off(
    root: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old report stays."""
    caplog.set_level("INFO")
    for folder in (
        path for name in ("partitions", "runs", "evaluation") for path in (root / name).iterdir()
    ):
        hashes = {path.name: cache.sha256(path) for path in folder.iterdir()}
        (folder / cache.RECEIPT).write_text(json.dumps({"fingerprint": "f", "files": hashes}))
    command = ["report", "--root", str(root)]
    assert stages.main(command) == 0
    assert "report/report.html is written" in caplog.text
    before = {path.name: path.read_bytes() for path in (root / "report").iterdir()}
    rounds = root / "runs" / "skew-fnr-0" / "rounds.csv"
    rounds.write_text(rounds.read_text()[:-9])
    assert stages.main(command) == 2
    assert f"{rounds}: is missing or was changed" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (root / "report").iterdir()}


def test_a_partition_without_its_measures_is_refused(root: Path) -> None:
    path = root / "partitions" / "skew-0" / "statistics.json"
    path.write_text(json.dumps(SKEW | {"size_gini": None}))
    with pytest.raises(UserError, match=r"skew-0/statistics\.json: the key 'size_gini' is missing"):
        report.write(root)


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
        written.append({path.name: path.read_bytes() for path in report.write(root).iterdir()})
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


def test_headline_metrics_by_hand(root: Path) -> None:
    """scaffold: deviations -0.03, 0.01, 0.02; the worst client has half the accuracy; six rounds of
    3 or 2 MiB."""
    metrics = json.loads((report.write(root) / "metrics.json").read_text())
    half = {
        "scaffold": 4.302652730 / math.sqrt(3),
        "fnr": 4.302652730 / math.sqrt(3) * math.sqrt(7),
    }
    assert metrics == {
        "scaffold": {
            "accuracy": 91,
            "spread": round(100 * math.sqrt(0.0014 / 2), 4),
            "worst_client": 45.5,
            "mib": 18,
            "difference": 11,
            "difference_low": round(11 - half["scaffold"], 4),
            "difference_high": round(11 + half["scaffold"], 4),
        },
        "fedavg": {"accuracy": 80, "spread": 2, "worst_client": 40, "mib": 12},
        "fnr": {
            "accuracy": 80,
            "spread": round(100 * math.sqrt(0.0006 / 2), 4),
            "worst_client": 40,
            "mib": 12,
            "difference": 0,
            "difference_low": round(-half["fnr"], 4),
            "difference_high": round(half["fnr"], 4),
        },
    }


def test_headline_metrics_leave_out_what_is_not_known_and_go_by_scenario(tmp_path: Path) -> None:
    write_params(tmp_path, ["fedavg"], [0], scenarios=["skew", "even"])
    write_run(tmp_path, "fedavg", 0, [0.25], evaluated=False)
    write_run(tmp_path, "fedavg", 0, [0.125], scenario="even", mib=4)
    metrics = json.loads((report.write(tmp_path) / "metrics.json").read_text())
    assert metrics == {
        "skew": {"fedavg": {"accuracy": 25, "mib": 2}},
        "even": {"fedavg": {"accuracy": 12.5, "worst_client": 6.25, "mib": 5}},
    }


def test_summary_csv_holds_unrounded_numbers(root: Path) -> None:
    rows = list(csv.DictReader(tables.summary_csv([sum_up(root)]).decode().splitlines()))
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
    assert (
        float(scaffold["vs_baseline_p_holm"]) == pytest.approx(2 * p)
        and scaffold["vs_baseline_p_sign"] == "0.25"
    )
    assert float(scaffold["vs_baseline_low"]) == pytest.approx(
        0.11 - 0.01 * 4.302652730 / math.sqrt(3)
    )
    fedavg: Mapping[str, str] = next(row for row in rows if row["recipe"] == "fedavg")
    assert (fedavg["vs_baseline_mean"], fedavg["vs_baseline_seeds"]) == ("", "0")


def test_curves_csv_holds_means_over_seeds_by_round(tmp_path: Path) -> None:
    for seed, course in ((0, [0.5, math.nan, 0.75]), (1, [0.25, math.nan, 0.25])):
        write_run(tmp_path, "fedavg", seed, course)
    write_run(tmp_path, "fnr", 0, [0.5])
    content = tables.curves_csv(
        sum_up(tmp_path, ["fedavg", "fnr"], [0, 1]), ["fedavg", "fnr"]
    ).decode()
    assert content.splitlines() == ["round,fedavg,fnr", "1,0.375,0.5", "2,,", "3,0.5,"]


def test_unequal_training_settings_are_named(root: Path) -> None:
    """A run that an older params.yaml has made."""
    for path in (root / "runs").glob("*/run.json"):
        content = json.loads(path.read_text())
        lr = 0.5 if path.parent.name == "skew-fnr-0" else 0.1
        path.write_text(json.dumps(content | {"params": content["params"] | {"train.lr": lr}}))
    text = (report.write(root) / "report.md").read_text()
    assert (
        "UNEQUAL training settings, compare with care: lr (0.1: fedavg, fnr, scaffold; 0.5: fnr)."
        in text
    )
    told = (
        "Training settings that were not the same for all methods: lr (0.1: fedavg, fnr, "
        "scaffold; 0.5: fnr)."
    )
    assert f"- {told}" in text and told in " ".join(
        (root / "report" / "table.txt").read_text().split()
    )


def tuned(root: Path, values: Mapping[str, Any], **records: Mapping[str, Any] | None) -> list[str]:
    """What the report says on tuning, with these values of recipes, tuned with these records (None:
    not tuned)."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["recipes"] |= values
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    plain = config.load(root)
    for name in params["recipes"]:
        entry = plain.recipes[name].values
        record = {
            "chosen": entry,
            "trials": 3,
            "tried": {k: {key: [0.1, v, 0.9] for key, v in of.items()} for k, of in entry.items()},
            "scenario": "skew",
            "seeds": [100],
            "accuracy": 0.9,
            "runner_up": 0.8,
            "samples": 100,
            "settings": tuning.fingerprint(plain, name, entry, "skew"),
        }
        changed = records.get(name, {})
        if changed is not None:
            params["recipes"][name] = (params["recipes"][name] or {}) | {
                "tuned": record | dict(changed)
            }
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    return chosen.sentences(config.load(root), results.read(root))


OWN = {
    "fedavg": {"train": {"lr": 0.2}},
    "scaffold": {"train": {"lr": 0.3}},
    "fnr": {"fnr": {"p": 0.5}},
}


def test_equal_budgets_are_said_and_nothing_is_warned_of(root: Path) -> None:
    """The middle of three values, a tenth ahead of the second."""
    first, last = tuned(root, OWN)
    assert (
        first == "Tuned on the validation split, 3 trials for each method: fedavg, scaffold, fnr."
    )
    assert last == "All methods had the same training settings.", "by the runs, which are older"
    lines = {row[0]: row[1:] for row in chosen.table(config.load(root))}
    about = ["yes", "3", "skew, seed 100, 100 samples", "90.00 (80.00)"]
    assert lines["scaffold"] == ["lr 0.3", *about] and lines["fnr"] == ["lr 0.1, fnr.p 0.5", *about]
    page = (report.write(root) / "report.md").read_text()
    assert "| scaffold | lr 0.3 | yes | 3 |" in page and "sgd; lr by method" in page


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
            "Chosen by at most one validation sample, so the second best may be as good: fnr.",
        ),
    ],
)
def test_what_speaks_against_a_fair_comparison_is_said(
    root: Path, records: Mapping[str, Mapping[str, Any] | None], told: str
) -> None:
    assert told in tuned(root, OWN, **records)


@pytest.mark.parametrize(
    ("runner", "how"), [({}, "Each method had its own tuned"), ({"fnr": None}, "UNEQUAL training")]
)
def test_unequal_values_of_an_equal_tuning_are_no_warning(
    root: Path, runner: Mapping[str, Any], how: str
) -> None:
    for path in (root / "runs").glob("*/run.json"):
        content = json.loads(path.read_text())
        lr = 0.3 if "scaffold" in path.parent.name else 0.2
        path.write_text(json.dumps(content | {"params": content["params"] | {"train.lr": lr}}))
    said = tuned(root, OWN, **runner)[-1]
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
    for draw in (figures.accuracy, figures.traffic, figures.clients):
        picture = draw(scenario, list(FINALS))
        assert picture is not None and picture.startswith(b"\x89PNG")


def test_names_of_lines_keep_their_order_and_distance() -> None:
    placed = figures._spread_out([0.9, 0.89, 0.88, 0.2], 0.1)
    assert placed == pytest.approx(
        [0.99, 0.89, 0.79, 0.2]
    )  # the three are centred on what they want
    stacked = figures._spread_out([1.0] * 4, 0.1)
    assert stacked == pytest.approx([1.0, 0.9, 0.8, 0.7])
    low = figures._spread_out([0.02, 0.01, 0.0], 0.1)
    assert low == pytest.approx([0.2, 0.1, 0.0])


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (
            "runs/skew-fnr-0/rounds.csv",
            "round,test_accuracy,bytes_up,bytes_down\n" + "1,much,1,1\n" * 6,
            "line 2, column test_acc",
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
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        report.write(root)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not [name for name in os.listdir(root) if name.startswith(".report")]
