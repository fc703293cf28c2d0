"""MLflow store: created once, movable, rebuilt from files, never logging anything twice."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines import store as files
from pipelines import tracking, ui
from plugins.core.errors import UserError

KEYS = ("iid-fedavg-0", "iid-fedavg-1", "iid-fnr-0")
ROUNDS = 3
REPOSITORY = Path(tracking.__file__).parents[1]
# mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def finished(root: Path, key: str, run_id: str = "lost", rounds: int = ROUNDS) -> Path:
    """Writes the files of one finished train item."""
    scenario, recipe, seed = key.split("-")
    run, evaluation, partition = (
        root / part for part in (f"runs/{key}", f"evaluation/{key}", f"partitions/iid-{seed}")
    )
    for folder in (run, evaluation, partition):
        folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{t},{t / 10},{'' if t == 1 else 0.5},100,50,2.0" for t in range(1, rounds + 1)]
    header = "round,test_accuracy,validation_accuracy,bytes_up,bytes_down,seconds"
    (run / "rounds.csv").write_text("\n".join([header, *lines]) + "\n")
    (run / "model.safetensors").write_bytes(b"weights of " + key.encode())
    about = {"scenario": scenario, "recipe": recipe, "composition": recipe, "seed": int(seed)}
    tags = {"fingerprint": f"print-{key}", "git_commit": "c0ffee", "stage": f"train@{key}", "data_hash": "d"}
    results = {"params": {"lr": 0.1, "rounds": rounds}, "tags": tags, "final": {"accuracy": rounds / 10}}
    (run / "run.json").write_text(json.dumps(about | results | {"weights_sha256": "abc", "notes": []}))
    (run / "run_id.json").write_text(json.dumps({"run_id": run_id, "experiment_id": "1", "experiment": "toy"}))
    (evaluation / "metrics.json").write_text(json.dumps({"worst_client": 0.25, "weights_sha256": "abc"}))
    (evaluation / "per_client.csv").write_text("client,samples,accuracy\n0,5,0.25\n1,5,\n")
    (partition / "heatmap.png").write_bytes(b"picture")
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, made once (its migrations take seconds), by two processes that both want to create it."""
    root = tmp_path_factory.mktemp("store")
    code = "import sys; from pathlib import Path; from pipelines import tracking; tracking.uri(Path(sys.argv[1]))"
    other = subprocess.Popen([sys.executable, "-c", code, str(root)], cwd=REPOSITORY)
    tracking.uri(root)
    assert other.wait() == 0
    return root


@pytest.fixture
def root(store: Path, tmp_path: Path) -> Path:
    """A repository with an empty database of its own. It has been copied, so its paths must be rewritten first."""
    shutil.copytree(store / "mlruns", tmp_path / "mlruns")
    (tmp_path / "params.yaml").write_text("experiment: toy\n")
    return tmp_path


def runs(root: Path) -> list[Any]:
    client = tracking._client(root)
    return tracking._search(client, [e.experiment_id for e in client.search_experiments()])


def stored_paths(root: Path) -> list[str]:
    database = sqlite3.connect(root / "mlruns" / "mlflow.db")
    found = [row[0] for table, column in files.PATHS for row in database.execute(f"SELECT {column} FROM {table}")]
    database.close()
    return found


def test_the_store_lies_under_the_root_and_a_copied_one_gets_its_own_paths(root: Path) -> None:
    assert not all(path.startswith(root.as_uri()) for path in stored_paths(root))  # still those of the original
    assert tracking.uri(root) == f"sqlite:///{root}/mlruns/mlflow.db"
    assert stored_paths(root) == [f"{root.as_uri()}/mlruns/artifacts/0"]


def test_two_processes_that_create_the_store_at_once_make_one_whole_store(store: Path) -> None:
    assert sorted(path.name for path in (store / "mlruns").iterdir()) == [".lock", "mlflow.db"]
    assert stored_paths(store) == [f"{store.as_uri()}/mlruns/artifacts/0"]
    assert [e.name for e in tracking._client(store).search_experiments()] == ["Default"]


