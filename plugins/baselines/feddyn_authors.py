"""FedDyn as its authors' code has it. The paper is in `feddyn.py`: Acar et al., ICLR 2021.
https://arxiv.org/abs/2111.04263, https://github.com/alpemreacar/FedDyn

- `alpha_adapt="authors"`: alpha_k = alpha / (n_k / mean n). The server learns the n_k in an
  exchange before round 1 and sends alpha_k. That exchange carries the model of round 1. The
  server's h / alpha is -(1/N) sum (w_k - w_t) for any alpha. h keeps the plain alpha and is then
  the mean of (n_k / mean n) g_k. So the fixed point minimises the mean loss over samples. Without
  the option it minimises the mean loss over clients.
- `clip`: the corrected gradient is clipped to this norm before each step. It includes the loss
  terms of other methods, but not weight decay. In the authors' code it also lacks the part alpha w,
  which enters as weight decay. `clip=0`: no clipping.
FedML pair: `make_pair("feddyn_authors")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Exchanges,
    Exclusive,
    Server,
    Setting,
)
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Tree, leading
from fedml_noniid.plugins.baselines.feddyn import FedDyn


@dataclass(frozen=True)
class FedDynAuthors(FedDyn):
    """Adapts alpha to a client's number of samples, and clips gradients."""

    name: ClassVar[str] = "feddyn_authors"

    alpha_adapt: Literal["authors", "off"] = "authors"
    clip: NonNegative = 10.0  # norm of the gradient

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return super().exclusive | ({Exclusive.OPTIMIZER} if self.clip else set())

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(begin=int(self.alpha_adapt == "authors"))

    def optimizer(self, configured: Optimizer) -> Optimizer | None:
        """g <- g min(1, clip / ||g||)."""
        return replace(configured, clip=self.clip) if self.clip else None

    def alpha_k(self, client: Client, leaf: Tensor) -> float | Tensor:
        """alpha_k, 0-d; or [M] if the leaf has that axis in front."""
        return self.alpha if self.alpha_adapt == "off" else leading(client.each["alpha"], leaf)

    def answer(self, client: Client) -> Answer:
        """Only n_k, which every reply has."""
        return Answer()

    def init_server(self, server: Server) -> Tree:
        state = super().init_server(server)
        if self.alpha_adapt == "off":
            return state
        some = next(iter(server.params.values()))
        return state | {"alpha": some.new_full((server.n_clients,), self.alpha)}

    def message(self, server: Server) -> Tree:
        """alpha_k of the cohort, [M]."""
        return (
            {}
            if self.alpha_adapt == "off"
            else {"alpha": server.state["alpha"][list(server.cohort)]}
        )  # [M]

    def survey(self, server: Server) -> Asks:
        """Before round 1: alpha_k = alpha / (n_k / mean n), [N]; alpha for a client whose answer
        was dropped."""
        if server.round > 0 or self.alpha_adapt == "off":
            return Change()
        replies = yield Ask("count", server.cohort, server.params, server.buffers)
        alpha, n = server.state["alpha"], replies.n.double()
        rows = torch.tensor(replies.clients, device=n.device)
        return Change(
            {"alpha": alpha.index_copy(0, rows, (self.alpha * n.mean() / n).to(alpha.dtype))}
        )
