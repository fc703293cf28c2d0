"""FNR-FL (Hu et al. 2023), algorithms 1 to 3, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Ask, Client, Reply, Server, Setting, Trace
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import fold, identity
from fedml_noniid.core.task import Task, autograd, functional
from fedml_noniid.core.trees import Params
from fedml_noniid.models.networks import mlp
from fedml_noniid.plugins.fnr.algorithm import FNR
from fedml_noniid.plugins.fnr.authors import FNRAuthors
from fedml_noniid.plugins.registry import build
from tests import federation
from tests.methods import by_hand as hand

KEY = torch.tensor(0)
REFINE: dict[str, Any] = {"p": 0.5, "lam": 2.0, "epochs": 3, "batch_size": 8}
PAPER: dict[str, Any] = {
    "public_data": "train_holdout",
    "fnr_reg": "published",
    "delta": "rest",
    "fnr_mode": "eval",
    "refine_optimizer": "same",
}
PUBLIC = np.arange(4)


def authors(**options: Any) -> dict[str, dict[str, object]]:
    """Settings of the variant: the paper's readings but for some."""
    return {"fnr_authors": PAPER | options}


def order(ran: hand.Ran, client: int, round_: int, n: int = 4) -> list[hand.Array]:
    """The positions in D_public of each step of a refinement: which batches there are is not what
    is tested here."""
    (component,) = (c for c in ran.simulation.algorithm.components if isinstance(c, FNR))
    keys = ran.simulation.engine.clients.keys(
        Ask("refine", (client,), owner=component.name), round_
    )
    numbers = torch.arange(n)
    batches = Pass(Samples(numbers, numbers), numbers).shuffled(
        fold(keys[0], identity(component)), component.epochs, component.batch_size
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


def live(fnr_reg: str, lam: float, value: hand.Array, others: int) -> Callable[..., hand.Tree]:
    """The gradient of CE + lambda J through f_c = mean of ||h_b|| over class c, with df_c/dh_b =
    h_b / (n_c ||h_b||).

    squared: J = sum_c rho_c (value_c - f_c)^2, dJ/dh_b = -2 (value - f)[y_b] / B * h_b / ||h_b||,
    as rho_c = n_c / B. signed: J = sum_c rho_c (value_c - others f_c), dJ/dh_b = -others / B * h_b
    / ||h_b||. Both 0 where h_b = 0.
    """

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        h = hand.hidden(w, x)
        u = np.sqrt((h**2).sum(1))
        unit = h / np.where(u > 0, u, 1.0)[:, None]
        slope = np.full(len(y), -float(others))
        if fnr_reg == "squared_live":
            f = np.array([u[y == c].mean() if (y == c).any() else np.nan for c in (0, 1)])
            slope = -2 * (value - f)[y]
        return hand.gradient(w, x, y, lam * (slope / len(y))[:, None] * unit)

    return direction


@pytest.mark.parametrize("batch_size", [8, 3])
@pytest.mark.parametrize("delta", ["rest", "all_others"])
@pytest.mark.parametrize("fnr_reg", ["squared_live", "signed_live"])
def test_the_live_regularisers_have_a_gradient(
    fnr_reg: str, delta: str, batch_size: int, engine: str
) -> None:
    """Two of three are refined, for two rounds; in batches of 3 and 1 a class may be absent (rho_c
    = 0)."""
    lam = 0.3
    settings = authors(
        p=0.7, lam=lam, epochs=2, batch_size=batch_size, fnr_reg=fnr_reg, delta=delta
    )
    ran = hand.run("fnr_authors", settings, engine=engine)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        norms = np.stack([feature_norms(w_i) for w_i in local])
        s_re = worst(local, 2)
        ask = ran.exchanges[2 * t + 1][0]
        assert list(ask.to) == s_re
        for row, j in enumerate(s_re):
            others = [m for m in range(3) if (m != j if delta == "all_others" else m not in s_re)]
            total = norms[others].sum(0)
            value = total / len(others) if fnr_reg == "squared_live" else total
            wanted = (
                {"mean": value}
                if fnr_reg == "squared_live"
                else {"sum": value, "others": len(others)}
            )
            assert ask.each["fnr_authors"].keys() == wanted.keys()
            for key, leaf in ask.each["fnr_authors"].items():
                np.testing.assert_allclose(leaf[row], wanted[key], rtol=1e-10)
            local[j] = hand.descend(
                local[j],
                order(ran, j, t + 1),
                live(fnr_reg, lam, value, len(others)),
                x=hand.PUBLIC_X,
                y=hand.PUBLIC_Y,
            )
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w, rtol=1e-9)


