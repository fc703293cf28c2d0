"""Claims of papers: verdicts from results made by hand, each kind of number, the file's
mistakes."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from scipy.stats import nct, ttest_1samp
from scipy.stats import t as student

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.config import Config, checked
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.pipelines.experiment.search import Answers, Point, Request, Search, tuning
from fedml_noniid.pipelines.experiment.workspace import Workspace
from research import answers, committed, verbs
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
    content: dict[str, Any] = {"claims": claims}
    if why is not None:
        kept = {key: CLAIM[key] for key in CLAIM if key not in ("states", "where")}
        content["why"] = {"w0": kept | {"explains": "c0"} | why}
    path = root / "research" / "papers" / by_hand.PAPER / "claims.yaml"
    with path.open("w") as file:
        file.write(studies)
        YAML(typ="safe", pure=True).dump(content, file)
    for paper in PAPERS:  # the other papers have folders without claims
        (path.parents[1] / paper).mkdir(exist_ok=True)
    return root


def ends(root: Path, scenario: str, recipe: str, values: Sequence[float], **others: Any) -> None:
    """Runs that end at these accuracies, by seed."""
    for seed, value in enumerate(values):
        one(root, scenario, recipe, seed, [value / 2, value], **others)


def both(root: Path, b: int = 5) -> Path:
    """Runs of a and b as below; of b for so many seeds."""
    ends(root, "near", "a", A)
    ends(root, "near", "b", B[:b])
    return root


def one(
    root: Path, scenario: str, recipe: str, seed: int, accuracies: Sequence[float], **others: Any
) -> None:
    """A run in the folder of the study's claims."""
    by_hand.run(root, scenario, recipe, seed, accuracies, "own", **others)
    if not studies(root).exists():
        studies(root).symlink_to("studies")


def verdicts(root: Path) -> list[Verdict]:
    """All of the paper's, at the size of by_hand."""
    return Page(of_papers(by_hand.SIZE, root), root, Committed()).verdicts


def folder(root: Path) -> Path:
    """Of the page."""
    return root / RESULTS / "claims" / by_hand.SIZE


def studies(root: Path) -> Path:
    """Of the claims' runs."""
    return root / RESULTS / by_hand.PAPER / by_hand.SIZE / "claims"


def note(root: Path) -> None:
    """Notes the claims as they are before their first run."""
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
    return Page(of_papers(by_hand.SIZE, root), root, Committed()).details()


A, B = [0.70, 0.74, 0.71, 0.78, 0.72], [0.60, 0.65, 0.60, 0.69, 0.61]


def test_a_difference_has_the_interval_of_the_paired_t_test(tmp_path: Path) -> None:
    """10, 9, 11, 9, 11 points: mean 10, deviation 1, so that the half width is t(0.975, 4) /
    sqrt(5)."""
    (found,) = verdicts(both(written(tmp_path, {})))
    assert found.word == "held" and found.weakest is not None and found.weakest.interval is not None
    half = 2.7764451051977987 / math.sqrt(5)
    assert found.weakest.mean == pytest.approx(10)
    assert found.weakest.interval == pytest.approx((10 - half, 10 + half))
    assert found.p == pytest.approx(ttest_1samp([10, 9, 11, 9, 11], 0).pvalue)


@pytest.mark.parametrize(
    ("holds", "word"),
    [
        ({"above": 8}, "held"),
        ({"above": 12}, "not held"),
        ({"above": 9.5}, "undecided"),
        ({"below": 12}, "held"),
        ({"below": 8}, "not held"),
        ({"above": 8, "below": 12}, "held"),
        ({"above": 9.5, "below": 12}, "undecided"),
        ({"above": 20, "below": 30}, "not held"),
    ],
)
def test_the_verdict_is_about_the_bound(tmp_path: Path, holds: dict[str, float], word: str) -> None:
    """The mean is 10 and the standard error 1 / sqrt(5): 2 from the bound is t = 4.5, p = 0.011;
    0.5 is p = 0.33."""
    (found,) = verdicts(both(written(tmp_path, {"holds": holds})))
    assert found.word == word
    if holds == {"above": 20, "below": 30}:  # one number, with the whole level and the nearer bound
        assert found.p == pytest.approx(ttest_1samp([10, 9, 11, 9, 11], 20).pvalue)
        assert {one.level for one in found.tested} == {0.05}


def test_holm_counts_all_claims_of_the_page(tmp_path: Path) -> None:
    """Three claims with t = 4.5, 8.9 and 0.2: p times 2, 3 and 1, by hand.

    One that has not run counts with p = 1.
    """
    bounds = [{"holds": {"above": bound}} for bound in (8, 6, 9.9)]
    root = both(written(tmp_path, *bounds))
    p = [2 * student.sf(distance * math.sqrt(5), 4) for distance in (2, 4, 0.1)]
    assert [one.holm_p for one in verdicts(root)] == pytest.approx([2 * p[0], 3 * p[1], p[2]])
    assert [one.word for one in verdicts(root)] == ["held", "held", "undecided"]
    root = written(tmp_path, *bounds, {"less": ["c"]}, {"less": ["c"]})
    assert [one.holm_p for one in verdicts(root)] == pytest.approx(
        [4 * p[0], 5 * p[1], min(1, 3 * p[2]), 1, 1]
    )
    assert verdicts(root)[0].word == "held", "4 times 0.0111 is below 0.05"


