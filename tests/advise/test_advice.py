"""The base's file, the command and its mistakes, the function of the API, and the section of the
report."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedml_noniid as nd
from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.advise import base
from fedml_noniid.pipelines.advise.base import BASELINE, Known, Row
from fedml_noniid.pipelines.advise.learner import Learner
from fedml_noniid.pipelines.advise.measures import MEASURES
from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers.studies import resolved
from fedml_noniid.pipelines.reporting import advice as section
from fedml_noniid.pipelines.reporting import report, summary
from fedml_noniid.pipelines.reporting.text import as_csv
from fedml_noniid.pipelines.tools import advice
from fedml_noniid.plugins.core.errors import UserError
from tests.pipelines.small import PARAMS, run_stages
from tests.pipelines.test_report import write_params, write_run

MEASURED = dict.fromkeys(MEASURES, 0.5) | {"clients": 4.0, "size_mean": 20.0, "classes": 2.0}
TINY = """\
study_names: [one, later]
studies:
  one:
    what: two scenarios
    data: {name: digits, validation: 0.0, public: 1200}
    scenarios: {even: {partition: iid, clients: 3}, skew: {partition: shards_equal, clients: 3}}
    recipes: {fedavg: {}, fedprox: {}}
    seeds: [0]
    train:
      {model: mlp, model_options: {hidden: 4}, rounds: 1, epochs: 1, batch_size: 32, lr: 0.1,
       device: cpu}
  later: {like: one}
"""


def rows(
    scenario: str, gain: float, data: str = "toy", methods: Sequence[str] = ("scaffold",)
) -> list[Row]:
    """FedAvg and other methods, which end above it by `gain` points, on two seeds."""
    found = []
    for seed in (0, 1):
        row = Row(data, scenario, BASELINE, seed, MEASURED, 0.5, 0.5, "f" * 64, "c")
        found += [
            row,
            *(dataclasses.replace(row, method=of, accuracy=0.5 + gain / 100) for of in methods),
        ]
    return found


def write(path: Path, found: Sequence[Row]) -> Path:
    header, *lines = base.as_lines(found)
    path.write_bytes(as_csv([str(cell) for cell in header], lines))
    return path


def test_a_base_is_read_as_it_is_written(tmp_path: Path) -> None:
    found = rows("x", 2.0) + rows("y", -1.0)
    assert base.read(write(tmp_path / "base.csv", found)) == found
    x, y = base.known(found)
    assert (x.name, x.measures) == ("toy x", MEASURED)
    assert x.gains == pytest.approx({BASELINE: 0, "scaffold": 2}) and y.gains[
        "scaffold"
    ] == pytest.approx(-1)


def test_gains_are_means_over_seeds() -> None:
    first, second = (
        dataclasses.replace(row, accuracy=0.5 + row.seed / 10) for row in rows("x", 0)[1::2]
    )
    (found,) = base.known([*rows("x", 0)[::2], first, second])
    assert found.gains["scaffold"] == pytest.approx(5)  # 0 and 10 points


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (",accuracy", ",acuracy", "line 2, column accuracy is missing, expected a number"),
        (
            "toy,x,fedavg,0,4.0",
            "toy,x,fedavg,0,four",
            "line 2, column clients is 'four', expected a number",
        ),
        (
            "toy,x,fedavg,0,4.0",
            "toy,x,fedavg,0,nan",
            "line 2, column clients is 'nan', expected a number",
        ),
        ("method", "recipe", "column method is missing"),
    ],
)
def test_a_damaged_base_is_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path / "base.csv", rows("x", 1.0))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(
        UserError, match=f"^{path}: {said}; `noniid advise --make-base` writes the file$"
    ):
        base.read(path)


def test_a_base_that_is_missing_or_has_holes_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"base.csv: is missing; `noniid advise --make-base` writes the file$"
    ):
        base.read(tmp_path / "base.csv")
    with pytest.raises(UserError, match="toy y has no run of scaffold"):
        base.known(rows("x", 1.0) + [row for row in rows("y", 1.0) if row.method == BASELINE])


def test_the_committed_base_has_every_run_of_its_studies() -> None:
    """And of each run of FedAvg, the accuracy beside the other methods'."""
    found = base.read()
    content = config.read_yaml(advice.STUDY)["studies"]
    planned = [
        (name, f"{row}")
        for name in dict.fromkeys(row.data for row in found)
        for row in resolved(advice.NAME, name, advice.SIZE, content, "study.yaml").items
    ]
    assert [(row.data, f"{row.scenario}-{row.method}-{row.seed}") for row in found] == planned
    own = {
        (row.data, row.scenario, row.seed): row.accuracy for row in found if row.method == BASELINE
    }
    assert all(row.fedavg_accuracy == own[row.data, row.scenario, row.seed] for row in found)
    assert all(
        len(row.weights_sha256) == 64 and 0 <= row.accuracy <= 1
        for row in found
        if row.weights_sha256
    )
    assert {row.data for row in found} >= {"digits", "mnist"}
    assert len(Learner(base.known(found)).methods) == 10


