"""Clients of a round on the workers of a cluster: the bits of one process, whatever dies, and no
model through the scheduler."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import fedml_noniid
from fedml_noniid.pipelines.experiment.workspace import CLUSTER, CLUSTER_KIT, Workspace
from fedml_noniid.pipelines.stages import train
from fedml_noniid.plugins.core.component import Ask, Reply
from fedml_noniid.plugins.core.errors import UserError
from tests.files import contents
from tests.pipelines.small import PARAMS, ROOT, copy, run_stages

pytest.importorskip("distributed", reason="a cluster needs [cluster]")

from fedml_noniid.pipelines.cluster import address, front, rounds
from fedml_noniid.pipelines.cluster.piece import Piece
from fedml_noniid.pipelines.cluster.rounds import Divided, balanced
from tests.pipelines.test_cluster import Running, asked, start, tasks, until
from tests.pipelines.test_cluster import cluster as cluster
from tests.pipelines.test_cluster import pytestmark as pytestmark

NETWORK = {"model": "mlp", "model_options": {"hidden": 1000}}  # 75,010 parameters
MODEL = 4 * 75_010  # bytes
# Sums, of memories too; each client's loss; models, and a further exchange without one; parts that
# clients keep, and test.
RECIPES = ["scaffold", "qfedavg", "scaffold+fnr", "fedper"]
# An exchange with everybody before the first round and in each; models that clients remember; each
# client's upload; the client's own model; labels that a server counts.
MORE = ["rfedavg_plus", "fed3r", "ccvr", "moon+ccn", "apfl", "feddyn_authors", "fedbabu"]


def settings(*recipes: str, **train: Any) -> str:
    """The small experiment with clients that miss exchanges, its rounds divided."""
    found = yaml.safe_load(PARAMS)
    found["recipe_names"], found["recipes"] = [*recipes], dict.fromkeys(recipes)
    found["train"] |= {"engine": "sequential", **NETWORK, **train}
    found["scenarios"]["skewed"] |= {"clients": 7, "participation": 0.8}
    found["scenarios"]["skewed"]["availability"] = {"rate": 0.15}
    found["machine"]["on_cluster"] = "clients"
    del found["deploy"]
    return yaml.safe_dump(found)


@contextmanager
def relay(port: int) -> Iterator[tuple[int, list[int]]]:
    """(a port that leads to another one of this machine, bytes of what went through)."""
    moved, opened = [0], []
    entry = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while content := source.recv(1 << 16):
                moved[0] += len(content)
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                ends = entry.accept()[0], socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            opened.extend(ends)
            for pair in (ends, ends[::-1]):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield entry.getsockname()[1], moved
    finally:
        entry.shutdown(socket.SHUT_RDWR)
        for one in (entry, *opened):
            one.close()


def copies(folder: Path, params: str) -> tuple[Path, Path]:
    """Two copies of an experiment that is partitioned; the first one is trained here."""
    found = folder / "here", folder / "there"
    for one in found:
        one.mkdir()
        (one / "params.yaml").write_text(params)
        run_stages(one, ("prepare", "partition"))
    run_stages(found[0], ("train",))
    return found


@pytest.mark.parametrize("recipes", [RECIPES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_bits_of_one_process_and_no_model_through_the_scheduler(
    cluster: Running, tmp_path: Path, recipes: list[str]
) -> None:
    """Clients' memories of the divided rounds lie on disk."""
    here, there = copies(tmp_path, settings(*recipes))
    params = yaml.safe_load((there / "params.yaml").read_text())
    params["machine"]["clients_memory"] = "disk"
    (there / "params.yaml").write_text(yaml.safe_dump(params))
    found = address.located(cluster.named)
    with relay(int(found.address.rpartition(":")[2])) as (port, moved):
        named = {CLUSTER: f"tls://127.0.0.1:{port}", CLUSTER_KIT: str(cluster.kit)}
        train.run(Workspace.of(there, named))
    assert len(contents(here / "runs")) == 5 * len(recipes)
    assert contents(there / "runs") == contents(here / "runs")
    # Each worker gets the model in each of the three rounds, and sends an update.
    assert 0 < moved[0] < MODEL * len(recipes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("auto", 75_010, "sequential"), ""),
        (("auto", 75_009, "sequential"), "no other item is left, and 75,010 parameters are more"),
        (("items", 0, "sequential"), ""),
        (("clients", 75_010, "sequential"), "machine.on_cluster is clients"),
        (("clients", 0, "vectorized"), "a worker trains the whole item: its engine is vectorized"),
    ],
)
def test_the_rule(
    cluster: Running,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, int, str],
    said: str,
) -> None:
    """`given`: machine.on_cluster, MIN_PARAMETERS, train.engine. `said`: in the log."""
    on_cluster, least, engine = given
    monkeypatch.setattr(rounds, "MIN_PARAMETERS", least)
    params = settings("fedavg", rounds=1, engine=engine)
    (tmp_path / "params.yaml").write_text(
        params.replace("on_cluster: clients", f"on_cluster: {on_cluster}")
    )
    run_stages(tmp_path, ("prepare", "partition"))
    with caplog.at_level(logging.INFO):
        cluster.train(tmp_path)
    lines = [line for line in caplog.messages if "divided" in line or "whole item" in line]
    assert [said in line for line in lines] == [True] * bool(said)


