"""Claims of papers: verdicts from results made by hand, each kind of number, the file's
mistakes."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.config import Config, checked
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.search import Answers, Point, Request, Search
from fedml_noniid.pipelines.experiment.workspace import Workspace
from research import committed, verbs
from research import study as running
from research.claims import SIZES, Claims, of_paper, of_papers
from research.cli import claims as cli
from research.committed import Committed
from research.contrasts import by_seed, evaluate
from research.looks import T_EXCESS, levels, p_of_look
from research.page import Page
from research.runs import Measured
from research.studies import DIVERGED, PAPERS, RESULTS
from research.verdicts import Verdict, adjust, judge
from tests.pipelines.small import ROOT
from tests.research import by_hand

STUDIES = """\
studies:
  own:
    like: one
    scenario_names: [near, far]
    seeds: [0, 1, 2, 3, 4]
    smoke: {scenario_names: [near, far]}
"""
CLAIM = {
    "states": "It is so.",
    "where": "Table I",
    "tests": "a less b",
    "study": "own",
    "scenarios": ["near"],
    "scale": 100,
    "unit": "points",
    "contrast": "difference",
    "of": ["a"],
    "less": ["b"],
    "holds": {"above": 0},
    "differs": "nothing",
}
FILE = Path("research/papers") / by_hand.PAPER / "claims.yaml"
# Final accuracies on five seeds: 10, 9, 11, 9, 11 points apart; c is b but for rounding.
A, B = [0.70, 0.74, 0.71, 0.78, 0.72], [0.60, 0.65, 0.60, 0.69, 0.61]
C = [b + d for b, d in zip(B, [1e-3, -1e-3, 2e-3, -1e-3, 0], strict=True)]
ABC = {"a": A, "b": B, "c": C}
THIRDS = (1 / 3, 2 / 3, 1.0)


def written(
    root: Path, *changes: dict[str, Any], studies: str = STUDIES, why: dict[str, Any] | None = None
) -> Path:
    """The files of a paper whose claims c0, c1, ...

    are CLAIM with changes; None takes a key away. `why`: the changes of a claim on a cause.
    """
    by_hand.paper(root)
    claims = {
        f"c{i}": {key: value for key, value in (CLAIM | change).items() if value is not None}
        for i, change in enumerate(changes)
    }
    kept = {key: CLAIM[key] for key in CLAIM if key not in ("states", "where")}
    whys = {
        f"w{i}": kept | {"explains": "c0"} | change for i, change in enumerate([why] if why else [])
    }
    with (root / FILE).open("w") as file:
        file.write(studies)
        YAML(typ="safe", pure=True).dump({"claims": claims, "why": whys}, file)
    for paper in PAPERS:  # the other papers have folders without claims
        (root / "research" / "papers" / paper).mkdir(exist_ok=True)
    return root


def one(
    root: Path, scenario: str, recipe: str, seed: int, accuracies: Sequence[float], **others: Any
) -> None:
    """A run in the folder of the study's claims."""
    by_hand.run(root, scenario, recipe, seed, accuracies, "own", **others)
    if not studies(root).exists():
        studies(root).symlink_to("studies")


def ends(root: Path, scenario: str, recipe: str, values: Sequence[float], **others: Any) -> None:
    """Runs that end at these accuracies, by seed."""
    for seed, value in enumerate(values):
        one(root, scenario, recipe, seed, [value / 2, value], **others)


def both(root: Path, b: int = 5) -> Path:
    """Runs of a, and of b for so many seeds."""
    ends(root, "near", "a", A)
    ends(root, "near", "b", B[:b])
    return root


def whole(root: Path, known: Committed | None = None) -> Page:
    """The page of all claims, at the size of by_hand."""
    return Page(of_papers(by_hand.SIZE, root), root, known or Committed())


def verdicts(root: Path) -> list[Verdict]:
    return whole(root).verdicts


def judged(
    root: Path, *claims: dict[str, Any], runs: Mapping[str, Sequence[float]] = ABC, **others: Any
) -> list[Verdict]:
    """The verdicts on claims, where these recipes end at these accuracies in scenario `near`."""
    written(root, *claims)
    for recipe, values in runs.items():
        ends(root, "near", recipe, values, **others)
    return verdicts(root)


def folder(root: Path) -> Path:
    """Of the page."""
    return root / RESULTS / "claims" / by_hand.SIZE


def studies(root: Path) -> Path:
    """Of the claims' runs."""
    return root / RESULTS / by_hand.PAPER / by_hand.SIZE / "claims"


def note(root: Path) -> None:
    """Notes the claims that are new, as before their first run."""
    claims = of_paper(by_hand.PAPER, by_hand.SIZE, root).claims
    committed.declare(folder(root), claims.values(), {by_hand.PAPER: "abc1234"})


def page(root: Path) -> str:
    """The page, without running anything."""
    return verbs.claims(
        Workspace.from_environment(root, {}), by_hand.SIZE, running=False
    ).read_text()


def shown(root: Path) -> str:
    """All tests in full, as the HTML page has them."""
    page(root)
    return whole(root).details()


