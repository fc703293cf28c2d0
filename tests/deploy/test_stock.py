"""The pairs under stock FedML over real gRPC: a server and three silos as processes on loopback.

FedML's ports are fixed: a run waits for another one on the same machine.
"""

from __future__ import annotations

import importlib
import socket

import pytest

from benchmarks import stock_fedml, transport
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy import settings
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
    seconds = stock_fedml.seconds_by_round(tmp_path)
    assert len(seconds) == rounds and min(seconds) > 0


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


def test_the_benchmark_takes_turns_drops_first_rounds_and_compares_weights(monkeypatch):
    """Ours takes 1, 2 s, then 2, 2 s; stock FedML 6, 6 s, then 4, 4 s: ratios 6 / 1.5 = 4 and 4 / 2
    = 2."""
    made = {
        transport.OURS: [[9.0, 1.0, 2.0], [9.0, 2.0, 2.0]],
        transport.STOCK: [[9.0, 6.0, 6.0], [9.0, 4.0, 4.0]],
    }
    called: list[str] = []

    def fake(name: str, sha: str):
        def run(
            terms: settings.Deployment, parts: object, folder: object
        ) -> tuple[str, list[float]]:
            called.append(name)
            return sha, made[name][called.count(name) - 1]

        return run

    monkeypatch.setattr(transport, "TRANSPORTS", {name: fake(name, "same") for name in made})
    sha, rounds = transport.measure(silos=2, megabytes=1, rounds=3, turns=2)
    assert (sha, called) == ("same", [transport.OURS, transport.STOCK] * 2)
    assert rounds["seconds"].tolist() == [1.0, 2.0, 6.0, 6.0, 2.0, 2.0, 4.0, 4.0]
    assert transport.table(rounds)[1:] == [
        [transport.OURS, "2.00", "1.00 to 2.00", "1", ""],
        [transport.STOCK, "5.00", "4.00 to 6.00", "3.00", "2.00 to 4.00"],
    ]
