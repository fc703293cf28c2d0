"""MLflow: a store that is made once, runs that are there exactly once, models that load, a view
that is prepared."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from mlflow.exceptions import MlflowException
from safetensors.torch import save, save_file
from sqlalchemy.exc import OperationalError

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult, Site
from fedml_noniid.pipelines.tracking import deployments, models, runs, ui, view
from fedml_noniid.pipelines.tracking import live as live_runs
from fedml_noniid.pipelines.tracking import store as stores
from fedml_noniid.pipelines.tracking.finished import MODEL
from fedml_noniid.pipelines.tracking.live import Live
from fedml_noniid.pipelines.tracking.store import Store, StoreError
from fedml_noniid.pipelines.tracking.sync import sync

REPOSITORY = Path(runs.__file__).parents[3]
TRAFFIC = {"bytes_up": 2**19, "bytes_down": 2**19}  # of a round: 1 MiB
SHAPE, CLASSES = (1, 2, 2), ("a", "b", "c")
# mlflow's own use of SQLAlchemy, and its own type hints.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType"),
]
Finish = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store, made once (it takes seconds), by two processes that both want to create
    it."""
    root = tmp_path_factory.mktemp("made")
    # A fork does not import MLflow again.
    other = multiprocessing.get_context("fork").Process(target=Store(root, None).client)
    other.start()
    Store(root, None).client()
    other.join()
    assert other.exitcode == 0
    return root


@pytest.fixture(autouse=True)
def _every_training_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_runs, "SOON_S", 0)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    """A repository with an empty store of its own."""
    root = tmp_path / "repository"
    shutil.copytree(made / "mlruns", root / "mlruns")
    (root / "mlruns" / ".place").write_text(str((root / "mlruns").resolve()))
    return Store(root, None)


