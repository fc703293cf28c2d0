"""What the five papers prove, evaluated: every row of research/theory.md, and its numbers."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from fedml_noniid.plugins.fednnnn.algorithm import FedNNNN
from tests.methods import by_hand as hand
from tests.methods import convex

PAGE = Path(__file__).resolve().parents[2] / "research" / "theory.md"
TABLE = re.compile(r"^\| `(?P<row>[a-z0-9-]+)` \|.*\| (?P<numbers>[^|]+) \|$", re.MULTILINE)
VECTORS = arrays.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.just(4)), elements=st.floats(-1e3, 1e3)
)
LAM, E = 0.4, 5  # of the convex problems: lambda of r_k, and local steps
TIMES = (500, 5000, 20000)  # steps


@cache
def rows() -> dict[str, str]:
    """The last cell of each row of the page."""
    return dict(TABLE.findall(PAGE.read_text(encoding="utf-8")))


def is_printed(row: str, *numbers: float) -> None:
    """The page's row has these numbers, in this order, each rounded as it stands there."""
    printed = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", rows()[row])
    assert len(printed) == len(numbers), f"{row}: {printed}"
    for text, number in zip(printed, numbers, strict=True):
        digits = text.replace(",", "")
        mantissa, _, exponent = digits.partition("e")
        decimals = len(mantissa.partition(".")[2])
        step = 10.0 ** (int(exponent or 0) - decimals)
        assert abs(float(digits) - number) <= 0.5001 * step, f"{row}: {text}, computed {number}"


def test_every_row_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert rows()
    assert set(rows()) == set(re.findall(r'is_printed\(\s*"([a-z0-9-]+)"', source))


# FNR-FL -----------------------------------------------------------------------------------------


def fnr_bound(steps: int, decays: bool) -> float:
    """delta_m of eq. 18 taken as an equation: mu = 1, L = 2, G = Delta G_i = Gamma = 1, two equal
    clients, E_re = 5, eta_m = 2 / (mu (16 + m)), delta_0 = 1. `decays`: with the term of eq. 48
    that eq. 18 replaces by 3 Gamma / (8 L)."""
    mu, smooth, spread, epochs, delta = 1.0, 2.0, 1.0, 5, 1.0
    for m in range(1, steps + 1):
        eta = 2 / (mu * (16 + m))
        last = 6 * smooth * eta**2 * spread if decays else 3 * spread / (8 * smooth)
        noise = 8 * eta**2 * (epochs - 1) ** 2 + eta**2 * 2 * 0.5**2
        delta = (1 - mu * eta) * delta + noise + last
    return delta


def test_eq_18_of_fnr_grows_as_the_step_size_falls() -> None:
    few, many = fnr_bound(10_000, decays=False), fnr_bound(100_000, decays=False)
    assert many / few == pytest.approx(10, rel=0.05)  # linear in m: no limit
    is_printed("fnr-18", many)
    is_printed("fnr-48", fnr_bound(100_000, decays=True))


def test_gamma_of_fnr_vanishes_as_eq_15_defines_it() -> None:
    """On three logistic regressions, by eq. 15's line and with the appendix's Phi_i*."""
    p = hand.shares((0, 1, 2))
    best = convex.minimiser(*p)
    alone = [convex.minimiser(*(float(i == k) for i in range(3))) for k in range(3)]
    common = sum(p[k] * loss(best, k) for k in range(3))
    as_defined = common - sum(p[k] * loss(best, k) for k in range(3))
    in_appendix = common - sum(p[k] * loss(alone[k], k) for k in range(3))
    is_printed("fnr-15", as_defined, in_appendix)


def loss(w: hand.Tree, k: int) -> float:
    """Client k's objective on the problem of `convex`."""
    x, y = hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]
    o = hand.softmax(x @ w["fc.weight"].T + w["fc.bias"])
    size = sum(float((leaf**2).sum()) for leaf in w.values())
    return float(-np.log(o[np.arange(len(y)), y]).mean() + convex.DECAY / 2 * size)


def test_the_regulariser_of_fnr_has_no_gradient() -> None:
    """lambda = 0 and lambda = 1,000 give the same model, to the bit."""
    without, strong = (
        hand.run("fnr", {"fnr": {"lam": lam, "epochs": 2}}, rounds=3) for lam in (0.0, 1000.0)
    )
    differ = max(
        float((leaf - strong.outcome.params[key]).abs().max())
        for key, leaf in without.outcome.params.items()
    )
    assert hand.identical(without, strong)
    is_printed("fnr-9", differ)


