"""Tables, curves and settings of a paper from results made by hand: every number is worked out
here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import results
from research import report
from research.contrasts import statistic
from research.report import build
from research.runs import Measured, series
from research.targets import Built, address, of_targets, paper_of
from tests.research import by_hand
from tests.research.by_hand import diverged, finals, is_picture, paper, rows, run

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
GAINS = TABLE.replace("claim: A", "claim: none\n  gains: {B: A, Far: Near}").replace(
    "    D: {study: one, recipe: d}\n", ""
)
Ends = dict[str, list[float]]  # recipe -> final accuracy by seed


def made(root: Path, name: str = "t") -> Built:
    """The target, from what lies under `root`."""
    return build(of_targets(by_hand.PAPER, root)[name], Measured(by_hand.PAPER, by_hand.SIZE, root))


def table(
    root: Path,
    near: Ends,
    far: Ends | None = None,
    lost: tuple[str, ...] = (),
    text: str = TABLE,
    reported: str = REPORTED,
) -> Built:
    """The table `text`, from runs that end so; `lost` are the items that diverged."""
    paper(root, text, reported)
    for scenario, ends in (("near", near), ("far", far or {})):
        finals(root, scenario, ends)
    diverged(root, *lost)
    return made(root)


def test_a_cell_has_mean_and_sample_deviation_and_what_the_paper_reports(tmp_path: Path) -> None:
    """70, 72, 74: mean 72, deviation sqrt((4 + 0 + 4) / 2) = 2."""
    near, far = {"a": [0.70, 0.72, 0.74], "b": [0.5]}, {"a": [0.25, 0.75], "b": [0.123456]}
    built = table(tmp_path, near, far)
    assert built.table[:3] == [
        ["", "Near", "Far"],
        ["A", "72.00 ± 2.00 (90.5)", "50.00 ± 35.36 (80 ± 0.5)"],
        ["B", "50.00 (80)", "12.35"],
    ]
    first, second, _, fourth = rows(built)[:4]
    numbers = [float(first[key]) for key in ("measured", "measured_std", "difference")]
    assert numbers == pytest.approx([72, 2, 72 - 90.5])
    assert (first["seeds"], first["reported"], first["reported_spread"]) == ("3", "90.5", "")
    assert (second["seeds"], second["reported"], second["reported_spread"]) == ("2", "80.0", "0.5")
    assert fourth["difference"] == "", "the paper reports nothing there"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    text = TABLE.replace("{scenario: far}", "{scenario: far}, Later: {scenario: later}")
    text = text.replace("D: {study: one, recipe: d}", "D: {}").replace(
        "scale", "decimals: 1\n  scale"
    )
    built = table(tmp_path, {"a": [0.5]}, lost=("far-c-0",), text=text)
    assert built.table[1] == ["A", "50.0 (90.5)", "not run yet (80 ± 0.5)", "not run at this size"]
    assert built.table[3][2] == "diverges (60)"
    assert built.table[4] == ["D", "- (60.0)", "- (50)", "-"]
    assert built.missing == ("A, Far", "B, Near", "B, Far", "C, Near")
    assert built.remarks == ("one (far c): diverges (seed 0).",)


def test_one_diverged_seed_hides_neither_the_others_nor_itself(tmp_path: Path) -> None:
    """B: 90 and 92 on the seeds that ended, deviation sqrt(2).

    Without B the best other of A (70) is C (60).
    """
    near = {"a": [0.7], "b": [0.90, 0.92], "c": [0.6]}
    built = table(tmp_path, near, lost=("near-b-2",))
    assert built.table[2][1] == "91.00 ± 1.41; 1 of 3 seeds diverges (80)"
    assert [row["diverged"] for row in rows(built)[::2]] == ["0", "1", "0", "0"]
    assert built.sentences[0].endswith(
        "ranked last, as a seed diverges or all do: B; A less the best other (C) is +10.00 on "
        "one seed: no evidence either way."
    )
    assert built.remarks == (
        "one (near b): 1 of 3 seeds diverges (seed 2). Its mean is that of the other seeds only, "
        "so it is ranked last.",
    )


@pytest.mark.parametrize(
    ("ends", "lost", "better", "tau"),
    [
        ({"a": [0.9], "b": [0.8], "c": [0.7], "d": [0.6]}, [], "higher", 1.0),
        ({"a": [0.6], "b": [0.7], "c": [0.8], "d": [0.9]}, [], "higher", -1.0),
        # Of six pairs two are the other way round: (4 - 2) / 6.
        ({"a": [0.7], "b": [0.9], "c": [0.8], "d": [0.6]}, [], "higher", 2 / 6),
        # The paper's order is A, B, C, D; ours A, C, D, B, though the seed of B that ended is the
        # best of all: of six pairs BC and BD are the other way round.
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
    tmp_path: Path, ends: Ends, lost: list[str], better: str, tau: float
) -> None:
    built = table(tmp_path, ends, lost=tuple(lost), text=f"{TABLE}  better: {better}\n")
    then = "ranked last" if lost else "A less"
    words = f"Near: the order of 4 methods agrees with the paper's to Kendall τ = {tau:.2f}; {then}"
    assert built.sentences[0].startswith(words)


def test_kendalls_tau_needs_three_methods_that_both_have_and_an_order(tmp_path: Path) -> None:
    """Far: the paper has nothing for B, so of A, B, C only two count. Near: all are equal."""
    built = table(tmp_path, {name: [0.5] for name in "abcd"}, {"a": [0.9], "b": [0.8], "c": [0.7]})
    assert not any("Kendall" in sentence for sentence in built.sentences)


LEAK = "training has seen all 5 test samples"
DRAWN = "word vectors: drawn at random (normal, deviation 1)"
CURVES = """\
f:
  kind: curves
  title: A figure
  protocol: []
  scale: 100
  panels: [{title: Left, study: one, scenario: near}, {title: Right, study: one, scenario: far}]
  lines: {A: a, B: {recipe: b}, C: c}
