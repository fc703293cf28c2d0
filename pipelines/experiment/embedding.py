"""Turns the samples of a data set into vectors, as params.yaml says.

A module of its own: an experiment without `embed` does not depend on networks where it reads its
data.
"""

from __future__ import annotations

from fedml_noniid.core.errors import located
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.engines.device import be_deterministic, n_cards, resolve_device
from fedml_noniid.pipelines.experiment.config import FILE, Config
from fedml_noniid.pipelines.experiment.workers import how_many


def embedded(settings: Config, data: Dataset) -> Dataset:
    """The data set of the vectors; `data` itself without `embed`. UserError."""
    embed, device = settings.data.embed, resolve_device(settings.train.device)
    if embed is None:
        return data
    threads = how_many(settings.machine.processes, 1, n_cards(device))
    be_deterministic()
    with located("data", "embed", source=FILE):
        return embed.embedded(data, threads, device)
