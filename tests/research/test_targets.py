"""Tables, curves and settings of a paper from results made by hand: every number is worked out
here."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.reporting.text import markdown
from research import report as stage
from research.contrasts import statistic
from research.report import build
from research.runs import Measured, series
from research.targets import Built, address, of_targets, paper_of
from tests.research import by_hand
from tests.research.by_hand import diverged, finals, paper, rows, run

TABLE = """\
t:
  kind: table
  title: A table
  protocol: [how it is done]
  scale: 100
  claim: A
  columns: {Near: {scenario: near}, Far: {scenario: far}}
  rows:
    A: {study: one, recipe: a}
    B: {study: one, recipe: b}
    C: {study: one, recipe: c}
    D: {study: one, recipe: d}
"""
REPORTED = """\
t:
  title: A table
  table: Table I
  unit: "%"
  columns: [Near, Far]
  rows:
    A: [90.5, [80, 0.5]]
    B: [80, null]
    C: [70, 60]
    D: [60.0, 50]
"""


def made(root: Path, name: str = "t") -> Built:
    """The target, from what lies under `root`."""
    return build(of_targets(by_hand.PAPER, root)[name], Measured(by_hand.PAPER, by_hand.SIZE, root))


def test_a_cell_has_mean_and_sample_deviation_and_what_the_paper_reports(tmp_path: Path) -> None:
    """70, 72, 74: mean 72, deviation sqrt((4 + 0 + 4) / 2) = 2."""
    finals(paper(tmp_path, TABLE, REPORTED), "near", {"a": [0.70, 0.72, 0.74], "b": [0.5]})
    finals(tmp_path, "far", {"a": [0.25, 0.75], "b": [0.123456]})
    built = made(tmp_path)
    assert built.table[:3] == [
        ["", "Near", "Far"],
        ["A", "72.00 ± 2.00 (90.5)", "50.00 ± 35.36 (80 ± 0.5)"],
        ["B", "50.00 (80)", "12.35"],
    ]
    first, second = rows(built)[:2]
    assert float(first["measured"]) == pytest.approx(72) and float(
        first["measured_std"]
    ) == pytest.approx(2)
    assert (first["seeds"], first["reported"], first["reported_spread"]) == ("3", "90.5", "")
    assert float(first["difference"]) == pytest.approx(72 - 90.5)
    assert (second["seeds"], second["reported"], second["reported_spread"]) == ("2", "80.0", "0.5")
    assert rows(built)[3]["difference"] == "", "the paper reports nothing there"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    targets = TABLE.replace(
        "Far: {scenario: far}", "Far: {scenario: far}, Later: {scenario: later}"
    )
    targets = targets.replace("D: {study: one, recipe: d}", "D: {}").replace(
        "scale", "decimals: 1\n  scale"
    )
    finals(paper(tmp_path, targets, REPORTED), "near", {"a": [0.5]})
    built = made(tmp_path)
    assert built.table[1] == ["A", "50.0 (90.5)", "not run yet (80 ± 0.5)", "not run at this size"]
    assert built.table[4] == ["D", "- (60.0)", "- (50)", "-"]
    assert built.missing == ("A, Far", "B, Near", "B, Far", "C, Near", "C, Far")
    assert built.sentences == ()


def test_divergence_is_said(tmp_path: Path) -> None:
    finals(paper(tmp_path, TABLE, REPORTED), "near", {"a": [0.5], "b": [0.5]})
    diverged(tmp_path, "near-b-1", "far-c-0")
    built = made(tmp_path)
    cells = ["50.00; 1 of 2 seeds diverges (80)", "not run yet"]
    assert built.table[2:4] == [["B", *cells], ["C", "not run yet (70)", "diverges (60)"]]
    assert "C, Far" not in built.missing and "C, Near" in built.missing
    assert "one (far c): diverges (seed 0)." in built.remarks


def test_one_diverged_seed_hides_neither_the_others_nor_itself(tmp_path: Path) -> None:
    """B: 90 and 92 on the seeds that ended, deviation sqrt(2).

    Without B the best other of A (70) is C (60).
    """
    finals(paper(tmp_path, TABLE, REPORTED), "near", {"a": [0.7], "b": [0.90, 0.92], "c": [0.6]})
    diverged(tmp_path, "near-b-2")
    built = made(tmp_path)
    assert built.table[2][1] == "91.00 ± 1.41; 1 of 3 seeds diverges (80)"
    assert [row["diverged"] for row in rows(built)[::2]] == ["0", "1", "0", "0"]
    b = rows(built)[2]
    assert (float(b["measured"]), b["seeds"], b["diverged"]) == (pytest.approx(91), "2", "1")
    assert built.sentences[0].endswith(
        "ranked last, as a seed diverges or all do: B; A less the best other (C) is +10.00 on "
        "one seed: no evidence "
        "either way."
    )
    assert built.remarks == (
        (
            "one (near b): 1 of 3 seeds diverges (seed 2). Its mean is that of the other seeds "
            "only, so it is ranked last."
        ),
    )


@pytest.mark.parametrize(
    ("ends", "keys", "better", "tau"),
    [
        ({"a": [0.9], "b": [0.8], "c": [0.7], "d": [0.6]}, [], "higher", 1.0),
        ({"a": [0.6], "b": [0.7], "c": [0.8], "d": [0.9]}, [], "higher", -1.0),
        # One of six pairs is the other way round: (5 - 1) / 6; then two of them.
        ({"a": [0.9], "b": [0.7], "c": [0.8], "d": [0.6]}, [], "higher", 4 / 6),
        ({"a": [0.7], "b": [0.9], "c": [0.8], "d": [0.6]}, [], "higher", 2 / 6),
        # The paper's order is A, B, C, D; ours A, C, D, B: of six pairs BC and BD are the other way
        # round.
        ({"a": [0.9], "c": [0.7], "d": [0.6]}, ["near-b-0"], "higher", (4 - 2) / 6),
        # The same, though the seed that ended is the best of all.
        ({"a": [0.9], "b": [0.99], "c": [0.7], "d": [0.6]}, ["near-b-1"], "higher", (4 - 2) / 6),
        # A, C, then B and D tied: AB, AC, AD, CD agree, BC does not, BD is a tie of ours: (4 - 1) /
        # sqrt(5 * 6).
        ({"a": [0.9], "c": [0.7]}, ["near-b-0", "near-d-0"], "higher", 3 / math.sqrt(30)),
        # Low is good: the last one is the highest. Values: A < C < D < B, the paper's: A > B > C >
        # D; BC, BD agree.
        ({"a": [0.1], "c": [0.3], "d": [0.4]}, ["near-b-0"], "lower", (2 - 4) / 6),
    ],
)
def test_kendalls_tau_in_which_what_diverges_is_last(
    tmp_path: Path, ends: dict[str, list[float]], keys: list[str], better: str, tau: float
) -> None:
    finals(paper(tmp_path, f"{TABLE}  better: {better}\n", REPORTED), "near", ends)
    diverged(tmp_path, *keys)
    built = made(tmp_path)
    then = "ranked last" if keys else "A less"
    words = f"Near: the order of 4 methods agrees with the paper's to Kendall τ = {tau:.2f}; {then}"
    assert built.sentences[0].startswith(words)


def test_there_is_no_gain_where_a_seed_of_either_diverges(tmp_path: Path) -> None:
    """C in Far against Near, whose seed 1 diverged: the gain on seed 0 is not that of C."""
    finals(paper(tmp_path, GAINS, REPORTED), "near", {"a": [0.5], "b": [0.6], "c": [0.4]})
    finals(tmp_path, "far", {"c": [0.7, 0.7]})
    diverged(tmp_path, "near-c-1")
    built = made(tmp_path)
    assert built.table[3][1:] == ["40.00; 1 of 2 seeds diverges (70)", "70.00 ± 0.00 (60)"]
    assert rows(built)[5]["gain"] == "" and len(built.sentences) == 2


LEAK = {"leak": "training has seen all 5 test samples"}
DRAWN = (
    "word vectors: drawn at random (normal, deviation 1), as glove.6B.300d.txt is not in data/raw"
)


def test_a_leak_is_marked_and_not_ranked(tmp_path: Path) -> None:
    """Without B the order is the paper's, and the best other is C, 20 below A."""
    finals(paper(tmp_path, TABLE, REPORTED), "near", {"a": [0.9], "c": [0.7], "d": [0.6]})
    run(
        tmp_path,
        "near",
        "b",
        0,
        [0.5, 1.0],
        tags=LEAK,
        notes=["LEAK: training has seen all 5 test samples"],
    )
    built = made(tmp_path)
    assert [line[1] for line in built.table[1:]] == [
        "90.00 (90.5)",
        "100.00 LEAK (80)",
        "70.00 (70)",
        "60.00 (60.0)",
    ]
    assert [row["leak"] for row in rows(built)[:6:2]] == ["", LEAK["leak"], ""]
    assert (
        "the order of 3 methods" in built.sentences[0]
        and "A less the best other (C) is +20.00 on" in built.sentences[0]
    )
    assert built.remarks == (
        (
            f"LEAK: one (near b): {LEAK['leak']}. Such a number says nothing about unseen samples "
            "and is not ranked."
        ),
    )


