"""DP-FedAvg by hand: clipped updates, a fixed denominator, noise, epsilon, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fedml_noniid.core.component import Change, Component, Replies, Server, Setting
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import norm, row
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.plugins import registry
from fedml_noniid.privacy.accounting import epsilon
from tests import federation

ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])
CLIP = 0.2


@dataclass(frozen=True)
class Reads(Component):
    """Measures the mean of the updates."""

    name: ClassVar[str] = "reads"

    def step(self, server: Server) -> Change:
        """Without noise."""
        return Change(metrics=weighted_mean(server.omega, server.replies.deltas))


class Keep(Callback):
    """Keeps what the clients sent, and the model before and after."""

    def __init__(self) -> None:
        self.rounds: list[Any] = []

    def on_exchange(self, exchange: Any) -> None:
        deltas = {name: leaf.clone() for name, leaf in exchange.reply.deltas.items()}
        self.rounds.append((exchange.start.params, deltas, exchange.reply.clients))


def kept(settings: Any, engine: str = "sequential", **how: Any) -> tuple[list[Any], Any]:
    keep, how = Keep(), {"dtype": torch.float64, "rounds": 1} | how
    found = federation.simulation(
        "dpfedavg", {"dpfedavg": settings}, engine=engine, callbacks=[keep], **how
    )
    outcome = found.run()
    return found.loop.callbacks[-1].rounds, outcome


@ENGINES
def test_a_client_sends_its_clipped_update_and_the_sum_is_divided_by_the_cohort(
    engine: str,
) -> None:
    """Delta_k min(1, S / ||Delta_k||) of plain FedAvg's updates; two of four clients are missing,
    and the sum is still divided by four."""
    how: Any = {"engine": engine, "absent": lambda t, exchange, to: to[:2]}
    ((start, sent, clients),), outcome = kept({"clip": CLIP, "noise": 0.0}, **how)
    ((_, plain, same),), _ = kept({"clip": 0.0, "noise": 0.0}, **how)
    assert clients == same and len(clients) == 2
    for k in range(2):
        one, other = row(plain, k), row(sent, k)
        factor = min(1.0, CLIP / norm(one).item())
        assert (factor < 1) is (norm(one).item() > CLIP)
        for name, leaf in one.items():
            torch.testing.assert_close(other[name], factor * leaf, rtol=1e-12, atol=1e-15)
        assert norm(other).item() <= CLIP * (1 + 1e-12)
    for name, leaf in sent.items():
        wanted = start[name] + leaf.sum(0) / 4
        torch.testing.assert_close(outcome.params[name], wanted, rtol=1e-12, atol=1e-14)


def test_the_noise_is_z_s_over_m_on_the_sum() -> None:
    from fedml_noniid.models import build

    pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    wide = build("mlp", (6,), federation.N_CLASSES, {"hidden": 2000})
    how: Any = {"model": wide}
    _, noisy = kept({"clip": CLIP, "noise": 3.0}, **how)
    _, plain = kept({"clip": CLIP, "noise": 0.0}, **how)
    drawn = torch.cat([(noisy.params[n] - plain.params[n]).flatten() for n in plain.params])
    expected, n = 3.0 * CLIP / 4, drawn.numel()
    assert abs(drawn.std().item() / expected - 1) < 5 / math.sqrt(2 * n)
    assert abs(drawn.mean().item()) < 5 * expected / math.sqrt(n)


def test_epsilon_counts_the_rounds_of_the_client_that_answered_most() -> None:
    pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    given = {"dpfedavg": {"clip": CLIP, "noise": 2.0, "delta": 1e-4}}
    simulation = federation.simulation("dpfedavg", given, cohort=2, rounds=6)
    rows, plan = simulation.run().rows, simulation.loop.plan
    counts, expected = [0] * 6, []
    for t in range(1, 7):
        for k in plan.draw_cohort(t, 6):
            counts[k] += 1
        expected.append(epsilon({2.0: max(counts)}, 1e-4))
    assert [row["epsilon_per_client"] for row in rows] == pytest.approx(expected)
    assert max(counts) < 6


def test_it_needs_sums() -> None:
    """Nothing else of the clients: a method beside it that reads their updates is refused."""
    made = registry.build("dpfedavg", {}, Setting(6, 4))
    assert made.needs.replies is Replies.SUMS and made.uniform

    recipe = f"dpfedavg+{__name__}:Reads"
    with pytest.raises(RecipeError, match="answers are hidden by noise in their sum"):
        federation.run(recipe, {"dpfedavg": {"noise": 0.0}})


@pytest.mark.parametrize("other", ["scaffold", "sgdm"])
def test_methods_that_send_more_than_the_update_are_refused_in_round_one(other: str) -> None:
    with pytest.raises(RecipeError, match=f"{other}' sends more than the update; drop one"):
        federation.run(f"dpfedavg+{other}", {"dpfedavg": {"noise": 0.0}})