def test_a_claim_over_several_methods_needs_them_all(tmp_path: Path) -> None:
    """c is as good as a: a is above b, but not above both."""
    root = written(
        tmp_path, {"less": ["b", "c"]}, {"of": ["c"], "less": ["a", "b"], "holds": {"above": 5}}
    )
    both(root)
    ends(
        root,
        "near",
        "c",
        [value + sign for value, sign in zip(A, [0.01, -0.01, 0.01, -0.01, 0], strict=True)],
    )
    first, second = verdicts(root)
    assert (
        first.word == "undecided"
        and first.weakest is not None
        and first.weakest.part == "near: a less c"
    )
    assert (
        second.word == "not held"
        and second.weakest is not None
        and second.weakest.part == "near: c less a"
    )
    own = ttest_1samp([1, -1, 1, -1, 0], 5).pvalue
    assert second.p == pytest.approx(2 * own), "the wrong side was chosen among two"
    assert second.holm_p == pytest.approx(4 * own), "two claims"


def test_equal_differences_prove_nothing_among_several(tmp_path: Path) -> None:
    """a is 10 points above c on every seed: no t test, whatever the number beside it shows."""
    root = both(written(tmp_path, {"less": ["b", "c"]}, {"less": ["c", "d"]}))
    ends(root, "near", "c", [0.5 for _ in A])
    ends(root, "near", "a", [0.6 for _ in A])
    ends(root, "near", "b", [0.5, 0.51, 0.5, 0.51, 0.5])
    ends(root, "near", "d", [0.7, 0.71, 0.7, 0.71, 0.7])
    first, second = verdicts(root)
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
    root = both(written(tmp_path, claim))
    ends(root, "near", "c", B)
    (found,) = verdicts(root)
    assert found.seeds_needed == seeds


def test_the_papers_number_is_that_of_the_weakest_scenario(tmp_path: Path) -> None:
    """near is 10 points, far 8."""
    printed = {"near": {"effect": 5}, "far": {"effect": 3, "fedavg": 70}}
    root = both(written(tmp_path, {"scenarios": ["near", "far"], "printed": printed}))
    ends(root, "far", "a", [x - 0.02 for x in A])
    ends(root, "far", "b", B)
    (found,) = verdicts(root)
    assert found.weakest and found.weakest.part == "far: a less b"
    assert found.printed and (found.printed.effect, found.fedavg[1]) == (3, 70)


@pytest.mark.parametrize(("others", "bound", "parts"), [(0, 5.0, 1), (1, 5.0, 1), (0, 5.0, 2)])
def test_the_adjusted_interval_is_that_of_bonferroni(
    tmp_path: Path, others: int, bound: float, parts: int
) -> None:
    """Mean 10, deviation 1, five seeds: the level is shared by the claims, then by the parts."""
    less = ["b", "c"][:parts]
    root = both(written(tmp_path, *[{"less": less}] * (1 + others)))
    ends(root, "near", "c", B)
    found, *_ = verdicts(root)
    level = 0.05 / (1 + others) / parts
    half = student.ppf(1 - level / 2, 4) / math.sqrt(5)
    assert found.weakest is not None and found.weakest.adjusted is not None
    assert found.weakest.adjusted == pytest.approx((10 - half, 10 + half))
    assert [one.level for one in found.tested] == pytest.approx([level] * parts)


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ({"holds": {"above": 9.5}}, "undecided"),
        ({"holds": {"above": 9.5}, "margin": 12}, "no gain above 12 points"),
        ({"holds": {"above": 9.5}, "margin": 11}, "undecided"),  # the interval ends at 11.24
        ({"holds": {"above": 8}, "margin": 12}, "held"),
        ({"holds": {"above": 12}, "margin": 13}, "not held"),
        # c is 10 points worse, but only against one of two methods.
        ({"holds": {"above": 9.5}, "margin": 12, "less": ["b", "c"]}, "undecided"),
        ({"of": ["c"], "less": ["b"], "margin": 1, "unit": "points"}, "no gain above 1 point"),
    ],
)
def test_no_gain_above_a_margin(tmp_path: Path, claim: dict[str, Any], text: str) -> None:
    """a is 8.76 to 11.24 points above b, and c within half a point of it."""
    root = both(written(tmp_path, claim))
    ends(root, "near", "c", [b + d for b, d in zip(B, [1e-3, -1e-3, 2e-3, -1e-3, 0], strict=True)])
    if claim.get("less") == ["b", "c"]:
        ends(root, "near", "c", [0.5, 0.3, 0.6, 0.4, 0.5])
    note(root)
    (found,) = verdicts(root)
    assert found.text == text
    if text == "no gain above 1 point":
        assert found.reason == "Nor is a loss above 1."