# FedNNNN ----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(VECTORS, st.randoms(use_true_random=False))
def test_proposition_1_of_fednnnn_holds(deltas: hand.Array, draw: Random) -> None:
    """N <= E for all weights of at least 0 that sum to 1."""
    p = np.array([draw.random() + 1e-9 for _ in deltas])
    p /= p.sum()
    n, e = np.linalg.norm(p @ deltas), p @ np.linalg.norm(deltas, axis=1)
    assert n <= e * (1 + 1e-12) + 1e-12


def test_where_n_exceeds_e() -> None:
    # Lemma 1 says "any real numbers": one client with alpha = -1 and an update of length 1
    left, right = float(np.linalg.norm(-1 * np.array([1.0, 0.0]))), -1 * 1.0
    assert left > right
    is_printed("nnnn-lemma-1", left, -right)
    # FedNova of 1 and 9 steps, both updates (1, 0): tau_eff sum_k p_k Delta_k / tau_k
    p, tau, lengths = np.array([0.5, 0.5]), np.array([1.0, 9.0]), np.ones(2)
    n, e = float(p @ tau * (p @ (lengths / tau))), float(p @ lengths)
    assert n > e
    is_printed("nnnn-fednova", n / e)


def test_how_far_fednnnn_moves_the_server() -> None:
    """Table 5's beta = 0.7 and gamma = 0.8 on clients whose updates never change: the step's
    length over E tends to beta / (1 - gamma)."""
    beta, gamma, step = FedNNNN().beta, FedNNNN().gamma, 0.0
    for _ in range(100):
        step = gamma * step + beta
    assert step == pytest.approx(beta / (1 - gamma))
    is_printed("nnnn-step", step)


# FedNLR -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(-50, 50), min_size=2, max_size=12), min_size=1, max_size=4),
    st.lists(st.floats(1.01, 50), min_size=4, max_size=4),
)
def test_lemma_4_of_fednlr_holds_for_its_own_rates(
    layers: list[list[float]], mu: list[float]
) -> None:
    """Rates that sum to eta over a layer lie between lemma 4's bounds."""
    rates = [sum_to_one(np.array(h), m) for h, m in zip(layers, mu, strict=False)]
    largest, widths = max(mu[: len(layers)]), [len(h) for h in layers]
    upper = largest / (largest + min(widths) - 1)
    lower = 1 / (largest * (max(widths) - 1) + 1)
    assert max(rate.max() for rate in rates) <= upper * (1 + 1e-9)
    assert min(rate.min() for rate in rates) >= lower * (1 - 1e-9)


def sum_to_one(h: hand.Array, mu: float) -> hand.Array:
    """q_l (eq. 15) with T_l by eq. 16; equal where all activations are."""
    spread = h.max() - h.min()
    q = np.exp((h - h.max()) / spread * np.log(mu)) if spread > 0 else np.ones(len(h))
    return np.asarray(q / q.sum())


def test_eq_15_breaks_lemma_4() -> None:
    """512 neurons, mu = 2, one of them active: eq. 15's rate is M_l times that of the lemma."""
    h, mu = np.zeros(512), 2.0
    h[0] = 1.0
    lemma, printed = sum_to_one(h, mu), 512 * sum_to_one(h, mu)
    ours = FedNLR().scale  # the rates of eq. 15 are the default
    assert ours == "mean1"
    assert lemma.max() == pytest.approx(mu / (mu + 511))  # the bound is met
    is_printed("nlr-lemma-4", mu / (mu + 511), printed.max())


def test_the_terms_of_theorem_3() -> None:
    """1 / eta_min by lemma 4 for mu = 2, M = 512, and the factor that the theorem prints; K = 100
    in the terms that lose sqrt(K)."""
    inverse = 2 * (512 - 1) + 1
    is_printed("nlr-theorem-3", inverse, inverse**0.5)
    # eta_max^3 / eta_min^2 and eta_max^2 / eta_min both go as eta = sqrt(K / T), not as sqrt(1 / T)
    eta = np.sqrt(100 / 400.0)
    largest, smallest = 0.3 * eta, 0.1 * eta
    at_one = 0.3**3 / 0.1**2 / np.sqrt(400.0)
    assert largest**2 / smallest / (0.3**2 / 0.1 / np.sqrt(400.0)) == pytest.approx(10)
    is_printed("nlr-theorem-3-k", largest**3 / smallest**2 / at_one)


