"""FNR-FL (Hu et al. 2023), algorithms 1 to 3, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plugins.core.client import autograd
from plugins.core.component import Data, Plan, RecipeError, Reply, Server, Setting, Trace, View, Work
from plugins.core.optimizers import SGD
from plugins.core.task import Task
from plugins.core.trees import Params, Tree
from plugins.fnr.algorithm import FNR
from plugins.recipes import build
from tests.methods import by_hand as hand

KEY = torch.tensor(0)
REFINE: dict[str, object] = {"p": 0.5, "lam": 2.0, "epochs": 3, "batch_size": 8}
PUBLIC = np.arange(4)


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


def test_two_rounds_average_the_refined_models(engine: str) -> None:
    """Lines 4-16: train all, refine floor(3 * 0.5) = 1, average all with |D_i|."""
    ran = hand.run("fnr", {"fnr": REFINE}, engine=engine)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]  # lines 18-25
        (train, reply), (ask, refined) = ran.exchanges[2 * t : 2 * t + 2]
        assert train.job == "train"
        assert ask.job == "fnr.refine"

        norms = np.stack([feature_norms(w_i) for w_i in local])  # line 26
        np.testing.assert_allclose(reply.upload["fnr"]["F"], norms, rtol=1e-10)
        scores = [hand.accuracy(w_i, hand.PUBLIC_X, hand.PUBLIC_Y) for w_i in local]  # line 27
        np.testing.assert_allclose(reply.upload["fnr"]["A"], scores, rtol=1e-12)

        (j,) = s_re = worst(local, 1)  # lines 10-11
        assert list(ask.to) == s_re
        delta = sum(norms[m] - norms[j] for m in range(3) if m not in s_re)  # line 12, algorithm 2
        np.testing.assert_allclose(ask.each["fnr"]["delta"], delta[None], rtol=1e-9)

        local[j] = refine(local[j], [PUBLIC] * 3)  # line 13
        hand.same({key: leaf[0] for key, leaf in refined.params.items()}, local[j])
        w = hand.average(np.array(hand.SIZES) / 6, local)  # line 15, with the refined w_j
    hand.same(ran.outcome.params, w)


def test_mini_batches_of_the_public_split(engine: str) -> None:
    """Line 31: D_public in batches of 3, so 3 and 1 samples in each of the 2 epochs; all three clients refined."""
    settings: dict[str, object] = {"p": 1.0, "epochs": 2, "batch_size": 3}
    ran = hand.run("fnr", {"fnr": settings}, engine=engine, rounds=1)
    batches = [ran.batches(j, 1, "fnr.refine") for j in range(3)]
    assert [[len(b) for b in of] for of in batches] == [[3, 1, 3, 1]] * 3
    assert all(sorted(np.concatenate(of[:2])) == [0, 1, 2, 3] for of in batches)
    local = [refine(hand.descend(hand.W0, [hand.CLIENTS[j]] * 2), batches[j]) for j in range(3)]
    hand.same(ran.outcome.params, hand.average(np.array(hand.SIZES) / 6, local))


def test_only_the_cohort_can_be_refined(engine: str) -> None:
    """n is the number of clients in the round: floor(2 * 0.5) = 1 of the two that were drawn."""
    ran = hand.run("fnr", {"fnr": REFINE}, engine=engine, cohort=2, rounds=3)
    jobs = ran.jobs()
    for (job, cohort), (again, to) in zip(jobs[::2], jobs[1::2], strict=True):
        assert (job, again) == ("train", "fnr.refine")
        assert len(to) == 1
        assert set(to) < set(cohort)


def test_lambda_changes_nothing_because_j_has_no_gradient(engine: str) -> None:
    """The published regulariser is a constant: the weights agree to the bit."""
    weights = [
        hand.run("fnr", {"fnr": REFINE | {"lam": lam}}, engine=engine).outcome.params for lam in (0.0, 1.0, 1000.0)
    ]
    assert all(torch.equal(weights[0][key], other[key]) for other in weights[1:] for key in other)


def test_the_loss_of_the_refinement_is_cross_entropy_plus_lambda_j() -> None:
    """Eq. 9 and lines 34-39 with Delta = (3, -5), classes (0, 0, 1, 1): J = 1/2 * 3 + 1/2 * -5 = -1, lambda = 2."""
    seen: list[float] = []

    def listening(loss: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
        grads, aux = autograd(loss, params)
        seen.append(aux["loss"].item())
        return grads, aux

    network = hand.given()
    params, buffers = network.init(torch.Generator())
    plan = Plan(hand.samples(hand.PUBLIC_X, hand.PUBLIC_Y), torch.arange(4), sizes=(4,))
    delta = torch.tensor([3.0, -5.0], dtype=torch.float64)
    view = View(params, buffers, {}, {"delta": delta}, {}, {})
    work = Work(Task(network, SGD(hand.LR)), params, buffers, view, Data(plan, None, plan, KEY), listening, False)
    FNR(n_classes=2, lam=2.0).answer("fnr.refine", work)
    assert seen == [pytest.approx(hand.loss(hand.W0, hand.PUBLIC_X, hand.PUBLIC_Y) + 2.0 * -1.0, rel=1e-12)]


@pytest.mark.parametrize(
    ("n", "p", "n_re"),
    [(10, 0.5, 5), (3, 0.5, 1), (10, 0.29, 2), (100, 0.29, 29), (100, 0.57, 57), (7, 1.0, 7), (4, 0.2, 0), (9, 0.0, 0)],
)
def test_the_number_of_refined_clients_is_floor_np(n: int, p: float, n_re: int) -> None:
    """Line 10, with decimal p: 100 * 0.29 is 29, though its binary product is 28.999..."""
    component = FNR(n_classes=2, p=p)
    assert component.n_refined(n) == n_re
    assert component.exchanges(n).round == (1 if n_re else 0)


def select(accuracy: list[float], p: float, clients: tuple[int, ...]) -> tuple[Any, FNR]:
    """The Ask that follows from these accuracies, None if there is none."""
    component = FNR(n_classes=2, p=p)
    m = len(clients)
    upload = {"fnr": {"A": torch.tensor(accuracy), "F": torch.arange(2.0 * m).reshape(m, 2)}}
    reply = Reply(clients, {"w": torch.zeros(m)}, {}, upload, torch.ones(m), torch.ones(m), torch.zeros(m), {})
    return next(component.after_train(Server({}, {}, {}), reply), None), component


@pytest.mark.parametrize(
    ("accuracy", "p", "to"),
    [
        ([0.9, 0.1, 0.5, 0.4], 0.5, (13, 19)),
        ([0.5, 0.5, 0.5, 0.5], 0.5, (11, 13)),  # of equal accuracies the lower ids
        ([0.5, 0.4, 0.4, 0.4], 0.5, (13, 17)),
        ([0.5, 0.5, 0.5, 0.1], 0.5, (11, 19)),  # ids ascend in an Ask, whatever the order of accuracies
        ([0.5, 0.5, 0.5, 0.1], 1.0, (11, 13, 17, 19)),
    ],
)
def test_the_worst_are_refined_and_ties_go_to_the_lower_id(
    accuracy: list[float], p: float, to: tuple[int, ...]
) -> None:
    ask, _ = select(accuracy, p, (11, 13, 17, 19))
    assert ask.to == to
    assert ask.params == {}, "the clients refine what they trained"


def test_algorithm_2_sums_over_the_clients_that_are_not_refined() -> None:
    """F = (1, 4), (2, 8), (5, 5), (0, 1), S_re = {1, 3}: Delta_1 = (1-2 + 5-2, 4-8 + 5-8), Delta_3 = (1 + 5, 3 + 4)."""
    norms = torch.tensor([[1.0, 4.0], [2.0, 8.0], [5.0, 5.0], [0.0, 1.0]])
    assert FNR.difference(norms, torch.tensor([1, 3])).tolist() == [[2.0, -7.0], [6.0, 7.0]]


def test_delta_is_zero_when_everybody_is_refined() -> None:
    """The sum over the empty set S without S_re."""
    assert FNR.difference(torch.rand(3, 2), torch.arange(3)).tolist() == [[0.0, 0.0]] * 3


def test_a_class_without_public_samples_has_norm_zero() -> None:
    """Algorithm 1 leaves it out (line 11); J never meets it."""
    component, network = FNR(n_classes=3), hand.given()
    params, buffers = network.init(torch.Generator())
    plan = Plan(hand.samples(hand.PUBLIC_X, hand.PUBLIC_Y), torch.arange(4), sizes=(3, 1))
    trace = Trace(params, params, buffers, torch.tensor(0.0), torch.tensor(0.0), {}, None)
    data = Data(plan, None, plan, KEY)
    upload, _ = component.report(Task(network, SGD(hand.LR)), trace, View(params, buffers, {}, {}, {}, {}), data)
    np.testing.assert_allclose(upload["F"], [*feature_norms(hand.W0), 0.0], rtol=1e-12)


@pytest.mark.parametrize("settings", [{"p": 0.0}, {"p": 0.3}, {"p": 0.5, "epochs": 0}])
def test_nobody_to_refine_is_fedavg(settings: dict[str, object], engine: str) -> None:
    """floor(3 * 0.3) = 0."""
    ran = hand.run("fnr", {"fnr": settings}, engine=engine)
    plain = hand.run("fedavg", engine=engine)
    assert {job for job, _ in ran.jobs()} == {"train"}
    assert all(torch.equal(ran.outcome.params[key], plain.outcome.params[key]) for key in plain.outcome.params)


def test_scaffold_computes_c_i_from_the_local_training_only(engine: str) -> None:
    """ "X+FNR": the average is of the refined models, c_i+ = c_i - c + (x - y_i) / (K eta) has the unrefined y_i."""
    ran = hand.run("scaffold+fnr", {"fnr": REFINE}, engine=engine, rounds=2)
    x, c, c_i = hand.W0, hand.zeros(), [hand.zeros() for _ in range(3)]
    for _ in range(2):
        local, new = [], []
        for i, client in enumerate(hand.CLIENTS):

            def direction(
                y: hand.Tree, at: hand.Array, labels: hand.Array, c: hand.Tree = c, c_i: hand.Tree = c_i[i]
            ) -> hand.Tree:
                return hand.each(lambda g, c_i, c: g - c_i + c, hand.gradient(y, at, labels), c_i, c)

            y = hand.descend(x, [client] * 2, direction)
            new.append(hand.each(lambda c_i, c, x, y: c_i - c + (x - y) / (2 * hand.LR), c_i[i], c, x, y))
            local.append(y)
        for j in worst(local, 1):
            local[j] = refine(local[j], [PUBLIC] * 3)  # without c_i and c
        x = hand.average([1 / 3] * 3, local)
        c = hand.each(
            lambda c, *d: c + sum(d) / 3, c, *(hand.each(np.subtract, a, b) for a, b in zip(new, c_i, strict=True))
        )
        c_i = new
    hand.same(ran.outcome.params, x)
    hand.same(ran.state("scaffold")["c"], c)
    for i in range(3):
        hand.same({key: leaf[i] for key, leaf in ran.memory("scaffold")["c_i"].items()}, c_i[i])


def test_fedprox_does_not_pull_during_the_refinement(engine: str) -> None:
    """ "X+FNR" replaces local training by X's; phase 2 is unchanged."""
    ran = hand.run("fedprox+fnr", {"fnr": REFINE, "fedprox": {"mu": 0.7}}, engine=engine, rounds=1)

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.each(lambda g, w, w_t: g + 0.7 * (w - w_t), hand.gradient(w, x, y), w, hand.W0)

    local = [hand.descend(hand.W0, [client] * 2, direction) for client in hand.CLIENTS]
    for j in worst(local, 1):
        local[j] = refine(local[j], [PUBLIC] * 3)
    hand.same(ran.outcome.params, hand.average(np.array(hand.SIZES) / 6, local))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"p": 1.5}, r"p = 1.5 must lie in \[0, 1\]"),
        ({"p": -0.1}, r"p = -0.1"),
        ({"lam": float("inf")}, "lam"),
        ({"epochs": -1}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_hyper_parameters_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        FNR(n_classes=2, **fields).check(Setting(3, 3, 2, 2, "sgd", 0.1, 4))


def test_without_a_public_split_it_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"fnr: needs a public split, but data.public is 0"):
        build("fnr", {}, Setting(3, 3, 2, 2, "sgd", 0.1, 0))
