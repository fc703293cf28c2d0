"""Softmax regression in NumPy float64, one step of all samples per round, by six clients: enough
for rules against dishonest ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedml_noniid.core.trees import Params
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from tests import federation

Array = NDArray[np.float64]
LR, D, C = 0.1, 6, federation.N_CLASSES
OF = federation.federation(torch.float64)
X, Y = OF.train.x.numpy(), OF.train.y.numpy()
N_K = np.array([len(rows) for rows in OF.clients]) / len(Y)
ENGINES = [  # (engine, processes)
    ("sequential", 1),
    *(pytest.param(on, marks=pytest.mark.slow) for on in (("vectorized", 1), ("sequential", 2))),
]


def simulation(recipe: str, settings: Any, engine: tuple[str, int], **more: Any) -> Simulation:
    """A run of everybody on full batches."""
    name, workers = engine
    options = {"epochs": 1, "batch_size": 99, "lr": LR, "cohort": 6, "rounds": 2} | more
    model = build("logistic_regression", (D,), C, {})
    more = {"data": OF, "model": model, "dtype": torch.float64, "engine": name, "workers": workers}
    return federation.simulation(recipe, settings, **more, **options)


def flat(params: Params) -> Array:
    """The model as one vector [C d + C]."""
    return np.concatenate([params[key].numpy().ravel() for key in ("fc.weight", "fc.bias")])


def deltas(w: Array) -> Array:
    """The clients' updates, a row each: -lr times the gradient of the mean cross-entropy."""
    weight, bias = w[: C * D].reshape(C, D), w[C * D :]
    rows = []
    for mine in OF.clients:
        z = X[mine] @ weight.T + bias
        p = np.exp(z - z.max(1, keepdims=True))
        error = (p / p.sum(1, keepdims=True) - np.eye(C)[Y[mine]]) / len(mine)
        rows.append(-LR * np.concatenate([(error.T @ X[mine]).ravel(), error.sum(0)]))
    return np.array(rows)
