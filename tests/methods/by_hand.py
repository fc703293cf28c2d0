"""A problem small enough to follow by hand, with the gradient written out: the oracle of the
methods' tests.

The network is 2 inputs - 2 hidden neurons (ReLU) - 2 classes, 12 numbers in all. Three clients hold
1, 2 and 3 samples, the public split has 4. Everything is float64 NumPy; nothing here uses autograd
or anything of `plugins` but the `Simulation` that is under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedml_noniid.core.algorithm import State
from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.data import Samples
from fedml_noniid.core.trees import Params, add
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Outcome
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models.networks import mlp
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.simulate import simulate

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


def backward(w: Tree, x: Array, do: Array, dh: Array | float = 0.0) -> Tree:
    """The gradient of a loss with the derivatives `do` by the logits and `dh` by the hidden
    layer, [B, 2] each."""
    h = hidden(w, x)
    dz = (do @ w["fc2.weight"] + dh) * (h > 0)
    return {
        "fc1.weight": dz.T @ x,
        "fc1.bias": dz.sum(0),
        "fc2.weight": do.T @ h,
        "fc2.bias": do.sum(0),
    }


def gradient(w: Tree, x: Array, y: Array, dh: Array | float = 0.0) -> Tree:
    """Of the mean cross-entropy, plus a term whose derivative by the hidden layer is `dh`."""
    # dCE/do = (p - onehot) / B
    return backward(w, x, (softmax(logits(w, x)) - np.eye(2)[y]) / len(y), dh)


def descend(
    w: Tree,
    batches: Sequence[Array],
    direction: Callable[[Tree, Array, Array], Tree] = gradient,
    lr: float = LR,
    x: Array = X,
    y: Array = Y,
    momentum: float = 0.0,
    decay: float = 0.0,
) -> Tree:
    """v <- momentum v + direction(w, batch) + decay w; w <- w - lr v, for every batch of positions,
    with v = 0 at first."""
    v = each(np.zeros_like, w)
    for batch in batches:
        g = direction(w, x[batch], y[batch])
        v = each(lambda v, g, w: momentum * v + g + decay * w, v, g, w)
        w = each(lambda w, v: w - lr * v, w, v)
    return w


def shares(cohort: Sequence[int], weights: Sequence[float] = SIZES) -> Array:
    """p_k of the clients of a cohort, in proportion to their weights."""
    p = np.array([weights[k] for k in cohort], dtype=float)
    return np.asarray(p / p.sum())


class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) on a tree."""

    def __init__(self, start: Tree) -> None:
        self.m, self.v, self.t = each(np.zeros_like, start), each(np.zeros_like, start), 0

    def step(self, w: Tree, g: Tree, lr: float) -> Tree:
        """w <- w - lr m^ / (sqrt(v^) + 1e-8)."""
        self.t += 1
        self.m = each(lambda m, g: 0.9 * m + 0.1 * g, self.m, g)
        self.v = each(lambda v, g: 0.999 * v + 0.001 * g**2, self.v, g)
        c1, c2 = 1 - 0.9**self.t, 1 - 0.999**self.t
        return each(lambda w, m, v: w - lr * m / c1 / (np.sqrt(v / c2) + 1e-8), w, self.m, self.v)


@dataclass(frozen=True)
class Given(Stacked):
    """A network that starts from given numbers."""

    given: Tree = field(default_factory=dict)
    running: Tree = field(default_factory=dict)  # its buffers

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return tensors(self.given), tensors(self.running)


def given(start: Tree = W0, running: Tree | None = None, net: Stacked | None = None) -> Given:
    """The network of this module, or another one, with these numbers."""
    net = net or mlp((2,), 2, hidden=2, batch_norm=running is not None)
    return Given(net.name, net.blocks, net.head, given=start, running=running or {})


def with_norm() -> Given:
    """The network of this module with a batch norm behind its first layer."""
    w = W0 | {"bn1.weight": np.array([1.5, 0.7]), "bn1.bias": np.array([-0.4, 0.2])}
    return given(w, {"bn1.mean": np.zeros(2), "bn1.var": np.ones(2)})


def normalised(model: Params, x: Array) -> Array:
    """h in evaluation, [B, 2], by the parameters and running statistics of a model with a norm."""
    w = arrays(model)
    z = (x @ w["fc1.weight"].T + w["fc1.bias"] - w["bn1.mean"]) / np.sqrt(w["bn1.var"] + 1e-5)
    return np.maximum(z * w["bn1.weight"] + w["bn1.bias"], 0.0)


def tensors(tree: Tree) -> Params:
    return {key: torch.tensor(leaf, dtype=torch.float64) for key, leaf in tree.items()}


def arrays(tree: Params) -> Tree:
    return {key: leaf.numpy() for key, leaf in tree.items()}


