"""Defines Component: one idea of one paper, on client and server, as pure hooks.

One round. Every hook stands where it acts. The list is the order; there is no other.

    server   choose *               which clients take part, if not those that were drawn
             assign *               which of several models each client receives, if not w_t
             broadcast, message     what goes down with the model: to all, to each
    client   optimizer              the local optimiser
             prepare                once, on the received model
             warm_start             what local training starts from
               each step: gradient_point         where the gradient is taken, if not at w
                         logits, penalty        inside the loss
                         sample_gradients       the gradient of the batch, if not the mean
                          gradient_term          added to the gradient
                          update_factor          multiplies the optimiser's update
                         own_model              the client's own model, which trains beside w
             report                 what goes up, what the client keeps
             leaving                the update as it leaves, if not w_k - w_t; `packing` packs it
    server   refine *               may ask again, and replace the clients' updates
             weigh                  multiplies the clients' weights
             average                the aggregated update and buffers, if not the weighted mean
             step                   the new model and the server's next state
             learn                  the server trains the new model
             survey *               may ask about the new model; before round 1, about w_0, and
                                    then replace it
    last     finish *               may ask about the evaluated model, and replace it

`*`: a generator that yields Asks. The client's side of an Ask is `answer`. A recipe is a set: at
one place of the list every component sees the same server, terms are summed, factors are
multiplied, and everything else has one owner, which
declares it in `exclusive`. So no component acts before another. A hook that a
component does not override costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fedml_noniid.core.data import Batch, Pass, Samples
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.options import Range, RecipeError
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.randomness import Noised, fold, noised
from fedml_noniid.core.task import Output, Task
from fedml_noniid.core.trees import Params, Tree, add, row

Weights = Literal["size", "uniform"]  # n_k / sum n, or 1 / M
Asks = Generator[
    "Ask", "Reply", Any
]  # what a server hook may yield and gets back; returns a Change, `refine` a Reply


class Exclusive(Enum):
    """Names what only one component of a recipe may own, and why."""

    AVERAGE = "clients' average", "each puts its own average in place of the weighted mean"
    CLASSIFIER = "classifier", "each fixes it, or computes it outside of local training"
    CLIENT_WEIGHTS = "clients' weights", "each gives every client a weight of its own"
    COHORT = "cohort", "each chooses the clients of a round"
    DRIFT = (
        "client drift correction",
        "each corrects the local gradient for the same drift, which together is too much",
    )
    GRADIENT_POINT = "point of the gradient", "each takes the gradient at a point of its own"
    FEATURE_MEANS = (
        "feature distribution regulariser",
        "each pulls the same features towards other clients' means",
    )
    LOGITS = "logits of the local loss", "each changes the logits for the client's label counts"
    OWN_MODEL = (
        "clients' own models",
        "each gives every client a model of its own, and a client is tested with one",
    )
    NEURON_RATES = (
        "neurons' learning rates",
        "each multiplies the local steps by factors that the other does not know of",
    )
    OPTIMIZER = "local optimiser", "each brings its own"
    OPTIMIZER_MEMORY = (
        "optimiser's memory",
        "one fills what the other relies on being empty when a round starts",
    )
    PROXIMAL = (
        "proximal term",
        "two pulls towards the received model are one, with the sum of their coefficients",
    )
    SAMPLE_GRADIENTS = (
        "gradient of each sample",
        "one takes every sample's gradient by itself, the other needs a batch together",
    )
    RECEIVED = (
        "model that a client receives",
        "each sends clients models of its own in place of w_t",
    )
    UPDATE = "update that leaves a client", "each sends its own in place of w_k - w_t"
    REFINEMENT = "refinement on public data", "each trains clients' models on the public split"
    START = (
        "start of local training",
        "each starts local training from parameters of its own",
    )
    SERVER_LEARNING = (
        "training on the server",
        "each trains the server's model, the later undoes the earlier",
    )
    SERVER_STEP = (
        "server step",
        "each says how far the server moves, by momentum or by an exact combination",
    )


class Public(IntEnum):
    """Says which part of the public split a method sees."""

    NOTHING = 0
    RECORDED = 1  # with labels, if there is one, and only for what is recorded
    UNLABELLED = 2
    LABELLED = 3
    TEST_SET = 4  # a leak: the test set is handed to the recipe as its public split


class Replies(IntEnum):
    """Says what a method reads of the clients' answers. It sees no more."""

    # `core.sums` of all clients, by `server.omega`. Without weights: uploads of a method
    # that says so, answers to exchanges of its own, and all where its weights are uniform.
    SUMS = 0
    SCALARS = 1  # sums by any weights; each client's upload too, such as a loss or class counts
    MODELS = 2  # each client's model