def test_the_committed_tables_are_those_of_the_committed_base() -> None:
    found, folder = base.read(), base.FILE.resolve().parent
    trials = {way: left_out(base.known(found)) for way, left_out in advice.WAYS.items()}
    for written, table in (
        (folder / "advice.csv", advice.trials_csv(trials)),
        (folder / "advice.md", advice.page(found, trials).encode()),
    ):
        assert written.read_bytes() == table, (
            f"`noniid advise --make-base --no-run` writes {written.name}"
        )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy"
)  # of mlflow's own use of SQLAlchemy
def test_the_base_is_made_by_the_pipeline_and_nothing_runs_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("train", "evaluate"):  # in this process
        monkeypatch.setattr(f"fedml_noniid.pipelines.stages.{stage}.how_many", lambda *_: 1)
    study = tmp_path / "study.yaml"
    study.write_text(TINY)
    monkeypatch.setattr(advice, "STUDY", study)
    place = Workspace.of(tmp_path, {})
    with pytest.raises(
        UserError, match=r"study 'on' is unknown \(did you mean 'one'\?\); allowed: one, later"
    ):
        advice.make(place, tmp_path / "out", "on", running=True)
    advice.make(place, tmp_path / "out", "one", running=True)
    found = base.read(tmp_path / "out" / "advice-base.csv")
    runs = {
        run.key: run
        for run in results.read(
            tmp_path / "papers" / "built" / "advice" / "paper" / "studies" / "one"
        )
    }
    assert len(found) == len(runs) == 4
    for one in found:
        run = runs[f"{one.scenario}-{one.method}-{one.seed}"]
        assert one.weights_sha256 == run.tags["weights_sha256"]
        assert one.accuracy == pytest.approx(run.final["test_accuracy"], rel=1e-9)
        assert (one.measures["clients"], one.measures["classes"], one.measures["share"]) == (
            3,
            10,
            1,
        )
    even, skew = found[0].measures, found[-1].measures
    assert skew["label_hellinger_mean"] > even["label_hellinger_mean"] + 0.2
    (_, *table) = csv.reader((tmp_path / "out" / "advice.csv").read_text().splitlines())
    assert table == []  # two scenarios: none is left to learn from
    # The other study is the same, so the store has its runs.
    monkeypatch.setattr(
        "fedml_noniid.pipelines.stages.train._train", lambda *_: pytest.fail("trained again")
    )
    advice.make(place, tmp_path / "out", "later", running=True)
    assert len(base.read(tmp_path / "out" / "advice-base.csv")) == 8


