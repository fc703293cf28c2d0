"""The clients of a simulation, or the one client of a silo: their data, their memory, and what they hold in a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import TRAIN, Algorithm
from fedml_noniid.plugins.core.component import Ask, Client, Reply
from fedml_noniid.plugins.core.contract import call
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import NonFiniteError, UserError
from fedml_noniid.plugins.core.optimizers import SGD, Adam, Optimizer, RMSProp
from fedml_noniid.plugins.core.randomness import fold, step_key
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.core.trees import Params, Tree, leaves, row_norms, tree_map
from fedml_noniid.plugins.data.batches import Order, epochs, in_order
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.drift import Held
from fedml_noniid.plugins.data.reading import PAD, Read
from fedml_noniid.plugins.data.streams import Streams, key
from fedml_noniid.plugins.data.types import Ints
from fedml_noniid.plugins.engines.captured import tape_for
from fedml_noniid.plugins.engines.cores import all_cores
from fedml_noniid.plugins.engines.own import OWN
from fedml_noniid.plugins.models.forward import PRECISIONS, Model

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "rmsprop": RMSProp}
PASS_BATCH = 500  # samples per batch of a pass without training


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round."""

    optimizer: str  # sgd, adam, rmsprop
    lr: float
    epochs: int
    batch_size: int
    momentum: float | None = None  # None: the optimiser's own default
    weight_decay: float = 0.0
    steps: int = 0  # above 0: this many steps in place of `epochs`
    drop_last: bool = False  # whether the last, short batch of an epoch is left out
    augment: bool = False  # whether images are cropped and flipped at random
    precision: str = "float32"  # one of fedml_noniid.plugins.models.forward.PRECISIONS
    cuda_graphs: bool = False  # whether steps are recorded and replayed, see `plugins.engines.captured`

    def build(self) -> Optimizer:
        """The pure optimiser."""
        kind = OPTIMIZERS[known("optimizer", self.optimizer, OPTIMIZERS)]
        own = {} if self.momentum is None else {"momentum": self.momentum}
        return kind(self.lr, weight_decay=self.weight_decay, **own)

    def check(self, shape: tuple[int, ...], device: torch.device) -> None:
        """UserError if these settings can't train on samples of this shape on this device."""
        known("precision", self.precision, PRECISIONS)
        if self.precision == "tf32" and device.type != "cuda":
            raise UserError(
                f"precision = tf32 is for NVIDIA's matrix units, the device is {device.type}; allowed: float32, bf16"
            )
        if self.cuda_graphs and device.type != "cuda":
            raise UserError(f"cuda_graphs = true needs device cuda, the device is {device.type}; allowed: false")
        if self.augment and not (len(shape) == 3 and min(shape[1:]) > PAD):
            raise UserError(
                f"augment = true is refused for samples of shape {list(shape)}; allowed: false, or images [channels, "
                f"height, width] of at least {PAD + 1} x {PAD + 1} pixels"
            )