@pytest.fixture
def finish(store: Store, monkeypatch: pytest.MonkeyPatch) -> Finish:
    """Writes the files of a finished item and has `results.read` find it."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        results, "read", lambda root, repository=None: [found[key] for key in sorted(found)]
    )

    def write(
        key: str = "iid-fedavg-0", *, accuracy: float = 0.3, worst: float = 0.25, **fields: object
    ) -> Any:
        scenario, recipe, seed = key.split("-")
        folder, evaluation = store.repository / "runs" / key, store.repository / "evaluation" / key
        folder.mkdir(parents=True, exist_ok=True)
        evaluation.mkdir(parents=True, exist_ok=True)
        rows = tuple(
            {"round": t, "test_accuracy": accuracy * t / 3, "test_loss": math.nan} | TRAFFIC
            for t in (1, 2, 3)
        )
        (folder / "rounds.csv").write_text(f"rounds up to {accuracy}")
        (evaluation / "metrics.json").write_text(json.dumps({"client_worst": worst}))
        print_ = f"print-{key}-{accuracy}"
        tags = {
            "item": key,
            "seed": seed,
            "fingerprint": print_,
            "weights_sha256": f"sha-{accuracy}",
            "data_hash": "d" * 64,
            "leak": "none",
        }
        item = {
            "key": key,
            "scenario": scenario,
            "recipe": recipe,
            "composition": f"{recipe}+x",
            "seed": int(seed),
            "params": {"lr": 0.1, "data.name": "toy"},
            "tags": tags,
            "final": {"test_accuracy": accuracy},
            "rows": rows,
            "made": {"seconds": [1.0, 2.0, 3.0]},
            "evaluation": {"client_worst": worst},
            "client_accuracy": (worst, 1.0),
            "files": (folder / "rounds.csv", evaluation / "metrics.json"),
            "notes": (),
        }
        found[key] = ItemResult(**item | fields)
        return found[key]

    return write


def active(store: Store, experiment: str = "toy", methods: bool = False) -> list[Any]:
    """The runs of an experiment, those of seeds and deployments or those of methods."""
    client = store.client()
    found = runs.search(client, runs.experiment_id(store, client, experiment))
    return [run for run in found if (run.data.tags.get("kind") == "method") == methods]


def artifacts(run: Any) -> set[str]:
    folder = Path(unquote(urlsplit(run.info.artifact_uri).path))
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# The store


def test_two_processes_that_create_the_store_at_once_make_one_whole_store(made: Path) -> None:
    assert sorted(path.name for path in (made / "mlruns").iterdir()) == [
        ".create.lock",
        ".place",
        "mlflow.db",
    ]
    (default,) = Store(made, None).client().search_experiments()
    assert default.artifact_location == f"{made.as_uri()}/mlruns/artifacts/0"


def test_the_verbs_import_neither_mlflow_nor_torch() -> None:
    code = (
        "import sys; import fedml_noniid.pipelines.tracking.verbs\n"
        "sys.exit('mlflow' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_leaves_no_half_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore.__init__", full)
    with pytest.raises(StoreError, match=r"^.*mlflow\.db: .*\(No space left on device\).*$"):
        Store(tmp_path, None).client()
    assert {path.name for path in (tmp_path / "mlruns").iterdir()} == {".create.lock", ".place"}


def test_a_store_that_fails_is_named_soon_in_one_line_without_its_password(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE_S", 0.2)
    in_the_way = store.repository / "in the way"
    in_the_way.mkdir()
    (in_the_way / "mlruns").touch()
    store.database.write_bytes(b"not a database, " * 9)
    assert Store(Path(), "postgresql://u:p@q@host/db").shown == "postgresql://host/db"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        place = f"127.0.0.1:{silent.getsockname()[1]}/mlflow"
        for broken, words in (
            (Store(Path(), f"http://{place}"), f"^http://{place}: .*timed out.*start that server"),
            (Store(Path(), f"http://user:pass@{place}"), f"^http://{place}: MLflow's store fails"),
            (Store(in_the_way, None), r"mlflow\.db: MLflow's store fails .*mlruns: File exists"),
            (store, r"mlflow\.db: MLflow's store fails .*not a database.* delete it"),
        ):
            with pytest.raises(StoreError, match=words) as error:
                broken.client()
            assert "\n" not in str(error.value)


# A live run


def test_no_round_is_logged_twice_and_time_is_that_of_training(store: Store) -> None:
    """The virtual clock is the step of `by_virtual_ms/`."""
    rows = [
        {"round": t, "test_accuracy": t / 10, "seconds": 1.0, "clock_s": 1.5 * t}
        for t in range(1, 5)
    ]
    live = runs.start(store, "toy", "k", {"lr": 0.1}, {}, began=100)
    for n in (3, 3, 4):
        live.log_rounds(rows[:n])
    points = store.client().get_metric_history(live.run_id, "test_accuracy")
    assert [(point.step, point.value, point.timestamp) for point in points] == [
        (t, t / 10, 100_000 + 1000 * t) for t in range(1, 5)
    ]
    (run,) = active(store)
    by_clock = [(1500 * t, t / 10) for t in range(1, 5)]
    assert history(store, run, "by_virtual_ms/test_accuracy") == by_clock


def test_what_mlflow_does_not_take_is_cut_or_renamed_and_the_run_still_ends(store: Store) -> None:
    """Long values and names; more numbers than one call takes."""
    params = {"p": "v" * 7000, "n" * 300: 1, **{f"p{i}": i for i in range(150)}}
    log = runs.start(store, "toy", "k", params, {"note": "t" * 9000})
    log.log_rounds([{"round": t, "m" * 300: 1.0, "odd [name]": t} for t in range(1, 601)])
    log.finish({"f" * 300: 1.0})
    (run,) = active(store)
    assert run.info.status == "FINISHED" and len(run.data.params["p"]) == 6000
    assert len(run.data.params) == 152 and len(run.data.tags["note"]) == 8000
    assert run.data.metrics["odd _name_"] == len(history(store, run, "odd _name_")) == 600


class Calls:
    """An MlflowClient that counts its calls, and raises `error` at the call number `fatal` and
    after."""

    def __init__(self, client: Any, fatal: int, error: Exception) -> None:
        self.made, self._client, self._fatal, self._error = 0, client, fatal, error

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.made += 1
            if self.made >= self._fatal:
                raise self._error
            return getattr(self._client, name)(*given, **named)

        return call


ERRORS = (
    MlflowException("database is locked\n[SQL: ...]"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyError("run"),
    OperationalError("INSERT", {}, Exception("attempt to write a readonly database")),
    RuntimeError("no thread"),
)


def test_an_error_in_any_call_ends_the_recording_only_and_the_next_sync_goes_on(
    store: Store,
    finish: Finish,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """First in a call of the live run, then in one of the sync."""
    real = store.client()
    for fatal in itertools.count(1, 3):
        item = finish(accuracy=0.3 + fatal / 1000)
        calls = Calls(real, fatal, ERRORS[fatal % len(ERRORS)])
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "client", lambda _, calls=calls: calls)
            live = Live(store, "toy", item.key, item.params, item.tags)
            live.log_rounds(item.rows[:1])
            live.finish(item.rows, item.final)
            item.made["run_id"] = live.run_id
            item.files[0].touch()  # a training writes its files at its end
            with stores.spared("the new results"):
                sync(store, store.repository, "toy")
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        if not said:
            break
        assert said[0].startswith(f"WARNING: {store.address}: MLflow's store fails (")
        assert not [line for line in said if "\n" in line] and "`noniid sync`" in said[1]
    assert fatal > 20
    (run,) = active(store)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["final/test_accuracy"] == 0.3 + fatal / 1000
    assert [step for step, _ in history(store, run, "test_accuracy")] == [1, 2, 3]


# Finished items


def test_sync_makes_every_item_present_once(
    store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["iid-fedavg-0", "iid-fedavg-1", "iid-fnr-0"]
    for key in keys:
        finish(key)
    assert sync(store, store.repository, "toy") == [*keys, "iid-fedavg", "iid-fnr"]
    found = {run.info.run_name: run for run in active(store)}
    assert sorted(found) == keys and len(active(store)) == 3
    run = found["iid-fnr-0"]
    assert run.info.status == "FINISHED" and run.info.end_time - run.info.start_time == 6000
    finals = {"final/test_accuracy": 0.3, "final/client_worst": 0.25}
    assert run.data.metrics == {"test_accuracy": 0.3, "seconds": 3.0, **TRAFFIC, **finals}
    about = {"recipe": "fnr", "composition": "fnr+x", "scenario": "iid", "seed": "0"}
    tags = {"weights_sha256": "sha-0.3", "data_hash": "d" * 64, "leak": "none"}
    assert (about | tags | {"item": "iid-fnr-0"}).items() <= run.data.tags.items()
    assert about.items() <= run.data.params.items()
    assert artifacts(run) == {"rounds.csv", "evaluation/metrics.json"}
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("toy", "d" * 36)
    elsewhere = Store(store.repository, store.address)
    assert sync(elsewhere, store.repository, "toy") == [], "MLflow says so too"
    monkeypatch.setattr(Store, "client", lambda _: pytest.fail("imports mlflow"))
    assert sync(store, store.repository, "toy") == []


def test_sync_completes_the_live_run_and_replaces_a_killed_one(
    store: Store, finish: Finish
) -> None:
    item = finish()
    killed, live = (Live(store, "toy", item.key, item.params, item.tags) for _ in range(2))
    for run in (killed, live):
        run.log_rounds(item.rows[:1])
    live.finish(item.rows, item.final)
    os.utime(item.files[0], (time.time() + 1,) * 2)
    for worst in (0.25, 0.2):  # then it is evaluated again by other code
        finish(worst=worst)
        sync(store, store.repository, "toy")
        (found,) = active(store)
        assert (found.info.run_id, found.info.status) == (live.run_id, "FINISHED")
        assert found.data.metrics["final/client_worst"] == worst
        assert [step for step, _ in history(store, found, "test_accuracy")] == [1, 2, 3]


def test_a_run_that_was_deleted_in_mlflow_comes_back(store: Store, finish: Finish) -> None:
    place, client = Store(store.repository, store.address), store.client()
    for key in ("iid-fedavg-0", "iid-fedavg-1"):
        finish(key)
    sync(place, place.repository, "toy")
    before = {run.info.run_name: run.info.run_id for run in active(store)}
    client.delete_experiment(active(store)[0].info.experiment_id)
    sync(place, place.repository, "toy")
    assert {run.info.run_name: run.info.run_id for run in active(store)} == before
    client.delete_run(before["iid-fedavg-1"])
    assert sync(place, place.repository, "toy") == ["iid-fedavg-1"]
    (method,) = active(store, methods=True)
    now = {run.info.run_name: run for run in active(store)}
    assert sorted(now) == sorted(before) and now["iid-fedavg-0"].info.run_id in before.values()
    assert {run.data.tags["mlflow.parentRunId"] for run in now.values()} == {method.info.run_id}
    assert sync(place, place.repository, "toy") == []


def test_runs_of_another_folder_stay_in_a_store_that_both_have(
    store: Store, finish: Finish, tmp_path: Path
) -> None:
    """Its own earlier ones do not."""
    ours, theirs = (Store(folder, store.address) for folder in (store.repository, tmp_path / "x"))
    for accuracy, place in ((0.3, ours), (0.4, theirs), (0.5, ours)):
        finish(accuracy=accuracy)
        sync(place, store.repository, "toy")
    found = sorted(run.data.metrics["final/test_accuracy"] for run in active(store))
    assert found == [0.4, 0.5]


def test_a_server_that_is_gone_is_named_though_there_is_nothing_to_record(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.repository / "params.yaml").write_text("experiment: toy\n")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert main(["sync", "--root", str(store.repository)]) == 2
    said = capsys.readouterr()
    assert (
        f"error: {address}: MLflow's store fails (" in said.err and "Connection refused" in said.err
    )
    assert "up to date" not in said.out


def test_runs_of_a_dvc_experiment_and_running_ones_stay(store: Store, finish: Finish) -> None:
    tags = {"item": "iid-fedavg-0", "fingerprint": "theirs"}
    runs.start(store, "toy", "tried", {}, tags | {"dvc_experiment": "high-lr"}).finish({})
    finish()
    (store.repository / "runs" / "iid-fedavg-0" / "rounds.csv").touch()
    running = runs.start(store, "toy", "running", {}, tags | {"fingerprint": "later"})
    sync(store, store.repository, "toy")
    assert sorted(run.info.run_name for run in active(store)) == [
        "iid-fedavg-0",
        "running",
        "tried",
    ]
    running.finish({})


def test_a_moved_repository_makes_its_runs_again(
    store: Store, finish: Finish, tmp_path: Path
) -> None:
    item = finish()
    sync(store, store.repository, "toy")
    moved = Store(tmp_path / "a folder with # and 100%", None)
    shutil.move(store.repository, moved.repository)
    files = tuple(moved.repository / path.relative_to(store.repository) for path in item.files)
    put_files(item, files)
    assert sync(moved, moved.repository, "toy") == ["iid-fedavg-0", "iid-fedavg"]
    (run,) = active(moved)
    assert (
        run.info.artifact_uri.startswith(moved.repository.as_uri())
        and not store.repository.exists()
    )
    assert "rounds.csv" in artifacts(run)
    aside = sorted(path.name for path in moved.folder.glob("*.moved-*"))
    assert aside == ["artifacts.moved-1", "mlflow.db.moved-1"]
    assert sync(moved, moved.repository, "toy") == []


def test_sync_without_results_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("experiment: toy\n")
    assert main(["sync", "--root", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["params.yaml"]
    (tmp_path / "params.yaml").write_text("seeds: [0]\n")
    assert main(["sync", "--root", str(tmp_path)]) == 2
    assert "params.yaml: names no experiment" in capsys.readouterr().err


# Models


def put_files(item: ItemResult, files: tuple[Path, ...]) -> None:
    object.__setattr__(item, "files", files)  # it is frozen


def with_model(
    store: Store, finish: Finish, key: str = "iid-fedavg-0", accuracy: float = 0.3
) -> Any:
    """An item with a linear model on 4 pixels, and the data set that normalises them."""
    x = torch.arange(24, dtype=torch.uint8).reshape(6, *SHAPE)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    data = Dataset.from_raw("toy", Raw(x, y, x.clone(), y.clone(), CLASSES), [0.5, 0.25])
    data.save(store.repository / "data" / "toy.safetensors")
    params = {"data.name": "toy", "train.model": "logistic_regression", "train.model_options": {}}
    item = finish(key, accuracy=accuracy, params=params)
    item.tags["data_hash"] = data.checksum
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 10
    leaves = {
        "params/fc.weight": torch.zeros(3, 4),
        "params/fc.bias": torch.zeros(3),
        "evaluated/fc.weight": weight,
        "evaluated/fc.bias": torch.ones(3),
    }
    path = store.repository / "runs" / key / "model.safetensors"
    save_file(leaves, path)
    confusion = store.repository / "evaluation" / key / "confusion.csv"
    confusion.write_text("class,as a,as b,as c\na,2,0,0\nb,1,1,0\nc,0,0,2\n")
    put_files(item, (*item.files, path, confusion))
    return item


def test_a_registered_model_predicts_from_raw_samples(store: Store, finish: Finish) -> None:
    """One model for each recipe: that of its first seed, whose run has it."""
    with_model(store, finish)
    with_model(store, finish, "iid-fedavg-10")
    with_model(store, finish, "iid-fedavg-2")
    sync(store, store.repository, "a/b")
    (model,) = store.client().search_registered_models()
    version = store.client().get_model_version_by_alias(model.name, "serve")
    assert model.name == "a_b.iid.fedavg" and version.tags["weights_sha256"] == "sha-0.3"
    assert len(store.client().search_model_versions()) == 1
    (run,) = [run for run in active(store, "a/b") if run.info.run_name == "iid-fedavg-0"]
    assert version.run_id == run.info.run_id and "model/MLmodel" in artifacts(run)
    (method,) = active(store, "a/b", methods=True)
    assert artifacts(method) == {"confusion.png"}
    import mlflow.pyfunc

    try:
        mlflow.set_tracking_uri(store.address)
        loaded = mlflow.pyfunc.load_model(f"models:/{model.name}/{version.version}")
    finally:
        mlflow.set_tracking_uri(None)  # it would stay in the environment
    assert loaded.metadata.get_input_schema().inputs[0].shape == (-1, *SHAPE)
    samples = np.array([[[[0, 255], [51, 102]]], [[[255, 255], [255, 255]]]], dtype=np.float32)
    # (x / 255 - 0.5) / 0.25, times the evaluated weights, plus 1, softmax.
    x = (samples.reshape(2, 4) / 255 - 0.5) / 0.25
    exp = np.exp(x @ (np.arange(12).reshape(3, 4).T / 10) + 1)
    np.testing.assert_allclose(loaded.predict(samples), exp / exp.sum(1, keepdims=True), rtol=1e-5)


def test_a_rerun_takes_the_place_of_the_run_before_and_the_alias_of_its_model(
    store: Store, finish: Finish
) -> None:
    found = []
    for accuracy in (0.3, 0.6, 0.3):
        with_model(store, finish, accuracy=accuracy)
        assert sync(store, store.repository, "toy") == ["iid-fedavg-0", "iid-fedavg"]
        found += active(store)
        assert found[-1].data.metrics["final/test_accuracy"] == accuracy
        model = store.client().get_model_version_by_alias("toy.iid.fedavg", "serve")
        assert model.tags["weights_sha256"] == f"sha-{accuracy}"
    first, _, third = (store.client().get_run(run.info.run_id).info for run in found)
    assert len(found) == 3 and first.lifecycle_stage == "deleted" != third.lifecycle_stage


def test_a_model_is_registered_only_with_the_data_that_it_was_trained_on(
    store: Store, finish: Finish
) -> None:
    item = with_model(store, finish)
    data = store.repository / "data" / "toy.safetensors"
    aside = data.rename(data.with_name("aside"))
    sync(store, store.repository, "toy")
    assert len(store.client().search_model_versions()) == 0 and len(active(store)) == 1
    aside.rename(data)
    sync(store, store.repository, "toy")
    assert len(store.client().search_model_versions()) == 1 and len(active(store)) == 1
    item.tags["data_hash"] = "of other data"
    assert models._network(item, store.repository) is None


@pytest.mark.slow
def test_a_model_brings_its_own_code(store: Store, finish: Finish, tmp_path: Path) -> None:
    with_model(store, finish)
    sync(store, store.repository, "toy")
    (version,) = store.client().search_model_versions()
    code = (
        "import sys, mlflow, numpy; m = mlflow.pyfunc.load_model(sys.argv[1])\n"
        "print(m.predict(numpy.zeros((1, 1, 2, 2), 'float32')).shape, "
        "sys.modules['fedml_noniid.models'].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, version.source], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "(1, 3)" in done.stdout and str(store.folder) in done.stdout


# Deployments

TABLE = """round,test_accuracy,test_loss,validation_accuracy,bytes_up,bytes_down,seconds
1,0.5,2.0,,1048576,1048576,1.0
2,0.25,1.0,,524288,524288,2.0
3,0.75,0.5,,524288,524288,3.0
"""
WEIGHTS = save({"w": torch.ones(2)}, {"weights_sha256": "f00d"})
# Silo 2 misses round 1, silo 0 and later silo 2 miss round 2.
MISSING = "round,exchange,client\n1,0,2\n1,1,2\n2,0,0\n2,1,2\n"
DEPLOYMENT: dict[str, Any] = {
    "common_args": {"random_seed": 7},
    "train_args": {
        "recipe": "fedprox",
        "settings": {"fedprox": {"mu": 0.5}},
        "rounds": 3,
        "learning_rate": 0.2,
        "epochs": 4,
        "max_samples": 70,
    },
    "comm_args": {
        "server": "10.9.8.7:8890",
        "kit": "/secret/{rank}",
        "quorum": 2,
        "deadline_s": 60.0,
    },
    "dp_args": {"enable_dp": False, "mechanism_type": "gaussian"},
    "attack_args": {"keys": "/secret/keys"},
}


def deployed(
    place: Path,
    table: str = TABLE,
    missing: str = MISSING,
    model: bytes = WEIGHTS,
    without: str = "",
    **sections: dict[str, Any],
) -> tuple[Path, Path]:
    """A server's output folder and configuration. The model is that of `TABLE`."""
    folder, config = place / "run", place / "fedml_config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    files = {"rounds.csv": table.encode(), "absent.csv": missing.encode(), MODEL: model}
    for name in files.keys() - {without}:
        (folder / name).write_bytes(files[name])
    content = {
        name: DEPLOYMENT.get(name, {}) | sections.get(name, {}) for name in {*DEPLOYMENT, *sections}
    }
    content["comm_args"] |= {key: str(place / f"{key}.yaml") for key in ("study", "policy")}
    config.write_text(json.dumps(content))  # JSON is YAML
    pytest.importorskip("grpc", reason="of the extra [silo]")
    from fedml_noniid.deploy import settings
    from fedml_noniid.governance import policy
    from tests.deploy import world

    known = {key: value for key, value in content["train_args"].items() if key != "quorom"}
    admitted = settings.check({**content, "train_args": known}, "")
    policy.admit_own(admitted, world.shards_of()[0], place)
    return folder, config