def test_importing_tracking_does_not_import_mlflow() -> None:
    code = "import sys; import pipelines.tracking, pipelines.ui; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_a_run_has_params_tags_metrics_and_files(root: Path) -> None:
    folder = finished(root, KEYS[0])
    run = tracking.start(root, "toy", KEYS[0], {"lr": 0.1}, {"recipe": "fedavg", "git_commit": "c0ffee"})
    run.log_rounds([{"round": 1, "test_accuracy": 0.5, "validation_accuracy": math.nan, "seconds": 2.0}])
    run.finish(final={"accuracy": 0.5}, artifacts=[folder / "rounds.csv", root / "evaluation" / KEYS[0]])
    found = tracking._client(root).get_run(run.run_id)
    assert found.info.status == "FINISHED" and found.info.run_name == KEYS[0]
    assert found.data.params == {"lr": "0.1"}
    assert found.data.metrics == {"test_accuracy": 0.5, "seconds": 2.0, "final/accuracy": 0.5}  # NaN is not logged
    assert found.data.tags["recipe"] == "fedavg" and found.data.tags["mlflow.source.git.commit"] == "c0ffee"
    artifacts = root / "mlruns" / "artifacts" / "toy" / run.run_id / "artifacts"
    files = sorted(str(path.relative_to(artifacts)) for path in artifacts.rglob("*.*"))
    assert files == ["evaluation/metrics.json", "evaluation/per_client.csv", "rounds.csv"]


def test_rounds_are_logged_in_batches_of_at_most_1000_metrics(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracking.start(root, "toy", "many", {f"p{i}": i for i in range(150)}, {})
    sizes, original = [], run._client.log_batch

    def log_batch(run_id: str, metrics: list[Any]) -> None:
        sizes.append(len(metrics))
        original(run_id, metrics)

    monkeypatch.setattr(run._client, "log_batch", log_batch)
    run.log_rounds([{"round": t} | {f"m{i}": float(t) for i in range(9)} for t in range(1, 251)])
    assert sizes == [1000, 1000, 250]
    assert len(tracking._client(root).get_run(run.run_id).data.params) == 150


def test_a_resumed_run_logs_no_round_twice(root: Path) -> None:
    rows = [{"round": t, "test_accuracy": t / 10, "test_loss": math.nan, "seconds": 1.0} for t in range(1, 5)]
    first = tracking.start(root, "toy", "resumed", {"lr": 0.1}, {"fingerprint": "x"})
    first.log_rounds(rows[:3])
    first.log_rounds(rows[:3])
    again = tracking.start(root, "toy", "resumed", {"lr": 0.1}, {"fingerprint": "x"}, run_id=first.run_id)
    assert again.run_id == first.run_id
    again.log_rounds(rows[1:])  # goes on from a checkpoint after round 1
    history = tracking._client(root).get_metric_history(first.run_id, "test_accuracy")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    stamps = [point.timestamp for point in history]
    assert [later - earlier for earlier, later in itertools.pairwise(stamps)] == [1000, 1000, 1000]


def test_an_attempt_whose_id_is_unknown_is_found_by_its_fingerprint_unless_it_finished(root: Path) -> None:
    killed = tracking.start(root, "toy", "k", {"lr": 0.1}, {"fingerprint": "x"})
    assert tracking.start(root, "toy", "k", {"lr": 0.1}, {"fingerprint": "x"}).run_id == killed.run_id
    assert tracking.start(root, "toy", "k", {"lr": 0.2}, {"fingerprint": "y"}).run_id != killed.run_id
    killed.fail()
    resumed = tracking.start(root, "toy", "k", {"lr": 0.1}, {"fingerprint": "x"}, run_id="unknown")
    assert resumed.run_id == killed.run_id
    resumed.finish(final={}, artifacts=[])
    assert tracking.start(root, "toy", "k", {"lr": 0.1}, {"fingerprint": "x"}).run_id != killed.run_id


def test_a_run_id_with_other_parameters_starts_a_new_run(root: Path) -> None:
    first = tracking.start(root, "toy", "k", {"lr": 0.1}, {})
    assert tracking.start(root, "toy", "k", {"lr": 0.2}, {}, run_id=first.run_id).run_id != first.run_id


def test_sync_rebuilds_every_finished_run_exactly_once(root: Path) -> None:
    before = {key: finished(root, key).joinpath("run_id.json").read_bytes() for key in KEYS}
    (root / "runs" / "iid-unfinished-0").mkdir()
    assert tracking.sync(root) == sorted(KEYS)
    assert tracking.sync(root) == []
    found = {run.info.run_name: run for run in runs(root)}
    assert sorted(found) == sorted(KEYS) and len(runs(root)) == len(KEYS)
    run = found["iid-fnr-0"]
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "lr": "0.1",
        "rounds": "3",
        "scenario": "iid",
        "recipe": "fnr",
        "composition": "fnr",
        "seed": "0",
    }
    assert run.data.metrics["test_accuracy"] == 0.3 and run.data.metrics["final/worst_client"] == 0.25
    tags = {
        "recipe": "fnr",
        "scenario": "iid",
        "seed": "0",
        "data_hash": "d",
        "git_commit": "c0ffee",
        "weights_sha256": "abc",
    }
    assert tags.items() <= run.data.tags.items() and run.data.tags["stage"] == "train@iid-fnr-0"
    assert run.info.end_time - run.info.start_time == 2000 * ROUNDS
    artifacts = root / "mlruns" / "artifacts" / "toy" / run.info.run_id / "artifacts"
    names = {str(path.relative_to(artifacts)) for path in artifacts.rglob("*.*")}
    assert names == {
        "rounds.csv",
        "model.safetensors",
        "accuracy.png",
        "partition/heatmap.png",
        "evaluation/metrics.json",
        "evaluation/per_client.csv",
    }
    assert before == {
        key: (root / "runs" / key / "run_id.json").read_bytes() for key in KEYS
    }  # outputs stay as they are