def test_pieces_by_hand() -> None:
    """The largest client first, each to the piece with fewest samples."""
    assert balanced([3, 9, 4, 4, 1], 2) == [[1, 4], [0, 2, 3]]
    assert balanced([5, 5], 3) == [[0], [1]]
    assert balanced([2, 2, 2], 1) == [[0, 1, 2]]


def all_there(cluster: Running) -> bool:
    """Whether both workers are there."""
    with front.connected(cluster.named) as client:
        return len(client.scheduler_info()["workers"]) == 2


def kill_in(
    patch: pytest.MonkeyPatch, cluster: Running, round_: int, is_later: bool, part: float
) -> None:
    """Has a worker killed in a round: after a part of the time that its clients train, or, if
    `is_later`, when they have trained and are not asked again yet."""
    answer, took, killed = Divided._answer, [0.0], []

    def answered(self: Divided, ask: Ask, at: int) -> Reply:
        began = time.monotonic()
        if at == round_ and bool(ask.owner) == is_later and not killed:
            killed.append(random.choice(cluster.worker_processes()))
            if is_later:
                killed[0].kill()
            else:
                threading.Timer(part * took[-1], killed[0].kill).start()
        found = answer(self, ask, at)
        if not ask.owner:
            took.append(time.monotonic() - began)
        return found

    patch.setattr(Divided, "_answer", answered)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_in_twenty_runs_change_no_bit(
    cluster: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In ten runs at a random moment of training, in ten between two exchanges of a round."""
    here, there = copies(tmp_path, settings("scaffold+fnr", rounds=6, epochs=5))
    drawn = random.Random(0)
    for number in range(20):
        until(lambda: all_there(cluster), 300)
        for name in ("runs", ".items", ".resume"):
            shutil.rmtree(there / name, ignore_errors=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
            kill_in(patch, cluster, drawn.randrange(2, 5), number % 2 == 1, drawn.random())
            cluster.train(there)
        assert caplog.text.count("lost worker") == 1
        assert contents(there / "runs") == contents(here / "runs"), number


@pytest.mark.slow
def test_clients_that_kill_their_workers_end_the_run(
    cluster: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MAX_LOSSES", 2)
    send = Divided._send

    def fatal(self: Divided, piece: Piece, name: str) -> None:
        send(self, piece, name)
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends already
            for process in cluster.worker_processes():
                process.kill()

    monkeypatch.setattr(Divided, "_send", fatal)
    until(lambda: all_there(cluster), 300)
    (tmp_path / "params.yaml").write_text(settings("fedavg", epochs=50))
    run_stages(tmp_path, ("prepare", "partition"))
    with pytest.raises(UserError, match="2 workers died with the same clients of round 1"):
        cluster.train(tmp_path)


@pytest.mark.slow
def test_workers_are_free_soon_after_the_front_is_killed(cluster: Running, tmp_path: Path) -> None:
    """They end their pieces; the same command goes on, with whole items too."""
    here, there = copies(tmp_path, settings("scaffold+fnr", rounds=30, epochs=5))
    command = [sys.executable, "-m", "fedml_noniid.pipelines.stages", "train", "--root", str(there)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, CLUSTER: cluster.named.address}
    )
    until(lambda: [*there.glob(".resume/*/checkpoint.safetensors")])
    process.kill()
    process.wait()
    until(lambda: not any(asked(cluster, tasks).values()), 10)
    params = (there / "params.yaml").read_text()
    (there / "params.yaml").write_text(params.replace("on_cluster: clients", "on_cluster: items"))
    cluster.train(there)
    assert contents(there / "runs") == contents(here / "runs")


@pytest.mark.slow
def test_workers_in_other_clones(cluster: Running, tmp_path: Path) -> None:
    """Two copies of this checkout, each with one worker over TLS; ports as those of items."""
    here, there = copies(tmp_path, settings("scaffold+fnr", threads=2))
    workers = []
    for name in ("one", "two"):
        clone = copy(tmp_path / name)
        words = ["worker", f"file:{cluster.kit / address.FILE}", "--threads", "2"]
        workers.append(start(*words, folder=clone))
    try:
        cluster.train(there)
        paths = asked(cluster, lambda: list(fedml_noniid.__path__)).values()
        assert {Path(path).parent for (path,) in paths} >= {tmp_path / "one", tmp_path / "two"}
        for process in workers:
            below = psutil.Process(process.pid).children(recursive=True)
            listening = [
                one.laddr.ip
                for each in below
                for one in each.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            assert set(listening) == {"127.0.0.1"}
    finally:
        for process in workers:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert contents(there / "runs") == contents(here / "runs")