def test_example_1_of_fednlr_gives_eq_9() -> None:
    """Two inputs, two hidden neurons, two classes, no biases, a step of 0.5 on client 1, whose
    samples lie at (1, 1/3). The rates are eqs. 15 to 17 by our component."""
    x = torch.tensor([[1, 1 / 3], [1 / 3, 1]], dtype=torch.float64)  # the classes' centres
    start, printed, falls = (x, x @ x), [], []  # the first layer, and the second by eq. 2, A = 1
    for is_nlr in (False, True):
        layers = [layer.clone().requires_grad_() for layer in start]
        h = torch.relu(layers[0] @ x[0])
        loss = torch.nn.functional.cross_entropy(layers[1] @ h, torch.tensor(0))
        after = []
        for depth, (layer, mean) in enumerate(zip(layers, (h, layers[1] @ h), strict=True), 1):
            (gradient,) = torch.autograd.grad(loss, layer, retain_graph=True)
            ratio = FedNLR().ratio(depth, 2, 2)
            rates = FedNLR().factors(mean.detach(), ratio) if is_nlr else torch.ones(2)
            after.append(layer.detach() - 0.5 * rates[:, None] * gradient)
        both = [torch.relu(first @ x[1]) for first in (start[0], after[0])]
        falls.append(float(both[0][1] - both[1][1]))
        if not is_nlr:
            for h_2, second in zip(both, (start[1], after[1]), strict=True):
                printed += [*h_2.tolist(), *torch.softmax(second @ h_2, 0).tolist()]
    is_printed("nlr-eq-9", *printed, *falls)


def test_theorem_2_of_fednlr_in_numbers() -> None:
    """A hidden neuron of class c = 0 before and after one step on samples of class 1: eqs. 12-13
    against the step itself. W_2 is A times the classes' mean activations, as neural collapse has
    it."""
    w1 = np.array([[1.0, 0.2], [0.1, 0.9]])
    means = np.array([[1.2, 0.3], [0.3, 1.1]])  # h^c of the two classes
    w2, x_c, eta = 2.0 * means, np.array([1.0, 0.4]), 0.05
    active = np.array([[0.6, 1.0], [0.2, 1.3]])  # both move neuron 0
    silent = np.array([[-0.5, 1.3]])  # neuron 0 is at rest, and yet x_k x_c > 0
    assert silent[0] @ x_c > 0 > silent[0] @ w1[0]
    (formula, step), (formula_2, step_2) = (
        reductions(w1, w2, x_c, x_k, eta) for x_k in (active, np.concatenate([active, silent]))
    )
    assert formula == pytest.approx(step, rel=1e-12)
    assert formula > 0
    is_printed("nlr-theorem-2", formula, step, formula_2, step_2)


def reductions(
    w1: hand.Array,
    w2: hand.Array,
    x_c: hand.Array,
    x_k: hand.Array,
    eta: float,
) -> tuple[float, float]:
    """Delta h_(1,0) on `x_c` after one step on `x_k`, all of class 1: by the theorem's formula, and
    by the gradient (autograd, summed over samples)."""
    p = hand.softmax(np.maximum(x_k @ w1.T, 0) @ w2.T)
    pull = (p[:, 1] - 1) * w2[1, 0] + p[:, 0] * w2[0, 0]
    before = w1[0] @ x_c
    formula = min(before, eta * float((x_k @ x_c) @ pull))
    leaf = torch.tensor(w1, requires_grad=True)
    logits = torch.relu(torch.tensor(x_k) @ leaf.T) @ torch.tensor(w2).T
    total = torch.nn.functional.cross_entropy(
        logits, torch.ones(len(x_k), dtype=torch.long), reduction="sum"
    )
    (gradient,) = torch.autograd.grad(total, leaf)
    after = max(0.0, float((w1[0] - eta * gradient.numpy()[0]) @ x_c))
    return formula, max(0.0, before) - after


# rFedAvg ----------------------------------------------------------------------------------------
# Three clients, weights 1/3, features phi(x) = W x, logits V W x with V fixed, weight decay 0.2:
# every f_k and r_k is convex in W, and phi is linear, so that A1 to A6 hold on a bounded set.

V = np.array([[0.5, -0.8], [-0.3, 0.7]])
MEANS = np.array([hand.X[samples].mean(0) for samples in hand.CLIENTS])
FIRST = 8 * 5.0 / convex.DECAY  # gamma = 8 L / mu, with L = 5


def local_gradient(w: hand.Array, k: int) -> hand.Array:
    """Of f_k at W, [2, 2]."""
    x, y = hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]
    pull = (hand.softmax(x @ w.T @ V.T) - np.eye(2)[y]) / len(y)
    return np.asarray((pull @ V).T @ x + convex.DECAY * w)


def objective(w: hand.Array, lam: float) -> float:
    """F of eq. 3 with r_k of eq. 5."""
    total = 0.0
    for k, samples in enumerate(hand.CLIENTS):
        x, y = hand.X[samples], hand.Y[samples]
        o = hand.softmax(x @ w.T @ V.T)
        total += float(-np.log(o[np.arange(len(y)), y]).mean() + convex.DECAY / 2 * (w**2).sum())
        away = (MEANS[k] - np.delete(MEANS, k, 0)) @ w.T
        total += lam * float((away**2).sum(1).mean())
    return total / 3


