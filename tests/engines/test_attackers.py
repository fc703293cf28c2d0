"""Clients that lie, in updates and in samples: the arithmetic, and that nothing else changes."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Reply
from fedml_noniid.engines.attackers import KINDS, Attackers, triggered
from fedml_noniid.engines.callbacks import Callback, Exchange
from tests import federation
from tests.methods import softmax as hand
from tests.methods.softmax import ENGINES, N_K, Array

LIARS, HONEST = [1, 4], [0, 2, 3, 5]


def attackers(kind: str, clients: tuple[int, ...] = (1, 4), **options: Any) -> Attackers:
    return Attackers(kind, options, clients, seed=3)


def lies(kind: str, d: Array) -> Array:
    """What the attackers send in place of their updates."""
    mean, sigma = d[HONEST].mean(0), np.sqrt(((d[HONEST] - d[HONEST].mean(0)) ** 2).mean(0))
    # M = 6 and 2 attackers need s = 4 - 2 of 4 honest clients: Phi(z) = (6 - 2 - 2) / (6 - 2).
    return {
        "sign_flip": -2 * d[LIARS],
        "scale": 7 * d[LIARS],
        "alie": mean - NormalDist().inv_cdf(2 / 4) * sigma,
        "alie, z": mean - 1.5 * sigma,
        "inner_product": -0.5 * mean,
    }[kind]


OPTIONS: dict[str, dict[str, float]] = {
    "sign_flip": {"factor": 2.0},
    "scale": {"gamma": 7.0},
    "alie": {},
    "alie, z": {"z": 1.5},
    "inner_product": {"epsilon": 0.5},
}


@pytest.mark.parametrize("on", ENGINES, ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_two_rounds_of_fedavg_under_attack(kind: str, on: tuple[str, int]) -> None:
    who = attackers(kind.partition(",")[0], **OPTIONS[kind])
    simulation = hand.simulation("fedavg", {}, on, attackers=who)
    w = hand.flat(simulation.loop.state.params)
    for _ in range(2):
        d = hand.deltas(w)
        d[LIARS] = lies(kind, d)
        w = w + N_K @ d
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("m", "b", "share"), [(20, 4, 9 / 16), (11, 3, 5 / 8), (50, 12, 24 / 38)])
def test_alie_needs_as_many_supporters_as_make_a_majority(m: int, b: int, share: float) -> None:
    """(M - B - s) / (M - B) with s = floor(M / 2 + 1) - B, worked out by hand."""
    rows = torch.randn(m, 3, generator=torch.Generator().manual_seed(0)).double()
    lie = KINDS["alie"](rows[:b], rows[b:], torch.zeros(b))
    z = NormalDist().inv_cdf(share)
    expected = rows[b:].mean(0) - z * rows[b:].std(0, correction=0)
    torch.testing.assert_close(lie, expected.expand(b, 3))


@pytest.mark.parametrize("on", ENGINES, ids=str)
def test_two_rounds_of_scaffold_whose_control_variates_lie_too(on: tuple[str, int]) -> None:
    """One full step: dc_i = -c - delta_i / lr. Attackers send 7 times both, and keep true c_i."""
    who = attackers("scale", gamma=7.0)
    simulation = hand.simulation("scaffold", {}, on, attackers=who)
    w = hand.flat(simulation.loop.state.params)
    c, c_i = 0 * w, np.zeros((6, len(w)))
    for _ in range(2):
        d = hand.deltas(w) + hand.LR * (c_i - c)
        dc = -c - d / hand.LR
        c_i += dc
        for sent in (d, dc):
            sent[LIARS] *= 7
        w, c = w + d.mean(0), c + dc.mean(0)
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        hand.flat(simulation.loop.state.slices["scaffold"]["c"]), c, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("kind", ["scale", "label_flip"])
def test_claimed_samples_weigh_more(kind: str) -> None:
    """Attackers that say to have 5 times their samples, with an honest update."""
    options = {"gamma": 1.0} if kind == "scale" else {}
    who = Attackers(kind, options, (1, 4), seed=3, n_factor=5)
    simulation = hand.simulation("fedavg", {}, ("sequential", 1), attackers=who, memory_mb=0)
    w = hand.flat(simulation.loop.state.params)
    weights = N_K * np.where(np.isin(range(6), LIARS), 5, 1)
    for _ in range(2):
        w = w + weights / weights.sum() @ hand.deltas(w)
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


def test_uploads_with_a_range_stay_honest() -> None:
    """FedProto's counts have one, its sums of features have none."""
    replies = []
    for who in (None, attackers("scale", gamma=7.0)):
        seen = Sent()
        federation.run("fedproto", attackers=who, callbacks=[seen], cohort=6, rounds=1)
        replies.append(seen.upload["fedproto"])
    honest, lied = replies
    assert torch.equal(honest["counts"], lied["counts"])
    assert torch.equal(honest["C"][HONEST], lied["C"][HONEST])
    assert not torch.equal(honest["C"][LIARS], lied["C"][LIARS])


