"""FNR-FL (Hu et al. 2023), algorithms 1 to 3, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Ask, Reply, Server, Setting
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.randomness import fold, identity
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params
from fedml_noniid.plugins.fnr.algorithm import FNR
from tests.methods import by_hand as hand

KEY = torch.tensor(0)
REFINE: dict[str, Any] = {"p": 0.5, "lam": 2.0, "epochs": 3, "batch_size": 8}
PUBLIC = np.arange(4)


def order(ran: hand.Ran, client: int, round_: int) -> list[hand.Array]:
    """The positions in D_public of each step of a refinement: which batches there are is not what
    is tested here."""
    (component,) = (c for c in ran.simulation.algorithm.components if isinstance(c, FNR))
    asked = Ask("refine", (client,), owner=component.name)
    (key,) = ran.simulation.engine.clients.keys(asked, round_)
    numbers = torch.arange(4)
    batches = Pass(Samples(numbers, numbers), numbers).shuffled(
        fold(key, identity(component)), component.epochs, component.batch_size
    )
    return [batch.y.numpy() for batch in batches]


def refined_model(ran: hand.Ran, exchange: int) -> Params:
    """What the first client that was asked to refine sent, w_t + delta."""
    return hand.row(ran.trained(exchange), 0)


D_PUBLIC = Pass(hand.samples(hand.PUBLIC_X, hand.PUBLIC_Y), torch.arange(4), sizes=(4,))


def feature_norms(w: hand.Tree) -> hand.Array:
    """Eqs. 6-7 and algorithm 1: the mean over class c of ||h||_2, on D_public."""
    u = np.sqrt((hand.hidden(w, hand.PUBLIC_X) ** 2).sum(1))
    return np.array([u[c == hand.PUBLIC_Y].mean() for c in (0, 1)])


def worst(w: list[hand.Tree], n_re: int) -> list[int]:
    """Line 10: the n_re clients of lowest accuracy on D_public; of equals the lower id."""
    scores = [hand.accuracy(w_i, hand.PUBLIC_X, hand.PUBLIC_Y) for w_i in w]
    return sorted(sorted(range(len(w)), key=lambda i: (scores[i], i))[:n_re])


def refine(w: hand.Tree, batches: list[hand.Array]) -> hand.Tree:
    """Lines 29-43: J is a number, so the gradient is that of the cross-entropy on D_public."""
    return hand.descend(w, batches, x=hand.PUBLIC_X, y=hand.PUBLIC_Y)


@pytest.mark.parametrize(
    ("n", "p", "n_re"),
    [
        (10, 0.5, 5),
        (3, 0.5, 1),
        (10, 0.29, 2),
        (100, 0.29, 29),
        (100, 0.57, 57),
        (7, 1.0, 7),
        (4, 0.2, 0),
        (9, 0.0, 0),
    ],
)
def test_the_number_of_refined_clients_is_floor_np(n: int, p: float, n_re: int) -> None:
    """Line 10, with decimal p: 100 * 0.29 is 29, though its binary product is 28.999..."""
    component = FNR(p=p)
    assert component.n_refined(n) == n_re and FNR(p=p, epochs=0).n_refined(n) == 0
    assert component.exchanges(Setting(100, n)).round == (1 if n_re else 0)


def server(accuracy: list[float], norms: Any, clients: tuple[int, ...]) -> Server:
    """Before the refinement; the clients' updates are 0."""
    m = len(clients)
    upload = {"A": torch.tensor(accuracy), "F": torch.tensor(norms)}
    reply = Reply(
        clients, {"w": torch.zeros(m)}, {}, upload, torch.ones(m), torch.ones(m), torch.zeros(m)
    )
    network = hand.given()
    return Server(
        Task(network, SGD(hand.LR)),
        {},
        {},
        1,
        m,
        cohort=clients,
        replies=reply,
        trained=reply.deltas,
    )


NORMS = [[1.0, 4.0], [2.0, 8.0], [5.0, 5.0], [0.0, 1.0]]


def select(component: FNR, accuracy: list[float], clients: tuple[int, ...]) -> Ask:
    """The Ask that follows from these accuracies."""
    found: Ask = next(component.refine(server(accuracy, NORMS, clients)))
    return found


