"""What every method promises, as checks: of the methods of this package, and of yours.

A check takes a recipe and the hyper-parameters of its methods. It raises AssertionError with what
is wrong, or the UserError with which the core refuses the method. NotTriedError says why a check
says nothing about a method.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

import numpy as np
import torch

from fedml_noniid.contract import federation
from fedml_noniid.core import training
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    BODY,
    MODELS,
    NORMS,
    V_BUFFERS,
    Ask,
    Client,
    Component,
    Needs,
    Public,
    Reply,
    Setting,
    overrides,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import fold, identity, step_key
from fedml_noniid.core.training import Views
from fedml_noniid.core.trees import Params, Tree, leaves, row, tree_map
from fedml_noniid.engines import local, sequential
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.personal import PERSONAL
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.engines.run import Outcome
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.engines.workers import Workers
from fedml_noniid.models import build
from fedml_noniid.models.model import Model
from fedml_noniid.plugins import registry

Settings = Mapping[str, Mapping[str, object]]  # method -> hyper-parameter -> value
ENGINES = ("sequential", "vectorized")
SETTING = Setting(n_clients=6, cohort=4, n_public=15)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
RESUMED_ROUNDS = 4


class NotTriedError(SkipTest):
    """Says why a check says nothing about a method. pytest shows it as a skipped test."""


def shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of every leaf."""
    return {key: (leaf.shape, leaf.dtype) for key, leaf in flatten(tree).items()}


def assert_unchanged(before: Tree, after: Tree, what: str) -> None:
    """AssertionError names the leaf that differs."""
    flat_before, flat_after = flatten(before), flatten(after)
    assert flat_before.keys() == flat_after.keys(), what
    for key, leaf in flat_before.items():
        assert torch.equal(leaf, flat_after[key]), f"{what}: {key} was changed in place"


def images_network(batch_norm: bool = True) -> Model:
    """rFedAvg's CNN in small."""
    options = {"channels": 2, "hidden": 4, "batch_norm": batch_norm}
    return build("cnn", (1, 6, 6), federation.N_CLASSES, options)


# The contract
# --------------------------------------------------------------------------------------------------


def keeps_its_state_and_repeats(recipe: str, settings: Settings) -> None:
    """Nothing is kept on the component, which is a frozen dataclass. State and memory keep their
    structure, shapes and dtypes. Batch norms' running statistics are no parameters: they are
    averaged only, and no control variate, norm or momentum has them. A run repeats to the bit."""
    simulation = federation.simulation(recipe, settings, batch_norm=True)
    (component,) = simulation.algorithm.components
    network = federation.network(federation.takes_norms(recipe, settings))
    _, buffers = initial_model(network, 3, federation.federation().train.x)
    kept_back = {NORMS, BODY} & simulation.algorithm.needs.personal
    averaged = set() if kept_back else buffers.keys()
    assert simulation.loop.state.buffers.keys() == averaged

    def kept() -> tuple[dict[str, Any], dict[str, Any]]:
        return shapes(simulation.loop.state._asdict()), shapes(
            simulation.engine.clients.memory.whole()
        )

    before = kept()
    # MOON's memory is a whole model. A model of clients' own has buffers in any case.
    whole = (PERSONAL, "moon", "buffers")
    own = {
        key.rpartition("/")[2]
        for tree in before
        for key in tree
        if not key.startswith(whole) and not {V_BUFFERS, MODELS} & {*key.split("/")}
    }
    statistics = sorted(own & buffers.keys())
    assert not statistics, f"state or memory has running statistics: {statistics}"
    out = simulation.run()
    assert kept() == before, "state or memory has another structure, shape or dtype after a run"
    assert all((out.buffers[key] >= 0).all() for key in buffers if key.endswith("var"))
    fields = {field.name for field in dataclasses.fields(component)}
    assert vars(component).keys() == fields, "the component keeps more than its hyper-parameters"
    for name, value in vars(component).items():
        for part in value if isinstance(value, tuple) else (value,):
            allowed = isinstance(part, int | float | str | bool)
            assert allowed, f"{name}: no number, word or flag, nor a tuple of these"
    hash(component)  # a dataclass that is not frozen has no hash
    again = federation.run(recipe, settings, batch_norm=True)
    assert federation.equal(out, again), "a second run has other bits"


def _given(*args: Any) -> Tree:
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