def test_gaussian_lies_are_numbers_of_this_deviation_anew_in_each_round() -> None:
    who = attackers("gaussian", sigma=0.3)
    zero = torch.zeros(6, 4000)
    reply = Reply(tuple(range(6)), {"a": zero, "b": zero}, {}, {}, *[torch.ones(6)] * 3)
    first, again, second = (who.lied(reply, t).deltas for t in (1, 1, 2))
    rows = [part[leaf][k] for part in (first, second) for leaf in "ab" for k in LIARS]
    for i, row in enumerate(rows):
        assert abs(float(row.mean())) < 0.02 and abs(float(row.std()) - 0.3) < 0.02
        assert all(abs(float((row * other).mean())) < 0.01 for other in rows[:i])
    assert torch.equal(first["a"], again["a"]) and not first["a"][HONEST].any()


class Sent(Callback):
    """Keeps the updates of the last exchange."""

    def on_exchange(self, exchange: Exchange) -> None:
        self.deltas, self.upload = exchange.reply.deltas, exchange.reply.upload
        self.deltas = {key: leaf.clone() for key, leaf in self.deltas.items()}

    def state(self) -> dict[str, Any]:
        return {}


def test_the_last_word_on_an_update_is_the_attackers() -> None:
    """Also where a method asks again for models: FNR-FL's clients send theirs twice."""
    sent = {}
    for kind in ("scale", "sign_flip"):
        seen = Sent()
        who = attackers(kind, **({"gamma": 1e-3} if kind == "scale" else {"factor": 1e-3}))
        more = {"attackers": who, "callbacks": [seen], "cohort": 6, "rounds": 1}
        federation.run("fnr", {"fnr": {"p": 1.0}}, **more)
        sent[kind] = seen.deltas
    for key, leaf in sent["scale"].items():
        assert torch.equal(leaf[LIARS], -sent["sign_flip"][key][LIARS])
        assert torch.equal(leaf[HONEST], sent["sign_flip"][key][HONEST])


def test_an_attacker_that_is_missing_sends_nothing_and_a_cohort_of_attackers_lies_too() -> None:
    d = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    reply = Reply((0, 5), {"a": d}, {}, {}, *[torch.ones(2)] * 3)
    assert attackers("scale", gamma=2.0).lied(reply, 1) is reply
    lone = attackers("inner_product", (0, 5), epsilon=2.0).lied(reply, 1).deltas["a"]
    torch.testing.assert_close(lone, (-2 * d.mean(0)).expand(2, 3))


def test_updates_are_held_where_somebody_lies_about_them() -> None:
    """Sums that were added up while clients trained could not be changed any more."""
    small = federation.simulation("fedavg", memory_mb=0, attackers=attackers("alie"))
    assert not small.engine.streams
    assert federation.equal(small.run(), federation.run("fedavg", attackers=attackers("alie")))
    assert federation.simulation(
        "fedavg", memory_mb=0, attackers=attackers("label_flip")
    ).engine.streams
    assert federation.simulation("fedavg", memory_mb=0).engine.streams


@pytest.mark.parametrize(
    ("recipe", "acts"), [("fedavg", True), ("centralised", False), ("fedproto", True)]
)
def test_a_run_says_who_attacks_and_where_that_has_no_effect(recipe: str, acts: bool) -> None:
    simulation = federation.simulation(recipe, attackers=attackers("sign_flip", factor=5.0))
    words = simulation.remarks["attack"]
    assert words.startswith("clients 1, 4 attack") and ("without an effect" in words) is not acts
    assert federation.equal(simulation.run(), federation.run(recipe)) is not acts


CLIENTS = [np.array([0, 3]), np.array([1, 2, 4, 5]), np.array([6, 7])]


def test_labels_of_attackers_are_flipped_and_no_others() -> None:
    x, y = torch.zeros(8, 1, 4, 4), torch.arange(8) % 4
    seen, flipped = attackers("label_flip", (1,)).samples(CLIENTS, x, y, 4)
    assert torch.equal(seen, x)
    assert flipped.tolist() == [0, 2, 1, 3, 3, 2, 2, 3]  # y -> 3 - y at 1, 2, 4, 5


def test_a_backdoor_stamps_a_part_of_the_attackers_samples() -> None:
    x = torch.arange(8.0).reshape(8, 1, 1, 1) / 7 * torch.ones(8, 2, 4, 4)
    x[7, 1] = 3.0
    y = torch.full((8,), 2)
    seen, labels = attackers("backdoor", (1,), target=1, rate=0.5).samples(CLIENTS, x, y, 4)
    stamped = (seen != x).flatten(1).any(1)
    assert int(stamped.sum()) == 2 and {1, 2, 4, 5} > {*stamped.nonzero().flatten().tolist()}
    assert torch.equal(labels == 1, stamped)
    corner = torch.tensor([1.0, 3.0]).reshape(2, 1, 1).expand(2, 2, 2)  # brightest by channel
    for k in stamped.nonzero().flatten().tolist():
        torch.testing.assert_close(seen[k, :, 2:, 2:], corner)
        assert torch.equal(seen[k, :, :2], x[k, :, :2]) and torch.equal(
            seen[k, 0, 2, :2], x[k, 0, 2, :2]
        )
    assert torch.equal(triggered(x, x)[stamped], seen[stamped])