def row(tree: Params, k: int) -> Params:
    """Row k of every leaf."""
    return {key: leaf[k] for key, leaf in tree.items()}


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
        return self.simulation.engine.clients.memory.whole()[name]

    def jobs(self) -> list[tuple[str, tuple[int, ...]]]:
        """("train", clients) and ("<component>.<job>", clients)."""
        return [
            (f"{ask.owner}.{ask.job}" if ask.owner else ask.job, ask.to)
            for ask, _ in self.exchanges
        ]

    def trained(self, exchange: int) -> Any:
        """w_k of the clients that were asked to train or to refine, leaves [M, ...]."""
        before = [ask.params for ask, _ in self.exchanges[: exchange + 1] if ask.params]
        return add(before[-1], self.exchanges[exchange][1].deltas)

    def local(self, exchange: int) -> list[Tree]:
        """`trained`, client by client."""
        trained = self.trained(exchange)
        return [arrays(row(trained, k)) for k in range(len(self.exchanges[exchange][0].to))]

    def rounds(self) -> Iterator[tuple[int, tuple[int, ...], list[list[Array]]]]:
        """(t, the cohort, the batches of each client of it) of every round."""
        plan = self.simulation.loop.plan
        for t in range(1, plan.rounds + 1):
            cohort = draw_cohort(plan.seed, t, len(CLIENTS), plan.cohort)
            yield t, cohort, [self.batches(k, t) for k in cohort]

    def replay(self, reference: Any) -> None:
        """Gives a reference the cohorts and the batches of this run."""
        for _, cohort, batches in self.rounds():
            reference.round(cohort, batches)

    def federated(
        self, local: Callable[[Tree, int, list[Array]], Tree], weights: Sequence[float] = SIZES
    ) -> Tree:
        """The model of a method that averages: w <- sum_k p_k local(w, k, batches), with p_k in
        proportion to the weights."""
        return self.kept(lambda w, _, k, batches: (local(w, k, batches), None), None, weights)[0]

    def kept(
        self,
        local: Callable[[Tree, Any, int, list[Array]], tuple[Tree, Any]],
        first: Any,
        weights: Sequence[float] = SIZES,
    ) -> tuple[Tree, list[Any]]:
        """(the model, what each client keeps) of a method that averages: `local(w, kept, k,
        batches)` gives w_k and what the client keeps from then on, at first `first`."""
        w, kept = W0, [first] * len(CLIENTS)
        for _, cohort, batches in self.rounds():
            ends = []
            for k, of in zip(cohort, batches, strict=True):
                end, kept[k] = local(w, kept[k], k, of)
                ends.append(end)
            w = average(shares(cohort, weights), ends)
        return w, kept

    def tests(self, models: Sequence[Tree], rtol: float = 1e-10) -> None:
        """Compares the model that each client is tested with."""
        for k, model in enumerate(models):
            same(row(self.outcome.personal["params"], k), model, rtol)

    def follows(
        self, loss: Callable[[Tree, Tree, int, Array], tuple[float, Tree]], start: Tree = W0
    ) -> None:
        """Compares the model, and the losses of the clients, with those of a method that changes
        the local loss: `loss(w, w_t, k, batch)` gives it with its gradient."""
        w_t = start
        for t, cohort, batches in self.rounds():
            ends = []
            for row, (k, of) in enumerate(zip(cohort, batches, strict=True)):
                w, losses = w_t, []
                for batch in of:
                    value, g = loss(w, w_t, k, batch)
                    losses.append(value)
                    w = each(lambda w, g: w - LR * g, w, g)
                ends.append(w)
                recorded = self.exchanges[t - 1][1].loss[row]
                np.testing.assert_allclose(recorded, np.mean(losses), rtol=1e-10, atol=1e-14)
            w_t = average(shares(cohort), ends)
        same(self.outcome.params, w_t, 1e-9)

    def batches(self, client: int, round_: int) -> list[Array]:
        """The positions that the client read in each step: which batches there are is not what is
        tested here."""
        order = self.simulation.engine.clients.steps(client, round_)
        return np.split(order.index, np.cumsum(order.sizes)[:-1])


def federation(
    clients: Sequence[Array] = CLIENTS,
    test: Samples | None = None,
    x: Array | None = None,
    y: Array | None = None,
) -> Federation:
    """The clients and samples of this module, or others; its public split is the test set too, if
    none is given."""
    train = samples(X if x is None else x, Y if y is None else y)
    public = samples(PUBLIC_X, PUBLIC_Y)
    return Federation.from_indices(train, list(clients), test or public, public=public)


def run(
    recipe: str,
    settings: dict[str, Any] | None = None,
    *,
    engine: str = "sequential",
    network: Stacked | None = None,
    of: Federation | None = None,
    **options: Any,
) -> Ran:
    """The real thing, in float64. `options`: fields of the plan and of local training."""
    plan: dict[str, Any] = {"rounds": 2, "cohort": 3, "seed": 0, "observing": False, "clock": None}
    # A batch of 8 is the full batch of every client.
    local: dict[str, Any] = {"optimizer": "sgd", "lr": LR, "epochs": 2, "batch_size": 8}
    for key, value in options.items():
        (plan if key in plan else local)[key] = value
    simulation = simulate(
        recipe,
        settings or {},
        of or federation(),
        Plan(network or given(), LocalTraining(**local), engine=engine, **plan),
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


def identical(a: Ran, b: Ran) -> bool:
    """Whether two runs end with the same weights, to the bit."""
    return all(torch.equal(a.outcome.params[key], leaf) for key, leaf in b.outcome.params.items())


def evaluates_what_it_sends(ran: Ran) -> bool:
    """Whether the evaluated model is the one that the next round would begin with."""
    sent, evaluated = ran.outcome.params, ran.outcome.evaluated
    return all(torch.equal(evaluated[key], leaf) for key, leaf in sent.items())


def same(found: Params, wanted: Tree, rtol: float = 1e-10) -> None:
    """The trees agree to rounding in float64."""
    assert found.keys() == wanted.keys()
    for key, leaf in found.items():
        assert leaf.dtype == torch.float64
        np.testing.assert_allclose(leaf.numpy(), wanted[key], rtol=rtol, atol=1e-13, err_msg=key)