def test_notes_on_the_data_stand_by_the_cells_that_they_are_about(tmp_path: Path) -> None:
    """Near lacks GloVe's vectors. Far has them, but for one seed of A."""
    paper(tmp_path, TABLE, REPORTED)
    run(tmp_path, "near", "a", 0, [0.5], notes=["500 users", DRAWN])
    run(tmp_path, "far", "a", 0, [0.5], notes=["500 users"])
    run(tmp_path, "far", "a", 1, [0.5], notes=["500 users", DRAWN])
    run(tmp_path, "far", "b", 0, [0.5])
    built = made(tmp_path)
    assert built.table[1][1:] == ["50.00 [1] (90.5)", "50.00 ± 0.00 [1] [2] (80 ± 0.5)"]
    assert built.table[2][2] == "50.00"
    assert [row["notes"] for row in rows(built)[:2]] == [
        f"500 users; {DRAWN}",
        f"500 users; 500 users; {DRAWN}",
    ]
    assert built.remarks == (
        f"[1] one (near a, far a): 500 users; {DRAWN}.",
        "[2] one (far a): 500 users.",
    )


def test_every_form_of_a_report_has_the_marks(tmp_path: Path) -> None:
    """HTML and Markdown, of a table and of a figure, which marks the line in its numbers too."""
    finals(paper(tmp_path, TABLE + CURVES, REPORTED), "near", {"a": [0.6], "c": [0.7]})
    run(tmp_path, "near", "b", 0, [0.5, 1.0], tags=LEAK, notes=[DRAWN])
    report = stage.write("ccn", "smoke", tmp_path, of_targets("ccn", tmp_path))
    html, table, curve = ((report / name).read_text() for name in ("report.html", "t.md", "f.md"))
    assert "100.00 LEAK [1] (80)" in html and "100.00 LEAK [1] (80)" in table
    for content in (html, table, curve):
        assert (
            f"LEAK: one (near b): {LEAK['leak']}." in content
            and f"[1] one (near b): {DRAWN}." in content
        )
    assert "Left: at the end C is highest (70.00), A lowest (60.00)." in curve
    marks = {(row["line"], row["mark"]) for row in results.table(report / "f.csv")}
    assert marks == {("A", ""), ("B", "LEAK [1]"), ("C", "")}