@dataclass(frozen=True)
class Needs:
    """Declares the data that a method takes beside the batches of training."""

    local_set: bool = False  # `client.local_set`, a pass over the whole local set
    public: Public = Public.NOTHING  # `client.public`, `server.public`
    pooled: bool = False  # one client has the data of all
    shared: float = 0.0  # fraction of the public split that every client trains on
    fixed_classifier: bool = False  # nobody trains, sends or averages the classifier
    fixed_body: bool = False  # likewise, all layers before the classifier
    no_training: bool = False  # clients take no local step
    # Parts of the model that each client keeps to itself: "norms" (batch norms with their running
    # statistics), "head" (the classifier), "body" (all before it), or a pattern of names.
    personal: frozenset[str] = frozenset()
    # Passes over the local data that train the personal parts alone; then the other parts train
    # alone, in the last step at least. 0: all train together.
    personal_first: int = 0
    whole_models: bool = False  # whole models outside of the clients' local training
    gradient: bool = False  # `g` of `gradient_point`: one more gradient in every step
    loss: bool = False  # `trace.loss` of local training
    features: bool = False  # the input of the classifier
    classifier: bool = False  # the classifier's parameters, by themselves or on the server
    activations: bool = False  # `task.activations`
    steps: bool = False  # w_k - w_t as the sum of a client's local steps
    stale: bool = False  # `server.staleness`: it takes answers of models of earlier rounds
    classes: bool = False  # targets that are classes, such as label counts or soft labels
    replies: Replies = Replies.SUMS  # of `server.replies` and `server.trained`
    unweighted: bool = False  # uploads are added up without weights, and not by `server.omega`


# In what `warm_start` returns: the parameters from which local training starts.
START = "params"

# Names in the state of a component that owns RECEIVED: K models, {"params", "buffers"} with leaves
# [K, ...], and the number of the one that each client has, int64 [N]. Among the names of components
# in an Ask, MODELS are those models, and each client's number.
MODELS, MODEL_OF = "models", "model_of"

# Parts of a model that a client may keep to itself.
NORMS, HEAD, BODY = "norms", "head", "body"

# Names in the memory of a component with an `own_model`: the parameters that train for it, and the
# buffers of its passes. Without the first nothing trains; without the second w's buffers are read.
V, V_BUFFERS = "v", "v_buffers"


class Exchanges(NamedTuple):
    """Counts the Asks beside the training of every round."""

    begin: int = 0
    round: int = 0
    finish: int = 0


class Setting(NamedTuple):
    """Describes what a recipe is composed for."""

    n_clients: int  # N, all clients
    cohort: int  # M, clients per round
    optimizer: str = "sgd"  # of local training: sgd, adam, rmsprop
    lr: float = 0.1  # eta, of local training
    n_public: int = 0  # samples of the public split, 0 if there is none
    tokens: bool = False  # whether samples are the numbers of tokens (text)
    deployed: bool = False  # on real silos, not in a simulation
    features: bool = True  # whether the network has a linear classifier, with features before it
    activations: bool = True  # whether the network tells the activations of its layers
    classes: bool = True  # whether a target is one class, as with cross-entropy
    norms: bool = False  # whether the network has batch norms
    # why gradients of single samples can't be taken; "" if they can
    no_sample_gradients: str = ""
    momentum: float | None = None  # of local training; None: the optimiser's own default


class Mechanism(NamedTuple):
    """Describes the Gaussian noise of a method: what a differential privacy accountant needs."""

    unit: Literal["sample", "client"]  # whose presence it hides
    noise: float  # standard deviation, as a multiple of the most that one unit adds to a sum
    delta: float  # for which epsilon is told


def absent(why: str) -> Any:
    """A placeholder for a missing value; it raises an error with the reason when a hook reads
    it."""

    class Absent:
        def __getattr__(self, *_: object) -> Any:
            raise RecipeError(why)

        __iter__ = __getitem__ = __len__ = __getattr__

    return Absent()


