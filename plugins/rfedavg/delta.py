"""What rFedAvg and rFedAvg+ share: the clients' mean features delta, how they are made, and the table of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.client import mean_features
from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Batch,
    Component,
    Data,
    Desk,
    Options,
    Plan,
    RecipeError,
    Reply,
    Server,
    Setting,
    Trace,
    Update,
    View,
    Work,
)
from plugins.core.noise import fold, uniform
from plugins.core.task import Output, Task, masked_mean
from plugins.core.trees import Params, Tree, n_bytes, row
from plugins.rfedavg.privacy import clipped, noisy

# Keys: the steps of local training have the numbers from 0.
DRAW, NOISE = -1, -2


@dataclass(frozen=True)
class DistributionRegularised(Component):
    """What both algorithms share: the table of delta, its first filling, and the map."""

    options: ClassVar[Options] = {
        "delta": ("full", "batch"),
        "delta_scope": ("known", "sampled"),
        "warmup": ("delta0", "none"),
        "dp": ("none", "paper", "repo"),
        "weights": ("size", "uniform"),
        "opt_state": ("reset", "persist"),
    }
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_clients: int  # N
    feature_size: int  # d
    lam: float = 1e-4  # lambda, section VI-A, MNIST
    delta: str = "full"
    delta_scope: str = "known"
    warmup: str = "delta0"
    dp: str = "none"
    sigma: float = 0.0  # sigma_2; up to 5 is said to do no harm (section VI-B.8)
    clip: float = 0.0  # C_0
    L: int = 100  # batch size, section VI-A, cross-silo
    weights: str = "size"
    opt_state: str = "reset"

    @property
    def claims(self) -> frozenset[str]:
        return frozenset(
            {"feature distribution regulariser"} | ({"optimiser's memory"} if self.opt_state == "persist" else set())
        )

    @property
    def weighting(self) -> str:
        return self.weights

    @property
    def simulation_only(self) -> str:
        if self.dp == "none":
            return ""
        return (
            f"{self.name}'s noise (dp = {self.dp!r}) is drawn from the run's seed, which the server knows, so it hides "
            "nothing there; use FedML's local privacy (dp_args)"
        )

    def check(self, setting: Setting) -> None:
        for key, value in (("lam", self.lam), ("sigma", self.sigma), ("clip", self.clip)):
            if not (math.isfinite(value) and value >= 0):
                raise RecipeError(f"{self.name}: {key} = {value} must be a finite number of at least 0")
        if self.L < 1:
            raise RecipeError(f"{self.name}: L = {self.L} must be at least 1")
        if self.dp == "none" and (self.sigma or self.clip):
            raise RecipeError(f"{self.name}: dp = 'none' does nothing with sigma and clip; set it to paper or repo")
        if self.dp == "paper" and not self.clip:
            raise RecipeError(
                f"{self.name}: clip = {self.clip} must be above 0 with dp = 'paper'; take the median norm of delta, "
                f"which a run with dp = 'none' records as {self.name}_delta_norm_median"
            )
        fewest = setting.cohort if self.delta_scope == "sampled" else setting.n_clients
        if fewest < 2:
            raise RecipeError(f"{self.name}: compares clients, so it needs at least 2, got {fewest}")

    # client

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        return {"optimizer": task.optimizer.init(params)} if self.opt_state == "persist" else {}

    def warm_start(self, state: Tree, view: View) -> Tree:
        found: Tree = view.memory.get("optimizer", state)
        return found

    def kept(self, trace: Trace) -> Tree:
        """The client's next memory."""
        return {"optimizer": trace.optimizer} if self.opt_state == "persist" else {}

    def mapped(self, task: Task, params: Params, buffers: Params, data: Data) -> Tensor:
        """delta^k = mean_j phi(x_kj), [d], as the client sends it."""
        assert data.own is not None
        own = drawn(data.own, self.L, fold(data.key, DRAW)) if self.delta == "batch" else data.own
        return self.protected(mean_features(task, params, buffers, own), own, fold(data.key, NOISE))

    def protected(self, delta: Tensor, own: Plan, key: Tensor) -> Tensor:
        """delta <- delta + 1/L N(0, sigma^2 C_0^2 I), delta clipped to C_0 (section VI-B.8)."""
        if self.dp != "paper":
            return delta
        return noisy(clipped(delta, self.clip), self.sigma * self.clip / self.batch(own, delta), key)

    def batch(self, own: Plan, like: Tensor) -> Tensor:
        """L, or n_k if that is less; 0-d."""
        n = like.new_tensor(own.index.numel()) if own.mask is None else own.mask.sum()
        return n.clamp(max=self.L).to(like.dtype)

    def regulariser(self, phi: Tensor, others: Tree) -> Tensor:
        """r_k of a mean feature phi [d], 0-d; `others` is what `address` sent."""
        raise NotImplementedError

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor:
        """lambda r_k, with the mean of phi over the mini-batch."""
        return self.lam * self.regulariser(masked_mean(out.features, batch.mask), view.each)

    def answer(self, job: str, work: Work) -> Answer:
        """delta^k under the model that was sent (algorithm 2, line 15)."""
        delta = self.mapped(work.task, work.params, work.buffers, work.data)
        return Answer({}, {}, {"delta": delta}, work.view.memory, {})

    # server

    def init_server(self, params: Params, desk: Desk) -> Tree:
        some = next(iter(params.values()))
        state = {"delta": some.new_zeros(self.n_clients, self.feature_size)}  # zero where it is not known
        return state if self.warmup == "delta0" else state | {"known": some.new_zeros(self.n_clients)}

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """delta_0: every client maps its data with w_0. One whose answer was dropped has the mean of the others'."""
        if self.warmup == "delta0":
            replies = yield from self.maps(server, clients)
            state, mean = server.state[self.name], replies.upload[self.name]["delta"].mean(0)
            server = self.kept_by(server, state | {"delta": mean.repeat(self.n_clients, 1)}, replies)
        return server

    def maps(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """`clients` map their data with the server's model; returns the replies."""
        replies: Reply = yield Ask(f"{self.name}.map", clients, server.params, server.buffers, {}, {})
        return replies

    def map(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """The same; returns the server with the rows of delta renewed of those who replied."""
        replies = yield from self.maps(server, clients)
        return self.kept_by(server, server.state[self.name], replies)

    def kept_by(self, server: Server, state: Tree, replies: Reply) -> Server:
        """The server with this state, in which the replies' rows of delta are renewed."""
        return server._replace(state=server.state | {self.name: self.renewed(state, replies)})

    def renewed(self, state: Tree, replies: Reply) -> Tree:
        """The table with the rows of those who replied."""
        rows = torch.tensor(replies.clients, device=state["delta"].device)
        state = state | {"delta": state["delta"].index_copy(0, rows, replies.upload[self.name]["delta"])}
        return state | {"known": state["known"].index_fill(0, rows, 1)} if "known" in state else state

    def counted(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """The clients whose delta a client of this cohort may be compared with."""
        return cohort if self.delta_scope == "sampled" else tuple(range(self.n_clients))

    def measure(self, state: Tree, update: Update) -> Tree:
        """MMD between the cohort's clients (eq. 2), the mean of their r, the median norm of all delta, and the size of
        the delta that one client is sent (table III, bytes). NaN where delta is not known.
        """
        cohort, table = update.replies.clients, state["delta"]
        table = table.masked_fill(known(state).unsqueeze(1) == 0, torch.nan)  # [N, d]
        own, sent = table[list(cohort)], self.address(state, cohort)
        r = torch.stack([self.regulariser(phi, row(sent, k)) for k, phi in enumerate(own)])
        return {
            "mmd": torch.cdist(own, own, compute_mode="donot_use_mm_for_euclid_dist"),  # [M, M]
            "r": r.nanmean(),
            "delta_norm_median": torch.linalg.vector_norm(table, dim=1).nanquantile(0.5),
            "delta_bytes": torch.tensor(n_bytes(sent) // len(cohort)),
        }


def known(state: Tree) -> Tensor:
    """1 for the clients whose delta is known, [N]."""
    found: Tensor = state["known"] if "known" in state else torch.ones_like(state["delta"][:, 0])
    return found


def drawn(own: Plan, size: int, key: Tensor) -> Plan:
    """One batch of `size` samples of a plan, uniformly without replacement; all if there are fewer."""
    index = own.index.flatten()
    order = uniform(key, len(index))
    if own.mask is None:
        index = index[order.argsort(stable=True)[:size]]
        return Plan(own.samples, index, sizes=(len(index),), read=own.read)
    # Padding comes last, so that a client draws the same samples with it and without.
    mask = own.mask.flatten()
    chosen = torch.where(mask, order, torch.ones_like(order)).argsort(stable=True)[:size]
    return Plan(own.samples, index[chosen].unsqueeze(0), mask=mask[chosen].unsqueeze(0), read=own.read)
