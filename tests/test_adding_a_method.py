"""docs/adding_a_method.md is run as it stands: its component, registry line, table row and pair."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from plugins import recipes
from plugins.core.component import Component, Samples
from plugins.core.trees import Params
from plugins.engines.clients import LocalTraining
from plugins.engines.simulation import Schedule, Simulation
from plugins.models import build

GUIDE = Path(__file__).parents[1] / "docs" / "adding_a_method.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
CLIENTS = [np.arange(0, 5), np.arange(5, 12), np.arange(12, 30)]


@pytest.fixture
def fedexp(monkeypatch: pytest.MonkeyPatch) -> type[Component]:
    """The guide's component, as a module of its own and registered under its name."""
    module = types.ModuleType("fedexp_of_the_guide")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(BLOCKS[0], str(GUIDE), "exec"), module.__dict__)
    found: type[Component] = module.__dict__["FedExP"]
    monkeypatch.setitem(recipes.METHODS, found.name, found)
    return found


def run(recipe: str, settings: recipes.Settings, engine: str, rounds: int = 2) -> Params:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, 2, 3, generator=generator, dtype=torch.float64)
    train = Samples(x, torch.randint(0, 3, (30,), generator=generator))
    network = build("mlp", (1, 2, 3), 3, {"hidden": 4})
    local = LocalTraining("sgd", lr=0.2, epochs=2, batch_size=4)
    simulation = Simulation(
        recipe, settings, network, train, CLIENTS, train, None, None, local, Schedule(rounds, 3, 0), engine=engine
    )
    return simulation.run().params


def test_the_row_of_the_table_runs_the_same_in_both_engines(fedexp: type[Component]) -> None:
    settings = ast.literal_eval(BLOCKS[1])
    assert list(settings) == [fedexp.name]
    sequential, vectorized = run("fedexp", settings, "sequential"), run("fedexp", settings, "vectorized")
    for key, leaf in sequential.items():
        torch.testing.assert_close(vectorized[key], leaf, rtol=1e-9, atol=1e-12)


def test_it_composes_with_what_is_there(fedexp: type[Component]) -> None:
    one, other = run("fedexp+fedprox", {}, "sequential"), run("fedprox+fedexp", {}, "sequential")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_its_step_is_the_papers(fedexp: type[Component]) -> None:
    """Two clients that moved by (3, 0) and (0, 4) from 0: mean (1.5, 2), length 2.5; mean square (9 + 16) / 2 = 12.5.

    eta_g = 12.5 / (2 (6.25 + 0.25)) = 0.9615, so at least 1; with (3, 0) and (-1, 0): mean 1, mean square 5,
    eta_g = 5 / (2 (1 + 0.25)) = 2.
    """
    from plugins.core.component import Reply, Update

    def step(moves: list[list[float]]) -> torch.Tensor:
        deltas = {"w": torch.tensor(moves, dtype=torch.float64)}
        ones = torch.ones(2)
        replies = Reply((0, 1), deltas, {}, {}, ones, ones, ones, {})
        update = Update(replies, deltas, torch.full((2,), 0.5, dtype=torch.float64), deltas, {})
        direction, _ = fedexp(eps=0.25).step({"w": deltas["w"].mean(0)}, {}, update)
        return direction["w"]

    torch.testing.assert_close(step([[3, 0], [0, 4]]), torch.tensor([1.5, 2.0], dtype=torch.float64))
    torch.testing.assert_close(step([[3, 0], [-1, 0]]), torch.tensor([2.0, 0.0], dtype=torch.float64))


def test_the_pair_is_made_by_name(fedexp: type[Component]) -> None:
    made: dict[str, type] = {}
    exec(BLOCKS[2], made)
    assert {made["FedExPTrainer"].recipe, made["FedExPAggregator"].recipe} == {"fedexp"}