def test_no_sentence_on_a_figure_compares_a_line_of_which_a_seed_diverged(tmp_path: Path) -> None:
    """B is highest on the seed that ended.

    C diverged on its only seed, so nothing of it will be there.
    """
    finals(paper(tmp_path, CURVES), "near", {"a": [0.6], "b": [0.9]})
    diverged(tmp_path, "near-b-1", "near-c-0")
    built = made(tmp_path, "f")
    assert built.sentences == () and built.missing == ("Right, A", "Right, B", "Right, C")
    marks = {(row["line"], row["mark"]) for row in rows(built)}
    assert marks == {("A", ""), ("B", "1 of 2 seeds diverges")}


def ran(root: Path) -> str:
    """What was run of the study, as the page of its table has it."""
    page = stage.write("ccn", "smoke", root, of_targets("ccn", root)) / "t.md"
    return page.read_text().split("## What was run\n\n- one: a study: ")[1].split("\n")[0]


def test_what_was_run_is_what_ran(tmp_path: Path) -> None:
    """The plan has digits without D_public or noise, MLP, 2 rounds of 1 epoch, lr 0.1, seeds 0 to
    2, 24 runs."""
    paper(tmp_path, TABLE, REPORTED)
    other = {
        "data.name": "cifar10",
        "data.size": [16, 16],
        "data.normalise": "none",
        "data.validation": 0.6,
        "data.public": 1500,
        "train.model": "cnn",
        "train.model_options": {"channels": 8, "batch_norm": True},
        "train.lr": 0.05,
        "train.augment": True,
        "train.momentum": 0.9,
        "train.precision": "float32",
        "scenario.clients": 10,
        "scenario.participation": 0.2,
        "scenario.noise": {"sigma": 0.5, "form": "ramp"},
    }
    for recipe in "ab":
        run(tmp_path, "near", recipe, 7, [0.1, 0.2, 0.3], params=other | {f"{recipe}.p": 0.5})
    assert ran(tmp_path) == (
        "data: name cifar10, validation 0.6, public 1500, size [16, 16], normalise none; training: "
        "model cnn, model_options {'channels': 8, 'batch_norm': True}, rounds 3, epochs 1, "
        "batch_size 50, lr 0.05, momentum 0.9, augment True; scenario near (partition iid, clients "
        "10, participation 0.2, noise {'sigma': 0.5, 'form': 'ramp'}); method a (p 0.5); method b "
        "(p 0.5); seeds 7; "
        "2 runs (planned: 24); missing: near-a-0, near-b-0, near-c-0, near-d-0, far-a-0, far-b-0, "
        "far-c-0, far-d-0 and 16 more; not in the plan: near-a-7, near-b-7."
    )


