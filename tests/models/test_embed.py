"""A frozen network makes a vector of each sample, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.models import name_of
from fedml_noniid.models.embed import EmbedSettings
from tests.models.test_as_in_torch import Net

DIGITS = nd.load("digits").dataset


class Body(nn.Module):
    """Convolution, batch norm, dropout, a hidden layer, a classifier."""

    def __init__(self, n_classes: int, width: int = 4) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.drop, self.mid = nn.Dropout(0.5), nn.Linear(width * 9, 7)
        self.out = nn.Linear(7, n_classes)

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return torch.relu(self.mid(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(self.hidden(x)))
        return logits


class Headless(Body):
    """Ends with the hidden layer's ReLU: that linear layer makes no output."""

    forward = Body.hidden


def weights() -> dict[str, Tensor]:
    """Fixed weights, and running statistics of some passes."""
    torch.manual_seed(1)
    net = Body(10)
    for leaf in net.parameters():
        nn.init.normal_(leaf)
    net(torch.randn(50, 1, 8, 8))
    return net.state_dict()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save(weights(), path)
    return path


def settings(model: Any = Body, **options: Any) -> EmbedSettings:
    return EmbedSettings(model=name_of(model), **options)


def in_torch(x: Tensor) -> Tensor:
    """The input of `out`, in float64."""
    net = Body(10)
    net.load_state_dict(weights())
    return net.double().eval().hidden(x.double())


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)


def test_vectors_are_the_input_of_the_last_linear_layer(file: Path) -> None:
    """Running statistics, no dropout, the data set's own normalisation; labels stay."""
    found = settings(init=str(file)).embedded(DIGITS)
    close(found.train_x, in_torch(DIGITS.normalised("train")))
    close(found.test_x, in_torch(DIGITS.normalised("test")))
    assert torch.equal(found.train_y, DIGITS.train_y) and found.name == DIGITS.name
    assert torch.equal(found.normalised("train"), found.train_x), "used as they are"
    (note,) = found.notes
    assert note.startswith("samples are vectors of 7 numbers, the input of out of ")


def test_a_layer_may_be_named_and_a_network_may_have_no_classifier(file: Path) -> None:
    named = settings(init=str(file), layer="mid").embedded(DIGITS)
    headless = settings(Headless, init=str(file)).embedded(DIGITS)
    wanted = in_torch(DIGITS.normalised("train"))
    close(named.train_x.relu(), wanted)
    assert named.train_x.min() < 0, "before the ReLU"
    close(headless.train_x, wanted)
    assert "the output of " in headless.notes[0]
    conv = settings(init=str(file), layer="conv").embedded(DIGITS)
    assert conv.train_x.shape[1] == 4 * 6 * 6, "images as one row"


def test_threads_share_the_chunks_and_change_no_bit(file: Path) -> None:
    one = settings(init=str(file), batch=100)
    alone, beside = (one.embedded(DIGITS, threads) for threads in (1, 3))
    assert alone.checksum == beside.checksum
    other = settings(init=str(file), batch=7).embedded(DIGITS)
    torch.testing.assert_close(other.train_x, alone.train_x, rtol=1e-5, atol=1e-5)
    of_silo = one.vectors(DIGITS.normalised("test")[:100], 10)
    assert torch.equal(of_silo, alone.test_x[:100]), "a silo embeds its own samples"
    assert one.outline(DIGITS).train_x.shape == alone.train_x.shape


def test_what_becomes_of_the_scale(file: Path) -> None:
    plain = settings(init=str(file)).embedded(DIGITS)
    length = settings(init=str(file), normalise="length").embedded(DIGITS)
    lengths = torch.linalg.vector_norm(length.train_x, dim=1)
    assert (((lengths - 1).abs() < 1e-6) | (lengths == 0)).all() and (lengths > 0).any()
    channel = settings(init=str(file), normalise="channel").embedded(DIGITS)
    z = plain.train_x.double().numpy()
    wanted = (z - z.mean(0)) / np.where(z.std(0) > 0, z.std(0), 1)
    np.testing.assert_allclose(channel.normalised("train").numpy(), wanted, atol=1e-5)


def test_our_networks_take_the_weights_of_a_run(tmp_path: Path) -> None:
    """Whatever the number of classes was: the classifier is not used."""
    few = nd.run("fedavg", nd.load("digits"), partition="iid", clients=2, rounds=1, model="cnn")
    model = few.model()
    state = dict(model.state_dict())
    other = {"fc2.weight": torch.zeros(3, 512), "fc2.bias": torch.zeros(3)}
    save_file(state | other, tmp_path / "w.safetensors")
    found = EmbedSettings(model="cnn", init=str(tmp_path / "w.safetensors")).embedded(DIGITS)
    wanted = model._network(state, {}, DIGITS.normalised("train"), False).features
    torch.testing.assert_close(found.train_x, wanted, rtol=1e-5, atol=1e-5)


