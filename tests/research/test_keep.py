"""What is committed of a result: its table, every run and round, and what made them, from runs made
by hand."""

from __future__ import annotations

import csv
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

    rounds = table(place / "ccn-tab9-smoke-rounds.csv")
    first = {"study": "one", "scenario": "near", "recipe": "a", "seed": "0", "round": "1"}
    assert rounds[0] == first | {"test_accuracy": "0.123457"} and len(rounds) == 7 + 1
    assert [row["test_accuracy"] for row in rounds[1:3]] == ["", "0.3"]

    a, b, lost = table(place / "ccn-tab9-smoke-runs.csv")
    assert a == {
        "study": "one",
        "scenario": "near",
        "recipe": "a",
        "seed": "0",
        "outcome": "ended",
        "final": "0.2",
        "best": "0.6",
        "last5": "0.4",
        "seconds": "3.5",
        "leak": "all of it",
        "notes": DRAWN,
        "weights_sha256": "0",
        "commit": "c0ffee",
    }
    assert (b["commit"], b["leak"], b["outcome"]) == ("bad", "", "ended")
    assert (lost["recipe"], lost["seed"], lost["outcome"]) == (
        "b",
        "1",
        "diverged: round 3: not finite",
    )
    assert lost["final"] == lost["commit"] == ""

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
    """Of rounds 1 to 7 of A and 1 of B: all are too long, every second one and the last is 2, 4, 6,
    7 and 1."""
    measured = keep.Measured("ccn", "smoke", repository)
    used = {
        ("one", "near", r): measured.group({"study": "one", "scenario": "near", "recipe": r})
        for r in "ab"
    }
    whole, stride = keep.rounds_csv(used, ["test_accuracy"])
    assert stride == 1
    part, stride = keep.rounds_csv(used, ["test_accuracy"], len(whole))
    found = list(csv.DictReader(part.decode().splitlines()))
    assert stride == 2 and [row["round"] for row in found] == ["2", "4", "6", "7", "1"]
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
    assert (
        "| a LEAK | 20.00 |" in page
        and "kept by `python -m research.keep mine --columns bytes_up seconds`." in page
    )
    assert "1 runs (planned: 6); missing: near-b-0, near-a-1, near-b-1, near-a-2, near-b-2" in page
    assert [row["recipe"] for row in table(kept / "mine-runs.csv")] == ["a"]
    assert {
        (row["study"], row["bytes_up"], row["seconds"]) for row in table(kept / "mine-rounds.csv")
    } == {("toy", "10.0", "0.5")}
    assert table(kept / "mine.csv")[0]["recipe"] == "a"
