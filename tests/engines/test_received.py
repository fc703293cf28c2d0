"""A component may send each client one of several models in place of w_t."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    Change,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
)
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Tree, add, n_bytes, row, tree_map
from fedml_noniid.deploy.settings import refuse_what_reads_more
from fedml_noniid.engines.packing import flatten, stack
from fedml_noniid.plugins.registry import METHODS
from tests import federation
from tests.core.test_foreign_methods import made
from tests.methods import by_hand as hand

OWNED = frozenset({Exclusive.RECEIVED, Exclusive.OWN_MODEL})


@dataclass(frozen=True)
class Turns(Component):
    """Client k has model k mod K, which is the mean of what its clients made of it. Model j starts
    from w_0 / (j + 1)."""

    name: ClassVar[str] = "turns"
    needs: ClassVar[Needs] = Needs(replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = OWNED
    K: int = 2

    def init_server(self, server: Server) -> Tree:
        first = {"params": server.params, "buffers": server.buffers}
        models = [tree_map(lambda leaf, j=j: leaf / (j + 1), first) for j in range(self.K)]
        return {"models": stack(models), "model_of": torch.arange(server.n_clients) % self.K}

    def step(self, server: Server) -> Change:
        models, clients = server.state["models"], torch.tensor(server.replies.clients)
        new = []
        for j in range(self.K):
            omega, old = server.omega * (clients % self.K == j), row(models, j)
            if omega.any():
                update = weighted_mean(omega, server.replies.deltas)
                buffers = weighted_mean(omega, server.replies.buffers)
                old = {"params": add(old["params"], update), "buffers": buffers}
            new.append(old)
        return Change(state={"models": stack(new)})


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "turns", Turns)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("cohort", [2, 3])
def test_each_client_trains_from_its_own_model(engine: str, cohort: int) -> None:
    """And FedProx pulls it there: w <- w - lr (g + mu (w - theta_j)), theta_j the mean of these."""
    mu, theta = 0.7, [hand.W0, hand.each(lambda leaf: leaf / 2, hand.W0)]
    how: dict[str, Any] = {"engine": engine, "cohort": cohort, "rounds": 3}
    ran = hand.run("fedprox+turns", {"fedprox": {"mu": mu}}, **how)
    for t, clients, batches in ran.rounds():
        ends = {}
        for k, positions in zip(clients, batches, strict=True):

            def direction(w: hand.Tree, x: hand.Array, y: hand.Array, j: int = k % 2) -> hand.Tree:
                pull = hand.each(lambda w, start: mu * (w - start), w, theta[j])
                return hand.each(np.add, hand.gradient(w, x, y), pull)

            ends[k] = hand.descend(theta[k % 2], positions, direction)
            update = row(ran.exchanges[t - 1][1].deltas, clients.index(k))
            hand.same(update, hand.each(np.subtract, ends[k], theta[k % 2]), 1e-8)
        for j in range(2):
            if mine := [k for k in clients if k % 2 == j]:
                theta[j] = hand.average(hand.shares(mine), [ends[k] for k in mine])
    for j in range(2):
        hand.same(row(ran.state("turns")["models"]["params"], j), theta[j], 1e-9)
    right = [hand.accuracy(theta[k % 2], hand.PUBLIC_X, hand.PUBLIC_Y) for k in range(3)]
    assert ran.outcome.rows[-1]["test_accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize(
    ("methods", "engine"),
    [
        *((methods, "sequential") for methods in ("", "+moon", "+fedntd", "+fedbn", "+dpsgd")),
        # Moon passes the received model: side by side, products of one matrix and of many differ.
        *((methods, "vectorized") for methods in ("", "+fedprox", "+fedbn", "+dpsgd")),
    ],
)
def test_one_model_for_all_has_the_bits_of_one_model(methods: str, engine: str) -> None:
    how: dict[str, Any] = {"engine": engine, "batch_norm": True}
    private = {"dpsgd": {"clip": 0.3, "noise": 0.5}} if "dpsgd" in methods else {}
    one = federation.simulation("turns" + methods, {"turns": {"K": 1}, **private}, **how)
    out, plain = one.run(), federation.run(methods[1:] or "fedavg", private, **how)
    assert federation.equal_models(out, plain)
    kept = row(one.loop.state.slices["turns"]["models"], 0)
    assert all(
        torch.equal(kept["params"][name], leaf) for name, leaf in one.loop.state.params.items()
    )
    assert [now["bytes_down"] for now in out.rows] == [now["bytes_down"] for now in plain.rows]


@pytest.mark.parametrize("recipe", ["turns", "fedbn+fedprox+turns"])
def test_processes_and_a_checkpoint_keep_the_bits(recipe: str, tmp_path: Path) -> None:
    def end(**how: Any) -> Any:
        run = federation.simulation(recipe, batch_norm=True, **how)
        return run.run(), flatten(run.loop.trees)

    (whole, trees), file = end(), tmp_path / "checkpoint"
    next(federation.simulation(recipe, batch_norm=True, checkpoint=file).rounds())
    for outcome, others in (end(workers=2), end(checkpoint=file)):
        assert federation.equal(outcome, whole)
        assert others.keys() == trees.keys()
        assert all(torch.equal(leaf, trees[key]) for key, leaf in others.items())
    _, others = end(engine="vectorized")
    torch.testing.assert_close(others, trees, rtol=1e-4, atol=1e-6)


def test_a_model_is_sent_once_to_each_client() -> None:
    row_, size = federation.run("turns", rounds=1).rows[0], n_bytes(federation.run("fedavg").params)
    assert (row_["bytes_down"], row_["bytes_up"]) == (4 * size, 4 * size)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("scaffold", "sends all of them what belongs to one model"),
        ("rfedavg", "sends all of them what belongs to one model"),
        ("ccvr", "asks them about one"),
        ("fnr", "adds their updates to one"),
        ("fedadam", "no client has it"),
        ("ditto", "clients' own models"),
    ],
)
def test_what_takes_one_model_for_granted_is_refused(other: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        federation.simulation(f"{other}+turns")


def test_secure_sums_are_refused() -> None:
    """Each silo has another question, so no silo could tell whose sum it joins."""
    algorithm = Algorithm.compose([made(exclusive=OWNED)()], Setting(3, 3))
    with pytest.raises(UserError, match="a sum needs one question to all"):
        refuse_what_reads_more(algorithm, 0)


@pytest.mark.parametrize(
    ("models", "numbers"),
    [({}, torch.zeros(6).long()), (None, torch.zeros(6)), (None, torch.full((6,), 1))],
    ids=["models", "dtype", "number"],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_wrong_models_are_refused(
    models: Any, numbers: torch.Tensor, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init_server(self: Any, server: Server) -> Tree:
        first = stack([{"params": server.params, "buffers": server.buffers}])
        return {"models": first if models is None else models, "model_of": numbers}

    kind = made(init_server=init_server, exclusive=OWNED)
    monkeypatch.setitem(METHODS, "made", kind)
    with pytest.raises(RecipeError, match=r"^'made': (init_server returned|model_of = )"):
        federation.run("made", engine=engine)