def test_a_margin_that_is_younger_than_the_runs_says_so(tmp_path: Path) -> None:
    """It changes no number and needs no run: the committed ones stay those of the claim."""
    claim = {"holds": {"above": 9.5}}
    root = both(written(tmp_path, claim))
    note(root)
    before = shown(root)
    shutil.copytree(folder(root), tmp_path / "results")
    known = Committed(tmp_path / "results")
    remarks = {"margin": 12, "printed": {"effect": 3}, "ours": True, "withdrawn": "It is so."}
    written(root, claim | remarks)
    (named,) = of_papers(by_hand.SIZE, root)[by_hand.PAPER].claims.values()
    assert known.look(named) == 0
    (found,) = Page(of_papers(by_hand.SIZE, root), root, known).verdicts
    assert found.is_post_hoc and found.text == "no gain above 12 points"
    assert found.reason.endswith("The margin was written after the runs.")
    assert "), its margin later" not in before and "), its margin later" in shown(root)
    (folder(root) / committed.DECLARED).unlink()
    note(root)
    (found,) = verdicts(root)
    assert not found.is_post_hoc, "it was there before the first run"
    written(root, claim | {"margin": 13})
    assert "CHANGED after its first run" in shown(root)


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
        (0.5, 0.4, {"statistic": "client_worst", "metrics": 0.2}, True),
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
    root = written(tmp_path, change, {"of": ["c"], "less": ["d"]})
    shifts = [-4e-3, 1e-3, 2e-3, 2e-3, -1e-3]
    for recipe, mean in (("a", a), ("b", b), ("c", 0.7), ("d", 0.6)):
        for seed, shift in enumerate(shifts):
            metric = worst + shift * (recipe == "a")
            metrics = {"client_worst": metric, "accuracy_last5_std": metric}
            one(root, "near", recipe, seed, [0.1, mean + shift * (recipe in "ac")], metrics=metrics)
    first, second = verdicts(root)
    assert (first.word == "not testable here") is not is_testable
    assert bool(first.gate) is not is_testable
    if not is_testable:
        assert first.holm_p == 1 and second.holm_p == pytest.approx(2 * second.p)


def looking(root: Path, monkeypatch: pytest.MonkeyPatch, *claims: dict[str, Any]) -> Path:
    """Claims that are judged at 5, 10 and 15 seeds."""
    monkeypatch.setattr(by_hand, "SIZE", "small")
    seeds = STUDIES.replace("[0, 1, 2, 3, 4]", f"{[*range(15)]}\n    looks: [5, 10, 15]")
    return written(root, *claims, studies=seeds)


def test_a_claim_is_judged_at_the_last_look_with_all_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7, 10 and 13 seeds the first 5 or 10 count.

    Each p and each interval has the level of its look, by research/looks.py.
    """
    root = looking(tmp_path, monkeypatch, {"holds": {"above": 9}})
    numbers = [10, 9, 11, 9, 11, 10, 10, 8, 12, 10, 30, 30, 30]
    fractions = (1 / 3, 2 / 3, 1.0)
    expected = None
    for seed, number in enumerate(numbers):
        one(root, "near", "a", seed, [0.1, 0.5 + number / 100])
        one(root, "near", "b", seed, [0.1, 0.5])
        (found,) = verdicts(root)
        n = 5 * ((seed + 1) // 5)
        if not n:
            assert found.word == "not run" and found.reason.startswith(f"{8 - 2 * seed} of 10 runs")
            continue
        own = ttest_1samp(numbers[:n], 9)
        p = T_EXCESS * p_of_look(own.pvalue, fractions[: n // 5])
        expected = min(p, expected or 1)
        assert found.p == pytest.approx(expected, rel=1e-6) and found.p > own.pvalue
        assert found.weakest is not None and len(found.weakest.compared.differences) == n
        level = levels(fractions, 0.05 / T_EXCESS)[n // 5 - 1]
        assert found.weakest.level == pytest.approx(level)
    assert len(set(found.runs["item"])) == 20, "runs behind the look are not shown"


def test_a_claim_that_a_look_decided_has_the_numbers_of_that_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 points on five seeds, then -10 on five: held, by the five.

    The other claim, which is not decided yet, has all ten. So have the files.
    """
    change = {"beside": {"its bytes": "bytes_up"}}
    root = looking(tmp_path, monkeypatch, change, {"less": ["c"]})
    for seed in range(10):
        lead = (0.1 if seed < 5 else -0.1) + 0.002 * (seed % 3)
        for recipe, value in (("a", 0.6), ("b", 0.6 - lead), ("c", 0.6 + 0.05 * (seed % 2 - 0.5))):
            metrics = {"bytes_up": 5 + (seed > 4)}
            one(root, "near", recipe, seed, [0.1, value], metrics=metrics)
    first, second = verdicts(root)
    assert answers.filled("{c0|verdict}, {c1|verdict}", {"c0": first, "c1": second}) == (
        "held after 5 of 15 seeds, undecided after 10 of 15 seeds"
    )
    for found, n in ((first, 5), (second, 10)):
        assert found.weakest is not None and len(found.weakest.compared.differences) == n
        assert set(found.values["seed"]) == {*range(n)} and len(found.runs) == 2 * n
        assert set(found.all_values["seed"]) == {*range(10)}
    assert first.weakest and first.weakest.mean == pytest.approx(10.16)
    text = page(root)
    assert "5 of 5<br>after 5 of 15" in text and "5 of 10<br>after 10 of 15" in text
    assert text.count("; fresh seeds](claims-details.html#c") == 2
    assert "its bytes, 5.00 (5.00 to 5.00).\n" in shown(root), "five more seeds have 6"
    assert (folder(root) / "claims-runs.csv").read_text().count("near-b-") == 10