@cache
def least(lam: float) -> float:
    """F*, by gradient descent until nothing moves."""
    w = np.zeros((2, 2))
    for _ in range(5000):
        step = np.zeros((2, 2))
        for k in range(3):
            away = MEANS[k] - np.delete(MEANS, k, 0)
            step += local_gradient(w, k) + lam * 2 * w @ (away.T @ away) / 2
        w = w - 0.2 * step / 3
    return objective(w, lam)


@cache
def models_after(plus: bool) -> dict[int, hand.Array]:
    """w_t after t steps of rFedAvg or rFedAvg+ with full batches, eta_t = 2 / (mu (gamma + t)) and
    lambda = LAM."""
    last = TIMES[-1] if plus else TIMES[-2]
    w, table, after = np.zeros((2, 2)), np.zeros((3, 2)), {}
    for begin in range(0, last, E):
        models = []
        for k in range(3):
            others, local = np.delete(table, k, 0).mean(0), w
            for t in range(begin + 1, begin + E + 1):
                pull = 2 * np.outer(local @ MEANS[k] - others, MEANS[k])
                eta = 2 / (convex.DECAY * (FIRST + t))
                local = local - eta * (local_gradient(local, k) + LAM * pull)
            models.append(local)
        w = np.mean(models, axis=0)
        table = np.array([(w if plus else models[k]) @ MEANS[k] for k in range(3)])
        after[begin + E] = w
    return after


def products(plus: bool, lam: float) -> list[float]:
    """(t + gamma - E) (F(w_t) - F*) at the TIMES that were computed, F with `lam` in place of
    lambda."""
    after = models_after(plus)
    return [(t + FIRST - E) * (objective(after[t], lam) - least(lam)) for t in TIMES if t in after]


def test_fedavg_has_the_rate_of_rfedavgs_lemma_1() -> None:
    """On the problem of `convex`, whose features are the inputs: r_k has no gradient there."""
    p = hand.shares((0, 1, 2))
    best = convex.minimiser(*p)
    least_loss = sum(p[k] * loss(best, k) for k in range(3))
    w, bounded = convex.START, []
    for begin in range(0, 5000, E):
        models = []
        for k in range(3):
            local = w
            for t in range(begin + 1, begin + E + 1):
                eta = 2 / (convex.DECAY * (FIRST + t))
                g = convex.gradient(local, hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]])
                local = hand.each(lambda leaf, of, eta=eta: leaf - eta * of, local, g)
            models.append(local)
        w = hand.average(p, models)
        if begin + E in (50, 500, 5000):
            away = sum(p[k] * loss(w, k) for k in range(3)) - least_loss
            bounded.append((begin + E + FIRST - E) * away)
    assert bounded[0] >= bounded[1] >= bounded[2] >= 0
    is_printed("rf-lemma-1", *bounded)


@pytest.mark.parametrize("plus", [True, False])
def test_rfedavg_minimises_half_the_regulariser(plus: bool) -> None:
    """The delayed maps of the others are constants, so a client follows its own half of r_k. The
    product that theorems 1 and 2 bound grows with t; with lambda / 2 in F it falls."""
    whole, half = products(plus, LAM), products(plus, LAM / 2)
    assert all(late > 3 * early for early, late in pairwise(whole))
    assert all(0 <= late < early for early, late in pairwise(half))
    if plus:
        is_printed("rf-theorem-1", *whole)
        is_printed("rf-half", *half)


def test_the_constants_of_rfedavg() -> None:
    """C_2, C_3 as printed and as the paper's own steps (9) to (17) add up, per m^2 E^2 H^4, with
    G = G' = 1: for lambda = 1 and 0.1."""
    numbers = []
    for lam in (1.0, 0.1):
        printed = 16 * (3 + 1), 64 * (4 + 1 + 2 * lam**2 * (2 + 3))
        added = 4 * (4 * lam**2 * 2 + 8), 4 * (80 * lam**2 + 16 * lam**2 * 5 + 32 * 5)
        assert printed[0] < printed[1] and added[0] < added[1]
        numbers += [*printed, *added]
    assert numbers[2] == numbers[0]  # C_2 as printed has lambda = 1
    is_printed("rf-constants", *numbers)


def test_the_bound_at_200_steps() -> None:
    """C_1 of lemma 3 for E = 1, 5, 20 with G = G' = 1 and without the terms that E does not move:
    the part of theorem 1's bound that grows, over that of E = 1."""
    grown = [2 * e**2 * 4 / (2 * 4) for e in (1, 5, 20)]
    is_printed("rf-steps", *grown)
