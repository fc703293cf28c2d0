"""A method with a state on the server and on the clients, and an upload of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Server,
    Trace,
)
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, Tree, scale, sub, zeros_like


@dataclass(frozen=True)
class FedMean(Component):
    """Pulls a client's steps towards the mean drift of all clients."""

    name: ClassVar[str] = "fedmean"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.DRIFT})
    needs: ClassVar[Needs] = Needs(unweighted=True)

    mu: NonNegative = 0.1

    def init_server(self, server: Server) -> Tree:
        return {"m": zeros_like(server.params)}

    def init_client(self, client: Client) -> Tree:
        return {"m_i": zeros_like(client.params)}

    def broadcast(self, server: Server) -> Tree:
        return {"m": server.state["m"]}

    def gradient_term(self, w: Params, client: Client) -> Params:
        """mu (m_i - m)."""
        return scale(self.mu, sub(client.memory["m_i"], client.shared["m"]))

    def report(self, trace: Trace, client: Client) -> Answer:
        """m_i <- w_k - w_t."""
        m_i = sub(trace.params, client.params)
        return Answer({"m_i": m_i}, {"m_i": m_i})

    def step(self, server: Server) -> Change:
        """m <- mean of m_i."""
        return Change({"m": weighted_mean(None, server.replies.upload["m_i"])})