@dataclass(frozen=True)
class Client:
    """Holds all that a client's hook may read."""

    task: Task
    # w_t, or the one of several models that a client has in its place; in `answer` the model of the
    # Ask, or the client's own result if the Ask has none
    params: Params
    buffers: Params
    round: int  # 0 before the first
    local_set: Pass = absent(
        "client.local_set is there for methods that declare Needs(local_set=True)"
    )
    public: Pass = absent(
        "client.public is there for methods that declare Needs(public=...), if there is a split"
    )
    shared: Tree = field(default_factory=dict)  # from `broadcast`
    each: Tree = field(default_factory=dict)  # this client's row of `message`
    memory: Tree = field(default_factory=dict)  # as the client left it when it last took part
    prepared: Tree = field(default_factory=dict)  # from `prepare`
    job: str = "train"  # or that of the Ask
    observing: bool = False  # whether `Answer.metrics` are recorded
    keys: Tensor = absent(
        "client.key is there in training and in `answer`"
    )  # of this client, round and job
    scope: int = 0  # the component's number among these keys
    # Noise for privacy, as `randomness.noised`. A silo draws it with a secret of its own.
    noised: Noised = noised

    @property
    def key(self) -> Tensor:
        """For `core.randomness`, 0-d: of this component, client, round and job."""
        return fold(self.keys, self.scope)


class Trace(NamedTuple):
    """Holds the result of local training."""

    params: Params  # w_k
    buffers: Params
    steps: Tensor  # 0-d, steps taken
    loss: Tensor  # 0-d, mean over the steps, for methods that declare `Needs(loss=True)`
    optimizer: Tree  # its state after the last step
    planned: int  # the most steps that a client of this batch of clients takes


class Answer(NamedTuple):
    """Holds what a client's hook returns.

    Only what it mentions is sent; memory that it does not mention is kept. All that is sent or kept
    is finite: other numbers stop a simulation.
    """

    upload: Tree = {}
    memory: Tree = {}
    params: Params = {}
    buffers: Params = {}
    metrics: Tree = {}  # recorded in simulations, never sent


class OwnModel(NamedTuple):
    """Holds a client's own model."""

    params: Params  # with the names of w
    penalty: Tensor | None = None  # 0-d, a term of the loss of its training
    buffers: Params | None = None  # None: those that it trained with


class Ask(NamedTuple):
    """Asks some clients for a job.

    Without a model they use what they trained in this round.
    """

    job: str  # "train", a runtime's "test", or a word of the component that asks
    to: tuple[int, ...]  # ascending client ids
    params: Params = {}
    buffers: Params = {}
    shared: Tree = {}  # a component's own; by component once the core has addressed it
    each: Tree = {}  # likewise, leaves [len(to), ...]
    owner: str = ""  # the component that asks, set by the core; "" for training


@dataclass(frozen=True)
class Reply:
    """Holds the answers to one Ask, leaves [M, ...] in ascending client order.

    In a deployment a defence may drop answers. Then `clients` lack some that were asked: go by
    them, not by `Ask.to`. A client whose answer was dropped keeps the memory that it had before
    this Ask.
    """

    clients: tuple[int, ...]
    deltas: Params  # w_k minus the received model; empty if the job returns no model
    buffers: Params
    upload: Tree  # a hook sees its component's own; by component outside
    n: Tensor  # [M], n_k
    steps: Tensor  # [M], local steps
    loss: Tensor  # [M], mean loss over the local steps
    metrics: Tree = field(
        default_factory=dict
    )  # by component; empty in a deployment and where nothing is recorded
    # where `refine` gave several clients one update: a row of each, for a rule that counts updates
    distinct: Tensor | None = None


