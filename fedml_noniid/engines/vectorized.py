"""Runs a chunk of the cohort at once, ragged clients by masks: the fast engine.

Dense networks take the trees of all clients themselves. Every other function of one client goes
through `torch.func.vmap`. Training takes its gradient outside of vmap, by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Ask, Client, Reply
from fedml_noniid.core.data import Pass, Reader, Samples
from fedml_noniid.core.received import received_models
from fedml_noniid.core.task import Task, functional
from fedml_noniid.core.training import answer
from fedml_noniid.core.trees import Params, Tree, n_bytes, row, tree_map
from fedml_noniid.data.batches import Order, padded
from fedml_noniid.engines.clients import NO_STEPS, Clients, marked, numbers, to_device
from fedml_noniid.engines.local import ClientAxis, StepInputs, train
from fedml_noniid.engines.packing import stack
from fedml_noniid.engines.personal import personalized
from fedml_noniid.engines.storage import rows_for, unaliased

# on a CPU, where a client that waits for the longest one costs as much as one that moves
MAX_STEP_RATIO = 2.0
# Without `clients_at_once`, the models of the clients side by side take so many bytes. This is a
# number of its own and not the machine's memory, as it decides about the last bits of a run.
MODEL_BYTES = 2 << 30


def chunks(lengths: Sequence[int], size: int, ratio: float = MAX_STEP_RATIO) -> list[list[int]]:
    """Groups of positions that run side by side, from few steps to many.

    A group has at most `size` positions, and none has more than `ratio` times the steps of another.
    """
    pieces: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        if (
            not pieces
            or len(pieces[-1]) == size
            or lengths[position] > ratio * lengths[pieces[-1][0]]
        ):
            pieces.append([])
        pieces[-1].append(position)
    return pieces


class Vectorized:
    """Runs clients side by side.

    Equal to `Sequential` up to rounding. As there, the updates and gradients of a round take the
    memory of the last round's.
    """

    def __init__(self, clients: Clients, at_once: int | None = None) -> None:
        """`at_once`: clients of a chunk; None: as many as MODEL_BYTES hold."""
        self.clients = clients
        self.at_once = at_once or max(1, MODEL_BYTES // self._client_bytes())
        # Memory for the updates of a cohort, and for the gradients of a chunk: fresh memory costs
        # page faults.
        self._updates: Params = {}
        self._gradient: Params = {}

    @property
    def lifted(self) -> Task:
        """The task of hooks, which vmap transforms."""
        return replace(self.clients.task, grad=functional)

    @torch.no_grad()
    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        clients, training = self.clients, ask.job == TRAIN
        clients.enter(round_)
        # The numbers of several models come on the host.
        ask = ask._replace(each=tree_map(lambda leaf: leaf.to(clients.device), ask.each))
        orders = clients.orders(ask.to, round_) if training else [NO_STEPS] * len(ask.to)
        host, pieces = clients.keys(ask, round_), []
        keys = host.to(clients.device)
        # A GPU has memory for clients that wait, and needs few launches.
        max_ratio = MAX_STEP_RATIO if clients.device.type == "cpu" else math.inf
        parts = chunks([len(order.sizes) for order in orders], self.at_once, max_ratio)
        out = self._memory(ask) if training and len(parts) == 1 else None
        for chunk in parts:
            moving = [orders[position] for position in chunk]
            answers = self._piece(ask, round_, chunk, moving, (host, keys), out)
            clients.memory.put([ask.to[position] for position in chunk], answers.pop("memory"))
            pieces.append(answers)
        stacked: Tree = pieces[0]
        if len(parts) > 1:
            stacked = tree_map(lambda *leaves: torch.cat(leaves), *pieces)
        order = [position for chunk in parts for position in chunk]
        if order != sorted(order):
            stacked = row(stacked, numbers(order, clients.device).argsort())
        n = numbers(map(len, map(clients.indices.__getitem__, ask.to)), clients.device)
        params = stacked.pop("params")
        if clients.asked_again(ask):
            clients.start_from(ask)
            for position, client in enumerate(ask.to):
                clients.store(client, row(params, position), row(stacked["buffers"], position))
        if training:
            memory = clients.memory.rows(ask.to) if clients.changes_updates else {}
            deltas = self._leaving(ask, round_, keys, memory, params)
        else:
            deltas = clients.moved(ask, params)
        return Reply(ask.to, deltas, n=n, **stacked)

    def _leaving(self, ask: Ask, round_: int, keys: Tensor, memory: Tree, params: Params) -> Params:
        """The updates [M, ...] as they leave the clients; `params` is scratch memory afterwards."""
        trees: Tree = {"each": ask.each, "memory": memory, "key": keys}
        trees |= received_models(ask, slice(None))
        start = trees.get("model", {"params": ask.params})
        deltas = tree_map(lambda w_k, w: w_k.sub_(w), params, start["params"])
        if self.clients.changes_updates:
            deltas = torch.func.vmap(partial(self.clients.left_as, ask, round_))(trees, deltas)
        return deltas

    def _piece(
        self,
        ask: Ask,
        round_: int,
        chunk: list[int],
        orders: list[Order],
        keys: tuple[Tensor, Tensor],
        out: Params | None,
    ) -> Tree:
        """The answers of the clients at the positions `chunk` in `ask.to`.

        `keys`: of all clients that are asked, [M], on the host and on the device.
        """
        clients, (host, there) = self.clients, keys
        ids = [ask.to[position] for position in chunk]
        here = numbers(chunk, clients.device)
        trees: Tree = {
            "each": row(ask.each, here),
            "memory": clients.memory.rows(ids),
            "key": there[here],
            **received_models(ask, here),
        }
        if clients.needs.local_set:
            passes = [clients.local_set(client) for client in ids]
            trees["local_set"] = self._batched(passes, live=False)
        if ask.job != TRAIN:
            return self._answered(ask, round_, trees, ids)
        return self._trained(ask, round_, trees, orders, host[chunk], out)

    def _client_bytes(self) -> int:
        """The bytes of a client's models in training."""
        # Parameters, gradient, update, their successors and the received model.
        algorithm, copies = self.clients.algorithm, 8
        if algorithm.own_model is not None:
            copies *= 2
        if algorithm.per_sample is not None:  # their gradients, clipped ones too
            copies += 2 * self.clients.local.batch_size
        start = self.clients.start
        return copies * (n_bytes(start.params) + n_bytes(start.task.personal) or 1)

    def _memory(self, ask: Ask) -> Params:
        if not self._updates or len(next(iter(self._updates.values()))) != len(ask.to):
            self._updates = rows_for(ask.params, len(ask.to))
        return self._updates

    def _client(self, ask: Ask, round_: int, trees: Tree) -> Client:
        """One client, from its trees."""
        clients, local_set = self.clients, Client.local_set
        if "local_set" in trees:
            _, read = clients.reads(trees["key"])
            local_set = Pass(clients.train, **trees["local_set"], read=read)
        asked = ask._replace(**trees.get("model", {}))
        return clients.client(self.lifted, asked, round_, trees["key"], local_set)

    def _trained(
        self,
        ask: Ask,
        round_: int,
        trees: Tree,
        orders: list[Order],
        host_keys: Tensor,
        out: Params | None,
    ) -> Tree:
        """The answers to training. `host_keys`: the clients' keys, on the host."""
        clients = self.clients
        # [S, M, ...]: a step of all clients is one entry.
        batched: dict[str, Any] = {
            name: leaf.transpose(0, 1).contiguous()
            for name, leaf in self._batched(orders, live=True).items()
        }
        if clients.needs.personal_first:
            at = torch.arange(len(batched["index"]), device=clients.device)
            first = numbers((order.personal for order in orders), clients.device)
            batched["personal"] = at[:, None] < first  # [S, M]
        steps = Pass(clients.train, **batched, read=self._reader(trees["key"]))
        axis = ClientAxis(partial(self._client, ask, round_), self._gradient, len(orders))
        inputs = StepInputs(steps, clients.drawn(ask, host_keys, orders), out)
        descent, answers = train(clients.algorithm, clients.task, axis, ask, trees, inputs)
        # The models become differences in place. A component that sends one of their tensors sends
        # a copy. Without a step they share the received model's memory.
        params = descent.params if len(steps) else tree_map(torch.clone, descent.params)
        answers = unaliased(answers, params)
        mean = descent.loss / descent.steps.clamp(min=1)
        return answers | {
            "params": params,
            "buffers": descent.buffers,
            "steps": descent.steps,
            "loss": mean,
        }

    def _answered(self, ask: Ask, round_: int, trees: Tree, ids: list[int]) -> Tree:
        """The answers to an Ask of a component."""
        clients = self.clients
        if not ask.params:
            models = [clients.model_of(ask, client) for client in ids]
            stacked = stack([{"params": params, "buffers": buffers} for params, buffers in models])
            trees = trees | {"model": stacked}

        def of_client(trees: Tree) -> Tree:
            sent = ask._replace(each=trees["each"])
            view = personalized(self._client(ask, round_, trees), trees["memory"])
            answered = answer(clients.algorithm, view, sent, trees["memory"])
            named = {
                field: {ask.owner: getattr(answered, field)}
                for field in ("upload", "memory", "metrics")
            }
            loss = marked(none[0], answered.memory)
            return named | {"params": answered.params, "buffers": answered.buffers, "loss": loss}

        none = trees["key"].new_zeros(len(ids), dtype=clients.train.x.dtype)
        answered: Tree = torch.func.vmap(of_client)(trees)
        return answered | {"steps": none}

    def _reader(self, keys: Tensor) -> Reader | None:
        """How a step's samples of all clients are read."""
        if self.clients.reads(keys)[0] is None:
            return None

        def read(samples: Samples, index: Tensor, step: int) -> Tensor:
            def of_client(key: Tensor, index: Tensor) -> Tensor:
                reading, _ = self.clients.reads(key)
                assert reading is not None
                return reading(samples, index, step)

            view: Tensor = torch.func.vmap(of_client)(keys, index)
            return view

        return read

    def _batched(self, orders: list[Order], live: bool) -> dict[str, Tensor]:
        """Index [M, S, B]; mask and live if some client has fewer samples or steps than the
        others."""
        index, mask = padded(orders)
        device = self.clients.device
        batched = {"index": to_device(index, device)}
        if not mask.all():
            batched["mask"] = to_device(mask, device)
            alive = mask.any(axis=2)
            if live and not alive.all():
                batched["live"] = to_device(alive, device)
        return batched
