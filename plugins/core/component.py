"""Component: one idea of one paper, both its halves, client and server, as pure hooks.

One round, with every hook in its place (`c` runs over the components of a recipe):

    before round 1   begin                                  server, may ask
    server           broadcast, address                     what goes down with the model
    client           optimizer, warm_start                  the local optimiser and where it starts
                     prepare                                once, on the received model
      each step        adjust_logits, penalty                 inside the loss
                       correct (DEBIAS)                       the gradient
                       optimiser
                       correct (SCALE)                        the optimiser's update
                     report                                 upload and next memory
                     observe                                what only a simulation records
    server           after_train                            may ask
                     weighting, weigh                       the clients' weights
                     average                                the direction, if not the weighted mean
                     step                                   what is added to the model, next state
                     measure                                what is recorded of the round
                     after_step                             may ask
    after the last   finish                                 server, may ask
    answer           on the client, for each further Ask that the component made

A component fills in only what its paper needs. State is passed in and returned, never kept on the object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plugins.core.errors import UserError
from plugins.core.optimizers import Optimizer
from plugins.core.reading import Noise, Reader
from plugins.core.task import Network, Output, Task, one_hot
from plugins.core.trees import Params, Tree, add, rows_at, tree_map


class RecipeError(UserError):
    """A recipe that can't be composed, with the reason."""


# What only one component of a recipe may own, and why.
CLAIMS = {
    "classifier": "one freezes it, the other trains it again",
    "client drift correction": "each corrects the local gradient for the same drift, which together is too much",
    "clients' average": "each puts its own average in place of the weighted mean",
    "clients' weights": "each gives every client a weight of its own",
    "distillation on the server": "each trains the server's model, and the later one would undo the earlier",
    "feature distribution regulariser": "each pulls the same features towards other clients' means",
    "logits of the local loss": "each changes the logits for the client's label counts",
    "neurons' learning rates": "each gives every neuron a rate of its own",
    "optimiser's memory": "one changes what the other relies on being empty at the start of a round",
    "proximal term": "two pulls towards the received model are one, with the sum of their coefficients",
    "refinement on public data": "each trains clients' models on the public split",
    "server step": "each says how far the server moves, by momentum or by an exact combination",
}

Options = Mapping[str, tuple[str, ...]]


class Stage(IntEnum):
    """Where a component acts when several act on one thing; within a stage the order can't matter."""

    DEBIAS = 0  # adds to the gradient or the direction
    SCALE = 1  # multiplies


class Setting(NamedTuple):
    """What a recipe is composed for; fields of a component with these names are filled in from here."""

    n_clients: int  # N, all clients
    cohort: int  # M, clients per round
    n_classes: int  # C
    feature_size: int  # d
    optimizer: str  # of local training: sgd, adam, rmsprop
    lr: float  # eta, of local training
    n_public: int  # samples of the public split, 0 if there is none
    tokens: bool = False  # whether samples are the numbers of tokens (text)


class Batch(NamedTuple):
    """One mini-batch of one client."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    mask: Tensor | None  # [B], None when nothing is padded
    live: Tensor | None  # 0-d bool; False: this client has fewer steps, discard this one
    key: Tensor | None = None  # 0-d, of this step, for `plugins.core.noise`; only in training


class Samples(NamedTuple):
    """A data set that sits on the device once."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n]
    noise: Noise | None = None  # what their clients see of `x` has this added, whenever they look


