"""Networks as users write them: each trains as plain torch trains the untouched module, or is
refused in one line that says which layer and what to do."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fedml_noniid as nd
from fedml_noniid import own_code
from fedml_noniid.core.data import Samples
from fedml_noniid.models import build, name_of
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.modules import Scope, prepare
from fedml_noniid.models.own import OwnNetwork
from tests import federation

CLASSES = 3
CLIENTS = [list(range(30)), list(range(30, 50)), list(range(50, 60))]  # full batches of each
Make = Callable[[], nn.Module]


def samples() -> nd.Data:
    rng, y = np.random.default_rng(0), np.arange(90) % CLASSES
    x = rng.normal(size=(90, 1, 6, 6)) + 0.5 * y.reshape(-1, 1, 1, 1)
    return nd.from_arrays(x.astype(np.float32), y, layout="CHW")


DATA = samples()


def in_torch(
    net: nn.Module, x: Tensor, y: Tensor, clients: Sequence[list[int]], lr: float
) -> nn.Module:
    """Two rounds of FedAvg with one full batch a client and round: the means of state dicts."""
    state, total = copy.deepcopy(net.state_dict()), sum(map(len, clients))
    for _ in range(2):
        states = []
        for rows in clients:
            net.load_state_dict(state)
            net.train().zero_grad()
            loss = F.cross_entropy(net(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            torch.optim.SGD([leaf for leaf in net.parameters() if leaf.requires_grad], lr).step()
            states.append({name: leaf.clone() for name, leaf in net.state_dict().items()})
        for name, leaf in state.items():
            parts = zip(clients, states, strict=True)
            mean = sum(len(rows) / total * one[name].double() for rows, one in parts)
            state[name] = torch.as_tensor(mean).to(leaf.dtype)
    net.load_state_dict(state)
    return net.eval()


def check(net: nn.Module) -> None:
    """Runs of the product, then plain torch with the module itself: the same within 1e-4."""
    split = nd.partition(DATA, indices=CLIENTS)
    how: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 64, "momentum": 0.0, "lr": 0.1}
    generator = torch.get_rng_state()
    results = [nd.run("fedavg", split, model=net, engine="sequential", **how)]
    model, data = results[0].model(), DATA.dataset
    if model._network.vmappable:
        results.append(nd.run("fedavg", split, model=net, engine="vectorized", **how))
    assert torch.equal(generator, torch.get_rng_state())
    expected = in_torch(net, data.normalised("train"), data.train_y, CLIENTS, 0.1)
    for result in results:
        trained = result.weights[0]
        names = [name for name, _ in net.named_parameters()]
        assert [*trained][: len(names)] == names
        for name, leaf in expected.named_parameters():
            torch.testing.assert_close(trained[name], leaf.detach(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        logits = expected(data.normalised("test"))
        torch.testing.assert_close(model(data.test_x), logits, rtol=1e-4, atol=1e-4)


class Net(nn.Module):
    """A function of the module and its samples, with submodules or plain attributes."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Frozen(nn.Sequential):
    """Keeps its batch norms in evaluation, found by their type."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for part in self.modules():
            if type(part) is nn.BatchNorm2d:
                part.eval()
        return self


class Active(nn.BatchNorm2d):
    """Has its activation inside, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(super().forward(x), 0.2)


class Average(nn.Module):
    """Subtracts a moving average, which is changed in place, or assigned."""

    average: Tensor

    def __init__(self, in_place: bool, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1), persistent=persistent)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        mean = 0.1 * x.detach().mean()
        if self.training and self.in_place:
            self.average.mul_(0.9).add_(mean)
        elif self.training:
            self.average = 0.9 * self.average + mean
        return x - self.average


def flat(*layers: nn.Module, n: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(n, CLASSES))