def command_line(store: Store, folder: Path, config: Path, *more: str) -> int:
    given = ["--root", str(store.repository), "--experiment", "toy", *more]
    return main(["deploy", "record", str(folder), "--config", str(config), *given])


def history(store: Store, run: Any, name: str) -> list[tuple[int, float]]:
    return [
        (point.step, point.value)
        for point in store.client().get_metric_history(run.info.run_id, name)
    ]


def test_a_deployment_is_one_run_with_its_rounds_and_its_silos(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, config = deployed(tmp_path / "server")
    assert [command_line(store, folder, config) for _ in range(2)] == [0, 0]
    (run,) = active(store)
    assert run.info.status == "FINISHED" and run.info.end_time - run.info.start_time == 6000
    assert history(store, run, "test_accuracy") == [(1, 0.5), (2, 0.25), (3, 0.75)]
    assert history(store, run, "silos_missing") == [(1, 1), (2, 2), (3, 0)]
    finals = {key: value for key, value in run.data.metrics.items() if key.startswith("final/")}
    assert finals == {
        "final/test_accuracy": 0.75,
        "final/test_loss": 0.5,
        "final/traffic_mib": 4.0,
        "final/mean_accuracy_percent": 75.0,
        "final/mean_traffic_mib": 4.0,
    }
    tags = {"kind": "deployment", "recipe": "fedprox", "seed": "7", "weights_sha256": "f00d"}
    assert tags.items() <= run.data.tags.items()
    params = {
        "silos": "3",
        "cohort": "3",
        "comm_args.quorum": "2",
        "comm_args.deadline_s": "60.0",
        "fedprox.mu": "0.5",
        "seed": "7",
        "train.rounds": "3",
        "train.lr": "0.2",
        "train.epochs": "4",
        "train.model": "mlp",
        "recipe": "fedprox",
        "dp_args.enable_dp": "False",
    }
    assert params.items() <= run.data.params.items()
    said = str(run.data.params) + str(run.data.tags)
    assert not [
        word for word in ("secret", "10.9.8.7", "shards", str(tmp_path / "server")) if word in said
    ]
    assert artifacts(run) == {"rounds.csv", "absent.csv", "model.safetensors"}


SHORT = TABLE[: TABLE.index("3,0.75")]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"without": "rounds.csv"}, r"rounds\.csv: can't be read"),
    ({"without": "absent.csv"}, r"absent\.csv: can't be read"),
    ({"without": MODEL}, r"run: the run is not over \(3 of 3 rounds\)"),
    ({"table": SHORT}, r"run: the run is not over \(2 of 3 rounds\)"),
    ({"table": TABLE[: TABLE.index("1,0.5")]}, r"rounds\.csv: has no lines"),
    ({"train_args": {"rounds": 2}}, r"rounds\.csv: has 3 rounds, .*says 2; --config needs"),
    ({"train_args": {"quorom": 2}}, r"fedml_config\.yaml: train_args\.quorom is unknown"),
    ({"missing": "round,exchange,client\n1,0,3\n"}, r"absent\.csv, line 2: client = '3'"),
    ({"model": b"half"}, r"model\.safetensors: is not the model of a deployment"),
    ({"model": save({"w": torch.ones(2)})}, r"is not the model of a deployment"),
    ({"table": TABLE.replace("0.25", "much")}, r"rounds\.csv: line 3: .*'much'"),
    ({"table": TABLE.replace(",2.0\n", ",2.0,1\n")}, r"rounds\.csv: line 3"),
    ({"table": TABLE.replace("bytes_up", "up")}, r"rounds\.csv: has no column bytes_up"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG)
