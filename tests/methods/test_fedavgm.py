"""FedAvgM (Hsu et al. 2019) is `sgdm_server` by the name that others use."""

from __future__ import annotations

from tests.methods import by_hand as hand


def test_it_has_the_bits_of_the_heavy_ball_on_the_server(engine: str) -> None:
    """Whose own test is arithmetic by hand."""
    options = {"rounds": 4, "cohort": 2, "batch_size": 1}
    avgm = hand.run("fedavgm", {"fedavgm": {"beta": 0.7}}, engine=engine, **options)
    ball = hand.run("sgdm_server", {"sgdm_server": {"gamma": 0.7}}, engine=engine, **options)
    assert hand.identical(avgm, ball)
    assert not hand.identical(avgm, hand.run("fedavg", engine=engine, **options))
