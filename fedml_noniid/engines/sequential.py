"""Runs one client after the other: the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Ask, Client, Reply
from fedml_noniid.core.data import Pass, Reader, Samples
from fedml_noniid.core.received import received
from fedml_noniid.core.task import Task
from fedml_noniid.core.training import answer
from fedml_noniid.core.trees import Params, Tree, row, tree_map
from fedml_noniid.data.batches import Order
from fedml_noniid.engines.clients import Clients, marked, to_device
from fedml_noniid.engines.local import ClientAxis, StepInputs, train
from fedml_noniid.engines.personal import personalized
from fedml_noniid.engines.storage import replace_row, rows_for, unaliased
from fedml_noniid.engines.streaming import Sums


def plain(task: Task) -> Task:
    """The task of one client at a time: its passes are plain, see
    `models.forward.Forward`."""
    return replace(task, network=replace(cast("Any", task.network), plain=True))


class Sequential:
    """Runs each client by itself, without padding. The other runtimes are compared with it.

    The updates of a round take the memory of the last round's, gradients that of the last client's.
    """

    def __init__(
        self, clients: Clients, updates: Params | None = None, streams: bool = False
    ) -> None:
        """`updates`: memory for the updates of a cohort, as from `rows_for`; made when it is needed
        if None. `streams`: whether they are added up one by one instead, see
        `engines.streaming`."""
        self.clients = clients
        self.updates = updates or {}
        self.gradient: Params = {}
        self.streams = streams
        self.sums: Sums | None = None  # of the training that is under way

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        m = len(ask.to)
        if ask.job != TRAIN:
            return Reply(ask.to, **self.some(ask, round_, range(m)))
        if self.streams:
            self.sums = self.clients.sums(ask)
            answers = self.some(ask, round_, range(m))
            return Reply(ask.to, **answers, **self.sums.parts)
        if not self.updates or len(next(iter(self.updates.values()))) < m:
            self.updates = rows_for(ask.params, m)
        answers = self.some(ask, round_, range(m))
        return Reply(ask.to, row(self.updates, slice(m)), **answers)

    @torch.no_grad()
    def some(self, ask: Ask, round_: int, positions: Sequence[int]) -> Tree:
        """The fields of a Reply: the stacked answers of the clients at `positions` in `ask.to`.

        Training's have no `deltas`; these are put into the rows `positions` of `updates`, or with
        all that is added up into `sums`.
        """
        self.clients.enter(round_)
        self.task = plain(self.clients.task)
        host, training = self.clients.keys(ask, round_), ask.job == TRAIN
        sums = self.sums if training else None
        if sums is not None and not self.updates:
            self.updates = rows_for(ask.params, 1)
        keys = host.to(self.clients.device)
        if self.clients.asked_again(ask):
            self.clients.start_from(ask)
        stacked: Tree = {}
        for n, position in enumerate(positions):
            if training:
                out = row(self.updates, position if sums is None else 0)
                answer = self._trained(ask, position, round_, keys[position], host[position], out)
                if sums is not None:
                    answer = sums.take(position, {"deltas": out, **answer})
            else:
                answer = self._answered(ask, position, round_, keys[position])
            # Row by row: a list of all answers beside their stack would take twice the memory.
            stacked = stacked or tree_map(
                lambda leaf: leaf.new_empty((len(positions), *leaf.shape)), answer
            )
            replace_row(stacked, n, answer)
        return stacked

    def _trained(
        self, ask: Ask, position: int, round_: int, key: Tensor, host_key: Tensor, out: Params
    ) -> Tree:
        """A client's answer to training; its update is put into `out`.

        `host_key` is the key on the host.
        """
        clients, client, ask = self.clients, ask.to[position], received(ask, position)
        order = clients.steps(client, round_)
        read, _ = clients.reads(key)
        steps = self._steps(order, read)
        # Made once, and only where a component reads it.
        view = cache(partial(self._client, ask, round_, key, client))
        axis = ClientAxis(lambda _: view(), self.gradient)
        trees: Tree = {
            "key": key,
            "each": row(ask.each, position),
            "memory": self._memory(client),
        }
        inputs = StepInputs(steps, clients.drawn(ask, host_key, [order]), out)
        descent, answers = train(clients.algorithm, self.task, axis, ask, trees, inputs)
        clients.memory.put_row(client, answers.pop("memory"))
        answers = unaliased(answers, descent.params)
        if clients.asked_again(ask):
            clients.store(client, descent.params, descent.buffers)
        for name, leaf in descent.params.items():  # a client without a step ends where it began
            torch.sub(leaf, ask.params[name], out=out[name])
        if clients.changes_updates:
            trees["memory"] = self._memory(client)
            for name, leaf in clients.left_as(ask, round_, trees, out).items():
                out[name].copy_(leaf)
        return {
            "buffers": descent.buffers,
            **answers,
            **self._counts(client, descent.steps, descent.loss),
        }

    def _answered(self, ask: Ask, position: int, round_: int, key: Tensor) -> Tree:
        """A client's answer to an Ask of a component."""
        clients, client = self.clients, ask.to[position]
        params, buffers = clients.model_of(ask, client)
        model = ask._replace(params=params, buffers=buffers)
        view = self._client(model, round_, key, client)
        sent, memory = ask._replace(each=row(ask.each, position)), self._memory(client)
        answered = answer(clients.algorithm, personalized(view, memory), sent, memory)
        clients.memory.put_row(client, {ask.owner: answered.memory})
        zero = torch.zeros((), dtype=next(iter(params.values())).dtype, device=clients.device)
        return {
            "deltas": clients.moved(ask, answered.params),
            "buffers": answered.buffers,
            "upload": {ask.owner: answered.upload},
            "metrics": {ask.owner: answered.metrics},
            **self._counts(client, zero, marked(zero, answered.memory)),
        }

    def _counts(self, client: int, steps: Tensor, loss: Tensor) -> Tree:
        n = torch.tensor(len(self.clients.indices[client]), device=self.clients.device)
        return {"n": n, "steps": steps, "loss": loss / steps.clamp(min=1)}

    def _memory(self, client: int) -> Tree:
        # A copy: what a component uploads may be its memory, which is replaced before the replies
        # are stacked.
        return tree_map(torch.clone, self.clients.memory.row(client))

    def _client(self, ask: Ask, round_: int, key: Tensor, client: int) -> Client:
        clients, local_set = self.clients, Client.local_set
        if clients.needs.local_set:
            order, (_, read) = clients.local_set(client), clients.reads(key)
            local_set = self._pass(order, clients.train, read)
        return clients.client(self.task, ask, round_, key, local_set)

    def _steps(self, order: Order, read: Reader | None) -> Pass:
        """What the steps of local training read."""
        clients = self.clients
        steps = self._pass(order, clients.train, read)
        if not clients.needs.personal_first:
            return steps
        at = torch.arange(len(order.sizes), device=clients.device)
        return replace(steps, personal=at < order.personal)

    def _pass(self, order: Order, samples: Samples, read: Reader | None = None) -> Pass:
        index = to_device(order.index, self.clients.device)
        return Pass(samples, index, sizes=order.sizes, read=read)
