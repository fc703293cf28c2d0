"""Steps in graphs: the same results as steps that run one by one, no host in a step, and what is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_budget import SMALL, of_round, per_step
from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.baselines.fedprox import FedProx
from fedml_noniid.plugins.core.component import Client, Setting, overrides
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.optimizers import SGD
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.core.trees import Params, tree_map
from fedml_noniid.plugins.engines.cuda_graphs import CudaGraphs, graphs_for
from fedml_noniid.plugins.engines.plan import LocalTraining
from fedml_noniid.plugins.engines.run import Outcome
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.models import build
from tests import federation
from tests.engines.recording import HostGraphs
from tests.recipe_table import ALONE

IN_STEPS = (
    "warm_start",
    "update_factor",
    "penalty",
    "logits",
    "gradient_term",
    "own_model",
)  # the hooks that a step runs or reads


def changes_steps(entry: str) -> bool:
    """Whether a step of the recipe differs from FedAvg's."""
    made = recipes.build(*ALONE[entry], Setting(6, 4, "sgd", 0.1, 15, False))
    task = Task(federation.network(), SGD(0.1))
    hooks = any(overrides(component, hook) for component in made.components for hook in IN_STEPS)
    return hooks or made.needs.last_epoch or made.needs.personal or made.prepared(task) != task


# In the sequential engine a step's shape depends on its batch: what comes only here is tested with
# a few recipes.
FEW = ("fedavg", "fedgen", "moon", "scaffold", "ccn,z_time=last_epoch_running")
WAYS = [
    *((entry, "vectorized") for entry in ALONE if entry == "fedavg" or changes_steps(entry)),
    *((entry, "sequential") for entry in FEW),
]


def simulation(entry: str, engine: str, **options: Any) -> Simulation:
    recipe, settings = ALONE[entry]
    given: dict[str, Any] = {
        "dtype": torch.float64,
        "batch_norm": True,
        "epochs": 3,
        "rounds": 2,
    } | options
    return federation.simulation(recipe, settings, engine=engine, **given)


def recorded(made: Simulation) -> tuple[Outcome, HostGraphs]:
    tape = made.engine.clients.graphs = HostGraphs()
    return made.run(), tape


def same(found: Outcome, wanted: Outcome) -> None:
    """The weights to the bit. The losses of a training are added up in another order."""
    assert federation.equal_models(found, wanted)
    for mine, other in zip(found.rows, wanted.rows, strict=True):
        assert mine.keys() == other.keys()
        for key in mine.keys() - {"seconds"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-12, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize(("entry", "engine"), WAYS)
def test_replayed_steps_end_with_the_same_bits(entry: str, engine: str) -> None:
    """Clients with 1 to 12 samples, batches of 4, three epochs: full batches and short ones, masks,
    missing steps."""
    found, tape = recorded(simulation(entry, engine))
    same(found, simulation(entry, engine).run())
    assert 0 < tape.recorded < tape.replays


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_a_step_draws_is_drawn_for_each_replay(engine: str) -> None:
    """Dropout draws ahead.

    Crops and flips are drawn in the step, from its number, which is on the device.
    """
    options: dict[str, Any] = {
        "of": federation.images(),
        "model": build("pfl_cnn", (1, 6, 6), 3),
        "augment": True,
    }
    found, tape = recorded(simulation("fedavg", engine, **options))
    same(found, simulation("fedavg", engine, **options).run())
    assert 0 < tape.recorded < tape.replays


def test_too_few_steps_are_not_recorded() -> None:
    """One epoch has at most three steps, and the last is shorter for all clients but the one of 12
    samples."""
    found, tape = recorded(simulation("fedavg", "sequential", epochs=1, cohort=6, rounds=1))
    same(found, simulation("fedavg", "sequential", epochs=1, cohort=6, rounds=1).run())
    assert (tape.recorded, tape.replays) == (1, 2)


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """FedProx with a change to what it adds to the gradient."""
    term = FedProx.gradient_term

    def gradient_term(self: FedProx, w: Params, client: Client) -> Params:
        return tree_map(change, term(self, w, client))

    monkeypatch.setattr(FedProx, "gradient_term", gradient_term)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_replay_runs_no_python(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a hook that counts its calls gives other weights, and the tests above would notice."""
    calls: list[int] = []

    def count(leaf: Tensor) -> Tensor:
        calls.append(1)
        return leaf + 1e-3 * len(calls)

    changed(monkeypatch, count)
    found, _ = recorded(simulation("fedprox", engine))
    calls.clear()
    assert not federation.equal_models(found, simulation("fedprox", engine).run())


@pytest.mark.parametrize("entry", [entry for entry, engine in WAYS if engine == "vectorized"])
def test_no_step_needs_the_host(entry: str) -> None:
    """On a fake GPU, where a wait or a copy raises while a step is recorded.

    Of three steps, two are replays.
    """
    recipe, settings = ALONE[entry]
    cost = of_round(recipe, settings, "vectorized", SMALL, 3, cuda_graphs=True)
    assert cost.replays == 2
    assert not any("captured" in place for place in cost.waits)


@pytest.mark.parametrize(
    ("entry", "engine"),
    [("fedavg", "sequential"), ("fedavg", "vectorized"), ("moon", "vectorized")],
)
def test_a_replayed_step_is_one_launch(entry: str, engine: str) -> None:
    recipe, settings = ALONE[entry]
    assert per_step(recipe, settings, engine, SMALL, cuda_graphs=True) == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda leaf: leaf * leaf.sum().item(), "a wait"),
        (lambda leaf: leaf if leaf.sum() > 0 else 2 * leaf, "a wait"),
        (lambda leaf: leaf * len(torch.nonzero(leaf)), "a wait"),
        (lambda leaf: leaf.cpu().to(leaf.device), "a copy to the host"),
        (lambda leaf: leaf + torch.ones(leaf.shape).to(leaf.device), "a copy from the host"),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_method_that_needs_the_host_is_refused(
    engine: str, change: Callable[[Tensor], Tensor], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, change)
    recipe, settings = ALONE["fedprox"]
    said = (
        rf"cuda_graphs = true is refused: a step can't be recorded \({what} at .*\); allowed: false"
    )
    with pytest.raises(UserError, match=said):
        of_round(recipe, settings, engine, SMALL, 8, cuda_graphs=True)


def test_where_there_are_no_graphs_they_are_refused() -> None:
    local = LocalTraining(lr=0.1, epochs=1, batch_size=4, cuda_graphs=True)
    words = "cuda_graphs = true needs device cuda, the device is cpu; allowed: false"
    with pytest.raises(UserError, match=words):
        local.check((6,), torch.device("cpu"))
    with pytest.raises(UserError, match="cuda_graphs = true is refused for model 'lstm'"):
        graphs_for(build("lstm", (5,), 2, embedding=torch.zeros(9, 4)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("entry", "engine"), WAYS)
def test_a_gpu_replays_what_it_would_compute(entry: str, engine: str) -> None:
    of = federation.federation(torch.float64)
    parts = (
        part._replace(x=part.x.cuda(), y=part.y.cuda())
        for part in (of.train, of.test, of.public)
        if part
    )
    train, test, public = parts
    on_gpu = federation.Federation(train, of.clients, test, public)
    made = simulation(entry, engine, of=on_gpu)
    made.engine.clients.graphs = CudaGraphs()
    found, wanted = made.run(), simulation(entry, engine, of=on_gpu).run()
    for key, leaf in wanted.params.items():
        torch.testing.assert_close(found.params[key], leaf, rtol=1e-9, atol=1e-12)
