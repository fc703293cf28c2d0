"""Oort. Lai, Zhu, Madhyastha, Chowdhury: Oort: Efficient Federated Learning via Guided Participant
Selection, OSDI 2021. https://arxiv.org/abs/2010.06081. Algorithm 1.

From the paper: the utility with its bonus for clients that were not chosen for long, the factor for
slow ones, exploration, and the draw by utility among those above a cut-off.
- The losses are those of the received model over all samples, computed after training: one more
  pass. The paper takes them from training, which here keeps their mean only.
- t_k is the time of a local training, with its messages, on the `devices` of the scenario. Without
  devices, and in a deployment, the factor for slow clients is 1.
- T is the quantile 0.3 of all t_k. Left out: the paper's pacer, which raises T when utilities fall,
  its cap of utilities, and that a client that was chosen often is excluded.
- New clients are drawn uniformly, not by speed.
- In round 1 nobody is known, so the drawn cohort trains. Where all take part, it is FedAvg, to the
  bit.

Meeting others: the losses have no terms of other methods, and the average is the recipe's. The two
engines' losses differ in the last bits, so a near tie may choose other clients. Its FedML pair is
`make_pair("oort")`, for cohorts of fewer than all silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Trace,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative, Range, Share
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import Tree
from fedml_noniid.plugins.baselines.powd import highest, in_order, updated

# Of epsilon, its factor per round and its end; of the utility of the last client that would be
# chosen, the cut-off; the quantile of the clients' durations that T is.
DECAY, LEAST, CUT_OFF, PREFERRED = 0.98, 0.2, 0.95, 0.3


@dataclass(frozen=True)
class Oort(Component):
    """Chooses clients by the losses on their samples and their speed, and explores new ones."""

    name: ClassVar[str] = "oort"
    needs: ClassVar[Needs] = Needs(local_set=True, replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.COHORT})
    ranges: ClassVar[Mapping[str, Range]] = {"loss2": Range(0)}  # the server takes its root

    epsilon: Share = 0.9  # the part of the cohort that is new, in round 1
    alpha: NonNegative = 2.0  # of the factor for slow clients

    def init_server(self, server: Server) -> Tree:
        """U and L: the utility of the last training, and its round, 0 before it."""
        return dict.fromkeys("UL", server.keys.new_zeros(server.n_clients, dtype=torch.float64))

    def choose(self, server: Server) -> tuple[int, ...]:
        """epsilon m new clients, and the others by utility."""
        order, m = in_order(server), len(server.cohort)
        is_new = server.state["L"].cpu()[order] == 0
        new, known = order[is_new][:m].tolist(), order[~is_new].tolist()
        epsilon = max(LEAST, self.epsilon * DECAY ** (server.round - 1))
        explored = new[: max(round(epsilon * m), m - len(known))]
        n = m - len(explored)
        utilities = self.utilities(server, known)
        cut = CUT_OFF * sorted(utilities.values())[-n] if n else math.inf
        # Draws by utility, without replacement: the largest log(u) / utility (Efraimidis and
        # Spirakis, Weighted random sampling with a reservoir, 2006).
        u = uniform(fold(server.key, "exploit"), server.n_clients, dtype=torch.float64).cpu()[known]
        keys = {
            k: math.log(u_k or 2.0**-25) / max(utilities[k], 1e-30)
            for k, u_k in zip(known, u.tolist(), strict=True)
            if utilities[k] >= cut
        }
        return tuple(sorted([*explored, *highest(keys, n)]))

    def utilities(self, server: Server, known: list[int]) -> dict[int, float]:
        """(U_k + sqrt(0.1 log R / L_k)) (T / t_k)^alpha, the factor only where T < t_k."""
        u, last = (server.state[name].cpu()[known].tolist() for name in "UL")
        t, log = server.durations, 0.1 * math.log(server.round)
        preferred = sorted(t)[int(PREFERRED * len(t))] if t else math.inf
        return {
            k: (u_k + math.sqrt(log / last_k))
            * min(1.0, preferred / (t[k] if t else 1.0)) ** self.alpha
            for k, u_k, last_k in zip(known, u, last, strict=True)
        }

    def report(self, trace: Trace, client: Client) -> Answer:
        """1 / |B_k| sum_i loss_i^2 at w_t."""

        def squares(batch: Batch) -> Tree:
            logits = client.task.eval(client.params, client.buffers, batch.x).logits
            return {"loss2": client.task.loss.values(logits, batch.y).square()}

        return Answer(client.local_set.mean(squares))

    def step(self, server: Server) -> Change:
        """U_k = |B_k| sqrt(1 / |B_k| sum_i loss_i^2)."""
        u = server.replies.n * server.replies.upload["loss2"].double().sqrt()
        last = updated(server, "L", torch.full_like(u, server.round))
        return Change({"U": updated(server, "U", u), "L": last})
