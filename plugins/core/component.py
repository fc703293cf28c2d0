"""Component: one idea of one paper, both its halves, client and server, as pure hooks.

One round, with every hook in its place (`c` runs over the components of a recipe):

    before round 1   begin                                  server, may ask
    server           broadcast, address                     what goes down with the model
    client           prepare                                once, on the received model
      each step        adjust_logits, penalty                 inside the loss
                       correct (DEBIAS)                       the gradient
                       optimiser
                       correct (SCALE, FREEZE)                the optimiser's update
                     report                                 upload and next memory
    server           after_train                            may ask
                     weighting, weigh                       the clients' weights
                     step                                   the direction, next state
                     after_step                             may ask
    after the last   finish                                 server, may ask
    answer           on the client, for each further Ask that the component made

A component fills in only what its paper needs. State is passed in and returned, never kept on the object.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plugins.core.errors import UserError
from plugins.core.task import Output, Task
from plugins.core.trees import Params, Tree, add, tree_map


class RecipeError(UserError):
    """A recipe that can't be composed, with the reason."""


class Stage(IntEnum):
    """Where a component acts when several act on one thing; within a stage the order can't matter."""

    DEBIAS = 0  # adds to the gradient or the direction
    SCALE = 1  # multiplies
    FREEZE = 2  # masks


class Setting(NamedTuple):
    """What a recipe is composed for; fields of a component with these names are filled in from here."""

    n_clients: int  # N, all clients
    cohort: int  # M, clients per round
    n_classes: int  # C
    feature_size: int  # d
    optimizer: str  # of local training: sgd, adam, rmsprop
    n_public: int  # samples of the public split, 0 if there is none


class Batch(NamedTuple):
    """One mini-batch of one client."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    mask: Tensor | None  # [B], None when nothing is padded
    live: Tensor | None  # 0-d bool; False: this client has fewer steps, discard this one


class Samples(NamedTuple):
    """A data set that sits on the device once."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n]


@dataclass(frozen=True)
class Plan:
    """Batches as indices into samples: ragged (`sizes`, one flat index) or padded (`mask`, `live`)."""

    samples: Samples
    index: Tensor  # [sum of sizes], or [S, B] when padded
    sizes: tuple[int, ...] | None = None
    mask: Tensor | None = None  # [S, B]
    live: Tensor | None = None  # [S] bool

    def __iter__(self) -> Iterator[Batch]:
        x, y = self.samples
        if self.sizes is not None:
            for index in torch.split(self.index, list(self.sizes)):
                yield Batch(x[index], y[index], None, None)
            return
        for s in range(self.index.shape[0]):
            index = self.index[s]
            mask = None if self.mask is None else self.mask[s]
            yield Batch(x[index], y[index], mask, None if self.live is None else self.live[s])

    def mean(self, fn: Callable[[Batch], Tree]) -> Tree:
        """Mean over all samples of a tree of per-batch *sums*: (sum over batches of fn) / (number of samples)."""
        total: Tree | None = None
        count: float | Tensor = 0
        for batch in self:
            part = fn(batch)
            total = part if total is None else add(total, part)
            count = count + (batch.y.shape[0] if batch.mask is None else batch.mask.sum())
        if total is None:
            raise UserError("a client without samples has no mean; every client needs at least one sample")
        return tree_map(lambda leaf: leaf / count, total)


class Data(NamedTuple):
    """What one client can read in one job."""

    steps: Plan  # the batches of this job's training, epochs after each other
    own: Plan | None  # one pass over its whole local set; None unless a component's `passes` has "own"
    public: Plan | None  # one pass over the public split; likewise "public"


class View(NamedTuple):
    """What a component sees on a client: its own slices, and the model that was received."""

    start: Params  # w_t
    shared: Tree  # the same for every client
    each: Tree  # this client's own row
    memory: Tree  # as returned in its last participation
    prepared: Tree  # what `prepare` returned in this round


class Trace(NamedTuple):
    """What local training left behind."""

    start: Params  # w_t
    end: Params  # w_k
    buffers: Params
    steps: Tensor  # 0-d, steps really taken
    loss: Tensor  # 0-d, mean over the steps


ValueAndGrad = Callable[[Callable[[Params], tuple[Tensor, Tree]], Params], tuple[Params, Tree]]


class Work(NamedTuple):
    """What a client has in its hands when it answers a further Ask."""

    task: Task
    params: Params  # sent with the Ask, or else its own result of this round's training
    buffers: Params
    view: View
    data: Data
    grad: ValueAndGrad