def test_the_base_of_results_made_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Study `one` has ended, with a run that diverged: it counts as one class of ten.

    Study `later` has not.
    """
    (tmp_path / "study.yaml").write_text(TINY)
    monkeypatch.setattr(advice, "STUDY", tmp_path / "study.yaml")
    study = resolved(
        advice.NAME, "one", advice.SIZE, config.read_yaml(advice.STUDY)["studies"], "study.yaml"
    )
    root = tmp_path / study.folder
    for scenario, labels in {"even": 0.1, "skew": 0.7}.items():
        folder = root / "partitions" / f"{scenario}-0"
        folder.mkdir(parents=True)
        (folder / "statistics.json").write_text(
            json.dumps(MEASURED | {"classes": 10, "label_hellinger_mean": labels})
        )
        write_run(root, BASELINE, 0, [0.5], scenario=scenario)
    write_run(root, "fedprox", 0, [0.75], scenario="even")
    (root / "params.yaml").write_text(study.yaml(tmp_path))
    with pytest.raises(
        UserError, match=r"advice: holds no finished study; run `noniid advise --make-base`$"
    ):
        advice.make(Workspace.of(tmp_path, {}), tmp_path / "out", None, running=False)
    (root / "diverged.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=r"run skew-fedprox-0 is missing; run `noniid advise --make-base --study one`$",
    ):
        advice.make(Workspace.of(tmp_path, {}), tmp_path / "out", None, running=False)
    (root / "diverged.json").write_text('{"skew-fedprox-0": "loss is nan"}')
    advice.make(Workspace.of(tmp_path, {}), tmp_path / "out", None, running=False)
    found = base.read(tmp_path / "out" / "advice-base.csv")
    assert [
        (one.scenario, one.method, one.accuracy, one.fedavg_accuracy, one.weights_sha256)
        for one in found
    ] == [
        ("even", "fedavg", 0.5, 0.5, "fedavg 0"),
        ("even", "fedprox", 0.75, 0.5, "fedprox 0"),
        ("skew", "fedavg", 0.5, 0.5, "fedavg 0"),
        ("skew", "fedprox", 0.1, 0.5, ""),
    ]
    assert [one.measures["label_hellinger_mean"] for one in found] == [0.1, 0.1, 0.7, 0.7]
    assert all(one.measures["share"] == 1 for one in found)  # of params.yaml, not of the statistics
    page = (tmp_path / "out" / "advice.md").read_text()
    assert (
        "1 runs ended without a model. They count as a model that names one class for all samples."
        in page
    )
    assert (
        "| one even |" in page and "| fedprox | +25.00 |" in page and "| fedavg | +0.00 |" in page
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("advise --study digits", "--study is refused; allowed: with --make-base"),
        ("advise --no-run --to x", "--no-run, --to is refused; allowed: with --make-base"),
        ("advise --root /nowhere", "--root /nowhere: there is no such folder"),
        (
            "advise --root {}",
            "params.yaml: is missing; `noniid init` makes the folder of an experiment",
        ),
        ("advise --make-base --no-run --to {0}/x --root {0}", "holds no finished study"),
        (
            "advise --make-base --study digit --to {0}/x --root {0}",
            "study 'digit' is unknown (did you mean 'digits'?)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, said: str
) -> None:
    assert main(words.format(tmp_path).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not list(tmp_path.iterdir())


def bases(monkeypatch: pytest.MonkeyPatch, found: Sequence[Known]) -> None:
    monkeypatch.setattr(base, "read", list)
    monkeypatch.setattr(base, "known", lambda _: list(found))


def alike(
    measures: dict[str, float], method: str = "scaffold", gain: float = 4.0, n: int = 10
) -> list[Known]:
    return [
        Known("toy", f"x{i}", measures, {BASELINE: 0.0, method: gain, "fnr": -1.0})
        for i in range(n)
    ]


def test_the_command_s_words_on_partitions_of_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text(
        PARAMS.replace("scenario_names: [skewed]", "scenario_names: [skewed, even]").replace(
            "scenarios:\n", "scenarios:\n  even: {partition: iid, clients: 4}\n"
        )
    )
    run_stages(tmp_path, ("plan", "prepare", "partition"))
    measured = section.advised(tmp_path, config.load(tmp_path), Learner(alike(MEASURED)))
    assert set(measured["even"].measures) == set(MEASURES)
    bases(monkeypatch, alike(dict(measured["skewed"].measures)))
    skewed, even, last = (
        advice.text(tmp_path).split("\n\n")[0],
        *advice.text(tmp_path).splitlines()[-3::2],
    )
    lines = skewed.splitlines()
    assert lines[0] == "skewed: most like toy x0" and lines[3].split() == [
        "scaffold",
        "+4.0",
        "+4.0",
        "to",
        "+4.0",
    ]
    assert lines[4].startswith("fedavg") and lines[5].startswith("fnr")
    assert even.startswith("even: don't know (")
    assert last.startswith("Learnt from 10 scenarios (toy)")


def test_the_api_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    split = nd.partition(nd.load("digits"), "iid", clients=5)
    own = {key: value for key, value in split.statistics.items() if key in MEASURES}
    bases(monkeypatch, alike({**own, "share": 0.6}))
    known = nd.advise(split, participation=0.6)
    assert (known.method, known.reason) == ("scaffold", "")
    assert known.table.to_dict("records")[0] == {
        "method": "scaffold",
        "gain": 4.0,
        "low": 4.0,
        "high": 4.0,
    }
    unknown = nd.advise(split)
    assert (
        unknown.method is None
        and unknown.table.empty
        and "fraction of clients per round 1" in unknown.reason
    )
    assert repr(unknown) == f"advice: don't know ({unknown.reason})"
    with pytest.raises(
        UserError, match="participation=0 is refused; allowed: a number above 0, to 1"
    ):
        nd.advise(split, participation=0)
    with pytest.raises(UserError, match="advise: data is of type"):
        nd.advise("digits")  # type: ignore[arg-type]  # the mistake


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two recipes on three seeds; scaffold ends 10, 12 and 11 points above fedavg: 11 ± 1."""
    write_params(tmp_path, ["fedavg", "scaffold"], (0, 1, 2))
    for recipe, finals in {"fedavg": (0.78, 0.80, 0.82), "scaffold": (0.88, 0.92, 0.93)}.items():
        for seed, final in enumerate(finals):
            write_run(tmp_path, recipe, seed, [0.1] + [final] * 5)
    return tmp_path


