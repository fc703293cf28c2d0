"""DP-FedAvg: differential privacy for each client.
McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR
2018. https://arxiv.org/abs/1710.06963

Algorithm 1 with flat clipping and the fixed-denominator estimator f_f: every client has the weight
1, and the sum is divided by the number of clients that are drawn, also if some are missing.
- The client clips its own update. So the server needs the sum alone, and adds the noise to it.
- A round draws a fixed number of clients, from a seed that all know. So being drawn amplifies
  nothing: each round with a client is one release of the Gaussian mechanism for this client. The
  paper draws each client by itself, in secret, and its accountant counts that.
- A neighbour lacks what one client adds to the sums.
- The server is trusted: it sees the updates before the noise.
- Without noise the clip alone promises nothing: epsilon is infinite.
- A network with batch norms is refused: their running statistics would leave without noise.

Meeting others: `fedavgm`, `fedadam` and the like step on the noisy average. Methods that send more
than the update, or weigh clients, are refused. Its FedML pair is `make_pair("dpfedavg")`, for noise
= 0 only: in a deployment all silos know the seed of the server's noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import (
    Client,
    Component,
    Exclusive,
    Mechanism,
    Server,
    Setting,
    Weights,
)
from fedml_noniid.core.options import NonNegative, RecipeError
from fedml_noniid.core.randomness import noised
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.trees import Params, norm, scale
from fedml_noniid.plugins.baselines.dpsgd import Delta, check_clip


@dataclass(frozen=True)
class DPFedAvg(Component):
    """Clips every client's update, and adds Gaussian noise to the sum of a round."""

    name: ClassVar[str] = "dpfedavg"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.AVERAGE, Exclusive.UPDATE})

    clip: NonNegative = 1.0  # S, ours: the paper's fit its networks; 0: no limit
    noise: NonNegative = 1.0  # z, section 4; 0: none
    delta: Delta = 1e-5  # ours; for which epsilon is told

    @property
    def weights(self) -> Weights:
        """w_k = 1, where there is a limit."""
        return "uniform" if self.clip else "size"

    @property
    def mechanism(self) -> Mechanism | None:
        return Mechanism("client", self.noise, self.delta) if self.clip else None

    def check(self, setting: Setting) -> None:
        check_clip(self.name, self.clip, self.noise)
        if self.clip and setting.norms:
            raise RecipeError(
                "dpfedavg: the network has batch norms, whose running statistics would leave a "
                "client without a limit",
                allowed="a network without batch norms",
            )
        if self.noise and setting.deployed:
            raise RecipeError(
                f"dpfedavg: noise = {self.noise} can't be deployed: the server's noise comes from "
                "random_seed, which every silo knows",
                allowed="noise = 0 with FedML's central noise (dp_args: cdp), or dpsgd",
            )

    def leaving(self, delta: Params, client: Client) -> Params | None:
        """Delta_k min(1, S / ||Delta_k||)."""
        return scale((self.clip / norm(delta)).clamp(max=1), delta) if self.clip else None

    def average(self, server: Server) -> Params | None:
        """(sum_k Delta_k + z S N(0, 1)) / M."""
        if not self.clip:
            return None
        total = weighted_sum(None, server.replies.deltas)
        if self.noise:
            total = noised(total, self.noise * self.clip, server.key)
        return scale(1 / len(server.cohort), total)