@pytest.mark.parametrize("grad", [autograd, functional])
@pytest.mark.parametrize("fnr_reg", ["squared_live", "signed_live"])
def test_a_sample_without_features_gives_a_finite_gradient(fnr_reg: str, grad: Any) -> None:
    """||h|| has no derivative at h = 0. No ReLU behind h hides it: h = V relu(U relu(..) + a) + b,
    and the second public sample has relu(..) = 0 and a = b = 0."""
    start = hand.W0 | {
        "fc1.bias": np.array([0.3, -0.1]),
        "projection1.weight": np.array([[0.7, 0.2], [0.4, 0.9]]),
        "projection1.bias": np.zeros(2),
        "projection2.weight": np.array([[0.5, -0.6], [0.3, 0.8]]),
        "projection2.bias": np.zeros(2),
    }
    task = Task(
        hand.given(start, net=mlp((2,), 2, hidden=2, projection=2)), SGD(hand.LR), grad=grad
    )
    params, two = hand.tensors(start), torch.tensor([2.0, 0.1], dtype=torch.float64)
    assert (task.eval(params, {}, D_PUBLIC.samples.x).features == 0).all(1).any()
    each = {"mean": two} if fnr_reg == "squared_live" else {"sum": two, "others": two[0]}
    client = Client(task, params, {}, 1, public=D_PUBLIC, each=each, keys=KEY)
    found = FNRAuthors(epochs=1, **PAPER | {"fnr_reg": fnr_reg}).answer(client).params
    assert all(leaf.isfinite().all() for leaf in found.values())


def weights(engine: str, **settings: object) -> Params:
    return hand.run("fnr_authors", authors(**REFINE | settings), engine=engine).outcome.params


def test_with_the_papers_readings_the_variant_is_the_paper(engine: str) -> None:
    """But for rounding: the two draw the order of D_public with keys of their own."""
    paper = hand.run("fnr", {"fnr": REFINE}).outcome.params
    hand.same(weights(engine), hand.arrays(paper))


@pytest.mark.parametrize("lam", [0.0, 1.0, 1000.0])
def test_without_the_regulariser_nothing_changes(lam: float, engine: str) -> None:
    """The control: "off" gives the published method's weights to the bit, and so do live ones with
    lambda = 0."""
    off = weights(engine, fnr_reg="off")
    for fnr_reg in ("published", "off") if lam else ("published", "squared_live", "signed_live"):
        found = weights(engine, fnr_reg=fnr_reg, lam=lam)
        assert all(torch.equal(found[key], leaf) for key, leaf in off.items())
    live = weights(engine, fnr_reg="squared_live", lam=0.1)
    assert not torch.equal(live["fc1.weight"], off["fc1.weight"])


@pytest.mark.parametrize("fnr_reg", ["published", "squared_live", "signed_live"])
def test_nobody_is_left_to_compare_with(fnr_reg: str, engine: str) -> None:
    """S_re = S: Delta = 0, and no live term either; with "all_others" there is one."""
    off = weights(engine, fnr_reg="off", p=1.0)
    found = weights(engine, fnr_reg=fnr_reg, p=1.0)
    assert all(torch.equal(found[key], leaf) for key, leaf in off.items())
    others = weights(engine, fnr_reg=fnr_reg, p=1.0, delta="all_others", lam=0.1)
    assert torch.equal(others["fc1.weight"], off["fc1.weight"]) is (fnr_reg == "published")