def test_a_difference_has_the_interval_of_the_paired_t_test(tmp_path: Path) -> None:
    """Mean 10, deviation 1, so that the half width is t(0.975, 4) / sqrt(5)."""
    (verdict,) = judged(tmp_path, {})
    half = 2.7764451051977987 / math.sqrt(5)
    assert verdict.weakest is not None and verdict.weakest.mean == pytest.approx(10)
    assert verdict.weakest.interval == pytest.approx((10 - half, 10 + half))
    assert verdict.p == pytest.approx(ttest_1samp([10, 9, 11, 9, 11], 0).pvalue)


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        # The standard error is 1 / sqrt(5): 2 from the bound is p = 0.011, 0.5 is p = 0.33.
        ({"holds": {"above": 8}}, "held"),
        ({"holds": {"above": 12}}, "not held"),
        ({"holds": {"above": 9.5}}, "undecided"),
        ({"holds": {"below": 12}}, "held"),
        ({"holds": {"below": 8}}, "not held"),
        ({"holds": {"above": 8, "below": 12}}, "held"),
        ({"holds": {"above": 9.5, "below": 12}}, "undecided"),
        ({"holds": {"above": 20, "below": 30}}, "not held"),
        # The interval ends at 11.24.
        ({"holds": {"above": 9.5}, "margin": 12}, "no gain above 12 points"),
        ({"holds": {"above": 9.5}, "margin": 11}, "undecided"),
        ({"holds": {"above": 8}, "margin": 12}, "held"),
        ({"holds": {"above": 12}, "margin": 13}, "not held"),
        ({"of": ["c"], "margin": 1}, "no gain above 1 point"),
        # Against d it may be more: one of two methods is not enough.
        ({"holds": {"above": 9.5}, "margin": 12, "less": ["b", "d"]}, "undecided"),
    ],
    ids=str,
)
def test_the_verdict_is_about_bound_and_margin(
    tmp_path: Path, claim: dict[str, Any], text: str
) -> None:
    (verdict,) = judged(tmp_path, claim, runs=ABC | {"d": [0.5, 0.3, 0.6, 0.4, 0.5]})
    assert verdict.text == text
    if claim["holds" if "holds" in claim else "of"] == {"above": 20, "below": 30}:
        assert verdict.p == pytest.approx(ttest_1samp([10, 9, 11, 9, 11], 20).pvalue)
        assert {part.level for part in verdict.tested} == {0.05}, "one number, the nearer bound"
    if text == "no gain above 1 point":
        assert verdict.reason.startswith("Nor is a loss above 1.")


def test_holm_counts_all_claims_of_the_page(tmp_path: Path) -> None:
    """t = 4.5, 8.9 and 0.2: p times 4, 5 and 3, by hand. Those that have not run count with
    p = 1."""
    bounds = [{"holds": {"above": bound}} for bound in (8, 6, 9.9)]
    p = [2 * student.sf(distance * math.sqrt(5), 4) for distance in (2, 4, 0.1)]
    found = judged(tmp_path, *bounds, {"less": ["d"]}, {"less": ["d"]})
    assert [verdict.holm_p for verdict in found] == pytest.approx(
        [4 * p[0], 5 * p[1], min(1, 3 * p[2]), 1, 1]
    )
    assert [verdict.word for verdict in found[:3]] == ["held", "held", "undecided"]


def test_a_claim_over_several_methods_needs_them_all(tmp_path: Path) -> None:
    """c is as good as a: a is above b, but not above both. What points the wrong way was chosen
    among two."""
    like_a = [value + d for value, d in zip(A, [0.01, -0.01, 0.01, -0.01, 0], strict=True)]
    claims = {"less": ["b", "c"]}, {"of": ["c"], "less": ["a", "b"], "holds": {"above": 5}}
    found = judged(tmp_path, *claims, runs=ABC | {"c": like_a})
    assert [(verdict.word, verdict.weakest and verdict.weakest.part) for verdict in found] == [
        ("undecided", "near: a less c"),
        ("not held", "near: c less a"),
    ]
    own = ttest_1samp([1, -1, 1, -1, 0], 5).pvalue
    assert (found[1].p, found[1].holm_p) == pytest.approx((2 * own, 4 * own))


def test_equal_differences_prove_nothing_among_several(tmp_path: Path) -> None:
    """a is 10 points above c on every seed: no t test, whatever the number beside it shows."""
    near, d = [0.5, 0.51, 0.5, 0.51, 0.5], [0.7, 0.71, 0.7, 0.71, 0.7]
    runs = {"a": [0.6] * 5, "b": near, "c": [0.5] * 5, "d": d}
    first, second = judged(tmp_path, {"less": ["b", "c"]}, {"less": ["c", "d"]}, runs=runs)
    assert (first.word, first.p) == ("undecided", 1)
    assert first.reason == "The number is the same on every seed, so there is no t test."
    assert second.word == "not held", "a is below d"


