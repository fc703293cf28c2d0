"""Compressed updates, against NumPy in float64; what compressors promise; and their packed forms on
the wire, honest and not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.contract import silos
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Ask, Component, Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import fold, identity, uniform
from fedml_noniid.core.trees import Params
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.plugins.baselines.compression import Grid, Largest
from fedml_noniid.plugins.baselines.ef_sign import Signs
from fedml_noniid.plugins.baselines.qsgd import QSGD
from fedml_noniid.plugins.baselines.topk import TopK
from tests.methods import softmax as hand
from tests.methods.softmax import ENGINES, N_K, Array

WEIGHT = hand.C * hand.D  # the numbers of the first tensor of `hand.flat`
RECIPES = ("topk", "ef_sign", "ef21", "qsgd")


def top_k(p: Array) -> Array:
    """The fifth of the numbers with the largest magnitude."""
    kept = np.argsort(-np.abs(p))[: round(0.2 * len(p))]
    sent = np.zeros_like(p)
    sent[kept] = p[kept]
    return sent


def signs(p: Array) -> Array:
    return np.concatenate([np.abs(q).mean() * np.sign(q) for q in (p[:WEIGHT], p[WEIGHT:])])


def start(recipe: str, on: tuple[str, int], **more: Any) -> tuple[Any, Array, list[list[int]]]:
    """(simulation, w_0, the cohorts of its rounds)."""
    options = {recipe: {"share": 0.2}} if recipe in ("topk", "ef21") else {}
    made = hand.simulation(recipe, options, on, rounds=4, cohort=4, **more)
    cohorts = [list(made.loop.plan.draw_cohort(t, 6)) for t in range(1, 5)]
    assert len({*map(tuple, cohorts)}) > 1, "clients come and go"
    return made, hand.flat(made.loop.state.params), cohorts


@pytest.mark.parametrize("on", ENGINES, ids=str)
@pytest.mark.parametrize(("recipe", "compress"), [("topk", top_k), ("ef_sign", signs)])
def test_error_feedback(
    recipe: str, compress: Callable[[Array], Array], on: tuple[str, int]
) -> None:
    """Four rounds of four of six clients. All that a client has sent, and its memory, add up to all
    its updates."""
    simulation, w, cohorts = start(recipe, on)
    e, sent, updates = (np.zeros((6, len(w))) for _ in range(3))
    for cohort in cohorts:
        delta = hand.deltas(w)
        total = 0 * w
        for k in cohort:
            c = compress(e[k] + delta[k])
            e[k] += delta[k] - c
            sent[k] += c
            updates[k] += delta[k]
            total += N_K[k] / N_K[cohort].sum() * c
        w = w + total
    np.testing.assert_allclose(sent + e, updates, atol=1e-12)
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)
    memory = simulation.engine.clients.memory.whole()[recipe]["p"]
    for k in range(6):
        p = hand.flat({key: leaf[k] for key, leaf in memory.items()})
        np.testing.assert_allclose(p - compress(p), e[k], atol=1e-12)


@pytest.mark.parametrize("on", ENGINES, ids=str)
def test_ef21(on: tuple[str, int]) -> None:
    """The server's g is the mean of all g_k, also of those that are not drawn."""
    simulation, w, cohorts = start("ef21", on)
    g_k = np.zeros((6, len(w)))
    for cohort in cohorts:
        delta = hand.deltas(w)
        for k in cohort:
            g_k[k] += top_k(delta[k] - g_k[k])
        w = w + g_k.mean(0)
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("on", ENGINES, ids=str)
def test_qsgd(on: tuple[str, int]) -> None:
    simulation, w, cohorts = start("qsgd", on)
    for t, cohort in enumerate(cohorts, 1):
        keys, step = simulation.engine.clients.keys(Ask("train", tuple(cohort)), t), 0 * w
        for k, key in zip(cohort, fold(keys, identity(QSGD())), strict=True):
            rounded = []
            for name, v in zip(("fc.weight", "fc.bias"), split(hand.deltas(w)[k]), strict=True):
                draw = uniform(fold(key, name), len(v), dtype=torch.float64).numpy()
                level = 7 * np.abs(v) / np.abs(v).max()
                xi = np.floor(level) + (draw < level - np.floor(level))
                rounded.append(np.abs(v).max() * np.sign(v) * xi / 7)
            step += np.concatenate(rounded) * N_K[k] / N_K[cohort].sum()
        w = w + step
    np.testing.assert_allclose(hand.flat(simulation.run().params), w, rtol=1e-10, atol=1e-12)