def test_runs_at_unequal_settings_are_told_apart(tmp_path: Path) -> None:
    """Seed 1 of A has another step size; the two scenarios differ, as they should; B has another p
    on seed 1."""
    paper(tmp_path, TABLE, REPORTED)
    run(tmp_path, "near", "a", 0, [0.1])
    run(tmp_path, "near", "a", 1, [0.1], params={"train.lr": 0.2}, notes=[DRAWN], tags=LEAK)
    run(tmp_path, "far", "b", 0, [0.1], params={"scenario.clients": 3, "b.p": 0.1})
    run(tmp_path, "far", "b", 1, [0.1], params={"scenario.clients": 4, "b.p": 0.2})
    diverged(tmp_path, "far-c-0")
    text = ran(tmp_path)
    for part in (
        "lr 0.1 [far-b-0, far-b-1, near-a-0] / 0.2 [near-a-1]; scenario far (partition iid, ",
        "clients 3 [far-b-0] / 4 [far-b-1], participation 1.0); scenario near (partition iid, ",
        "; method b (p 0.1 [far-b-0] / 0.2 [far-b-1]); ",
        "; 4 runs (planned: 24), 1 diverged (far-c-0); missing: near-b-0, near-c-0, near-d-0, far-",
        f"; notes on the data: {DRAWN} [near-a-1]; LEAK: {LEAK['leak']} [near-a-1].",
    ):
        assert part in text


def test_kendalls_tau_needs_three_methods_that_both_have_and_an_order(tmp_path: Path) -> None:
    """Far: the paper has nothing for B, so of A, B, C only two count.

    Near: all are equal, which has no order.
    """
    finals(paper(tmp_path, TABLE, REPORTED), "far", {"a": [0.9], "b": [0.8], "c": [0.7]})
    finals(tmp_path, "near", {name: [0.5] for name in "abcd"})
    assert not any("Kendall" in sentence for sentence in made(tmp_path).sentences)


