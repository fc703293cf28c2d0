"""The report's numbers against arithmetic by hand, its words against what the numbers allow, its
files as a whole."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import yaml

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import config, results, search
from fedml_noniid.pipelines.reporting import (
    chosen,
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
    rows = [
        {"round": t, "test_accuracy": x, "bytes_up": megabytes * MIB, "bytes_down": MIB}
        for t, x in enumerate(course, 1)
    ]
    table = pd.DataFrame(rows).assign(**options.get("columns", {}))
    table.to_csv(run / "rounds.csv", index=False)
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


@pytest.fixture
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a report."""
    for name in ("accuracy", "clients"):
        monkeypatch.setattr(figures, name, lambda *_: b"picture")


NO_EFFECT = {"no_effect": "mu is 0"}
# Final accuracies of seeds 0, 1, ... by recipe (None: no run), options of their runs by recipe, and
# what the tables and sentences say. What begins with `not ` is not said.
SAID: list[tuple[dict[str, Sequence[float | None]], dict[str, dict[str, Any]], list[str]]] = [
    (
        {"fedavg": (0.5, 0.5)},
        {"fedavg": {"metrics": {"accuracy_noisy": 0.3}}},
        ["noisy test, %", " 30.00 ± 0.00 ", "Noisy test: on one copy of the test set per client"],
    ),
    # a - b: 0.04 and 0.02, one degree of freedom, t = 3: p = 1 - 2 atan(3) / pi = 0.2.
    (
        {"c": (0.24, 0.22), "b": (0.50, 0.51), "a": (0.54, 0.53), "d": (0.24, 0.22)},
        {},
        [" 1  ", " 2 ≈  ", " 3  ", "not  4  ", "≈ can't be told apart from the best mean."],
    ),
    (
        {"fedavg": (0.5,), "fnr": (0.6,)},
        {"fnr": {"composition": "x", "tags": NO_EFFECT}, "fedavg": {"evaluated": False}},
        [
            *("Fewer than two seeds in common can't tell methods apart", "not ±", "not ≈"),
            *("fnr: a named variant, x.", "NO EFFECT: fnr: mu is 0.", "+10.00", " one seed"),
        ],
    ),
    (
        {"fedavg": (0.6, 0.8, None), "fnr": (None, 0.9, 0.5)},
        {},
        [
            "Not finished, so not in the table: skew-fedavg-2, skew-fnr-0.",
            *("The methods have different seeds", "+10.00"),  # seed 1 is common
        ],
    ),
    ({"fnr": (0.6,)}, {}, ["no results of plain FedAvg", "only method here"]),
    ({"fedavg": (0.5, None), "fnr": (None, 0.6)}, {}, [" no seed"]),
    # Equal differences prove nothing where one sample's worth is unknown.
    (
        {"fedavg": [0.5] * 3, "fnr": [0.625] * 3},
        {name: {"evaluated": False} for name in ("fedavg", "fnr")},
        ["Nothing is evaluated: the size of the test set", " undecided"],
    ),
    (
        {"fnr": (0.6,), "plain": (0.5,)},
        {"plain": {"composition": "fedavg"}},
        ["vs plain", "plain: a named variant, fedavg."],
    ),
    ({"fnr": (0.5,)}, {"fnr": {"tags": {"public": "labelled"}}}, ["fnr †", "† trains", "not ‡"]),
    (
        {"fnr": (0.5,)},
        {"fnr": {"tags": {"public": "unlabelled"}}},
        ["fnr ‡", "‡ sees", "without their labels", "not †"],
    ),
    ({"fnr": (0.5,)}, {}, ["not †", "not ‡"]),
    (
        {"fedavg": (0.5, 0.5), "oort": (0.6, 0.6)},
        {"oort": {"tags": {"cohorts": "oort chooses"}}},
        ["oort §", "§ oort: oort chooses.", "the same clients in each round (but for §)"],
    ),
    (
        {"dpsgd": (0.6, 0.7)},
        {
            "dpsgd": {
                "tags": {"privacy": "per sample at delta 1e-05; per client at delta 0.001"},
                "columns": [{"epsilon_per_sample": e, "epsilon_per_client": "inf"} for e in (3, 2)],
            }
        },
        [
            "dpsgd: epsilon 3 per sample at delta 1e-05, epsilon inf per client at delta 0.001",
            "covered: numbers of samples and steps, losses, tests on own samples",
        ],
    ),
    # a leads but names one class on seed 1. c is above the majority class by one of 100 samples.
    (
        {"a": (0.97, 0.90), "b": (0.90, 0.91), "c": [0.81] * 2},
        {
            name: {"metrics": {"majority_accuracy": 0.8, "classes_named": named}}
            for name, named in (("a", 1.0), ("b", 2.0), ("c", 2.0))
        },
        [
            "b has the best mean test accuracy after the last round of the methods without a warn",
            "(majority class: 80.00 ± 0.00 %): c.",
            "ONE CLASS: the model names one class for all test samples: a (seeds 0, 1).",
        ],
    ),
]


