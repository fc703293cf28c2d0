"""The pairs under stock FedML over real gRPC: a server and three silos as processes on loopback.

FedML's ports are fixed: a run waits for another one on the same machine.
"""

from __future__ import annotations

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