def images(*layers: nn.Module, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    conv = nn.Conv2d(1, 4, 3, padding=1)
    return kind(conv, *layers, nn.Flatten(), nn.Linear(144, CLASSES))


def changed(net: Any, change: Callable[[Any], object]) -> nn.Module:
    """The network after a change."""
    change(net)
    module: nn.Module = net
    return module


def over_rows(body: nn.Module, rows: Callable[[Any, Tensor], Tensor], n: int) -> nn.Module:
    """A body of sequences [B, 6, 6], and what its output is for the classifier."""
    return Net(lambda net, x: net.out(rows(net, x[:, 0])), body=body, out=nn.Linear(n, CLASSES))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def cached(net: Any, x: Tensor) -> Tensor:
    """Makes a constant in its first pass, and leaves an output that nobody reads."""
    if net.ramp is None:
        net.ramp = torch.linspace(0, 1, 36)
    net.last = net.out(x.flatten(1) * net.ramp)
    last: Tensor = net.last
    return last


def halved(net: Any, x: Tensor) -> Tensor:
    h = net.body(x.flatten(1))
    if h.requires_grad:
        h.register_hook(lambda grad: 0.5 * grad)
    out: Tensor = net.out(h)
    return out


def setattr_(net: Any, name: str, value: Any) -> Any:
    setattr(net, name, value)
    return value


def limited(net: Any, x: Tensor) -> Tensor:
    """As EEGNet's layers: a limit that the first values keep."""
    net.out.weight.data = torch.renorm(net.out.weight.data, 2, 0, maxnorm=5)
    out: Tensor = net.out(x.flatten(1))
    return out


def whole(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def linear(n: int = 36) -> nn.Linear:
    return nn.Linear(n, CLASSES)


TRAINED: dict[str, Make] = {
    "batch norms": lambda: images(nn.BatchNorm2d(4), nn.ReLU()),
    "frozen by type": lambda: images(nn.BatchNorm2d(4), kind=Frozen),
    "subclass, activation": lambda: images(Active(4), nn.Conv2d(4, 4, 1), Active(4)),
    "SyncBatchNorm": lambda: images(nn.SyncBatchNorm(4)),
    "BatchNorm3d": lambda: nn.Sequential(
        *(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, (1, 3, 3)), nn.BatchNorm3d(2)),
        *(nn.Flatten(), linear(32)),
    ),
    "affine=False, images": lambda: images(nn.BatchNorm2d(4, affine=False)),
    "affine=False, vectors": lambda: flat(nn.Linear(36, 8), nn.BatchNorm1d(8, affine=False)),
    "momentum in forward": lambda: Net(
        lambda net, x: net.body(x) if setattr(net.body[1], "momentum", 0.3) is None else None,
        body=images(nn.BatchNorm2d(4)),
    ),
    "norm, forward hook": lambda: changed(
        images(nn.BatchNorm2d(4)),
        lambda net: net[1].register_forward_hook(lambda *args: F.relu(args[2])),
    ),
    "norm, pre-hook": lambda: changed(
        images(nn.BatchNorm2d(4)),
        lambda net: net[1].register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    ),
    "norm, backward hook": lambda: changed(
        images(nn.BatchNorm2d(4)),
        lambda net: net[1].register_full_backward_hook(lambda *args: (0.5 * args[1][0],)),
    ),
    "norm, parametrised": lambda: images(parametrizations.weight_norm(nn.BatchNorm2d(4), dim=0)),
    "dropout, forward hook": lambda: changed(
        flat(nn.Linear(36, 8), nn.Dropout(0.0)),
        lambda net: net[2].register_forward_hook(lambda *args: 3 * args[2]),
    ),
    "GroupNorm": lambda: images(nn.GroupNorm(2, 4)),
    "LayerNorm": lambda: flat(nn.LayerNorm(36), n=36),
    "RMSNorm": lambda: flat(nn.RMSNorm(36), n=36),
    "InstanceNorm": lambda: images(nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm, statistics": lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)),
    "LocalResponseNorm": lambda: images(nn.LocalResponseNorm(2)),
    "PReLU": lambda: images(nn.PReLU()),
    "RReLU": lambda: images(nn.RReLU(0.2, 0.2)),
    "AlphaDropout": lambda: flat(nn.AlphaDropout(0.0), n=36),
    "ConvTranspose": lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten(), linear(128)),
    "Bilinear": lambda: over_rows(
        nn.Bilinear(6, 6, 4), lambda net, x: net.body(x[:, 0], x[:, 1]), 4
    ),
    "GRU": lambda: over_rows(
        nn.GRU(6, 5, batch_first=True), lambda net, x: net.body(x)[0][:, -1], 5
    ),
    "LSTM": lambda: over_rows(
        nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
        lambda net, x: net.body(x)[1][0][-1],
        5,
    ),
    "LSTMCell": lambda: over_rows(nn.LSTMCell(6, 5), lambda net, x: net.body(x[:, 0])[0], 5),
    "attention": lambda: over_rows(
        nn.MultiheadAttention(6, 2, batch_first=True),
        lambda net, x: net.body(x, x, x)[0].mean(1),
        6,
    ),
    "encoder": lambda: over_rows(encoder(), lambda net, x: net.body(x).mean(1), 6),
    "EmbeddingBag": lambda: over_rows(
        nn.EmbeddingBag(2, 5), lambda net, x: net.body((x[:, 0] > 0).long()), 5
    ),
    "weight norm": lambda: flat(parametrizations.weight_norm(nn.Linear(36, 8)), nn.Tanh()),
    "weight norm of the head": lambda: nn.Sequential(
        nn.Flatten(), parametrizations.weight_norm(linear())
    ),
    "old weight norm": lambda: flat(utils.weight_norm(nn.Linear(36, 8)), nn.Tanh()),
    "spectral norm": lambda: flat(parametrizations.spectral_norm(nn.Linear(36, 8)), nn.Tanh()),
    "old spectral norm": lambda: flat(utils.spectral_norm(nn.Linear(36, 8)), nn.Tanh()),
    "orthogonal": lambda: flat(parametrizations.orthogonal(nn.Linear(36, 8)), nn.Tanh()),
    "pruned": lambda: changed(
        flat(nn.Linear(36, 8)), lambda net: prune.l1_unstructured(net[1], "weight", 0.5)
    ),
    "buffer in place": lambda: flat(Average(in_place=True), n=36),
    "buffer assigned": lambda: flat(Average(in_place=False), n=36),
    "buffer of float64": lambda: changed(
        Net(lambda net, x: net.out((x.flatten(1).double() @ net.eye).float()), out=linear()),
        lambda net: net.register_buffer("eye", torch.eye(36, dtype=torch.float64)),
    ),
    "float32 by itself": lambda: Net(lambda net, x: net.out(x.flatten(1).float()), out=linear()),
    "tensor in an attribute": lambda: Net(
        lambda net, x: net.out(x.flatten(1) @ net.eye), eye=torch.eye(36), out=linear()
    ),
    "constant made by a pass": lambda: Net(cached, out=linear(), ramp=None, last=None),
    "view": lambda: Net(
        lambda net, x: net.out(torch.relu(net.conv(x)).view(x.size(0), -1)),
        conv=nn.Conv2d(1, 4, 3, padding=1),
        out=linear(144),
    ),
    "head by keyword": lambda: Net(lambda net, x: net.out(input=x.flatten(1)), out=linear()),
    "tied": lambda: Net(
        lambda net, x: net.out(F.linear(torch.tanh(net.body(x.flatten(1))), net.body.weight.t())),
        body=nn.Linear(36, 8),
        out=linear(),
    ),
    "one parameter in two layers": lambda: changed(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), linear()),
        lambda net: setattr(net[3], "weight", net[1].weight),
    ),
    "a layer that no pass uses": lambda: Net(
        lambda net, x: net.out(x.flatten(1)), unused=nn.Linear(2, 2), out=linear()
    ),
    "no linear layer": lambda: nn.Sequential(nn.Conv2d(1, CLASSES, 6), nn.Flatten()),
    "lists and dicts": lambda: Net(
        lambda net, x: net.parts["out"](x.flatten(1) * net.scales[0] + net.shifts["a"]),
        parts=nn.ModuleDict({"out": linear()}),
        scales=nn.ParameterList([torch.ones(36)]),
        shifts=nn.ParameterDict({"a": torch.zeros(36)}),
    ),
    "no gradient in a part": lambda: Net(
        lambda net, x: net.out(torch.no_grad()(net.body)(x.flatten(1))),
        body=nn.Linear(36, 8),
        out=linear(8),
    ),
    "a frozen part": lambda: changed(
        flat(nn.Linear(36, 8)), lambda net: net[1].requires_grad_(requires_grad=False)
    ),
    "a frozen weight in a list": lambda: changed(
        Net(
            lambda net, x: net.out(x.flatten(1) @ net.weights[0].T),
            body=nn.Linear(36, 8, bias=False).requires_grad_(requires_grad=False),
            out=linear(8),
        ),
        lambda net: setattr_(net, "weights", [net.body.weight]),
    ),
    "hook on an activation": lambda: Net(halved, body=nn.Linear(36, 8), out=linear(8)),
    "checkpoint": lambda: Net(
        lambda net, x: net.out(checkpoint(net.body, x.flatten(1), use_reentrant=False)),
        body=nn.Sequential(nn.Linear(36, 8), nn.Tanh()),
        out=linear(8),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # the old one
@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_in_torch(name: str) -> None:
    torch.manual_seed(1)
    check(TRAINED[name]())


# The message of each, from the layer on.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hook on a gradient": (
        lambda: changed(flat(n=36), lambda net: net[1].weight.register_hook(lambda grad: 0 * grad)),
        "1.weight: a parameter with a hook on its gradient, .* allowed: `freeze`",
    ),
    "hook behind a gradient": (
        lambda: changed(
            flat(n=36),
            lambda net: net[1].bias.register_post_accumulate_grad_hook(lambda leaf: None),
        ),
        "1.bias: a parameter with a hook on its gradient",
    ),
    "state in an attribute": (
        lambda: Net(
            lambda net, x: net.out(x.flatten(1)) - setattr_(net, "mu", net.mu + x.mean().detach()),
            out=linear(),
            mu=torch.zeros(1),
        ),
        r"its output is another one than in .*, and keep what changes in a buffer \(register_buff",
    ),
    "counter": (
        lambda: Net(
            lambda net, x: net.out(x.flatten(1)) * (1 + (setattr_(net, "n", net.n + 1) > 99)),
            out=linear(),
            n=0,
        ),
        "each pass changes n, a number in an attribute; allowed: a buffer of floating-point",
    ),
    "count of batches": (
        lambda: Net(
            lambda net, x: net.body(x) * (1 + 0.1 * net.body[1].num_batches_tracked),
            body=images(nn.BatchNorm2d(4)),
        ),
        "its output is another one than in plain torch",
    ),
    "parameter in a list": (
        lambda: changed(
            Net(lambda net, x: F.linear(x.flatten(1), net.weights[0], net.out.bias), out=linear()),
            lambda net: setattr(net, "weights", [net.out.weight]),
        ),
        "its output is another one than in plain torch",
    ),
    "closure": (
        lambda: changed(
            Net(lambda net, x: net.again(x.flatten(1)), out=linear()),
            lambda net: setattr(net, "again", lambda x: net.out(x)),
        ),
        "Net: a function in it refers to a module or a tensor.* allowed: a method",
    ),
    "NaN": (
        lambda: Net(
            lambda net, x: net.out(net.log(x.flatten(1))),
            log=Net(lambda _, x: torch.log(-x.abs())),
            out=linear(),
        ),
        r"the output of log is not finite \(NaN or infinite\)",
    ),
    "NaN that the logits do not have": (
        lambda: Net(
            lambda net, x: net.out(x.flatten(1)) + 0 * net.log(x).nan_to_num().sum(),
            log=Net(lambda _, x: torch.log(-x.abs())),
            out=linear(),
        ),
        r"the output of log is not finite \(NaN or infinite\); allowed: finite numbers",
    ),
    "infinite gradient": (
        lambda: Net(
            lambda net, x: net.out(x.flatten(1)) + (net.out.bias * 0).abs().sqrt(), out=linear()
        ),
        r"the gradient of out.bias is not finite \(NaN or infinite\)",
    ),
    "draws in evaluation": (
        lambda: Net(lambda net, x: F.dropout(net.out(x.flatten(1)), 0.5), out=linear()),
        "its pass draws in evaluation; allowed: draws in training only",
    ),
    "draws of NumPy": (
        lambda: Net(lambda net, x: net.out(x.flatten(1)) + np.random.normal(), out=linear()),
        "two passes .* differ; allowed: draws in training only, from torch's own generator",
    ),
    "tuple": (
        lambda: Net(lambda net, x: (net.out(x.flatten(1)), x), out=linear()),
        "its forward gives a tuple; allowed: one tensor, the logits; a module around it",
    ),
    "dict": (
        lambda: Net(lambda net, x: {"logits": net.out(x.flatten(1))}, out=linear()),
        "its forward gives a dict",
    ),
    "whole numbers first": (
        lambda: changed(
            flat(n=36), lambda net: net.register_parameter("at", whole(torch.arange(3)))
        ),
        "at: a parameter of torch.int64; allowed: real numbers",
    ),
    "complex numbers": (
        lambda: changed(
            flat(n=36), lambda net: net.register_parameter("at", whole(torch.ones(1) * 1j))
        ),
        "at: a parameter of torch.complex64; allowed: real numbers",
    ),
    "scripted": (lambda: torch.jit.script(flat(n=36)), "a scripted or traced module"),
    "scripted part": (
        lambda: nn.Sequential(torch.jit.script(nn.Flatten()), linear()),
        "0: a scripted or traced module; allowed: the module that it was made of",
    ),
    "compiled": (lambda: torch.compile(flat(n=36)), "a compiled module; allowed: the module"),
    "several devices": (lambda: nn.DataParallel(flat(n=36)), "a module for several devices"),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "1: a lazy module"),
    "quantised": (
        lambda: torch.ao.quantization.quantize_dynamic(flat(n=36), {nn.Linear}),
        "no parameter has a gradient; allowed: one that is trained",
    ),
    "sparse gradient": (
        lambda: over_rows(
            nn.EmbeddingBag(2, 5, sparse=True), lambda net, x: net.body((x[:, 0] > 0).long()), 5
        ),
        "the gradient of body.weight is sparse; allowed: sparse=False",
    ),
    "weight changed by a pass": (
        lambda: over_rows(
            nn.EmbeddingBag(2, 5, max_norm=0.1), lambda net, x: net.body((x[:, 0] > 0).long()), 5
        ),
        "its forward changes body.weight; allowed: a forward that leaves it",
    ),
    "weight limited by a pass": (
        lambda: Net(limited, out=linear()),
        "its forward changes out.weight; allowed: a forward that leaves it",
    ),
    "checkpoint of a norm": (
        lambda: Net(
            lambda net, x: net.out(checkpoint(net.body, x.flatten(1), use_reentrant=False)),
            body=nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8)),
            out=linear(8),
        ),
        "body.1 runs again in the backward pass; allowed: batch norms and dropouts outside of",
    ),
    "count in a buffer": (
        lambda: changed(
            Net(
                lambda net, x: net.out(x.flatten(1) + 0 * setattr_(net, "n", net.n + net.training)),
                out=linear(),
            ),
            lambda net: net.register_buffer("n", torch.zeros((), dtype=torch.int64)),
        ),
        "training changes n, a buffer of whole numbers",
    ),
    "a buffer that evaluation changes": (
        lambda: changed(
            Net(
                lambda net, x: net.out(x.flatten(1)) + 0 * setattr_(net, "n", net.n + 1),
                out=linear(),
            ),
            lambda net: net.register_buffer("n", torch.zeros(())),
        ),
        "a pass in evaluation changes the buffer n; allowed: changes in training",
    ),
    "samples changed": (
        lambda: Net(lambda net, x: net.out(x.clamp_(max=0.5).flatten(1)), out=linear()),
        "its forward changes the samples",
    ),
    "first values of NumPy": (
        lambda: changed(
            flat(n=36),
            lambda net: net[1].weight.data.mul_(float(np.random.normal())),
        ),
        "its first values differ between two calls with one seed",
    ),
    "another number of classes": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4)),
        r"gives \[4, 4\] for 4 samples; allowed: logits \[4, 3\]",
    ),
    "a forward that fails": (
        lambda: Net(lambda net, x: net.out(x), out=linear()),
        r"test_as_in_torch.py, line \d+: RuntimeError: mat1 and mat2",
    ),
    "cumulative mean": (
        lambda: images(nn.BatchNorm2d(4, momentum=None)),
        "1: a batch norm with momentum = None",
    ),
    "no module": (lambda: 3, "gives a int; allowed: a torch.nn.Module"),
    "statistics of the batch": (
        lambda: images(nn.BatchNorm2d(4, track_running_stats=False)),
        "1: a batch norm without running statistics",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of scripts and quantisation
@pytest.mark.parametrize(
    "name",
    # torch.compile takes seconds to import.
    [*sorted(REFUSED.keys() - {"compiled"}), pytest.param("compiled", marks=pytest.mark.slow)],
)
def test_it_is_refused_with_the_layer(name: str) -> None:
    make, message = REFUSED[name]
    split = nd.partition(DATA, indices=CLIENTS)
    with pytest.raises(nd.UserError, match=message) as caught:
        nd.run("fedavg", split, model=make, rounds=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.5), (64, 8)),
        (nn.Dropout(0.5, inplace=True), (64, 4, 5)),
        (nn.Dropout2d(0.5), (64, 8, 4, 5)),
        (nn.Dropout2d(0.5, inplace=True), (64, 8, 4)),
        (nn.Dropout3d(0.5), (64, 8, 2, 3, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")  # torch's, of three axes
def test_a_dropout_that_draws_from_keys_drops_what_torch_drops(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """Numbers are 0 or 2, and along the same axes all of them are the same."""
    scope, other = Scope(), copy.deepcopy(layer)
    prepare(layer, scope)
    scope.run = Forward({}, {}, train=True, key=torch.tensor(5))
    x = torch.ones(shape)
    found, expected = layer(x), other(torch.ones(shape))
    assert (found is x) is layer.inplace
    assert set(found.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(layer(torch.ones(shape)), found), "another call of the pass"
    for axis in range(1, x.ndim):
        same, wanted = (
            torch.equal(y, y.narrow(axis, 0, 1).expand_as(y)) for y in (found, expected)
        )
        assert same is wanted


def test_layers_that_stay_are_named_and_train_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    split = nd.partition(DATA, indices=CLIENTS)
    result = nd.run("fedavg", split, model=images(Active(4)), rounds=1)
    reason = "samples of a batch change each other's numbers; as it is stays 1 (Active)"
    tag = json.loads(result.files[0].run["run.json"])["tags"]["one_by_one"]
    assert reason in tag and reason in caplog.text


def test_samples_may_be_positive_only() -> None:
    """Random samples of both signs give NaN, and that says nothing about the user's."""
    make = partial(Net, lambda net, x: net.out(torch.sqrt(x.flatten(1))), out=linear())
    assert isinstance(build(name_of(make), (1, 6, 6), CLASSES), OwnNetwork)


def test_a_head_is_named() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Tanh(), nn.Linear(3, CLASSES))

    split = nd.partition(DATA, indices=CLIENTS)
    named, by_default = (
        nd.run("fedper", split, model=make, rounds=1, **how) for how in ({"head": "3"}, {})
    )
    assert named.sha256 == by_default.sha256
    with pytest.raises(nd.UserError, match="1 does not make the logits; allowed: a linear layer"):
        nd.run("fedavg", split, model=make, rounds=1, head="1")


def test_a_function_may_give_one_module_each_time() -> None:
    """Each run starts from its parameters, and leaves it as it is."""
    net = images(nn.BatchNorm2d(4))
    before = copy.deepcopy(net.state_dict())
    results = [
        nd.run("fedavg", nd.partition(DATA, indices=CLIENTS), model=model, rounds=1)
        for model in (net, lambda: net)
    ]
    assert results[0].sha256 == results[1].sha256 and not vars(net[1]).get("forward")
    for name, leaf in net.state_dict().items():
        assert torch.equal(leaf, before[name]) and leaf.dtype == before[name].dtype


QUICK = ("shufflenet_v2_x0_5",)
SLOW = (
    *("mobilenet_v3_small", "mnasnet0_5", "squeezenet1_1"),
    *("vgg11", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2"),
    *("squeezenet1_0", "densenet121", "googlenet", "mobilenet_v2", "mobilenet_v3_large"),
    *("mnasnet1_0", "shufflenet_v2_x1_0", "efficientnet_b0", "efficientnet_v2_s"),
    *("regnet_y_400mf", "regnet_x_400mf", "convnext_tiny", "vit_b_32", "swin_t", "swin_v2_t"),
)


@pytest.mark.filterwarnings("ignore:The default weight initialization of GoogleNet")
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_torchvisions_architectures_train_as_in_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout, in float64: batch norms of few numbers magnify rounding, so that float32
    says nothing about many of them, in plain torch either."""
    monkeypatch.setattr(own_code, "_registered", {})  # it would keep all networks in memory
    models = pytest.importorskip("torchvision", reason="torchvision is not installed").models
    options: dict[str, Any] = {"googlenet": {"aux_logits": False}}.get(name, {})
    if name.startswith("vit"):
        options = {"image_size": 32}
    torch.manual_seed(1)
    net = getattr(models, name)(num_classes=CLASSES, **options)
    for part in net.modules():
        if isinstance(part, _DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0
    x, y = torch.randn(20, 3, 32, 32, dtype=torch.float64), torch.arange(20) % CLASSES
    clients, data = [np.arange(12), np.arange(12, 20)], Samples(x, y)
    of = federation.Federation(data, clients, data, data)
    built = build(name_of(net), (3, 32, 32), CLASSES)
    how: dict[str, Any] = {"rounds": 2, "epochs": 1, "cohort": 2, "batch_size": 20, "lr": 1e-3}
    found = federation.run("fedavg", data=of, model=built, dtype=torch.float64, **how)
    rows = [client.tolist() for client in clients]
    expected = in_torch(net.double(), x, y, rows, 1e-3)
    for leaf_name, leaf in expected.named_parameters():
        torch.testing.assert_close(found.params[leaf_name], leaf.detach(), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        logits = replace(built, plain=True)(found.params, found.buffers, x, False).logits
        torch.testing.assert_close(logits, expected(x), rtol=1e-6, atol=1e-6)