@pytest.mark.parametrize(
    ("fnr_reg", "p", "numbers"),
    [
        ("published", 0.7, 2),
        ("squared_live", 0.7, 2),
        ("signed_live", 0.7, 3),
        ("off", 0.7, 0),
        ("squared_live", 1.0, 0),
    ],
)
def test_only_what_a_variant_needs_is_sent(fnr_reg: str, p: float, numbers: int) -> None:
    """Float64: down M = 12 numbers to three, and to the refined C, C, C + 1 or nothing; up M + C +
    1, and M again."""
    ran = hand.run("fnr_authors", authors(**REFINE | {"fnr_reg": fnr_reg, "p": p}), rounds=1)
    (row,), n_re = ran.outcome.rows, round(3 * p - 0.1)
    assert (row["bytes_down"], row["bytes_up"]) == (
        8 * (3 * 12 + n_re * numbers),
        8 * (3 * (12 + 3) + n_re * 12),
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_phase_2_with_adam(weight_decay: float, engine: str) -> None:
    """Kingma and Ba 2015 with the local rate and decay, from m = v = 0 in every refinement; phase 1
    stays SGD."""
    lr, settings = 0.05, authors(p=0.5, epochs=3, batch_size=8, refine_optimizer="adam")
    ran = hand.run("fnr_authors", settings, engine=engine, lr=lr, weight_decay=weight_decay)

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.each(lambda g, w: g + weight_decay * w, hand.gradient(w, x, y), w)

    w = hand.W0
    for _ in range(2):
        local = [hand.descend(w, [client] * 2, direction, lr=lr) for client in hand.CLIENTS]
        (j,) = worst(local, 1)
        y, optimizer = local[j], hand.Adam(local[j])
        for _ in range(3):
            y = optimizer.step(y, direction(y, hand.PUBLIC_X, hand.PUBLIC_Y), lr)
        local[j] = y
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w, rtol=1e-9)


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


@pytest.mark.parametrize(
    ("delta", "wanted"),
    [
        ("rest", [[1.0 - 2 + 5 - 2, 4.0 - 8 + 5 - 8], [1.0 + 5, 4.0 - 1 + 5 - 1]]),
        (
            "all_others",
            [[1.0 - 2 + 5 - 2 + 0 - 2, 4.0 - 8 + 5 - 8 + 1 - 8], [1.0 + 2 + 5, 3.0 + 7 + 4]],
        ),
    ],
)
def test_algorithm_2_sums_over_the_others(delta: str, wanted: list[list[float]]) -> None:
    """S_re = {1, 3} of four. Those that are not refined (Algorithm 2), or all m != j (the repo)."""
    for component in [FNRAuthors(**PAPER | {"delta": delta})] + [FNR()] * (delta == "rest"):
        ask = select(component, [0.9, 0.1, 0.5, 0.4], (0, 1, 2, 3))
        assert ask.each["delta"].tolist() == wanted


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


def test_a_class_without_public_samples_has_norm_zero_and_no_accuracy() -> None:
    """Algorithm 1 leaves it out (line 11), and J never meets it; its accuracy in figure 5 is NaN,
    not 0."""
    head = np.array([*hand.W0["fc2.weight"], [-9.0, -9.0]])
    start = hand.W0 | {"fc2.weight": head, "fc2.bias": np.zeros(3)}
    task, params = (
        Task(hand.given(start, net=mlp((2,), 3, hidden=2)), SGD(hand.LR)),
        hand.tensors(start),
    )
    nothing = torch.zeros(())
    client = Client(
        task,
        params,
        {},
        1,
        public=D_PUBLIC,
        each={"delta": torch.zeros(3)},
        observing=True,
        keys=KEY,
    )
    upload = FNR().report(Trace(params, {}, nothing, nothing, {}, nothing, 0), client).upload
    np.testing.assert_allclose(upload["F"], [*feature_norms(hand.W0), 0.0], rtol=1e-12)
    metrics = FNR().answer(client).metrics
    assert all(
        metrics[when].isnan().tolist() == [False, False, True] for when in ("before", "after")
    )


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


@pytest.mark.parametrize("recipe", ["fnr_authors", "datasharing+fnr_authors", "feddf+fnr_authors"])
def test_the_test_set_needs_no_public_split(recipe: str) -> None:
    """Nor does what is composed with it: there the test set is everybody's public split."""
    assert build(recipe, {}, Setting(3, 3)).leak == "fnr_authors trains on the test set"
    with pytest.raises(RecipeError, match=r"needs a public split, but public is 0"):
        build(recipe, authors(), Setting(3, 3))


@pytest.mark.parametrize("recipe", ["fnr_authors", "datasharing+fnr_authors", "feddf+fnr_authors"])
def test_with_the_test_set_the_public_split_is_not_read(recipe: str) -> None:
    """The same bits with a public split and without: datasharing and FedDF read the test set
    too."""
    of, settings = federation.federation(), authors(public_data="test") | {"feddf": {"steps": 2}}
    settings = {method: settings[method] for method in recipe.split("+") if method in settings}
    a = federation.run(recipe, settings, of=of)
    b = federation.run(
        recipe, settings, of=federation.Federation(of.train, of.clients, of.test, None)
    )
    assert federation.equal(a, b)


