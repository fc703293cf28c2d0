"""What is committed of a result: its table, every run and round, and what made them, from runs made
by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.results import table
from research import keep
from tests.research.by_hand import diverged, paper, run

TARGETS = """\
ccn-tab9:
  kind: table
  title: A table
  protocol: [how it is done]
  statistic: best
  columns: {Near: {scenario: near}}
  rows: {A: {study: one, recipe: a}, B: {study: one, recipe: b}}
ccn-fig9:
  kind: curves
  title: A figure
  protocol: []
  panels: [{title: Left, study: one, scenario: near, column: bytes_up}]
  lines: {A: a}
"""
EXPERIMENT = """\
experiment: toy
data: {name: digits, validation: 0, public: 0}
scenario_names: [near]
scenarios: {near: {partition: iid, clients: 2}}
recipe_names: [a, b]
recipes: {a: {recipe: fedavg}, b: {recipe: fedavg}}
seeds: [0, 1, 2]
train: {model: mlp, rounds: 2, epochs: 1, batch_size: 50, lr: 0.1}
deploy: {recipe: a, scenario: near, silos: 2}
"""
MADE = {
    "git_commit": "c0ffee",
    "cpu": "Some CPU",
    "cores": "2",
    "python": "3.11.4",
    "torch": "2.1",
    "fedml": "0.8",
    "device": "cpu",
}
DRAWN = "word vectors: drawn at random"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One run of A that leaks, made by another commit than one of B, of which seed 1 diverged.

    C is in no table.
    """
    paper(tmp_path, TARGETS, "{}")
    accuracies = [
        0.123456789,
        None,
        0.3,
        0.5,
        0.4,
        0.6,
        0.2,
    ]  # best 0.6, final 0.2, mean of the last five 0.4
    run(
        tmp_path,
        "near",
        "a",
        0,
        accuracies,
        tags=MADE | {"leak": "all of it"},
        notes=["LEAK: all of it", DRAWN],
    )
    run(tmp_path, "near", "b", 0, [0.5], tags=MADE | {"git_commit": "bad"})
    run(tmp_path, "near", "c", 0, [0.5], tags=MADE)
    diverged(tmp_path, "near-b-1")
    return tmp_path


def keep_in(root: Path, *arguments: str) -> int:
    return keep.main([*arguments, "--root", str(root)])


def test_a_table_is_kept_with_its_rounds_runs_and_makers(repository: Path) -> None:
    assert keep_in(repository, "ccn-tab9", "--size", "smoke") == 0
    place = repository / "docs" / "results"
    ends = {".md", ".csv", "-rounds.csv", "-runs.csv"}
    assert {path.name for path in place.iterdir()} == {f"ccn-tab9-smoke{end}" for end in ends}

    rounds = (place / "ccn-tab9-smoke-rounds.csv").read_text().splitlines()
    assert rounds[1:4] == [f"one,near,a,0,{rest}" for rest in ("1,0.123457", "2,", "3,0.3")]
    assert len(rounds) == 1 + 7 + 1
    assert (place / "ccn-tab9-smoke-runs.csv").read_text().splitlines()[1:] == [
        f"one,near,a,0,ended,0.2,0.6,0.4,3.5,all of it,{DRAWN},0,c0ffee",
        "one,near,b,0,ended,0.5,0.5,0.5,0.5,,,0,bad",
        "one,near,b,1,diverged: round 3: not finite,,,,,,,,",
    ]
    page = (place / "ccn-tab9-smoke.md").read_text()
    assert "| A | 0.60 LEAK [1] |" in page and "0.50; 1 of 2 seeds diverges" in page
    assert page.split("## Made with\n\n")[1].splitlines() == [
        (
            "- Command: `python -m research papers build ccn-tab9 --size smoke`; kept by "
            "`python -m research.keep ccn-tab9 --size smoke`."
        ),
        "- Commit of the code: c0ffee (1 run), bad (1 run).",
        "- CPU: Some CPU.",
        "- Cores: 2.",
        "- Device: cpu.",
        "- Python: 3.11.4.",
        "- Torch: 2.1.",
        "- FedML: 0.8.",
        "- Seeds: 0.",
        "- Accuracy after every round, by run: "
        "[ccn-tab9-smoke-rounds.csv](ccn-tab9-smoke-rounds.csv). Outcome of each "
        "run, SHA-256 of its weights, seconds, commit: "
        "[ccn-tab9-smoke-runs.csv](ccn-tab9-smoke-runs.csv).",
    ]


def test_nothing_is_kept_where_nothing_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keep_in(paper(tmp_path, TARGETS, "{}"), "ccn-tab9", "--size", "smoke") == 2
    assert (
        "none of its runs has ended; run `python -m research papers build ccn-tab9 "
        "--size smoke` first" in capsys.readouterr().err
    )
    assert not (tmp_path / "docs").exists()


def test_a_long_result_keeps_some_rounds_and_the_last(repository: Path) -> None:
    """Of rounds 1 to 7 of A: all are too long, every second one and the last is 2, 4, 6, 7."""
    at = ("one", "near", "a")
    measured = keep.Measured("ccn", "smoke", repository)
    used = {at: measured.group(dict(zip(("study", "scenario", "recipe"), at, strict=True)))}
    every, stride = keep.rounds_csv(used, ["test_accuracy"])
    assert stride == 1
    part, stride = keep.rounds_csv(used, ["test_accuracy"], len(every))
    rounds = [line.split(",")[4] for line in part.decode().splitlines()[1:]]
    assert (stride, rounds) == (2, ["2", "4", "6", "7"])
    with pytest.raises(keep.UserError, match="bytes; allowed: less than 9"):
        keep.rounds_csv(used, ["test_accuracy"], 9)


def test_an_experiment_is_kept_under_a_name(repository: Path) -> None:
    """The runs of params.yaml, of which b has none."""
    place = repository / "runs"
    (repository / "research/built/ccn/smoke/studies/one/runs").rename(place)
    (place / "near-b-0" / "run.json").unlink()
    (repository / "params.yaml").write_text(EXPERIMENT)
    settings, ran = config.load(repository), place / "near-a-0" / "run.json"
    record = json.loads(ran.read_text())
    assert keep_in(repository, "mine") == 2, "it has other settings"
    ran.write_text(json.dumps(record | {"params": settings.params(settings.units()[0])}))
    assert keep_in(repository, "mine", "--columns", "bytes_up", "seconds") == 0
    kept = repository / "docs" / "results"
    page = (kept / "mine.md").read_text()
    for words in (
        "| a LEAK | 20.00 |",
        "kept by `python -m research.keep mine --columns bytes_up seconds`.",
        "1 runs (planned: 6); missing: near-b-0, near-a-1, near-b-1, near-a-2, near-b-2",
    ):
        assert words in page
    tables = [table(kept / f"mine{end}.csv")[0] for end in ("-runs", "", "-rounds")]
    assert [row["recipe"] for row in tables] == ["a"] * 3 and tables[-1]["seconds"] == "0.5"
