"""Items on a cluster: the same files as of this machine's processes, whatever dies, and nobody
else on it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.pipelines.experiment import cache, config, resume
from fedml_noniid.pipelines.experiment.workspace import CLUSTER, Cluster, Workspace
from fedml_noniid.pipelines.stages import train
from fedml_noniid.pipelines.tracking import live
from fedml_noniid.pipelines.tracking.store import Store
from tests.files import contents
from tests.pipelines.small import PARAMS, ROOT, Repository, copy, run_stages
from tests.processes import until

pytest.importorskip("distributed", reason="a cluster needs [cluster]")

from fedml_noniid.pipelines.cluster import address, front, job, kit, traits
from fedml_noniid.pipelines.cluster.job import Job

# What imports dask and TLS leave to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # mlflow's own use of SQLAlchemy, and its own type hints.
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType"),
]
LONG = PARAMS.replace("rounds: 3, epochs: 1", "rounds: 40, epochs: 5").replace(
    "[fedavg, scaffold+fnr]", "[scaffold+fnr]"
)


# What a user's shell may set. Neither reaches a worker.
FOREIGN = {"OMP_NUM_THREADS": "7", "MALLOC_TRIM_THRESHOLD_": "65536"}
BESIDE = "beside_a_worker"  # a module


class Running(NamedTuple):
    """A cluster on loopback with one worker."""

    kit: Path
    scheduler: psutil.Process
    workers: psutil.Process

    @property
    def named(self) -> Cluster:
        return Cluster(f"file:{self.kit / address.FILE}")

    def train(self, folder: Path) -> None:
        """Trains the items of the experiment in `folder`."""
        train.run(Workspace.from_environment(folder, {CLUSTER: self.named.address}))

    def worker_processes(self) -> list[psutil.Process]:
        """The processes that train, which the workers' command has started."""
        found = self.workers.children(recursive=True)
        # Not by the name of what they run: setproctitle gives them another.
        return [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]


def start(*words: str, folder: Path = ROOT, **more: str) -> subprocess.Popen[str]:
    """Starts a verb of the cluster, of the checkout in `folder`, and waits for its first line.

    `more`: variables of the environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "fedml_noniid", "cluster", *words],
        cwd=folder,
        env={**os.environ, **FOREIGN, **more},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "scheduler listens" in line or "workers of" in line, line
    return process


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cluster") / "kit"
    kit.make(folder, 1)
    (folder.parent / f"{BESIDE}.py").touch()
    scheduler = start(
        "scheduler", "--listen", f"tls://127.0.0.1:{free_port()}", "--kit", str(folder)
    )
    # As the command `noniid`, Python does not look in the working folder by itself.
    command = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    words = "worker", f"file:{folder / address.FILE}", "--processes", "1"
    workers = start(*words, folder=folder.parent, **command)
    try:
        yield Running(folder, psutil.Process(scheduler.pid), psutil.Process(workers.pid))
    finally:
        for process in (workers, scheduler):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that is partitioned."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "params.yaml").write_text(PARAMS)
    run_stages(folder, ("prepare", "partition"))
    return folder


def copies(prepared: Path, folder: Path, params: str) -> tuple[Path, Path]:
    """Two copies of the experiment, with other settings of training."""
    found = folder / "here", folder / "there"
    for one in found:
        shutil.copytree(prepared, one)
        (one / "params.yaml").write_text(params)
    return found


def asked(cluster: Running, function: Callable[..., Any], of_scheduler: bool = False) -> Any:
    """What a function returns in the scheduler, or in each worker."""
    with front.connected(cluster.named) as client:
        return (client.run_on_scheduler if of_scheduler else client.run)(function)


def refuse_transfers(dask_scheduler: Any) -> None:
    for name in ("gather", "scatter"):
        dask_scheduler.handlers[name] = None  # a call is an error


def found_beside() -> bool:
    return importlib.util.find_spec(BESIDE) is not None


def test_a_module_in_the_folder_where_the_worker_was_started_is_found(cluster: Running) -> None:
    assert [*asked(cluster, found_beside).values()] == [True]


def test_the_files_are_those_of_this_machine(
    cluster: Running, prepared: Path, tmp_path: Path
) -> None:
    """No file of an item goes through the scheduler."""
    asked(cluster, refuse_transfers, of_scheduler=True)
    here, there = copies(prepared, tmp_path, PARAMS)
    run_stages(here, ("train",))
    cluster.train(there)
    assert len(contents(here / "runs")) > 8
    assert contents(there / "runs") == contents(here / "runs")
    stored = [
        {path.name: contents(path).keys() for path in (folder / ".items").iterdir()}
        for folder in (here, there)
    ]
    assert stored[0] == stored[1]
    assert list((there / resume.RESUME).iterdir()) == []


@pytest.mark.slow
def test_an_item_goes_on_after_its_worker_is_killed(
    cluster: Running,
    prepared: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow has one run of it, with every round once."""
    here, there = copies(prepared, tmp_path, LONG)
    run_stages(here, ("train",))
    monkeypatch.setattr(live, "SOON_S", 0)
    seconds: list[float] = []

    def kill() -> None:
        until(lambda: [*there.glob(".resume/*/*/checkpoint.safetensors")])
        time.sleep(1)
        for process in cluster.worker_processes():
            process.kill()
        rounds = next(there.glob(".resume/*/*/checkpoint.rounds")).read_bytes()
        seconds.extend(map(float, re.findall(rb'seconds\\": ([0-9.e-]+)', rounds)))

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.WARNING):
        cluster.train(there)
    killer.join()
    assert "lost worker" in caplog.text
    assert contents(there / "runs") == contents(here / "runs")
    (made,) = (json.loads(path.read_text()) for path in there.glob(".items/*/made.json"))
    assert 0 < len(seconds) < 40 and made["seconds"][: len(seconds)] == seconds, "trained twice"
    logged = Store(there, None).client().get_metric_history(made["run_id"], "test_accuracy")
    assert [point.step for point in logged] == list(range(1, 41))