@pytest.mark.parametrize(
    ("claim", "seeds"),
    [
        ({"holds": {"above": 9}}, 10),  # d = 1: printed tables of the paired t test
        ({"holds": {"above": 9}, "less": ["b", "c"]}, 13),  # d = 1 twice, 90 % each: 12.6
        ({"holds": {"above": 10}}, None),  # d = 0
        ({"holds": {"above": 10}, "margin": 11}, 10),  # d = 1 to the margin
        ({"holds": {"above": 11}}, 10),  # on the wrong side
    ],
)
def test_seeds_needed_for_any_verdict(
    tmp_path: Path, claim: dict[str, Any], seeds: int | None
) -> None:
    """Mean 10, deviation 1. Over several methods all must hold at once."""
    (verdict,) = judged(tmp_path, claim, runs=ABC | {"c": B})
    assert verdict.seeds_needed == seeds


@pytest.mark.parametrize(("claims", "less"), [(1, ["b"]), (2, ["b"]), (1, ["b", "c"])])
def test_the_adjusted_interval_is_that_of_bonferroni(
    tmp_path: Path, claims: int, less: list[str]
) -> None:
    """Mean 10, deviation 1, five seeds: the level is shared by the claims, then by the parts."""
    verdict, *_ = judged(tmp_path, *[{"less": less}] * claims, runs=ABC | {"c": B})
    level = 0.05 / claims / len(less)
    half = student.ppf(1 - level / 2, 4) / math.sqrt(5)
    assert verdict.weakest and verdict.weakest.adjusted == pytest.approx((10 - half, 10 + half))
    assert [part.level for part in verdict.tested] == pytest.approx([level] * len(less))


def test_a_margin_that_is_younger_than_the_runs_says_so(tmp_path: Path) -> None:
    """It changes no number and needs no run: the committed ones stay those of the claim."""
    claim, remarks = {"holds": {"above": 9.5}}, {"printed": {"effect": 3}, "ours": True}
    judged(tmp_path, claim)
    note(tmp_path)
    assert "written down before its first run (abc1234)." in shown(tmp_path)
    shutil.copytree(folder(tmp_path), tmp_path / "results")
    written(tmp_path, claim | remarks | {"margin": 12, "withdrawn": "It is so."})
    known = Committed(tmp_path / "results")
    (verdict,) = whole(tmp_path, known).verdicts
    assert known.look(verdict.named) == 0
    assert verdict.is_post_hoc and verdict.text == "no gain above 12 points"
    assert verdict.reason.endswith("The margin was written after the runs.")
    assert "), its margin later" in shown(tmp_path)
    (folder(tmp_path) / committed.DECLARED).unlink()
    note(tmp_path)
    assert not verdicts(tmp_path)[0].is_post_hoc, "it was there before the first run"
    written(tmp_path, claim | {"margin": 13})
    assert "CHANGED after its first run (first written at abc1234)" in shown(tmp_path)


@pytest.mark.parametrize(
    ("a", "b", "change", "is_testable"),
    [
        (0.149, 0.12, {}, False),
        (0.151, 0.12, {}, True),  # one of them learns
        (0.993, 0.996, {}, False),
        (0.993, 0.989, {}, True),
        (0.5, 0.4, {"statistic": "first1:test_accuracy"}, False),  # all begin at chance
        (0.149, 0.12, {"statistic": "accuracy_last5_std", "metrics": 0.5}, False),
        (0.5, 0.4, {"statistic": "accuracy_last5_std", "metrics": 0.01}, True),
        (0.12, 0.12, {"contrast": "same", "scale": 1, "holds": {"below": 1}}, True),
        (0.5, 0.4, {"statistic": "client_worst", "metrics": 0.01}, False),
        (0.12, 0.12, {"contrast": "level", "less": []}, True),  # chance is a result there
        (0.12, 0.12, {"statistic": "bytes_up", "contrast": "ratio", "scale": 1}, True),
    ],
)
def test_what_no_method_learns_is_not_testable(
    tmp_path: Path, a: float, b: float, change: dict[str, Any], is_testable: bool
) -> None:
    """Five points above the chance of ten classes, or 99 %, for all methods of the claim.

    In Holm's adjustment such a claim counts with p = 1.
    """
    worst = change.pop("metrics", 0.5)
    written(tmp_path, change, {"of": ["c"], "less": ["d"]})
    for seed, shift in enumerate([-4e-3, 1e-3, 2e-3, 2e-3, -1e-3]):
        for recipe, mean in (("a", a), ("b", b), ("c", 0.7), ("d", 0.6)):
            metrics = dict.fromkeys(
                ("client_worst", "accuracy_last5_std"), worst + shift * (recipe == "a")
            )
            accuracies = [0.1, mean + shift * (recipe in "ac")]
            one(tmp_path, "near", recipe, seed, accuracies, metrics=metrics)
    first, second = verdicts(tmp_path)
    assert {first.word != "not testable here", not first.gate} == {is_testable}
    assert is_testable or (first.holm_p, second.holm_p) == pytest.approx((1, 2 * second.p))


