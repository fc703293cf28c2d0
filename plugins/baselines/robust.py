"""Averages that a few dishonest clients can't move far: what the robust rules have in common.

A rule acts on what the server would average: the updates, and the running statistics of batch
norms beside them as further coordinates. So no client gets past a rule by its statistics. Where a
distance decides, it is that of both together.

Clients count alike, because a dishonest one may lie about n_k. So methods that weigh clients (CCN)
are refused beside a rule that would ignore them. A rule reads each client's model, so secure sums
are refused. Other methods' uploads, such as SCAFFOLD's c_i, are averaged without the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedml_noniid.core.component import (
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
    Weights,
)
from fedml_noniid.core.trees import Params, row, sub, tree_map


@dataclass(frozen=True)
class RobustRule(Component):
    """Replaces the weighted mean of updates and running statistics."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.AVERAGE, Exclusive.CLIENT_WEIGHTS}
    )
    weights: ClassVar[Weights] = "uniform"

    def _fits(self, m: int) -> None:
        """RecipeError if the rule can't act on so many rows."""

    def _rule(self, x: Params, server: Server) -> Params:
        """The aggregate of rows, leaves [M, ...] -> [...], with weights `server.omega` [M]."""
        raise NotImplementedError

    def check(self, setting: Setting) -> None:
        self._fits(setting.cohort)

    def average(self, server: Server) -> Params:
        replies, omega = server.replies, server.omega
        x = replies.deltas | replies.buffers
        if replies.distinct is not None:  # M is the number of buckets
            x, omega = row(x, replies.distinct), omega[replies.distinct]
        if replies.clients == server.cohort:  # with fewer, a rule does what it can
            self._fits(len(omega))
        return self._rule(x, replace(server, omega=omega))


def minus(x: Params, centre: Params) -> Params:
    """The rows x_k - centre, leaves [M, ...]."""
    return sub(x, tree_map(lambda leaf: leaf.unsqueeze(0), centre))
