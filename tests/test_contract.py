"""What every method promises; walks the registry, so a new method is held to it without a new
test."""

from __future__ import annotations

import dataclasses
import random
import re
import sys
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core import training
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Ask, Client, Component, Reply, Setting, overrides
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.randomness import identity
from fedml_noniid.plugins.core.training import Views
from fedml_noniid.plugins.core.trees import Params, Tree, leaves, row, tree_map
from fedml_noniid.plugins.engines import local, sequential
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.personal import PERSONAL
from fedml_noniid.plugins.engines.plan import initial_model
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.recipes import METHODS
from tests import federation
from tests.recipe_table import ALONE, PARAMETERS, settings

EVERY = pytest.mark.parametrize("method", sorted(METHODS))
POOLED = {
    name for name, kind in METHODS.items() if kind().needs.pooled
}  # one client, whatever the cohort
FEDERATED = pytest.mark.parametrize("method", sorted(METHODS.keys() - POOLED))
ENGINES = pytest.mark.parametrize("engine", ["sequential", "vectorized"])

# Hyper-parameters with which a method is FedAvg, where mathematics says so: to the bit.
NEUTRAL: dict[str, dict[str, object]] = {
    "ccvr": {"epochs": 0},
    "datasharing": {"share": 0.0},
    "fedavgm": {"beta": 0.0},
    "fedcm": {"alpha": 1.0, "weights": "size"},
    "feddecorr": {"beta": 0.0},
    "feddf": {"steps": 0},
    "fedexp": {"eps": 1e30, "weights": "size", "evaluate": "sent"},
    "fedftg": {"iterations": 0},
    "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    "fedlc": {"tau": 0.0, "absent": "floor"},
    "fedntd": {"beta": 0.0},
    "fedrs": {"alpha": 1.0},
    "moon": {"mu": 0.0},
    "sgdm": {"gamma": 0.0},
    "sgdm_local": {"gamma": 0.0},
    "sgdm_server": {"gamma": 0.0},
    "fednlr": {"mu0": 1.0, "a1": 0.0, "a2": 0.0},
    "fedprox": {"mu": 0.0},
    "fnr": {"p": 0.0},
    "fnr_authors": {"p": 0.0, "fnr_mode": "eval"},  # "train" leaves other running statistics
    "rfedavg": {"lam": 0.0},
    "rfedavg_authors": {"lam": 0.0, "weights": "size"},
    "rfedavg_plus": {"lam": 0.0},
    "rfedavg_plus_authors": {"lam": 0.0, "weights": "size"},
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
def test_a_run_keeps_what_it_may_and_repeats_to_the_bit(method: str) -> None:
    """Nothing on the component, which is a frozen dataclass; structure, shapes and dtypes of state
    and memory. Batch norms' running statistics are no parameters: they are averaged only, and no
    control variate, norm or momentum has them."""
    simulation = federation.simulation(method, settings(method), batch_norm=True)
    (component,) = simulation.algorithm.components
    with pytest.raises(dataclasses.FrozenInstanceError):
        component.name = ""
    _, buffers = initial_model(federation.network(True), 3, federation.federation().train.x)
    averaged = set() if simulation.algorithm.needs.personal_norms else buffers.keys()
    assert simulation.loop.state.buffers.keys() == averaged

    def kept() -> tuple[dict[str, Any], dict[str, Any]]:
        return shapes(simulation.loop.state._asdict()), shapes(simulation.engine.clients.memory)

    before = kept()
    # MOON's memory is a whole model. What a client keeps to itself has buffers in any case.
    whole = (PERSONAL, "moon", "buffers")
    own = {key.rpartition("/")[2] for tree in before for key in tree if not key.startswith(whole)}
    assert not own & buffers.keys()
    out = simulation.run()
    assert kept() == before
    assert all((out.buffers[key] >= 0).all() for key in buffers if key.endswith("var"))
    assert vars(component).keys() == {field.name for field in dataclasses.fields(component)}
    assert all(isinstance(value, int | float | str | bool) for value in vars(component).values())
    hash(component)
    assert federation.equal(out, federation.run(method, settings(method), batch_norm=True))


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


def given(*args: Any) -> Tree:
    """The trees that a client is given."""
    trees: Tree = {}
    for arg in args:
        if isinstance(arg, dict):
            trees["own"] = {key: leaf for key, leaf in arg.items() if key != "key"}
        elif isinstance(arg, Ask):
            trees["ask"] = {
                key: getattr(arg, key) for key in ("params", "buffers", "shared", "each")
            }
        elif isinstance(arg, Client):
            trees["client"] = {"params": arg.params, "buffers": arg.buffers}
    return trees


@FEDERATED
def test_no_hook_changes_what_it_is_given(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the client: model, buffers, messages and memory.

    On the server: model, buffers, state and replies. On both: samples."""

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(sequential, name)

        def watching(*args: Any) -> Any:
            found = given(*args[:5])  # behind them, where training puts the model
            before = frozen_copy(found)
            answered = real(*args)
            assert_equal(before, found, f"{name}, on the client")
            return answered

        return watching

    for name in ("train", "answer"):
        monkeypatch.setattr(sequential, name, watched(name))
    of = federation.federation()
    samples = {"x": of.train.x, "y": of.train.y, "public": of.public.x, "labels": of.public.y}
    clean = frozen_copy(samples)
    simulation = federation.simulation(method, settings(method), batch_norm=True, of=of)
    replies: list[tuple[Tree, Tree]] = []
    real = simulation.engine.answer

    def answer(ask: Ask, round_: int) -> Reply:
        reply = real(ask, round_)
        tree = {"deltas": reply.deltas, "buffers": reply.buffers, "upload": reply.upload}
        replies.append((tree, frozen_copy(tree)))
        return reply

    monkeypatch.setattr(simulation.engine, "answer", answer)
    state = simulation.loop.state._asdict()
    before = frozen_copy(state)
    for _ in simulation.rounds():
        assert_equal(before, state, "server")
        for tree, copy in replies:
            assert_equal(copy, tree, "reply")
        replies.clear()  # the next round's updates are put in the same place
        state = simulation.loop.state._asdict()
        before = frozen_copy(state)
    assert_equal(clean, samples, "samples")


@ENGINES
@pytest.mark.parametrize("method", NEUTRAL)
def test_neutral_hyper_parameters_are_fedavg_to_the_bit(method: str, engine: str) -> None:
    given = {method: PARAMETERS.get(method, {}) | NEUTRAL[method]}
    for batch_norm in (False, True):
        plain = federation.run("fedavg", batch_norm=batch_norm, engine=engine)
        neutral = federation.run(method, given, batch_norm=batch_norm, engine=engine)
        assert federation.equal_models(neutral, plain)


def test_scaffold_begins_as_uniform_fedavg() -> None:
    """c = c_i = 0 in round 1; with equal clients 1/M is n_k/n."""
    equal = federation.federation(sizes=(5, 5, 5, 5))
    a, b = (
        federation.run(recipe, of=equal, rounds=1, cohort=4) for recipe in ("scaffold", "fedavg")
    )
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
    a, b = (
        federation.run(recipe, of=equal, rounds=1, cohort=4) for recipe in ("fednnnn", "fedavg")
    )
    assert all(torch.equal(a.evaluated[key], b.params[key]) for key in b.params)


PAIRS = [
    "fedprox+fnr",
    "scaffold+ccn",
    "fednnnn+fednlr",
    "rfedavg_plus+fednnnn",
    "ccn+fednlr",
    "scaffold+fedprox",
]
LONG = [
    "scaffold+fnr+ccn+fednlr+moon",
    "fedgen+fedprox+fedlc+fednnnn+rfedavg_plus+datasharing",
    "feddyn+fedftg+fednlr+rfedavg+ccn",
]  # three of whose methods draw numbers


@ENGINES
@pytest.mark.parametrize("recipe", [*PAIRS, *LONG])
def test_order_and_names_of_a_recipe_do_not_matter(
    recipe: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: neither shuffled, nor with other names, which sort in another order."""
    methods, given = recipe.split("+"), settings(recipe)
    plain = federation.run(recipe, given, engine=engine, rounds=2, batch_norm=True)
    shuffled = random.Random(len(recipe)).sample(methods, len(methods))
    for kinds in (
        {},
        {f"{chr(ord('z') - i)}{i}": METHODS[method] for i, method in enumerate(shuffled)},
    ):
        given |= {name: PARAMETERS[kind.name] for name, kind in kinds.items()}
        for name, kind in kinds.items():
            renamed = type(kind.__name__, (kind,), {"name": name, "__module__": kind.__module__})
            monkeypatch.setitem(METHODS, name, renamed)
        for order in (list(kinds) or methods)[::-1], list(kinds) or shuffled:
            used = {name: given[name] for name in order if name in given}
            again = federation.run("+".join(order), used, engine=engine, rounds=2, batch_norm=True)
            assert federation.equal_models(again, plain)


@ENGINES
@pytest.mark.parametrize("recipe", LONG)
def test_the_order_of_components_decides_about_rounding_only(recipe: str, engine: str) -> None:
    """Without the sort of `compose`."""

    def ran(order: Callable[[tuple[Component, ...]], tuple[Component, ...]]) -> Simulation:
        simulation = federation.simulation(
            recipe, settings(recipe), engine=engine, rounds=2, batch_norm=True, dtype=torch.float64
        )
        algorithm = Algorithm(order(simulation.algorithm.components), simulation.algorithm.setting)
        simulation.algorithm = simulation.loop.algorithm = simulation.engine.clients.algorithm = (
            algorithm
        )
        simulation.run()
        return simulation

    plain = flatten(ran(lambda components: components).loop.state._asdict())
    for order in (lambda found: found[::-1], lambda found: (*found[2:], *found[:2])):
        again = flatten(ran(order).loop.state._asdict())
        for key, leaf in plain.items():
            torch.testing.assert_close(again[key], leaf, rtol=1e-12, atol=1e-12, msg=key)


def test_no_two_components_of_a_recipe_draw_from_one_key() -> None:
    """A variant draws what its method draws; the two do not compose."""
    assert (
        identity(METHODS["fnr_authors"]())
        == identity(METHODS["fnr"]())
        != identity(METHODS["ccvr"]())
    )
    for a, b in combinations(METHODS.values(), 2):
        if identity(a()) == identity(b()):
            with pytest.raises(RecipeError, match="can't be combined"):
                Algorithm.compose([a(), b()], Setting(6, 4))


def alone(hook: str) -> Any:
    """The entries of the table whose method brings its own `hook`."""
    return pytest.mark.parametrize(
        "entry",
        [
            e
            for e, (method, _) in ALONE.items()
            if method != "fedavg" and overrides(METHODS[method](), hook)
        ],
    )


@alone("gradient_term")
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_gradient_term_of_several_clients_is_that_of_each(
    entry: str, batch_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: leaves [M, ...], rows of messages, memory and what was prepared."""
    most: list[int] = []

    def watching(views: Views, w: Params) -> Params:
        for c, view in views.items():
            found = c.gradient_term(w, view)
            m = len(next(leaves(w)))
            most.append(m)
            for k in range(m):
                parts = {
                    part: row(getattr(view, part), k) for part in ("each", "memory", "prepared")
                }
                one = c.gradient_term(row(w, k), dataclasses.replace(view, **parts))
                assert (one is None) is (found is None)
                for key, leaf in (one or {}).items():
                    # What is the same for all may come without the axis.
                    of_all = torch.broadcast_to((found or {})[key], w[key].shape)
                    assert torch.equal(of_all[k], torch.broadcast_to(leaf, w[key].shape[1:])), key
        return training.term(views, w)

    monkeypatch.setattr(local, "term", watching)
    federation.run(*ALONE[entry], engine="vectorized", batch_norm=batch_norm, cohort=6)
    assert max(most) > 1


@alone("update_factor")
def test_an_update_factor_is_one_number_per_row(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Params] = []

    def watching(views: Views) -> Params:
        for c, view in views.items():
            found.append(c.update_factor(view) or {})
            assert all(
                rows.shape == view.params[name].shape[:1] for name, rows in found[-1].items()
            )
        return training.factor(views)

    monkeypatch.setattr(local, "factor", watching)
    federation.run(*ALONE[entry], batch_norm=True)
    assert any(found)


@FEDERATED
def test_the_numbering_of_the_clients_does_not_matter(method: str) -> None:
    """Everybody takes part with full batches, so ids are names.

    Up to rounding: sums run in the order of ids.

    FNR-FL refines everybody here, since it breaks ties by id; FedGen's clients draw noise by id, so
    not here.
    """
    special: Any = {
        "feddf": {"steps": 2, "server_lr": 1e-5},
        "fnr": {"p": 1.0, "batch_size": 99},
        "fnr_authors": {
            "p": 1.0,
            "batch_size": 99,
            "refine_optimizer": "same",
        },  # Adam makes steps of rounding
        "fedgen": {"generative_alpha": 0.0, "generative_beta": 0.0},
    }
    given = {method: special[method]} if method in special else {}
    options: Any = {"dtype": torch.float64, "cohort": 6, "batch_size": 99, "batch_norm": True}
    ragged = federation.federation(torch.float64)
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = dataclasses.replace(ragged, clients=[ragged.clients[k] for k in order])
    a, b = (federation.run(method, given, of=of, **options) for of in (ragged, permuted))
    for part in ("params", "evaluated", "buffers"):
        for key, leaf in getattr(a, part).items():
            torch.testing.assert_close(getattr(b, part)[key], leaf, rtol=1e-9, atol=1e-12)