def test_what_comes_after_a_decision_counts_for_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seeds show no gain of a over b, five more a loss. With the loss's p, the other claim's p
    would be multiplied by 1, and it would be held by its first five seeds."""
    root = looking(tmp_path, monkeypatch, {"margin": 3}, {"less": ["c"]})
    over_b = [-1, 0.5, -0.5, 0.2, -0.4, -1, -1.2, -0.9, -1.1, -1]
    over_c = [2, 4, 6, 4, 1.5, -3, 8, -2, 7, 0]
    for seed in range(10):
        leads = {"a": 0.0, "b": over_b[seed], "c": over_c[seed]}
        for recipe, lead in leads.items():
            one(root, "near", recipe, seed, [0.1, 0.6 - lead / 100])
    loss, early = (
        T_EXCESS * p_of_look(ttest_1samp(of, 0).pvalue, (1 / 3, 2 / 3)[: len(of) // 5])
        for of in (over_b, over_c[:5])
    )
    assert loss < early < 0.05 < 2 * early
    first, second = verdicts(root)
    assert (first.text, first.look) == ("no gain above 3 points", 0)
    assert (second.word, second.look) == ("undecided", 1)
    assert second.holm_p == pytest.approx(2 * early)


def test_the_p_of_the_shown_looks_are_those_that_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three claims at three looks, with any p that fall from look to look.

    Holm's adjustment of the shown p gives each shown one, and no claim ends undecided early. In the
    first case both of the first claims would have p = 0.026 at the first look, and need the other's
    0.024 at the second.
    """
    root = looking(tmp_path, monkeypatch, {}, {}, {})
    for seed in range(15):
        for recipe in ("a", "b"):
            one(root, "near", recipe, seed, [0.1, 0.5 + (recipe == "a") * (seed % 3) / 100])
    own = of_papers("small", root)[by_hand.PAPER]
    measured = Measured(by_hand.PAPER, "small", root, own.studies)
    judged = [judge(named, measured, Committed()) for named in own.claims.values()]
    assert [len(looks) for looks in judged] == [3, 3, 3]
    random = np.random.default_rng(0)
    cases = np.sort(0.1 * random.random((40, 3, 3)) ** 2, axis=2)[:, :, ::-1]
    first = [[0.026, 0.024, 0.024], [0.026, 0.024, 0.024], [0.03, 0.02, 0.001]]
    # At the first look no p is small enough. c0 goes on, then c1, whose p decides all three.
    turns = [[0.05, 0.026, 0.0095], [0.028, 0.015, 0.0068], [0.0177, 0.0076, 0.0025]]
    words = set()
    for case in [first, *cases, turns]:
        found = adjust(
            [
                [at._replace(p=float(p)) for at, p in zip(looks, ps, strict=True)]
                for looks, ps in zip(judged, case, strict=True)
            ]
        )
        times = [n * p for n, p in zip((3, 2, 1), sorted(one.p for one in found), strict=True)]
        adjusted = np.minimum(np.maximum.accumulate(times), 1)
        assert sorted(one.holm_p for one in found) == pytest.approx([*adjusted])
        assert all(one.look == 2 for one in found if one.word == "undecided")
        words.add(tuple((one.word, one.look) for one in found))
    assert [one.look for one in found] == [1, 1, 0], "the claim at the earliest look goes on"
    assert words >= {(("held", 0), ("held", 1), ("held", 2))}
    assert {word for case in words for word, _ in case} == {"held", "undecided"}
    text = answers.filled("{c0|verdict}", {"c0": judged[0][2]})
    assert text == "undecided after all 15 seeds", "not adjusted yet"


def test_each_look_is_judged_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """c0 is near chance on five seeds and not on ten. c1 counts bytes: five agree, ten do not."""
    count = {"statistic": "bytes_up", "contrast": "level", "less": [], "holds": {"below": 6}}
    root = looking(tmp_path, monkeypatch, {}, count | {"scale": 1})
    leads = [0.01, 0.03, 0.02, 0.0, 0.01]
    for seed in range(10):
        late = 0.4 * (seed > 4)
        for recipe, value in (("a", 0.12), ("b", 0.11 + leads[seed % 5])):
            metrics = {"bytes_up": 5 + 2 * (seed > 4)}
            one(root, "near", recipe, seed, [0.1, value + late], metrics=metrics)
    gated, counted = verdicts(root)
    assert (gated.word, gated.look, gated.p) == ("not testable here", 0, 1)
    assert (counted.word, counted.look) == ("held", 0)