def split(v: Array) -> tuple[Array, Array]:
    return v[:WEIGHT], v[WEIGHT:]


TREES: list[Params] = [
    {"b": torch.randn(7), "a": torch.randn(3, 4)},
    {"w": torch.randn(1)},
    {"empty": torch.zeros(0), "w": torch.randn(5).double(), "x": torch.randn(2).double()},
    {"w": torch.zeros(9), "v": torch.tensor([-0.0, 0.0])},
    {"ties": torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 0.5, -1.0, 1.0, 1.0, 1.0, 1.0])},
    {"tiny": torch.tensor([1e-45, -3e-45, 0.0, 7e-45]), "large": 1e30 * torch.randn(17)},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: "+".join(tree))
def test_a_packed_update_comes_out_to_the_bit(tree: Params) -> None:
    rng = torch.Generator().manual_seed(0)
    client: Any = SimpleNamespace(key=torch.tensor(3))
    numbers = sum(leaf.numel() for leaf in tree.values())
    width = next(reversed(tree.values())).element_size()
    made: list[tuple[Any, Params, int]] = [
        (Signs(1, 1), Signs(1, 1)(tree), -(-numbers // 8) + width * len(tree)),
        *(
            (Largest(share), Largest(share)(tree), (4 + width) * max(1, round(share * numbers)))
            for share in (1e-9, 0.3, 1.0)
        ),
        *(
            (
                QSGD(bits).packing,
                QSGD(bits).leaving(tree, client),
                -(-bits * numbers // 8) + width * len(tree),
            )
            for bits in range(2, 9)
        ),
    ]
    for packing, update, size in made:
        packed = packing.pack(update)
        assert sum(leaf.nbytes for leaf in packed.values()) == size
        shuffled = dict(reversed(tree.items()))  # the other side may have another order
        again = packing.unpack(packed, shuffled)
        for name, leaf in update.items():
            assert leaf.dtype == again[name].dtype == tree[name].dtype
            assert torch.equal(leaf, again[name]), (packing, name)
            assert not (torch.signbit(leaf) & (leaf == 0)).any(), "0 has no sign"
        other = {name: torch.randn(leaf.shape, generator=rng) for name, leaf in tree.items()}
        like = {name: (leaf.shape, leaf.dtype) for name, leaf in packed.items()}
        if width == 4:
            again = packing.pack(other)
            assert like == {name: (leaf.shape, leaf.dtype) for name, leaf in again.items()}


# On the wire
# --------------------------------------------------------------------------------------------------


def exchange(recipe: str, **options: Any) -> tuple[ServerRun, wire.Up]:
    """A server that waits for the first answers, and that of silo 0."""
    terms = silos.terms(recipe, {recipe: options} if options else {}, batch_norm=True)
    server, silo = ServerRun(terms, silos.shards_of()[0]), silos.silos_of(terms)[0]
    return server, wire.up(0, server.down.exchange, silo.answer(server.down))


@pytest.mark.parametrize("recipe", [*RECIPES, "scaffold+topk"])
def test_a_simulation_counts_the_bytes_of_the_payload(recipe: str) -> None:
    _, upload = exchange(recipe)
    moved = [leaf for key, leaf in upload["leaves"].items() if key not in ("n", "steps", "loss")]
    (row, *_) = silos.simulated(recipe, {}, True).rows
    assert row["bytes_up"] == 3 * sum(leaf.nbytes for leaf in moved)
    (dense, *_) = silos.simulated("fedavg", {}, True).rows
    assert row["bytes_up"] < (2 if "scaffold" in recipe else 0.6) * dense["bytes_up"]
    assert any(key.startswith("buffers/") for key in upload["leaves"]), "statistics stay dense"


def changed(leaf: torch.Tensor, at: int, value: float) -> torch.Tensor:
    """A copy with another number."""
    copy = leaf.clone()
    copy[at] = value
    return copy


LIES: list[tuple[str, dict[str, Any], str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("topk", {}, "index", lambda i: changed(i, 0, int(i[1])), "packed"),  # twice
    ("topk", {}, "index", lambda i: i.flip(0), "packed"),
    ("topk", {}, "index", lambda i: changed(i, 0, -5), "packed"),
    ("topk", {}, "index", lambda i: changed(i, 0, 2**31 - 1), "packed"),
    ("topk", {}, "index", lambda i: i[1:], "shape"),
    ("topk", {}, "index", lambda i: i.repeat(1000), "shape"),
    ("topk", {}, "index", lambda i: i.long(), "dtype"),
    ("topk", {}, "values", lambda v: changed(v, 0, torch.nan), "non-finite"),
    ("topk", {}, "values", lambda v: changed(v, 1, 1e30), "range"),
    ("qsgd", {"bits": 4}, "scales", lambda s: changed(s, 1, torch.nan), "non-finite"),
    ("qsgd", {"bits": 4}, "scales", lambda s: changed(s, 1, torch.inf), "non-finite"),
    ("qsgd", {"bits": 4}, "scales", lambda s: -s, "packed"),
    ("qsgd", {"bits": 4}, "scales", lambda s: s[:-1], "shape"),
    ("qsgd", {"bits": 4}, "numbers", lambda n: changed(n, 2, 255), "packed"),  # 15 is no point
    (
        "qsgd",
        {"bits": 3},
        "numbers",
        lambda n: changed(n, -1, int(n[-1]) | 128),
        "packed",
    ),  # unused
    ("ef_sign", {}, "numbers", lambda n: n[:-1], "shape"),
    ("ef_sign", {}, "scales", lambda s: -s, "packed"),
    ("ef21", {}, "index", lambda i: torch.zeros_like(i), "packed"),
]


@pytest.mark.parametrize(("recipe", "options", "key", "lie", "name"), LIES)
def test_what_no_silo_packs_is_refused(
    recipe: str, options: dict[str, Any], key: str, lie: Callable[..., Any], name: str
) -> None:
    server, upload = exchange(recipe, **options)
    assert server.opened(upload, 0) is not None
    leaves = upload["leaves"] | {f"deltas/{key}": lie(upload["leaves"][f"deltas/{key}"])}
    with pytest.raises(wire.RefusedError, match=r"silo 0 .*deltas") as refused:
        server.opened(upload | {"leaves": leaves}, 0)
    assert refused.value.name == name
    if name in ("shape", "dtype"):  # before memory is taken
        with pytest.raises(wire.RefusedError):
            wire.fit(wire.table_of(leaves), server.schema, "")


def test_the_outlier_rule_reads_the_unpacked_update() -> None:
    server, upload = exchange("qsgd")
    reply = server.opened(upload, 0)
    assert reply is not None
    dense = torch.cat([leaf.flatten() for leaf in reply["deltas"].values()]).norm().item()
    assert server.outliers.norms[0]["deltas"] == pytest.approx(dense, rel=1e-5)


# What is refused
# --------------------------------------------------------------------------------------------------


def test_secure_sums_refuse_what_they_would_undo() -> None:
    deployed = silos.deployment("scaffold+topk", {}, False, secure_sums=2)
    with pytest.raises(UserError, match="compresses updates, and all numbers are sent, masked"):
        settings.terms(deployed, "scaffold+topk", silos.network(False))


def made(packing: Any, **more: Any) -> TopK:
    """A top-k with another packing."""
    return type("Made", (TopK,), {"packing": packing, "__doc__": "Made.", **more})()


def test_a_packing_is_declared_whole() -> None:
    setting = Setting(6, 4)
    with pytest.raises(RecipeError, match="packing = 'gzip' is refused; allowed: an object with"):
        Algorithm.compose([made("gzip")], setting)
    unowned = made(Largest(0.1), exclusive=frozenset(), leaving=Component.leaving)
    with pytest.raises(RecipeError, match=r"add Exclusive\.UPDATE"):
        Algorithm.compose([unowned], setting)


def test_a_packing_that_changes_the_update_never_leaves_a_silo() -> None:
    update = {"w": torch.tensor([1.0, 2.0, 3.0])}
    with pytest.raises(RecipeError, match="packing changes its update, in 'w'"):
        wire.packed({"deltas": update}, Grid(4, 14))
