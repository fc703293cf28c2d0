"""What every method promises; walks the registry, so a new method is held to it without a new test."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plugins.core import client
from plugins.core.component import Server
from plugins.core.trees import Tree, flatten, sub, tree_map
from plugins.engines import sequential
from plugins.engines.simulation import desk, drive, initial_model
from plugins.recipes import METHODS
from tests import federation

EVERY = pytest.mark.parametrize("method", sorted(METHODS))
# Centralised training has one client whatever the cohort.
FEDERATED = pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if not kind.pools))

# Hyper-parameters with which a method is FedAvg, where mathematics says so: to the bit.
NEUTRAL: dict[str, dict[str, object]] = {
    "ccvr": {"epochs": 0},
    "datasharing": {"share": 0.0},
    "feddf": {"steps": 0},
    "fedftg": {"iterations": 0},
    "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    "fedlc": {"tau": 0.0, "absent": "floor"},
    "fedrs": {"alpha": 1.0},
    "moon": {"mu": 0.0},
    "sgdm": {"gamma": 0.0},
    "fednlr": {"mu0": 1.0, "a1": 0.0, "a2": 0.0},
    "fedprox": {"mu": 0.0},
    "fnr": {"p": 0.0},
    "rfedavg": {"lam": 0.0},
    "rfedavg_plus": {"lam": 0.0},
}


def shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {key: (leaf.shape, leaf.dtype) for key, leaf in flatten(tree).items()}


def frozen_copy(tree: Tree) -> Tree:
    return tree_map(torch.clone, tree)


def assert_equal(before: Tree, after: Tree, what: str) -> None:
    flat_before, flat_after = flatten(before), flatten(after)
    assert flat_before.keys() == flat_after.keys(), what
    for key, leaf in flat_before.items():
        assert torch.equal(leaf, flat_after[key]), f"{what}: {key} was changed in place"


@EVERY
def test_it_is_a_frozen_dataclass_without_a_tensor(method: str) -> None:
    (component,) = federation.simulation(method).algorithm.components
    fields = dataclasses.fields(component)
    assert fields, "a method without hyper-parameters would be an empty object"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(component, fields[0].name, 0)
    federation.simulation(method, engine="sequential").run()
    assert vars(component).keys() == {field.name for field in fields}, "nothing is kept on the object"
    assert all(isinstance(value, int | float | str | bool) for value in vars(component).values())
    hash(component)


@EVERY
def test_its_name_is_its_entry_and_its_module_names_a_source(method: str) -> None:
    kind = METHODS[method]
    assert kind.name == method
    assert kind.__name__.lower() == method.replace("_", ""), "the class carries the paper's name"
    source = sys.modules[kind.__module__].__doc__ or ""
    assert re.search(r"\b(19|20)\d\d\b", source), "the year"
    assert re.search(r"https?://", source), "the address"
    assert re.search(r"FedML pairs?", source)
    summary = kind.__doc__ or ""
    assert summary.endswith("."), "the class says what it does"
    assert not summary.startswith(f"{kind.__name__}("), "not what dataclass puts there"


@EVERY
def test_the_readme_has_a_line_with_its_source(method: str) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("|") and f"| `{method}` |" in line]
    source = sys.modules[METHODS[method].__module__].__doc__ or ""
    named = re.search(r"\]\((https?://[^)]+)\)", line)
    assert METHODS[method].pools if named is None else named[1] in source


@EVERY
@pytest.mark.parametrize("batch_norm", [False, True])
def test_state_and_memory_keep_structure_shapes_and_dtypes(method: str, batch_norm: bool) -> None:
    simulation = federation.simulation(method, batch_norm=batch_norm)
    before = shapes(simulation.server._asdict()), shapes(simulation.engine.clients.memory)
    simulation.run()
    assert (shapes(simulation.server._asdict()), shapes(simulation.engine.clients.memory)) == before


@FEDERATED
@pytest.mark.parametrize("batch_norm", [False, True])
def test_no_hook_changes_what_it_is_given(method: str, batch_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the client: model, buffers, messages and memory. On the server: model, buffers, state and replies."""

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(client, name)

        def watching(*args: Any) -> Any:
            trees = [tree for tree in args if isinstance(tree, dict)][:4]  # behind them, where to put the model
            before = [frozen_copy(tree) for tree in trees]
            answered = real(*args)
            for given, tree, copy in zip(("params", "buffers", "shared", "own"), trees, before, strict=True):
                assert_equal(copy, tree, f"{name}, client's {given}")
            return answered

        return watching

    for name in ("train", "further"):
        monkeypatch.setattr(sequential, name, watched(name))
    simulation = federation.simulation(method, batch_norm=batch_norm)
    replies: list[tuple[Tree, Tree]] = []

    def answer(ask: Any) -> Any:
        reply = simulation.engine.answer(ask, 1)
        tree = {"params": reply.params, "buffers": reply.buffers, "upload": reply.upload}
        kept = frozen_copy(tree)
        if ask.job == "train" and not any(c.reads_models for c in simulation.algorithm.components):
            kept["params"] = frozen_copy(sub(reply.params, ask.params))  # nobody reads them: they become differences
        replies.append((tree, kept))
        return reply

    server, of = simulation.server, federation.federation()
    at_hand = desk(simulation.engine.clients.task, of.public, 0, 1, of.train.x)
    for asks in (
        lambda server: simulation.algorithm.begin(server, tuple(range(6))),
        lambda server: simulation.algorithm.round(server, (0, 2, 3, 5), at_hand),
        lambda server: simulation.algorithm.round(server, (1, 2, 3, 4), at_hand),
        lambda server: simulation.algorithm.finish(server, server.params, tuple(range(6)), at_hand),
    ):
        before = frozen_copy(server._asdict())
        out = drive(asks(server), answer)
        assert_equal(before, server._asdict(), "server")
        server = out if isinstance(out, Server) else out[0]
        for tree, copy in replies:
            assert_equal(copy, tree, "reply")
        replies.clear()  # the next round's models are put in the same place


