"""CCN: client contribution normalization.
Kundalwal, Saraswat, Mishra, Mishra: Client Contribution Normalization for Enhanced Federated
Learning, 2024. https://arxiv.org/abs/2411.06352

Eqs. 3-8. Choices where the paper is silent or ambiguous:
- z_r is computed after local training, in one extra evaluation pass over the whole local set.
  Algorithm 1 lists it before training and again in the last epoch, which overwrites it.
- z_r is the input of the classifier, behind its ReLU.
- T = 0.5; the paper says only "less than 1".
- nu_r is the weight that the recipe gives the client without CCN: n_r/n, or 1/m where a method
  averages uniformly.
- A zero z_r has cosine 0 with the others. A single client has weight 1.

Recorded: S, Lambda, the weights c_r, the extremes of Lambda_r and of c_r / nu_r, and the fraction
of the total weight that CCN moves, 1/2 sum_r |c_r - nu_r|. At most max_r nu_r can move: the
fraction is quasi-convex in the softmax, so it is largest where one client has all of it. That
client loses all of its weight. The largest rise says less: with equal nu_r no c_r / nu_r exceeds
R / (R - 1), however much others fall.
Meeting others: FedNova has c_r for p_r, in d and in tau_eff. With FedNova's nu = "weights",
Lambda_r multiplies p_r / a_r. SCAFFOLD's model step has nu_r = 1/m; its control variates stay
uniform. FedDyn's h stays uniform too; its mean of models is weighted. FedBABU's body has nu_r =
n_r/n. SGDM averages w and v with c_r. q-FedAvg's two sums have factors c_r m. FedNNNN's u and E
have c_r. With FNR-FL, z_r is that of the unrefined local model, and the weights apply to the
refined models. FedML pair: `CCNTrainer`, `CCNAggregator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
from fedml_noniid.core.options import Positive
from fedml_noniid.core.trees import Tree


@dataclass(frozen=True)
class CCN(Component):
    """Gives a client less weight if its mean representation resembles those of the others."""

    name: ClassVar[str] = "ccn"
    needs: ClassVar[Needs] = Needs(features=True, local_set=True, replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.CLIENT_WEIGHTS})

    T: Positive = 0.5  # temperature, eq. 8

    def report(self, trace: Trace, client: Client) -> Answer:
        """z_r, the mean of the final hidden layer over the local data, [d] (section III-A)."""

        def final(batch: Batch) -> Tree:
            out = client.task.eval(trace.params, trace.buffers, batch.x)
            return {"z": out.features}  # [B, d]

        return Answer(client.local_set.mean(final))

    def weigh(self, server: Server) -> Tensor:
        """Eqs. 6-7: c_r = Lambda_r nu_r / (Lambda . nu)."""
        return self.contribution(server.replies.upload["z"])

    def contribution(self, z: Tensor) -> Tensor:
        """Lambda_r of eq. 8, [R, d] -> [R]; 1 for a single client."""
        if z.shape[0] == 1:
            return z.new_ones(1, dtype=torch.float64)
        # Row sums reach R/T, which may be too large for a plain exponential: softmax shifts them.
        return 1 - torch.softmax(similarity(z).sum(1) / self.T, dim=0)

    def step(self, server: Server) -> Change:
        """Only records: S, Lambda and c of the round, extremes, and 1/2 sum_r |c_r - nu_r| beside
        its bound."""
        z = server.replies.upload["z"]
        lam = self.contribution(z)
        over_nu = lam / (lam @ server.base)  # c_r / nu_r
        moved, most = (server.weights - server.base).abs().sum() / 2, server.base.max()
        return Change(
            metrics={
                "S": similarity(z),
                "Lambda": lam,
                "weights": server.weights,
                "lambda_min": lam.min(),
                "lambda_max": lam.max(),
                "weight_over_nu_min": over_nu.min(),
                "weight_over_nu_max": over_nu.max(),
                "moved": moved,
                "moved_most": most,
                "moved_part": moved / most,
            }
        )


def similarity(z: Tensor) -> Tensor:
    """S of eqs. 3-4, the cosines of the rows of z with 1 on the diagonal, [R, d] -> [R, R]
    float64."""
    z = z.double()
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    unit = z / torch.where(length > 0, length, torch.ones_like(length))
    return (unit @ unit.T).fill_diagonal_(1.0)
