"""One item of the experiment: a scenario, a recipe and a seed, with its data read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pipelines import config
from pipelines.workers import how_many
from plugins.core.data import Samples
from plugins.data.checks import known
from plugins.data.dataset import Dataset
from plugins.data.indices import Indices, read_indices
from plugins.data.noise import held
from plugins.data.types import Ints
from plugins.engines.run import Schedule
from plugins.engines.simulation import Simulation, resolve_device
from plugins.models import build as build_network
from plugins.models.forward import Model


@dataclass(frozen=True, eq=False)
class Item:
    """What the train and evaluate stages work on."""

    settings: config.Config
    scenario: str
    recipe: str  # name of the entry in params.yaml
    seed: int
    data: Dataset
    indices: Indices
    indices_file: Path
    device: torch.device

    @staticmethod
    def load(scenario: str, recipe: str, seed: int) -> Item:
        """Reads settings, data and partition, and sets torch's threads. Raises UserError."""
        settings = config.load()
        known(f"{config.FILE}: scenario", scenario, settings.scenarios)
        known(f"{config.FILE}: recipe", recipe, settings.recipes)
        torch.set_num_threads(settings.train.threads)
        device = resolve_device(settings.train.device)
        # torch's own default has convolutions on a GPU in tf32.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.train.precision == "tf32"
        data = Dataset.read(config.root() / "data" / f"{settings.data.name}.safetensors")
        path = config.root() / "partitions" / f"{scenario}-{seed}" / "indices.json"
        return Item(settings, scenario, recipe, seed, data, read_indices(path), path, device)

    @property
    def key(self) -> str:
        """The item's name in folders and MLflow."""
        return f"{self.scenario}-{self.recipe}-{self.seed}"

    @cached_property
    def network(self) -> Model:
        train = self.settings.train
        shape = tuple(self.data.train_x.shape[1:])
        return build_network(train.model, shape, len(self.data.classes), train.model_options, self.data.embedding)

    @cached_property
    def noise(self) -> Tensor | None:
        """The standard deviations [N, ...] of the clients' noise, if the scenario has any."""
        wanted = self.settings.scenarios[self.scenario].noise
        return None if wanted is None else wanted.deviations(len(self.indices.clients), self.data)

    @cached_property
    def test(self) -> Samples:
        return Samples(self.data.normalised("test", self.device), self.data.test_y.to(self.device))

    def simulation(self, checkpoint: Path, fingerprint: str) -> Simulation:
        """The run, which goes on from `checkpoint` if that exists."""
        train, scenario = self.settings.train, self.settings.scenarios[self.scenario]
        x, y = self.data.normalised("train", self.device), self.data.train_y.to(self.device)

        def part(positions: Ints) -> Samples | None:
            index = torch.from_numpy(positions).to(self.device)
            return Samples(x[index], y[index]) if len(positions) else None

        return Simulation(
            self.settings.composition(self.recipe),
            self.settings.recipes[self.recipe].settings,
            self.network,
            Samples(x, y, None if self.noise is None else held(self.noise, self.indices.clients, x)),
            self.indices.clients,
            self.test,
            part(self.indices.validation),
            part(self.indices.public),
            train.local,
            Schedule(train.rounds, scenario.cohort, self.seed, train.evaluate_every),
            engine=train.engine,
            memory_mb=train.memory_mb,
            checkpoint=checkpoint,
            checkpoint_every=train.checkpoint_every,
            fingerprint=fingerprint,
            observing=train.observe,
            workers=how_many(train.threads, self.device.type == "cuda") if train.threads == 1 else 1,
        )

    def params(self) -> dict[str, object]:
        """Every setting that the item depends on, flat: what MLflow shows and the fingerprint covers."""
        entry = self.settings.recipes[self.recipe]
        sections: dict[str, Mapping[str, object]] = {
            "data": self.settings.data.model_dump(),
            "scenario": self.settings.scenarios[self.scenario].model_dump(),
            "train": self.settings.train.model_dump(),
            **entry.settings,
        }
        flat: dict[str, object] = {
            "recipe": self.recipe, "composition": self.settings.composition(self.recipe),
            "scenario": self.scenario, "seed": self.seed,
        }  # fmt: skip
        for section, values in sections.items():
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        return flat
