"""Defines callbacks, which act around the rounds of a run, in every runtime.

In a deployment they run on the server.

    on_start                      once in each process, also in one that goes on from a checkpoint
      each exchange: on_exchange  an Ask and the replies
      each round:    measure      columns of rounds.csv
                     stop         whether this round is the last
                     on_round     the row is complete

A callback never changes a run but by `stop`. What it keeps from round to round is in its
checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedml_noniid import extras
from fedml_noniid.core.algorithm import RoundResult, State
from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.errors import UserError, known, located, shown
from fedml_noniid.core.options import Count, NonNegative, check_options
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, tree_map
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Start
from fedml_noniid.own_code import failure, find

OURS = "fedml_noniid."  # modules whose errors are not a user's
NAME = re.compile(r"[\w./-]+")  # of a column
Row = dict[str, float]  # of rounds.csv
Columns = Mapping[str, Tensor | float]


class CurrentRun(Protocol):
    """What a callback may read of the run that calls it."""

    start: Start
    federation: Federation
    state: State
    done: int  # rounds

    @property
    def over(self) -> bool:
        """Whether the last round is done."""


class Exchange(NamedTuple):
    """Holds an Ask and what came back. Read only: the engine uses the tensors again."""

    round: int
    ask: Ask
    reply: Reply
    start: State  # the server before the round
    trained: Reply | None  # the replies to local training in this round, if there were any before
    task: Task


@dataclass(frozen=True, eq=False)
class RoundEnd:
    """Describes a round that ends."""

    number: int  # from 1
    start: State  # the server before it
    done: RoundResult
    reply: Reply  # of local training
    task: Task
    evaluating: bool  # whether an evaluation is due
    client_tests: (
        Reply | None
    )  # the clients' tests of their own models, where they keep a part of the model

    @cached_property
    def model(self) -> tuple[Params, Params]:
        """(parameters, buffers) of the evaluated model: copies, which may be changed."""
        params = self.done.state.params if self.done.evaluated is None else self.done.evaluated
        whole, buffers = self.task.model(params, self.done.state.buffers)
        return tree_map(torch.clone, whole), tree_map(torch.clone, buffers)


class Callback:
    """Does nothing at every hook: the base of all callbacks.

    A run has an object of its own: a copy of the one that it is given.
    """

    def on_start(self, run: CurrentRun) -> None:
        """Before the first round of this process.

        May raise UserError if it does not fit the run.
        """

    def on_exchange(self, exchange: Exchange) -> None:
        """After each exchange between server and clients."""

    def measure(self, end: RoundEnd) -> Columns:
        """Values of the round by name, the same names in each round; NaN where nothing is measured.

        Numbers and 0-d tensors become columns of rounds.csv, other tensors are recorded. It may be
        called twice in the round in which the run is stopped.
        """
        return {}

    def stop(self, rows: Sequence[Row]) -> str:
        """The reason why the last of `rows` is the last round; "" if the run goes on."""
        return ""

    def on_round(self, run: CurrentRun, row: Row) -> None:
        """After a round; `row` is its row of rounds.csv."""

    def state(self) -> dict[str, Any]:
        """What the callback keeps from round to round, as JSON: its attributes.

        UserError if they are not JSON.
        """
        state = dict(vars(self))
        for name, value in state.items():
            try:
                same = json.loads(json.dumps(value)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                raise UserError(
                    f"callback {type(self).__name__}: {name} = {shown(value)} can't be kept in "
                    "a checkpoint as JSON; "
                    "allowed: numbers, text, lists and dicts of these, or methods `state` and "
                    "`restore` of its own"
                )
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the state of a checkpoint."""
        vars(self).update(state)


class Stateless(Callback):
    """A callback that keeps nothing from round to round."""

    def state(self) -> dict[str, Any]:
        return {}