def test_several_numbers_and_the_seeds_needed_after_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a is 1 point below b, with deviation 1.05, and 1.5 below c: p counts twice, of all looks."""
    root = looking(tmp_path, monkeypatch, {"less": ["b", "c"]}, {"less": ["b"]})
    numbers = [-2.0, 0.0] * 5
    for seed, number in enumerate(numbers):
        for recipe, value in (("a", 0.5 + number / 100), ("b", 0.5), ("c", 0.505)):
            one(root, "near", recipe, seed, [0.1, value])
    several, single = verdicts(root)
    fractions = (1 / 3, 2 / 3, 1.0)
    worst = p_of_look(ttest_1samp(numbers, 0.5).pvalue, fractions[:2])
    assert several.p == pytest.approx(2 * T_EXCESS * worst) and several.word == "not held"
    level = levels(fractions, 0.05 / 2 / T_EXCESS)[2]

    def power(n: int) -> float:
        shift = math.sqrt(n) / float(np.std(numbers, ddof=1))
        return float(nct.sf(student.isf(level / 2, n - 1), n - 1, shift))

    needed = single.seeds_needed
    assert needed is not None and power(needed) >= 0.8 > power(needed - 1)


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
    assert ran == [5, 10]
    assert [found.look for found in verdicts(root)] == [0, 1]


@pytest.mark.parametrize("looks", ["[5, 10]", "[10, 5, 15]", "[1, 15]", "[5, 5, 15]"])
def test_looks_that_do_not_lead_to_all_seeds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    root = looking(tmp_path, monkeypatch, {})
    path = root / "research" / "papers" / by_hand.PAPER / "claims.yaml"
    path.write_text(path.read_text().replace("[5, 10, 15]", looks))
    with pytest.raises(UserError, match=r"studies\.own\.looks.*ascending numbers"):
        of_paper(by_hand.PAPER, "small", root)


def test_fresh_claims_are_a_family_of_their_own(tmp_path: Path) -> None:
    """As causes are: they weaken no claim, and no claim weakens them."""
    root = both(written(tmp_path, {}))
    path = root / "research" / "papers" / by_hand.PAPER / "claims.yaml"
    content = YAML(typ="safe").load(path)
    content["fresh"] = {"f0": CLAIM, "f1": CLAIM}
    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(content, file)
    page = Page(of_papers(by_hand.SIZE, root), root, Committed())
    assert [one.n_tests for one in page.every] == [1, 2, 2]
    assert page.fresh[0].holm_p == pytest.approx(2 * page.verdicts[0].holm_p)
    content["fresh"] = {"c0": CLAIM}
    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(content, file)
    with pytest.raises(UserError, match=r"fresh\.c0: the ID is that of a claim too"):
        of_paper(by_hand.PAPER, by_hand.SIZE, root)


def numbers(root: Path) -> list[list[float]]:
    """The first claim's parts, by seed."""
    found = of_paper(by_hand.PAPER, by_hand.SIZE, root)
    measured = Measured(by_hand.PAPER, by_hand.SIZE, root, found.studies)
    claim = next(iter(found.claims.values())).claim
    return [list(by_seed(evaluate(one, measured)).values()) for one in claim.contrasts()]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"statistic": "final"}, [[20.0, 30.0]]),
        ({"statistic": "best", "scale": 1}, [[0.2, 0.3]]),
        ({"statistic": "last2", "scale": 1}, [[0.15, 0.225]]),
        ({"statistic": "first1:test_accuracy", "scale": 1}, [[0.1, 0.15]]),
        ({"statistic": "mean:test_accuracy", "scale": 1}, [[0.15, 0.225]]),
        (
            {"statistic": "rounds_to:0.45", "scale": 1},
            [[-1.0, -1.0]],
        ),  # a in round 2, 1; b never (3), 2
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
    root = written(tmp_path, change)
    for recipe, near, far, worst in (
        ("a", [0.6, 0.9], [0.5, 0.6], 0.5),
        ("b", [0.4, 0.6], [0.4, 0.55], 0.25),
        ("c", [0.5, 0.6], [0.5, 0.5], 0.25),
    ):
        ends(root, "near", recipe, near, metrics={"client_worst": worst})
        ends(root, "far", recipe, far)
    found = numbers(root)
    assert [pytest.approx(values) for values in wanted] == found
    if change.get("contrast") == "same":
        assert [found.counted for found in verdicts(root)] == [True]


def test_rounds_until_an_accuracy_that_no_run_reaches_say_nothing(tmp_path: Path) -> None:
    """0.62 is reached by every a and by two of b, 0.95 by none: equal numbers are no result
    there."""
    claim = {"scale": 1, "unit": "rounds", "holds": {"below": 0}}
    root = written(
        tmp_path, *({"statistic": f"rounds_to:{level}"} | claim for level in (0.62, 0.95))
    )
    both(root)
    some, none = verdicts(root)
    assert some.never == (3, 10), "b ends at 0.60, 0.65, 0.60, 0.69, 0.61"
    assert (
        none.never == (10, 10) and none.word == "undecided" and none.weakest is None and none.p == 1
    )
    text = shown(root)
    assert "3 of 10 runs never reach the accuracy. Each counts as a round more than all." in text
    assert "Verdict: **undecided**. Where no run reaches the accuracy, nothing is compared." in text


def test_recorded_numbers(tmp_path: Path) -> None:
    """The mean over the rounds of one client's number; N / E is the mean of the rounds'
    quotients."""
    root = written(
        tmp_path,
        {"statistic": "recorded:ccn/weights:1", "scale": 1, "contrast": "level", "less": []},
    )
    for seed in (0, 1):
        one(
            root,
            "near",
            "a",
            seed,
            [0.1, 0.2],
            recorded={"ccn/weights": torch.tensor([[0.2, 0.3], [0.2, 0.5]])},
        )
    assert numbers(root) == [pytest.approx([0.4, 0.4])]
    written(root, {"statistic": "n_over_e", "scale": 1, "contrast": "level", "less": []})
    for path in studies(root).glob("own/runs/*/rounds.csv"):
        head = "round,test_accuracy,bytes_up,bytes_down,update_norm_server,update_norm_client"
        path.write_text(f"{head}\n1,0.1,1,1,1,4\n2,0.2,1,1,3,4\n")
    assert numbers(root) == [pytest.approx([0.5, 0.5])]