@dataclass(frozen=True)
class Server:
    """Holds all that a server's hook may read. What a round has not computed yet is absent."""

    task: Task
    params: Params  # the model: w_t up to `step`, then the new one
    buffers: Params
    round: int  # 0 before the first
    n_clients: int  # N
    input_shape: tuple[int, ...] = ()  # of one sample
    public: Samples = absent(
        "server.public is there for methods that declare Needs(public=...), if there is a split"
    )
    state: Tree = field(default_factory=dict)
    cohort: tuple[int, ...] = ()  # ascending ids; in round 0 and in `finish`, everybody
    # by client of the cohort: how many steps the server took since it sent the model; before round
    # 1, the most of the run; (): none
    staleness: tuple[int, ...] = ()
    # [N], seconds of each client's local training, if its device is known and no schedule is; else
    # ()
    durations: tuple[float, ...] = ()
    start: Params = field(default_factory=dict)  # w_t, from `refine` on
    replies: Reply = absent("server.replies is there from `refine` to `survey`")
    trained: Params = field(
        default_factory=dict
    )  # w_k - w_t as local training left them, before a refinement
    base: Tensor = absent(
        "server.base is there from `average` to `survey`"
    )  # [M], the weights before `weigh`
    omega: Tensor = absent(
        "server.omega is there from `average` to `survey`"
    )  # [M], float64, the weights as a client knows them: n_k or 1, times what `weigh` says
    weights: Tensor = absent(
        "server.weights is there from `average` to `survey`"
    )  # [M], float64, sum to one
    update: Params = field(default_factory=dict)  # the aggregated update, from `step` on
    keys: Tensor = absent("server.key is there in every hook")  # of this round
    scope: int = 0  # the component's number among these keys

    @property
    def key(self) -> Tensor:
        """For `core.randomness`, 0-d: of this component and round."""
        return fold(self.keys, self.scope)

    def client_models(self) -> Iterator[tuple[Params, Params]]:
        """(parameters, buffers) of each client as they enter the average, one at a time, where all
        started from w_t."""
        for k in range(len(self.replies.clients)):
            yield add(self.start, row(self.replies.deltas, k)), row(self.replies.buffers, k)


class Change(NamedTuple):
    """Holds what a server's hook changes. Everything that it does not mention is kept.

    `survey` sets the state, and before round 1 params; `finish` sets params.
    """

    state: Tree = {}
    params: Params | None = None
    buffers: Params | None = None  # of `step` and `learn`: running statistics
    # `step` only: the model that is evaluated, if it is not the one that is sent
    evaluated: Params | None = None
    # `step` only: 0-d leaves become columns of rounds.csv, others are kept as they are
    metrics: Tree = {}