@pytest.mark.parametrize(("finals", "options", "words"), SAID)
def test_what_is_said_of_runs(
    tmp_path: Path,
    finals: dict[str, Sequence[float | None]],
    options: dict[str, dict[str, Any]],
    words: Sequence[str],
) -> None:
    for recipe, values in finals.items():
        how = dict(options.get(recipe, {}))
        columns_of_seeds = how.pop("columns", [{}] * len(values))
        for seed, final in enumerate(values):
            if final is not None:
                write_run(tmp_path, recipe, seed, [final], **how, columns=columns_of_seeds[seed])
    scenario = sum_up(tmp_path, [*finals], range(max(map(len, finals.values()))))
    compared = [table for _, table in tables.compared(scenario)]
    text = said(scenario) + "".join(plain(table) for table in (tables.cells(scenario), *compared))
    for word in words:
        assert (word.removeprefix("not ") in text) == (not word.startswith("not ")), word


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


def test_last_five_and_best_count_evaluated_rounds_only(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.9, 0.1, math.nan, 0.2, 0.3, 0.4, 0.5, math.nan])
    (one,) = sum_up(tmp_path).methods
    assert close(one.final, 0.5, None, 1) and close(one.spreads["best"], 0.9, None, 1)
    assert close(one.spreads["last_5_rounds"], (0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5, None, 1)
    assert one.rounds == 8


RARE = {"majority_accuracy": 0.97, "balanced_accuracy": 0.5, "macro_f1": 0.49, "classes_named": 1.0}
TWO = RARE | {"classes_named": 2.0}


@pytest.mark.usefixtures("_no_pictures")
def test_a_constant_answer_is_not_praised(tmp_path: Path) -> None:
    """fnr is above FedAvg on every seed, but not above always naming the most frequent class."""
    write_params(tmp_path, ["fedavg", "scaffold", "fnr"], SEEDS)
    write_runs(tmp_path, {"fedavg": [0.90] * 3, "fnr": [0.96]}, metrics=TWO)
    write_runs(tmp_path, {"scaffold": [0.97] * 3}, metrics=RARE)
    write_run(tmp_path, "fnr", 1, [0.96], metrics=RARE)
    write_run(tmp_path, "fnr", 2, [0.96], metrics=TWO)
    scenario = sum_up(tmp_path)
    assert ranks(scenario) == [("scaffold", 0), ("fnr", 0), ("fedavg", 0)]
    section = report.section(scenario)
    one_class, low = section["warnings"]
    assert one_class.startswith("WARNING, ONE CLASS: ")
    assert one_class.endswith(": scaffold (seeds 0, 1, 2); fnr (seed 1).")
    assert low.endswith("class (majority class: 97.00 ± 0.00 %): scaffold, fnr, fedavg.")
    assert section["answer"] == ["No method can be recommended, as each has a warning."]
    ((_, compared),) = section["compared"]
    assert set(columns(compared)["verdict"]) == {"above, but with a warning"}
    shown = columns(section["table"])
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


def test_personal_models_have_a_constant_answer_of_their_own(tmp_path: Path) -> None:
    """A client that has one class is right to name it, but that is no merit of the method."""
    own = {"own_models": "accuracies are those of the clients' own models"}
    for recipe, final, majority, tags in (("fedavg", 0.6, 0.25, {}), ("fedbn", 0.98, 0.95, own)):
        metrics = RARE | {"majority_accuracy": majority, "classes_named": 4.0}
        write_run(tmp_path, recipe, 0, [final], metrics=metrics, tags=tags)
    scenario = sum_up(tmp_path, ["fedavg", "fedbn"], [0])
    constant = [row[:2] for row in tables.cells(scenario)[-2:]]
    assert constant == [["majority class", "25.00"], ["local majority class", "95.00"]]
    assert ranks(scenario) == [("fedavg", 1), ("fedbn", 0)], "it is another test"
    assert "vs_baseline" not in scenario.methods[1].spreads
    assert f"fedbn: {own['own_models']}." in said(scenario)
    assert "WARNING, TWO TESTS: the accuracy of fedbn is that of the clients' own" in said(scenario)
    for alone in ("fedavg", "fedbn"):
        summed = sum_up(tmp_path, [alone], [0])
        assert ranks(summed) == [(alone, 1)] and not report.section(summed)["warnings"]


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


def test_methods_that_differ_by_one_sample_are_not_told_apart(tmp_path: Path) -> None:
    """One of the 100 test samples on each of four seeds: no seeds would help."""
    write_runs(tmp_path, {"fedavg": [0.5] * 4, "fnr": [0.51] * 4})
    scenario = sum_up(tmp_path, ["fedavg", "fnr"], range(4))
    assert tables.compared(scenario)[0][1][1][-1] == "within one sample"
    _, undecided, needed = report.section(scenario)["answer"]
    assert undecided.startswith("These seeds can't tell it apart from fedavg at 5 % (paired t")
    assert needed.endswith("only a larger test set could tell them apart.")


@pytest.mark.parametrize(
    ("alike", "said", "tests"),
    [
        ("weights", "ends with the same weights.", 1),
        ("predictions", "makes the same predictions.", 2),
    ],
)
def test_methods_that_are_alike_are_equal_not_undecided(
    tmp_path: Path, alike: str, said: str, tests: int
) -> None:
    """b is fedavg under another name, or differs from it in its weights alone.

    The comparison with the same weights is no test, so Holm counts one test of fnr, not two. c only
    has the same accuracies.
    """
    for seed, final in enumerate(FINALS["fedavg"]):
        for recipe, less in (("fedavg", 0), ("b", 0), ("fnr", 10 + seed)):
            same = {"weights": f"{less}"} if alike == "weights" else {}
            metrics = {"predictions_sha256": f"{less} {seed}"} if alike == "predictions" else {}
            write_run(tmp_path, recipe, seed, [final - 0.01 * less], metrics=metrics, **same)
        write_run(tmp_path, "c", seed, [final], weights="0" if seed else "other")
    scenario = sum_up(tmp_path, ["fedavg", "b", "fnr"])
    best, worse = report.section(scenario)["answer"]
    assert best.endswith(f"80.00 % (3 seeds), and b {said}") and f"adjustment for {tests})" in worse
    assert columns(tables.cells(scenario))["rank"] == ("1", "1 =", "3")
    assert tables.compared(scenario)[0][1][1][-1] == f"same {alike}"
    for table in (tables.cells(scenario), tables.in_brief(scenario)):
        assert columns(table)["vs fedavg"][1] == "same predictions"
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


@pytest.mark.usefixtures("_no_pictures")
def test_a_leak_is_named_everywhere_and_has_no_rank(tmp_path: Path) -> None:
    """Nor has centralised training; the leader and its lead are those of what can be compared."""
    leak = {"public": "labelled", "leak": "fnr trains on the test set"}
    names = ["fedavg", "fnr", "fnr-leak", "centralised"]
    write_runs(tmp_path, {"fedavg": (0.5, 0.5)}, tags=NO_EFFECT)
    write_runs(tmp_path, {"fnr": (0.6, 0.6)}, tags={"public": "labelled"})
    write_runs(tmp_path, {"fnr-leak": (0.99, 0.99)}, composition="fnr", tags=leak)
    write_runs(tmp_path, {"centralised": (0.9, 0.9)}, tags={"federated": "no"})
    scenario = sum_up(tmp_path, names, [0, 1])
    assert ranks(scenario) == [("fnr", 1), ("fedavg", 2), ("fnr-leak", 0), ("centralised", 0)]
    section = report.section(scenario)
    assert {
        "LEAK: fnr-leak: fnr trains on the test set; its accuracy says nothing.",
        "centralised: is not federated. It is a bound on what the others can reach, so it has no "
        "rank.",
    } <= set(section["notes"])
    drawn = [curve.label for curve in figures._curves(scenario)]
    assert drawn == ["fnr-leak LEAK", "centralised", "fnr †", "fedavg"], "a picture goes by height"
    assert section["answer"][0].startswith("fnr has the best mean")
    assert not {"fnr-leak", "centralised"} & {*re.findall(r"[\w-]+", " ".join(section["answer"]))}
    assert [row[0] for _, rows in section["compared"] for row in rows[1:]] == ["fnr", "fedavg"]
    write_params(tmp_path, names, [0, 1])
    folder = report.write(tmp_path)
    for name in ("report.html", "report.md", "table.txt"):
        assert "fnr-leak LEAK" in (folder / name).read_text()
    assert "Lines marked LEAK have seen these samples" in (folder / "report.md").read_text()
    latex = method_table.from_scenarios([("", "", scenario)], names, 2).to_latex()
    assert "fnr-leak LEAK & 99.0" in latex and r"fnr $\dagger$ & \textbf{60.0" in latex
    assert "LEAK: has seen the test set" in latex


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


@pytest.mark.usefixtures("_no_pictures")
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


@pytest.mark.usefixtures("_no_pictures")
def test_two_scenarios_in_dvcs_metrics_and_in_the_answer(root: Path) -> None:
    """The worst client has half the accuracy; six rounds of 3 or 2 MiB. Of `later` there are no
    results; `even` has one run, which is not evaluated."""
    write_params(root, list(FINALS), SEEDS, scenarios=["skew", "even", "later"])
    write_run(root, "fedavg", 0, [0.25], scenario="even", evaluated=False)
    folder = report.write(root)
    assert {path.stem: json.loads(path.read_text()) for path in (folder / "dvc").iterdir()} == {
        "skew-scaffold": {"accuracy": 0.91, "worst": 0.455, "gain": 0.11, "mib": 18},
        "skew-fedavg": {"accuracy": 0.8, "worst": 0.4, "mib": 12},
        "skew-fnr": {"accuracy": 0.8, "worst": 0.4, "gain": 0, "mib": 12},
        "even-fedavg": {"accuracy": 0.25, "mib": 2},
        "best": {"skew-best": 0.91, "even-best": 0.25},
    }
    answer = (folder / "answer.txt").read_text()
    assert "skew: scaffold has the best" in answer and "even: fedavg has the best" in answer
    assert "Not finished, so not in the table: even-fedavg-1, even-fedavg-2, even-sc" in answer
    assert answer.count("Not all methods were tuned alike") == 1
    assert not (folder / "accuracy-later.png").exists()


def test_summary_csv_holds_unrounded_numbers(root: Path) -> None:
    """One degree of freedom less than two: p = 1 - t / sqrt(t^2 + 2), t = 11 sqrt(3)."""
    rows = csv.DictReader(tables.summary_csv([sum_up(root)]).splitlines())
    by_recipe = {row["recipe"]: row for row in rows}
    scaffold, fedavg = by_recipe["scaffold"], by_recipe["fedavg"]
    p = 1 - 11 * math.sqrt(3) / math.sqrt(365)
    for column, wanted in {
        "final_mean": 0.91,
        "vs_baseline_std": 0.01,
        "vs_baseline_seeds": 3,
        "rank": 1,
        "traffic_total_bytes_mean": 18 * MIB,
        "vs_baseline_p": p,
        "vs_baseline_p_holm": 2 * p,
        "vs_baseline_low": 0.11 - 0.01 * 6.205346817 / math.sqrt(3),
    }.items():
        assert float(scaffold[column]) == pytest.approx(wanted), column
    assert scaffold["vs_best_p"] == fedavg["vs_baseline_mean"] == ""


def test_curves_csv_holds_means_over_seeds_by_round(tmp_path: Path) -> None:
    """A round that one of the seeds did not reach has no mean."""
    for seed, course in ((0, [0.5, math.nan, 0.75, 0.9]), (1, [0.25, math.nan, 0.25])):
        write_run(tmp_path, "fedavg", seed, course)
    write_run(tmp_path, "fnr", 0, [0.5])
    names = ["fedavg", "fnr"]
    content = tables.curves_csv(sum_up(tmp_path, names, [0, 1]), names)
    assert content.splitlines() == ["round,fedavg,fnr", "1,0.375,0.5", "2,,", "3,0.5,", "4,,"]


@pytest.mark.usefixtures("_no_pictures")
@pytest.mark.parametrize(
    ("records", "how"),
    [(None, "UNEQUAL training"), ({"fnr": None}, "UNEQUAL training"), ({}, "Each method has its")],
)
def test_unequal_training_settings_are_named(
    root: Path, records: Mapping[str, Any] | None, how: str
) -> None:
    """Those of the runs count. Unequal values of an equal tuning are no warning."""
    for path in (root / "runs").glob("*/run.json"):
        content = json.loads(path.read_text())
        lr = 0.3 if "scaffold" in path.parent.name else 0.2
        path.write_text(json.dumps(content | {"params": content["params"] | {"train.lr": lr}}))
    unequal = "lr (0.2: fedavg, fnr; 0.3: scaffold)."
    if records is not None:
        last = tuned(root, VALUES, **records)[-1]
        assert last.startswith(how) and last.endswith(unequal)
        return
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["recipes"]["fnr"] = {"fnr": {"p": 0.5, "lam": 3.0}}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    folder = report.write(root)
    page = (folder / "report.md").read_text()
    assert f"{how} settings, compare with care: {unequal}" in page
    assert "Not at their default: fnr lam 3.0 (default 1.0)." in page
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


@pytest.mark.usefixtures("_no_pictures")
def test_equal_budgets_are_said_and_nothing_is_warned_of(root: Path) -> None:
    """The middle of three values, a tenth ahead of the second."""
    said = tuned(root, VALUES)
    assert said == [
        "Tuned on the validation split, 3 trials for each method: fedavg, scaffold, fnr.",
        "All methods had the same training settings.",  # by the runs, which are older
    ]
    page = (report.write(root) / "report.md").read_text()
    about = "yes | 3 of 3 | skew, seed 100, 100 samples | 90.00 (80.00) |"
    assert f"| scaffold | lr 0.3 | {about}" in page and "sgd; lr by method" in page
    assert f"| fnr | lr 0.1, fnr.p 0.5 | {about}" in page
    assert "The best of 3 means is too high on average" in page
    assert "can't say which method to use" not in page


@pytest.mark.usefixtures("_no_pictures")
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
        ("runs/skew-fnr-0/rounds.csv", "round,test_accuracy\n", "has no lines"),
        ("runs/skew-fnr-0/rounds.csv", "", "runs: holds no finished run"),
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
    if not content:
        shutil.rmtree(root / "runs")
    with pytest.raises(UserError) as caught:
        report.write(root)
    message = str(caught.value)
    assert Path(file).parts[0] in message and told in message and "\n" not in message
    assert not (root / "report").exists()


@pytest.mark.usefixtures("_no_pictures")
def test_a_failed_write_leaves_the_old_report(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same results give the same bytes."""
    before = contents(report.write(root))
    assert contents(report.write(root)) == before
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(UserError, match="No space left on device"):
        report.write(root)
    assert before == contents(root / "report")
    assert not [name for name in os.listdir(root) if name.startswith(".report")]