def test_neuron_drift_is_of_neurons_bound_to_classes_that_a_client_lacks(tmp_path: Path) -> None:
    """Client 0 has class 0.

    Neuron 1 is bound to class 1 and falls by 0.25, neuron 2 is dead, neuron 0 is its own.
    """
    before = torch.tensor(
        [[[[3.0, 1.0, 0.0], [1.0, 2.0, 0.0]]]]
    )  # [rounds, clients, classes, neurons]
    after = torch.tensor([[[[4.0, 1.5, 0.0], [0.5, 1.75, 0.5]]]])
    tensors = {"fednlr/before": before, "fednlr/after": after, "round/clients": torch.tensor([[0]])}
    root = written(
        tmp_path, {"statistic": "neuron_drift", "scale": 1, "contrast": "level", "less": []}
    )
    for seed in (0, 1):
        one(root, "near", "a", seed, [0.1, 0.2], recorded=tensors)
        partition = studies(root) / "own" / "partitions" / f"near-{seed}"
        partition.mkdir(parents=True)
        (partition / "clients.csv").write_text(
            "client,samples,entropy,noise,0,1\n0,5,0,0,5,0\n1,5,0,0,0,5\n"
        )
    assert numbers(root) == [pytest.approx([-0.25, -0.25])]


@pytest.mark.parametrize(
    ("values", "word"),
    [([[1, 1], [1, 1]], "held"), ([[1, 1], [2, 1]], "undecided"), ([[2, 1], [2, 1]], "not held")],
)
def test_a_counted_number_has_no_test(tmp_path: Path, values: list[list[int]], word: str) -> None:
    """Every seed must agree. It is not among the claims that Holm's adjustment counts."""
    claim = {"statistic": "traffic_mib", "contrast": "ratio", "scale": 1, "holds": {"below": 1.5}}
    root = written(tmp_path, claim, {"less": ["b"]})
    seeds = [*values, *([values[-1]] * 3)]
    for seed, (own, other) in enumerate(seeds):
        one(root, "near", "a", seed, [0.1, A[seed]], metrics={"traffic_mib": own})
        one(root, "near", "b", seed, [0.1, B[seed]], metrics={"traffic_mib": other})
    first, second = verdicts(root)
    assert first.word == word and first.holm_p == 1
    assert second.holm_p == second.p, "it is the only tested claim"


def test_a_claim_whose_runs_are_missing_says_so(tmp_path: Path) -> None:
    root = written(tmp_path, {})
    assert "10 of 10 runs are missing: near-a-0, near-a-1, near-a-2 and 7 more" in shown(root)
    both(root, b=4)
    text = shown(root)
    assert "**not run**" in text and "1 of 10 runs are missing: near-b-4" in text
    assert "| CCN | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in page(root)


def test_a_diverged_run_leaves_a_claim_undecided(tmp_path: Path) -> None:
    """The mean of the other seeds would be too high."""
    root = written(tmp_path, {})
    both(root, b=4)
    (studies(root) / "own" / DIVERGED).write_text(json.dumps({"near-b-4": "round 3: not finite"}))
    assert [found.word for found in verdicts(root)] == ["undecided"]
    assert "1 runs diverge: near-b-4" in shown(root)


def test_the_files_have_every_number_and_its_run(tmp_path: Path) -> None:
    root = both(written(tmp_path, {}))
    text = shown(root)
    (line,) = table(folder(root) / "claims.csv")
    interval = (float(line["mean"]), float(line["high"]))
    assert interval == pytest.approx((10, 10 + student.ppf(0.975, 4) / math.sqrt(5)))
    assert (line["claim"], line["seeds"], line["verdict"]) == ("c0", "5", "held")
    values = table(folder(root) / "claims-values.csv")
    of = [float(one["value"]) for one in values if one["role"] == "of"]
    assert of == pytest.approx([100 * a for a in A])
    runs = {run["item"]: run for run in table(folder(root) / "claims-runs.csv")}
    assert len(runs) == 10 and {one["item"] for one in values} == set(runs)
    assert {(run["study"], run["weights_sha256"]) for run in runs.values()} == {("own", "0")}
    assert float(runs["near-a-1"]["accuracy"]) == pytest.approx(A[1])
    rounds = table(folder(root) / f"claims-rounds-{by_hand.PAPER}.csv")
    (found,) = (one for one in rounds if one["item"] == "near-b-0")
    assert [float(found[t]) for t in "12"] == pytest.approx([B[0] / 2, B[0]])
    html = (folder(root) / "claims-details.html").read_text()
    assert '<h3 id="c0">c0</h3>' in html and "](claims-details.html#c0) |" in page(root)
    assert (folder(root) / f"claims-{by_hand.PAPER}.png").stat().st_size > 0
    assert "- Means over the seeds: near: a 73.00, b 63.00.\n" in text


@pytest.mark.parametrize(("change", "wanted"), [({}, []), ({"holds": {"above": -5}}, ["own"])])
def test_missing_runs_only_what_has_no_committed_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], wanted: list[str]
) -> None:
    """A claim that was changed since has none. All claims on a study that runs are noted."""
    root = both(written(tmp_path, {}, {"of": ["b"], "less": ["a"]}))
    note(root)
    shown(root)
    shutil.copytree(folder(root), tmp_path / "results")
    (folder(root) / committed.DECLARED).unlink()
    written(root, change, {"of": ["b"], "less": ["a"]})
    ran: list[str] = []
    monkeypatch.setattr(verbs, "Committed", lambda _: Committed(tmp_path / "results"))
    monkeypatch.setattr(running, "execute", lambda place, of: ran.append(of.name))
    place = Workspace.from_environment(root, {})
    verbs.claims(place, by_hand.SIZE, missing=True, name="c0")
    assert ran == wanted
    assert set(committed.declared(folder(root))) == ({"c0", "c1"} if wanted else set())
    verbs.claims(place, by_hand.SIZE)
    assert ran == [*wanted, "own"]


