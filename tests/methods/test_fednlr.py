"""FedNLR (Wang et al. 2024), algorithm 1 and eqs. 14-18, against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plugins.core.component import Data, Plan, RecipeError, Samples, Setting, View
from plugins.core.optimizers import SGD
from plugins.core.task import Task
from plugins.engines.simulation import initial_model
from plugins.fednlr.algorithm import FedNLR
from plugins.models.networks import cnn, mlp
from tests.methods import by_hand as hand

KEY = torch.tensor(0)
MU0, A1, A2 = 1.2, 0.45, 0.3


def rates(h: hand.Array, mu: float) -> hand.Array:
    """Eqs. 15-16 without eta: M q / sum q with q = softmax(h / T), T = (max h - min h) / ln mu."""
    t = (h.max() - h.min()) / math.log(mu)
    q = np.exp(h / t) / np.exp(h / t).sum()
    return np.asarray(len(h) * q / q.sum())


def factors(w: hand.Tree, x: hand.Array) -> hand.Tree:
    """Lines 5-8 for the two layers, M_1 = M_2 = 2, L = 2: mu_l = mu_0 + a_1 l / 2 + a_2 log10 2 (eq. 17)."""
    one = rates(hand.hidden(w, x).mean(0), MU0 + A1 * 1 / 2 + A2 * math.log10(2))  # eq. 14, after the ReLU
    two = rates(hand.logits(w, x).mean(0), MU0 + A1 * 2 / 2 + A2 * math.log10(2))  # the classifier's mean logits
    return {"fc1.weight": one[:, None], "fc1.bias": one, "fc2.weight": two[:, None], "fc2.bias": two}


@pytest.mark.parametrize("others", ["fednlr", "fednlr+fedprox"])
def test_two_rounds_of_neuron_wise_rates(engine: str, others: str) -> None:
    """Line 9, eq. 18: row m of layer l moves at eta M q_m; rates are renewed on each received model, not per step.

    They multiply the whole local gradient, FedProx's term included.
    """
    mu = 0.7 if others != "fednlr" else 0.0
    settings: dict[str, dict[str, object]] = {"fednlr": {"mu0": MU0, "a1": A1, "a2": A2}}
    ran = hand.run(others, settings | ({"fedprox": {"mu": mu}} if mu else {}), engine=engine)
    w = hand.W0
    for _ in range(2):
        local = []
        for client in hand.CLIENTS:
            scale = factors(w, hand.X[client])

            def direction(
                w: hand.Tree, x: hand.Array, y: hand.Array, w_t: hand.Tree = w, scale: hand.Tree = scale
            ) -> hand.Tree:
                return hand.each(lambda s, g, w, w_t: s * (g + mu * (w - w_t)), scale, hand.gradient(w, x, y), w, w_t)

            local.append(hand.descend(w, [client] * 2, direction))
        w = hand.average(np.array(hand.SIZES) / 6, local)  # line 12, eq. 19
    hand.same(ran.outcome.params, w)


@pytest.mark.parametrize(
    ("depth", "n_layers", "units", "mu"),
    [(1, 9, 10, 1 + 0.45 / 9 + 0.3), (9, 9, 100, 1 + 0.45 + 0.6), (2, 2, 1, 1.45), (3, 4, 1000, 1 + 0.3375 + 0.9)],
)
def test_the_discrepancy_ratio(depth: int, n_layers: int, units: int, mu: float) -> None:
    """Eq. 17 with the values of the main tables: mu_l = 1 + 0.45 l / L + 0.3 log10 M_l."""
    assert FedNLR().mu(depth, n_layers, units) == pytest.approx(mu, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mu", [1.05, 1.75, 5.0, 50.0])
@pytest.mark.parametrize("offset", [0.0, -3.0, 100.0, 2000.0])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 40.0])
def test_the_largest_rate_is_mu_times_the_smallest_and_the_mean_is_one(
    dtype: torch.dtype, mu: float, offset: float, spread: float
) -> None:
    """Eq. 16 for any activations: large ones that hardly differ, small ones that differ much."""
    shares = torch.tensor([0.3, 1.0, 0.7, 0.0, 0.5, 0.1, 0.9], dtype=torch.float64)
    h = (offset + spread * shares).to(dtype)
    scale = FedNLR.factors(h, mu)
    assert scale.dtype == dtype
    assert (scale.max() / scale.min()).item() == pytest.approx(mu, rel=1e-4)
    assert scale.mean().item() == pytest.approx(1.0, rel=1e-5)
    assert (scale.argmax(), scale.argmin()) == (h.argmax(), h.argmin()), "active neurons learn faster"


def test_the_rates_in_numbers() -> None:
    """h = (0, 1), mu = 3: T = 1 / ln 3, e^{h/T} = (1, 3), q = (1/4, 3/4), rates (1/2, 3/2)."""
    scale = FedNLR.factors(torch.tensor([0.0, 1.0], dtype=torch.float64), 3.0)
    torch.testing.assert_close(scale, torch.tensor([0.5, 1.5], dtype=torch.float64))


@pytest.mark.parametrize("h", [[0.0, 0.0, 0.0], [7.5, 7.5, 7.5], [3.0], [-1.0, -1.0]])
def test_neurons_of_equal_activation_keep_the_rate(h: list[float]) -> None:
    """max h = min h: T = 0."""
    assert FedNLR.factors(torch.tensor(h), 2.0).tolist() == [1.0] * len(h)


@pytest.mark.parametrize("mu", [1.0, 0.9, 0.0])
def test_a_ratio_of_at_most_one_keeps_the_rate(mu: float) -> None:
    """ln mu <= 0."""
    assert FedNLR.factors(torch.tensor([0.0, 1.0, 5.0]), mu).tolist() == [1.0, 1.0, 1.0]


def test_activations_that_hardly_differ_make_no_nan() -> None:
    """ln mu / spread would overflow float32."""
    scale = FedNLR.factors(torch.tensor([0.0, 1e-39, 0.0]), 2.0)
    assert torch.isfinite(scale).all()


def convolve(x: hand.Array, weight: hand.Array, bias: hand.Array) -> hand.Array:
    """[C, H, W] with a 5x5 kernel and padding 2, loop by loop."""
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    out = np.empty((len(weight), *x.shape[1:]))
    for m, i, j in np.ndindex(out.shape):
        out[m, i, j] = (padded[:, i : i + 5, j : j + 5] * weight[m]).sum() + bias[m]
    return out


def test_channels_are_averaged_over_space_before_pooling() -> None:
    """Eq. 14 for a convolution: the mean over samples and positions of the channel's ReLU; M_l channels, L = 4."""
    net = cnn((1, 4, 4), 3, channels=2, hidden=3)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 1, 4, 4))
    data = Samples(torch.tensor(x), torch.zeros(5, dtype=torch.int64))
    params, buffers = initial_model(net, 1, data.x)
    w = {key: leaf.numpy() for key, leaf in params.items()}

    means: dict[str, list[hand.Array]] = {"conv1": [], "conv2": [], "fc1": [], "fc2": []}
    for image in x:
        h = image
        for name in ("conv1", "conv2"):
            h = np.maximum(convolve(h, w[f"{name}.weight"], w[f"{name}.bias"]), 0)
            means[name].append(h.mean((1, 2)))
            h = h.reshape(len(h), h.shape[1] // 2, 2, h.shape[2] // 2, 2).max((2, 4))
        h = np.maximum(w["fc1.weight"] @ h.reshape(-1) + w["fc1.bias"], 0)
        means["fc1"].append(h)
        means["fc2"].append(w["fc2.weight"] @ h + w["fc2.bias"])

    component = FedNLR(mu0=MU0, a1=A1, a2=A2)
    # Two batches of the pass, 3 and 2 samples: the mean is over samples, not over batches.
    plan = Plan(data, torch.arange(5), sizes=(3, 2))
    found = component.prepare(Task(net, SGD(0.1)), View(params, buffers, {}, {}, {}, {}), Data(plan, plan, None, KEY))
    for depth, (name, units) in enumerate((("conv1", 2), ("conv2", 4), ("fc1", 3), ("fc2", 3)), start=1):
        wanted = rates(np.mean(means[name], axis=0), MU0 + A1 * depth / 4 + A2 * math.log10(units))
        for part in ("weight", "bias"):
            np.testing.assert_allclose(found[f"{name}.{part}"], wanted, rtol=1e-9)


def test_a_rate_scales_the_whole_row_of_its_neuron() -> None:
    """Eq. 18: w_{l,m} are all weights of neuron m; a kernel's rows are its first axis."""
    scale = torch.tensor([2.0, 3.0])
    tree = {"conv.weight": torch.ones(2, 1, 3, 3), "conv.bias": torch.ones(2), "other": torch.ones(4)}
    view = View({}, {}, {}, {}, {}, {"conv.weight": scale, "conv.bias": scale})
    out = FedNLR().correct(tree, tree, view)
    assert out["conv.weight"].flatten(1).unique(dim=1).tolist() == [[2.0], [3.0]]
    assert out["conv.bias"].tolist() == [2.0, 3.0]
    assert out["other"].tolist() == [1.0] * 4


def test_a_batch_norms_pair_learns_at_the_rate_of_its_neurons() -> None:
    net = mlp((2,), 2, hidden=3, batch_norm=True)
    data = Samples(torch.tensor(hand.X), torch.tensor(hand.Y))
    params, buffers = initial_model(net, 0, data.x)
    plan = Plan(data, torch.arange(6), sizes=(6,))
    found = FedNLR().prepare(Task(net, SGD(0.1)), View(params, buffers, {}, {}, {}, {}), Data(plan, plan, None, KEY))
    assert found.keys() == params.keys()
    for part in ("fc1.bias", "bn1.weight", "bn1.bias"):
        assert torch.equal(found[part], found["fc1.weight"])


def test_equal_ratios_of_one_are_fedavg_to_the_bit(engine: str) -> None:
    """mu_0 = 1, a_1 = a_2 = 0: mu_l = 1 in every layer."""
    ran = hand.run("fednlr", {"fednlr": {"mu0": 1.0, "a1": 0.0, "a2": 0.0}}, engine=engine)
    plain = hand.run("fedavg", engine=engine)
    assert all(torch.equal(ran.outcome.params[key], plain.outcome.params[key]) for key in plain.outcome.params)


@pytest.mark.parametrize("key", ["mu0", "a1", "a2"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_bad_hyper_parameters_are_refused(key: str, value: float) -> None:
    with pytest.raises(RecipeError, match=f"fednlr: {key} ="):
        FedNLR(**{key: value}).check(Setting(3, 3, 2, 2, "sgd", 0.1, 0))
