"""FedAvgM (Hsu et al. 2019): the heavy ball on the server, with a step size."""

from __future__ import annotations

import pytest

from tests.methods import by_hand as hand
from tests.methods.test_sgdm import GAMMA, Reference


@pytest.mark.parametrize("step", [1.0, 1.5])
def test_three_rounds(engine: str, step: float) -> None:
    """v = beta v + u and w = w + eta v; with eta = 1 the bits of `sgdm_server`."""
    options = {"rounds": 3, "cohort": 2, "batch_size": 1}
    settings = {"fedavgm": {"beta": GAMMA, "server_lr": step}}
    ran, reference = (
        hand.run("fedavgm", settings, engine=engine, **options),
        Reference("sgdm_server", step=step),
    )
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)
    ball = hand.run("sgdm_server", {"sgdm_server": {"gamma": GAMMA}}, engine=engine, **options)
    assert hand.identical(ran, ball) is (step == 1)