def test_an_experiment_on_a_cause_stands_with_its_claim_and_weakens_no_claim(
    tmp_path: Path,
) -> None:
    """b is 10 points below a: the claim on b does not hold, and the cause is supported.

    Holm counts one claim.
    """
    claim = {"of": ["b"], "less": ["a"]}
    root = written(tmp_path, claim, why={"cause": "It is b."})
    both(root)
    (found,) = verdicts(root)
    assert (found.word, found.n_tests) == ("not held", 1)
    text = shown(root)
    assert "Why? It is b. Tested: a less b; supported if above 0 points. Measured: +10.00 (" in text
    assert "**supported** (NOT written down before its first run, w0)" in text
    assert {line["claim"] for line in table(folder(root) / "claims-values.csv")} == {"c0", "w0"}
    written(root, claim, why={"cause": "It is b.", "explains": "c1"})
    with pytest.raises(UserError, match="w0: claim 'c1' is unknown"):
        shown(root)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["held", "held"]),
        ({"holds": {"above": -5}}, ["not run", "held"]),
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
    change = {"beside": {"bytes": "bytes_up"}} | change
    root = written(tmp_path, {"beside": {"bytes": "bytes_up"}}, {"of": ["b"], "less": ["c"]})
    for recipe, values in (("a", A), ("b", B), ("c", [0.5, 0.5, 0.51, 0.5, 0.52])):
        ends(root, "near", recipe, values)
    note(root)
    before, results = shown(root), tmp_path / "results"
    shutil.copytree(folder(root), results)
    written(root, change, {"of": ["b"], "less": ["c"]})
    for seed in range(len(A)):
        shutil.rmtree(studies(root) / "own" / "runs" / f"near-a-{seed}")
    again = Page(of_papers(by_hand.SIZE, root), root, Committed(results))
    assert [one.word for one in again.verdicts] == words
    assert [one.is_committed for one in again.verdicts] == [words[0] == "held", False]
    if words[0] == "held":
        made = again.files()
        text, remark = again.details(), "; its numbers are the committed ones of"
        assert remark in text
        assert re.sub(f"{remark}.*?here", "", text) == before or "tests" not in change
        rounds = f"claims-rounds-{by_hand.PAPER}.csv"
        for name in ("claims.csv", "claims-values.csv", "claims-runs.csv", rounds):
            assert made[name] == (results / name).read_bytes(), name


def test_a_seed_without_a_finite_number_leaves_a_claim_undecided(tmp_path: Path) -> None:
    """Without the seed, the others' mean could be too high."""
    root = written(tmp_path, {"statistic": "client_worst", "contrast": "level", "less": []})
    for seed, value in enumerate([0.5, 0.6, 0.5, 0.6, math.nan]):
        one(root, "near", "a", seed, [0.1, 0.2], metrics={"client_worst": value})
    assert [found.word for found in verdicts(root)] == ["undecided"]
    assert "Verdict: **undecided**. 4 of 5 seeds have the number." in shown(root)


def test_numbers_beside_a_claim_are_shown_and_decide_nothing(tmp_path: Path) -> None:
    """a ends at 60 %, and its worst client has 0.5, 0.7, 0.5, 0.7, 0.6: mean 0.6, half width 2.776
    * 0.1 / sqrt(5)."""
    change = {"contrast": "level", "less": [], "beside": {"its worst client": "client_worst"}}
    root = written(tmp_path, change)
    for seed, value in enumerate([0.5, 0.7, 0.5, 0.7, 0.6]):
        one(root, "near", "a", seed, [0.1, 0.6 + seed / 1000], metrics={"client_worst": value})
    (found,) = verdicts(root)
    assert found.word == "held" and [part.part for part in found.tested] == ["near: a"]
    text = "- Beside it, not tested: near: a: its worst client, 0.60 (0.48 to 0.72).\n"
    assert text in shown(root)


def test_a_cause_in_other_words_keeps_its_numbers_and_says_so(tmp_path: Path) -> None:
    """The test decides the numbers, the cause only what they are for."""
    one, other = (
        of_papers(by_hand.SIZE, written(tmp_path, {}, why={"cause": cause}))[by_hand.PAPER]
        for cause in ("It is b.", "It is a.")
    )
    assert one.whys["w0"].test == other.whys["w0"].test
    assert one.whys["w0"].sha256 != other.whys["w0"].sha256


def test_a_claim_that_is_changed_after_its_first_run_says_so(tmp_path: Path) -> None:
    root = written(tmp_path, {})
    assert "Test: no run yet." in shown(root)
    note(root)
    assert "written down before its first run (abc1234)" in shown(root)
    written(root, {"holds": {"above": -5}})
    changed = of_papers(by_hand.SIZE, root)[by_hand.PAPER].claims
    committed.declare(folder(root), changed.values(), {by_hand.PAPER: "def5678"})
    assert "CHANGED after its first run (first written at abc1234)" in shown(root)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_claim_that_is_written_when_runs_are_known_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """Bound and margin could be read off them, whether they are here or committed."""
    if is_committed:
        monkeypatch.setattr(by_hand, "SIZE", "small")  # another has no committed numbers
    root = both(written(tmp_path, {}))
    if is_committed:
        note(root)
        page(root)
        shutil.copytree(folder(root), root / verbs.DOCS)
        (folder(root) / committed.DECLARED).unlink()
        shutil.rmtree(studies(root) / "own" / "runs")
    late = {"less": ["b", "c"], "holds": {"above": 9.5}, "margin": 12, "unit": "points"}
    written(root, {}, late)
    monkeypatch.setattr(running, "execute", lambda *_: ends(root, "near", "c", B))
    verbs.claims(Workspace.from_environment(root, {}), by_hand.SIZE)
    facts = committed.declared(folder(root))
    assert facts["c1"]["seen"] == ["a", "b"]
    if not is_committed:
        assert "Test: written down when runs of a and b were known (" in shown(root)
        assert [one.text for one in verdicts(root)] == ["held", "no gain above 12 points"]
        assert verdicts(root)[1].is_post_hoc


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
        ({"holds": {"over": 2}}, "claims.c0.holds.over is unknown"),
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


