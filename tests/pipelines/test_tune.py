"""Grids: which points they have, and that the validation split alone decides."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.pipelines.experiment import kept
from fedml_noniid.pipelines.papers import tune
from fedml_noniid.pipelines.papers.studies import PAPER_FILES, Study, of_paper

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

PARAMS = """\
study_names: [digits]
studies:
  digits:
    data: {name: digits, validation: 0, public: 0}
    scenarios: {skewed: {partition: dirichlet, clients: 3, alpha: 1}}
    recipes: {fedavg: {}, pull: {recipe: fedprox, fedprox: {mu: 0.5}}}
    seeds: [0]
    train: {model: mlp, model_options: {hidden: 4}, rounds: 1, epochs: 1, batch_size: 50, lr: 0.1}
grids:
  digits:
    train: {lr: [0.05, 0.2]}
    recipes: {fedavg: {}, pull: {fedprox: {mu: [0, 0.1, 1]}}}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the parameters of one paper."""
    (tmp_path / PAPER_FILES / "ccn").mkdir(parents=True)
    (tmp_path / PAPER_FILES / "ccn" / "params.yaml").write_text(PARAMS)
    return tmp_path


def tuned(root: Path, on: str) -> int:
    return tune.main(["--paper", "ccn", "--study", "digits", "--size", "smoke", "--on", on, "--root", str(root)])


def digits(root: Path) -> Study:
    return of_paper("ccn", "smoke", root)["digits"]


def test_the_points_of_a_grid(repository: Path) -> None:
    """Two learning rates, for each FedAvg as it is and three mu; what is not tuned stays as it was."""
    grid: dict[str, Any] = {
        "train": {"lr": [0.05, 0.2]},
        "recipes": {"fedavg": {}, "pull": {"fedprox": {"mu": [0, 0.1, 1]}}},
    }
    points = list(tune.expanded(digits(repository), grid))
    assert [point.settings for point in points[:4]] == [
        "lr 0.05", "fedprox.mu 0, lr 0.05", "fedprox.mu 0.1, lr 0.05", "fedprox.mu 1, lr 0.05",
    ]  # fmt: skip
    assert [point.study.content["train"]["lr"] for point in points] == [0.05] * 4 + [0.2] * 4
    assert len({point.study.folder for point in points}) == 2
    content = points[-1].study.content
    assert content["recipes"][points[-1].entry] == {"recipe": "fedprox", "fedprox": {"mu": 1}}
    assert content["data"]["validation"] == tune.VALIDATION and content["train"]["rounds"] == 1
    assert digits(repository).content["recipes"]["pull"]["fedprox"] == {"mu": 0.5}, "left as it was"


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"trian": {}}, "did you mean 'train'"),
        ({"recipes": {"pul": {}}}, "did you mean 'pull'"),
        ({"train": {"lr": 0.1}}, "a list of values"),
        ({"recipes": {"pull": {"fedprox": {"mu": []}}}}, "a list of values"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(repository: Path, grid: dict[str, Any], said: str) -> None:
    with pytest.raises(tune.UserError, match=re.escape(said)):
        list(tune.expanded(digits(repository), grid))


def test_validation_decides_and_nothing_is_trained_twice(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuned(repository, "validation") == 0
    text = (repository / "papers/tune/ccn-smoke/digits-validation.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[1] == "skewed"]
    for recipe, n in (("fedavg", 2), ("pull", 6)):
        found = [float(row[3]) for row in rows if row[0] == recipe]
        assert len(found) == n and found == sorted(found, reverse=True)
        assert [row[4] for row in rows if row[0] == recipe] == ["best"] + [""] * (n - 1)
    items = {path: path.stat().st_mtime_ns for path in (repository / kept.STORE).glob("*/run.json")}
    assert len(items) == 8
    shutil.rmtree(repository / "papers")
    capsys.readouterr()
    assert tuned(repository, "test") == 0
    assert {path: path.stat().st_mtime_ns for path in (repository / kept.STORE).glob("*/run.json")} == items
    said = capsys.readouterr().out
    assert "CHOSEN ON THE TEST SET: a leak" in said and "CHOSEN" not in text


def test_a_study_without_a_grid_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = repository / PAPER_FILES / "ccn" / "params.yaml"
    path.write_text(PARAMS[: PARAMS.index("grids:")])
    assert tuned(repository, "validation") == 2
    assert "study with a grid 'digits' is unknown; allowed: none" in capsys.readouterr().err