@pytest.mark.parametrize(
    ("a", "b", "better", "words"),
    [
        # Pairs of seeds 0 and 1: the mean -+ 12.706 / sqrt(2) deviations. Here -0.5 and 0.5: 0 -+
        # 12.706 / 2.
        (
            [0.72, 0.74, 0.76],
            [0.725, 0.735],
            "higher",
            "+0.00, {over} -6.35 to +6.35 {n}: undecided",
        ),
        # 8 and 7: 7.5 -+ 6.353; -12 and -13 the same below; 60 - 20 on the only seed of C.
        ([0.80, 0.81, 0.82], [0.72, 0.74], "higher", "+7.50, {over} +1.15 to +13.85 {n}."),
        ([0.60, 0.61, 0.62], [0.72, 0.74], "higher", "-12.50, {over} -18.85 to -6.15 {n}."),
        ([0.60, 0.61, 0.62], [0.72, 0.74], "lower", "+40.00 on one seed: no evidence"),
        ([0.73], [0.73], "higher", "+0.00 on one seed: no evidence either way"),
        ([0.80, 0.81], [0.72, 0.73], "higher", "+8.00 on each of 2 seeds."),
    ],
)
def test_a_claim_says_no_more_than_the_paired_interval(
    tmp_path: Path, a: list[float], b: list[float], better: str, words: str
) -> None:
    finals(
        paper(tmp_path, f"{TABLE}  better: {better}\n", REPORTED),
        "near",
        {"a": a, "b": b, "c": [0.20]},
    )
    told = words.format(over="95 % interval", n="over 2 seeds")
    rival = "B" if better == "higher" else "C"
    assert f"; A less the best other ({rival}) is {told}" in made(tmp_path).sentences[0]


def test_a_claim_without_a_common_seed(tmp_path: Path) -> None:
    root = paper(tmp_path, TABLE, "{}")
    run(root, "near", "a", 0, [0.9])
    run(root, "near", "b", 1, [0.5])
    assert made(tmp_path).sentences == ("Near: A and the best other (B) have no seed in common.",)


def test_what_is_composed_with_the_claimed_method_is_no_rival_of_it(tmp_path: Path) -> None:
    text = TABLE.replace("    C: {study: one, recipe: c}", "    B + A: {study: one, recipe: c}")
    finals(paper(tmp_path, text, "{}"), "near", {"a": [0.80], "b": [0.73], "c": [0.90]})
    assert (
        made(tmp_path).sentences[0]
        == "Near: A less the best other (B) is +7.00 on one seed: no evidence either way."
    )


GAINS = TABLE.replace("claim: A", "claim: none\n  gains: {B: A, Far: Near}").replace(
    "    D: {study: one, recipe: d}\n", ""
)


def test_gains_are_differences_seed_by_seed(tmp_path: Path) -> None:
    """B - A on seeds 0 and 1, which both have: 1 and 3, mean 2, deviation sqrt(2).

    B alone has 0.9 on seed 2.
    """
    finals(paper(tmp_path, GAINS, REPORTED), "near", {"a": [0.5, 0.7], "b": [0.51, 0.73, 0.9]})
    built = made(tmp_path)
    assert built.table[2][1] == "71.33 ± 19.55 (80)\ngain +2.00 ± 1.41 (-10.50)"
    assert "| 71.33 ± 19.55 (80)<br>gain +2.00 ± 1.41 (-10.50) |" in markdown(built.table)
    a, b = ([rows(built)[i][f"gain{of}"] for of in ("", "_std", "_reported")] for i in (0, 2))
    assert a == ["", "", ""]
    assert [float(value) for value in b] == pytest.approx([2, math.sqrt(2), 80 - 90.5])
    assert built.sentences[0] == (
        "B against A: the mean gain of 1 methods is +2.00 (in the paper -10.50); paired t tests "
        "over seeds, with "
        "Holm's adjustment for 1, find it above 0 for 0 and below 0 for 0 of them."
    )