def partitions(root: Path) -> None:
    """Statistics of a scenario that is `MEASURED`, but for its share: 2 of 4 clients take part."""
    for seed in (0, 1, 2):
        folder = root / "partitions" / f"skew-{seed}"
        folder.mkdir(parents=True)
        found = ", ".join(
            f'"{name}": {value}' for name, value in MEASURED.items() if name != "share"
        )
        (folder / "statistics.json").write_text(f"{{{found}}}")


def row(root: Path) -> list[str]:
    settings = config.load(root)
    found = summary.scenario("skew", results.read(root), settings.recipe_names, settings.seeds)
    assert found is not None
    (_, cells) = section.section(root, settings, [found])["table"]
    return list(cells)


@pytest.mark.parametrize(
    ("method", "gain", "cells"),
    [
        (
            "scaffold",
            4.0,
            ["skew", "scaffold", "+4.0", "+4.0 to +4.0", "+11.0 ± 1.0", "scaffold +11.0 ± 1.0"],
        ),
        (
            "feddyn",
            2.5,
            ["skew", "feddyn", "+2.5", "+2.5 to +2.5", "not run", "scaffold +11.0 ± 1.0"],
        ),
        (
            "feddyn",
            -2.0,
            ["skew", "fedavg", "+0.0", "+0.0 to +0.0", "+0.0", "scaffold +11.0 ± 1.0"],
        ),
    ],
)
def test_the_report_shows_the_advice_beside_what_was_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch, method: str, gain: float, cells: list[str]
) -> None:
    partitions(root)
    bases(monkeypatch, alike(MEASURED, method, gain))
    assert row(root) == cells


def test_the_report_says_what_the_advisor_does_not_know(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases(monkeypatch, alike(MEASURED | {"classes": 10.0}))
    assert row(root) == ["skew", "don't know", "-", "-", "-", "scaffold +11.0 ± 1.0"]
    partitions(root)
    report.write(root)
    pages = [
        (root / "report" / name).read_text().replace("&#39;", "'")
        for name in ("report.md", "report.html")
    ]
    for page in pages:
        assert "What the advisor said before training" in page and "don't know" in page
        assert (
            "skew: classes 2, the base has 10." in page and "Learnt from 10 scenarios (toy)" in page
        )