"""


def test_leaks_and_notes_are_marked_in_every_form_of_a_report_and_not_ranked(
    tmp_path: Path,
) -> None:
    """Without B the order is the paper's, and the best other is C, 20 below A. HTML and Markdown,
    of a table and of a figure, which marks the line in its numbers too."""
    near = {"a": [0.9], "c": [0.7], "d": [0.6]}
    finals(paper(tmp_path, TABLE + CURVES, REPORTED), "near", near)
    notes = [f"LEAK: {LEAK}", DRAWN]
    run(tmp_path, "near", "b", 0, [0.5, 1.0], tags={"leak": LEAK}, notes=notes)
    run(tmp_path, "far", "a", 0, [0.5], notes=["500 users"])
    run(tmp_path, "far", "a", 1, [0.5], notes=["500 users", DRAWN])
    built = made(tmp_path)
    assert [line[1:] for line in built.table[1:4]] == [
        ["90.00 (90.5)", "50.00 ± 0.00 [1] [2] (80 ± 0.5)"],
        ["100.00 LEAK [3] (80)", "not run yet"],
        ["70.00 (70)", "not run yet (60)"],
    ]
    marks = [(row["leak"], row["notes"]) for row in rows(built)[:3]]
    assert marks == [("", ""), ("", f"500 users; 500 users; {DRAWN}"), (LEAK, DRAWN)]
    assert "the order of 3 methods" in built.sentences[0]
    assert "A less the best other (C) is +20.00 on" in built.sentences[0]
    folder = report.write("ccn", "smoke", tmp_path, of_targets("ccn", tmp_path))
    assert folder == tmp_path / "research" / "built" / "ccn" / "smoke" / "report"
    names = {"report.html", "t.md", "t.csv", "f.md", "f.csv", "f.png"}
    assert {path.name for path in folder.iterdir()} == names
    html, text, curve = ((folder / name).read_text() for name in ("report.html", "t.md", "f.md"))
    assert "100.00 LEAK [3] (80)" in html and "100.00 LEAK [3] (80)" in text
    for content in (html, text, curve):
        assert f"LEAK: one (near b): {LEAK}. Such a number says nothing about unseen" in content
        assert f"] one (near b): {DRAWN}." in content
    assert "data:image/png;base64," in html and "how it is done" in html
    assert "Not there yet: B, Far, C, Far, D, Far." in text
    assert "Left: at the end A is highest (90.00), C lowest (70.00)." in curve
    marks = {(row["line"], row["mark"]) for row in results.table(folder / "f.csv")}
    assert {("B", "LEAK [1]"), ("C", "")} < marks


def test_a_figure_has_every_value_and_compares_no_line_of_which_a_seed_diverged(
    tmp_path: Path,
) -> None:
    """B is highest on the seed that ended.

    C diverged on its only seed, so nothing of it will be there.
    """
    finals(paper(tmp_path, CURVES), "near", {"a": [0.5, 0.7], "b": [0.9]})
    diverged(tmp_path, "near-b-1", "near-c-0")
    built = made(tmp_path, "f")
    assert is_picture(built) and not built.table
    assert (built.sentences, built.missing) == ((), ("Right, A", "Right, B", "Right, C"))
    values = [
        (row["line"], row["round"], row["seed_index"], float(row["value"]), row["mark"])
        for row in rows(built)
    ]
    assert len(values) == 6 and ("A", "2", "1", 70.0, "") in values
    assert ("B", "1", "0", 45.0, "1 of 2 seeds diverges") in values


def ran(root: Path) -> str:
    """What was run of the study, as the page of its table has it."""
    page = report.write("ccn", "smoke", root, of_targets("ccn", root)) / "t.md"
    return page.read_text().split("## What was run\n\n- one: a study: ")[1].split("\n")[0]


def test_what_was_run_is_what_ran(tmp_path: Path) -> None:
    """The plan has digits without D_public or noise, MLP, 2 rounds of 1 epoch, lr 0.1, seeds 0 to
    2, 24 runs."""
    paper(tmp_path, TABLE, REPORTED)
    other: dict[str, Any] = {
        "data.name": "cifar10",
        "data.size": [16, 16],
        "data.public": 1500,
        "train.model_options": {"channels": 8, "batch_norm": True},
        "train.lr": 0.05,
        "train.augment": True,
        "train.momentum": 0.9,
        "train.precision": "float32",
        "scenario.clients": 10,
        "scenario.noise": {"sigma": 0.5, "form": "ramp"},
    }
    for recipe in "ab":
        run(tmp_path, "near", recipe, 7, [0.1, 0.2, 0.3], params=other | {f"{recipe}.p": 0.5})
    assert ran(tmp_path) == (
        "data: name cifar10, public 1500, size [16, 16]; training: model mlp, model_options "
        "{'channels': 8, 'batch_norm': True}, rounds 3, epochs 1, batch_size 50, lr 0.05, "
        "momentum 0.9, augment True; scenario near (partition iid, clients 10, participation 1.0, "
        "noise {'sigma': 0.5, 'form': 'ramp'}); method a (p 0.5); method b (p 0.5); seeds 7; "
        "2 runs (planned: 24); missing: near-a-0, near-b-0, near-c-0, near-d-0, far-a-0, far-b-0, "
        "far-c-0, far-d-0 and 16 more; not in the plan: near-a-7, near-b-7."
    )


def test_runs_at_unequal_settings_are_told_apart(tmp_path: Path) -> None:
    """Seed 1 of A has another step size; B has other clients and another p on seed 1."""
    paper(tmp_path, TABLE, REPORTED)
    run(tmp_path, "near", "a", 0, [0.1])
    other: dict[str, Any] = {"notes": [DRAWN], "tags": {"leak": LEAK}}
    run(tmp_path, "near", "a", 1, [0.1], params={"train.lr": 0.2}, **other)
    run(tmp_path, "far", "b", 0, [0.1], params={"scenario.clients": 3, "b.p": 0.1})
    run(tmp_path, "far", "b", 1, [0.1], params={"scenario.clients": 4, "b.p": 0.2})
    diverged(tmp_path, "far-c-0")
    text = ran(tmp_path)
    for part in (
        "lr 0.1 [far-b-0, far-b-1, near-a-0] / 0.2 [near-a-1]; scenario far (partition iid, ",
        "clients 3 [far-b-0] / 4 [far-b-1], participation 1.0); scenario near (partition iid, ",
        "; method b (p 0.1 [far-b-0] / 0.2 [far-b-1]); ",
        "; 4 runs (planned: 24), 1 diverged (far-c-0); missing: near-b-0, near-c-0, near-d-0, far-",
        f"; notes on the data: {DRAWN} [near-a-1]; LEAK: {LEAK} [near-a-1].",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("a", "b", "better", "words"),
    [
        # Pairs of seeds 0 and 1: the mean -+ 12.706 / sqrt(2) deviations. Here -0.5 and 0.5: 0 -+
        # 12.706 / 2.
        (
            [0.72, 0.74, 0.76],
            [0.725, 0.735],
            "higher",
            "(B) is +0.00, 95 % interval -6.35 to +6.35 over 2 seeds: undecided",
        ),
        # 8 and 7: 7.5 -+ 6.353; 60 - 20 on the only seed of C.
        (
            [0.80, 0.81, 0.82],
            [0.72, 0.74],
            "higher",
            "(B) is +7.50, 95 % interval +1.15 to +13.85 over 2 seeds.",
        ),
        ([0.60, 0.61, 0.62], [0.72, 0.74], "lower", "(C) is +40.00 on one seed: no evidence"),
        ([0.80, 0.81], [0.72, 0.73], "higher", "(B) is +8.00 on each of 2 seeds."),
    ],
)
def test_a_claim_says_no_more_than_the_paired_interval(
    tmp_path: Path, a: list[float], b: list[float], better: str, words: str
) -> None:
    ends = {"a": a, "b": b, "c": [0.20]}
    built = table(tmp_path, ends, text=f"{TABLE}  better: {better}\n")
    assert f"; A less the best other {words}" in built.sentences[0]


def test_a_rival_shares_a_seed_and_is_not_composed_with_the_claimed_method(tmp_path: Path) -> None:
    text = TABLE.replace("    C: {study: one, recipe: c}", "    B + A: {study: one, recipe: c}")
    run(paper(tmp_path, text, "{}"), "near", "b", 1, [0.5])
    finals(tmp_path, "near", {"a": [0.80], "c": [0.90]})
    (sentence,) = made(tmp_path).sentences
    assert sentence == "Near: A and the best other (B) have no seed in common."


def test_gains_are_differences_seed_by_seed_against_a_row_and_a_column(tmp_path: Path) -> None:
    """B - A on seeds 0 and 1, which both have: 1 and 3, mean 2, deviation sqrt(2). B alone has 0.9
    on seed 2.

    A and C in Far against Near; B in Far against A in Near, as both its row and its column have a
    base. A printed gain comes first. Where a seed of either diverged there is none.
    """
    printed = REPORTED + "  gains: {A: [null, -9.5], C: [null, -7]}\n"
    near = {"a": [0.5, 0.7], "b": [0.51, 0.73, 0.9], "c": [0.5]}
    far = {"a": [0.6], "b": [0.75], "c": [0.45]}
    built = table(tmp_path, near, far, ("near-c-1",), GAINS, printed)
    assert built.table[1][2] == "60.00 (80 ± 0.5)\ngain +10.00 (-9.50)"
    assert built.table[2][1:] == [
        "71.33 ± 19.55 (80)\ngain +2.00 ± 1.41 (-10.50)",
        "75.00\ngain +25.00",
    ]
    assert built.table[3][2] == "45.00 (60)", "no gain"
    gain = [float(rows(built)[2][f"gain{of}"]) for of in ("", "_std", "_reported")]
    assert gain == pytest.approx([2, math.sqrt(2), 80 - 90.5])
    assert built.sentences[:2] == (
        "B against A: the mean gain of 2 methods is +13.50 (in the paper -10.50), on one seed: no "
        "evidence either way.",
        "Far against Near: the mean gain of 2 methods is +17.50 (in the paper -9.50), on one "
        "seed: no evidence either way.",
    )


@pytest.mark.parametrize(("gain", "samples", "above"), [(0.2, 0, 0), (0.02, 100, 0), (0.2, 100, 1)])
def test_equal_gains_have_the_floor_of_one_test_sample(
    tmp_path: Path, gain: float, samples: int, above: int
) -> None:
    """B - A is equal on both seeds, but for rounding. With 100 test samples one of them makes a
    deviation of 1 / sqrt(2) points: for 2 points t = 2 / (1 / 2) = 4 and p = 1 - 2 atan(4) / pi =
    0.16, for 20 points it is 0.016. Where the size of the test set is not known, there is no
    test."""
    evaluation = by_hand.folder(tmp_path) / "evaluation" / "near-b-0"
    evaluation.mkdir(parents=True)
    (evaluation / "per_class.csv").write_text(f"class,samples,accuracy\n0,{samples},0.5\n")
    if not samples:
        (evaluation / "per_class.csv").unlink()
    built = table(tmp_path, {"a": [0.55, 0.57], "b": [0.55 + gain, 0.57 + gain]}, text=GAINS)
    assert built.sentences[0].endswith(f"find it above 0 for {above} and below 0 for 0 of them.")


def test_an_address_from_its_parts() -> None:
    parts = (
        {"method": "a", "study": "one", "at": {"B": {"study": "own"}}},
        {"recipe": "{method}+c", "study": "two", "scale": 2},
    )
    wanted = {"method": "a", "study": "two", "recipe": "a+c", "scale": 2}
    assert address("t", "A", *parts) == wanted
    assert address("t", "B", *parts) == wanted | {"study": "own"}
    with pytest.raises(UserError, match=r"^t: .* names a key in braces that it lacks"):
        address("t", "A", {"recipe": "{methd}+c"}, {"method": "a"})


def test_statistics_of_a_run(tmp_path: Path) -> None:
    metrics = {"traffic": math.inf, "name": "x"}
    run(paper(tmp_path), "near", "a", 0, [0.1, 0.8, None, 0.6, 0.4], metrics=metrics)
    run(tmp_path, "near", "a", 1, [0.5, 0.6, 0.7])
    measured = Measured("ccn", "smoke", tmp_path)
    runs = measured.group({"study": "one", "scenario": "near", "recipe": "a"}).runs
    wanted = {"last3": 0.6, "seconds": 2.5, "seconds_per_round": 0.5, "traffic": None, "no": None}
    for name, value in wanted.items():
        assert statistic(name, runs[0], measured, "one") == pytest.approx(value), name
    for name, words in (("name", "is no number"), ("rounds_too:0.9", "is unknown; allowed: final")):
        with pytest.raises(UserError, match=f"statistic '{name}' {words}"):
            statistic(name, runs[0], measured, "one")
    rounds, values = series(runs, "test_accuracy")
    assert (rounds, values.tolist()) == ([1, 2], [[0.1, 0.8], [0.5, 0.6]]), "that all measured"


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
    assert built.sentences == ("2 of 3 settings are the paper's; not: Ours, Rounds.",)
    assert rows(built)[1] == {"row": "Ours", "column": "Rounds", "ours": "2", "reported": "200"}


def test_the_studies_of_a_target_are_found_at_any_depth(tmp_path: Path) -> None:
    spec = "x: {kind: k, title: T, protocol: [], rows: {A: {study: one}, B: [{study: one}]}}"
    assert of_targets("ccn", paper(tmp_path, spec))["x"].studies == ("one",)
    assert paper_of("x", tmp_path) == "ccn"


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