def looking(root: Path, monkeypatch: pytest.MonkeyPatch, *claims: dict[str, Any]) -> Path:
    """Claims that are judged at 5, 10 and 15 seeds."""
    monkeypatch.setattr(by_hand, "SIZE", "small")
    seeds = STUDIES.replace("[0, 1, 2, 3, 4]", f"{[*range(15)]}\n    looks: [5, 10, 15]")
    return written(root, *claims, studies=seeds)


def test_a_claim_is_judged_at_the_last_look_with_all_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4, 7 and 13 seeds none, the first 5 or the first 10 count.

    Each p and each interval has the level of its look, by research/looks.py.
    """
    root = looking(tmp_path, monkeypatch, {"holds": {"above": 9}})
    numbers, ps = [10, 9, 11, 9, 11, 10, 10, 8, 12, 10, 30, 30, 30], [1.0]
    for seed, number in enumerate(numbers):
        one(root, "near", "a", seed, [0.1, 0.5 + number / 100])
        one(root, "near", "b", seed, [0.1, 0.5])
        if seed == 3:
            (verdict,) = verdicts(root)
            assert verdict.word == "not run" and verdict.reason.startswith("2 of 10 runs")
        if seed in (6, 12):
            (verdict,), look = verdicts(root), seed // 6
            own = ttest_1samp(numbers[: 5 * look], 9).pvalue
            ps.append(T_EXCESS * p_of_look(own, THIRDS[:look]))
            assert verdict.p == pytest.approx(min(ps), rel=1e-6) and verdict.p > own
            assert verdict.weakest and len(verdict.weakest.compared.differences) == 5 * look
            level = levels(THIRDS, 0.05 / T_EXCESS)[look - 1]
            assert verdict.weakest.level == pytest.approx(level)
    assert len(set(verdict.runs["item"])) == 20, "runs behind the look are not shown"


def test_what_comes_after_a_decision_counts_for_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seeds show no gain of a over b, five more a loss. With the loss's p, the other claim's p
    would be multiplied by 1, and it would be held by its first five seeds."""
    root = looking(tmp_path, monkeypatch, {"margin": 3}, {"less": ["c"]})
    over_b = [-1, 0.5, -0.5, 0.2, -0.4, -1, -1.2, -0.9, -1.1, -1]
    over_c = [2, 4, 6, 4, 1.5, -3, 8, -2, 7, 0]
    for recipe, leads in (("a", [0.0] * 10), ("b", over_b), ("c", over_c)):
        ends(root, "near", recipe, [0.6 - lead / 100 for lead in leads])
    loss, early = (
        T_EXCESS * p_of_look(ttest_1samp(leads, 0).pvalue, THIRDS[: len(leads) // 5])
        for leads in (over_b, over_c[:5])
    )
    assert loss < early < 0.05 < 2 * early
    first, second = verdicts(root)
    assert (first.text, first.look) == ("no gain above 3 points", 0)
    assert (second.word, second.look, second.holm_p) == ("undecided", 1, pytest.approx(2 * early))


def test_the_p_of_the_shown_looks_are_those_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three claims at three looks, with any p that fall from look to look.

    Holm's adjustment of the shown p gives each shown one, and no claim ends undecided early. In the
    first case both of the first claims would have p = 0.026 at the first look, and need the other's
    0.024 at the second. In the last one, no p is small enough at the first look: c0 goes on, then
    c1, whose p decides all three.
    """
    root = looking(tmp_path, monkeypatch, {}, {}, {})
    ends(root, "near", "a", [0.5 + (seed % 3) / 100 for seed in range(15)])
    ends(root, "near", "b", [0.5] * 15)
    own = of_papers("small", root)[by_hand.PAPER]
    measured = Measured(by_hand.PAPER, "small", root, own.studies)
    looks_of = [judge(named, measured, Committed()) for named in own.claims.values()]
    cases = np.sort(0.1 * np.random.default_rng(0).random((12, 3, 3)) ** 2, axis=2)[:, :, ::-1]
    first = [[0.026, 0.024, 0.024], [0.026, 0.024, 0.024], [0.03, 0.02, 0.001]]
    turns = [[0.05, 0.026, 0.0095], [0.028, 0.015, 0.0068], [0.0177, 0.0076, 0.0025]]
    words = set()
    for case in [first, *cases, turns]:
        found = adjust(
            [
                [at._replace(p=float(p)) for at, p in zip(looks, ps, strict=True)]
                for looks, ps in zip(looks_of, case, strict=True)
            ]
        )
        times = [n * p for n, p in zip((3, 2, 1), sorted(x.p for x in found), strict=True)]
        adjusted = np.minimum(np.maximum.accumulate(times), 1)
        assert sorted(verdict.holm_p for verdict in found) == pytest.approx([*adjusted])
        assert all(verdict.look == 2 for verdict in found if verdict.word == "undecided")
        words |= {verdict.word for verdict in found}
    assert [verdict.look for verdict in found] == [1, 1, 0], "the earliest look goes on"
    assert words == {"held", "undecided"}


def test_seeds_are_run_until_all_claims_of_a_study_are_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c0 is decided by five seeds, c1 by ten."""
    root = looking(tmp_path, monkeypatch, {}, {"less": ["c"]})
    ran: list[int] = []

    def execute(place: Workspace, study: Any) -> None:
        ran.append(len(study.content["seeds"]))
        for seed in study.content["seeds"]:
            for recipe, value in (("a", 0.7), ("b", 0.6), ("c", 0.69 - (seed == 0) * 0.04)):
                one(root, "near", recipe, seed, [0.1, value + 0.001 * (seed % 3) * (recipe != "a")])

    monkeypatch.setattr(running, "execute", execute)
    verbs.claims(Workspace.from_environment(root, {}), "small", name="c0")
    assert ran == [5, 10] and [verdict.look for verdict in verdicts(root)] == [0, 1]


@pytest.mark.parametrize("looks", ["[5, 10]", "[10, 5, 15]", "[1, 15]", "[5, 5, 15]"])
def test_looks_that_do_not_lead_to_all_seeds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    path = looking(tmp_path, monkeypatch, {}) / FILE
    path.write_text(path.read_text().replace("[5, 10, 15]", looks))
    with pytest.raises(UserError, match=r"studies\.own\.looks.*ascending numbers"):
        of_paper(by_hand.PAPER, "small", tmp_path)


def numbers(root: Path) -> list[list[float]]:
    """The first claim's parts, by seed."""
    own = of_paper(by_hand.PAPER, by_hand.SIZE, root)
    measured = Measured(by_hand.PAPER, by_hand.SIZE, root, own.studies)
    parts = own.claims["c0"].claim.contrasts()
    return [list(by_seed(evaluate(part, measured)).values()) for part in parts]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"statistic": "final"}, [[20.0, 30.0]]),
        ({"statistic": "best", "scale": 1}, [[0.2, 0.3]]),
        ({"statistic": "last2", "scale": 1}, [[0.15, 0.225]]),
        ({"statistic": "first1:test_accuracy", "scale": 1}, [[0.1, 0.15]]),
        ({"statistic": "mean:test_accuracy", "scale": 1}, [[0.15, 0.225]]),
        # a in round 2, 1; b never (3), 2
        ({"statistic": "rounds_to:0.45", "scale": 1}, [[-1.0, -1.0]]),
        ({"statistic": "client_worst", "scale": 1}, [[0.25, 0.25]]),
        ({"contrast": "level", "less": []}, [[60.0, 90.0]]),
        ({"contrast": "ratio", "scale": 1}, [[1.5, 1.5]]),
        ({"contrast": "same"}, [[1.0, 1.0]]),
        ({"scenarios": ["near", "far"]}, [[20.0, 30.0], [10.0, 5.0]]),
        # (20, 10) and (30, 5) at 1 and 3
        ({"contrast": "trend", "scenarios": None, "over": {"near": 1, "far": 3}}, [[-5.0, -12.5]]),
    ],
)
def test_each_kind_of_number(
    tmp_path: Path, change: dict[str, Any], wanted: list[list[float]]
) -> None:
    written(tmp_path, change)
    for recipe, near, far, worst in (
        ("a", [0.6, 0.9], [0.5, 0.6], 0.5),
        ("b", [0.4, 0.6], [0.4, 0.55], 0.25),
    ):
        ends(tmp_path, "near", recipe, near, metrics={"client_worst": worst})
        ends(tmp_path, "far", recipe, far)
    assert [pytest.approx(values) for values in wanted] == numbers(tmp_path)
    assert verdicts(tmp_path)[0].counted is (change.get("contrast") == "same")


