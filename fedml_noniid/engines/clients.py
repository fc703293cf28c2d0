"""Holds the clients of a simulation, or the one client of a silo: data, memory, results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import MODELS, Ask, Client, Reply, overrides
from fedml_noniid.core.contract import call
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.randomness import Noised, fold, noised, step_key
from fedml_noniid.core.sums import Growing
from fedml_noniid.core.task import Task
from fedml_noniid.core.training import component_views, left_as
from fedml_noniid.core.trees import Params, Tree, leaves, row_norms, tree_map
from fedml_noniid.data.batches import Order, epochs, in_order
from fedml_noniid.data.ragged import lists_of
from fedml_noniid.data.reading import Read
from fedml_noniid.data.streams import Streams, key
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.memory import memory_for
from fedml_noniid.engines.personal import PERSONAL
from fedml_noniid.engines.plan import Start
from fedml_noniid.engines.storage import numbers as numbers
from fedml_noniid.engines.storage import to_device as to_device
from fedml_noniid.engines.streaming import Sums
from fedml_noniid.models.model import Model

PASS_BATCH = 500  # samples per batch of a pass without training
NO_STEPS = Order(np.empty(0, dtype=np.int64), ())


class Clients:
    """Holds data, memory and results of a round of some clients, by client id."""

    def __init__(self, start: Start, federation: Federation) -> None:
        """`federation`: as the algorithm uses it, with the clients that this process has."""
        self.start, self.algorithm, self.local = start, start.algorithm, start.plan.local
        self.task, self.seed, self.observing = start.task, start.plan.seed, start.plan.observing
        self.needs = self.algorithm.needs
        self.public, self.drift = federation.public, federation.held
        self.read(federation.train)
        self.task.loss.check(federation.train.y, start.plan.network.vocabulary)
        self.indices = federation.clients
        if not (sizes := lists_of(self.indices).sizes).all():
            client = [*self.indices][int(sizes.argmin())]
            raise UserError(f"client {client} has no samples; every client needs at least one")
        if not self.needs.no_training:
            self.local.check_reads(sizes.tolist())
        tests: Mapping[int, Samples] = {}
        if self.task.own_models:
            own_tests = federation.tests
            tests = (
                dict.fromkeys(self.indices, federation.test)
                if own_tests is None
                else dict(enumerate(own_tests()))
            )
        self.tests = {client: samples for client, samples in tests.items() if len(samples.y)}
        self.local.check(tuple(self.train.x.shape[1:]), self.device)
        n = len(self.indices)
        # of each client in the memory; all clients of a simulation have the ids 0 to N - 1
        self.row: Mapping[int, int] | range = range(n)
        if n < federation.size:
            self.row = {client: row for row, client in enumerate(self.indices)}
        unmet = Client(self.task, start.params, start.buffers, 0)
        first = {c.name: call(c, "init_client", unmet) for c in self.algorithm.components}
        first |= {PERSONAL: self.task.personal} if self.task.personal else {}
        self.memory = memory_for(start.plan, first, self.row)
        self.trained: dict[int, tuple[Params, Params]] = {}
        # Of the round in which they were trained; empty if clients received several models.
        self.w_t: Params = {}
        read = self.train.noise is not None or self.local.augment
        self._draws = (
            bool(self.algorithm.components) or cast("Model", self.task.network).draws or read
        )
        # The clients' streams of a round: those of the last one are asked for again.
        self._streams = lru_cache(maxsize=1)(partial(Streams, self.seed, "batches"))
        self.noised: Noised = noised  # a silo's own in its place

    @property
    def device(self) -> torch.device:
        return self.train.x.device

    def read(self, train: Samples) -> None:
        """Takes these samples, as they are before any drift."""
        self.train, self._labels = train, train.y

    def enter(self, round_: int) -> None:
        """Takes the step size of a round, and its labels."""
        self.task = self.start.task_at(round_)
        if self.drift is not None:
            self.train = self.train._replace(y=self.drift.labels(self._labels, round_))

    def steps(self, client: int, round_: int) -> Order:
        """The batches of a client's local training."""
        return self.orders((client,), round_)[0]

    def orders(self, clients: Iterable[int], round_: int) -> list[Order]:
        """The batches of some clients' local training."""
        if self.needs.no_training:
            return [NO_STEPS] * len(tuple(clients))
        streams, indices, local = self._streams(round_), self.indices, self.local
        first, steps = self.needs.personal_first, self.start.plan.local_steps
        passes, size, drop_last = local.epochs, local.batch_size, local.drop_last
        return [
            epochs(
                indices[client],
                passes,
                size,
                streams(client),
                steps(round_, client),
                drop_last,
                first,
            )
            for client in clients
        ]

    def keys(self, ask: Ask, round_: int) -> Tensor:
        """The keys of the clients' random numbers in a job, [M], on the host.

        NaN, which can't be folded, where no client draws.
        """
        if not self._draws:
            return torch.full((len(ask.to),), math.nan)
        shared = torch.tensor(key(self.seed, f"noise/{ask.job}", round_))
        return fold(shared, numbers(ask.to, shared.device))

    def drawn(self, ask: Ask, keys: Tensor, orders: Sequence[Order]) -> Iterator[Params]:
        """What the network draws in each step of training; `keys`: of a client, or of each [M];
        `orders`: of the same.

        Keys are folded on the host: on a GPU, each of these small operations would be a kernel.
        """
        network = cast("Model", self.task.network)
        if not network.draws:
            return repeat({})
        at = step_key(keys.unsqueeze(-1), torch.arange(max(len(order.sizes) for order in orders)))
        largest = max((size for order in orders for size in order.sizes), default=0)
        return network.draws_ahead(
            *self.task.model(ask.params, ask.buffers), self.train.x[:1], at, largest
        )

    def reads(self, key: Tensor) -> tuple[Read | None, Read | None]:
        """How a client reads the batches of training, and a pass over its own samples; `key` is the
        client's.

        Noise is added at every read. Only samples of training steps are cropped and flipped. None:
        as they are.
        """
        noisy, augment = self.train.noise is not None, self.local.augment
        if not (noisy or augment):
            return None, None
        at = fold(key, "read")
        return Read(fold(at, "steps"), augment), Read(fold(at, "own")) if noisy else None

    def local_set(self, client: int) -> Order:
        """One pass over all of a client's samples."""
        return in_order(self.indices[client], PASS_BATCH)

    def client(self, task: Task, ask: Ask, round_: int, key: Tensor, local_set: Pass) -> Client:
        """A client with the model of `ask`, before the core gives each component its part."""
        public = Client.public
        if self.needs.public and self.public is not None:
            order = in_order(np.arange(len(self.public.y)), PASS_BATCH)
            public = Pass(self.public, to_device(order.index, self.device), sizes=order.sizes)
        return Client(
            task,
            ask.params,
            ask.buffers,
            round_,
            local_set,
            public,
            job=ask.job,
            observing=self.observing,
            keys=key,
            noised=self.noised,
        )

    @property
    def changes_updates(self) -> bool:
        """Whether an update leaves a client as a component says."""
        return any(overrides(c, "leaving") for c in self.algorithm.components)

    def left_as(self, ask: Ask, round_: int, trees: Tree, delta: Params) -> Params:
        """A client's update as it leaves. `trees`: its "key", "each", and "memory" of now, and its
        "model" if it is not that of `ask`."""
        sent = ask._replace(each=trees["each"], **trees.get("model", {}))
        client = self.client(self.task, sent, round_, trees["key"], Client.local_set)
        views = component_views(self.algorithm, client, sent, trees["memory"])
        return left_as(self.algorithm, views, delta)

    def asked_again(self, ask: Ask) -> bool:
        """Whether results of training are stored for further Asks of the same round."""
        return ask.job == TRAIN and self.algorithm.exchanges.round > 1

    def sums(self, ask: Ask) -> Sums:
        """Empty sums of the answers to training."""
        n = [len(self.indices[client]) for client in ask.to]
        return Sums(self.algorithm, torch.tensor(n, device=self.device))

    def model_of(self, ask: Ask, client: int) -> tuple[Params, Params]:
        """(parameters, buffers) that an Ask of a component is about. UserError if it has none."""
        if not ask.params and client not in self.trained:  # a silo's server may ask anything
            raise UserError(
                f"{ask.owner}.{ask.job}: client {client} trained no model in this round"
            )
        return (ask.params, ask.buffers) if ask.params else self.trained[client]

    def start_from(self, ask: Ask) -> None:
        """Stores w_t of an Ask to train, for models that clients return to a component."""
        self.w_t = {} if MODELS in ask.each else tree_map(torch.clone, ask.params)

    def moved(self, ask: Ask, params: Params) -> Params:
        """The models that clients return to a component [...], minus w_t. UserError without w_t."""
        if params and not self.w_t:
            raise UserError(
                f"{ask.owner}.{ask.job}: a client returned a model; allowed: in the exchanges of a "
                "round, after training, where all clients received one model"
            )
        return tree_map(torch.sub, params, self.w_t) if params else {}

    def store(self, client: int, params: Params, buffers: Params) -> None:
        """Stores a client's result of training."""
        # Copies: rows of a stack may be overwritten, and matrix products round differently at their
        # addresses.
        self.trained[client] = tree_map(torch.clone, params), tree_map(torch.clone, buffers)


