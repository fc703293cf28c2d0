"""Averages that a few dishonest clients can't move far: what the robust rules have in common.

A rule acts on what the server would average: the updates, and the running statistics of batch
norms beside them as further coordinates. So no client gets past a rule by its statistics. Where a
distance decides, it is that of both together.

Clients count alike, because a dishonest one may lie about n_k. So methods that weigh clients (CCN)
are refused beside a rule that would ignore them. A rule reads each client's model, so secure sums
are refused. Other methods' uploads, such as SCAFFOLD's c_i, are averaged without the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Exclusive, Needs, Replies, Server, Weights
from fedml_noniid.core.trees import Params, sub, tree_map


@dataclass(frozen=True)
class RobustRule(Component):
    """Replaces the weighted mean of updates and running statistics."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.AVERAGE, Exclusive.CLIENT_WEIGHTS}
    )
    weights: ClassVar[Weights] = "uniform"

    def _rule(self, x: Params, server: Server) -> Params:
        """The aggregate of rows, leaves [M, ...] -> [...]."""
        raise NotImplementedError

    def average(self, server: Server) -> Params:
        return self._rule(server.replies.deltas | server.replies.buffers, server)


def minus(x: Params, centre: Params) -> Params:
    """The rows x_k - centre, leaves [M, ...]."""
    return sub(x, tree_map(lambda leaf: leaf.unsqueeze(0), centre))
