"""A server and silos as processes on loopback: equal weights, ports, pickle, kills, stops,
errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks import chaos
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import exit_codes, results, settings, silo_client
from fedml_noniid.governance import audit
from fedml_noniid.processes import launch, loopback
from tests.deploy import world
from tests.processes import until
from tests.walks import thinned

DEADLINE_S = 120.0
SERVER, *SILOS = range(4)


@contextmanager
def running(
    terms: settings.Deployment, folder: Path, main: loopback.Main | None = None
) -> Iterator[loopback.Processes]:
    """The server and three silos, once the first round is over."""
    with loopback.Processes(terms, world.parts(public=False), folder, main) as processes:
        for rank in range(4):
            processes.start(rank)
        until((processes.output / results.ROUNDS).exists, "the first round")
        yield processes


def ended(processes: loopback.Processes, *ranks: int) -> list[int]:
    """The exit codes of these processes, or of all, once they are there."""
    found = [processes.running[rank] for rank in ranks or processes.running]
    until(lambda: all(process.exitcode is not None for process in found), "the end")
    return [process.exitcode for process in found]


def simulated(terms: settings.Deployment) -> str:
    return loopback.simulate(terms, world.parts(public=False))


@pytest.mark.parametrize(
    ("recipe", "cohort"),
    [
        ("scaffold+fnr+rfedavg_plus+ccn", 2),
        # The batch norms stay on the silos.
        pytest.param("fedbn", 0, marks=pytest.mark.slow),
        # The server learns on public data, and asks once more after the last round.
        pytest.param("ccvr+feddf", 0, marks=pytest.mark.slow),
        # The whole model stays on the silos.
        pytest.param("fedproto", 2, marks=pytest.mark.slow),
        pytest.param("datasharing+feddyn+fednlr", 2, marks=pytest.mark.slow),
        pytest.param("median", 0, marks=pytest.mark.slow),
    ],
)
def test_three_silos_end_with_the_weights_of_the_simulation(recipe, cohort, tmp_path):
    terms = world.deployment(recipe, cohort=cohort)
    parts = world.parts()
    assert loopback.run(terms, parts, tmp_path, DEADLINE_S) == loopback.simulate(terms, parts)
    rows = (tmp_path / "run" / "rounds.csv").read_text().splitlines()
    assert len(rows) == 1 + world.ROUNDS
    assert rows[0].startswith("round,test_accuracy,test_loss,validation_accuracy")
    assert all(0 <= float(row.split(",")[1]) <= 1 for row in rows[1:])
    log = launch.log_file(tmp_path / "run", 0).read_text().splitlines()
    assert len(log) <= 1 + 5 * world.ROUNDS
    whole(tmp_path)


def whole(folder: Path) -> None:
    """The audit logs of the silos and the server are whole, and agree."""
    server, *silos = (folder / "run" / audit.FILE.format(rank) for rank in (SERVER, *SILOS))
    for log in silos:
        assert "agree with it" in audit.verify(log, folder / "kits" / "0" / "ca.crt", server)


@pytest.mark.slow
def test_local_noise_and_its_secret_survive_kills(tmp_path):
    """A silo and the server are killed; the secrets stay, and the run ends with weights of its own,
    which a replay has too."""
    noise = {"enable_dp": True, "dp_solution_type": "ldp", "mechanism_type": "gaussian"}
    noise |= {"epsilon": 0.9, "delta": 1e-5, "sensitivity": 0.01}
    terms = world.deployment("scaffold+ccn", rounds=10)
    with running(
        terms.model_copy(update={"dp_args": settings.DpArgs(**noise)}), tmp_path
    ) as processes:
        paths = [processes.deployment.kit(rank).with_name(f"{rank}.noise.key") for rank in SILOS]
        before = [path.read_bytes() for path in paths]
        assert len({*before}) == 3
        for rank in (SILOS[1], SERVER):
            processes.kill(rank)
            processes.start(rank)
        assert ended(processes) == [0] * 4
        assert processes.digest() != simulated(terms)
        assert [path.read_bytes() for path in paths] == before
    whole(tmp_path)
    replay = ("audit", "replay", "--rank", str(SILOS[1]), "--config", str(processes.config))
    said = subprocess.run(  # a process of its own: FedML's noise is global
        [sys.executable, "-m", "fedml_noniid", *replay], capture_output=True, text=True
    )
    assert said.stdout.count("the same SHA-256") >= 10, said.stderr


@pytest.mark.slow
def test_secure_sums_survive_kills(tmp_path):
    """Of a silo, of the server, and of both at once."""
    terms = world.deployment("scaffold", rounds=40, secure_sums=2)
    with running(terms, tmp_path) as processes:

        def rounds() -> int:
            return len((processes.output / results.ROUNDS).read_text().splitlines()) - 1

        for at, ranks in ((3, [SILOS[1]]), (12, [SERVER]), (21, [SILOS[0], SERVER])):
            until(lambda at=at: rounds() >= at, "a round")
            for rank in ranks:
                processes.kill(rank)
            for rank in ranks:
                processes.start(rank)
        assert ended(processes) == [0] * 4
        assert processes.digest() == simulated(terms)
        # Not in the output folder, which may be deleted for a new run.
        sums = processes.deployment.kit(1).with_name("1.sums").read_text().splitlines()
        assert len(sums) == len({*sums}) == 41  # one begins the file


def audited(rank: int, config: str, output: str) -> None:
    """A process that writes down what it unpickles, runs or connects to."""
    seen = Path(output) / f"seen-{rank}"

    def hook(event: str, details: tuple) -> None:
        if event in ("pickle.find_class", "os.system", "subprocess.Popen") or (
            event == "socket.connect" and details[1][0] not in ("127.0.0.1", "::1")
        ):
            with seen.open("a") as file:
                file.write(f"{event} {details[1:]}\n")

    sys.addaudithook(hook)
    loopback.process(rank, config, output)


def test_nothing_is_unpickled_and_only_the_server_listens(tmp_path):
    """Ports are counted while the run waits for the last silo."""
    terms, parts = world.deployment("scaffold+rfedavg_plus"), world.parts(public=False)
    with loopback.Processes(terms, parts, tmp_path, audited) as processes:
        for rank in (SERVER, 1, 2):
            processes.start(rank)
        comm = processes.deployment.comm_args

        def there() -> list[int]:
            try:
                return silo_client.status(comm, processes.deployment.kit(0))["there"]
            except exit_codes.LostError:  # it does not listen yet
                return []

        until(lambda: there() == [0, 1], "two silos")
        listening = {
            rank: [
                at.laddr.port
                for at in psutil.Process(process.pid).net_connections()
                if at.status == "LISTEN"
            ]
            for rank, process in processes.running.items()
        }
        assert listening == {SERVER: [comm.address[1]], 1: [], 2: []}
        processes.start(3)
        assert ended(processes) == [0] * 4
        assert processes.digest() == simulated(terms)
        assert not list(processes.output.glob("seen-*"))


@pytest.mark.parametrize(
    ("part", "seed"), thinned([(chaos.all_must_answer, 0), (chaos.two_must_answer, 4)])
)
def test_a_run_survives_kills(part, seed, tmp_path, monkeypatch):
    """`python -m benchmarks chaos` does this many times."""
    monkeypatch.setattr(chaos, "DEADLINE_S", 0.5)
    ran = part(seed, 2, tmp_path)
    assert not ran.error, ran
    assert len(ran.events) == 2
    assert ran.audit_lines > 100
    assert ran.replayed > 5


def test_a_server_that_is_asked_to_stop_goes_on_later_and_a_second_one_finds_the_port_taken(
    tmp_path,
):
    terms = world.deployment("scaffold", rounds=20)
    with running(terms, tmp_path) as processes:
        comm = processes.deployment.comm_args
        with pytest.raises(UserError, match=f"comm_args.server = '{comm.server}': can't listen"):
            comm.check_free()
        os.kill(processes.running[SERVER].pid, signal.SIGTERM)
        stopped = exit_codes.CODES[exit_codes.StoppedError]
        assert ended(processes, SERVER) == [stopped]
        rows = (processes.output / results.ROUNDS).read_text().splitlines()
        assert 0 < len(rows) - 1 < 20
        processes.start(SERVER)
        assert ended(processes) == [0] * 4
        assert processes.digest() == simulated(terms)


def test_a_killed_silo_ends_a_watched_run_and_is_named(tmp_path, monkeypatch):
    """Killed once the run is under way; the loopback run ends long before its deadline, and leaves
    nobody behind."""
    started, running = loopback.Processes.start, {}

    def start(self, rank):
        started(self, rank)
        running.update(self.running)
        if rank == SILOS[-1]:
            until((self.output / results.ROUNDS).exists, "the first round")
            os.kill(running[2].pid, signal.SIGKILL)

    monkeypatch.setattr(loopback.Processes, "start", start)
    words = rf"^silo 1 \(rank 2\): was killed by signal {signal.SIGKILL.value}; see "
    endless = world.deployment("fedavg", rounds=100_000)
    with pytest.raises(UserError, match=words):
        loopback.run(endless, world.parts(public=False), tmp_path, 600.0)
    assert not any(process.is_alive() for process in running.values())
