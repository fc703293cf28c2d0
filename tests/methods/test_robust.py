"""Rules against dishonest clients, against NumPy in float64, and what each promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Reply, Server
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import fold, identity, uniform
from fedml_noniid.core.task import Task
from fedml_noniid.plugins import registry
from fedml_noniid.plugins.baselines.bucketing import Bucketing
from tests.methods import softmax as hand
from tests.methods.softmax import ENGINES, N_K, Array


def krum(x: Array, f: int, m: int) -> Array:
    squares = ((x[:, None] - x) ** 2).sum(2)
    scores = [np.sort(np.delete(squares[k], k))[: len(x) - f - 2].sum() for k in range(len(x))]
    mean: Array = x[np.argsort(scores, kind="stable")[:m]].mean(0)
    return mean


def rfa(x: Array, alpha: Array, steps: int) -> Array:
    z = alpha @ x
    for _ in range(steps):
        beta = alpha / np.maximum(1e-6, np.linalg.norm(x - z, axis=1))
        z = beta @ x / beta.sum()
    return z


RULES: dict[str, tuple[str, dict[str, Any], Callable[[Array], Array]]] = {
    "median": ("median", {}, lambda x: np.median(x, 0)),
    "trimmed mean": ("trimmed_mean", {"beta": 0.34}, lambda x: np.sort(x, 0)[2:-2].mean(0)),
    "krum": ("krum", {"f": 1}, lambda x: krum(x, 1, 1)),
    "multi-krum": ("krum", {"f": 2, "m": 3}, lambda x: krum(x, 2, 3)),
    "rfa": ("rfa", {}, lambda x: rfa(x, N_K, 3)),
    "rfa alike": ("rfa", {"weights": "uniform", "R": 8}, lambda x: rfa(x, np.full(6, 1 / 6), 8)),
}


@pytest.mark.parametrize("on", ENGINES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_two_rounds(rule: str, on: tuple[str, int]) -> None:
    recipe, options, by_hand = RULES[rule]
    simulation = hand.simulation(recipe, {recipe: options}, on)
    w = hand.flat(simulation.loop.state.params)
    for _ in range(2):
        w = w + by_hand(hand.deltas(w))
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on", ENGINES, ids=str)
def test_three_rounds_of_centred_clipping(on: tuple[str, int]) -> None:
    options = {"tau": 0.05, "beta": 0.6, "L": 2}
    simulation = hand.simulation("centred_clipping", {"centred_clipping": options}, on, rounds=3)
    w = hand.flat(simulation.loop.state.params)
    v, m = 0 * w, hand.deltas(w)
    for t in range(3):
        m = m if t == 0 else 0.4 * hand.deltas(w) + 0.6 * m
        for _ in range(2):
            far = np.linalg.norm(m - v, axis=1, keepdims=True)
            assert (far > 0.05).any(), "something is clipped"
            v = v + ((m - v) * np.minimum(1, 0.05 / far)).mean(0)
        w = w + v
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on", ENGINES, ids=str)
@pytest.mark.parametrize(
    ("name", "options", "by_hand"),
    [("median", {}, lambda x: np.median(x, 0)), ("krum", {"f": 0}, lambda x: krum(x, 0, 1))],
)
def test_a_rule_over_three_buckets_of_two(
    name: str, options: dict[str, Any], by_hand: Callable[[Array], Array], on: tuple[str, int]
) -> None:
    simulation = hand.simulation(f"bucketing+{name}", {name: options}, on)
    w = hand.flat(simulation.loop.state.params)
    for t in (1, 2):
        key = fold(simulation.loop._server(t, ()).keys, identity(Bucketing()))
        draws = [float(uniform(fold(key, client), 1)) for client in range(6)]
        pairs = np.argsort(draws).reshape(3, 2)
        w = w + by_hand(hand.deltas(w)[pairs].mean(1))
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), [("krum", {"f": 1, "m": 2}), ("median", {})])
def test_a_rule_sees_each_bucket_once_also_a_smaller_one(
    name: str, options: dict[str, Any]
) -> None:
    """11 clients in buckets of 3, 3, 3 and 2: Krum's neighbours are among four rows."""
    x = torch.randn(11, 5, generator=torch.Generator().manual_seed(2)).double()
    server = _server(x)
    order = np.argsort([float(uniform(fold(server.key, k), 1)) for k in range(11)])
    means = np.array([x.numpy()[order[i : i + 3]].mean(0) for i in (0, 3, 6, 9)])
    rule: Any = registry.method(name)(**options)
    result = rule.average(replace(server, replies=Bucketing(s=3).refine(server)))["w"]
    expected = krum(means, 1, 2) if name == "krum" else np.median(means, 0)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("krum", {"f": 1}, "f = 1, m = 1 of 3 clients or buckets"),
        ("krum", {"f": 0, "m": 4}, "f = 0, m = 4 of 3 clients or buckets"),
        ("trimmed_mean", {"beta": 0.2}, "beta = 0.2 of 3 clients or buckets trims nobody"),
    ],
)
def test_too_few_buckets_for_a_rule_are_refused_in_the_first_round(
    name: str, options: dict[str, Any], words: str
) -> None:
    simulation = hand.simulation(f"bucketing+{name}", {name: options}, ("sequential", 1))
    with pytest.raises(RecipeError, match=words):
        next(simulation.rounds())


def _server(x: torch.Tensor, statistics: torch.Tensor | None = None) -> Server:
    """A server with updates [M, P], and running statistics [M, Q] whose old value is 1."""
    m, nothing = len(x), torch.zeros(len(x))
    old = {} if statistics is None else {"var": torch.ones(statistics.shape[1])}
    new = {} if statistics is None else {"var": statistics}
    ones = torch.ones(m)
    reply = Reply(tuple(range(m)), {"w": x}, new, {}, ones, ones, nothing)
    w = {"w": torch.zeros(x.shape[1])}
    state = {"v": w}
    omega = torch.ones(m, dtype=torch.float64)
    task: Task = None  # type: ignore[assignment]  # no rule reads it
    keys = torch.tensor(7)
    more: dict[str, Any] = {"state": state, "start": w, "replies": reply}
    more |= {"omega": omega, "keys": keys}
    return Server(task, w, old, 1, m, cohort=reply.clients, **more)


ROBUST: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"beta": 0.3},
    "krum": {"f": 3},
    "rfa": {"R": 50},
    "centred_clipping": {},
}


@pytest.mark.parametrize("name", ROBUST)
def test_f_of_n_arbitrary_clients_move_a_rule_by_a_bounded_way(name: str) -> None:
    """3 of 11 clients send the largest numbers there are, in the update or in running statistics.
    The result stays near the honest clients'; their mean goes away."""
    rule: Any = registry.method(name)(**ROBUST[name])
    rng = torch.Generator().manual_seed(0)
    x, var = (torch.randn(11, 5, generator=rng).double() for _ in range(2))
    for size in (1e3, 1e9, 1e15):
        for lies_in in ("w", "var"):
            leaves = {"w": x.clone(), "var": 1 + var.abs()}
            leaves[lies_in][[1, 4, 9]] = size
            result = rule.average(_server(leaves["w"], leaves["var"]))
            assert result.keys() == {"w", "var"}
            for key, leaf in result.items():
                assert leaf.abs().max() < 4, (key, lies_in, size)
            assert leaves[lies_in].mean(0).min() > 100