def test_sync_completes_the_run_of_run_id_json_and_keeps_it(root: Path) -> None:
    run = tracking.start(root, "toy", KEYS[0], {"lr": 0.1}, {"fingerprint": f"print-{KEYS[0]}"})
    run.log_rounds([{"round": 1, "test_accuracy": 0.1, "seconds": 2.0}])
    finished(root, KEYS[0], run_id=run.run_id)
    assert tracking.sync(root) == [KEYS[0]]
    assert [found.info.run_id for found in runs(root)] == [run.run_id]
    history = tracking._client(root).get_metric_history(run.run_id, "test_accuracy")
    assert [point.step for point in history] == [1, 2, 3]


def test_sync_follows_changed_evaluation_and_brings_deleted_runs_back(root: Path) -> None:
    finished(root, KEYS[0])
    tracking.sync(root)
    (run,) = runs(root)
    (root / "evaluation" / KEYS[0] / "metrics.json").write_text('{"worst_client": 0.75}')
    assert tracking.sync(root) == [KEYS[0]]
    assert [found.data.metrics["final/worst_client"] for found in runs(root)] == [0.75]
    tracking._client(root).delete_run(run.info.run_id)
    assert tracking.sync(root) == [KEYS[0]] and [found.info.run_id for found in runs(root)] == [run.info.run_id]
    tracking._client(root).delete_experiment(run.info.experiment_id)
    assert tracking.sync(root) == [KEYS[0]] and [found.info.run_id for found in runs(root)] == [run.info.run_id]


def test_equal_fingerprints_of_two_recipe_names_stay_two_runs(root: Path) -> None:
    for key in (KEYS[0], "iid-again-0"):
        path = finished(root, key) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tags": {"fingerprint": "same"}}))
    assert len(tracking.sync(root)) == 2 and len(runs(root)) == 2
    (root / "evaluation" / KEYS[0] / "metrics.json").write_text("{}")
    assert tracking.sync(root) == [KEYS[0]] and len(runs(root)) == 2


def written(root: Path, files: dict[str, str], whole: int) -> Path:
    """Writes the files of a paper's report and its numbers."""
    folder = root / "papers" / "ccn" / "smoke" / "report"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder.parent / "metrics.json").write_text(json.dumps({"targets": 3, "whole": whole}))
    return folder


def artifacts_of(root: Path, run: Any) -> set[str]:
    place = root / "mlruns" / "artifacts" / "papers" / run.info.run_id / "artifacts"
    return {str(path.relative_to(place)) for path in place.rglob("*.*")}


def test_a_report_is_one_run_with_its_files_and_numbers(root: Path) -> None:
    folder = written(root, {"report.html": "all", "t.csv": "1"}, whole=2)
    assert tracking.log_report(root, folder)
    assert not tracking.log_report(root, folder), "the same report"
    (run,) = runs(root)
    assert run.info.run_name == "ccn-smoke" and run.info.status == "FINISHED"
    assert run.data.params == {"paper": "ccn", "size": "smoke"}
    assert run.data.metrics == {"final/targets": 3, "final/whole": 2}
    assert artifacts_of(root, run) == {"report/report.html", "report/t.csv", "metrics.json"}


