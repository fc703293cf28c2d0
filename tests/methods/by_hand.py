"""A problem small enough to follow by hand, with the gradient written out: the oracle of the
methods' tests.

The network is 2 inputs - 2 hidden neurons (ReLU) - 2 classes, 12 numbers in all. Three clients hold
1, 2 and 3 samples, the public split has 4. Everything is float64 NumPy; nothing here uses autograd
or anything of `plugins` but the `Simulation` that is under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedml_noniid.plugins.core.algorithm import State
from fedml_noniid.plugins.core.component import Ask, Reply
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.trees import add
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.engines.run import Outcome
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.models.model import Model
from fedml_noniid.plugins.models.networks import mlp
from fedml_noniid.plugins.rates import Rate
from fedml_noniid.plugins.simulate import simulate

Array = NDArray[Any]
Tree = dict[str, Array]

LR = 0.5
SIZES = (1, 2, 3)  # n_k
X = np.array([[1.0, -0.5], [0.3, 0.8], [-0.7, 1.1], [0.9, 0.4], [-0.2, -1.3], [1.4, 0.6]])
Y = np.array([0, 1, 0, 1, 1, 0])
CLIENTS = (np.array([0]), np.array([1, 2]), np.array([3, 4, 5]))
PUBLIC_X = np.array([[0.5, 0.5], [-1.0, 0.2], [0.1, -0.9], [0.8, 1.2]])
PUBLIC_Y = np.array([0, 0, 1, 1])
W0: Tree = {
    "fc1.weight": np.array([[0.6, -0.4], [0.2, 0.9]]),
    "fc1.bias": np.array([0.3, 0.1]),
    "fc2.weight": np.array([[0.5, -0.8], [-0.3, 0.7]]),
    "fc2.bias": np.array([0.05, -0.15]),
}


def each(fn: Callable[..., Array], *trees: Tree) -> Tree:
    """`fn` on the arrays of the same name."""
    return {key: fn(*(tree[key] for tree in trees)) for key in trees[0]}


def zeros() -> Tree:
    return each(np.zeros_like, W0)


def average(p: Sequence[float] | Array, trees: Sequence[Tree]) -> Tree:
    """sum_k p_k tree_k."""
    return each(lambda *rows: sum(p_k * row for p_k, row in zip(p, rows, strict=True)), *trees)


def length(tree: Tree) -> float:
    """L2 norm of all numbers as one vector."""
    return float(np.sqrt(sum((leaf**2).sum() for leaf in tree.values())))


def hidden(w: Tree, x: Array) -> Array:
    """h = max(0, x W1' + b1), [B, 2]: the input of the classifier."""
    return np.maximum(x @ w["fc1.weight"].T + w["fc1.bias"], 0.0)


def logits(w: Tree, x: Array) -> Array:
    """o = h W2' + b2, [B, 2]."""
    return hidden(w, x) @ w["fc2.weight"].T + w["fc2.bias"]


def softmax(o: Array) -> Array:
    e = np.exp(o - o.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def loss(w: Tree, x: Array, y: Array) -> float:
    """Mean cross-entropy."""
    return float(-np.log(softmax(logits(w, x))[np.arange(len(y)), y]).mean())


def accuracy(w: Tree, x: Array, y: Array) -> float:
    return float((logits(w, x).argmax(axis=1) == y).mean())


def gradient(w: Tree, x: Array, y: Array, dh: Array | float = 0.0) -> Tree:
    """Of the mean cross-entropy, plus a term whose derivative by the hidden layer is `dh` ([B,
    2])."""
    h = hidden(w, x)
    do = (softmax(logits(w, x)) - np.eye(2)[y]) / len(y)  # dCE/do = (p - onehot) / B
    dz = (do @ w["fc2.weight"] + dh) * (h > 0)
    return {
        "fc1.weight": dz.T @ x,
        "fc1.bias": dz.sum(0),
        "fc2.weight": do.T @ h,
        "fc2.bias": do.sum(0),
    }


def descend(
    w: Tree,
    batches: Sequence[Array],
    direction: Callable[[Tree, Array, Array], Tree] = gradient,
    lr: float = LR,
    x: Array = X,
    y: Array = Y,
) -> Tree:
    """w <- w - lr direction(w, batch), for every batch of positions."""
    for batch in batches:
        w = each(lambda leaf, g: leaf - lr * g, w, direction(w, x[batch], y[batch]))
    return w


@dataclass(frozen=True)
class Given(Model):
    """A network that starts from given numbers."""

    start: dict[str, Array] = field(default_factory=dict)

    def init(
        self, generator: torch.Generator
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {
            key: torch.tensor(value, dtype=torch.float64) for key, value in self.start.items()
        }, {}


def given(start: Tree = W0) -> Given:
    net = mlp((2,), 2, hidden=2)
    return Given(net.name, net.blocks, net.head, start=start)


def samples(x: Array, y: Array) -> Samples:
    return Samples(torch.tensor(x, dtype=torch.float64), torch.tensor(y))


@dataclass
class Ran:
    """A simulation that has run, and what was said in it."""

    simulation: Simulation
    outcome: Outcome
    exchanges: list[tuple[Ask, Reply]]

    @property
    def server(self) -> State:
        return self.simulation.loop.state

    def state(self, name: str) -> Any:
        return self.server.slices[name]

    def memory(self, name: str) -> Any:
        return self.simulation.engine.clients.memory[name]

    def jobs(self) -> list[tuple[str, tuple[int, ...]]]:
        """("train", clients) and ("<component>.<job>", clients)."""
        return [
            (f"{ask.owner}.{ask.job}" if ask.owner else ask.job, ask.to)
            for ask, _ in self.exchanges
        ]

    def trained(self, exchange: int) -> Any:
        """w_k of the clients that were asked to train, leaves [M, ...]."""
        ask, reply = self.exchanges[exchange]
        return add(ask.params, reply.deltas)

    def batches(self, client: int, round_: int) -> list[Array]:
        """The positions that the client read in each step: which batches there are is not what is
        tested here."""
        order = self.simulation.engine.clients.steps(client, round_)
        return np.split(order.index, np.cumsum(order.sizes)[:-1])


def run(
    recipe: str,
    settings: dict[str, dict[str, object]] | None = None,
    *,
    engine: str = "sequential",
    rounds: int = 2,
    cohort: int = 3,
    epochs: int = 2,
    batch_size: int = 8,  # the full batch of every client
    lr: float | Rate = LR,
    seed: int = 0,
    network: Given | None = None,
    observing: bool = False,
    **local: Any,
) -> Ran:
    """The real thing, in float64."""
    simulation = simulate(
        recipe,
        settings or {},
        Federation.of(
            samples(X, Y),
            list(CLIENTS),
            samples(PUBLIC_X, PUBLIC_Y),
            public=samples(PUBLIC_X, PUBLIC_Y),
        ),
        Plan(
            network or given(),
            LocalTraining("sgd", lr, epochs, batch_size, **local),
            rounds,
            cohort,
            seed,
            engine=engine,
            observing=observing,
        ),
    )
    exchanges = tapped(simulation)
    return Ran(simulation, simulation.run(), exchanges)


def tapped(simulation: Simulation) -> list[tuple[Ask, Reply]]:
    """What will have been exchanged: copies of replies, whose models a round may overwrite."""
    exchanges: list[tuple[Ask, Reply]] = []
    answer = simulation.engine.answer

    def listen(ask: Ask, round_: int) -> Reply:
        reply = answer(ask, round_)
        exchanges.append((ask, copy.deepcopy(reply)))
        return reply

    simulation.engine.answer = listen  # type: ignore[method-assign]  # a wire tap
    return exchanges


def same(found: dict[str, torch.Tensor], wanted: Tree, rtol: float = 1e-10) -> None:
    """The trees agree to rounding in float64."""
    assert found.keys() == wanted.keys()
    for key, leaf in found.items():
        assert leaf.dtype == torch.float64
        np.testing.assert_allclose(leaf.numpy(), wanted[key], rtol=rtol, atol=1e-13, err_msg=key)