@dataclass
class EarlyStop(Callback):
    """Stops a run that no longer improves on the validation split.

    Its model is that of the last round.

    `patience`: evaluations without an improvement by more than `min_delta`.
    """

    patience: Count = 10
    on: str = "validation_loss"  # or that of the main metric, such as validation_accuracy
    min_delta: NonNegative = 0.0
    after: Count = 1  # the first round that may be the last
    best: float = field(
        default=math.inf, init=False
    )  # the lowest loss, or minus the highest metric
    since: int = field(default=0, init=False)  # evaluations

    def __post_init__(self) -> None:
        """UserError for options that params.yaml would refuse."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        with located(source="EarlyStop"):
            check_options(EarlyStop, options)

    def on_start(self, run: CurrentRun) -> None:
        if run.federation.validation is None:
            raise UserError(
                "callback early_stop: needs a validation split, and there is none; set validation"
            )
        if run.start.task.own_models:
            raise UserError(
                f"callback early_stop: with {run.start.algorithm.name} each client has a model of "
                "its own, so none is measured on the validation split; leave it out"
            )
        measured = "validation_loss", f"validation_{run.start.task.loss.metric}"
        known("callback early_stop: on =", self.on, measured)

    def stop(self, rows: Sequence[Row]) -> str:
        row = rows[-1]
        if math.isnan(row[self.on]):  # no evaluation was due
            return ""
        loss = row[self.on] if self.on == "validation_loss" else -row[self.on]
        better = loss < self.best - self.min_delta
        self.best, self.since = (loss, 0) if better else (self.best, self.since + 1)
        if self.since < self.patience or row["round"] < self.after:
            return ""
        return f"{self.on} has not improved for {self.since} evaluations"


@dataclass
class OnRow(Stateless):
    """Calls a function with each new row."""

    call: Callable[[Row], None]

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self.call(row)


@dataclass
class _Tracker(Callback):
    """Writes the numbers of each row into a tracker of experiments, one run of it for each run."""

    EXTRA: ClassVar[str]
    folder: str
    run_id: str = field(default="", init=False)  # of the tracker; a run that goes on keeps it

    def __post_init__(self) -> None:
        self._writer: tuple[Callable[[Row], None], Callable[[], None]] | None = None

    def on_start(self, run: CurrentRun) -> None:
        extras.require(self.EXTRA)

    def on_round(self, run: CurrentRun, row: Row) -> None:
        if self._writer is None:
            self.run_id = self.run_id or uuid.uuid4().hex[:8]
            name = f"{run.start.algorithm.name}-{run.start.plan.seed}-{self.run_id}"
            self._writer = self._open(name, int(row["round"]))
        write, close = self._writer
        write({name: value for name, value in row.items() if math.isfinite(value)})
        if run.over:
            close()

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def _open(self, name: str, first: int) -> tuple[Callable[[Row], None], Callable[[], None]]:
        """(writes a row, ends the run) of the tracker, for a run whose next round is `first`."""
        raise NotImplementedError


@dataclass
class TensorBoard(_Tracker):
    """Writes the columns of rounds.csv for `tensorboard --logdir FOLDER`.

    `folder`: has a folder for each run.
    """

    EXTRA = extras.TENSORBOARD
    folder: str = "tensorboard"

    def _open(self, name: str, first: int) -> tuple[Callable[[Row], None], Callable[[], None]]:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a killed process wrote after its checkpoint are run, and written, again.
        writer: Any = SummaryWriter(f"{self.folder}/{name}", purge_step=first)

        def write(row: Row) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, int(row["round"]))
            writer.flush()

        return write, writer.close


@dataclass
class WandB(_Tracker):
    """Writes the columns of rounds.csv for Weights & Biases.

    `mode`: offline keeps all in `folder`, until `wandb sync` sends it; online sends each round.
    """

    EXTRA = extras.WANDB
    folder: str = "."
    project: str = "fedml-noniid"
    mode: Literal["offline", "online"] = "offline"

    def _open(self, name: str, first: int) -> tuple[Callable[[Row], None], Callable[[], None]]:
        import wandb

        run: Any = wandb.init(
            project=self.project,
            name=name,
            id=self.run_id,
            resume="allow",
            mode=self.mode,
            dir=self.folder,
            reinit=True,
        )
        return lambda row: run.log(row, step=int(row["round"])), run.finish


CALLBACKS: dict[str, type[Callback]] = {
    "early_stop": EarlyStop,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


def callback_of(name: str, options: Mapping[str, object]) -> Callback:
    """A callback by name: one of CALLBACKS, or a subclass of `Callback` as `package.module:name`.

    Raises UserError.
    """
    kind = find("callback", name, CALLBACKS, Callback)
    if is_dataclass(kind):
        with located(name):
            check_options(kind, options)
    try:
        return kind(**options)
    except Exception as error:  # of any kind: the code is the user's
        raise _failure(kind, "__init__", error) from error


def call_hook(callback: Callback, hook: str, *args: Any) -> Any:
    """The result of a hook.

    UserError names the callback and the place, unless the error is in our own words.
    """
    try:
        return getattr(callback, hook)(*args)
    except Exception as error:  # of any kind: the code may be the user's
        raise _failure(type(callback), hook, error) from error


def columns_of(callbacks: Sequence[Callback], end: RoundEnd) -> dict[str, Tensor | float]:
    """The columns of all callbacks.

    UserError for values that are no numbers, and for a name that two of them give.
    """
    merged: dict[str, Tensor | float] = {}
    for callback in callbacks:
        columns = call_hook(callback, "measure", end)
        name = type(callback).__name__
        if not isinstance(columns, Mapping):
            raise UserError(
                f"callback {name}: measure returned {shown(columns)}; allowed: a dict of numbers"
            )
        for key, value in columns.items():
            number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
            if not (isinstance(key, str) and NAME.fullmatch(key) and number):
                raise UserError(
                    f"callback {name}: measure returned {shown(key)}: {shown(value)}; allowed: "
                    "numbers or tensors by "
                    "name, names of letters, digits, '_', '.', '/' and '-'"
                )
            if key in merged or key in ("round", "seconds"):
                raise UserError(
                    f"callback {name}: measure returned {key!r}, a column that is there already"
                )
        merged |= columns
    return merged


def _failure(kind: type, hook: str, error: Exception) -> Exception:
    ours = kind.__module__.startswith(OURS)
    if ours or isinstance(error, UserError | MemoryError | torch.OutOfMemoryError):
        return error
    return failure(f"callback {kind.__name__}: {hook}", error, hook)
