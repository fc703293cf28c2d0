"""FedNLR (Wang et al. 2024), algorithm 1 and eqs. 14-18, against arithmetic by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Client
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.models.networks import cnn
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from fedml_noniid.plugins.fednlr.drift import bound, class_means
from tests.methods import by_hand as hand
from tests.methods import test_scaffold

MU0, A1, A2 = 1.2, 0.45, 0.3


ONE = MU0 + A1 * 1 / 2 + A2 * math.log10(2)  # eq. 17 of the two layers, M_1 = M_2 = 2, L = 2
TWO = MU0 + A1 * 2 / 2 + A2 * math.log10(2)


def received(net: Stacked, params: Params, buffers: Params, local_set: Pass) -> Client:
    """In round 1, before training."""
    return Client(Task(net, SGD(0.1)), params, buffers, 1, local_set)


def rates(h: hand.Array, mu: float) -> hand.Array:
    """Eqs. 15-16 without eta: M q / sum q with q = softmax(h / T), T = (max h - min h) / ln mu."""
    t = (h.max() - h.min()) / math.log(mu)
    q = np.exp(h / t) / np.exp(h / t).sum()
    return np.asarray(len(h) * q / q.sum())


def factors(
    w: hand.Tree, x: hand.Array, one: float = ONE, two: float = TWO, size: float = 1.0
) -> hand.Tree:
    """Lines 5-8: mean activations (eq. 14), after the ReLU and of the logits, to the factor of
    every parameter."""
    f1 = size * rates(hand.hidden(w, x).mean(0), one)
    f2 = size * rates(hand.logits(w, x).mean(0), two)
    return {"fc1.weight": f1[:, None], "fc1.bias": f1, "fc2.weight": f2[:, None], "fc2.bias": f2}


def local(w: hand.Tree, scale: hand.Tree, batches: list[hand.Array], mu: float = 0.0) -> hand.Tree:
    """Line 9, eq. 18, with FedProx's mu."""

    def direction(now: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.each(
            lambda s, g, v, w_t: s * (g + mu * (v - w_t)), scale, hand.gradient(now, x, y), now, w
        )

    return hand.descend(w, batches, direction)


SETTINGS: dict[str, dict[str, object]] = {"fednlr": {"mu0": MU0, "a1": A1, "a2": A2}}
FROZEN = {"fc2.weight": np.zeros((2, 1)), "fc2.bias": np.zeros(2)}


@pytest.mark.parametrize(
    ("options", "one", "two", "size"),
    [
        ({}, ONE, TWO, 1.0),
        ({"scale": "sum1"}, ONE, TWO, 0.5),  # lemma 4: eta q
        ({"M": "units"}, ONE, TWO, 1.0),  # the layers are dense: M_l neurons either way
        ({"mu": "fc2=2.5"}, ONE, 2.5, 1.0),
        ({"mu": " fc1=4  fc2=1.75 "}, 4.0, 1.75, 1.0),
    ],
    ids=str,
)
def test_two_rounds_of_neuron_wise_rates(
    engine: str, options: dict[str, object], one: float, two: float, size: float
) -> None:
    """Line 9, eq. 18: row m of layer l moves at eta M q_m; rates are renewed on each received
    model, not per step."""
    ran = hand.run("fednlr", {"fednlr": SETTINGS["fednlr"] | options}, engine=engine)

    def trained(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        return local(w, factors(w, hand.X[hand.CLIENTS[k]], one, two, size), batches)

    hand.same(ran.outcome.params, ran.federated(trained))  # line 12, eq. 19


@pytest.mark.parametrize(
    ("other", "mu", "frozen"), [("fedprox", 0.7, {}), ("fedbabu", 0.0, FROZEN)]
)
def test_they_multiply_what_others_make_of_the_gradient(
    engine: str, other: str, mu: float, frozen: hand.Tree
) -> None:
    """FedProx's term. FedBABU's head is in no tree; the body's factors are those of layer 1 of
    L = 2."""
    settings = SETTINGS | ({"fedprox": {"mu": mu}} if mu else {})
    ran = hand.run(f"fednlr+{other}", settings, engine=engine)

    def trained(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        return local(w, factors(w, hand.X[hand.CLIENTS[k]]) | frozen, batches, mu)

    hand.same(ran.outcome.params, ran.federated(trained))


class Scaled(test_scaffold.Reference):
    """SCAFFOLD whose local steps have the neurons' rates; c_i+ = c_i - c + (x - y_i) / (K eta) with
    eta itself."""

    def direction(self, i: int) -> Callable[[hand.Tree, hand.Array, hand.Array], hand.Tree]:
        scale, plain = factors(self.w, hand.X[hand.CLIENTS[i]]), super().direction(i)
        return lambda y, x, labels: hand.each(np.multiply, scale, plain(y, x, labels))


def test_scaffolds_control_variates_divide_by_eta(engine: str) -> None:
    test_scaffold.compare(hand.run("fednlr+scaffold", SETTINGS, engine=engine), Scaled())


@pytest.mark.parametrize(
    ("depth", "n_layers", "units", "mu"),
    [
        (1, 9, 10, 1 + 0.45 / 9 + 0.3),
        (9, 9, 100, 1 + 0.45 + 0.6),
        (2, 2, 1, 1.45),
        (3, 4, 1000, 1 + 0.3375 + 0.9),
    ],
)
def test_the_discrepancy_ratio(depth: int, n_layers: int, units: int, mu: float) -> None:
    """Eq. 17 with the values of the main tables: mu_l = 1 + 0.45 l / L + 0.3 log10 M_l."""
    assert FedNLR().ratio(depth, n_layers, units) == pytest.approx(mu, rel=1e-14)


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
    scale = FedNLR().factors(h, mu)
    assert scale.dtype == dtype
    assert (scale.max() / scale.min()).item() == pytest.approx(mu, rel=1e-4)
    assert scale.mean().item() == pytest.approx(1.0, rel=1e-5)
    assert (scale.argmax(), scale.argmin()) == (h.argmax(), h.argmin()), (
        "active neurons learn faster"
    )


@pytest.mark.parametrize("scale", ["mean1", "sum1"])
@pytest.mark.parametrize(
    ("h", "mu"),
    [
        ([0.0, 0.0, 0.0], 2.0),  # max h = min h: T = 0
        ([7.5, 7.5, 7.5], 2.0),
        ([3.0], 2.0),
        ([-1.0, -1.0], 2.0),
        *(([0.0, 1.0, 5.0], mu) for mu in (1.0, 0.9, 0.0)),  # ln mu <= 0
    ],
)
def test_without_a_temperature_every_neuron_keeps_the_rate(
    h: list[float], mu: float, scale: Literal["mean1", "sum1"]
) -> None:
    assert FedNLR(scale=scale).factors(torch.tensor(h), mu).tolist() == [1.0] * len(h)
    tiny = FedNLR(scale=scale).factors(torch.tensor([0.0, 1e-39, 0.0]), 2.0)
    assert tiny.isfinite().all(), "ln mu / spread would overflow float32"


def convolve(x: hand.Array, weight: hand.Array, bias: hand.Array) -> hand.Array:
    """[C, H, W] with a 5x5 kernel and padding 2, loop by loop."""
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    out = np.empty((len(weight), *x.shape[1:]))
    for m, i, j in np.ndindex(out.shape):
        out[m, i, j] = (padded[:, i : i + 5, j : j + 5] * weight[m]).sum() + bias[m]
    return out


@pytest.mark.parametrize(
    ("counting", "sizes"), [("channels", (2, 4, 3, 3)), ("units", (2 * 4 * 4, 4 * 2 * 2, 3, 3))]
)
def test_channels_are_averaged_over_space_before_pooling(
    counting: str, sizes: tuple[int, ...]
) -> None:
    """Eq. 14 for a convolution: the mean over samples and positions of the channel's ReLU; L = 4.

    M_l in eq. 17 is the number of channels, or of units C H W before the pooling; rates are one per
    channel.
    """
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

    component = FedNLR(mu0=MU0, a1=A1, a2=A2, M=counting)
    # Two batches of the pass, 3 and 2 samples: the mean is over samples, not over batches.
    plan = Pass(data, torch.arange(5), sizes=(3, 2))
    found = component.prepare(received(net, params, buffers, plan))
    for depth, (name, units) in enumerate(zip(means, sizes, strict=True), start=1):
        wanted = rates(np.mean(means[name], axis=0), MU0 + A1 * depth / 4 + A2 * math.log10(units))
        for part in ("weight", "bias"):
            np.testing.assert_allclose(found[f"{name}.{part}"], wanted, rtol=1e-9)


def observed(
    engine: str,
    changed: dict[str, object],
    start: hand.Tree = hand.W0,
    public: Samples | None = None,
) -> dict[str, torch.Tensor]:
    """What one round of everybody records."""
    of = replace(hand.federation(), public=public)
    settings = {"fednlr": SETTINGS["fednlr"] | changed}
    options: dict[str, Any] = {"engine": engine, "rounds": 1, "observing": True}
    return hand.run("fednlr", settings, of=of, network=hand.given(start), **options).outcome.tensors


def test_means_by_class() -> None:
    """Class 0 has (1, 2) and (3, 6), class 2 has (5, 0), class 1 nothing."""
    found = class_means(
        torch.tensor([[1.0, 2.0], [5.0, 0.0], [3.0, 6.0]]), torch.tensor([0, 2, 0]), 3
    )
    assert found[0].tolist() == [2.0, 4.0]
    assert found[1].isnan().all()
    assert found[2].tolist() == [5.0, 0.0]


@pytest.mark.parametrize("since", [1, 2, 3])
def test_rates_from_a_round_on(engine: str, since: int) -> None:
    """Three rounds, of which those before `since` are FedAvg's."""
    settings = {"fednlr": SETTINGS["fednlr"] | {"since": since}}
    ran = hand.run("fednlr", settings, engine=engine, rounds=3)
    w, p = hand.W0, np.array(hand.SIZES) / 6
    for t, _, batches in ran.rounds():
        scales = [factors(w, hand.X[client]) for client in hand.CLIENTS]
        if t < since:
            scales = [hand.each(np.ones_like, w)] * 3
        w = hand.average(p, [local(w, f, of) for f, of in zip(scales, batches, strict=True)])
    hand.same(ran.outcome.params, w)
    recorded = observed(engine, {"since": 2})["fednlr/factor/fc1"]
    assert recorded.eq(1).all(), "what is recorded is what was in force"


def test_ratios_of_layers_that_the_network_has_not_are_refused(engine: str) -> None:
    with pytest.raises(
        UserError, match=r"names 'fc3', 'conv1', .* \(did you mean 'fc\d'\?\); allowed: fc1, fc2"
    ):
        hand.run("fednlr", {"fednlr": {"mu": "fc1=2 fc3=2 conv1=4"}}, engine=engine)
    with pytest.raises(UserError, match=r"names 'fc2'.*allowed: fc1"):  # FedBABU's head is frozen
        hand.run("fednlr+fedbabu", {"fednlr": {"mu": "fc2=2"}}, engine=engine)


def test_bound_neurons() -> None:
    """Definition 1, neuron by neuron. Classes 0, 0, 1, 1, 2; class 3 has no samples.

    Neuron 0: min over class 0 is 2 > 1.9, the others' largest: bound to 0. Neuron 1: class 1 has
    min 3 = 3, not above. Neuron 2: class 2 has 9 > 8. Neuron 3: all 0, bound to nobody.
    """
    h = torch.tensor(
        [[5.0, 3, 0, 0], [2.0, 0, 8, 0], [1.9, 3, 1, 0], [0.0, 4, 1, 0], [0.1, 1, 9, 0]]
    )
    y = torch.tensor([0, 0, 1, 1, 2])
    wanted = [[True, False, False, False], [False] * 4, [False, False, True, False], [False] * 4]
    assert bound(h, y, 4).tolist() == wanted
    assert not bound(h[:2], y[:2], 4).any(), "only one class: nothing to compare with"