@pytest.mark.parametrize(
    ("accuracy", "p", "to"),
    [
        ([0.9, 0.1, 0.5, 0.4], 0.5, (13, 19)),
        ([0.5, 0.5, 0.5, 0.5], 0.5, (11, 13)),  # of equal accuracies the lower ids
        ([0.5, 0.4, 0.4, 0.4], 0.5, (13, 17)),
        (
            [0.5, 0.5, 0.5, 0.1],
            0.5,
            (11, 19),
        ),  # ids ascend in an Ask, whatever the order of accuracies
        ([0.5, 0.5, 0.5, 0.1], 1.0, (11, 13, 17, 19)),
    ],
)
def test_the_worst_are_refined_and_ties_go_to_the_lower_id(
    accuracy: list[float], p: float, to: tuple[int, ...]
) -> None:
    ask = select(FNR(p=p), accuracy, (11, 13, 17, 19))
    assert ask.to == to
    assert ask.params == {}, "the clients refine what they trained"


@pytest.mark.parametrize("passed", [(1,), (3,), (1, 3)])
def test_a_refinement_that_a_defence_drops_counts_as_phase_1(passed: tuple[int, ...]) -> None:
    """1 and 3 of four are asked.

    Delta_1 = (2, -7), Delta_3 = (6, 7) as above; the updates were 0, refined 10 + id.
    """
    asks = FNR().refine(server([0.9, 0.1, 0.5, 0.4], NORMS, (0, 1, 2, 3)))
    assert next(asks).to == (1, 3)
    n = torch.ones(len(passed))
    with pytest.raises(StopIteration) as stop:
        asks.send(Reply(passed, {"w": torch.tensor([10.0 + k for k in passed])}, {}, {}, n, n, n))
    reply = stop.value.value
    assert reply.clients == (0, 1, 2, 3)
    assert reply.deltas["w"].tolist() == [10.0 + k if k in passed else 0.0 for k in range(4)]
    assert reply.upload["refined"].tolist() == [k in passed for k in range(4)]
    delta = {1: [2.0, -7.0], 3: [6.0, 7.0]}
    assert reply.upload["delta"].tolist() == [
        delta[k] if k in passed else [0.0, 0.0] for k in range(4)
    ]


def test_scaffold_computes_c_i_from_the_local_training_only(engine: str) -> None:
    """ "X+FNR": the average is of the refined models, c_i+ = c_i - c + (x - y_i) / (K eta) has the
    unrefined y_i."""
    ran = hand.run("scaffold+fnr", {"fnr": REFINE}, engine=engine, rounds=1)
    plain = hand.run("scaffold", engine=engine, rounds=1)
    for found, wanted in (
        (ran.state("scaffold")["c"], plain.state("scaffold")["c"]),
        (ran.memory("scaffold")["c_i"], plain.memory("scaffold")["c_i"]),
    ):
        hand.same(found, hand.arrays(wanted))
    local = plain.local(0)
    for j in worst(local, 1):
        local[j] = refine(local[j], [PUBLIC] * 3)  # without c_i and c
    hand.same(ran.outcome.params, hand.average([1 / 3] * 3, local))


@pytest.mark.parametrize("other", ["fedprox", "fedbabu"])
def test_the_refinement_has_no_other_term_and_leaves_a_fixed_head_alone(
    engine: str, other: str
) -> None:
    """ "X+FNR" replaces local training by X's: phase 2 is without FedProx's pull. Of FedBABU it
    trains the body only."""
    mu, head = (0.7, 1.0) if other == "fedprox" else (0.0, 0.0)
    settings = {"fnr": REFINE} | ({"fedprox": {"mu": mu}} if mu else {})
    ran = hand.run(f"{other}+fnr", settings, engine=engine)

    def masked(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        grads = hand.gradient(w, x, y)
        return grads | {key: head * grads[key] for key in ("fc2.weight", "fc2.bias")}

    w = hand.W0
    for _ in range(2):

        def pulled(y: hand.Tree, x: hand.Array, labels: hand.Array, w: hand.Tree = w) -> hand.Tree:
            return hand.each(lambda g, y, w: g + mu * (y - w), masked(y, x, labels), y, w)

        local = [hand.descend(w, [client] * 2, pulled) for client in hand.CLIENTS]
        (j,) = worst(local, 1)
        local[j] = hand.descend(local[j], [PUBLIC] * 3, masked, x=hand.PUBLIC_X, y=hand.PUBLIC_Y)
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w)


def observed(settings: dict[str, Any], engine: str, **options: Any) -> hand.Ran:
    """One round of FNR-FL with these settings."""
    return hand.run("fnr", {"fnr": settings}, engine=engine, **{"rounds": 1} | options)


