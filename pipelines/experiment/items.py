"""One item of the experiment (a scenario, a recipe, a seed) with its data, read and checked."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedml_noniid.core.data import Samples
from fedml_noniid.core.losses import Loss
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES, Indices, read_indices
from fedml_noniid.data.noise import for_client, per_sample
from fedml_noniid.data.owners import client_names
from fedml_noniid.data.rotation import turned
from fedml_noniid.data.types import Ints
from fedml_noniid.engines.absences import nobody
from fedml_noniid.engines.attackers import Attackers
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.device import be_deterministic, resolve_device
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Clock, Plan
from fedml_noniid.engines.schedule import microseconds
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models.model import Model
from fedml_noniid.models.settings import build_network
from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.simulate import simulate

MAX_BY_CLIENT = 50  # clients with a column each in rounds.csv


@dataclass(frozen=True, eq=False)
class Item:
    """The unit of work of the train and evaluate stages."""

    settings: Config
    unit: Unit
    data: Dataset
    indices: Indices
    device: torch.device
    last_round: int = 0  # of a run that is over

    @staticmethod
    def load(workspace: Workspace, settings: Config, unit: Unit) -> Item:
        """Reads data and partition. Raises UserError, also if a file of them was changed."""
        data, folder = (
            Dataset.read(workspace.dataset_of(settings, unit.scenario, unit.seed)),
            workspace.partition(unit.scenario, unit.seed),
        )
        cache.check(folder)
        indices = read_indices(folder / INDICES)
        return Item.from_parts(settings, unit, data, indices)

    @staticmethod
    def from_parts(settings: Config, unit: Unit, data: Dataset, indices: Indices) -> Item:
        """Takes data and partition from memory.

        Sets torch's threads, precision and determinism. Raises UserError.
        """
        torch.set_num_threads(settings.train.threads)
        be_deterministic()
        return Item(settings, unit, data, indices, resolve_device(settings.train.device))

    def ended(self, last_round: int) -> Item:
        """The item of a run that is over. What is cached stays, such as a user's probed network."""
        over = copy.copy(self)
        vars(over)["last_round"] = last_round
        return over

    @cached_property
    def network(self) -> Model:
        train = self.settings.train
        shape = tuple(self.data.train_x.shape[1:])
        return build_network(train, shape, len(self.data.classes), self.data.embedding)

    @cached_property
    def loss(self) -> Loss:
        return self.settings.train.built_loss

    @cached_property
    def noise(self) -> Tensor | None:
        """The standard deviations [N, ...] of the clients' noise, if the scenario has any."""
        wanted = self.settings.scenarios[self.unit.scenario].noise
        return None if wanted is None else wanted.deviations(len(self.indices.clients), self.data)

    @cached_property
    def attackers(self) -> Attackers | None:
        """The clients that lie, if any do. UserError for data that don't allow it."""
        attack = self.settings.scenarios[self.unit.scenario].attack
        n, seed = len(self.indices.clients), self.unit.seed
        return None if attack is None else attack.drawn(self.data, n, seed)

    @cached_property
    def test(self) -> Samples:
        return Samples(self.data.normalised("test", self.device), self.data.test_y.to(self.device))

    def test_of(self, client: int) -> Samples:
        """The test set as a client sees it after the last round: images turned by its angle, in its
        noise, its labels.

        Label noise is left out.
        """
        turns = self.indices.skew.turns
        x = self.test.x if turns is None else turned(self.test.x, int(turns[client]))
        return self.test._replace(
            x=x,
            y=self.labelled(self.test.y, client),
            noise=None if self.noise is None else for_client(self.noise[client], x),
        )

    def client_tests(self) -> list[Samples]:
        """Each client's own part of the test set as it sees it, with the true labels."""
        return self.seen_by(self.indices.test_clients, self.test)

    def seen_by(self, clients: Sequence[Ints], samples: Samples) -> list[Samples]:
        """Each client's samples as it sees them, with the true labels.

        `clients`: positions in `samples`.
        """
        parts = self.indices.skew.tests(clients, samples.x, samples.y)
        if self.noise is None:
            return parts
        return [
            part._replace(noise=for_client(std, part.x))
            for part, std in zip(parts, self.noise, strict=True)
        ]

    def labelled(self, y: Tensor, client: int) -> Tensor:
        """The labels that a client gives after the last round to samples of the classes `y` [n]."""
        drift = self.indices.skew.drift
        return y if drift is None else drift.labels(y, client, self.last_round)

    def simulation(self, callbacks: Sequence[Callback] = (), workers: int = 1) -> Simulation:
        """The run, with the callbacks of the settings and then the given ones.

        `workers`: the most processes that it may use. Raises UserError.
        """
        settings, recipe = self.settings, self.unit.recipe
        train, scenario = settings.train_of(recipe), settings.scenarios[self.unit.scenario]
        plan = Plan(
            self.network,
            train,
            train.rounds,
            scenario.cohort,
            self.unit.seed,
            train.evaluate_every,
            train.engine,
            settings.machine.clients_at_once,
            settings.machine.memory_mb,
            workers,
            train.observe,
            settings.machine.clients_memory,
            self._clock(),
        )
        every = [*train.built_callbacks(), *callbacks]
        methods = settings.recipes[recipe].settings
        return simulate(settings.composition(recipe), methods, self._federation(), plan, every)

    def _clock(self) -> Clock | None:
        """The devices of the scenario and how the server waits, if it has any."""
        scenario = self.settings.scenarios[self.unit.scenario]
        if scenario.devices is None:
            return None
        clients = self.indices.clients
        owners = client_names(self.data, clients)
        devices = scenario.devices.devices(len(clients), self.unit.seed, owners)
        until = microseconds(self.settings.train.until_s)
        return Clock(devices, scenario.waits.built, until)

    def _federation(self) -> Federation:
        scenario, clients = self.settings.scenarios[self.unit.scenario], self.indices.clients
        x, y = self.data.normalised("train", self.device), self.data.train_y.to(self.device)
        noise = None if self.noise is None else per_sample(self.noise, clients, x)

        def part(positions: Ints) -> Samples | None:
            index = torch.from_numpy(positions).to(self.device)
            return Samples(x[index], y[index]) if len(positions) else None

        seen = self.indices.skew.applied(clients, x, y)
        if self.attackers is not None:
            seen = self.attackers.samples(clients, *seen, len(self.data.classes))
        return Federation.from_indices(
            Samples(*seen, noise),
            clients,
            self.test,
            validation=part(self.indices.validation),
            public=part(self.indices.public),
            absent=nobody
            if scenario.availability is None
            else scenario.availability.absent(self.unit.seed),
            attackers=self.attackers,
            drift=self.indices.skew.drift,
            tests=self.client_tests,
            test_clients=self._test_clients(),
        )

    def _test_clients(self) -> dict[str, Ints] | None:
        """Each client's positions in the test set, by its owner's name or its number.

        None for many clients, labels that drift and losses without classes: there, rounds have no
        accuracy by client.
        """
        tests = self.indices.test_clients
        drifts = self.indices.skew.drift is not None
        if len(tests) > MAX_BY_CLIENT or drifts or not self.loss.classes:
            return None
        names = client_names(self.data, self.indices.clients) or range(len(tests))
        columns = [re.sub(r"[^\w.-]", "_", str(name)) for name in names]
        if len(set(columns)) < len(columns):
            columns = [f"{column}-{k}" for k, column in enumerate(columns)]
        return dict(zip(columns, tests, strict=True))
