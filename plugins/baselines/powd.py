"""pow-d and rpow-d, power-of-choice. Cho, Wang, Joshi: Client Selection in Federated Learning:
Convergence Analysis and Power-of-Choice Selection Strategies, 2020.
https://arxiv.org/abs/2010.01243. Section 3.2, and its two variants.

Of d candidates, the m with the highest loss train.
- pow-d: the candidates compute F_k(w_t), the mean loss of the received model over their samples. It
  costs one more exchange, the model to d clients and d numbers, also where there is no choice.
- rpow-d: the server takes the mean loss over the local steps of a client's last training; before
  that it is infinite. It costs no exchange. (cpow-d, F_k of a batch, is left out.)
- Candidates are drawn uniformly, not by their numbers of samples, and the average is the recipe's:
  FedAvg's weights are n_k. The paper draws by n_k and weighs alike (`weights: uniform` of another
  method).
- The candidates are the m clients that other recipes have in this round, and d - m others. So with
  d = m it is FedAvg, to the bit. Equal losses go by a random order, the drawn clients first.
- A candidate that does not answer in pow-d does not train.

Meeting others: losses have no terms of other methods in pow-d, and have them in rpow-d. Losses of
the two engines differ in the last bits, so a near tie may choose other clients. Its FedML pairs are
`make_pair("powd")` and `make_pair("rpowd")`, for cohorts of fewer than all silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import CountOrNone, RecipeError
from fedml_noniid.core.randomness import uniform
from fedml_noniid.core.trees import Tree


@dataclass(frozen=True)
class _PowerOfChoice(Component):
    """Chooses the m clients of highest loss among d candidates."""

    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.COHORT})

    d: CountOrNone = 0  # candidates, from m to N; 0: 2 m, at most N

    def check(self, setting: Setting) -> None:
        if self.d and not setting.cohort <= self.d <= setting.n_clients:
            raise RecipeError(
                f"{self.name}: d = {self.d} candidates for a cohort of {setting.cohort} of "
                f"{setting.n_clients} clients",
                allowed=f"{setting.cohort} to {setting.n_clients}, or 0 for twice the cohort",
            )

    def candidates(self, server: Server) -> list[int]:
        """The d candidates, in the order in which equal losses go."""
        return in_order(server)[: self.d or 2 * len(server.cohort)].tolist()


@dataclass(frozen=True)
class PowD(_PowerOfChoice):
    """Lets the candidates compute their losses, and trains those with the highest."""

    name: ClassVar[str] = "powd"
    needs: ClassVar[Needs] = Needs(local_set=True, replies=Replies.SCALARS)

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(round=1)

    def choose(self, server: Server) -> Asks:
        """S_t: the m candidates with the largest F_k(w_t)."""
        candidates = self.candidates(server)
        reply = yield Ask("loss", tuple(sorted(candidates)), server.params, server.buffers)
        losses = dict(zip(reply.clients, reply.upload["F"].tolist(), strict=True))
        return highest({k: losses[k] for k in candidates if k in losses}, len(server.cohort))

    def answer(self, client: Client) -> Answer:
        """F_k(w_t)."""

        def losses(batch: Batch) -> Tree:
            return {
                "F": client.task.loss.values(
                    client.task.eval(client.params, client.buffers, batch.x).logits, batch.y
                )
            }

        return Answer(client.local_set.mean(losses))


@dataclass(frozen=True)
class RPowD(_PowerOfChoice):
    """Trains the candidates whose losses in their last training were the highest."""

    name: ClassVar[str] = "rpowd"
    needs: ClassVar[Needs] = Needs(loss=True, replies=Replies.SCALARS)

    def init_server(self, server: Server) -> Tree:
        return {"F": server.keys.new_full((server.n_clients,), math.inf, dtype=torch.float64)}

    def choose(self, server: Server) -> tuple[int, ...]:
        candidates = self.candidates(server)
        return highest(
            dict(zip(candidates, server.state["F"].cpu()[candidates].tolist(), strict=True)),
            len(server.cohort),
        )

    def report(self, trace: Trace, client: Client) -> Answer:
        """1 / tau sum_l f_k(w_l, xi_l) over the local steps l."""
        return Answer({"F": trace.loss})

    def step(self, server: Server) -> Change:
        return Change({"F": updated(server, "F", server.replies.upload["F"])})


def in_order(server: Server) -> Tensor:
    """All clients in random order, those of the drawn cohort first: [N], on the host."""
    first = torch.zeros(server.n_clients).index_fill(0, torch.tensor(server.cohort), -1)
    return torch.argsort(uniform(server.key, server.n_clients).cpu() + first, stable=True)


def highest(losses: Mapping[int, float], m: int) -> tuple[int, ...]:
    """The m clients with the highest losses, ascending; of equal losses the first."""
    return tuple(sorted(sorted(losses, key=lambda k: -losses[k])[:m]))


def updated(server: Server, name: str, values: Tensor) -> Tensor:
    """A number per client in the server's state [N], with those of the clients that answered."""
    state: Tensor = server.state[name]
    return state.index_copy(
        0, torch.tensor(server.replies.clients, device=state.device), values.to(state.dtype)
    )