def _watched(name: str) -> Callable[..., Any]:
    """A function of the sequential engine that refuses changes of what it is given."""
    real = getattr(sequential, name)

    def watching(*args: Any) -> Any:
        trees = _given(*args[:5])  # behind them, where training puts the model
        before = tree_map(torch.clone, trees)
        answered = real(*args)
        assert_unchanged(before, trees, f"{name}, on the client")
        return answered

    return watching


def changes_nothing_that_it_is_given(recipe: str, settings: Settings) -> None:
    """No hook changes its inputs. On the client: model, buffers, messages and memory. On the
    server: model, buffers, state and replies. On both: samples."""
    data = federation.federation()
    assert data.public is not None
    samples = {
        "x": data.train.x,
        "y": data.train.y,
        "public": data.public.x,
        "labels": data.public.y,
    }
    clean = tree_map(torch.clone, samples)
    simulation = federation.simulation(recipe, settings, batch_norm=True, data=data)
    replies: list[tuple[Tree, Tree]] = []
    real = simulation.engine.answer

    def answer(ask: Ask, round_: int) -> Reply:
        reply = real(ask, round_)
        tree = {"deltas": reply.deltas, "buffers": reply.buffers, "upload": reply.upload}
        replies.append((tree, tree_map(torch.clone, tree)))
        return reply

    with (
        mock.patch.object(sequential, "train", _watched("train")),
        mock.patch.object(sequential, "answer", _watched("answer")),
        mock.patch.object(simulation.engine, "answer", answer),
    ):
        state = simulation.loop.state._asdict()
        before = tree_map(torch.clone, state)
        for _ in simulation.rounds():
            assert_unchanged(before, state, "server")
            for tree, copy in replies:
                assert_unchanged(copy, tree, "reply")
            replies.clear()  # the next round's updates are put in the same place
            state = simulation.loop.state._asdict()
            before = tree_map(torch.clone, state)
    assert_unchanged(clean, samples, "samples")


def draws_from_keys_of_its_own(kind: type[Component], others: Mapping[str, Any]) -> None:
    """No other method that it can be combined with draws the same random numbers.

    A variant draws what its method draws; the two do not compose.
    """
    for other in others.values():
        if other is not kind and identity(other()) == identity(kind()):
            try:
                Algorithm.compose([kind(), other()], SETTING)
            except RecipeError:
                continue
            raise AssertionError(f"draws the same random numbers as {other.name}")


def gradient_term_of_several_is_that_of_each(
    recipe: str, settings: Settings, batch_norm: bool = True
) -> None:
    """`gradient_term` is elementwise, to the bit: leaves [M, ...], rows of messages, memory and
    what was prepared."""
    most = [0]

    def watching(views: Views, w: Params) -> Params:
        for c, view in views.items():
            term = c.gradient_term(w, view)
            m = len(next(leaves(w)))
            most.append(m)
            for k in range(m):
                parts: dict[str, Any] = {
                    part: row(getattr(view, part), k) for part in ("each", "memory", "prepared")
                }
                term_of_k = c.gradient_term(row(w, k), dataclasses.replace(view, **parts))
                assert (term_of_k is None) is (term is None)
                for key, leaf in (term_of_k or {}).items():
                    # What is the same for all may come without the axis.
                    of_all = torch.broadcast_to((term or {})[key], w[key].shape)
                    assert torch.equal(of_all[k], torch.broadcast_to(leaf, w[key].shape[1:])), key
        return training.term(views, w)

    _refuse_without(recipe, settings, "gradient_term")
    how: dict[str, Any] = {"engine": "vectorized", "batch_norm": batch_norm, "cohort": 6}
    with mock.patch.object(local, "term", watching):
        federation.run(recipe, settings, **how)
    assert max(most) > 1


def update_factor_is_a_number_per_row(recipe: str, settings: Settings) -> None:
    """`update_factor` has one number for each row (neuron) of a parameter."""
    factors: list[Params] = []

    def watching(views: Views) -> Params:
        for c, view in views.items():
            factors.append(c.update_factor(view) or {})
            for name, rows in factors[-1].items():
                assert rows.shape == view.params[name].shape[:1], f"{name}: {[*rows.shape]}"
        return training.factor(views)

    _refuse_without(recipe, settings, "update_factor")
    with mock.patch.object(local, "factor", watching):
        federation.run(recipe, settings, batch_norm=True)
    assert any(factors)


