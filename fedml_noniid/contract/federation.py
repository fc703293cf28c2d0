"""A small, ragged federation on random data, and one call that runs a recipe on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.engines import federation as engines
from fedml_noniid.engines.absences import nobody
from fedml_noniid.engines.checkpoint import Checkpoints
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.run import Checkpointing, Outcome
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from fedml_noniid.models.model import Model
from fedml_noniid.plugins import registry
from fedml_noniid.simulate import simulate

N_CLASSES = 3
SIZES = (
    1,
    4,
    7,
    12,
    2,
    9,
)  # samples of each client; with batches of 4: 1, 1, 2, 3, 1 and 3 steps an epoch
ROUNDS = 3


@dataclass(frozen=True)
class Federation:
    """Three noisy classes in 6 dimensions."""

    train: Samples
    clients: list[np.ndarray[Any, np.dtype[np.int64]]]
    test: Samples
    public: Samples | None


def federation(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> Federation:
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(N_CLASSES, 6))

    def draw(n: int) -> Samples:
        y = rng.permutation(np.arange(n) % N_CLASSES)
        x = centres[y] + rng.normal(size=(n, 6))
        return Samples(torch.tensor(x, dtype=dtype), torch.tensor(y))

    train = draw(sum(sizes))
    return Federation(
        train, np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), draw(30), draw(15)
    )


def images(dtype: torch.dtype = torch.float64) -> Federation:
    """The same samples as noisy images of 6 x 6."""
    data = federation(dtype)
    generator = torch.Generator().manual_seed(0)

    def image(samples: Samples) -> Samples:
        x = samples.x.repeat(1, 6).reshape(-1, 1, 6, 6)
        return Samples(
            x + 0.5 * torch.randn(x.shape, generator=generator, dtype=x.dtype), samples.y
        )

    train, test = image(data.train), image(data.test)
    return Federation(
        train, data.clients, test, None if data.public is None else image(data.public)
    )


def takes_norms(recipe: str, settings: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a recipe trains networks with batch norms: one with privacy noise does not."""
    made = (registry.method(name)(**settings.get(name, {})) for name in registry.parse(recipe))
    return all(c.mechanism is None for c in made)


def network(batch_norm: bool = False) -> Model:
    return build("mlp", (6,), N_CLASSES, {"hidden": 5, "batch_norm": batch_norm})


PLAN: dict[str, Any] = {
    "rounds": ROUNDS,
    "cohort": 4,
    "seed": 3,
    "evaluate_every": 1,
    "engine": "sequential",
    "clients_at_once": None,
    "memory_mb": 2048,
    "workers": 1,
    "observing": False,
    "clients_memory": "auto",
    "clock": None,
}
LOCAL: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.1,
    "epochs": 2,
    "batch_size": 4,
    "augment": False,
    "drop_last": False,
    "local_steps": 0,
    "loss": "cross_entropy",
}
AROUND: dict[str, Any] = {
    "absent": nobody,
    "attackers": None,
    "callbacks": (),
    "checkpoint": None,  # its path
    "checkpoint_every": 1,
    "fingerprint": "",
}


def simulation(
    recipe: str,
    settings: Any = None,
    *,
    data: Federation | None = None,
    dtype: torch.dtype = torch.float32,
    batch_norm: bool = False,
    model: Model | None = None,
    **options: Any,
) -> Simulation:
    """`options`: in place of values of PLAN, LOCAL and AROUND."""
    plan, local, around = (
        defaults | {key: options.pop(key) for key in defaults.keys() & options.keys()}
        for defaults in (PLAN, LOCAL, AROUND)
    )
    if options:
        raise TypeError(f"unknown options: {', '.join(options)}")
    data = data or federation(dtype)
    path, every = around["checkpoint"], around["checkpoint_every"]
    checkpointing = [Checkpointing(Checkpoints(path, around["fingerprint"]), every)] if path else []
    return simulate(
        recipe,
        settings or {},
        engines.Federation.from_indices(
            *(data.train, data.clients, data.test),
            public=data.public,
            absent=around["absent"],
            attackers=around["attackers"],
        ),
        Plan(
            model or network(batch_norm and takes_norms(recipe, settings or {})),
            LocalTraining(**local),
            **plan,
        ),
        [*around["callbacks"], *checkpointing],
    )


def run(recipe: str, settings: Any = None, **options: Any) -> Outcome:
    return simulation(recipe, settings, **options).run()


def equal(a: Outcome, b: Outcome) -> bool:
    """To the bit: weights, buffers, every row but the seconds, and what both recorded."""
    recorded = a.tensors.keys() & b.tensors.keys()
    return (
        equal_models(a, b)
        and [_row(row) for row in a.rows] == [_row(row) for row in b.rows]
        and all(_bytes(a.tensors[key]) == _bytes(b.tensors[key]) for key in recorded)
    )


def equal_models(a: Outcome, b: Outcome) -> bool:
    """To the bit: weights and buffers, and those of K models where both have such."""
    both = a.models and b.models
    return all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)
        for x, y in (
            (a.params, b.params),
            (a.evaluated, b.evaluated),
            (a.buffers, b.buffers),
            (flatten(a.models), flatten(b.models)) if both else ({}, {}),
        )
    )


def _row(row: dict[str, float]) -> dict[str, str]:
    return {
        key: repr(value) for key, value in row.items() if key != "seconds"
    }  # repr: NaN equals NaN


def _bytes(leaf: torch.Tensor) -> bytes:
    return leaf.contiguous().numpy().tobytes()  # NaN equals NaN