def test_a_worker_with_other_traits_is_named_once_and_gets_no_item(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Alone, no worker fits: the front says so at once, as where the scheduler is gone."""
    wanted = {"threads": "1"}
    info: dict[str, Any] = {
        "workers": {
            f"tcp://{name}": {"name": name, "resources": traits.resources({"threads": threads})}
            for name, threads in (("a", "1"), ("b", "2"))
        }
    }
    client = SimpleNamespace(scheduler_info=lambda: info)
    workers = front.FitWorkers(client, wanted)
    with caplog.at_level(logging.WARNING):
        assert workers.addresses() == workers.addresses() == {"tcp://a": "a"}
    assert caplog.messages == ["worker b gets no item: it has threads 2 (here 1)"]
    del info["workers"]["tcp://a"]
    with pytest.raises(UserError, match=r"^worker b gets no item: it has threads 2 \(here 1\)$"):
        front.FitWorkers(client, wanted).addresses()
    info.clear()
    with pytest.raises(UserError, match="has ended, or can't be reached any more; the same"):
        workers.addresses()


def test_each_trait_decides() -> None:
    found = {"code": "a", "python": "3.11.7", "threads": "1"}
    for name in found:
        other = found | {name: "x"}
        assert traits.label(found) not in traits.resources(other)
        said = traits.differences(found, traits.resources(other))
        assert said == f"has {name} x (here {found[name]})"
    assert "was not started by" in traits.differences(found, ["GPU"])


def test_nothing_listens_for_others_or_serves_pages(cluster: Running) -> None:
    """One port of the scheduler, one of the worker, and one of what starts it again."""
    ports = {
        process.pid: [
            one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        ]
        for process in (cluster.scheduler, cluster.workers, *cluster.worker_processes())
    }
    assert {found.ip for each in ports.values() for found in each} == {"127.0.0.1"}
    assert [len(each) for each in ports.values()] == [1, 1, 1]


def test_without_the_kit_nobody_comes_in(cluster: Running, tmp_path: Path) -> None:
    found = address.located(cluster.named)
    place = "127.0.0.1", int(found.address.rpartition(":")[2])
    context = ssl.create_default_context(cafile=cluster.kit / kit.CA)
    context.check_hostname = False
    with (
        socket.create_connection(place, timeout=10) as raw,
        context.wrap_socket(raw) as own,
        pytest.raises(ssl.SSLError),
    ):
        own.recv(1)  # TLS 1.3 asks for the certificate after the handshake
    context.load_cert_chain(cluster.kit / kit.CERTIFICATE, cluster.kit / kit.KEY)
    with socket.create_connection(place, timeout=10) as raw:
        context.wrap_socket(raw).close()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(place, timeout=10) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw)
    kit.make(tmp_path / "other", 1)
    with pytest.raises(UserError, match="no scheduler of this cluster answers"):
        front.trained(Cluster(found.address, tmp_path / "other"), [], {}).__next__()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --cluster tcp://10.0.0.5:8786", "without TLS, everybody who reaches this port"),
        ("run --cluster tcp://host:8786", "without TLS, everybody who reaches this port"),
        ("run --cluster http://127.0.0.1:8786", "allowed: tls://HOST:PORT, file:"),
        ("run --cluster tls://127.0.0.1", "allowed: tls://HOST:PORT, file:"),
        ("run --cluster tls://127.0.0.1:8786", "allowed: it with --kit FOLDER"),
        ("run --cluster tls://127.0.0.1:8786 --kit none", "none/ca.crt: can't be read"),
        ("run --cluster file:none.json", "none.json: can't be read"),
        ("cluster scheduler --listen tcp://0.0.0.0:8786", "without TLS, everybody"),
        ("cluster scheduler --listen tls://0.0.0.0:8786", "allowed: the one address"),
        ("cluster scheduler --listen tls://1:2", "--listen = 'tls://1:2' is refused; allowed: it"),
        ("cluster scheduler --listen file:x", "allowed: tls://HOST:PORT, or tcp://127.0.0.1"),
        ("cluster worker foo", "error: ADDRESS = 'foo' is refused; allowed: tls://HOST:PORT, file"),
    ],
)
def test_an_unsafe_or_missing_cluster_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err
    assert CLUSTER not in os.environ


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    kit.make(tmp_path / "kit", 1)
    (tmp_path / "kit" / kit.KEY).chmod(0o644)
    with pytest.raises(UserError, match="others can read this key"):
        kit.security(tmp_path / "kit")
    with pytest.raises(UserError, match="is not empty"):
        kit.make(tmp_path / "kit", 1)
    kit.make(tmp_path / "other", 1)
    shutil.copy(tmp_path / "other" / kit.CA, tmp_path / "kit")
    (tmp_path / "kit" / kit.KEY).chmod(0o600)
    with pytest.raises(UserError, match=r"not signed by the CA of these kits; .*cluster kit"):
        kit.security(tmp_path / "kit")


LIMITS = ("target", "spill", "pause", "terminate")


def of_worker(dask_worker: Any) -> dict[str, object]:
    import multiprocessing

    import dask
    import torch

    memory, limits = dask_worker.memory_manager, dask.config.get("distributed.worker.memory")
    return {
        "trim": os.environ.get("MALLOC_TRIM_THRESHOLD_"),
        "threads": [os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")],
        "torch": torch.get_num_threads(),
        "daemon": multiprocessing.current_process().daemon,
        "memory": [memory.memory_limit, *(limits[name] for name in LIMITS)],
        "profile": "profile" in dask_worker.periodic_callbacks,
        "timeouts": dask.config.get("distributed.comm.timeouts"),
        "slots": dask_worker.state.nthreads,
    }


def of_scheduler(dask_scheduler: Any) -> dict[str, object]:
    import dask

    return {
        "failures": dask_scheduler.allowed_failures,
        "ttl": dask_scheduler.worker_ttl,
        "copies": dask_scheduler.extensions["amm"].running,
        "stealing": dask_scheduler.extensions["stealing"]._pc is not None
        if "stealing" in dask_scheduler.extensions
        else False,
        "timeouts": dask.config.get("distributed.comm.timeouts"),
        "encrypted": dask_scheduler.security.require_encryption,
    }


def test_settings_reach_scheduler_and_workers(cluster: Running) -> None:
    """The reasons are beside them, in pipelines/cluster/settings.py."""
    timeouts = {"connect": "120s", "tcp": "300s"}
    for found in asked(cluster, of_worker).values():
        assert found == {
            "trim": None,
            "threads": ["1", "1", "1"],
            "torch": 1,
            "daemon": False,
            "memory": [None, False, False, False, False],
            "profile": False,
            "timeouts": timeouts,
            "slots": 1,
        }
    assert asked(cluster, of_scheduler, of_scheduler=True) == {
        "failures": 0,
        "ttl": None,
        "copies": False,
        "stealing": False,
        "timeouts": timeouts,
        "encrypted": True,
    }


@pytest.mark.slow
def test_workers_are_free_soon_after_the_front_is_killed(
    cluster: Running, prepared: Path, tmp_path: Path
) -> None:
    """They end their round; the same command goes on."""
    here, there = copies(prepared, tmp_path, LONG)
    command = [sys.executable, "-m", "fedml_noniid.pipelines.stages", "train", "--root", str(there)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, CLUSTER: cluster.named.address}
    )
    until(lambda: [*there.glob(".resume/*/*/checkpoint.safetensors")])
    process.kill()
    process.wait()
    until(lambda: not any(asked(cluster, tasks).values()), seconds=10)
    cluster.train(there)
    run_stages(here, ("train",))
    assert contents(there / "runs") == contents(here / "runs")


def tasks(dask_worker: Any) -> int:
    return len(dask_worker.state.tasks)


@pytest.mark.slow
def test_a_lost_scheduler_ends_workers_and_run_in_one_line(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS, on loopback."""
    _, there = copies(prepared, tmp_path, LONG)
    named = Cluster(f"tcp://127.0.0.1:{free_port()}")
    scheduler = start("scheduler", "--listen", named.address)
    workers = start("worker", named.address)
    monkeypatch.setattr(front, "CONNECT_S", 3)
    killer = threading.Thread(
        target=lambda: (
            until(lambda: [*there.glob(".resume/*/*/checkpoint.safetensors")]),
            scheduler.kill(),
        )
    )
    killer.start()
    with pytest.raises(UserError, match="has ended, or can't be reached any more; the same"):
        train.run(Workspace.from_environment(there, {CLUSTER: named.address}))
    killer.join()
    assert workers.wait(60) == 0
    for process in (scheduler, workers):
        process.communicate()


def test_a_worker_that_does_not_see_the_experiment_has_a_folder_of_its_own(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy of the data set, which has to be that of the front."""
    monkeypatch.setattr(job, "get_worker", lambda: SimpleNamespace(name="w7"))
    monkeypatch.setattr(job, "_loaded", {})
    own, file = tmp_path / "own", prepared / "data" / "digits.safetensors"
    settings = config.load(prepared)
    unseen, sha256 = tmp_path / "unseen" / file.name, cache.sha256(file) or ""
    sent = Job(settings, settings.units()[0], "", b"", unseen, sha256, tmp_path, 1)
    with pytest.raises(UserError, match=r"worker w7: .* is not seen there; allowed: a file system"):
        job._data_of(sent)
    monkeypatch.setenv(job.FOLDER, str(own))
    with pytest.raises(UserError, match=r"own/digits.safetensors is missing"):
        job._data_of(sent)
    own.mkdir()
    for source, words in ((prepared / "params.yaml", "other data than the front"), (file, "")):
        shutil.copy(source, own / file.name)
        with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
            data, is_shared = job._data_of(sent)
    assert (data.checksum, is_shared) == (Dataset.read(file).checksum, False)
    assert job._data_of(sent._replace(data=file))[1]


SBATCH = """\
#!/bin/bash
for task in 0 1; do
  SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$task bash "$1" > "$LOGS/$task.log" 2>&1 &
  echo $! >> "$LOGS/pids"
done
"""


@pytest.mark.slow
def test_slurm_starts_a_cluster_that_a_run_finds(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an sbatch that starts processes. At the end of its time, a job goes back in the
    queue."""
    here, _ = copies(prepared, tmp_path, PARAMS)
    run_stages(here, ("train",))
    programs, place = tmp_path / "bin", tmp_path / "a kit"
    programs.mkdir()
    for name, content in (
        ("sbatch", SBATCH),
        ("scontrol", '#!/bin/bash\necho "$@" >> "$LOGS/requeued"\n'),
        ("hostname", "#!/bin/bash\necho 127.0.0.1\n"),
    ):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    kit.make(place, 1)
    assert main(["cluster", "slurm", "--kit", str(place), "--jobs", "2"]) == 0
    script = tmp_path / "noniid.sbatch"
    script.write_text(capsys.readouterr().out)
    assert "#SBATCH --array=0-1\n" in script.read_text()
    repository = Repository(copy(tmp_path / "repository"))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "LOGS": str(tmp_path), "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["sbatch", script], env=environment, check=True)
    tasks = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    below = [*tasks]
    try:
        until((place / address.FILE).is_file)
        said = repository.run("noniid", "run", "train", "--cluster", f"file:{place / address.FILE}")
        assert "workers of the cluster may train" in said
        assert contents(repository.folder / "runs") == contents(here / "runs")
        below += [child for task in tasks for child in task.children(recursive=True)]
        for task in tasks:
            task.terminate()
        psutil.wait_procs(below, timeout=60)
        assert sorted((tmp_path / "requeued").read_text().split("\n")) == [
            "",
            "requeue 7_0",
            "requeue 7_1",
        ]
        assert not any(process.is_running() for process in below)
    finally:
        for process in below:
            if process.is_running():
                process.kill()