def test_rounds_until_an_accuracy_that_no_run_reaches_say_nothing(tmp_path: Path) -> None:
    """0.62 is reached by every a and by two of b, 0.95 by none: equal numbers are no result
    there."""
    claim = {"scale": 1, "unit": "rounds", "holds": {"below": 0}}
    levels_ = [{"statistic": f"rounds_to:{level}"} | claim for level in (0.62, 0.95)]
    some, none = judged(tmp_path, *levels_)
    assert some.never == (3, 10), "b ends at 0.60, 0.65, 0.60, 0.69, 0.61"
    assert (none.never, none.word, none.weakest, none.p) == ((10, 10), "undecided", None, 1)
    text = shown(tmp_path)
    assert "3 of 10 runs never reach the accuracy. Each counts as a round more than all." in text
    assert "Verdict: **undecided**. Where no run reaches the accuracy, nothing is compared." in text


# Client 0 has class 0. Neuron 1 is bound to class 1 and falls by 0.25, neuron 2 is dead, neuron 0
# is its own. [rounds, clients, classes, neurons]
DRIFT = {
    "fednlr/before": torch.tensor([[[[3.0, 1.0, 0.0], [1.0, 2.0, 0.0]]]]),
    "fednlr/after": torch.tensor([[[[4.0, 1.5, 0.0], [0.5, 1.75, 0.5]]]]),
    "round/clients": torch.tensor([[0]]),
}