def test_equal_gains_have_the_floor_of_one_test_sample(tmp_path: Path) -> None:
    """B - A is 2 points on both seeds, but for rounding. With 100 test samples one of them makes a
    deviation of 1 / sqrt(2) points: t = 2 / (1 / 2) = 4 and p = 1 - 2 atan(4) / pi = 0.16. Of 20
    points it is 0.016.

    Where the size of the test set is not known, there is no test.
    """

    def words(gain: float, samples: int) -> str:
        accuracies = [0.55, 0.57]
        ends = {"a": accuracies, "b": [accuracy + gain for accuracy in accuracies]}
        finals(paper(tmp_path, GAINS, REPORTED), "near", ends)
        place = by_hand.folder(tmp_path) / "evaluation" / "near-b-0"
        place.mkdir(parents=True, exist_ok=True)
        text = f"class,samples,accuracy\n0,{samples},0.5\n" if samples else ""
        (place / "per_class.csv" if samples else place / "none").write_text(text)
        return made(tmp_path).sentences[0]

    assert words(0.2, 0).endswith("find it above 0 for 0 and below 0 for 0 of them.")
    assert words(0.02, 100).endswith("find it above 0 for 0 and below 0 for 0 of them.")
    assert words(0.2, 100).endswith("find it above 0 for 1 and below 0 for 0 of them.")


def test_a_column_s_gain_is_against_the_other_column_and_a_printed_one_comes_first(
    tmp_path: Path,
) -> None:
    """A and C in Far against Near; B in Far against A in Near, as both its row and its column have
    a base."""
    printed = REPORTED + "  gains: {A: [null, -9.5], C: [null, -7]}\n"
    finals(paper(tmp_path, GAINS, printed), "near", {"a": [0.5], "c": [0.5]})
    finals(tmp_path, "far", {"a": [0.6], "b": [0.75], "c": [0.45]})
    built = made(tmp_path)
    assert built.table[1][2] == "60.00 (80 ± 0.5)\ngain +10.00 (-9.50)"
    assert built.table[2] == ["B", "not run yet (80)", "75.00\ngain +25.00"], (
        "no number of the paper there"
    )
    assert built.table[3][2] == "45.00 (60)\ngain -5.00 (-7.00)", "the paper's numbers differ by 10"
    assert (
        "Far against Near: the mean gain of 3 methods is +10.00 (in the paper -8.25), on one seed"
        in built.sentences[1]
    )


def test_an_address_from_its_parts() -> None:
    row = {"recipe": "x", "at": {"B": {"study": "own"}}}
    assert address("t", "A", row, {"study": "s"})["study"] == "s"
    assert address("t", "B", row, {"study": "s"}) == {"recipe": "x", "study": "own"}
    found = address(
        "t",
        "here",
        {"method": "a", "study": "one"},
        {"recipe": "{method}+c", "study": "two", "scale": 2},
    )
    assert found == {"method": "a", "study": "two", "recipe": "a+c", "scale": 2}
    with pytest.raises(UserError, match=r"^t: .* names a key in braces that it lacks"):
        address("t", "here", {"recipe": "{methd}+c"}, {"method": "a"})


def test_statistics_of_a_run(tmp_path: Path) -> None:
    metrics = {"loss": 0.25, "traffic": math.inf, "name": "x"}
    run(paper(tmp_path), "near", "a", 0, [0.1, 0.8, None, 0.6, 0.4], metrics=metrics)
    measured = Measured("ccn", "smoke", tmp_path)
    (one,) = measured.group({"study": "one", "scenario": "near", "recipe": "a"}).runs
    wanted = {"final": 0.4, "best": 0.8, "last2": 0.5, "last3": 0.6, "loss": 0.25}
    times = {"seconds": 2.5, "seconds_per_round": 0.5, "bytes_up": 10}
    for name, value in (wanted | times | {"traffic": None, "unknown": None}).items():
        assert statistic(name, one, measured, "one") == pytest.approx(value), name
    with pytest.raises(UserError, match="statistic 'name' is no number"):
        statistic("name", one, measured, "one")


def test_a_series_has_the_rounds_that_all_seeds_measured(tmp_path: Path) -> None:
    run(paper(tmp_path), "near", "a", 0, [0.1, None, 0.3, 0.4])
    run(tmp_path, "near", "a", 1, [0.5, 0.6, 0.7])
    at = {"study": "one", "scenario": "near", "recipe": "a"}
    rounds, values = series(Measured("ccn", "smoke", tmp_path).group(at).runs, "test_accuracy")
    assert rounds == [1, 3] and values.tolist() == [[0.1, 0.3], [0.5, 0.7]]
    assert series([], "test_accuracy")[0] == []