@dataclass(frozen=True)
class Plan:
    """Batches as indices into samples: ragged (`sizes`, one flat index) or padded (`mask`, `live`).

    Those of training may be several clients' at once: batches then have an axis [M] in front, [S, M, B] here.
    """

    samples: Samples
    index: Tensor  # [sum of sizes], or [S, B] when padded
    sizes: tuple[int, ...] | None = None
    mask: Tensor | None = None  # [S, B]
    live: Tensor | None = None  # [S] bool
    last: Tensor | None = None  # [S], 1 for the steps of the last epoch; None unless `passes` has "last epoch"
    read: Reader | None = None  # None: the samples are read as they are

    def class_counts(self, n_classes: int) -> Tensor:
        """n_c, how many samples of each class the batches hold, [C] float64; reads labels only."""
        member = one_hot(self.samples.y[self.index], n_classes, torch.float64)
        if self.mask is not None:
            member = member * self.mask.unsqueeze(-1)
        return member.reshape(-1, n_classes).sum(0)

    def __len__(self) -> int:
        return len(self.sizes) if self.sizes is not None else self.index.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, in_place: bool = False) -> Iterator[Batch]:
        """The batches in their order. `in_place`: the samples of one may take the place of those of the last."""
        x, y, _ = self.samples
        if self.sizes is not None:
            room = x.new_empty(max(self.sizes, default=0), *x.shape[1:]) if in_place else None
            for s, index in enumerate(torch.split(self.index, list(self.sizes))):
                yield Batch(self._seen(index, s, room), rows_at(y, index), None, None)
            return
        room = x.new_empty(math.prod(self.index.shape[1:]), *x.shape[1:]) if in_place else None
        ys = rows_at(y, self.index)
        for s, index in enumerate(self.index):
            mask = None if self.mask is None else self.mask[s]
            yield Batch(self._seen(index, s, room), ys[s], mask, None if self.live is None else self.live[s])

    def _seen(self, index: Tensor, step: int, room: Tensor | None) -> Tensor:
        """The samples of a batch, [B, ...]."""
        x, _, noise = self.samples
        return rows_at(x, index, room) if self.read is None else self.read(x, noise, index, step)

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
    key: Tensor  # 0-d, of this client, round and job, for `plugins.core.noise`


class View(NamedTuple):
    """What a component sees on a client: its own slices, and the model that was received."""

    start: Params  # w_t
    buffers: Params  # that came with it
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
    optimizer: Tree  # its state after the last step
    features: Tensor | None  # [d], running mean over the last epoch; None unless `passes` has "last epoch"


ValueAndGrad = Callable[[Callable[[Params], tuple[Tensor, Tree]], Params], tuple[Params, Tree]]


class Work(NamedTuple):
    """What a client has in its hands when it answers a further Ask."""

    task: Task
    params: Params  # sent with the Ask, or else its own result of this round's training
    buffers: Params
    view: View
    data: Data
    grad: ValueAndGrad
    observing: bool  # whether `metrics` of the answer are recorded


class Answer(NamedTuple):
    """A client's answer to an Ask; empty trees where nothing is sent."""

    params: Params
    buffers: Params
    upload: Tree
    memory: Tree
    metrics: Tree  # for the record of a simulation; never sent


class Ask(NamedTuple):
    """A request of the server to some clients."""

    job: str  # "train", or "<component>.<what>"
    to: tuple[int, ...]  # ascending client ids
    params: Params  # empty: the clients use what they trained in this round
    buffers: Params
    shared: Tree  # by component
    each: Tree  # by component, leaves [len(to), ...]


class Reply(NamedTuple):
    """The answers to one Ask, stacked in ascending client order; leaves are [M, ...].

    In a deployment a defence may drop answers. Then `clients` lack some that were asked: go by them, not by `Ask.to`. A
    client whose answer was dropped keeps the memory that it had before this Ask.
    """

    clients: tuple[int, ...]
    params: Params  # empty unless the job returns a model
    buffers: Params
    upload: Tree  # by component
    n: Tensor  # [M], n_k
    steps: Tensor  # [M]
    loss: Tensor  # [M], mean loss over the local steps
    metrics: Tree  # by component, what `observe` returned; empty in a deployment and where nothing is recorded


class Update(NamedTuple):
    """What the server's step sees of a round."""

    replies: Reply
    deltas: Params  # w_k - w_t, [M, ...]
    weights: Tensor  # [M], float64, sum to one
    trained: Params  # w_k - w_t as local training left them, before a refinement (FNR-FL) replaced them
    buffer_deltas: Params  # the clients' buffers less those that were sent, [M, ...]


class Desk(NamedTuple):
    """What the server has at hand to work with."""

    task: Task
    public: Samples | None  # the public split
    key: Tensor  # 0-d, of this round, for `plugins.core.noise`
    input_shape: tuple[int, ...]  # of one sample


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


class Round(NamedTuple):
    """What a round leaves."""

    server: Server
    evaluated: Params  # the same object as the server's parameters unless a method says otherwise
    measured: Tree  # by component, what `measure` returned
    trained: Params  # w_k - w_t of local training, [M, ...]


