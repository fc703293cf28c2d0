"""The network and the partition of NIID-Bench, and SCAFFOLD as three public codes have it.

- NIID-Bench: Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos: An Experimental Study,
  ICDE 2022. https://arxiv.org/abs/2102.02079, https://github.com/Xtra-Computing/NIID-Bench
- Flower's baseline niid_bench: https://github.com/adap/flower, baselines/niid_bench
- FedBench: the package `fedbench`, version 0.1.3

research/results/niid-bench.md and fedbench.md have the studies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Exclusive,
    Needs,
    Server,
    Setting,
    Trace,
    Weights,
)
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.options import NonNegative, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, Tree, add, scale, sub, tree_map, zeros_like
from fedml_noniid.data.types import Ints
from fedml_noniid.plugins.baselines.scaffold import Scaffold


class LeNet(nn.Sequential):
    """Their `simple-cnn`: conv5 6, ReLU, pool, conv5 16, ReLU, pool, 120, ReLU, 84, ReLU, classes.

    62,006 parameters on CIFAR-10, 44,426 on MNIST. [B, depth, side, side] -> logits [B, n_classes].
    """

    def __init__(self, n_classes: int, input_shape: Sequence[int]) -> None:
        depth, side, _ = input_shape
        super().__init__(
            *(nn.Conv2d(depth, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(16 * ((side - 12) // 4) ** 2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, n_classes)),
        )


class LeNetChannelsLast(LeNet):
    """LeNet on images whose channels are last in memory: less time a step on a CPU with AVX-512.

    The weights differ from LeNet's by rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, depth, side, side] -> logits [B, n_classes]."""
        return super().forward(  # type: ignore[no-any-return, no-untyped-call]  # torch has none
            x.contiguous(memory_format=torch.channels_last)
        )


def dirichlet(
    labels: Ints,
    n_clients: int,
    *,
    generator: Literal["niid_bench", "flower"],
    draw: int,
    alpha: float = 0.5,
) -> list[Ints]:
    """The very numbers of samples per client and class that their code draws with the seed `draw`.

    NIID-Bench draws from NumPy's old generator, Flower and FedBench from its new one. Which sample
    of a class a client holds follows the order of the samples, which differs between copies of a
    data set.
    """
    rng = np.random.RandomState(draw) if generator == "niid_bench" else np.random.default_rng(draw)
    clients: list[list[int]] = [[]]
    while min(map(len, clients)) < 10:
        clients = [[] for _ in range(n_clients)]
        for label in np.unique(labels):
            mine = np.flatnonzero(labels == label)
            rng.shuffle(mine)
            share = rng.dirichlet(np.full(n_clients, alpha))
            # A client that has an equal share of all samples gets nothing of the next class.
            share *= [len(held) < len(labels) / n_clients for held in clients]
            cuts = (np.cumsum(share / share.sum()) * len(mine)).astype(int)[:-1]
            for held, part in zip(clients, np.split(mine, cuts), strict=True):
                held.extend(part)
    return [np.sort(held) for held in clients]


@dataclass(frozen=True)
class Corrected(Optimizer):
    """SGD with one more step of -lr "correction" behind each of its own: v <- m v + g;
    update = -lr (v + correction)."""

    def init(self, params: Params) -> Tree:
        return {"v": zeros_like(params), "correction": zeros_like(params)}

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = self.adjusted(grads, params)
        v = tree_map(lambda v, g: self.momentum * v + g, state["v"], grads)
        return scale(-self.lr, add(v, state["correction"])), {**state, "v": v}


@dataclass(frozen=True)
class ScaffoldAuthors(Scaffold):
    """SCAFFOLD with local momentum, as in NIID-Bench and Flower.

    The correction c - c_i is a step of its own behind the optimiser's, so momentum does not make it
    longer, as it makes (x - y_i) / (K eta). The model is averaged by n_k.
    """

    name: ClassVar[str] = "scaffold_authors"

    weights: Weights = "size"
    # What all control variates are before the first round: NIID-Bench's are a network with random
    # weights, Flower's the first model. Here the latter.
    start: Literal["zero", "network"] = "zero"
    # By what the sum of c_i+ - c_i is divided: N, or the cohort as in NIID-Bench until August 2022.
    divisor: Literal["clients", "cohort"] = "clients"
    clip: NonNegative = 0.0  # norm of the gradient; FedBench: 1

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return super().exclusive | {Exclusive.OPTIMIZER_MEMORY}

    def check(self, setting: Setting) -> None:
        """SGD, with any momentum."""
        if setting.optimizer != "sgd":
            raise RecipeError(f"{self.name}: optimizer = {setting.optimizer!r}; allowed: sgd")

    def optimizer(self, configured: Optimizer) -> Optimizer:
        return Corrected(configured.lr, configured.momentum, configured.weight_decay, self.clip)

    def init_server(self, server: Server) -> Tree:
        return {"c": scale(float(self.start == "network"), server.params)}

    def init_client(self, client: Client) -> Tree:
        return {"c_i": scale(float(self.start == "network"), client.params)}

    def gradient_term(  # type: ignore[override]  # the hook allows None, SCAFFOLD promises a tree
        self, w: Params, client: Client
    ) -> None:
        """Nothing: the optimiser has the correction."""

    def warm_start(self, client: Client) -> Tree:
        """v = 0; the correction c - c_i."""
        correction = sub(client.shared["c"], client.memory["c_i"])
        return {"v": zeros_like(client.params), "correction": correction}

    def step(self, server: Server) -> Change:
        """c <- c + sum of c_i+ - c_i over the cohort, divided by N or by the cohort."""
        n = len(server.replies.clients) if self.divisor == "cohort" else server.n_clients
        dc = weighted_mean(None, server.replies.upload["dc"])
        return Change({"c": add(server.state["c"], scale(len(server.replies.clients) / n, dc))})


@dataclass(frozen=True)
class ScaffoldFlower(ScaffoldAuthors):
    """SCAFFOLD as in Flower's baseline: c moves by the mean of c_i+ - c_i by n_k, as the model.

    Of a cohort of all clients c is the mean of c_i by n_k, so the corrections of a step add up to 0
    with the weights of the model. With the equal mean they do not.
    """

    name: ClassVar[str] = "scaffold_flower"
    needs: ClassVar[Needs] = Needs(steps=True)

    def step(self, server: Server) -> Change:
        """c <- c + the mean of c_i+ - c_i by the weights of the model."""
        return Change(
            {"c": add(server.state["c"], weighted_mean(server.omega, server.replies.upload["dc"]))}
        )


@dataclass(frozen=True)
class ScaffoldFedBench(ScaffoldFlower):
    """SCAFFOLD as in FedBench 0.1.3: c_i is 0 in every round, and c moves by the mean of
    (y_i - x) / (K eta), the opposite of algorithm 1.

    Then c adds up all moves of the server: c = (x_t - x_0) / (K eta), for clients with equally many
    steps K. A round's corrections together lead back to x_0.
    """

    name: ClassVar[str] = "scaffold_fedbench"

    def report(self, trace: Trace, client: Client) -> Answer:
        """(y_i - x) / (K eta); c_i stays 0."""
        k_eta = trace.steps.clamp(min=1) * client.task.lr
        return Answer({"dc": scale(1 / k_eta, sub(trace.params, client.params))}, client.memory)
