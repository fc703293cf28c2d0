"""Items on a cluster: the same files as of this machine's processes, whatever dies, and nobody
else on it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import config, resume
from fedml_noniid.pipelines.experiment.workspace import CLUSTER, Workspace
from fedml_noniid.pipelines.stages import train
from fedml_noniid.pipelines.tracking import live
from fedml_noniid.pipelines.tracking.store import Store
from tests.files import contents
from tests.pipelines.small import PARAMS, ROOT, run_stages
from tests.processes import until

pytest.importorskip("distributed", reason="a cluster needs [cluster]")

from fedml_noniid.pipelines.cluster import address, front, job, kit, traits
from fedml_noniid.pipelines.cluster.job import Done, Job

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

    def train(self, folder: Path) -> None:
        """Trains the items of the experiment in `folder`."""
        train.run(Workspace.from_environment(folder, {CLUSTER: str(self.kit)}))

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cluster") / "kit"
    kit.make(folder, 1)
    (folder.parent / f"{BESIDE}.py").touch()
    scheduler = start("scheduler", "--listen", "127.0.0.1:0", "--kit", str(folder))
    # As the command `noniid`, Python does not look in the working folder by itself.
    command = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    words = "worker", str(folder), "--processes", "1"
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
    with front.connected(cluster.kit) as client:
        return (client.run_on_scheduler if of_scheduler else client.run)(function)


def refuse_transfers(dask_scheduler: Any) -> None:
    for name in ("gather", "scatter"):
        dask_scheduler.handlers[name] = None  # a call is an error


def found_beside() -> bool:
    return importlib.util.find_spec(BESIDE) is not None


@pytest.mark.slow
def test_the_files_are_those_of_this_machine(
    cluster: Running, prepared: Path, tmp_path: Path
) -> None:
    """No file goes through the scheduler. A worker finds modules where it was started."""
    assert [*asked(cluster, found_beside).values()] == [True]
    asked(cluster, refuse_transfers, of_scheduler=True)
    here, there = copies(prepared, tmp_path, PARAMS)
    run_stages(here, ("train",))
    cluster.train(there)
    assert len(contents(here / "runs")) > 8
    assert contents(there / "runs") == contents(here / "runs")
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
    assert "was not started by" in traits.differences(wanted, ["GPU"])
    info.clear()
    with pytest.raises(UserError, match="has ended, or can't be reached any more; the same"):
        workers.addresses()


@pytest.mark.slow
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


@pytest.mark.slow
def test_without_the_kit_nobody_comes_in(cluster: Running, tmp_path: Path) -> None:
    found = address.located(cluster.kit)
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
    shutil.copy(cluster.kit / address.FILE, tmp_path / "other")
    with pytest.raises(UserError, match="no scheduler of this cluster answers"):
        front.trained(tmp_path / "other", [], {}).__next__()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --cluster none", "none/ca.crt: can't be read"),
        ("run --cluster KIT", "scheduler.json: can't be read (No such file or directory); `noniid"),
        ("cluster worker none", "none/ca.crt: can't be read"),
        ("cluster scheduler --kit KIT --listen 0.0.0.0:8786", "allowed: HOST:PORT, with the one"),
        ("cluster scheduler --kit KIT --listen tls://x", "--listen = 'tls://x' is refused; allow"),
        ("cluster scheduler --kit KIT --listen [::]:1", "allowed: HOST:PORT, with the one address"),
        ("cluster scheduler --kit KIT --listen 10.0.0.5:99999", "'10.0.0.5:99999' is refused"),
    ],
)
def test_an_unsafe_or_missing_cluster_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit.make(tmp_path / "kit", 1)
    assert main(words.replace("KIT", str(tmp_path / "kit")).split()) == 2
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


def test_a_worker_makes_the_files_of_this_machine_or_refuses_the_item(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process. It reports the rounds once, and leaves no checkpoint."""
    here, there = copies(prepared, tmp_path, PARAMS)
    run_stages(here, ("train",))
    sent: list[Any] = []
    worker = SimpleNamespace(
        name="w7",
        state=SimpleNamespace(tasks={"": SimpleNamespace(state="executing")}),
        get_current_task=str,
        log_event=lambda _, report: sent.append(pickle.loads(report)),
    )
    monkeypatch.setattr(job, "get_worker", lambda: worker)
    place, settings = Workspace.from_environment(there, {}), config.load(there)
    unit = settings.units()[0]
    mark = json.loads((here / "runs" / unit.key / "run.json").read_text())["tags"]["fingerprint"]
    told = Job(place, settings, unit, mark)
    done = job.run(told, "attempt")
    made = contents(here / "runs" / unit.key)
    assert isinstance(done, Done) and done.files == {name: made[name] for name in done.files}
    assert [row["round"] for row in done.report.rows] == [1, 2, 3]
    assert sent[0].rows == done.report.rows[:1]
    refused = job.run(told._replace(fingerprint="of the front"), "")
    assert str(refused).startswith(
        "worker w7: skewed-fedavg-0: its code, data or partition are not"
    )
    refused = job.run(told._replace(workspace=replace(place, root=tmp_path / "unseen")), "")
    assert "unseen is not seen there; allowed: a file system" in str(refused)
    worker.state.tasks.clear()
    shutil.rmtree(there / resume.RESUME)
    assert "nobody waits for this item any more" in str(job.run(told, "other"))


def test_slurm_gets_a_script_that_bash_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the kit has a space. The first job has the scheduler, and each a worker."""
    kit, script = tmp_path / "a kit", tmp_path / "noniid.sbatch"
    words = ["--jobs", "2", "--processes", "4", "--threads", "2", "--sbatch=--partition=cpu"]
    assert main(["cluster", "slurm", "--kit", str(kit), *words]) == 0
    script.write_text(capsys.readouterr().out)
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    for line in ("--array=0-1\n", "--cpus-per-task=8\n", "--requeue\n", "--partition=cpu\n"):
        assert f"#SBATCH {line}" in text
    assert f"""cluster scheduler --listen "$host:0" --kit '{kit}' &\n""" in text
    assert f"cluster worker '{kit}' --processes 4 --threads 2 &\n" in text