@dataclass(frozen=True)
class Component:
    """Behaves as FedAvg at every hook. A method overrides what its paper changes."""

    name: ClassVar[str]
    # Uploads, by name, of which the server takes some numbers only, such as what it divides by. In
    # a deployment, an upload beyond its range costs that silo its place in the exchange. Ends
    # belong to the range. `whole` is for what counts something.
    ranges: ClassVar[Mapping[str, Range]] = {}

    @property
    def needs(self) -> Needs:
        """What it takes from the runtime; a class variable unless an option decides."""
        return Needs()

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        """What no other component of the recipe may own; likewise."""
        return frozenset()

    @property
    def weights(self) -> Weights:
        """The clients' weights; a field where it is an option."""
        return "size"

    @property
    def mechanism(self) -> Mechanism | None:
        """Its differential privacy, in one step (unit "sample") or round (unit "client")."""
        return None

    @property
    def packing(self) -> Packing | None:
        """How the update that `leaving` returns travels, if it is compressed."""
        return None

    def check(self, setting: Setting) -> None:
        """RecipeError if the method can't run in this setting.

        Types, words and ranges are checked already.
        """

    def exchanges(self, setting: Setting) -> Exchanges:
        """How often the component asks beside the training of every round."""
        return Exchanges()

    # client: leaves have no client axis
    # ----------------------------------------------------------------------------------------------

    def init_client(self, client: Client) -> Tree:
        """The memory of a client that has not taken part yet; `client.params` is w_0."""
        return {}

    def optimizer(self, configured: Optimizer) -> Optimizer | None:
        """The optimiser of local training, if the method brings its own (exclusive)."""

    def warm_start(self, client: Client) -> Tree | None:
        """What local training starts from: the optimiser's state if it is not empty (exclusive),
        and under "params" parameters other than the received ones (exclusive)."""

    def prepare(self, client: Client) -> Tree:
        """`client.prepared`: computed once per round on the received model."""
        return {}

    def gradient_point(self, w: Params, g: Params, client: Client) -> Params | None:
        """Where the gradient of the loss is taken, if not at w (exclusive).

        `g`: the gradient at w, for methods that declare `Needs(gradient=True)`. A parameter that is
        not mentioned stays as it is in w.
        """

    def logits(self, logits: Tensor, w: Params, client: Client) -> Tensor | None:
        """Logits [B, C] as the loss sees them (exclusive)."""

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        """A term of the loss, 0-d."""

    def sample_gradients(self, grads: Params, batch: Batch, client: Client) -> Params:
        """The gradient of a batch, of those of its samples, leaves [B, ...] (exclusive).

        Each sample's gradient is that of a batch with this sample alone; padding has 0.
        """
        raise NotImplementedError

    def gradient_term(self, w: Params, client: Client) -> Params | None:
        """A term of the gradient at w. Elementwise: leaves may have an axis [M] in front."""

    def update_factor(self, client: Client) -> Params | None:
        """Factors of the optimiser's update, by parameter: one per row (neuron)."""

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel | None:
        """The client's own model, of `v` that it keeps and of the model w (exclusive).

        `v` is what `init_client` puts under "v". Beside each step of w it takes a step of its own,
        on the cross-entropy of this model plus its penalty: same batch, same optimiser, w held
        fixed. In a test, w is the received model. No other method acts on `v`.
        """

    def leaving(self, delta: Params, client: Client) -> Params | None:
        """The update as it leaves the client, if it is not w_k - w_t (exclusive)."""

    def report(self, trace: Trace, client: Client) -> Answer:
        """After local training."""
        return Answer()

    def answer(self, client: Client) -> Answer:
        """The client's side of an Ask of this component; `client.job` says of which."""
        raise RecipeError(f"{self.name} asks {client.job!r} but does not answer it")

    # server: leaves of replies are [M, ...]; a hook that asks nothing is a plain function
    # ------------------------

    def init_server(self, server: Server) -> Tree:
        """The server's state before the first round."""
        return {}

    def choose(self, server: Server) -> Asks | tuple[int, ...] | None:
        """Ascending ids of the clients that take part in the round, at most as many as in
        `server.cohort`, which was drawn for every recipe (exclusive).

        May be a generator that asks any clients first.
        """

    def assign(self, server: Server) -> Asks | Change | None:
        """Before training, changes the state, whose MODELS and MODEL_OF say which model each client
        of `server.cohort` receives in place of w_t (exclusive).

        Who owns OWN_MODEL too has its clients tested with these models.
        """

    def broadcast(self, server: Server) -> Tree:
        """What goes to every client with the model."""
        return {}

    def message(self, server: Server) -> Tree:
        """What goes to each client of `server.cohort` on its own, leaves [M, ...]."""
        return {}

    def refine(self, server: Server) -> Asks | Reply | None:
        """May ask the clients again; returns the replies that the others see, of the same clients
        (exclusive)."""

    def weigh(self, server: Server) -> Tensor | None:
        """Factors of the clients' weights, [M]; the core divides by the sum."""

    def average(self, server: Server) -> Params | None:
        """The aggregated update in place of sum_k weights_k (w_k - w_t) (exclusive).

        With the names of all buffers beside those of the parameters: also what takes the place of
        the buffers' weighted mean.
        """

    def step(self, server: Server) -> Change:
        """The next state; the new model if it is not w_t plus the aggregated update (exclusive)."""
        return Change()

    def learn(self, server: Server) -> Change | None:
        """Training of the new model on the server (exclusive)."""

    def survey(self, server: Server) -> Asks | Change | None:
        """Asks about the new model; may change the state.

        In round 0 it asks about w_0, and may replace w_0 (exclusive).
        """

    def finish(self, server: Server) -> Asks | None:
        """Asks everybody after the last round; may change the evaluated model (exclusive)."""


# Overriding one of these hooks means owning what it changes. For `optimizer`, `warm_start`,
# `sample_gradients` and `step`, an option may decide whether the component owns it.
OWNS = {
    "gradient_point": Exclusive.GRADIENT_POINT,
    "logits": Exclusive.LOGITS,
    "choose": Exclusive.COHORT,
    "assign": Exclusive.RECEIVED,
    "refine": Exclusive.REFINEMENT,
    "leaving": Exclusive.UPDATE,
    "average": Exclusive.AVERAGE,
    "learn": Exclusive.SERVER_LEARNING,
    "finish": Exclusive.CLASSIFIER,
    "own_model": Exclusive.OWN_MODEL,
}


def overrides(component: Component, hook: str) -> bool:
    """Whether a component brings its own `hook`."""
    return getattr(type(component), hook) is not getattr(Component, hook)