def test_a_changed_report_takes_the_place_of_the_one_before(root: Path) -> None:
    tracking.log_report(root, written(root, {"report.html": "all", "t.csv": "1"}, whole=2))
    assert tracking.log_report(root, written(root, {"report.html": "more", "f.png": "2"}, whole=3))
    (run,) = runs(root)
    assert run.data.metrics["final/whole"] == 3
    assert artifacts_of(root, run) == {"report/report.html", "report/f.png", "metrics.json"}
    place = root / "mlruns" / "artifacts" / "papers" / run.info.run_id / "artifacts"
    assert (place / "report" / "report.html").read_text() == "more"
    # Numbers count too, and so does a way back.
    assert tracking.log_report(root, written(root, {"report.html": "more", "f.png": "2"}, whole=2))
    assert tracking.log_report(root, written(root, {"report.html": "all", "t.csv": "1"}, whole=2))
    assert len(runs(root)) == 1


def test_a_report_that_was_cut_short_is_made_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the old files went; then the old report comes back, which must not count as there."""
    first = written(root, {"report.html": "all"}, whole=1)
    tracking.log_report(root, first)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking.Run, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            tracking.log_report(root, written(root, {"report.html": "more"}, whole=1))
    assert tracking.log_report(root, written(root, {"report.html": "all"}, whole=1))
    (run,) = runs(root)
    assert artifacts_of(root, run) == {"report/report.html", "metrics.json"}


def test_sync_brings_lost_and_deleted_reports_back(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(root, {"report.html": "all"}, whole=1)
    for _ in range(2):
        assert tracking.main(["sync", "--root", str(root)]) == 0
    assert capsys.readouterr().out.count("MLflow: 1 of the papers' reports brought up to date") == 1
    (run,) = runs(root)
    tracking._client(root).delete_run(run.info.run_id)
    assert tracking.sync_reports(root) == 1
    assert [found.info.run_id for found in runs(root)] == [run.info.run_id]
    (root / "papers" / "ccn" / "smoke" / "metrics.json").unlink()
    assert tracking.sync_reports(root) == 0, "the stage has not finished"


def test_a_moved_repository_keeps_its_runs_and_their_files(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    finished(root, KEYS[0])
    tracking.sync(root)
    moved = tmp_path_factory.mktemp("to") / "a folder with # and 100%"
    shutil.move(root, moved)
    assert tracking.sync(moved) == []  # nothing is lost, so nothing is logged again
    assert all(path.startswith(moved.as_uri() + "/mlruns/artifacts") for path in stored_paths(moved))
    (run,) = runs(moved)
    assert [item.path for item in tracking._client(moved).list_artifacts(run.info.run_id, "partition")]
    finished(moved, KEYS[1])
    assert tracking.sync(moved) == [KEYS[1]] and not root.exists()


def test_a_broken_database_is_named_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(root, KEYS[0])
    (root / "mlruns" / "mlflow.db").write_bytes(b"not a database, not a database, not a database")
    assert tracking.main(["sync", "--root", str(root)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "mlflow.db" in message and message.count("\n") == 1


def test_sync_without_results_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tracking.main(["sync", "--root", str(tmp_path)]) == 0
    assert "0 of 0" in capsys.readouterr().out and os.listdir(tmp_path) == []


def test_the_comparison_link_names_the_experiment_of_params_yaml(root: Path) -> None:
    other = tracking.start(root, "toy", "a", {}, {}).experiment_id
    tracking.start(root, "newer", "a", {}, {})
    link = f"http://127.0.0.1:5000/#/experiments/{other}/runs?compareRunsMode=CHART&workflowType=machine_learning"
    assert tracking.comparison_link(root, 5000) == link


def test_a_port_that_is_taken_is_replaced_by_default_and_refused_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ui, "DEFAULT_PORT", port)
        assert ui._port(None) != port
        with pytest.raises(UserError, match=f"--port {port}: is taken"):
            ui._port(port)
    with pytest.raises(UserError, match="1 to 65535"):
        ui._port(70000)