@pytest.mark.parametrize(
    ("statistic", "recorded", "wanted"),
    [
        # The mean over the rounds of one client's number.
        ("recorded:ccn/weights:1", {"ccn/weights": torch.tensor([[0.2, 0.3], [0.2, 0.5]])}, 0.4),
        ("n_over_e", {}, 0.5),  # the mean of the rounds' quotients
        ("neuron_drift", DRIFT, -0.25),
    ],
    ids=["weights", "n_over_e", "drift"],
)
def test_numbers_that_a_method_records(
    tmp_path: Path, statistic: str, recorded: dict[str, torch.Tensor], wanted: float
) -> None:
    change = {"statistic": statistic, "scale": 1, "contrast": "level", "less": []}
    columns = {"update_norm_server": [1, 3], "update_norm_client": [4, 4]}
    one(written(tmp_path, change), "near", "a", 0, [0.1, 0.2], recorded=recorded, columns=columns)
    partition = studies(tmp_path) / "own" / "partitions" / "near-0"
    partition.mkdir(parents=True)
    text = "client,samples,entropy,noise,0,1\n0,5,0,0,5,0\n1,5,0,0,0,5\n"
    (partition / "clients.csv").write_text(text)
    assert numbers(tmp_path) == [pytest.approx([wanted])]


@pytest.mark.parametrize(
    ("mib", "word"),
    [([(1, 1), (1, 1)], "held"), ([(1, 1), (2, 1)], "undecided"), ([(2, 1), (2, 1)], "not held")],
)
def test_a_counted_number_has_no_test(
    tmp_path: Path, mib: list[tuple[int, int]], word: str
) -> None:
    """Every seed must agree. It is not among the claims that Holm's adjustment counts."""
    claim = {"statistic": "traffic_mib", "contrast": "ratio", "scale": 1, "holds": {"below": 1.5}}
    written(tmp_path, claim, {"less": ["b"]})
    for seed, (own, other) in enumerate([*mib, *[mib[-1]] * 3]):
        one(tmp_path, "near", "a", seed, [0.1, A[seed]], metrics={"traffic_mib": own})
        one(tmp_path, "near", "b", seed, [0.1, B[seed]], metrics={"traffic_mib": other})
    first, second = verdicts(tmp_path)
    assert (first.word, first.holm_p) == (word, 1)
    assert second.holm_p == second.p, "it is the only tested claim"


def test_missing_and_diverged_runs_decide_nothing_and_are_named(tmp_path: Path) -> None:
    """The mean of the seeds without the diverged one would be too high."""
    root = written(tmp_path, {})
    assert "10 of 10 runs are missing: near-a-0, near-a-1, near-a-2 and 7 more" in shown(root)
    text = shown(both(root, b=4))
    assert "**not run**" in text and "1 of 10 runs are missing: near-b-4" in text
    assert "| CCN | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in page(root)
    (studies(root) / "own" / DIVERGED).write_text(json.dumps({"near-b-4": "round 3: not finite"}))
    assert verdicts(root)[0].word == "undecided"
    assert "1 runs diverge: near-b-4" in shown(root)


def test_a_seed_without_a_finite_number_leaves_a_claim_undecided(tmp_path: Path) -> None:
    """Without the seed, the others' mean could be too high."""
    written(tmp_path, {"statistic": "client_worst", "contrast": "level", "less": []})
    for seed, worst in enumerate([0.5, 0.6, 0.5, 0.6, math.nan]):
        one(tmp_path, "near", "a", seed, [0.1, 0.2], metrics={"client_worst": worst})
    assert "Verdict: **undecided**. 4 of 5 seeds have the number." in shown(tmp_path)


def test_the_files_have_every_number_and_its_run(tmp_path: Path) -> None:
    text = shown(both(written(tmp_path, {"states": "a *b* c_d."})))
    assert r"The paper states: a \*b\* c\_d. (Table I)" in text, "Markdown's signs are escaped"
    (line,) = table(folder(tmp_path) / "claims.csv")
    assert (line["claim"], line["seeds"], line["verdict"]) == ("c0", "5", "held")
    assert float(line["high"]) == pytest.approx(10 + student.ppf(0.975, 4) / math.sqrt(5))
    values = table(folder(tmp_path) / "claims-values.csv")
    of = [float(value["value"]) for value in values if value["role"] == "of"]
    assert of == pytest.approx([100 * a for a in A])
    runs = {run["item"]: run for run in table(folder(tmp_path) / "claims-runs.csv")}
    assert len(runs) == 10 and {value["item"] for value in values} == set(runs)
    curve = table(folder(tmp_path) / f"claims-rounds-{by_hand.PAPER}.csv")[-5]
    assert [curve[key] for key in ("item", "1", "2")] == ["near-b-0", "0.3", "0.6"]
    assert "**Size smoke proves nothing.**" in page(tmp_path)


@pytest.mark.parametrize(("change", "wanted"), [({}, []), ({"holds": {"above": -5}}, ["own"])])
def test_missing_runs_only_what_has_no_committed_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], wanted: list[str]
) -> None:
    """A claim that was changed since has none. All claims on a study that runs are noted."""
    other = {"of": ["b"], "less": ["a"]}
    note(both(written(tmp_path, {}, other)))
    page(tmp_path)
    folder(tmp_path).rename(tmp_path / "results")
    written(tmp_path, change, other)
    ran: list[str] = []
    monkeypatch.setattr(verbs, "Committed", lambda _: Committed(tmp_path / "results"))
    monkeypatch.setattr(running, "execute", lambda place, of: ran.append(of.name))
    verbs.claims(Workspace.from_environment(tmp_path, {}), by_hand.SIZE, missing=True, name="c0")
    assert ran == wanted
    assert set(committed.declared(folder(tmp_path))) == ({"c0", "c1"} if wanted else set())