def observed(settings: dict[str, Any], engine: str, **options: Any) -> hand.Ran:
    """One round of FNR-FL with these settings."""
    return hand.run("fnr", {"fnr": settings}, engine=engine, **{"rounds": 1} | options)


def by_authors(settings: dict[str, Any], engine: str, **options: Any) -> hand.Ran:
    """One round of the variant: the paper's readings but for these."""
    return hand.run("fnr_authors", authors(**settings), engine=engine, **{"rounds": 1} | options)


TEST_X, TEST_Y = (
    np.array([[0.2, 1.0], [-0.4, -0.8], [1.1, -0.3], [0.6, 0.1], [-0.9, 0.7]]),
    np.array([1, 0, 1, 0, 1]),
)


@pytest.mark.parametrize("public_data", ["train_holdout", "test"])
def test_d_public_may_be_the_test_set(public_data: str, engine: str) -> None:
    """A_i, F_i and phase 2 on the one or the other, and the leak is said."""
    of = hand.federation(test=hand.samples(TEST_X, TEST_Y))
    ran = by_authors(REFINE | {"public_data": public_data}, engine, of=of)
    x, y = (TEST_X, TEST_Y) if public_data == "test" else (hand.PUBLIC_X, hand.PUBLIC_Y)
    local = [hand.descend(hand.W0, [client] * 2) for client in hand.CLIENTS]
    scores = [hand.accuracy(w_i, x, y) for w_i in local]
    u = np.sqrt((hand.hidden(local[2], x) ** 2).sum(1))
    upload = ran.exchanges[0][1].upload["fnr_authors"]
    np.testing.assert_allclose(upload["A"], scores, rtol=1e-12)
    np.testing.assert_allclose(upload["F"][2], [u[y == 0].mean(), u[y == 1].mean()], rtol=1e-10)
    j = scores.index(min(scores))
    local[j] = hand.descend(local[j], [np.arange(len(y))] * 3, x=x, y=y)
    hand.same(ran.outcome.params, hand.average(np.array(hand.SIZES) / 6, local))
    leak = ran.simulation.algorithm.leak
    assert leak == ("fnr_authors trains on the test set" if public_data == "test" else "")


@pytest.mark.parametrize("variant", [False, True])
@pytest.mark.parametrize(("p", "n_re"), [(0.5, 1), (0.7, 2)])
def test_two_rounds_average_the_refined_models(
    engine: str, p: float, n_re: int, variant: bool
) -> None:
    """Lines 4-16: train all, refine floor(3 p), average all with |D_i|. F, A, the refined clients
    and their Delta are recorded."""
    run, name = (by_authors, "fnr_authors") if variant else (observed, "fnr")
    ran = run(REFINE | {"p": p}, engine, rounds=2)
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
            local[j] = refine(local[j], [PUBLIC] * 3)  # line 13
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


# Batch norm by hand: fc1, then (z - mean) / sqrt(var + 1e-5) * gamma + beta, ReLU, fc2.
# ---------------------------

BN_CLIENTS = (np.array([0, 1]), np.array([2, 3, 4, 5]))
BN_W0 = hand.W0 | {"bn1.weight": np.array([1.2, 0.7]), "bn1.bias": np.array([0.3, 0.6])}
BN_STATS = {"bn1.mean": np.array([0.3, -0.1]), "bn1.var": np.array([1.8, 0.3])}


BN: dict[str, Any] = {
    "network": hand.given(BN_W0, BN_STATS),
    "of": hand.federation(BN_CLIENTS),
    "cohort": 2,
}


def bn_hidden(w: hand.Tree, x: hand.Array, mean: hand.Array, var: hand.Array) -> hand.Array:
    z = x @ w["fc1.weight"].T + w["fc1.bias"]
    return np.maximum((z - mean) / np.sqrt(var + 1e-5) * w["bn1.weight"] + w["bn1.bias"], 0.0)


def moments(w: hand.Tree, x: hand.Array) -> tuple[hand.Array, hand.Array]:
    """Of the batch: mean and biased variance."""
    z = x @ w["fc1.weight"].T + w["fc1.bias"]
    return z.mean(0), z.var(0)


def moved(stats: hand.Tree, w: hand.Tree, x: hand.Array) -> hand.Tree:
    """The running statistics after one more batch: 0.9 old + 0.1 new, the variance unbiased (as it
    is for 1 sample)."""
    mean, var = moments(w, x)
    unbiased = var * len(x) / max(len(x) - 1, 1)
    return {
        "bn1.mean": 0.9 * stats["bn1.mean"] + 0.1 * mean,
        "bn1.var": 0.9 * stats["bn1.var"] + 0.1 * unbiased,
    }


