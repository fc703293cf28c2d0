"""FedAvgM (Hsu et al. 2019): `sgdm_server` by the name that others use, and a step size."""

from __future__ import annotations

import numpy as np

from tests.methods import by_hand as hand

BETA, STEP = 0.7, 1.5


def test_it_has_the_bits_of_the_heavy_ball_on_the_server(engine: str) -> None:
    """Whose own test is arithmetic by hand."""
    options = {"rounds": 4, "cohort": 2, "batch_size": 1}
    avgm = hand.run("fedavgm", {"fedavgm": {"beta": BETA}}, engine=engine, **options)
    ball = hand.run("sgdm_server", {"sgdm_server": {"gamma": BETA}}, engine=engine, **options)
    assert hand.identical(avgm, ball)
    assert not hand.identical(avgm, hand.run("fedavg", engine=engine, **options))


def test_the_server_steps_by_eta(engine: str) -> None:
    """v = beta v + u and w = w + eta v in NumPy, where every round takes the gradient at w."""
    settings = {"fedavgm": {"beta": BETA, "server_lr": STEP}}
    ran = hand.run("fedavgm", settings, engine=engine, rounds=3, cohort=2)
    w, v = hand.W0, hand.zeros()
    for _, cohort, batches in ran.rounds():
        found = []
        for of in batches:
            local = w
            for batch in of:
                g = hand.gradient(local, hand.X[batch], hand.Y[batch])
                local = hand.each(lambda w, g: w - hand.LR * g, local, g)
            found.append(local)
        n = np.array([hand.SIZES[k] for k in cohort], dtype=float)
        average = hand.average(n / n.sum(), found)
        v = hand.each(lambda v, new, w: BETA * v + new - w, v, average, w)
        w = hand.each(lambda w, v: w + STEP * v, w, v)
    hand.same(ran.outcome.params, w)