CURVES = """\
f:
  kind: curves
  title: A figure
  protocol: []
  scale: 100
  panels: [{title: Left, study: one, scenario: near}, {title: Right, study: one, scenario: far}]
  lines: {A: a, B: {recipe: b}, C: c}
"""


def test_curves(tmp_path: Path) -> None:
    for seed, end in enumerate((0.5, 0.7)):
        run(paper(tmp_path, CURVES), "near", "a", seed, [0.2, end])
    run(tmp_path, "near", "b", 0, [0.1, 0.9])
    built = made(tmp_path, "f")
    assert built.files["png"].startswith(b"\x89PNG\r\n") and not built.table
    assert built.missing == ("Left, C", "Right, A", "Right, B", "Right, C")
    assert built.sentences == ("Left: at the end B is highest (90.00), A lowest (60.00).",)
    found = [
        (row["panel"], row["line"], row["round"], row["seed_index"], float(row["value"]))
        for row in rows(built)
    ]
    assert ("Left", "A", "2", "1", 70.0) in found and len(found) == 6


SETTINGS = """\
s:
  kind: settings
  title: Settings
  protocol: []
  columns:
    {Rate: {path: train.lr}, Rounds: {path: train.rounds}, Near: {path: scenarios.near.clients}}
  rows: {Ours: {study: one}, Given: {value: null}}
"""


def test_settings(tmp_path: Path) -> None:
    """Of the reported 0.1, 200 and -, the first is ours; a dash of the paper contradicts
    nothing."""
    reported = 's: {columns: [Rate, Rounds, Near], rows: {Ours: [0.1, 200, "-"]}}'
    built = made(paper(tmp_path, SETTINGS, reported), "s")
    assert built.table[1:] == [["Ours", "0.1", "2 (200)", "2 (-)"], ["Given", "-", "-", "-"]]
    assert built.sentences == ("5 of 6 settings are the paper's; not: Ours, Rounds.",)
    assert rows(built)[1] == {"row": "Ours", "column": "Rounds", "ours": "2", "reported": "200"}


def test_the_studies_of_a_target_are_found_at_any_depth(tmp_path: Path) -> None:
    spec = "x: {kind: k, title: T, protocol: [], rows: {A: {study: one}, B: [{study: one}]}}"
    assert of_targets("ccn", paper(tmp_path, spec))["x"].studies == ("one",)
    assert paper_of("x", tmp_path) == "ccn"
    with pytest.raises(UserError, match=re.escape("table or figure 'y' is unknown")):
        paper_of("y", tmp_path)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("x: {kind: table, protocol: []}", "x: title is missing"),
        ("x: null", "x: None is refused"),
        ("x: {kind: k, title: T, protocol: [{a: b}]}", "x: protocol[0] = {'a': 'b'} is refused"),
        (
            "x: {kind: k, title: T, protocol: [], study: on}",
            "x: study 'on' is unknown (did you mean 'one'?)",
        ),
        (f"{TABLE}  bettr: lower\n", "t: bettr is unknown (did you mean 'better'"),
        (
            "t: {kind: tabel, title: T, protocol: []}",
            "t: kind 'tabel' is unknown; allowed: table, curves, settings, functions of",
        ),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(tmp_path: Path, spec: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        made(paper(tmp_path, spec, REPORTED))


def test_the_paper_stage_writes_a_report(tmp_path: Path) -> None:
    """B has no run in Far."""
    root = paper(tmp_path, TABLE + CURVES, REPORTED)
    finals(root, "near", {"a": [0.9], "b": [0.8], "c": [0.7], "d": [0.6]})
    finals(root, "far", {"a": [0.6], "c": [0.9], "d": [0.5]})
    place = stage.write("ccn", "smoke", tmp_path, of_targets("ccn", tmp_path))
    assert place == tmp_path / "research" / "built" / "ccn" / "smoke" / "report"
    names = {path.name for path in place.iterdir()}
    assert names == {"report.html", "t.md", "t.csv", "f.md", "f.csv", "f.png"}
    html = (place / "report.html").read_text()
    assert "90.00 (90.5)" in html and "how it is done" in html and "data:image/png;base64," in html
    assert "Not there yet: B, Far." in (place / "t.md").read_text()