def _refuse_without(recipe: str, settings: Settings, hook: str) -> None:
    """NotTriedError if no component brings a hook."""
    components = registry.build(recipe, settings, SETTING).components
    if not any(overrides(c, hook) for c in components):
        raise NotTriedError(f"it has no {hook}")


def numbering_does_not_matter(recipe: str, settings: Settings) -> None:
    """Ids of clients are names: everybody takes part with full batches. Up to rounding, as sums run
    in the order of ids."""
    options: Any = {"dtype": torch.float64, "cohort": 6, "batch_size": 99, "batch_norm": True}
    ragged = federation.federation(torch.float64)
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = dataclasses.replace(ragged, clients=[ragged.clients[k] for k in order])
    a, b = (federation.run(recipe, settings, data=data, **options) for data in (ragged, permuted))
    for part in ("params", "evaluated", "buffers"):
        for key, leaf in getattr(a, part).items():
            torch.testing.assert_close(getattr(b, part)[key], leaf, rtol=1e-9, atol=1e-12)


def draws_for_clients(recipe: str, settings: Settings) -> bool:
    """Whether a component reads a random key that goes by the client's number: of a client, or of
    one of its batches."""
    reads: list[str] = []

    def of_client(client: Client) -> torch.Tensor:
        reads.append("client.key")
        return fold(client.keys, client.scope)

    def of_batch(batch: Batch) -> torch.Tensor | None:
        reads.append("batch.key")
        return batch.keys if batch.keys is None else step_key(batch.keys, batch.step, batch.scope)

    with (
        mock.patch.object(Client, "key", property(of_client)),
        mock.patch.object(Batch, "key", property(of_batch)),
    ):
        federation.run(recipe, settings)
    return bool(reads)


# Neutral hyper-parameters, and composition
# --------------------------------------------------------------------------------------------------


@functools.cache
def _fedavg(batch_norm: bool, engine: str = "sequential") -> Outcome:
    """The run that others are compared with."""
    return federation.run("fedavg", batch_norm=batch_norm, engine=engine)


def neutral_is_fedavg(recipe: str, settings: Settings, engine: str) -> None:
    """With these hyper-parameters, a run has FedAvg's bits, with batch norm and without."""
    for batch_norm in (False, True):
        plain = _fedavg(batch_norm, engine)
        neutral = federation.run(recipe, settings, batch_norm=batch_norm, engine=engine)
        assert federation.equal_models(neutral, plain), f"{engine}: not FedAvg's bits"


def does_something(recipe: str, settings: Settings) -> None:
    """With these hyper-parameters, a run differs from FedAvg's, with batch norm or without: other
    checks would say nothing."""
    for batch_norm in (False, True):
        plain = _fedavg(batch_norm)
        out = federation.run(recipe, settings, batch_norm=batch_norm)
        if not federation.equal_models(out, plain):
            return
        own: Params = out.personal.get("params", {})  # with the global model of FedAvg
        if any(
            not torch.equal(leaf[k], plain.params[name])
            for name, leaf in own.items()
            for k in range(len(leaf))
        ):
            return
    raise AssertionError("these hyper-parameters give FedAvg; choose some with a visible effect")


def order_and_names_do_not_matter(recipe: str, settings: Settings, engine: str) -> None:
    """A recipe is a set, to the bit: neither shuffled, nor with other names, which sort in another
    order."""
    methods, values = list(registry.parse(recipe)), {**settings}
    kinds_of = {name: registry.method(name) for name in methods}
    how: dict[str, Any] = {"engine": engine, "rounds": 2, "batch_norm": True}
    plain = federation.run(recipe, values, **how)
    shuffled = random.Random(len(recipe)).sample(methods, len(methods))
    renamed = {f"{chr(ord('z') - i)}{i}": kinds_of[method] for i, method in enumerate(shuffled)}
    for kinds in ({}, renamed):
        values |= {name: settings.get(kind.name, {}) for name, kind in kinds.items()}
        with mock.patch.dict(registry.METHODS, {**_called(kinds)}):
            for order in (list(kinds) or methods)[::-1], list(kinds) or shuffled:
                used = {name: values[name] for name in order if name in values}
                again = federation.run("+".join(order), used, **how)
                assert federation.equal_models(again, plain), f"{engine}: {'+'.join(order)}"


