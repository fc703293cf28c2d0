"""Sends every number of every upload: some are refused by silo, and the server's arithmetic bears
all others.

Without FedML and without a network, so that every method can go through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.errors import NonFiniteError
from fedml_noniid.data.batches import epochs
from fedml_noniid.deploy import wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.wire import RefusedError
from fedml_noniid.engines.packing import flatten
from tests.deploy import world
from tests.recipe_table import DEPLOYED_ALONE
from tests.walks import thinned

LIAR = 2
# What no honest silo can have, by the end of the tensor's name: a loss below 0, fewer than no
# sample, half a sample, ...
BELOW = {
    "n": 0,
    "qfedavg/F": -5,
    "fednova/a": 0,
    "fednova/tau": 0,
    "fedgen/counts": -1,
    "fedftg/counts": -1,
    "ccvr/n": -1,
    "ifca/s": -1,
    "fnr/F": -1,
    "fnr/A": -0.5,
    "fedproto/counts": -1,
    "bn1.var": -1,
    "test/sent": -1,
    "test/n": -1,
}
ABOVE = {"fnr/A": 1.5, "ifca/s": 2}
COUNTS = ("fednova/tau", "fedgen/counts", "fedftg/counts", "fedproto/counts", "ccvr/n", "ifca/s")
BROKEN = dict.fromkeys(COUNTS, 2.5)
TABLE = [(*entry, batch_norm) for entry in DEPLOYED_ALONE.values() for batch_norm in (False, True)]


def server(recipe: str, methods: dict, batch_norm: bool) -> ServerRun:
    return ServerRun(world.terms(recipe, methods, batch_norm), world.shards_of()[0])


def ends(key: str, name: str) -> bool:
    return f"/{key}".endswith(f"/{name}")


def lies(key: str, leaf: torch.Tensor, train: bool) -> Iterator[tuple[float, str]]:
    """Values for one number of a tensor, and the name of the refusal."""
    if leaf.is_floating_point():
        withheld = key == "loss" and train  # what stands for it is NaN
        yield from ((value, "non-finite") for value in (math.nan, math.inf, -math.inf)[withheld:])
        yield from ((value, "range") for value in (1e20, -1e20, 2.0**31))
    elif leaf.dtype == torch.int64 and key != "n":  # of packed updates: test_compression
        yield from ((value, "range") for value in (2**31, -(2**31)))
    rows = [*BELOW.items(), *ABOVE.items(), *BROKEN.items()]
    yield from ((value, "range") for name, value in rows if ends(key, name))
    if key == "steps":  # as many as the samples make in training, and none in another job
        yield from ((value, "steps") for value in (0.0, 1.0, 2.5, 1e6) if value != leaf.item())


def refuse(server_run: ServerRun, good: wire.Up, key: str, value: float, name: str) -> None:
    """Sends an upload with one other number."""
    down, leaf = server_run.down, good["leaves"][key].clone()
    leaf.view(-1)[-1] = value
    with pytest.raises(RefusedError) as refused:
        server_run.opened(good | {"leaves": good["leaves"] | {key: leaf}}, LIAR)
    said, job = str(refused.value), wire.name(down.ask)
    assert refused.value.name == name, said
    of_job = "" if name == "steps" else f", job {job!r}"
    assert said.startswith(f"round {down.round}, silo 2 (rank 3){of_job}: ")
    is_packed = key.startswith("deltas/") and server_run.terms.algorithm.packing(TRAIN) is not None
    named = "'deltas/" if is_packed else f"{key!r} "
    assert f"upload's {named}" in said


@pytest.mark.parametrize(("recipe", "methods", "batch_norm"), thinned(TABLE, 0, 4), ids=str)
def test_a_lie_in_any_number_is_refused_by_silo_and_the_run_goes_on(recipe, methods, batch_norm):
    server_run = server(recipe, methods, batch_norm)
    honest = world.silos_of(server_run.terms)
    while (ask := server_run.down.ask) is not None:
        down, is_training = server_run.down, wire.name(ask) == TRAIN
        ups = {k: wire.up(k, down.exchange, honest[k].answer(wire.row_of(down, k))) for k in ask.to}
        if LIAR in ups and len(ups) > 1:
            good = ups.pop(LIAR)
            assert server_run.opened(good, LIAR) is not None
            for key, leaf in good["leaves"].items():
                for value, name in lies(key, leaf, is_training) if leaf.numel() else ():
                    refuse(server_run, good, key, value, name)
            server_run.without([LIAR])
        server_run.feed(server_run.open(ups))
    assert len(server_run.loop.rows) == world.ROUNDS
    assert all(math.isfinite(row["update_norm_server"]) for row in server_run.loop.rows)


@pytest.mark.parametrize("local", [{}, {"drop_last": True}, {"local_steps": 5}])
@pytest.mark.parametrize("n", [1, 8, 23])
def test_samples_make_as_many_steps_as_a_silo_takes(local, n):
    plan = server("fedavg", {}, False).terms.plan
    how = plan.local.model_copy(update={"epochs": 2, "batch_size": 8} | local)
    rng, steps = np.random.default_rng(0), replace(plan, local=how).steps(np.array(n))
    order = epochs(np.arange(n), how.epochs, 8, rng, how.local_steps, how.drop_last)
    assert steps == len(order.sizes)


def test_the_walk_meets_every_range_of_the_table():
    """A method whose upload is renamed would leave the table above without effect."""
    met, names = set(), {*BELOW, *ABOVE, *BROKEN}
    methods = {"fedbn", *(name.partition("/")[0] for name in names)}
    for recipe, settings, batch_norm in TABLE:
        server_run = server(recipe, settings, batch_norm)
        while recipe in methods and batch_norm and server_run.down.ask is not None:
            met |= set(flatten(server_run.schema))
            server_run.feed(server_run.open(answers(server_run)))
    assert all(any(ends(key, name) for key in met) for name in names)


def answers(server_run: ServerRun, extreme: str = "") -> dict[int, wire.Up]:
    """Zeros, or the number next to zero that is allowed.

    The liar's numbers are as "low" or "high" as is allowed.
    """
    down, made = server_run.down, {}
    packing = server_run.terms.algorithm.packing(down.ask.job)
    schema, n = server_run._schemas[wire.name(down.ask)], torch.tensor(17)
    steps = server_run.terms.plan.steps(n.numpy()) if server_run.schema["steps"] else 0
    for k in down.ask.to:
        leaves = {}
        for key, like in flatten(schema).items():
            limit = wire.allowed(key, server_run._ranges)
            lie = getattr(limit, extreme) if extreme and k == LIAR else 0.0
            leaves[key] = torch.full_like(like, max(lie, limit.low))
        leaves |= {"n": n, "steps": torch.full_like(leaves["steps"], steps)}
        deltas = {key: leaves.pop(key) for key in [*leaves] if key.startswith("deltas/")}
        sent = deltas if packing is None else packing.pack(deltas)
        leaves |= sent if packing is None else {f"deltas/{key}": leaf for key, leaf in sent.items()}
        made[k] = wire.Up(client=k, exchange=down.exchange, leaves=leaves)
    return made


@pytest.mark.parametrize("extreme", ["low", "high"])
@pytest.mark.parametrize(("recipe", "methods", "batch_norm"), thinned(TABLE, 1, 4), ids=str)
def test_the_server_bears_the_largest_numbers_that_it_takes(recipe, methods, batch_norm, extreme):
    """Refused are only models that overflow, of a silo or of the server."""
    server_run = server(recipe, methods, batch_norm)
    while server_run.down.ask is not None:
        found, why = {}, []
        for k, up in answers(server_run, extreme).items():
            try:
                found[k] = server_run.opened(up, k)
            except RefusedError as refusal:
                why.append(str(refusal))
        assert all("model overflows on a test sample" in said for said in why)
        if not found:
            break
        server_run.without([k for k in server_run.down.ask.to if k not in found])
        try:
            server_run.feed(found)
        except NonFiniteError:  # the model can't be used, and becomes no checkpoint
            break
    assert all(math.isfinite(row["update_norm_server"]) for row in server_run.loop.rows)


def test_a_model_that_overflows_is_refused():
    """Weights of 2^29 are allowed, but not in layers that multiply them: 2^29 to the fourth is
    2^116."""
    server_run = server("feddf", {"feddf": {"steps": 2, "batch_size": 6}}, False)
    good = answers(server_run)[LIAR]
    server_run._sample = server_run._sample + 2.0**40  # in place of two more layers
    large = {
        key: torch.full_like(leaf, 2.0**29) if key.startswith("deltas/") else leaf
        for key, leaf in good["leaves"].items()
    }
    words = r"^round 1, silo 2 \(rank 3\): upload's model overflows on a test sample"
    with pytest.raises(RefusedError, match=words):
        server_run.opened(good | {"leaves": large}, LIAR)
