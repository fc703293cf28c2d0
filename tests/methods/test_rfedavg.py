"""rFedAvg and rFedAvg+ (Wang et al. 2023), algorithms 1 and 2, against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.component import RecipeError, Setting
from plugins.engines.simulation import draw_cohort
from plugins.rfedavg.algorithm import RFedAvg, RFedAvgPlus
from tests.methods import by_hand as hand

LAM = 0.4
EVERYBODY = (0, 1, 2)


def delta(w: hand.Tree, k: int) -> hand.Array:
    """delta^k = 1/n_k sum_j phi(w, x_kj), over the client's whole local set."""
    return np.asarray(hand.hidden(w, hand.X[hand.CLIENTS[k]]).mean(0))


class Reference:
    """Both algorithms: `others` says what a client is compared with, `value` and `slope` are r and its derivative."""

    def __init__(self, plus: bool) -> None:
        self.plus, self.w = plus, hand.W0
        self.table = np.stack([delta(self.w, k) for k in EVERYBODY])  # line 1: delta_0, with w_0
        self.loss = 0.0

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        local, losses = [], []
        for k, of in zip(cohort, batches, strict=True):
            others = np.array([self.table[j] for j in EVERYBODY if j != k])  # never its own
            w_k, seen = self.w, []
            for batch in of:
                x, y = hand.X[batch], hand.Y[batch]
                phi = hand.hidden(w_k, x).mean(0)
                if self.plus:  # section IV-C: r = ||phi - 1/(N-1) sum_j delta^j||^2
                    r, dr = ((phi - others.mean(0)) ** 2).sum(), 2 * (phi - others.mean(0))
                else:  # eq. 5: r = 1/(N-1) sum_j ||phi - delta^j||^2
                    r, dr = ((phi - others) ** 2).sum(1).mean(), 2 * (phi - others).mean(0)
                seen.append(hand.loss(w_k, x, y) + LAM * r)
                g = hand.gradient(w_k, x, y, dh=LAM * dr / len(batch))  # every sample is 1/B of the mean
                w_k = hand.each(lambda w, g: w - hand.LR * g, w_k, g)  # line 9 (algorithm 2: 10)
            local.append(w_k)
            losses.append(np.mean(seen))
        self.loss = float(np.mean(losses))
        n = np.array([hand.SIZES[k] for k in cohort])
        self.w = hand.average(n / n.sum(), local)  # line 12
        self.table = self.table.copy()
        for k, w_k in zip(cohort, local, strict=True):
            # Algorithm 1, line 10: with the local model; algorithm 2, line 15: with the new global one.
            self.table[k] = delta(self.w if self.plus else w_k, k)


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_plus"])
def test_two_rounds_of_everybody(name: str, engine: str) -> None:
    ran = hand.run(name, {name: {"lam": LAM}}, engine=engine)
    reference = Reference(name == "rfedavg_plus")
    np.testing.assert_allclose(ran.exchanges[0][1].upload[name]["delta"], reference.table, rtol=1e-12)
    for t in range(2):
        reference.round(EVERYBODY, [[client] * 2 for client in hand.CLIENTS])
        assert ran.outcome.rows[t]["local_loss"] == pytest.approx(reference.loss, rel=1e-10)
    hand.same(ran.outcome.params, reference.w)
    np.testing.assert_allclose(ran.state(name)["delta"], reference.table, rtol=1e-10)


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_plus"])
def test_partial_participation_keeps_the_rows_of_those_who_are_absent(name: str, engine: str) -> None:
    """Two of three clients, mini-batches of 2: r compares the batch's mean feature with everybody's last delta."""
    ran = hand.run(name, {name: {"lam": LAM}}, engine=engine, cohort=2, rounds=3, batch_size=2)
    reference = Reference(name == "rfedavg_plus")
    cohorts = [draw_cohort(0, t, 3, 2) for t in (1, 2, 3)]
    assert len(set(cohorts)) > 1, "the example has an absent client whose row is used"
    for t, cohort in enumerate(cohorts, start=1):
        reference.round(cohort, [ran.batches(k, t) for k in cohort])
    hand.same(ran.outcome.params, reference.w)
    np.testing.assert_allclose(ran.state(name)["delta"], reference.table, rtol=1e-10)


def test_the_exchanges_of_rfedavg() -> None:
    """delta_0 before round 1 by everybody, then one exchange a round: delta goes up with the model."""
    ran = hand.run("rfedavg", cohort=2)
    assert [job for job, _ in ran.jobs()] == ["rfedavg.map", "train", "train"]
    assert ran.jobs()[0][1] == EVERYBODY


def test_the_exchanges_of_rfedavg_plus() -> None:
    """Lines 13-16: the cohort maps its data with the model that the server has just averaged."""
    ran = hand.run("rfedavg_plus", cohort=2)
    assert [job for job, _ in ran.jobs()] == [
        "rfedavg_plus.map",
        "train",
        "rfedavg_plus.map",
        "train",
        "rfedavg_plus.map",
    ]
    (train, _), (mapped, _) = ran.exchanges[3:]
    assert mapped.to == train.to
    assert all(torch.equal(mapped.params[key], ran.outcome.params[key]) for key in mapped.params)


def test_a_client_is_not_compared_with_itself() -> None:
    """delta = 1, 2, 4 (d = 1, N = 3)."""
    state = {"delta": torch.tensor([[1.0], [2.0], [4.0]])}
    others = RFedAvg(n_clients=3, feature_size=1).address(state, (0, 2))["others"]
    assert others.squeeze(2).tolist() == [[2.0, 4.0], [1.0, 2.0]]
    mean = RFedAvgPlus(n_clients=3, feature_size=1).address(state, (0, 2))["mean"]
    assert mean.tolist() == [[3.0], [1.5]]


def test_both_regularisers_have_the_same_gradient() -> None:
    """Section IV-C: r and r~ differ by a constant, so with equal deltas one round moves the model equally."""
    weights = [hand.run(name, {name: {"lam": LAM}}, rounds=1).outcome.params for name in ("rfedavg", "rfedavg_plus")]
    hand.same(weights[0], {key: leaf.numpy() for key, leaf in weights[1].items()})


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_plus"])
def test_lambda_zero_is_fedavg_to_the_bit(name: str, engine: str) -> None:
    ran = hand.run(name, {name: {"lam": 0.0}}, engine=engine, cohort=2, rounds=3)
    plain = hand.run("fedavg", engine=engine, cohort=2, rounds=3)
    assert all(torch.equal(ran.outcome.params[key], plain.outcome.params[key]) for key in plain.outcome.params)


def test_a_stronger_regulariser_brings_the_clients_features_together() -> None:
    def spread(lam: float) -> float:
        ran = hand.run("rfedavg", {"rfedavg": {"lam": lam}}, rounds=3, epochs=4, lr=0.2)
        return float(ran.state("rfedavg")["delta"].var(0).sum())

    assert spread(2.0) < spread(0.5) < spread(0.0)


@pytest.mark.parametrize("kind", [RFedAvg, RFedAvgPlus])
def test_bad_settings_are_refused(kind: type[RFedAvg | RFedAvgPlus]) -> None:
    with pytest.raises(RecipeError, match="lam = -1"):
        kind(n_clients=3, feature_size=2, lam=-1.0).check(Setting(3, 3, 2, 2, "sgd", 0.1, 0))
    with pytest.raises(RecipeError, match="at least 2"):
        kind(n_clients=1, feature_size=2).check(Setting(1, 1, 2, 2, "sgd", 0.1, 0))
