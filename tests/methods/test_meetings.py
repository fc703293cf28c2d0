"""Where two methods meet and neither's own test looks: what the docstrings promise, against
arithmetic by hand."""

from __future__ import annotations

import numpy as np
import torch

from tests.methods import by_hand as hand
from tests.methods import test_feddyn as feddyn
from tests.methods import test_fednlr as fednlr


class Scaled(feddyn.Reference):
    """FedDyn whose local steps have FedNLR's row-wise rates, of the received model."""

    def local(self, k: int, batches: list[hand.Array]) -> hand.Tree:
        g_k, w_t = self.g[k], self.w
        rates = fednlr.factors(w_t, hand.X[hand.CLIENTS[k]])

        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            return hand.each(
                lambda rate, g, g_k, w, w_t: rate * (g - g_k + feddyn.ALPHA * (w - w_t)),
                rates,
                hand.gradient(w, x, y),
                g_k,
                w,
                w_t,
            )

        return hand.descend(w_t, batches, direction)


def test_fednlr_scales_feddyns_terms_and_g_k_sees_what_came_of_it(engine: str) -> None:
    settings = feddyn.PLAIN | {"fednlr": {"mu0": fednlr.MU0, "a1": fednlr.A1, "a2": fednlr.A2}}
    ran, reference = hand.run("feddyn+fednlr", settings, engine=engine, rounds=3), Scaled()
    ran.replay(reference)
    feddyn.compare(ran, reference)


def test_rfedavg_plus_maps_with_the_distilled_model(engine: str) -> None:
    """FedDF's step comes before the map, and what it makes is what is evaluated and sent next."""
    settings: dict[str, dict[str, object]] = {
        "feddf": {"steps": 3, "batch_size": 4},
        "rfedavg_plus": {"lam": 0.01},
    }
    ran = hand.run("feddf+rfedavg_plus", settings, engine=engine, rounds=2)
    jobs = [ask for ask, _ in ran.exchanges]
    assert [job for job, _ in ran.jobs()] == [
        "rfedavg_plus.map",
        *["train", "rfedavg_plus.map"] * 2,
    ]
    assert jobs[2].params is jobs[3].params, "mapped and then trained on"
    average, sent = (
        hand.average(np.array(hand.SIZES) / 6, ran.local(1)),
        hand.arrays(jobs[2].params),
    )
    assert any(not np.allclose(sent[key], leaf) for key, leaf in average.items()), "FedDF moved it"
    assert hand.evaluates_what_it_sends(ran)


def test_moon_remembers_the_model_before_fnrs_refinement(engine: str) -> None:
    settings: dict[str, dict[str, object]] = {
        "moon": {"mu": 0.5},
        "fnr": {"p": 1.0, "epochs": 2, "batch_size": 8},
    }
    ran = hand.run("fnr+moon", settings, engine=engine, rounds=1)
    (_, trained), (_, refined) = ran.exchanges
    for key, leaf in ran.memory("moon")["w"].items():
        torch.testing.assert_close(leaf, ran.trained(0)[key], rtol=1e-12, atol=1e-14)
        assert not torch.allclose(trained.deltas[key], refined.deltas[key])


def test_with_fednnnn_a_distilled_model_is_the_evaluated_one() -> None:
    """Not the average, which FedNNNN evaluates by itself."""
    ran = hand.run("feddf+fednnnn", {"feddf": {"steps": 3, "batch_size": 4}}, rounds=1)
    assert hand.evaluates_what_it_sends(ran)
    assert not hand.evaluates_what_it_sends(hand.run("fednnnn", rounds=1))
