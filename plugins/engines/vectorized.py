"""The fast engine: a chunk of the cohort at once through `torch.func.vmap`, ragged clients by masks."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.core.client import answer, functional
from plugins.core.component import Ask, Data, Plan, Reply, Samples
from plugins.core.task import Pass
from plugins.core.trees import Tree, n_bytes, row, tree_map
from plugins.data.batches import Order, padded
from plugins.engines.clients import Clients, to_device


class Vectorized:
    """Runs clients side by side. Equal to `Sequential` up to rounding; chunks keep within `memory_mb`."""

    def __init__(self, clients: Clients, memory_mb: int = 2048) -> None:
        self.clients = clients
        self.memory_mb = memory_mb

    @torch.no_grad()
    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        steps = [self.clients.steps(client, ask.job, round_) for client in ask.to]
        # Clients of similar step counts share a chunk, so that few steps are computed to be thrown away.
        by_length = sorted(range(len(ask.to)), key=lambda position: len(steps[position][0].sizes))
        size, keys = self.chunk_size(ask), self.clients.keys(ask, round_)
        pieces = []
        for first in range(0, len(by_length), size):
            chunk = by_length[first : first + size]
            pieces.append(self._chunk(ask, keys, chunk, [steps[position][0] for position in chunk], steps[0][1]))
        joined: Tree = tree_map(lambda *parts: torch.cat(parts), pieces[0], *pieces[1:])
        back = torch.tensor(by_length).argsort().to(self.clients.device)
        stacked = row(joined, back)
        sizes = [len(self.clients.indices[client]) for client in ask.to]
        n = torch.tensor(sizes, device=self.clients.device)
        if ask.job == "train":
            self.clients.hold(ask, ask.to, stacked["params"], stacked["buffers"])
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

    def _chunk(self, ask: Ask, keys: Tensor, chunk: list[int], orders: list[Order], samples: Samples) -> Tree:
        clients = self.clients
        ids = [ask.to[position] for position in chunk]
        rows = torch.tensor([clients.row[client] for client in ids], device=clients.device)
        batched: Tree = {
            "each": row(ask.each, torch.tensor(chunk, device=clients.device)),
            "memory": row(clients.memory, rows),
            "steps": self._batched(orders, live=True),
            "key": keys[torch.tensor(chunk, device=clients.device)],
        }
        if "last epoch" in clients.algorithm.passes and ask.job == "train":
            batched["steps"]["last"] = self._last(orders, samples.x.dtype)
        if "own" in clients.algorithm.passes:
            batched["own"] = self._batched([clients.own_pass(client) for client in ids], live=False)
        if not ask.params:
            held = [clients.held[client] for client in ids]
            batched["params"] = tree_map(lambda *leaves: torch.stack(leaves), *(params for params, _ in held))
            batched["buffers"] = tree_map(lambda *leaves: torch.stack(leaves), *(buffers for _, buffers in held))
        public = None
        if "public" in clients.algorithm.passes and clients.public is not None:
            order = clients.public_pass()
            public = Plan(clients.public, to_device(order.index, clients.device), sizes=order.sizes)

        def one(args: Tree) -> Tree:
            read_steps, read_own = clients.reads(ask.job, args["key"])
            data = Data(
                Plan(samples, **args["steps"], read=read_steps),
                Plan(clients.train, **args["own"], read=read_own) if "own" in args else None,
                public,
                args["key"],
            )
            params, buffers = (ask.params, ask.buffers) if ask.params else (args["params"], args["buffers"])
            answered, trace = answer(
                clients.algorithm, clients.task, ask.job, params, buffers, ask.shared, args["each"], args["memory"],
                data, functional, clients.observing,
            )  # fmt: skip
            zero = torch.zeros((), dtype=next(iter(params.values())).dtype, device=clients.device)
            return {
                "answer": answered._asdict(),
                "steps": zero if trace is None else trace.steps,
                "loss": zero if trace is None else trace.loss,
            }

        out = torch.func.vmap(one)(batched)
        answered = out.pop("answer")
        # Rows of different clients: no two writes meet.
        tree_map(lambda leaf, new: leaf.index_copy_(0, rows, new), clients.memory, answered.pop("memory"))
        joined: Tree = {**answered, **out}
        return joined

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
        first = torch.tensor([len(order.sizes) - order.last for order in orders], device=self.clients.device)
        return (step >= first[:, None]).to(dtype)