def bn_descend(
    w: hand.Tree, stats: hand.Tree, x: hand.Array, y: hand.Array
) -> tuple[hand.Tree, hand.Tree]:
    """One step of training; the gradient of the batch-normalised loss by central differences."""

    def loss(w: hand.Tree) -> float:
        o = bn_hidden(w, x, *moments(w, x)) @ w["fc2.weight"].T + w["fc2.bias"]
        return float(-np.log(hand.softmax(o)[np.arange(len(y)), y]).mean())

    def slope(key: str, at: tuple[int, ...]) -> float:
        step = np.zeros_like(w[key])
        step[at] = 1e-5
        return (loss(w | {key: w[key] + step}) - loss(w | {key: w[key] - step})) / 2e-5

    gradient = {
        key: np.array([slope(key, at) for at in np.ndindex(*leaf.shape)]).reshape(leaf.shape)
        for key, leaf in w.items()
    }
    return hand.each(lambda leaf, g: leaf - hand.LR * g, w, gradient), moved(stats, w, x)


def test_the_feature_pass_in_train_mode(engine: str) -> None:
    """Batches of 3 and 1 in order: F with their statistics; the running ones go on from there, to A
    and phase 2."""
    settings: dict[str, object] = {"p": 0.5, "epochs": 2, "batch_size": 3, "fnr_mode": "train"}
    ran = by_authors(settings, engine, **BN)
    px, py = hand.PUBLIC_X, hand.PUBLIC_Y
    trained = ran.exchanges[0][1]

    def score(w: hand.Tree, stats: hand.Tree) -> float:
        o = (
            bn_hidden(w, px, stats["bn1.mean"], stats["bn1.var"]) @ w["fc2.weight"].T
            + w["fc2.bias"]
        )
        return float((o.argmax(1) == py).mean())

    w, stats, scores, earlier = [], [], [], []
    for i, client in enumerate(BN_CLIENTS):
        w_i, stats_i = BN_W0, BN_STATS
        for _ in range(2):
            w_i, stats_i = bn_descend(w_i, stats_i, hand.X[client], hand.Y[client])
        earlier.append(score(w_i, stats_i))
        u = np.zeros(4)
        for batch in (np.arange(3), np.array([3])):
            u[batch] = np.sqrt((bn_hidden(w_i, px[batch], *moments(w_i, px[batch])) ** 2).sum(1))
            stats_i = moved(stats_i, w_i, px[batch])
        np.testing.assert_allclose(
            trained.upload["fnr_authors"]["F"][i], [u[py == 0].mean(), u[py == 1].mean()], rtol=1e-6
        )
        scores.append(score(w_i, stats_i))
        w.append(w_i)
        stats.append(stats_i)
    np.testing.assert_allclose(trained.upload["fnr_authors"]["A"], scores, rtol=1e-12)
    assert scores != earlier, "the pass makes a difference here"
    j = scores.index(min(scores))
    for batch in order(ran, j, 1):
        w[j], stats[j] = bn_descend(w[j], stats[j], px[batch], py[batch])
    hand.same(refined_model(ran, 1), w[j], rtol=1e-6)
    hand.same(ran.outcome.params, hand.average([1 / 3, 2 / 3], w), rtol=1e-6)
    hand.same(ran.outcome.buffers, hand.average([1 / 3, 2 / 3], stats), rtol=1e-6)


def test_train_mode_moves_the_statistics_also_where_nobody_is_refined(engine: str) -> None:
    """And their upload is counted: 4 numbers from each of two clients."""
    plain, ran = (
        by_authors({"p": 0.0, "fnr_mode": mode}, engine, **BN) for mode in ("eval", "train")
    )
    (_, reply) = ran.exchanges[0]
    stats = [
        moved(hand.arrays(hand.row(reply.buffers, i)), w_i, hand.PUBLIC_X)
        for i, w_i in enumerate(ran.local(0))
    ]
    hand.same(ran.outcome.buffers, hand.average([1 / 3, 2 / 3], stats))
    assert hand.identical(ran, plain)
    assert ran.outcome.rows[0]["bytes_up"] - plain.outcome.rows[0]["bytes_up"] == 2 * 4 * 8
