"""The benchmark of personalised methods: its splits, its numbers by hand, and a small run."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import personalised


def test_each_client_has_three_splits_of_its_own(tmp_path: Path) -> None:
    """No sample is in two; a turned client sees all its images turned."""
    name = "digits, rotated"
    x, y = personalised.samples_of(name, tmp_path)
    parts = {part: personalised.split(name, tmp_path, 0, part) for part in ("validation", "test")}
    one, other = parts.values()
    assert torch.equal(one.train.x, other.train.x)
    assert len(x) == len(y) == 1797
    assert sum(len(test.y) for of in parts.values() for test in of.tests) + len(one.train.y) == 1797
    known = {image.numpy().tobytes() for image in x}
    for k, positions in enumerate(one.clients):
        seen = [one.train.x[positions], one.tests[k].x, other.tests[k].x]
        back = [torch.rot90(image, -(k % 4), (-2, -1)) for image in torch.cat(seen)]
        found = {image.contiguous().numpy().tobytes() for image in back}
        assert found <= known
        known -= found
    assert len(known) < 10, "some digits are the same image"


def test_means_deciles_and_intervals_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1; t(2) = 4.303: half 0.2484."""
    assert personalised.worst_decile([0.9, 0.2, 0.4] + [1.0] * 17) == pytest.approx(0.3)
    runs = [
        {"scenario": scenario, "method": method, "lr": 0.1, "seed": seed}
        | {"mean": 0.5 + (seed / 10 if method == "Ditto" else 0), "worst_decile": 0.25}
        for scenario in personalised.SCENARIOS
        for method in personalised.METHODS
        for seed in (1, 2, 3)
    ]
    rows = personalised.summary(runs)
    assert len(rows) == len(personalised.SCENARIOS) * len(personalised.METHODS)
    ditto = next(row for row in rows if row["method"] == "Ditto")
    found = [ditto[f"mean_{key}"] for key in ("difference", "low", "high")]
    np.testing.assert_allclose(found, [0.2, -0.0484, 0.4484], atol=1e-4)
    assert personalised.words(ditto, "mean") == "+20.0 [-4.8, +44.8]"
    assert personalised.words(ditto, "worst_decile") == "+0.0 on each seed"


def test_a_small_run_writes_all_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "digits, rotated"
    monkeypatch.setattr(personalised, "SCENARIOS", {name: personalised.SCENARIOS[name]})
    methods = (personalised.CONTROL, "FedAvg", "Ditto")
    chosen = {method: personalised.METHODS[method] for method in methods}
    for key, value in {
        "METHODS": chosen,
        "ROUNDS": 1,
        "EVERY": 1,
        "RATES": (0.1, 1e30),
        "TUNING": range(100, 101),
        "SEEDS": range(1000, 1002),
    }.items():
        monkeypatch.setattr(personalised, key, value)
    folder, work = tmp_path / "docs" / "results", tmp_path / "work"
    folder.mkdir(parents=True)
    work.mkdir()
    personalised.write(tmp_path, work, tmp_path)
    with (folder / "personalised-runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [row["lr"] for row in runs] == ["0.1"] * 6, "what diverges is not chosen"
    page = (folder / "personalised.md").read_text()
    assert all(f"| {method} | 0.1 |" in page for method in methods)
    made = {path: path.stat().st_mtime_ns for path in work.iterdir()}
    assert len(made) == 3 * (2 + 2)
    personalised.write(tmp_path, work, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in work.iterdir()} == made