def test_an_experiment_on_a_cause_stands_with_its_claim_and_weakens_no_claim(
    tmp_path: Path,
) -> None:
    """b is 10 points below a: the claim on b does not hold, and the cause is supported.

    Holm counts one claim.
    """
    claim = {"of": ["b"], "less": ["a"]}
    (verdict,) = verdicts(both(written(tmp_path, claim, why={"cause": "It is b."})))
    assert (verdict.word, verdict.n_tests) == ("not held", 1)
    text = shown(tmp_path)
    assert "Why? It is b. Tested: a less b; supported if above 0 points. Measured: +10.00 (" in text
    assert "**supported** (NOT written down before its first run, w0)" in text
    written(tmp_path, claim, why={"cause": "It is b.", "explains": "c1"})
    with pytest.raises(UserError, match="w0: claim 'c1' is unknown"):
        shown(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["held", "held"]),
        ({"tests": "other"}, ["not run", "held"]),
        # Words beside the test.
        ({"differs": "much", "states": "It is.", "where": "Table II"}, ["held", "held"]),
    ],
)
def test_committed_numbers_are_judged_without_their_runs(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    """As long as the claim is the one that was tested.

    The other claim, whose runs are here, needs none. `beside` is read back too.
    """
    beside, other = {"beside": {"bytes": "bytes_up"}}, {"of": ["b"], "less": ["c"]}
    judged(tmp_path, beside, other, runs=ABC | {"c": [0.5, 0.5, 0.51, 0.5, 0.52]})
    note(tmp_path)
    before, results = shown(tmp_path), tmp_path / "results"
    shutil.copytree(folder(tmp_path), results)
    written(tmp_path, beside | change, other)
    for path in studies(tmp_path).glob("own/runs/near-a-*"):
        shutil.rmtree(path)
    again = whole(tmp_path, Committed(results))
    assert [verdict.word for verdict in again.verdicts] == words
    assert [verdict.is_committed for verdict in again.verdicts] == [words[0] == "held", False]
    if words[0] == "held":
        made, text = again.files(), again.details()
        remark = "; its numbers are the committed ones of"
        assert remark in text
        assert change or re.sub(f"{remark}.*?here", "", text) == before
        rounds = f"claims-rounds-{by_hand.PAPER}.csv"
        for name in ("claims.csv", "claims-values.csv", "claims-runs.csv", rounds):
            assert made[name] == (results / name).read_bytes(), name


def test_a_claim_that_is_written_when_runs_are_known_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound and margin could be read off them."""
    late = {"less": ["b", "c"], "holds": {"above": 9.5}, "margin": 12}
    both(written(tmp_path, {}, late))
    monkeypatch.setattr(running, "execute", lambda *_: ends(tmp_path, "near", "c", B))
    verbs.claims(Workspace.from_environment(tmp_path, {}), by_hand.SIZE)
    assert committed.declared(folder(tmp_path))["c1"]["seen"] == ["a", "b"]
    assert "Test: written down when runs of a and b were known (" in shown(tmp_path)
    assert [verdict.is_post_hoc for verdict in verdicts(tmp_path)] == [False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sttaes": "x"}, "claims.c0.sttaes is unknown (did you mean 'states'?)"),
        ({"where": None}, "claims.c0.where is missing"),
        ({"study": "ovn"}, "c0: study 'ovn' is unknown (did you mean 'own'?)"),
        ({"scenarios": ["nera"]}, "c0: scenario 'nera' is unknown (did you mean 'near'?)"),
        ({"of": ["z"]}, "c0: recipe 'z' is unknown"),
        ({"contrast": "diference"}, "claims.c0.contrast = 'diference' is unknown"),
        ({"less": []}, "claims.c0.less = [] is refused; allowed: from 1 up methods"),
        ({"of": ["a", "b"]}, "claims.c0.of = ['a', 'b'] is refused; allowed: at most 1"),
        ({"contrast": "trend"}, "claims.c0.over = {} is refused"),
        ({"over": {"near": 1, "far": 2}}, "claims.c0.over = {'far': 2, 'near': 1} is refused"),
        ({"scenarios": []}, "claims.c0.scenarios = [] is refused"),
        ({"holds": {}}, "claims.c0.holds: one of above and below is needed"),
        ({"holds": {"above": 2, "below": 1}}, "allowed: a number less than below=1"),
        ({"margin": 0}, "claims.c0.margin = 0 is refused; allowed: a number larger than"),
        ({"margin": 1, "holds": {"below": 0}}, "claims.c0.margin = 1 is refused"),
        ({"printed": {"far": {"effect": 1}}}, "printed: scenario 'near' is unknown"),
        # of a study: what is replaced in STUDIES
        (("[0, 1, 2, 3, 4]", "[0]"), "studies.own.seeds = [0] is refused; allowed: 5 or more"),
        (("  own:", "  one:"), "study 'one' is in params.yaml too"),
        (("like: one", "like: two"), "study 'two' is unknown"),
        (("studies:", "study: 1\nstudies:"), "study is unknown (did you mean 'studies'?)"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, change: dict[str, Any] | tuple[str, str], words: str
) -> None:
    claim, edit = ({}, change) if isinstance(change, tuple) else (change, ("", ""))
    root = written(tmp_path, claim, studies=STUDIES.replace(*edit, 1))
    with pytest.raises(UserError) as error:
        of_paper(by_hand.PAPER, by_hand.SIZE, root)
    (line,) = str(error.value).splitlines()
    assert "claims.yaml: " in line and words in line


def test_a_study_runs_only_what_a_claim_reads(tmp_path: Path) -> None:
    own = of_paper(by_hand.PAPER, by_hand.SIZE, written(tmp_path, {}, {"less": ["c"]}))
    content = own.studies["own"].content
    assert (content["scenario_names"], content["recipe_names"]) == (["near"], ["a", "b", "c"])


@pytest.fixture(scope="module")
def ours() -> dict[str, Claims]:
    """Paper -> the repository's claims."""
    return of_papers("small", ROOT)


def test_the_page_counts_tests_and_statements(ours: dict[str, Claims]) -> None:
    """README, the claims' page and the protocols say the same numbers."""
    own = [named.claim for claims in ours.values() for named in claims.claims.values()]
    counts = f"{len(own)} tests of {len({claim.states for claim in own})} statements"
    for name in ("README.md", "docs/claims.md", "docs/results/claims.md"):
        assert counts in " ".join((ROOT / name).read_text().split()), name


def test_write_copies_the_page_and_its_numbers(tmp_path: Path) -> None:
    """Without running anything. `declared.json` stays with the runs. Size smoke proves nothing."""
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    cli.claims(size="small", run=False, write=True, root=written(tmp_path, {}))
    assert {path.name for path in results.iterdir()} == {
        *("claims-details.html", "claims-runs.csv", "claims-values.csv"),
        *("claims.csv", "claims.json", "claims.md"),
    }
    assert "it does not refute a paper at its own scale" in (results / "claims.md").read_text()
    with pytest.raises(UserError, match="--write with --size smoke is refused"):
        cli.claims(size="smoke", write=True, root=ROOT)
    assert cli.SIZES == SIZES


def test_a_tuned_study_runs_with_the_best_trial_of_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b's second trial is the best; a's first diverged. The study keeps what no trial changes."""
    claims = of_paper("fednnnn", by_hand.SIZE, ROOT)
    study = claims.studies["claims-mnist-tuned"]
    scores: dict[str, list[tuple[dict[str, Any], float | None]]] = {
        "fedavg": [({"train": {"lr": 0.5}}, None), ({"train": {"lr": 0.1}}, 0.3)],
        "fednnnn": [
            ({"train": {"lr": 0.2}, "fednnnn": {"beta": 1.0}}, 0.4),
            ({"train": {"lr": 0.1}, "fednnnn": {"beta": 0.5}}, 0.6),
        ],
    }

    def tuning(settings: Config) -> Search:
        points = {
            name: [Point(name, f"{name}-{n}", values) for n, (values, _) in enumerate(own)]
            for name, own in scores.items()
        }
        return Search(settings, "tune", settings.scenario_names[0], [100], points, [*points])

    def measured(place: Workspace, plan: Search, request: Request) -> Answers:
        trained = {p.entry: scores[p.recipe][int(p.entry[-1])][1] for p in request.points}
        return {
            entry: [] if x is None else [{"validation_loss": 1 - x, "validation_accuracy": x}]
            for entry, x in trained.items()
        }

    monkeypatch.setattr(running.search, "tuning", tuning)
    monkeypatch.setattr(running, "measured", measured)
    monkeypatch.setattr(Search, "_beyond", lambda *_: ())
    settings = checked(study.content, "claims.yaml")
    place = Workspace.from_environment(tmp_path, {})
    chosen = running.tuned(place, study, settings)
    assert {name: chosen.content["recipes"][name] for name in scores} == {
        "fedavg": {"train": {"lr": 0.1}},
        "fednnnn": {"fednnnn": {"beta": 0.5, "gamma": 0.8}, "train": {"lr": 0.1}},
    }
    assert "tune" not in chosen.content and chosen.items == study.items
    trials = Page({"fednnnn": claims}, tmp_path, Committed()).files()["claims-trials.csv"]
    assert trials.decode().splitlines()[1:3] == [
        "fednnnn,claims-mnist-tuned,fedavg,lr 0.1,100,0.3,yes",
        "fednnnn,claims-mnist-tuned,fedavg,lr 0.5,100,,",
    ]
    scores["fedavg"].pop()
    with pytest.raises(UserError, match=r"claims.yaml: tune: no value of fedavg is left"):
        running.tuned(place, study, settings)
