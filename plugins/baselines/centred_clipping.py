"""Centred clipping with momentum on the clients.
Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization, ICML 2021.
https://arxiv.org/abs/2012.10333

Algorithms 1 and 2, where updates of several local steps stand in place of gradients.
- A client sends m_k <- (1 - beta) Delta_k + beta m_k; its first m_k is Delta_k.
- The centre v is the last aggregate, 0 before the first round. Running statistics of batch norms
  have no momentum, and are clipped around those that the server has: so no variance turns negative.
- tau has no default in the paper for updates: it depends on the step size. 1.0 is ours.
- A client that misses rounds goes on from its old m_k.

Meeting others: Delta_k is the update as local training left it. Methods that replace it too, such
as DP-FedAvg, are refused. Its FedML pair is `make_pair("centred_clipping")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Answer, Change, Client, Exclusive, Server, Trace
from fedml_noniid.core.options import Count, Momentum, Positive
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.trees import Params, Tree, add, row_norms, sub, tree_map, zeros_like
from fedml_noniid.plugins.baselines.robust import RobustRule, minus


@dataclass(frozen=True)
class CentredClipping(RobustRule):
    """Averages what clients send, clipped to a ball around the last aggregate."""

    name: ClassVar[str] = "centred_clipping"
    exclusive: ClassVar[frozenset[Exclusive]] = RobustRule.exclusive | {Exclusive.UPDATE}

    tau: Positive = 1.0
    beta: Momentum = 0.9  # the paper's experiments
    L: Count = 1  # iterations, likewise

    def init_client(self, client: Client) -> Tree:
        """m_k, and whether it is still empty (1)."""
        ones = next(iter(client.params.values())).new_ones(())
        return {"m": zeros_like(client.params), "first": ones}

    def report(self, trace: Trace, client: Client) -> Answer:
        """m_k <- (1 - beta) Delta_k + beta m_k. `leaving` comes later and sends it."""
        beta = self.beta * (1 - client.memory["first"])
        delta = sub(trace.params, client.params)
        m = tree_map(lambda d, m: (1 - beta) * d + beta * m, delta, client.memory["m"])
        return Answer(memory={"m": m, "first": 0 * client.memory["first"]})

    def leaving(self, delta: Params, client: Client) -> Params:
        """m_k."""
        return {**client.memory["m"]}

    def init_server(self, server: Server) -> Tree:
        """v = 0."""
        return {"v": zeros_like(server.params)}

    def _rule(self, x: Params, server: Server) -> Params:
        """v <- v + 1/M sum_k (x_k - v) min(1, tau / ||x_k - v||), L times."""
        v: Params = server.state["v"] | server.buffers
        for _ in range(self.L):
            far = minus(x, v)
            clip = (self.tau / row_norms(far).clamp(min=1e-30)).clamp(max=1)  # [M]
            v = add(v, weighted_sum(clip.double() / len(clip), far))
        return v

    def step(self, server: Server) -> Change:
        """v is the aggregate of this round."""
        return Change(state={"v": server.update})
