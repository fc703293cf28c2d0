"""A silo that answers the Asks of a run, without FedML and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.received import received
from fedml_noniid.core.trees import Params, Tree, leaves, row, tree_map
from fedml_noniid.data import tensor_file
from fedml_noniid.data.shards import Shard
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.settings import Terms
from fedml_noniid.deploy.wire import NOT_COUNTED, Down, RefusedError
from fedml_noniid.engines.client_tests import answered
from fedml_noniid.engines.clients import Clients, refuse_non_finite
from fedml_noniid.engines.device import be_deterministic, refusing
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten, unflatten
from fedml_noniid.engines.plan import Start
from fedml_noniid.engines.sequential import Sequential


def read_memory(path: Path) -> tensor_file.Tensors:
    """Reads the file of a silo's memory. UserError if it is damaged."""
    return tensor_file.read(
        path,
        "silo",
        tensor_file.Tensors,
        what="the memory of a silo",
        origin="",
        remedy="delete it to start the run again",
    )


class _OneClient(Clients):
    """The one client of a silo."""

    def holds(self, ask: Ask) -> bool:
        """Always for training: the whole cohort decides whether a round goes on, and a silo sees
        only itself."""
        return ask.job == "train"


class Silo:
    """Answers from its own shard, with the sequential engine.

    An answer changes the silo's memory. The silo keeps the memory from after each answer of the
    round, and the ones from before this round and the one before it. Every message says which
    answer was the last that the server counted, and the silo goes on from the memory after that
    one. So the states of server and silos, such as SCAFFOLD's c and c_i, always match: after a
    defence has dropped an answer, after one came too late, after the server was started again, and
    after it has gone back by a round.
    """

    def __init__(
        self, terms: Terms, client: int, shard: Shard, file: RunFile | None = None
    ) -> None:
        """`client` counts from 0; `shard` has its samples.

        The silo's memory is written to `file`, and goes on from there. UserError if the file is
        damaged, or of another run.
        """
        self.terms, self.client, self._shard, self._file = terms, client, shard, file
        self._device = terms.device.of_silo
        be_deterministic()
        federation = self._federation()
        start = Start.from_plan(terms.algorithm, terms.plan, federation.train.x)
        self.engine = Sequential(_OneClient(start, federation))
        self.initial = start.params, start.buffers
        # By exchange: the memory after its answer.
        self._states: dict[int, Tree] = {NOT_COUNTED: self.engine.clients.memory.whole()}
        self._round, self._first = 0, NOT_COUNTED  # and the exchange counted when it began
        self._trained = NOT_COUNTED  # the exchange of the training that `clients.trained` is from
        # Between rounds, a silo of many recipes remembers nothing: a restart loses nothing, and no
        # file is written.
        self._further = terms.algorithm.exchanges.round > 1
        self._remembers = self._further or any(
            True for _ in leaves(self.engine.clients.memory.first)
        )
        if file is not None and file.path.exists():
            self._restore(file)

    def _federation(self) -> Federation:
        """What a silo has of the federation, in its noise."""
        shard, device = self._shard, self._device
        train = shard.in_noise("train").to(device)
        test = (
            shard.in_noise("test") if "test" in shard.parts else Samples(train.x[:0], train.y[:0])
        )
        public = shard.parts.get("public")
        # Batches are drawn as positions within a shard. So this shard is read in the same order as
        # in a simulation.
        positions, drift = np.arange(len(train.y)), shard.drift
        return Federation(
            self.terms.silos,
            train,
            {self.client: positions},
            test.to(device),
            public=public and public.to(device),
            drift=drift,
            held=None if drift is None else drift.per_sample([positions], len(train.y)),
        ).used_by(self.terms.algorithm)

    def read(self, train: Samples) -> None:
        """Replaces the samples by as many others, perhaps poisoned by an attack."""
        self._shard = self._shard.with_train(train)
        self.engine.clients.read(self._federation().train)

    def answer(self, down: Down) -> Tree | None:
        """This silo's reply, keys as in `wire.PARTS`; None if it was not asked.

        Raises NonFiniteError, UserError.
        """
        if down.terms != self.terms.fingerprint:
            raise UserError(f"{wire.silo(self.client)}: {wire.OTHER_CONFIGURATION}")
        ask, clients = down.ask, self.engine.clients
        self._set_memory(down)
        if ask is None or self.client not in ask.to:
            return None
        with refusing(self.terms.plan.network):
            reply = self.reply(ask, ask.to.index(self.client), down.round)
        refuse_non_finite(reply, down.round)
        if self._remembers:
            self._states[down.exchange] = clients.memory.whole()
        if ask.job == "train":
            self._trained = down.exchange
        self._save()
        return wire.packed(row(self.parts(reply), 0), self.terms.algorithm.packing(ask.job))

    def _set_memory(self, down: Down) -> None:
        """Goes on from the memory after the last answer that the server has counted."""
        counted = down.counted.get(self.client, NOT_COUNTED) if self._remembers else NOT_COUNTED
        if counted not in self._states:
            raise RefusedError(
                "set back",
                f"{wire.silo(self.client)}: the server goes on behind exchange {counted}, and this "
                f"silo's memory is of exchange {max(self._states)}: one side was set back; restore "
                "its files, or start a new run on all sides",
            )
        clients = self.engine.clients
        if down.round != self._round:  # the server goes back by a round at most
            first = min(self._first, counted)
            self._states = {n: self._states[n] for n in (first, counted)}
            self._round, self._first = down.round, counted
            clients.trained.clear()
        elif counted < self._trained:  # nothing may go on from a training that does not count
            clients.trained.clear()
        # A copy: the engine changes the memory in place.
        clients.memory.restore(tree_map(torch.clone, self._states[counted]))

    def reply(self, ask: Ask, position: int, round_: int) -> Reply:
        """The reply [1, ...] to the row `position` of an Ask."""
        device = self.engine.clients.device
        here = received(wire.mapped(lambda leaf: leaf.to(device), ask), position)
        mine = here._replace(
            to=(self.client,), each=row(here.each, torch.tensor([position], device=device))
        )
        return answered(self.engine, mine, round_)

    @staticmethod
    def parts(reply: Reply) -> Tree:
        """The parts of a reply that are sent, on the CPU."""
        cpu: Tree = tree_map(Tensor.cpu, {key: getattr(reply, key) for key in wire.PARTS})
        return cpu

    def _save(self) -> None:
        """Writes the file."""
        if self._file is not None and self._remembers:
            made = self.memory()
            tensor_file.write(
                self._file.path, "silo", made.head, made.tensors, made.checksum, private=True
            )

    def memory(self) -> tensor_file.Tensors:
        """All that an answer depends on beside the question and the samples.

        The tensors are those of the silo, which the next answer changes.
        """
        clients = self.engine.clients
        trees: Tree = {f"state/{exchange}": tree for exchange, tree in self._states.items()}
        if self._further and self.client in clients.trained:
            params, buffers = clients.trained[self.client]
            trees |= {"params": params, "buffers": buffers, "start": clients.w_t}
        head: dict[str, Any] = {
            "run": "" if self._file is None else self._file.run,
            "silo": self.client,
            "round": self._round,
            "first": self._first,
            "trained": self._trained,
            "states": list(self._states),
            "held": "params" in trees,
        }
        flat = {key: leaf.cpu() for key, leaf in flatten(trees).items()}
        return tensor_file.Tensors(head, flat)

    def _restore(self, file: RunFile) -> None:
        memory = read_memory(file.path)
        head = memory.head
        if (head["run"], head["silo"]) != (file.run, self.client):
            raise UserError(
                f"{file.path}: is the memory of {wire.silo(head['silo'])} in run {head['run']}; "
                f"this is {wire.silo(self.client)} in run {file.run}; delete it to join this run"
            )
        self.go_on_from(head, memory.tensors)

    def go_on_from(self, head: dict[str, Any], tensors: Params) -> None:
        """Goes on from a `memory`."""
        clients = self.engine.clients
        # Copies are aligned. The file's tensors need not be, and then matrix products round
        # differently.
        flat = {key: leaf.clone().to(clients.device) for key, leaf in tensors.items()}
        params, buffers = self.initial
        self._round, self._first, self._trained = (head[k] for k in ("round", "first", "trained"))
        self._states = {
            n: unflatten(flat, clients.memory.first, f"state/{n}/") for n in head["states"]
        }
        clients.trained.clear()
        if head["held"]:
            trained = unflatten(flat, {"params": params, "buffers": buffers, "start": params})
            clients.trained[self.client] = trained["params"], trained["buffers"]
            clients.w_t = trained["start"]