@dataclass(frozen=True)
class Component:
    """FedAvg's behaviour at every hook; a method overrides what its paper changes."""

    name: ClassVar[str]
    stage: ClassVar[Stage] = Stage.DEBIAS
    options: ClassVar[Options] = {}  # the words that a hyper-parameter of words may be, the default first
    # What it sees of the public split: "labelled" or "unlabelled" samples; "" if it needs none.
    public: ClassVar[str] = ""
    pools: ClassVar[bool] = False  # one client has the data of all
    # Whether a hook from `average` on reads the clients' models: else `update.replies.params` are gone by then.
    reads_models: ClassVar[bool] = False

    @property
    def broadcasts(self) -> bool:
        """Whether `correct` works as it stands with leaves [M, ...] of several clients, beside those that are the same
        for all. Without vmap it costs its arithmetic alone.
        """
        return False

    @property
    def passes(self) -> frozenset[str]:
        """What it reads beside the batches: "own", "public": a pass over these data; "last epoch": `Trace.features`."""
        return frozenset()

    @property
    def claims(self) -> frozenset[str]:
        """What only one component of a recipe may own: keys of CLAIMS."""
        return frozenset()

    @property
    def weighting(self) -> str:
        """Of the clients: "size", n_k / sum n, or "uniform", 1 / M."""
        return "size"

    @property
    def evaluates_average(self) -> bool:
        """Whether the evaluated model is the plain average of this round's clients rather than the sent model."""
        return False

    @property
    def leak(self) -> str:
        """What of the test set the method sees, in words; "" if nothing. Such a recipe only reproduces a paper: the
        test set is handed to it as its public split.
        """
        return ""

    @property
    def simulation_only(self) -> str:
        """Why the method may not be deployed on real silos, in words; "" if it may."""
        return self.leak

    def check(self, setting: Setting) -> None:
        """Raises RecipeError if the method can't run in this setting or with these hyper-parameters."""

    def fixed(self, network: Network) -> frozenset[str]:
        """Names of parameters that stay at their initial values: nobody trains, sends or averages them.

        Those that the network itself keeps (`Network.frozen`) are added.
        """
        return frozenset()

    def shared(self, n_public: int) -> int:
        """How many samples of the public split every client has beside its own, and trains on: the first ones."""
        return 0

    def exchanges(self, cohort: int) -> Exchanges:
        """How often the component asks beside the training of every round."""
        return Exchanges()

    def public_steps(self, job: str) -> Steps | None:
        """The training on the public split that belongs to `job`; None if there is none."""
        return None

    # client -------------------------------------------------------------------------------------------------------

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        """The memory of a client that has not taken part yet, from w_0."""
        return {}

    def optimizer(self, given: Optimizer) -> Optimizer:
        """The optimiser of local training, where the method brings its own."""
        return given

    def warm_start(self, state: Tree, view: View) -> Tree:
        """The optimiser's state before the first step, where it does not begin empty."""
        return state

    def prepare(self, task: Task, view: View, data: Data) -> Tree:
        """Computed once per round, before the first step, on the received model."""
        return {}

    def adjust_logits(self, logits: Tensor, task: Task, params: Params, view: View) -> Tensor:
        """Logits [B, C] as the loss sees them."""
        return logits

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor | None:
        """A term of the loss, 0-d; None for no term."""
        return None

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """The gradient at `params` (stage DEBIAS), or the optimiser's update (stage SCALE).

        Stage SCALE multiplies by what does not depend on the update, as it may be given a multiple of it. Leaves are
        new, or those of `tree`: they are overwritten.
        """
        return tree

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """(upload, next memory) after local training."""
        return {}, view.memory

    def observe(self, task: Task, trace: Trace, view: View, data: Data) -> Tree:
        """Quantities of the paper that only the client knows: recorded in a simulation if asked for, never sent."""
        return {}

    def answer(self, job: str, work: Work) -> Answer:
        """The client's side of a further Ask of this component."""
        raise NotImplementedError(f"{self.name} asks {job!r} but does not answer it")

    # server; a `yield` behind a `return` makes a generator that asks nothing ---------------------------------------

    def init_server(self, params: Params, desk: Desk) -> Tree:
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

    def average(self, update: Update) -> Params | None:
        """The direction in place of sum_k weights_k (w_k - w_t); None to keep that."""
        return None

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """(what is added to the model, next state); `direction` begins as the average."""
        return direction, state

    def measure(self, state: Tree, update: Update) -> Tree:
        """Quantities of the paper that the server knows: 0-d leaves become columns of rounds.csv, others are kept
        as they are. `state` is that after the step."""
        return {}

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """After the model was updated; returns the server. The cohort is `update.replies.clients`."""
        return server
        yield

    def finish(self, server: Server, clients: tuple[int, ...], desk: Desk) -> Asks:
        """After the last round; returns the server. Its model is the evaluated one, which it may replace."""
        return server
        yield
