"""Bucketing before a robust rule.
Karimireddy, He, Jaggi: Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR
2022. https://arxiv.org/abs/2006.09365

Algorithm 1: the clients of a round are shuffled into buckets of s, and the rule of the recipe, as
in `bucketing+median`, gets the buckets' means.
- The last bucket may be smaller; it counts as the others do. A rule refuses a number of buckets
  that is too small for it in the first round.
- Every client gets its bucket's mean, for methods that are no such rule.
- The shuffle goes by round and client, so a client that misses a round moves no other.
- Alone it averages means: nothing robust.

Meeting others: other methods see the buckets' means as the clients' updates. Methods that refine
clients' models are refused. Its FedML pair is `make_pair("bucketing")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from fedml_noniid.core.component import (
    Component,
    Exclusive,
    Needs,
    Replies,
    Reply,
    Server,
    Setting,
    Weights,
)
from fedml_noniid.core.options import MOST, Range, RecipeError
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import row


@dataclass(frozen=True)
class Bucketing(Component):
    """Replaces clients' updates by the means of random buckets of `s` clients."""

    name: ClassVar[str] = "bucketing"
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.REFINEMENT})
    weights: ClassVar[Weights] = "uniform"

    s: Annotated[int, Range(2, MOST)] = 2  # the paper's experiments

    def check(self, setting: Setting) -> None:
        if self.s >= setting.cohort:
            raise RecipeError(
                f"'bucketing': s = {self.s} puts all {setting.cohort} clients of a round into one "
                "bucket",
                allowed="s below the number of clients in a round",
            )

    def refine(self, server: Server) -> Reply:
        """y_i = mean of x_pi(k) over the i-th s positions of a random permutation pi."""
        replies, both = server.replies, server.replies.deltas | server.replies.buffers
        clients = torch.tensor(replies.clients, device=server.key.device)
        order = uniform(fold(server.key, clients), 1).flatten().argsort(stable=True)
        means = [weighted_mean(None, row(both, some)) for some in torch.split(order, self.s)]
        bucket = order.argsort() // self.s  # [M], of each client
        both = {name: torch.stack([mean[name] for mean in means])[bucket] for name in both}
        deltas, buffers = ({n: both[n] for n in part} for part in (replies.deltas, replies.buffers))
        return replace(replies, deltas=deltas, buffers=buffers, distinct=order[:: self.s])
