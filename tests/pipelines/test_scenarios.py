"""The table statistic x scenario: by hand-made statistics, and of a partition that the stages
made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import replace_folder
from fedml_noniid.pipelines.experiment import cache, config
from fedml_noniid.pipelines.verbs import scenarios
from tests.pipelines.small import PARAMS

TWO = PARAMS.replace("scenario_names: [skewed]", "scenario_names: [skewed, even]").replace(
    "scenarios:\n", "scenarios:\n  even: {partition: iid, clients: 4, noise: {sigma: 0.3}}\n"
)
STATISTICS = {
    "clients": 4,
    "classes": 10,
    "samples": 1000,
    "size_min": 100,
    "size_mean": 250.0,
    "size_max": 400,
    "size_gini": 0.25,
    "classes_per_client_mean": 5.5,
    "entropy_mean": 1.5,
    "entropy_min": 0.5,
    "label_distance_mean": 0.5,
    "label_distance_max": 0.75,
    "label_hellinger_mean": 0.4,
    "samples_left_out": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two scenarios and three seeds in params.yaml."""
    (tmp_path / "params.yaml").write_text(TWO.replace("seeds: [0]", "seeds: [0, 1, 2]"))
    return tmp_path


def shown(root: Path) -> str:
    """What `noniid partition` shows once the partitions are made."""
    return scenarios.markdown(*scenarios.read(root, config.load(root)))


def write(root: Path, name: str, **changes: object) -> None:
    files = {"statistics.json": json.dumps({**STATISTICS, **changes}).encode()}
    replace_folder(root / "partitions" / name, cache.with_receipt("", files))


def cells(markdown: str) -> list[dict[str, str]]:
    """The columns of the table, by the titles of its lines."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in markdown.splitlines()
        if line.startswith("|")
    ]
    assert all(set(cell) <= {"-", ":"} for cell in lines.pop(1))
    titles, *columns = zip(*lines, strict=True)
    return [dict(zip(titles, column, strict=True)) for column in columns]


def test_mean_and_deviation_over_seeds_by_hand(folder: Path) -> None:
    """Sizes 100, 130, 160: mean 130, deviations -30, 0, 30, so sqrt(1800 / 2) = 30.

    Two seeds of the other: 2 and 4.
    """
    for seed, least in enumerate((100, 130, 160)):
        write(folder, f"skewed-{seed}", size_min=least, label_distance_mean=0.4 + seed / 10)
    for seed in (0, 2):
        write(
            folder,
            f"even-{seed}",
            samples=12_345,
            size_min=2 + seed,
            noise_mean=0.05,
            noise_max=0.1,
        )
    said = shown(folder)
    skewed, even = cells(said)
    wanted = {
        "statistic": "skewed",
        "partition": "dirichlet (alpha 0.5)",
        "smallest": "130 ± 30",
        "label distance": "0.500 ± 0.100",
        "clients": "4",
        "mean size": "250.0",
        "Gini of sizes": "0.250",
        "left out": "0",
        "classes per client": "5.50",
        "entropy, bits": "1.50",
        "most noise": "",
    }
    assert wanted.items() <= skewed.items()
    wanted = {
        "partition": "iid, noise (sigma 0.3, form level)",
        "samples": "12,345",
        "smallest": "3 ± 1",
        "mean noise": "0.050",
        "most noise": "0.100",
    }
    assert wanted.items() <= even.items()
    assert "Not made, so not in the table: even-1." in said


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        # By chance sqrt(9 / (2 pi 250)) = 0.0757; sqrt(0.0757^2 + 0.1^2) = 0.1254.
        (
            "skewed",
            {"label_distance_mean": 0.125, "size_gini": 0.2, "feature_shift": 0.05},
            "skewed: your clients are alike (label distance 0.12; by chance alone about 0.08): "
            "methods for non-IID data can gain little.",
        ),
        (
            "skewed",
            {"label_distance_mean": 0.126, "feature_shift": 0.06},
            "skewed: your clients are uneven in labels (label distance 0.13; by chance alone about "
            "0.08), sizes (100 to 400 samples, Gini 0.25), features (shift 0.06).",
        ),
        (
            "even",
            {"label_distance_mean": 0.05, "size_gini": 0.0},
            "even: your clients are uneven in noise (sigma 0.3, form level); their labels are "
            "alike (label distance 0.05; by chance alone about 0.08).",
        ),
    ],
    ids=["alike", "uneven", "noise"],
)
def test_a_sentence_says_how_uneven_the_clients_are(
    folder: Path, name: str, changes: dict[str, float], sentence: str
) -> None:
    for seed in (0, 1):
        write(folder, f"{name}-{seed}", **changes)
    settings = config.load(folder)
    assert scenarios.in_words(scenarios.read(folder, settings)[0], settings) == [sentence]


def test_a_damaged_file_is_refused(folder: Path) -> None:
    write(folder, "skewed-0")
    (folder / "partitions" / "skewed-0" / "statistics.json").write_text("{}")
    with pytest.raises(UserError, match=r"skewed-0/statistics\.json: is missing or was changed"):
        shown(folder)