TEST_X, TEST_Y = (
    np.array([[0.2, 1.0], [-0.4, -0.8], [1.1, -0.3], [0.6, 0.1], [-0.9, 0.7]]),
    np.array([1, 0, 1, 0, 1]),
)


@pytest.mark.parametrize(("p", "n_re", "batch_size"), [(0.5, 1, 8), (0.7, 2, 8), (0.7, 2, 3)])
def test_two_rounds_average_the_refined_models(
    engine: str, p: float, n_re: int, batch_size: int
) -> None:
    """Lines 4-16: train all, refine floor(3 p), average all with |D_i|. F, A, the refined clients
    and their Delta are recorded."""
    name, ran = "fnr", observed(REFINE | {"p": p, "batch_size": batch_size}, engine, rounds=2)
    assert [job for job, _ in ran.jobs()] == ["train", f"{name}.refine"] * 2
    found = ran.outcome.tensors
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]  # lines 18-25
        norms = np.stack([feature_norms(w_i) for w_i in local])  # line 26
        scores = [hand.accuracy(w_i, hand.PUBLIC_X, hand.PUBLIC_Y) for w_i in local]  # line 27
        s_re = worst(local, n_re)  # lines 10-11
        rest = norms[[m for m in range(3) if m not in s_re]]
        delta = np.zeros((3, 2))
        delta[s_re] = [(rest - norms[j]).sum(0) for j in s_re]  # line 12, algorithm 2
        (_, reply), (ask, _) = ran.exchanges[2 * t : 2 * t + 2]
        for key, wanted in (("F", norms), ("A", scores)):
            np.testing.assert_allclose(reply.upload[name][key], wanted, rtol=1e-10)
            np.testing.assert_allclose(found[f"{name}/{key}"][t], wanted, rtol=1e-10)
        assert list(ask.to) == s_re
        np.testing.assert_allclose(ask.each[name]["delta"], delta[s_re], rtol=1e-9)
        np.testing.assert_allclose(found[f"{name}/delta"][t], delta, rtol=1e-9, atol=1e-14)
        assert found[f"{name}/refined"][t].tolist() == [j in s_re for j in range(3)]
        row = ran.outcome.rows[t]
        assert row[f"{name}_accuracy_mean"] == pytest.approx(sum(scores) / 3, rel=1e-12)
        assert row[f"{name}_accuracy_worst"] == pytest.approx(min(scores), rel=1e-12)
        for j in s_re:
            local[j] = refine(local[j], order(ran, j, t + 1))  # line 13
        hand.same(refined_model(ran, 2 * t + 1), local[s_re[0]])
        w = hand.average(np.array(hand.SIZES) / 6, local)  # line 15, with the refined w_j
    hand.same(ran.outcome.params, w)
    assert not {key for key in found if "refine." in key}, "the clients were not observed"


def test_refined_models_are_observed_and_never_sent(engine: str) -> None:
    """Figure 5: the accuracy by class of D_public, and of the test set, before and after the
    refinement; it changes neither weights nor bytes."""
    settings, of = REFINE | {"p": 0.7}, hand.federation(test=hand.samples(TEST_X, TEST_Y))
    ran = observed(settings, engine, of=of, rounds=2, observing=True)

    def by_class(w: hand.Tree, x: hand.Array, y: hand.Array) -> list[float]:
        return [hand.accuracy(w, x[y == c], y[y == c]) for c in (0, 1)]

    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        refined = {j: refine(local[j], [PUBLIC] * 3) for j in worst(local, 2)}
        for when, models in (("before", [local[j] for j in refined]), ("after", refined.values())):
            public = [by_class(m, hand.PUBLIC_X, hand.PUBLIC_Y) for m in models]
            assert ran.outcome.tensors[f"fnr/refine.{when}"][t].tolist() == public
            test = [by_class(m, TEST_X, TEST_Y) for m in models]
            assert ran.outcome.tensors[f"fnr/refine.test_{when}"][t].tolist() == test
        w = hand.average(np.array(hand.SIZES) / 6, [refined.get(j, local[j]) for j in range(3)])
    before, after = (ran.outcome.tensors[f"fnr/refine.test_{when}"] for when in ("before", "after"))
    assert not torch.equal(before, after), "or the test could not tell them apart"
    blind = observed(settings, engine, of=of, rounds=2)
    assert hand.identical(ran, blind)
    for key in ("bytes_up", "bytes_down"):
        assert ran.outcome.rows[0][key] == blind.outcome.rows[0][key]