def lacking(*names: str) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in weights().items() if name not in names}


def pixels(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A linear layer of what a function makes of images."""
    return Net(lambda net, x: net.out(function(net, x)), out=nn.Linear(64, 10))


def drawing() -> nn.Module:
    return pixels(lambda _, x: F.dropout(x.flatten(1), 0.5))


def infinite() -> nn.Module:
    return pixels(lambda _, x: x.flatten(1) / 0)


def single() -> nn.Module:
    """Fails on another number of samples than one."""
    return pixels(lambda _, x: x.reshape(1, 64))


REFUSED: list[tuple[dict[str, Any], dict[str, Tensor] | None, str]] = [
    ({}, lacking("mid.weight"), "init: .* lacks mid.weight; allowed: all tensors that the vectors"),
    ({}, weights() | {"more": torch.zeros(1)}, "init: more is no tensor of the network"),
    ({}, weights() | {"mid.bias": torch.zeros(3)}, r"init: mid.bias has shape \[3\]"),
    ({"layer": "cov"}, None, "layer = 'cov' is refused; allowed: conv, norm, drop, mid, out"),
    ({"model": drawing}, None, "drawing' draws random numbers in evaluation"),
    ({"model": infinite}, None, "a vector is not finite"),
    ({"model_options": {"width": 0.5}}, None, "model_options.width = 0.5 is refused"),
    ({"model": single}, None, "single' failed, .*, line .*: RuntimeError: shape"),
    ({"model": lambda: 3}, None, "gives a int; allowed: a torch.nn.Module"),
]


@pytest.mark.parametrize(("options", "state", "words"), REFUSED)
def test_what_is_no_frozen_network_is_refused(
    options: dict[str, Any], state: dict[str, Tensor] | None, words: str, tmp_path: Path
) -> None:
    if state is not None:
        torch.save(state, tmp_path / "w.pt")
        options = options | {"init": str(tmp_path / "w.pt")}
    with pytest.raises(UserError, match=words) as error:
        settings(**{"model": Body, **options}).embedded(DIGITS)
    assert len(str(error.value).splitlines()) == 1


def test_what_the_vectors_do_not_depend_on_may_be_missing(tmp_path: Path) -> None:
    torch.save(lacking("out.weight", "out.bias"), tmp_path / "w.pt")
    how = settings(init=str(tmp_path / "w.pt"))
    close(how.embedded(DIGITS).test_x, in_torch(DIGITS.normalised("test")))


def test_what_needs_images_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"^embed: layer = 'o' is refused"):
        nd.embed(nd.load("digits"), Body, layer="o")
    vectors = nd.embed(nd.load("digits"), Body, init=file)
    with pytest.raises(UserError, match=r"rotation.*images"):
        nd.partition(vectors, "iid", clients=2, rotation={"degrees": [0, 90]})
    how: dict[str, Any] = {"model": "logistic_regression", "partition": "iid", "clients": 2}
    with pytest.raises(UserError, match=r"augment.*images"):
        nd.run("fedavg", vectors, augment=True, **how)


def test_frozen_layers_of_a_network_give_the_same_classifier(file: Path) -> None:
    """Fed3R on vectors, and Fed3R of the whole network, whose layers before the classifier are
    frozen, are one ridge regression."""
    how: dict[str, Any] = {"partition": "iid", "clients": 3, "rounds": 1}
    vectors = nd.embed(nd.load("digits"), Body, init=file)
    one = nd.run("fed3r", vectors, model="logistic_regression", **how).weights[0]
    two = nd.run("fed3r", nd.load("digits"), model=Body, init=str(file), **how).weights[0]
    for mine, other in (("fc.weight", "out.weight"), ("fc.bias", "out.bias")):
        largest = one[mine].abs().max()
        np.testing.assert_allclose(two[other], one[mine], rtol=0, atol=1e-4 * largest)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first example. Random weights do well on digits: more features than pixels. `predict`
    takes images, or vectors."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "frozen_features.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "frozen_features.md", "exec"), names)
    assert names["fed3r"].rounds["test_accuracy"].iloc[-1] > 0.9
    result, x = names["fed3r"], (DIGITS.test_x, names["vectors"].dataset.test_x)
    images, vectors = (result.predict(samples[:50].numpy()).tolist() for samples in x)
    assert images == vectors
    with pytest.raises(UserError, match=r"x is .*; allowed: numbers"):
        result.predict(np.zeros((2, 3)))
