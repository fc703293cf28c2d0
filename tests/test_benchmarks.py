"""The benchmark suite: that it runs, that it notices who does nothing, and its few formulas by
hand."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
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
    engines,
    everything,
    ours,
    processes,
    repeatability,
    report,
)
from benchmarks.__main__ import measure_engines
from benchmarks.comparison import compare, row
from benchmarks.engines import PEERS, Engine, others
from benchmarks.machine import Watch
from benchmarks.peers import harness
from benchmarks.processes import FailedError, in_turns, measure
from benchmarks.statistics import quartiles, ratio
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


def ours_of(name: str) -> list[Engine]:
    return engines.ours(WORKLOADS[name])


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
@pytest.mark.parametrize("epochs", [1, 2])
def test_our_engines_do_what_the_job_says(tmp_path: Path, engine: str, epochs: int) -> None:
    job = job_of(replace(SMALL, epochs=epochs), tmp_path)
    assert job.batches.shape == (3, 3, 2 * epochs, 10)
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


def test_statistics_by_hand() -> None:
    assert quartiles([5, 1, 3]) == (2, 3, 4)
    assert quartiles([4, 1, 2, 3]) == (1.5, 2.5, 3.5)
    # Repetitions that are slow for both: ratios 2, 2, 3.
    assert ratio([2, 20, 6], [1, 10, 2]) == 2


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


def test_two_processes_and_one_by_hand() -> None:
    """Ratios of neighbouring rounds: 2, 2, 1. A workload without both has no line."""
    walls = {"ours, sequential": [[2.0, 20.0], [2.0]], "ours, two workers": [[1.0, 10.0], [2.0]]}
    rows = [
        {"engine": engine, "wall_s": 1.0, "repetitions": [{"wall": wall} for wall in of]}
        for engine, of in walls.items()
    ]
    (found,) = report.pairs({"some": {"rows": rows}, "other": {"rows": rows[:1]}})
    assert (found["low"], found["middle"], found["high"]) == (1.5, 2.0, 2.0)


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


@pytest.mark.slow
def test_who_is_killed_while_it_waits_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noting.py").write_text(NOTING)
    write_job(SMALL, tmp_path / "job.npz")
    monkeypatch.setitem(processes.ENVIRONMENT, "PYTHONPATH", f"{processes.ROOT}:{tmp_path}")
    one = processes.Running(
        Engine("one", "noting", f"{tmp_path / 'note'}:a"), tmp_path / "job.npz", in_turns=True
    )
    assert one.ready
    one._process.kill()
    one._process.wait()
    one.turn()
    assert not one.ready
    with pytest.raises(FailedError, match="ended with -9"):
        one.outcome()


def test_peers_are_named_by_the_user() -> None:
    found, skipped = others({"PFL": "/some/python"}, quick=True)
    assert {one.python for one in found} == {"/some/python"}
    assert [one.name for one in found] == ["pfl-research", "pfl-research, two processes"]
    assert [line.partition(":")[0] for line in skipped] == ["FedML", "Flower", "FedLab", "BlazeFL"]
    assert "(FLOWER=/path/python python -m benchmarks bench)" in skipped[1]


@pytest.mark.parametrize("variable", PEERS)
def test_peers_do_the_work_of_the_job(variable: str, tmp_path: Path) -> None:
    """Each way of a simulator, on a job with several epochs and, if it can be asked, with another
    number of workers."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter that has this simulator")
    ways, _ = others({variable: os.environ[variable]}, quick=True)
    more = [replace(one.with_workers(1), name=f"{one.name}, one") for one in ways if one.parallel]
    found = compare(replace(SMALL, cohort=4, epochs=2), [*ways, *more], 1, tmp_path, lambda _: None)
    assert {row["engine"]: row["problem"] for row in found["rows"][1:]} == {
        one.name: "" for one in [*ways, *more]
    }


def test_engines_know_their_workers() -> None:
    named = (
        [Engine(*way) for ways in PEERS.values() for way in ways]
        + ours_of("mlp")
        + ours_of("cifar_cnn")
    )
    assert all(one.parallel == ("two " in one.name) for one in named)
    two = [one.with_workers(2) for one in named if one.parallel]
    assert two == [one for one in named if one.parallel]  # reports say two
    assert Engine("some", "some", "threads:12").with_workers(4).argument == "threads:4"


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="No such file"):
        measure(Engine("missing", "benchmarks.bare", python="/nowhere/python"), tmp_path)


PARALLEL, ALONE = Engine("peer, two threads", "peer", "threads:2"), Engine("peer", "peer")
CASES: dict[
    str, tuple[Engine, list[float | str], list[str]]
] = {  # -> engine, weight of each run, two answers
    "always the same": (PARALLEL, [1, 1, 1, 1], ["same", "same"]),
    "by the number of workers": (PARALLEL, [1, 1, 3, 4], ["same", "3 results of 3 runs"]),
    "never the same": (PARALLEL, [1, 2, 3, 4], ["2 results of 2 runs", "3 results of 3 runs"]),
    "fails with four": (PARALLEL, [1, 1, 1, "no room"], ["same", "failed: no room"]),
    "fails at once": (PARALLEL, ["no room"], ["failed: no room", "not tried"]),
    "one process": (ALONE, [1, 1], ["same", "one process"]),
    "one process, draws": (ALONE, [1, 2], ["2 results of 2 runs", "one process"]),
}


@pytest.mark.parametrize("case", CASES)
def test_repeated_runs_are_compared(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, weights, expected = CASES[case]
    made: list[str] = []

    def run(of: Engine, _: Path) -> Any:
        value = weights[len(made)]
        made.append(of.argument)
        if isinstance(value, str):
            raise FailedError(value)
        return {"note": "peer 1.0"}, {"w": torch.tensor([float(value)])}

    monkeypatch.setattr(repeatability, "measure", run)
    (found,) = repeatability.rows(SMALL, [engine], tmp_path, lambda _: None)
    assert found["engine"] == ("peer, threads" if engine.parallel else "peer")
    assert [found[question]["said"] for question in ("twice", "workers")] == expected
    counts = ["threads:2", "threads:2", "threads:1", "threads:4"] if engine.parallel else ["-", "-"]
    assert made == counts[: len(weights)]
    failed = {"what": "", "steps": 1, "rows": [{"engine": "peer", "problem": "ended with 1"}]}
    measured = {"workloads": {"mlp": failed}, "repeatability": [found]}
    text = report.of_bench(NOTHING | measured | {"machine": Watch().facts()})
    assert "ended with 1" in text and all(one in text for one in expected)


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


def test_children_are_measured() -> None:
    before = harness.cpu_seconds()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        while sum(os.times()[:2]) < 0.2:
            pass
        os.write(writes, b"done")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reads, 4) == b"done"
        assert child in harness.children()
        assert harness.cpu_seconds() - before > 0.1
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