class Clients:
    """Data, memory and round-long results of some clients, by client id."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        local: LocalTraining,
        seed: int,
        train: Samples,
        indices: Mapping[int, Ints],
        public: Samples | None,
        params: Params,
        buffers: Params,
        observing: bool = False,
        drift: Held | None = None,
        tests: Mapping[int, Samples] | None = None,
    ) -> None:
        """`indices`: positions in `train` by client id; `params`, `buffers`: w_0, from which memories are initialised.

        `observing`: whether replies have metrics. `drift`: how the labels of `train` change with the round. `tests`:
        each client's own test samples, as it sees them before any drift; they count where it keeps a part of the model.
        """
        self.algorithm, self.task, self.local, self.seed = algorithm, task, local, seed
        self.needs = algorithm.needs
        self.observing = observing
        self.public, self.drift = public, drift
        self.tests = {client: samples for client, samples in (tests or {}).items() if len(samples.y)}
        self.read(train)
        self.indices = dict(sorted(indices.items()))
        for client, positions in self.indices.items():
            if len(positions) == 0:
                raise UserError(f"client {client} has no samples; every client needs at least one")
        local.check(tuple(train.x.shape[1:]), train.x.device)
        self.tape = tape_for(cast("Model", task.network)) if local.cuda_graphs else None
        self.row = {client: row for row, client in enumerate(self.indices)}
        n = len(self.indices)
        # [N, ...], storage of the engines: its rows are replaced in place, everything else here is pure.
        unmet = Client(task, params, buffers, 0)
        first = {c.name: call(c, "init_client", unmet) for c in algorithm.components}
        first |= {OWN: task.own} if task.own else {}
        self.memory: Tree = tree_map(lambda leaf: leaf.expand(n, *leaf.shape).clone(), first)
        self.held: dict[int, tuple[Params, Params]] = {}
        self.start: Params = {}  # w_t of the round in which they were trained
        read = train.noise is not None or local.augment
        self._draws = bool(algorithm.components) or cast("Model", task.network).draws or read
        self._drawing: tuple[str, int, Streams] | None = None  # the last ones

    @property
    def device(self) -> torch.device:
        return self.train.x.device

    def read(self, train: Samples) -> None:
        """Takes these samples, as they are before any drift."""
        self.train, self._labels = train, train.y
        if self.drift is not None:
            self.train = train._replace(y=train.y.clone())

    def enter(self, round_: int) -> None:
        """Gives the samples the labels of a round, in place: recorded steps go on reading there."""
        if self.drift is not None:
            self.train.y.copy_(self.drift.labels(self._labels, round_))

    def steps(self, client: int, round_: int) -> Order:
        """The batches of a client's local training."""
        return self.orders((client,), round_)[0]

    def orders(self, clients: Iterable[int], round_: int) -> list[Order]:
        """The batches of some clients' local training."""
        streams, indices, local = self._streams("batches", round_), self.indices, self.local
        passes, size, steps, drop_last = local.epochs, local.batch_size, local.steps, local.drop_last
        return [epochs(indices[client], passes, size, streams(client), steps, drop_last) for client in clients]

    def _streams(self, name: str, round_: int) -> Streams:
        """The clients' streams of a round."""
        if self._drawing is None or self._drawing[:2] != (name, round_):
            self._drawing = name, round_, Streams(self.seed, name, round_)
        return self._drawing[2]

    def keys(self, ask: Ask, round_: int) -> Tensor:
        """The keys of the clients' random numbers in a job, [M], on the host.

        NaN, which can't be folded, where no client draws.
        """
        if not self._draws:
            return torch.full((len(ask.to),), math.nan)
        shared = torch.tensor(key(self.seed, f"noise/{ask.job}", round_))
        return fold(shared, numbers(ask.to, shared.device))

    def drawn(self, ask: Ask, keys: Tensor, orders: Sequence[Order]) -> Iterator[Params]:
        """What the network draws in each step of training; `keys`: of a client, or of each [M]; `orders`: of the same.

        Keys are folded on the host: on a GPU, each of these small operations would be a kernel.
        """
        network = cast("Model", self.task.network)
        if not network.draws:
            return repeat({})
        at = step_key(keys.unsqueeze(-1), torch.arange(max(len(order.sizes) for order in orders)))
        largest = max((size for order in orders for size in order.sizes), default=0)
        return network.draws_ahead(*self.task.model(ask.params, ask.buffers), self.train.x[:1], at, largest)

    def reads(self, key: Tensor) -> tuple[Read | None, Read | None]:
        """How a client reads the batches of training, and a pass over its own samples; `key` is the client's.

        Noise is added at every read. Only samples of training steps are cropped and flipped. None: as they are.
        """
        noisy, augment = self.train.noise is not None, self.local.augment
        if not (noisy or augment):
            return None, None
        at = fold(key, "read")
        return Read(fold(at, "steps"), augment), Read(fold(at, "own")) if noisy else None

    def own_pass(self, client: int) -> Order:
        """One pass over all of a client's samples."""
        return in_order(self.indices[client], PASS_BATCH)

    def public_pass(self) -> Order:
        """One pass over the public split."""
        assert self.public is not None
        return in_order(np.arange(len(self.public.y)), PASS_BATCH)

    def holds(self, ask: Ask) -> bool:
        """Whether results of training are kept for further Asks of the same round."""
        return ask.job == TRAIN and self.algorithm.exchanges.round > 1

    def hold(self, client: int, params: Params, buffers: Params) -> None:
        """Keeps a client's result of training."""
        # Copies: rows of a stack may be overwritten, and matrix products round differently at their addresses.
        self.held[client] = tree_map(torch.clone, params), tree_map(torch.clone, buffers)


class Engine(Protocol):
    """Answers the Asks of an algorithm."""

    clients: Clients

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`, in that order. `round_` is 0 before the first round."""
        ...


def refuse_non_finite(reply: Reply, round_: int) -> None:
    """Raises NonFiniteError if a client's loss or update is NaN or infinite."""
    if math.isfinite(_squares(reply)):
        return
    good = torch.isfinite(reply.loss)
    for sent in (reply.deltas, reply.upload):
        if any(True for _ in leaves(sent)):
            good = good & torch.isfinite(row_norms(sent))
    bad = [client for client, fine in zip(reply.clients, good.tolist(), strict=True) if not fine]
    if bad:
        raise NonFiniteError(
            f"round {round_}, client {bad[0]}: loss or update is not finite; "
            "lower train.lr or the method's coefficients"
        )


def _squares(reply: Reply) -> float:
    """The losses and the squares of all sent numbers, added up. Quick, and finite only if each norm is finite."""
    total = reply.loss.sum()
    for leaf in (*leaves(reply.deltas), *leaves(reply.upload)):
        flat = leaf.reshape(-1)
        with all_cores(flat):
            total = total + flat.dot(flat)
    return total.item()


def numbers(values: Iterable[int], device: torch.device) -> Tensor:
    """int64, as `torch.tensor` in a fifth of the time: it reads the values one by one."""
    return to_device(np.fromiter(values, np.int64), device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An index array as a tensor on the device; a copy to a GPU does not block."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