def test_an_unknown_statistic_is_one_line(tmp_path: Path) -> None:
    root = written(tmp_path, {"statistic": "rounds_too:0.9"})
    ends(root, "near", "a", A)
    with pytest.raises(
        UserError, match=r"statistic 'rounds_too:0\.9' is unknown; allowed: .*rounds_to:0\.9"
    ):
        verdicts(root)


def test_a_study_runs_only_what_a_claim_reads(tmp_path: Path) -> None:
    found = of_paper(by_hand.PAPER, by_hand.SIZE, written(tmp_path, {}, {"less": ["c"]}))
    study = found.studies["own"]
    assert study.content["scenario_names"] == ["near"] and study.content["recipe_names"] == [
        "a",
        "b",
        "c",
    ]
    assert study.folder == Path("research/built") / by_hand.PAPER / by_hand.SIZE / "claims" / "own"


@pytest.fixture(scope="module")
def ours() -> dict[str, dict[str, Claims]]:
    """Size -> paper -> the repository's claims."""
    return {size: of_papers(size, ROOT) for size in SIZES}


def test_the_page_counts_tests_and_statements(ours: dict[str, dict[str, Claims]]) -> None:
    """README, the claims' page and the protocols say the same numbers."""
    own = [one.claim for claims in ours["small"].values() for one in claims.claims.values()]
    counts = f"{len(own)} tests of {len({claim.states for claim in own})} statements"
    for name in ("README.md", "docs/claims.md", "docs/results/claims.md"):
        assert counts in " ".join((ROOT / name).read_text().split()), name


def test_a_statement_is_escaped(tmp_path: Path) -> None:
    """Markdown would take its stars and underscores for emphasis."""
    assert r"The paper states: a \*b\* c\_d. (Table I)" in shown(
        written(tmp_path, {"states": "a *b* c_d."})
    )
    assert "**Size smoke proves nothing.**" in page(tmp_path)


def test_write_copies_the_page_and_its_numbers(tmp_path: Path) -> None:
    """Without running anything. `declared.json` stays with the runs."""
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    cli.claims(size="small", run=False, write=True, root=written(tmp_path, {}))
    assert sorted(path.name for path in results.iterdir()) == [
        "claims-details.html",
        "claims-runs.csv",
        "claims-values.csv",
        "claims.csv",
        "claims.json",
        "claims.md",
    ]
    assert "it does not refute a paper at its own scale" in (results / "claims.md").read_text()


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
    found = running.tuned(Workspace.from_environment(tmp_path, {}), study, settings)
    assert found.content["recipes"]["fedavg"] == {"train": {"lr": 0.1}}
    assert found.content["recipes"]["fednnnn"] == {
        "fednnnn": {"beta": 0.5, "gamma": 0.8},
        "train": {"lr": 0.1},
    }
    assert "tune" not in found.content and found.items == study.items
    page_ = Page({"fednnnn": claims}, tmp_path, Committed())
    said = "2 trials for each method: fedavg lr 0.1; fednnnn lr 0.1, fednnnn.beta 0.5. "
    assert said in page_.what_ran["fednnnn claims-mnist-tuned"]
    files = page_.files()
    table = files["claims-trials.csv"].decode().splitlines()
    assert table[1:3] == [
        "fednnnn,claims-mnist-tuned,fedavg,lr 0.1,100,0.3,yes",
        "fednnnn,claims-mnist-tuned,fedavg,lr 0.5,100,,",
    ]
    assert "| fedavg | lr 0.1 | 2 | lr: the smallest |" in page_.details()
    scores["fedavg"].pop()
    with pytest.raises(UserError, match=r"claims.yaml: tune: no value of fedavg is left"):
        running.tuned(Workspace.from_environment(tmp_path, {}), study, settings)


@pytest.mark.parametrize("paper", PAPERS)
def test_tuned_methods_have_equal_budgets(ours: dict[str, dict[str, Claims]], paper: str) -> None:
    """The seeds of the trials are none of the study's, and every method has points enough."""
    for study in ours["small"][paper].studies.values():
        if "tune" in study.content:
            tune = study.content["tune"]
            assert tune["trials"] >= 6 and not set(tune["seeds"]) & set(study.content["seeds"])
            found = tuning(checked(study.content, "claims.yaml")).points
            assert {len(own) for own in found.values()} == {tune["trials"]}


def test_smoke_is_not_written_to_the_results() -> None:
    with pytest.raises(UserError, match="--write with --size smoke is refused"):
        cli.claims(size="smoke", write=True, root=ROOT)
    assert cli.SIZES == SIZES