def _called(kinds: Mapping[str, type[Component]]) -> dict[str, type[Component]]:
    """The same methods under other names."""
    return {
        name: type(kind.__name__, (kind,), {"name": name, "__module__": kind.__module__})
        for name, kind in kinds.items()
    }


def order_decides_about_rounding_only(recipe: str, settings: Settings, engine: str) -> None:
    """The same up to rounding without the sort of `compose`."""

    def ran(order: Callable[[tuple[Component, ...]], tuple[Component, ...]]) -> Simulation:
        simulation = federation.simulation(
            recipe, settings, engine=engine, rounds=2, batch_norm=True, dtype=torch.float64
        )
        algorithm = Algorithm(order(simulation.algorithm.components), simulation.algorithm.setting)
        simulation.algorithm = simulation.loop.algorithm = simulation.engine.clients.algorithm = (
            algorithm
        )
        simulation.run()
        return simulation

    plain = flatten(ran(lambda components: components).loop.state._asdict())
    for order in (lambda seen: seen[::-1], lambda seen: (*seen[2:], *seen[:2])):
        again = flatten(ran(order).loop.state._asdict())
        for key, leaf in plain.items():
            torch.testing.assert_close(again[key], leaf, rtol=1e-12, atol=1e-12, msg=key)


# Needs and claims
# --------------------------------------------------------------------------------------------------


def reads_what_it_needs(recipe: str, settings: Settings) -> None:
    """A method declares what it reads, and owns what it changes: the core refuses it otherwise.

    What it declares, it reads: a pass over local data that nobody reads costs time.
    """
    for engine in ENGINES:
        federation.run(recipe, settings, engine=engine)
    (component,) = registry.build(recipe, settings, SETTING).components
    needs = component.needs
    read = {
        "local_set": needs.local_set,
        "gradient": needs.gradient,
        "loss": needs.loss,
        # A shared part of it is read by the runtime.
        "public": needs.public in (Public.UNLABELLED, Public.LABELLED) and not needs.shared,
    }
    for need in [name for name, declared in read.items() if declared]:
        less = dataclasses.replace(needs, **{need: getattr(Needs(), need)})
        name = component.name
        members = {"name": name, "__module__": type(component).__module__, "needs": less}
        kind = type(type(component).__name__, (type(component),), members)
        with mock.patch.dict(registry.METHODS, {name: kind}):
            try:
                federation.run(name, settings)
            except RecipeError:
                continue
        raise AssertionError(f"declares Needs({need}=...) and reads nothing of it; drop it")


# Runtimes
# --------------------------------------------------------------------------------------------------


def close(got: Params, wanted: Params, rtol: float) -> None:
    """AssertionError unless two trees agree, relative to the largest number of a tensor: single
    weights pass through zero."""
    assert got.keys() == wanted.keys()
    for key, leaf in wanted.items():
        assert got[key].dtype == leaf.dtype
        torch.testing.assert_close(
            got[key], leaf, rtol=rtol, atol=rtol * leaf.abs().max().item(), msg=key
        )


def close_together(got: Params, wanted: Params, rtol: float) -> None:
    """The same, relative to the largest number of all: the gradient of a bias before a batch norm
    is nothing but rounding."""
    assert got.keys() == wanted.keys()
    largest = max((leaf.abs().max().item() for leaf in wanted.values()), default=0.0)
    for key, leaf in wanted.items():
        torch.testing.assert_close(got[key], leaf, rtol=rtol, atol=rtol * largest, msg=key)


