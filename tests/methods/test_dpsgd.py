"""DP-SGD by hand: clipped gradients of single samples, noise, epsilon, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.component import Client
from fedml_noniid.core.data import Batch
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.task import Task
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.models import build
from fedml_noniid.plugins.baselines.dpsgd import DPSGD
from fedml_noniid.privacy.accounting import epsilon
from tests import federation
from tests.methods import by_hand as hand
from tests.models.test_own import own

ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])
CLIP, CLIPPED = 0.5, set[bool]()
CLIENT = Client(Task(federation.network(), SGD(0.1)), {}, {}, 1)


@ENGINES
def test_it_clips_the_gradient_of_each_sample(engine: str) -> None:
    """Ragged clients, batches of 2 and short ones, two epochs, two rounds."""
    ran = hand.run("dpsgd", {"dpsgd": {"clip": CLIP, "noise": 0.0}}, engine=engine, batch_size=2)

    def clipped(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        singles = [hand.gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
        factors = [min(1.0, CLIP / hand.length(g)) / len(y) for g in singles]
        CLIPPED.update(factor * len(y) < 1 for factor in factors)
        return hand.average(factors, singles)

    wanted = ran.federated(lambda w, k, of: hand.descend(w, of, clipped))
    hand.same(ran.outcome.params, wanted)
    assert {True, False} == CLIPPED, "the clip acts on some"


@ENGINES
def test_the_noise_of_a_step_is_sigma_c_over_b_from_a_key_of_its_own(engine: str) -> None:
    """With a step size of 1, no gradient (C = 1e-9) and batches of 4, what is left is the sum of
    two steps' noise: sigma C / B each."""
    pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    sigma = 3e9
    of = federation.federation(torch.float64, (4, 4))
    wide = build("mlp", (6,), federation.N_CLASSES, {"hidden": 500})
    how: Any = {"data": of, "model": wide, "dtype": torch.float64, "cohort": 2, "rounds": 1}
    updates: list[dict[str, torch.Tensor]] = []

    class Keep(Callback):
        def on_exchange(self, exchange: Any) -> None:
            updates.append({name: leaf.clone() for name, leaf in exchange.reply.deltas.items()})

    given = {"dpsgd": {"clip": 1e-9, "noise": sigma}}
    federation.run("dpsgd", given, engine=engine, lr=1.0, callbacks=[Keep()], **how)
    one, other = updates[0]["fc1.weight"].flatten(1)
    n = one.numel()
    for drawn in (one, other):
        expected = sigma * 1e-9 / 4 * math.sqrt(2)
        assert abs(drawn.std().item() / expected - 1) < 5 / math.sqrt(2 * n)
        assert abs(drawn.mean().item()) < 5 * expected / math.sqrt(n)
    assert abs((one * other).mean().item()) < 5 * expected**2 / math.sqrt(n)


rows = st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=6), st.floats(1e-3, 1e2), st.integers(0, 5))
def test_one_sample_moves_the_sum_by_the_clip_at_most(
    grads: list[list[float]], clip: float, gone: int
) -> None:
    """Whatever the gradients: the sums with a sample and without what it adds are C apart at
    most. That is the sensitivity that the noise is told in."""
    whole = {"a": torch.tensor(grads, dtype=torch.float64)[:, :1]}
    whole["b"] = torch.tensor(grads, dtype=torch.float64)[:, 1:]
    gone %= len(grads)
    without = {name: leaf.clone() for name, leaf in whole.items()}
    for leaf in without.values():
        leaf[gone] = 0
    batch = Batch(torch.zeros(len(grads), 1), torch.zeros(len(grads)))
    method = DPSGD(clip, 0.0)
    sums = [method.sample_gradients(of, batch, CLIENT) for of in (whole, without)]
    apart = torch.cat([(sums[0][name] - sums[1][name]) for name in whole]) * len(grads)
    assert apart.norm().item() <= clip * (1 + 1e-9)


def test_padding_adds_nothing_and_is_not_counted() -> None:
    grads = {"w": torch.tensor([[3.0], [4.0], [0.0]])}
    batch = Batch(torch.zeros(3, 1), torch.zeros(3), torch.tensor([True, True, False]))
    found = DPSGD(3.5, 0.0).sample_gradients(grads, batch, CLIENT)
    assert found["w"].tolist() == [(3.0 + 3.5) / 2]


@pytest.mark.parametrize(
    ("local", "passes"),
    [
        ({"epochs": 3}, 3),
        ({"epochs": 3, "drop_last": True}, 3),
        ({"epochs": 1, "local_steps": 1}, 1),
        ({"epochs": 1, "local_steps": 7}, 7),  # one batch an epoch, for the smallest client
    ],
)
def test_epsilon_is_that_of_the_client_whose_samples_are_read_most(
    local: dict[str, Any], passes: int
) -> None:
    """Counted by hand from the cohorts and the batches: how often one sample was read in all."""
    pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    given = {"dpsgd": {"clip": 1.0, "noise": 2.0, "delta": 1e-4}}
    simulation = federation.simulation("dpsgd", given, cohort=2, rounds=4, **local)
    plan, read = simulation.loop.plan, Counter[int]()
    rows, expected = simulation.run().rows, []
    for t in range(1, 5):
        for k in plan.draw_cohort(t, len(federation.SIZES)):
            read.update(simulation.engine.clients.steps(k, t).index.tolist())
            assert simulation.engine.clients.local.passes(federation.SIZES[k]) <= passes
        expected.append(epsilon({2.0: max(read.values())}, 1e-4))
    assert [row["epsilon_per_sample"] for row in rows] == pytest.approx(expected)
    assert np.all(np.diff([row["epsilon_per_sample"] for row in rows]) >= 0)


def test_without_noise_epsilon_is_infinite_and_without_a_clip_nothing_is_promised() -> None:
    rows = federation.run("dpsgd", {"dpsgd": {"noise": 0.0}}).rows
    assert [row["epsilon_per_sample"] for row in rows] == [math.inf] * federation.ROUNDS
    neutral = federation.run("dpsgd", {"dpsgd": {"clip": 0.0, "noise": 0.0}}).rows
    assert not any("epsilon" in name for row in neutral for name in row)
    with pytest.raises(RecipeError, match=r"noise = 1\.0 is a multiple of clip, and clip = 0"):
        federation.run("dpsgd", {"dpsgd": {"clip": 0.0, "noise": 1.0}})


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "batch norms mix the samples of a batch"), ("Recurrent", "training under vmap")],
)
def test_a_plan_tells_why_single_samples_have_no_gradient(name: str, why: str) -> None:
    made = own(name) if name else federation.network(batch_norm=True)
    plan = replace(federation.simulation("fedavg").loop.plan, network=made)
    assert plan.setting(6, 0).no_sample_gradients.startswith(why)
    assert plan.setting(6, 0).norms is (not name)
