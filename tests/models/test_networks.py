"""Networks: sizes, layers, and batch norm against torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params
from fedml_noniid.models import build
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import BatchNorm

# The smallest images that each takes.
IMAGES = {
    "logistic_regression": (1, 8, 8),
    "mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
    "fednnnn_mnist": (1, 28, 28),
    "fednnnn_cifar": (3, 32, 32),
    "vgg9": (3, 32, 32),
    "vgg11": (3, 32, 32),
    "vgg16": (3, 32, 32),
    "resnet18": (3, 8, 8),
    "pfl_cnn": (3, 6, 6),
}
DENSE = {"logistic_regression", "mlp"}


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "options", "wanted"),
    [
        ("logistic_regression", (1, 8, 8), 10, {}, 64 * 10 + 10),
        ("mlp", (1, 8, 8), 10, {"hidden": 64}, 64 * 64 + 64 + 64 * 10 + 10),
        ("mlp", (1, 8, 8), 10, {"hidden": 64, "batch_norm": True}, 64 * 64 + 64 + 650 + 128),
        ("mlp", (1, 28, 28), 10, {"hidden": 25}, 785 * 25 + 26 * 10),  # FedNLR, appendix A
        ("cnn", (1, 28, 28), 10, {}, 1_663_370),  # rFedAvg, section VI-A: 832 + 51,264 + ...
        ("cnn", (3, 28, 28), 10, {}, 1_664_970),
        ("fednnnn_mnist", (1, 28, 28), 10, {}, 431_080),
        ("fednnnn_cifar", (3, 32, 32), 10, {}, 1_146_088),
        ("vgg9", (3, 32, 32), 10, {}, 3_491_530),
        ("vgg9", (3, 32, 32), 100, {"dropout": False}, 3_491_530 + 90 * 513),
        ("vgg11", (3, 32, 32), 10, {}, 9_220_480 + 2 * 262_656 + 5_130),
        ("vgg16", (3, 32, 32), 10, {"batch_norm": False}, 14_714_688 + 65_664 + 1_290),
        ("vgg16", (3, 32, 32), 10, {}, 14_714_688 + 2 * 4_224 + 65_664 + 1_290),
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("pfl_cnn", (3, 32, 32), 10, {}, 896 + 18_496 + 12_544 * 128 + 128 + 1_290),
    ],
)
def test_the_papers_networks_have_their_numbers_of_parameters(
    name: str, shape: tuple[int, ...], n_classes: int, options: dict[str, int | bool], wanted: int
) -> None:
    """VGG: configurations A and D as torchvision counts them; vgg16's batch norms add a pair for
    4,224 channels."""
    params, _ = build(name, shape, n_classes, options).init(torch.Generator().manual_seed(0))
    assert sum(leaf.numel() for leaf in params.values()) == wanted


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_projection_head_lies_between_encoder_and_classifier(kind: str) -> None:
    """MOON's: hidden - hidden - 5 with one ReLU; its output is what the classifier and the contrast
    read."""
    network = build(kind, (1, 8, 8), 10, {"hidden": 16, "projection": 5})
    assert network.feature_size == 5
    assert [layer.name for layer in network.layers][-3:] == ["projection1", "projection2", "fc2"]
    params, buffers = network.init(torch.Generator().manual_seed(1))
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    out, seen = network(params, buffers, x, False), network.activations(params, buffers, x)
    h = torch.relu(seen["fc1"] @ params["projection1.weight"].T + params["projection1.bias"])
    z = h @ params["projection2.weight"].T + params["projection2.bias"]
    torch.testing.assert_close(out.features, z)
    torch.testing.assert_close(seen["projection2"], z)
    assert bool((z < 0).any()), "no ReLU behind it"


@pytest.mark.parametrize("kind", IMAGES)
def test_the_layers_of_every_network(kind: str) -> None:
    """In forward order; each parameter belongs to one and has a row per unit; each layer's output
    is recorded; the features are the input of the classifier."""
    network = build(kind, IMAGES[kind], 10)
    params, buffers = network.init(torch.Generator().manual_seed(0))
    named = [name for layer in network.layers for name in layer.parameters]
    assert named == list(params)
    for layer in network.layers:
        assert {params[name].shape[0] for name in layer.parameters} == {layer.units}
        assert all(name.startswith(layer.name) for name in layer.parameters)
    x = torch.randn(2, *IMAGES[kind], generator=torch.Generator().manual_seed(2))
    found, out = network.activations(params, buffers, x), network(params, buffers, x, False)
    assert {name: h.shape[:2] for name, h in found.items()} == {
        layer.name: (2, layer.units) for layer in network.layers
    }
    weight, bias = (params[name] for name in network.layers[-1].parameters)
    torch.testing.assert_close(out.logits, out.features @ weight.T + bias)
    assert network.dense is (kind in DENSE) and network.feature_size == out.features.shape[1]
    assert (network.tokens, network.frozen) == (False, frozenset())


SHAPES = {"1d": (7, 4), "2d": (5, 4, 3, 2)}


def normalise(
    x: torch.Tensor,
    buffers: Params,
    train: bool,
    mask: torch.Tensor | None = None,
    plain: bool = False,
) -> tuple[torch.Tensor, Params]:
    """By a batch norm with these running statistics; they are data, without a graph."""
    weight, bias = torch.linspace(0.5, 2, 4, dtype=x.dtype), torch.linspace(-1, 1, 4, dtype=x.dtype)
    run = Forward({"bn.weight": weight, "bn.bias": bias}, dict(buffers), train, mask, plain=plain)
    out = BatchNorm("bn", 4)(run, x.requires_grad_())
    assert not any(leaf.requires_grad for leaf in run.buffers.values())
    return out.detach(), run.buffers


@pytest.mark.parametrize("plain", [False, True], ids=["open", "plain"])
@pytest.mark.parametrize("kind", SHAPES)
def test_batch_norm_equals_torchs(kind: str, plain: bool) -> None:
    """Three batches in train mode, then one in eval mode: outputs and running statistics."""
    theirs = {"1d": torch.nn.BatchNorm1d, "2d": torch.nn.BatchNorm2d}[kind](4).double()
    with torch.no_grad():
        theirs.weight.copy_(torch.linspace(0.5, 2, 4, dtype=torch.float64))
        theirs.bias.copy_(torch.linspace(-1, 1, 4, dtype=torch.float64))
    _, first = BatchNorm("bn", 4).init(torch.Generator())
    buffers = {key: leaf.double() for key, leaf in first.items()}
    generator = torch.Generator().manual_seed(0)
    for train in (True, True, True, False):
        x = 3 * torch.randn(SHAPES[kind], generator=generator, dtype=torch.float64) + 1
        theirs.train(train)
        wanted = theirs(x).detach()
        out, buffers = normalise(x, buffers, train, plain=plain)
        for mine, leaf in (
            (out, wanted),
            (buffers["bn.mean"], theirs.running_mean),
            (buffers["bn.var"], theirs.running_var),
        ):
            torch.testing.assert_close(mine, leaf, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_padded_samples_do_not_count(kind: str) -> None:
    """A masked batch equals the batch without its padding, whatever the padding is."""
    zeros = torch.zeros(4, dtype=torch.float64)
    buffers = {"bn.mean": zeros, "bn.var": zeros + 1}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPES[kind], generator=generator, dtype=torch.float64)
    padded = torch.cat([x, 100 * torch.ones(2, *x.shape[1:], dtype=torch.float64)])
    mask = torch.tensor([True] * len(x) + [False] * 2)
    wanted, after = normalise(x, buffers, True)
    out, masked = normalise(padded, buffers, True, mask)
    torch.testing.assert_close(out[: len(x)], wanted, rtol=1e-12, atol=1e-12)
    for key, leaf in after.items():
        torch.testing.assert_close(masked[key], leaf, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plain", [False, True], ids=["open", "plain"])
def test_one_value_per_channel_leaves_numbers(plain: bool) -> None:
    """torch refuses it; here the unbiased factor stays 1: mean 0.1 x, variance 0.9."""
    buffers = {"bn.mean": torch.zeros(4), "bn.var": torch.ones(4)}
    out, after = normalise(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), buffers, True, plain=plain)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(after["bn.mean"], torch.tensor([0.1, 0.2, 0.3, 0.4]))
    torch.testing.assert_close(after["bn.var"], torch.full((4,), 0.9))


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        *[
            (kind, layer, lambda w: torch.nn.init.kaiming_uniform_(w, a=math.sqrt(5)))
            for kind, layer in (
                ("mlp", "fc1"),
                ("cnn", "conv2"),
                ("fednnnn_cifar", "fc1"),
                ("vgg16", "conv3"),
                ("resnet18", "block3_1_conv2"),
            )
        ],
        ("vgg9", "conv2", torch.nn.init.kaiming_uniform_),
        ("vgg9", "fc1", torch.nn.init.xavier_normal_),
        ("vgg9", "fc3", torch.nn.init.xavier_normal_),
        ("vgg11", "conv3", lambda w: torch.nn.init.kaiming_normal_(w, mode="fan_out")),
        ("vgg11", "fc2", lambda w: torch.nn.init.kaiming_uniform_(w, a=math.sqrt(5))),
        ("pfl_cnn", "conv2", torch.nn.init.xavier_uniform_),
        ("pfl_cnn", "fc1", torch.nn.init.xavier_uniform_),
    ],
)
def test_weights_start_as_torchs_initialisers_draw_them(
    kind: str, ours: str, theirs: Callable[[Any], Any]
) -> None:
    """Same spread; the same largest value too where it is bounded."""
    params, _ = build(kind, (3, 32, 32), 10).init(torch.Generator().manual_seed(0))
    weight = params[f"{ours}.weight"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = theirs(torch.empty_like(weight))
    assert weight.std().item() == pytest.approx(wanted.std().item(), rel=0.05)
    assert weight.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.25)
    if kind != "resnet18":  # without biases
        bias = params[f"{ours}.bias"]
        assert bool((bias == 0).all()) is (kind == "vgg11" and ours.startswith("conv"))
        assert bias.abs().max() <= 1 / math.sqrt(weight[0].numel())


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        (
            "cn",
            (1, 28, 28),
            {},
            r"'cn' is unknown \(did you mean 'cnn'\?\); allowed: logistic_regression, mlp, cnn, f",
        ),
        ("cnn", (4,), {}, r"needs images"),
        ("cnn", (1, 3, 8), {}, r"at least 4x4"),
        (
            "fednnnn_mnist",
            (1, 32, 32),
            {},
            r"'fednnnn_mnist' needs images of 28x28, .* 800-500 .*, got \(1, 32, 32\)",
        ),
        ("fednnnn_cifar", (3, 28, 28), {}, r"needs images of 32x32, .* 2048-382"),
        (
            "vgg9",
            (3, 28, 28),
            {},
            r"'vgg9' needs images of 32x32, which its 4096-512 layer fits, got \(3, 28, 28\)",
        ),
        ("vgg9", (3072,), {}, r"needs images of 32x32"),
        ("vgg11", (3, 64, 64), {}, r"needs images of 32x32, .* 512-512"),
        ("vgg16", (1, 28, 28), {}, r"at least 32x32"),
        ("resnet18", (3, 4, 4), {}, r"at least 8x8"),
        ("pfl_cnn", (3, 5, 5), {}, r"at least 6x6"),
    ],
)
def test_bad_models_are_refused(
    name: str, shape: tuple[int, ...], options: dict[str, int], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        build(name, shape, 10, options)