def engines_agree(
    recipe: str,
    settings: Settings,
    dtype: torch.dtype = torch.float64,
    batch_norm: bool = True,
    rounds: int = federation.ROUNDS,
    **options: Any,
) -> None:
    """The vectorized engine equals the sequential one within rounding, on ragged clients.

    Four of six clients a round; 1 to 12 samples, so 1 to 3 steps, and short last batches.
    `options`: of the simulation.
    """
    outcomes: list[Outcome] = []
    states: list[Params] = []
    how = {"dtype": dtype, "batch_norm": batch_norm, "epochs": 1, "rounds": rounds, **options}
    for engine in ENGINES:
        simulation = federation.simulation(recipe, settings, engine=engine, **how)
        outcomes.append(simulation.run())
        memory = simulation.engine.clients.memory.whole()
        states.append(flatten({"state": simulation.loop.state.slices, "memory": memory}))
    a, b = outcomes
    rtol = TOLERANCE[dtype]
    for part in ("params", "evaluated", "buffers"):
        close(getattr(b, part), getattr(a, part), rtol)
    close_together(states[1], states[0], rtol)
    assert bool(a.buffers) is (batch_norm and federation.takes_norms(recipe, settings))
    for mine, other in zip(a.rows, b.rows, strict=True):
        assert (mine["bytes_up"], mine["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        for key in ("local_loss", "update_norm_client", "update_norm_server", "test_loss"):
            np.testing.assert_allclose(
                other[key], mine[key], rtol=rtol, atol=1e-12, err_msg=key, equal_nan=False
            )
    assert b.tensors.keys() == a.tensors.keys()
    for key, leaf in a.tensors.items():
        torch.testing.assert_close(
            b.tensors[key], leaf, rtol=1e-6, atol=1e-9, equal_nan=True, msg=key
        )


def engines_agree_on_images(
    recipe: str, settings: Settings, images: federation.Federation | None = None
) -> None:
    """The same with convolutions: weights, and every quantity that methods measure and observe."""
    model = images_network(federation.takes_norms(recipe, settings))
    data = images or federation.images()
    engines_agree(recipe, settings, rounds=2, epochs=2, data=data, model=model, observing=True)


def processes_agree(recipe: str, settings: Settings, folder: Path, processes: int = 2) -> None:
    """Several processes have the bits of one, also where the last rounds are those of a resumed
    run, whose memories come from the checkpoint."""
    path = folder / "checkpoint.safetensors"
    network = build("cnn", (1, 6, 6), federation.N_CLASSES, {"channels": 2, "hidden": 4})

    def made(workers: int, **more: Any) -> Simulation:
        options: dict[str, Any] = {"data": federation.images(torch.float32), "model": network}
        return federation.simulation(recipe, settings, workers=workers, **options, **more)

    next(made(3, checkpoint=path).rounds())
    several = made(processes, checkpoint=path)
    assert several.start_round == 1
    if several.algorithm.needs.pooled:
        raise NotTriedError("there is one client")
    if not isinstance(several.engine, Workers):
        raise NotTriedError("this process can't be forked: autograd has threads")
    assert several.engine.processes == min(processes, 4)
    assert federation.equal_models(several.run(), made(1).run()), "not the bits of one process"


def resumes(recipe: str, settings: Settings, engine: str, folder: Path) -> None:
    """A run that ended after any round goes on to the same bits: weights, evaluated weights,
    buffers, and all rows but their seconds; two of the rows have no accuracy."""
    options: dict[str, Any] = {
        "batch_norm": True,
        "engine": engine,
        "evaluate_every": 2,
        "fingerprint": "f",
        "rounds": RESUMED_ROUNDS,
    }
    path = folder / "run.safetensors"
    simulation = federation.simulation(recipe, settings, checkpoint=path, **options)
    for line in simulation.rounds():
        for file in (path, path.with_suffix(".rounds")):
            file.with_stem(str(int(line["round"]))).write_bytes(file.read_bytes())
    undisturbed = simulation.outcome
    plain = federation.run(recipe, settings, **options)
    assert federation.equal(undisturbed, plain), "saving changes the run"
    for done in range(1, RESUMED_ROUNDS + 1):
        resumed = federation.simulation(
            recipe, settings, checkpoint=folder / f"{done}.safetensors", **options
        )
        assert resumed.start_round == done
        out = resumed.run()
        assert [line["round"] for line in out.rows] == [1, 2, 3, 4]
        assert federation.equal(out, undisturbed), f"resumed after round {done}: other bits"


def composes_or_is_refused(recipe: str, other: str, settings: Settings) -> bool:
    """Whether two methods compose. If they do, their order does not matter; if not, the error names
    both and why."""
    together = f"{recipe}+{other}"
    try:
        registry.build(together, settings, SETTING)
        # Some pairs are known by what they send.
        order_and_names_do_not_matter(together, settings, "sequential")
    except UserError as refusal:
        named = {*registry.parse(recipe), *registry.parse(other)}
        if not all(repr(name) in str(refusal) for name in named):
            raise AssertionError(str(refusal)) from refusal
        return False
    order_decides_about_rounding_only(together, settings, "sequential")
    return True