def test_a_deployment_that_is_not_over_or_damaged_is_refused(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        deployments.read(*deployed(tmp_path, **changed))
    assert "\n" not in str(error.value)


def test_a_deployment_that_a_callback_has_stopped_is_over(tmp_path: Path) -> None:
    """Two of three rounds: an early stop allows it, and no answer of round 3 is made up."""
    early_stop = {"callbacks": {"early_stop": {}}}
    found = deployments.read(*deployed(tmp_path, table=SHORT, train_args=early_stop))
    assert sorted({row["round"] for row in found.rows} - {0}) == [1, 2]


# The pages


def test_a_method_is_the_parent_of_its_seeds(store: Store, finish: Finish) -> None:
    """Accuracies 0.3 and 0.36: mean 33 %, deviation 0.06 / sqrt(2). Worst clients 0.25 and 0.15; of
    fnr, on the site's own samples, 0.1."""
    (store.repository / "params.yaml").write_text("recipe_names: [fnr, fedavg]\n")
    (store.repository / "report").mkdir()
    (store.repository / "report" / "accuracy-iid.png").write_bytes(b"a picture")
    finish("iid-fedavg-0", params={"lr": 0.1, "seed": 0})
    finish("iid-fedavg-1", accuracy=0.36, worst=0.15, params={"lr": 0.1, "seed": 1})
    for leak in ("sees some tests", "sees the test set"):
        site = {"params": {"scenario.partition": "natural"}, "sites": {"A": Site(5, 5, 0.1)}}
        finish("iid-fnr-0", **site).tags["leak"] = leak
        sync(store, store.repository, "toy")
        methods = {run.info.run_name: run for run in active(store, methods=True)}
        assert methods.keys() == {"iid-fedavg", "iid-fnr"}
        for run in active(store):
            parent, tags = methods[run.info.run_name.rpartition("-")[0]], run.data.tags
            assert tags["mlflow.parentRunId"] == parent.info.run_id
            assert tags["mlflow.runColor"] == parent.data.tags["mlflow.runColor"]
    run, leaking = methods["iid-fedavg"], methods["iid-fnr"]
    assert history(store, run, "mean_accuracy_percent") == [(1, 11), (2, 22), (3, 33)]
    finals = {key: value for key, value in run.data.metrics.items() if key.startswith("final/")}
    assert finals == {
        "final/mean_accuracy_percent": 33,
        "final/accuracy_percent_deviation": 4.24,
        "final/mean_worst_client_percent": 20,
        "final/mean_traffic_mib": 3,
    }
    about = {"recipe": "fedavg", "composition": "fedavg+x", "scenario": "iid"}
    assert run.data.params == {"lr": "0.1"} | about and run.data.tags["seeds"] == "0, 1"
    assert artifacts(run) == {"accuracy-iid.png"}
    assert leaking.data.metrics["final/mean_worst_client_percent"] == 10
    assert leaking.data.tags["leak"] == "sees the test set"
    assert "seed" not in {*leaking.data.tags, *leaking.data.params}, "of its only seed"
    assert leaking.data.tags["mlflow.runColor"] == view.BASELINE_COLOUR


def test_the_view_shows_methods_first_and_each_seed(store: Store, finish: Finish) -> None:
    finish()
    sync(store, store.repository, "toy")
    experiment = store.client().get_experiment_by_name("toy")
    packed = experiment.tags["mlflow.sharedViewState.overview"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    shown = [chart for chart in state["compareRunCharts"] if not chart["deleted"]]
    assert [(chart["type"], chart["metricKey"]) for chart in shown] == [
        ("LINE", "mean_accuracy_percent"),
        ("BAR", "final/mean_accuracy_percent"),
        ("BAR", "final/mean_worst_client_percent"),
        ("BAR", "final/mean_traffic_mib"),
        ("LINE", "test_accuracy"),
    ]
    assert {chart["lineSmoothness"] for chart in shown if chart["type"] == "LINE"} == {0}
    assert state["orderByKey"] == "metrics.`final/mean_accuracy_percent`"
    assert "tags.`leak`" in state["selectedColumns"]
    every = {
        name
        for run in runs.search(store.client(), experiment.experiment_id)
        for name in run.data.metrics
    }
    assert every == {chart["metricKey"] for chart in state["compareRunCharts"]}


def test_of_a_server_the_link_is_printed(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = store.client()
    monkeypatch.setattr(Store, "client", lambda *_: client)
    ui.serve(Store(store.repository, "http://somewhere:5000/"), "Default", None)
    assert "http://somewhere:5000/#/experiments/0/runs?" in capsys.readouterr().out


def test_a_port_that_is_taken_or_no_port_is_refused() -> None:
    with socket.create_server((ui.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} can't be used"):
            ui._free(port)
    assert ui._free(port) == port


def test_a_short_training_has_its_run_from_sync_alone(
    store: Store, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails is recorded in any case."""
    monkeypatch.setattr(live_runs, "SOON_S", 3600)
    item = finish()
    short = Live(store, "toy", item.key, item.params, item.tags)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "client", lambda _: pytest.fail("MLflow is called"))
        short.log_rounds(item.rows)
        short.finish(item.rows, item.final)
    Live(store, "toy", "iid-fedavg-1", {}, {}).fail("round 3: not finite")
    (failed,) = active(store)
    assert (short.run_id, failed.info.status) == ("", "FAILED")
    assert failed.data.tags["mlflow.note.content"] == "round 3: not finite"