class Answer(NamedTuple):
    """A client's answer to a further Ask; empty trees where nothing is sent."""

    params: Params
    buffers: Params
    upload: Tree
    memory: Tree


class Ask(NamedTuple):
    """A request of the server to some clients."""

    job: str  # "train", or "<component>.<what>"
    to: tuple[int, ...]  # ascending client ids
    params: Params  # empty: the clients use what they trained in this round
    buffers: Params
    shared: Tree  # by component
    each: Tree  # by component, leaves [len(to), ...]


class Reply(NamedTuple):
    """The answers to one Ask, stacked in ascending client order; leaves are [M, ...]."""

    clients: tuple[int, ...]
    params: Params  # empty unless the job returns a model
    buffers: Params
    upload: Tree  # by component
    n: Tensor  # [M], n_k
    steps: Tensor  # [M]
    loss: Tensor  # [M], mean loss over the local steps


class Update(NamedTuple):
    """What the server's step sees of a round."""

    replies: Reply
    deltas: Params  # w_k - w_t, [M, ...]
    weights: Tensor  # [M], float64, sum to one


class Server(NamedTuple):
    """The server between rounds."""

    params: Params  # the model that is sent
    buffers: Params
    state: Tree  # by component


Asks = Generator[Ask, Reply, Any]  # what a server hook may yield, and gets back


class Exchanges(NamedTuple):
    """Asks beside the one that every round has."""

    begin: int = 0
    round: int = 0
    finish: int = 0


class Steps(NamedTuple):
    """The local training that a further job brings along."""

    epochs: int
    batch_size: int


@dataclass(frozen=True)
class Component:
    """FedAvg's behaviour at every hook; a method overrides what its paper changes."""

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.DEBIAS
    claims: ClassVar[frozenset[str]] = frozenset()  # what only one component of a recipe may own
    passes: ClassVar[frozenset[str]] = frozenset()  # "own", "public": extra passes over data that it makes
    weighting: ClassVar[str] = "size"  # "size": n_k / sum n; "uniform": 1 / M
    evaluates_average: ClassVar[bool] = False  # the evaluated model is the plain average, not the sent one

    def check(self, setting: Setting) -> None:
        """Raises RecipeError if the method can't run in this setting or with these hyper-parameters."""

    def exchanges(self, cohort: int) -> Exchanges:
        """How often the component asks beside the training of every round."""
        return Exchanges()

    def public_steps(self, job: str) -> Steps | None:
        """The training on the public split that belongs to `job`; None if there is none."""
        return None

    # client -------------------------------------------------------------------------------------------------------

    def init_client(self, params: Params) -> Tree:
        """The memory of a client that has not taken part yet."""
        return {}

    def prepare(self, task: Task, buffers: Params, view: View, data: Data) -> Tree:
        """Computed once per round, before the first step, on the received model."""
        return {}

    def adjust_logits(self, logits: Tensor, view: View) -> Tensor:
        """Logits [B, C] as the loss sees them."""
        return logits

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor | None:
        """A term of the loss, 0-d; None for no term."""
        return None

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """The gradient at `params` (stage DEBIAS), or the optimiser's update (stages SCALE and FREEZE)."""
        return tree

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """(upload, next memory) after local training."""
        return {}, view.memory

    def answer(self, job: str, work: Work) -> Answer:
        """The client's side of a further Ask of this component."""
        raise NotImplementedError(f"{self.name} asks {job!r} but does not answer it")

    # server; a `yield` behind a `return` makes a generator that asks nothing ---------------------------------------

    def init_server(self, params: Params) -> Tree:
        """The server's state before the first round."""
        return {}

    def broadcast(self, state: Tree) -> Tree:
        """What goes to every client with the model."""
        return {}

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        """What goes to each client on its own, leaves [M, ...]."""
        return {}

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """Before the first round; returns the server."""
        return server
        yield

    def after_train(self, server: Server, replies: Reply) -> Asks:
        """After local training; returns the replies as the other components and the average are to see them."""
        return replies
        yield

    def weigh(self, weights: Tensor, replies: Reply) -> Tensor:
        """The clients' weights [M], which sum to one, given those of earlier stages."""
        return weights

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """(what is added to the model, next state); `direction` begins as sum_k weights_k (w_k - w_t)."""
        return direction, state

    def after_step(self, server: Server, cohort: tuple[int, ...]) -> Asks:
        """After the model was updated; returns the server."""
        return server
        yield

    def finish(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """After the last round; returns the server."""
        return server
        yield
