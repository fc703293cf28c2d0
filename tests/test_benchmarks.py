"""The benchmark suite: that it runs, that it notices who does nothing, and its few formulas by
hand."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import (
    agreement,
    bare,
    everything,
    ours,
    processes,
    repeatability,
    report,
)
from benchmarks.__main__ import measure_engines
from benchmarks.comparison import compare, row
from benchmarks.engines import PEERS, Engine
from benchmarks.peers import harness
from benchmarks.processes import FailedError, in_turns
from benchmarks.workloads import WORKLOADS, Workload, write_job
from fedml_noniid.engines.plan import initial_model

NOTHING: dict[str, Any] = {
    "quick": False,
    "repetitions": 1,
    "skipped": [],
    "methods": {},
    "repeatability": [],
}
NOTING = """
from benchmarks.peers.harness import Meter, main

def measure(job, argument):
    file, name = argument.split(":")
    meter = Meter()
    for t in range(1, len(job.cohorts) + 1):
        meter.begin()
        with open(file, "a") as out:
            out.write(f"{name}{t} ")
        meter.end()
    found = meter.measured(job.warm)
    return found | {"wall": [1.0 for _ in found["wall"]]}, job.weights

if __name__ == "__main__":
    main(measure)
"""
SMALL = replace(WORKLOADS["mlp"].quick(), clients=4, cohort=3, per_client=20)


def job_of(workload: Workload, folder: Path) -> harness.Job:
    path = folder / "job.npz"
    write_job(workload, path)
    return harness.read_job(path)


def idle(job: harness.Job) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """An engine that does nothing, at great speed."""
    return {"wall": [1e-9] * 2, "cpu": [1e-9] * 2, "peak_mb": 1.0, "note": ""}, job.weights


def here(engine: Engine, path: Path) -> Any:
    """Measures without a process of its own, which would import torch again."""
    return importlib.import_module(engine.module).measure(harness.read_job(path), engine.argument)


@pytest.mark.slow
def test_quick_run_writes_all_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines of part 1 are processes, the rest runs here."""
    for part in (everything, repeatability):
        monkeypatch.setattr(part, "measure", here)
    for variable in PEERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(everything, "variants", lambda _: [])
    monkeypatch.setattr(repeatability, "WORKERS", (1, 2))
    measure_engines(quick=True, only="mlp", repetitions=2, to=tmp_path)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert set(found) == {*NOTHING, "workloads", "machine"}
    rows = {one["engine"]: one for one in found["workloads"]["mlp"]["rows"]}
    assert list(rows) == ["bare loop", "ours, sequential", "ours, vectorized", "ours, two workers"]
    assert not any(one["problem"] for one in rows.values())
    assert all(one["ratio_cpu"] > 0 and one["peak_mb"] > 0 for one in rows.values())
    assert rows["ours, two workers"]["checksum"] == rows["ours, sequential"]["checksum"]
    assert rows["ours, two workers"]["peak_mb"] > rows["ours, sequential"]["peak_mb"]
    assert set(found["methods"]) == set(everything.FEW_METHODS)
    assert len(found["skipped"]) == 1 + len(PEERS)
    (one,) = found["repeatability"]
    assert [one[question]["said"] for question in ("twice", "workers")] == [repeatability.SAME] * 2
    assert set(one["workers"]["sha256"]) == {"1", "2"}
    assert capsys.readouterr().out.strip() == (tmp_path / "bench.md").read_text().strip()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"bench.json", "bench.md", "bench.png"}


@pytest.mark.parametrize("same_order", [True, False])
def test_who_does_nothing_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_order: bool
) -> None:
    lazy = Engine("lazy", "nowhere", same_order=same_order)

    def in_turns(given: list[tuple[Engine, Path]], _: int) -> list[Any]:
        (base, path), _ = given
        return [here(base, path), idle(harness.read_job(path))]

    monkeypatch.setattr("benchmarks.comparison.in_turns", in_turns)
    limit, lazily = compare(SMALL, [lazy], 2, tmp_path, lambda _: None)["rows"]
    assert limit["problem"] == ""
    assert lazily["problem"].startswith("did not do the work")


