"""One item of the experiment (a scenario, a recipe, a seed) with its data, read and checked."""

from __future__ import annotations

import copy
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
from fedml_noniid.data.rotation import turned
from fedml_noniid.data.types import Ints
from fedml_noniid.engines.absences import nobody
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.device import be_deterministic, resolve_device
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models.model import Model
from fedml_noniid.models.settings import build_network
from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.config import Config, Unit
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.simulate import simulate


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
            Dataset.read(workspace.dataset(settings.data.name)),
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
        tests = self.indices.skew.tests(self.indices.test_clients, self.test.x, self.test.y)
        if self.noise is None:
            return tests
        return [
            test._replace(noise=for_client(std, test.x))
            for test, std in zip(tests, self.noise, strict=True)
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
        train = settings.train_of(recipe)
        plan = Plan(
            self.network,
            train,
            train.rounds,
            settings.scenarios[self.unit.scenario].cohort,
            self.unit.seed,
            train.evaluate_every,
            train.engine,
            settings.machine.clients_at_once,
            settings.machine.memory_mb,
            workers,
            train.observe,
            settings.machine.clients_memory,
        )
        every = [*train.built_callbacks(), *callbacks]
        methods = settings.recipes[recipe].settings
        return simulate(settings.composition(recipe), methods, self._federation(), plan, every)

    def _federation(self) -> Federation:
        scenario, clients = self.settings.scenarios[self.unit.scenario], self.indices.clients
        x, y = self.data.normalised("train", self.device), self.data.train_y.to(self.device)
        noise = None if self.noise is None else per_sample(self.noise, clients, x)

        def part(positions: Ints) -> Samples | None:
            index = torch.from_numpy(positions).to(self.device)
            return Samples(x[index], y[index]) if len(positions) else None

        return Federation.from_indices(
            Samples(*self.indices.skew.applied(clients, x, y), noise),
            clients,
            self.test,
            validation=part(self.indices.validation),
            public=part(self.indices.public),
            absent=nobody
            if scenario.availability is None
            else scenario.availability.absent(self.unit.seed),
            drift=self.indices.skew.drift,
            tests=self.client_tests,
        )