class Engine(Protocol):
    """Answers the Asks of an algorithm."""

    clients: Clients

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`, in that order.

        `round_` is 0 before the first round.
        """
        ...


def marked(loss: Tensor, memory: Tree) -> Tensor:
    """A client's loss, or NaN if its memory has a number that is not finite.

    So what stays on a client, such as its own model, stops a run as its loss does.
    """
    filled = [leaf for leaf in leaves(memory) if leaf.numel()]
    ends = [end for leaf in filled for end in (leaf.amin(), leaf.amax())]
    return loss + (0 * torch.stack(ends)).sum().to(loss.dtype) if ends else loss


def refuse_non_finite(reply: Reply, round_: int) -> None:
    """Raises NonFiniteError if a client's loss, its memory (see `marked`) or a number that it sends
    is NaN or infinite."""
    sent = (reply.deltas, reply.buffers, reply.upload)
    if math.isfinite(_summed(reply.loss, *sent)):
        return
    good = torch.isfinite(reply.loss)
    for tree in sent:
        if any(True for _ in leaves(tree)):
            good = good & torch.isfinite(row_norms(tree_map(_with_norms, tree)))
    bad = [client for client, fine in zip(reply.clients, good.tolist(), strict=True) if not fine]
    if bad:
        raise NonFiniteError(
            f"round {round_}, client {bad[0]}: loss, update or memory is not finite; "
            "lower lr or the method's coefficients"
        )


def _with_norms(leaf: Tensor) -> Tensor:
    """The leaf, or its numbers as float64 if they are integers, which have no norms."""
    counts = isinstance(leaf, Tensor) and not leaf.is_floating_point()
    return leaf.double() if counts else leaf


def _summed(loss: Tensor, *sent: Tree) -> float:
    """The norms of the losses and of all sent tensors, added up.

    Quick, and finite only if each client's norms are finite.
    """
    tensors = [
        leaf.norms if isinstance(leaf, Growing) else leaf for tree in sent for leaf in leaves(tree)
    ]
    return torch.stack(torch._foreach_norm([loss, *map(_with_norms, tensors)])).sum().item()