def test_half_the_work_is_not_the_work(tmp_path: Path) -> None:
    job = job_of(SMALL, tmp_path)
    _, whole = bare.measure(job, "-")
    half = replace(job, batches=job.batches[:, :, ::2])
    _, less = bare.measure(half, "-")
    assert agreement.complaint(job, whole, whole, same_order=True) == ""
    assert "off by" in agreement.complaint(job, whole, less, same_order=True)
    assert "final loss" in agreement.complaint(job, whole, less, same_order=False)
    assert "missing" in agreement.complaint(job, whole, {}, same_order=True)


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "workers:2"])
def test_our_engines_do_what_the_job_says(tmp_path: Path, engine: str) -> None:
    job = job_of(replace(SMALL, epochs=2), tmp_path)
    assert job.batches.shape == (3, 3, 4, 10)
    _, expected = bare.measure(job, "-")
    found, weights = ours.measure(job, engine)
    assert agreement.distance(weights, expected) < 1e-4 * agreement.distance(job.weights, expected)
    assert len(found["wall"]) == len(found["cpu"]) == 2


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_modules_are_our_networks(name: str, tmp_path: Path) -> None:
    workload = replace(
        WORKLOADS[name].quick(), clients=1, cohort=1, per_client=4, batch=4, warm=0, rounds=1
    )
    job = job_of(workload, tmp_path)
    params, _ = initial_model(ours.network(workload), 0, job.x)
    named = dict(job.module().named_parameters())
    assert set(named) == set(params)
    assert all(torch.equal(named[key], params[key]) for key in params)
    if name != "resnet18":  # batch norms of four samples magnify rounding
        _, weights = ours.measure(job, "sequential")
        _, expected = bare.measure(job, "-")
        assert agreement.complaint(job, expected, weights, same_order=True) == ""


def test_row_by_hand() -> None:
    proof = {"loss": 1.0, "checksum": "c", "note": "", "problem": "", "peak_mb": 3.0}
    runs = [
        {"wall": [1.0, 2.0], "cpu": [1.0, 1.0], "bare_wall": [4.0, 4.0], "bare_cpu": [2.0, 4.0]}
        | proof,
        {"wall": [9.0], "cpu": [3.0], "bare_wall": [27.0], "bare_cpu": [15.0]}
        | proof,  # a slow minute for both
    ]
    found = row(SMALL, "some", runs)
    assert SMALL.steps == 6
    assert (found["wall_s"], found["cpu_s"]) == (2.0, 1.0)
    assert (found["steps_per_wall_s"], found["steps_per_cpu_s"]) == (3.0, 6.0)
    assert (found["ratio_wall"], found["ratio_cpu"]) == (3.0, 4.0)  # of 4, 2, 3; of 2, 4, 5


def test_the_tables_of_the_committed_page_are_those_of_its_numbers() -> None:
    """The page has more: it was made when the benchmark also killed and deployed."""
    numbers = json.loads((report.RESULTS / "bench.json").read_text()) | {"repeatability": []}
    made = [line for line in report.of_bench(numbers).splitlines() if line.startswith("|")]
    committed = (report.RESULTS / "bench.md").read_text().splitlines()
    assert len(made) > 90 and set(made) <= set(committed)


@pytest.mark.slow
def test_rounds_take_turns(tmp_path: Path) -> None:
    """Two engines that note what they do in one file, and one that fails at once."""
    (tmp_path / "noting.py").write_text(NOTING)
    write_job(replace(SMALL, rounds=3), tmp_path / "job.npz")
    note = tmp_path / "note"
    engines = [
        Engine("broken", "no_such"),
        Engine("first", "noting", f"{note}:a"),
        Engine("second", "noting", f"{note}:b"),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(processes.ENVIRONMENT, "PYTHONPATH", f"{processes.ROOT}:{tmp_path}")
        none, *found = in_turns([(engine, tmp_path / "job.npz") for engine in engines], 2)
    assert len(found) == 2
    for outcome in found:
        assert not isinstance(outcome, FailedError)
        assert outcome[0]["wall"] == [1.0] * 3
    assert note.read_text().split() == ["a1", "a2", "b1", "b2", "a3", "a4", "b3", "b4"]
    assert isinstance(none, FailedError) and "no_such" in str(none)


def test_the_work_of_processes_that_another_has_started_is_measured() -> None:
    """A fork server lives on when the processes that it has started are through."""
    burn = "import time; [0 for _ in iter(lambda: time.process_time() < 0.5, False)]"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    before = harness.cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", f"{start}; print('through', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == b"through\n"
        assert harness.cpu_seconds() - before >= 0.45, "in ticks of 10 ms"
        server.communicate(b"\n")
