"""The reference engine: one client after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plugins.core.client import Alone, further, train
from plugins.core.component import Ask, Data, Plan, Reply, Samples
from plugins.core.reading import Reader
from plugins.core.training import autograd
from plugins.core.trees import Params, Tree, replace_row, row, tree_map
from plugins.data.batches import Order
from plugins.engines.arena import rows_for
from plugins.engines.clients import Clients, to_device


class Sequential:
    """Runs each client by itself, without padding; what the other runtimes are compared with.

    The models that training ends with lie in memory that the next round's are put into.
    """

    def __init__(self, clients: Clients, models: Params | None = None) -> None:
        """`models`: room for those of a cohort, as from `rows_for`; made at need if None."""
        self.clients = clients
        self.task = replace(clients.task, plain=True)
        self.models = models or {}

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        m = len(ask.to)
        if ask.job != "train":
            return Reply(ask.to, **self.some(ask, round_, range(m)))
        if not self.models or len(next(iter(self.models.values()))) < m:
            self.models = rows_for(ask.params, m)
        found = self.some(ask, round_, range(m))
        return Reply(ask.to, params=row(self.models, slice(m)), **found)

    @torch.no_grad()
    def some(self, ask: Ask, round_: int, positions: Sequence[int]) -> Tree:
        """The stacked answers of those of `ask.to` at `positions`: the fields of a Reply.

        Of training, without `params`, which are put into the rows `positions` of `models`.
        """
        keys, training = self.clients.keys(ask, round_), ask.job == "train"
        stacked: Tree = {}
        for n, position in enumerate(positions):
            own = row(self.models, position) if training else None
            one = self._one(ask, ask.to[position], position, round_, keys[position], own)
            if own is not None:
                trained = one.pop("params")
                if self.clients.holds(ask):
                    self.clients.hold(ask.to[position], trained, one["buffers"])
                for key, leaf in trained.items():
                    if leaf is not own[key]:  # a client without a step ends where it began
                        own[key].copy_(leaf)
            # Row by row: a list of all answers beside their stack would hold everything twice.
            stacked = stacked or tree_map(lambda leaf: leaf.new_empty((len(positions), *leaf.shape)), one)
            replace_row(stacked, n, one)
        return stacked

    def _one(self, ask: Ask, client: int, position: int, round_: int, key: Tensor, into: Params | None) -> Tree:
        clients = self.clients
        own, public = "own" in clients.algorithm.passes, "public" in clients.algorithm.passes
        steps, samples = clients.steps(client, ask.job, round_)
        read_steps, read_own = clients.reads(ask.job, key)
        data = Data(
            self._plan(steps, samples, read_steps, "last epoch" in clients.algorithm.passes and ask.job == "train"),
            self._plan(clients.own_pass(client), clients.train, read_own) if own else None,
            self._plan(clients.public_pass(), clients.public) if public and clients.public else None,
            key,
        )
        params, buffers = (ask.params, ask.buffers) if ask.params else clients.held[client]
        # A copy: what a component uploads may be its memory, which is overwritten before the replies are stacked.
        memory = tree_map(lambda leaf: leaf[clients.row[client]].clone(), clients.memory)
        mine: Tree = {"key": key, "each": row(ask.each, position), "memory": memory}
        given, sent, trace = (clients.algorithm, self.task), (params, buffers, ask.shared, mine), None
        if ask.job == "train":
            answered, trace = train(*given, *sent, data.steps, Alone(data), clients.observing, into)
        else:
            answered = further(*given, ask.job, *sent, data, autograd, clients.observing)
        replace_row(clients.memory, clients.row[client], answered.memory)
        zero = torch.zeros((), dtype=next(iter(params.values())).dtype, device=clients.device)
        return {
            "params": answered.params,
            "buffers": answered.buffers,
            "upload": answered.upload,
            "n": torch.tensor(len(clients.indices[client]), device=clients.device),
            "steps": zero if trace is None else trace.steps,
            "loss": zero if trace is None else trace.loss,
            "metrics": answered.metrics,
        }

    def _plan(self, order: Order, samples: Samples, read: Reader | None = None, last: bool = False) -> Plan:
        n, device = len(order.sizes), self.clients.device
        late = (torch.arange(n, device=device) >= n - order.last).to(samples.x.dtype) if last else None
        return Plan(samples, to_device(order.index, device), sizes=order.sizes, last=late, read=read)
