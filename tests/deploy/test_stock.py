"""The pairs under stock FedML over real gRPC: a server and three silos as processes on loopback.

FedML's ports are fixed: a run waits for another one on the same machine.
"""

from __future__ import annotations

import importlib
import socket

import pytest

from benchmarks import stock_fedml
from fedml_noniid.core.errors import UserError
from fedml_noniid.processes import loopback
from tests.deploy import world

DEADLINE_S = 120.0


def stock(terms, parts, folder):
    """The SHA-256 of the weights. FedML's silo may end before it has replied to the last message,
    and then the server fails: once more."""
    try:
        return stock_fedml.run(terms, parts, folder, DEADLINE_S)
    except UserError:
        if "Cancelling all calls" not in stock_fedml.log_file(folder, 0).read_text():
            raise
    return stock_fedml.run(terms, parts, folder, DEADLINE_S)


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize(
    ("recipe", "cohort", "rounds"),
    [
        (
            "scaffold+fnr+rfedavg_plus+ccn",
            2,
            2,
        ),  # all kinds of exchanges, states of the silos, public data
        pytest.param("fedbabu+ccn", 0, 12, marks=pytest.mark.slow),  # only the body travels
    ],
)
def test_three_silos_end_with_the_weights_of_the_simulation(recipe, cohort, rounds, tmp_path):
    terms, parts = (
        world.deployment(recipe, rounds, cohort=cohort),
        world.parts(public="fnr" in recipe),
    )
    assert stock(terms, parts, tmp_path) == loopback.simulate(terms, parts)


@pytest.mark.usefixtures("ports")
def test_a_run_needs_its_ports_for_itself(tmp_path):
    """FedML would share a port with a listener that allows it, and wait for ever."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", 8892))
        listener.listen()
        with pytest.raises(UserError, match=r"^port 8892 of silo 1 \(rank 2\) can't be used"):
            stock_fedml.run(
                world.deployment("fedavg", 1), world.parts(public=False), tmp_path, DEADLINE_S
            )


def test_fedml_does_not_phone_home_and_is_left_as_it_was(monkeypatch):
    importlib.import_module("fedml_noniid.deploy.host")
    from fedml.core.mlops.mlops_configs import MLOpsConfigs

    def refused(*_: object) -> None:
        raise AssertionError("a request left the machine")

    monkeypatch.setattr("requests.sessions.Session.request", refused)
    before = MLOpsConfigs.__dict__["fetch_all_configs"]
    with stock_fedml.no_phoning_home():
        assert MLOpsConfigs.fetch_all_configs() == ({}, {}, {"LOG_SERVER_URL": ""}, {})
    assert MLOpsConfigs.__dict__["fetch_all_configs"] is before
