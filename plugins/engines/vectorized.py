"""The fast engine: a chunk of the cohort at once, ragged clients by masks.

Dense networks take all clients' trees themselves; whatever else is written for one client goes through
`torch.func.vmap`. The gradient of training is taken outside, by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.core.client import further, train, written_of
from plugins.core.component import Ask, Batch, Data, Plan, Reply, Samples
from plugins.core.reading import Noise, Reader
from plugins.core.task import Output, Pass, Task
from plugins.core.training import Forward, Written, functional
from plugins.core.trees import Params, Tree, n_bytes, row, tree_map
from plugins.data.batches import Order, padded
from plugins.engines.arena import rows_for
from plugins.engines.clients import Clients, numbers, to_device

APART = 2.0  # on a CPU, where what stands still until the longest is done costs as much as what moves


def chunks(lengths: Sequence[int], size: int, apart: float = APART) -> list[list[int]]:
    """Positions that run side by side, from few steps to many: at most `size` of them, none above `apart` times as long
    as another.
    """
    found: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
        if not found or len(found[-1]) == size or lengths[position] > apart * lengths[found[-1][0]]:
            found.append([])
        found[-1].append(position)
    return found


@dataclass(frozen=True)
class Beside:
    """Clients side by side; `read` is what one of them reads."""

    count: int  # M
    dense: bool  # whether the network takes several clients' trees itself
    read: Callable[[Tree], Data]

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.func.vmap(fn)

    def every(self, tree: Tree) -> Tree:
        return tree_map(lambda leaf: leaf.expand(self.count, *leaf.shape), tree)

    def forward(self, task: Task) -> Forward:
        if self.dense:
            return lambda params, buffers, batch: task.forward(
                params, buffers, batch.x, train=True, mask=batch.mask, key=batch.key, axes=1
            )

        def one(params: Params, buffers: Params, batch: Tree) -> Output:
            return task.forward(params, buffers, **batch, train=True)

        lifted = torch.func.vmap(one)

        def forward(params: Params, buffers: Params, batch: Batch) -> Output:
            given = {"x": batch.x, "mask": batch.mask, "key": batch.key}
            out: Output = lifted(params, buffers, {key: leaf for key, leaf in given.items() if leaf is not None})
            return out

        return forward

    def written(self, task: Task) -> Written | None:
        return written_of(task, 1) if self.dense else None

    def data(self, own: Tree) -> Data:
        return self.read(own)


class Vectorized:
    """Runs clients side by side. Equal to `Sequential` up to rounding; chunks keep within `memory_mb`.

    As there, the models that training ends with may be overwritten by the next round's.
    """

    def __init__(self, clients: Clients, memory_mb: int = 2048) -> None:
        self.clients = clients
        self.memory_mb = memory_mb
        self._sizes: dict[str, int] = {}  # of chunks, by job
        self._models: Params = {}  # room for those of a cohort: fresh memory has to be faulted in

    @torch.no_grad()
    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        steps = [self.clients.steps(client, ask.job, round_) for client in ask.to]
        keys, pieces = self.clients.keys(ask, round_), []
        # A GPU has room for what stands still, and wants few launches.
        apart = APART if self.clients.device.type == "cpu" else math.inf
        if ask.job not in self._sizes:
            self._sizes[ask.job] = self.chunk_size(ask)
        parts = chunks([len(order.sizes) for order, _ in steps], self._sizes[ask.job], apart)
        into = self._room(ask) if ask.job == "train" and len(parts) == 1 else None
        for chunk in parts:
            orders = [steps[position][0] for position in chunk]
            pieces.append(self._chunk(ask, keys, chunk, orders, steps[0][1], into))
        stacked: Tree = pieces[0]
        if len(parts) > 1:
            stacked = tree_map(lambda *leaves: torch.cat(leaves), *pieces)
        order = [position for chunk in parts for position in chunk]
        if order != sorted(order):
            stacked = row(stacked, numbers(order, self.clients.device).argsort())
        n = numbers((len(self.clients.indices[client]) for client in ask.to), self.clients.device)
        if self.clients.holds(ask):
            for position, client in enumerate(ask.to):
                self.clients.hold(client, row(stacked["params"], position), row(stacked["buffers"], position))
        return Reply(ask.to, n=n, **stacked)

    def chunk_size(self, ask: Ask) -> int:
        """How many clients fit into the memory bound: copies of the model, and what a batch's layers put out."""
        clients = self.clients
        params, buffers = (ask.params, ask.buffers) if ask.params else clients.held[ask.to[0]]
        run = Pass(clients.task.whole(params), dict(buffers), train=False)
        clients.task.network.classify(run, clients.task.network.encode(run, clients.train.x[:1]))
        # Parameters, gradient, update, their successors and the received model; forward and backward of a batch.
        model = 8 * n_bytes(params)
        batch = 3 * run.outputs * clients.train.x.element_size() * max(clients.local.batch_size, 1)
        return max(1, (self.memory_mb << 20) // (model + batch))

    def _room(self, ask: Ask) -> Params:
        if not self._models or len(next(iter(self._models.values()))) != len(ask.to):
            self._models = rows_for(ask.params, len(ask.to))
        return self._models

    def _chunk(
        self, ask: Ask, keys: Tensor, chunk: list[int], orders: list[Order], samples: Samples, into: Params | None
    ) -> Tree:
        clients, training = self.clients, ask.job == "train"
        ids = [ask.to[position] for position in chunk]
        at = numbers(chunk, clients.device)
        rows = numbers((clients.row[client] for client in ids), clients.device)
        own: Tree = {"each": row(ask.each, at), "memory": row(clients.memory, rows), "key": keys[at]}
        own["steps"] = self._batched(orders, live=True)
        if "last epoch" in clients.algorithm.passes and training:
            own["steps"]["last"] = self._last(orders, samples.x.dtype)
        if "own" in clients.algorithm.passes:
            own["own"] = self._batched([clients.own_pass(client) for client in ids], live=False)
        public = None
        if "public" in clients.algorithm.passes and clients.public is not None:
            order = clients.public_pass()
            public = Plan(clients.public, to_device(order.index, clients.device), sizes=order.sizes)

        def data(own: Tree) -> Data:
            """What one of the clients reads."""
            read_steps, read_own = clients.reads(ask.job, own["key"])
            return Data(
                Plan(samples, **own["steps"], read=read_steps),
                Plan(clients.train, **own["own"], read=read_own) if "own" in own else None,
                public,
                own["key"],
            )

        if training:
            side = Beside(len(ids), clients.task.network.dense, data)
            # [S, M, ...]: a step of all clients is one entry.
            steps = {name: leaf.transpose(0, 1).contiguous() for name, leaf in own["steps"].items()}
            read = self._reader(own["key"])
            given = ask.params, ask.buffers, ask.shared, own, Plan(samples, **steps, read=read)
            answered, trace = train(clients.algorithm, clients.task, *given, side, clients.observing, into)
            found: Tree = answered._asdict() | {"steps": trace.steps, "loss": trace.loss}
            # The models become differences in place; what a component sends of them stays as it is.
            models = {leaf.data_ptr() for leaf in answered.params.values()}
            found["upload"] = tree_map(lambda x: x.clone() if x.data_ptr() in models else x, answered.upload)
        else:
            found = self._further(ask, ids, own, data)
        # Rows of different clients: no two writes meet.
        tree_map(lambda leaf, new: leaf.index_copy_(0, rows, new), clients.memory, found.pop("memory"))
        return found

    def _further(self, ask: Ask, ids: list[int], own: Tree, data: Callable[[Tree], Data]) -> Tree:
        """The answers to an Ask of a component."""
        clients = self.clients
        if not ask.params:
            held = [clients.held[client] for client in ids]
            models = tree_map(lambda *leaves: torch.stack(leaves), *({"params": p, "buffers": b} for p, b in held))
            own = own | {"model": models}

        def one(own: Tree) -> Tree:
            model = own.get("model", {"params": ask.params, "buffers": ask.buffers})
            return further(
                clients.algorithm, clients.task, ask.job, **model, shared=ask.shared, own=own, data=data(own),
                grad=functional, observing=clients.observing,
            )._asdict()  # fmt: skip

        none = own["key"].new_zeros(len(ids), dtype=clients.train.x.dtype)
        found: Tree = torch.func.vmap(one)(own)
        return found | {"steps": none, "loss": none}

    def _reader(self, keys: Tensor) -> Reader | None:
        """How a step's samples of all clients are read."""
        if self.clients.reads("train", keys)[0] is None:
            return None

        def read(x: Tensor, noise: Noise | None, index: Tensor, step: int) -> Tensor:
            def one(key: Tensor, index: Tensor) -> Tensor:
                reading, _ = self.clients.reads("train", key)
                assert reading is not None
                return reading(x, noise, index, step)

            seen: Tensor = torch.func.vmap(one)(keys, index)
            return seen

        return read

    def _batched(self, orders: list[Order], live: bool) -> dict[str, Tensor]:
        """Index [M, S, B], and mask and live where some client has less than the others."""
        index, mask = padded(orders)
        device = self.clients.device
        batched = {"index": to_device(index, device)}
        if not mask.all():
            batched["mask"] = to_device(mask, device)
            alive = mask.any(axis=2)
            if live and not alive.all():
                batched["live"] = to_device(alive, device)
        return batched

    def _last(self, orders: list[Order], dtype: torch.dtype) -> Tensor:
        """1 for the steps of each client's last epoch, [M, S]; padding lies behind them and is masked."""
        step = torch.arange(max(len(order.sizes) for order in orders), device=self.clients.device)
        first = numbers((len(order.sizes) - order.last for order in orders), self.clients.device)
        return (step >= first[:, None]).to(dtype)
