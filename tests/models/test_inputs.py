"""Several named inputs of a user's module: exact on their way, the same in every runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data import datasets
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.inputs import LARGEST, split
from fedml_noniid.models import build
from fedml_noniid.models.own import OwnNetwork


class Both(nn.Module):
    """An image, facts, the numbers of tokens, and one number."""

    def __init__(self, n_classes: int, input_shape: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        assert list(input_shape) == ["image", "facts", "tokens", "age"]
        self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.words = nn.Embedding(50, 3)
        self.out = nn.Linear(2 * 4 + 5 + 3 + 1, n_classes)

    def forward(self, image: Tensor, facts: Tensor, tokens: Tensor, age: Tensor) -> Tensor:
        assert tokens.dtype is torch.int64
        h = torch.max_pool2d(torch.relu(self.norm(self.conv(image))), 2).flatten(1)
        found: Tensor = self.out(
            torch.cat([h, facts, self.words(tokens).mean(1), age.unsqueeze(1)], 1)
        )
        return found


RNG = np.random.default_rng(0)
N = 90
X: dict[str, Any] = {
    "image": RNG.integers(0, 256, (N, 1, 6, 6)).astype(np.uint8),
    "facts": RNG.normal(3, 2, (N, 5)),
    "tokens": RNG.integers(0, 50, (N, 7)),
    "age": RNG.normal(40, 10, N),
}
Y = RNG.integers(0, 3, N)
NAME = f"{Both.__module__}:{Both.__qualname__}"


def data() -> nd.Data:
    return nd.from_arrays({k: v[:70] for k, v in X.items()}, Y[:70], _rest(), Y[70:])


def _rest() -> dict[str, Any]:
    return {key: value[70:] for key, value in X.items()}


def test_the_parts_come_back_as_they_went_in() -> None:
    found = data().dataset
    parts = split(found.inputs, found.normalised("train"))
    assert torch.equal(parts["tokens"], torch.from_numpy(X["tokens"][:70]))
    image = torch.from_numpy(X["image"][:70]).double() / 255
    expected = (image - image.mean()) / image.std(correction=0)
    torch.testing.assert_close(parts["image"].double(), expected, rtol=1e-5, atol=1e-5)
    assert parts["age"].shape == (70,) and parts["facts"].mean(0).abs().max() < 1e-5
    plain = nd.from_arrays(X, Y, _rest(), Y[70:], normalise="none").dataset.normalised("train")
    whole = torch.from_numpy(X["image"]).float() / 255
    torch.testing.assert_close(split(found.inputs, plain)["image"], whole)


def test_a_file_keeps_them(tmp_path: Path) -> None:
    for part, rows in (("train", slice(70)), ("test", slice(70, N))):
        named = {f"x.{key}": value[rows] for key, value in X.items()}
        np.savez(tmp_path / f"{part}.npz", y=Y[rows], **named)
    found = datasets.load("arrays", tmp_path)
    found.save(tmp_path / "d.safetensors")
    again = Dataset.read(tmp_path / "d.safetensors")
    assert again.inputs == found.inputs == data().dataset.inputs
    assert again.checksum == found.checksum and torch.equal(again.test_x, data().dataset.test_x)


def test_engines_agree_and_new_samples_are_told_apart() -> None:
    split = nd.partition(data(), "dirichlet", clients=3, alpha=0.5)
    how: dict[str, Any] = {"model": NAME, "rounds": 2, "batch_size": 8, "progress": False}
    alone = nd.run("scaffold", split, engine="sequential", **how)
    beside = nd.run("scaffold", split, engine="vectorized", **how)
    for name, leaf in alone.weights[0].items():
        torch.testing.assert_close(beside.weights[0][name], leaf, rtol=1e-4, atol=1e-5)
    named = np.array(split.data.classes)[split.data.dataset.test_y.numpy()]
    hits = (alone.predict(_rest()) == named).mean()
    assert hits == pytest.approx(alone.metrics["accuracy"].item())


def test_silos_have_the_bits_of_the_simulation() -> None:
    pytest.importorskip("cryptography", reason="silos need [silo]")
    from fedml_noniid.data.shards import Parts
    from fedml_noniid.deploy import settings
    from fedml_noniid.deploy.server_run import ServerRun
    from fedml_noniid.processes import loopback
    from tests.deploy import world

    found = data().dataset
    inputs = {name: one.model_dump() for name, one in found.inputs.items()}
    content = world.deployment("scaffold").model_dump(by_alias=True)
    content["model_args"] = {"model": NAME, "inputs": inputs}
    deployment = settings.check(content, "test")
    split = nd.partition(data(), "iid", clients=3)
    parts = Parts.cut(found, split.indices)
    network = deployment.network(tuple(found.train_x.shape[1:]), 3, None)
    assert isinstance(network, OwnNetwork) and not network.sequential_only
    terms = settings.terms(deployment, "scaffold", network)
    server = ServerRun(terms, world.shards_of(parts)[0])
    outcome = world.talk(server, world.silos_of(terms, parts))
    assert world.digest(outcome) == loopback.simulate(deployment, parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": X["tokens"] + LARGEST}, "x.tokens is int64 [90, 7], with numbers beyond 2^24"),
        ({"facts": X["facts"] * np.nan}, "x.facts is float64 [90, 5], with numbers that are not"),
        ({"age": X["age"][:50]}, "x.age is float64 [50]; allowed: [90]"),
        ({"facts": X["facts"].astype(str)}, "allowed: numbers of at most 64 bits"),
        ({"no name": X["facts"]}, "allowed: names of letters, digits and '_'"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        nd.from_arrays(X | change, Y)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        ("image", np.int64, "uint8, as the"),
        ("facts", np.uint8, "numbers of another type than uint8"),
        ("tokens", np.uint8, "whole numbers of another type than uint8"),
        ("tokens", np.float64, "whole numbers"),
    ],
)
def test_new_samples_of_another_kind_are_refused(name: str, dtype: Any, allowed: str) -> None:
    """The division by 255 goes by the training samples, also for a test set of its own."""
    other = _rest() | {name: np.abs(_rest()[name]).astype(dtype)}
    made = data()
    assert torch.equal(made.samples(_rest()), made.dataset.test_x)
    for use in (made.samples, lambda x: nd.from_arrays(X, Y, x, Y[70:])):
        with pytest.raises(UserError, match=f"x.{name} is {other[name].dtype} .*: {allowed}"):
            use(other)
    whole = _rest() | {"age": _rest()["age"].astype(int)}
    assert torch.equal(made.samples(whole)[:, -1], torch.from_numpy(whole["age"]).float())


INPUTS = data().dataset.inputs


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: nd.partition(data(), "iid", clients=3, noise={"sigma": 0.1}),
            "noise is refused for samples with several inputs",
        ),
        (lambda: nd.from_arrays(X, Y, normalise="half"), "normalise = 'half' is refused"),
        (
            lambda: nd.from_arrays(X, Y, {"facts": X["facts"]}, Y),
            "has the inputs facts; allowed: image, facts",
        ),
        (lambda: build("mlp", (49,), 3, inputs=INPUTS), "are refused, as model 'mlp' takes one"),
        (
            lambda: build(NAME, (6,), 3, inputs=INPUTS),
            r"inputs with 49 numbers are refused, as samples are \[6\]",
        ),
    ],
)
def test_what_takes_one_input_is_refused(use: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        use()