@EVERY
def test_a_run_repeats_to_the_bit(method: str) -> None:
    assert federation.equal(federation.run(method), federation.run(method))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", NEUTRAL)
def test_neutral_hyper_parameters_are_fedavg_to_the_bit(method: str, engine: str) -> None:
    for batch_norm in (False, True):
        plain = federation.run("fedavg", batch_norm=batch_norm, engine=engine)
        neutral = federation.run(method, {method: NEUTRAL[method]}, batch_norm=batch_norm, engine=engine)
        assert federation.equal_models(neutral, plain)


def test_scaffold_begins_as_uniform_fedavg() -> None:
    """c = c_i = 0 in round 1; with equal clients 1/M is n_k/n."""
    equal = federation.federation(sizes=(5, 5, 5, 5))
    a, b = (federation.run(recipe, of=equal, rounds=1, cohort=4) for recipe in ("scaffold", "fedavg"))
    assert federation.equal_models(a, b)


def test_ccn_of_a_single_client_is_fedavg() -> None:
    a, b = (federation.run(recipe, cohort=1) for recipe in ("ccn", "fedavg"))
    assert federation.equal_models(a, b)


def test_ccn_at_a_high_temperature_is_fedavg_to_rounding() -> None:
    """Lambda -> (R - 1) / R for everybody."""
    a = federation.run("ccn", {"ccn": {"T": 1e12}}, dtype=torch.float64)
    b = federation.run("fedavg", dtype=torch.float64)
    for key, leaf in b.params.items():
        torch.testing.assert_close(a.params[key], leaf, rtol=1e-10, atol=1e-12)


def test_fednnnn_evaluates_uniform_fedavg_in_its_first_round() -> None:
    """Step 4 is the plain average; with equal clients n_k/n is 1/m."""
    equal = federation.federation(sizes=(5, 5, 5, 5))
    a, b = (federation.run(recipe, of=equal, rounds=1, cohort=4) for recipe in ("fednnnn", "fedavg"))
    assert all(torch.equal(a.evaluated[key], b.params[key]) for key in b.params)


PAIRS = ["fedprox+fnr", "scaffold+ccn", "fednnnn+fednlr", "rfedavg_plus+fednnnn", "ccn+fednlr", "scaffold+fedprox"]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_order_of_a_recipe_does_not_matter(pair: str, engine: str) -> None:
    a, b = pair.split("+")
    runs = [federation.run(recipe, engine=engine, rounds=2) for recipe in (f"{a}+{b}", f"{b}+{a}")]
    assert federation.equal(*runs)


@FEDERATED
def test_the_numbering_of_the_clients_does_not_matter(method: str) -> None:
    """Everybody takes part with full batches, so ids are names. Up to rounding: sums run in the order of ids.

    FNR-FL refines everybody here, since it breaks ties by id; FedGen's clients draw noise by id, so not here.
    """
    special: Any = {
        "fnr": {"p": 1.0, "batch_size": 99},
        "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    }
    settings = {method: special[method]} if method in special else {}
    options: Any = {"dtype": torch.float64, "cohort": 6, "batch_size": 99, "batch_norm": True}
    ragged = federation.federation(torch.float64)
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = dataclasses.replace(ragged, clients=[ragged.clients[k] for k in order])
    a, b = (federation.run(method, settings, of=of, **options) for of in (ragged, permuted))
    for part in ("params", "evaluated", "buffers"):
        for key, leaf in getattr(a, part).items():
            torch.testing.assert_close(getattr(b, part)[key], leaf, rtol=1e-9, atol=1e-12)


@EVERY
def test_it_moves_buffers_by_averaging_only(method: str) -> None:
    """Batch norms' running statistics are no parameters: no control variate, norm or momentum touches them."""
    simulation = federation.simulation(method, batch_norm=True)
    _, buffers = initial_model(federation.network(True), 3, federation.federation().train.x)
    assert simulation.server.buffers.keys() == buffers.keys()
    # MOON's memory is a whole model, so it has buffers of its own.
    kept = {key: tree for key, tree in simulation.engine.clients.memory.items() if key != "moon"}
    keys = {key.rpartition("/")[2] for key in flatten({"state": simulation.server.state})}
    memory = {key.rpartition("/")[2] for key in flatten(kept)}
    assert not (keys | memory) & buffers.keys()
    out = simulation.run()
    assert all((out.buffers[key] >= 0).all() for key in buffers if key.endswith("var"))
