"""Strangers without a certificate, against a server process with few file descriptors."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fedml_noniid.deploy import exit_codes, silo_server
from fedml_noniid.processes import launch, loopback
from tests.deploy import world
from tests.deploy.test_processes import SERVER, ended, running, simulated
from tests.processes import until

LIMIT, CONNECTIONS = 512, 600  # file descriptors of the server, for good; silent connections


def poor(rank: int, config: str, output: str) -> None:
    """A process that can't raise its limit of file descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    loopback.process(rank, config, output)


@contextmanager
def silent(place: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """So many TCP connections that send nothing. The server may close some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 500:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 500), hard))
    lines: list[socket.socket] = []
    try:
        for _ in range(count):
            with suppress(OSError):
                lines.append(socket.create_connection(place, 1.0))
        yield lines
    finally:
        for line in lines:
            line.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_connections_do_not_end_the_server(tmp_path: Path):
    """They come during a run, which writes files in every round, and stay."""
    terms = world.deployment("fedavg", rounds=10)
    with running(terms, tmp_path, poor) as processes:
        server = psutil.Process(processes.running[SERVER].pid)
        with silent(processes.deployment.comm_args.address, CONNECTIONS):
            until(lambda: server.num_fds() > LIMIT / 2, "the server to take them")
            used = server.num_fds()
            codes = ended(processes, SERVER)
        log = launch.log_file(processes.output, SERVER).read_text()
        assert codes == [0], log[-2000:]
        assert used < LIMIT - 100  # some are left for files
        assert processes.digest() == simulated(terms)


def test_a_server_that_can_not_write_ends_with_1_and_goes_on_when_it_can(tmp_path: Path):
    """As with a full disk: from the first round on, no file may have more than 100 bytes."""
    terms = world.deployment("fedavg", rounds=5)
    with running(terms, tmp_path) as processes:
        psutil.Process(processes.running[SERVER].pid).rlimit(psutil.RLIMIT_FSIZE, (100, 100))
        # The silos are told, and wait for it.
        assert ended(processes, SERVER) == [exit_codes.CODES[exit_codes.BrokenError]] == [1]
        processes.start(SERVER)
        assert ended(processes, SERVER) == [0]
        assert processes.digest() == simulated(terms)


@pytest.mark.parametrize("unit", ["server", "silo@"])
def test_a_unit_starts_a_process_again_unless_it_is_over_or_was_refused(unit: str):
    text = (Path(__file__).parents[2] / f"examples/deploy/fedml-noniid-{unit}.service").read_text()
    keys = dict(
        line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] not in "#["
    )
    stay = {
        0,
        *map(int, keys["SuccessExitStatus"].split()),
        *map(int, keys["RestartPreventExitStatus"].split()),
    }
    kinds = exit_codes.PolicyError, exit_codes.StoppedError
    assert keys["Restart"] == "on-failure" and keys["StartLimitIntervalSec"] == "0"
    assert stay == {0, *(exit_codes.CODES[kind] for kind in kinds)}
    if unit == "server":
        assert int(keys["LimitNOFILE"]) >= 2 * silo_server.MAX_CONNECTIONS
