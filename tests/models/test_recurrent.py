"""rFedAvg's LSTM: against torch's modules, its frozen word vectors, and every method on a tiny
one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedml_noniid.core.component import Client
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan, initial_model
from fedml_noniid.engines.simulation import Simulation, choose_engine
from fedml_noniid.models import build
from fedml_noniid.models.recurrent import EMBEDDING, lstm
from fedml_noniid.models.stacked import Stacked
from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from fedml_noniid.plugins.registry import METHODS
from fedml_noniid.simulate import simulate
from tests.recipe_table import settings
from tests.walks import thinned

VOCABULARY, WIDTH, HIDDEN, LENGTH, CLASSES = 12, 4, 5, 6, 2
SIZES = (3, 7, 8, 8)  # samples of the four clients
HEAD = ("fc.weight", "fc.bias")


def vectors(dtype: torch.dtype = torch.float32) -> Tensor:
    found = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found[0] = 0
    return found


def texts(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Samples:
    """Random tokens, padded behind to LENGTH, of 1 to LENGTH tokens; the first has one, the second
    has all."""
    rng = np.random.default_rng(seed)
    x, lengths = rng.integers(1, VOCABULARY, (n, LENGTH)), rng.integers(1, LENGTH + 1, n)
    lengths[:2] = 1, LENGTH
    x[np.arange(LENGTH) >= lengths[:, None]] = 0
    y = rng.permutation(np.arange(n) % CLASSES)
    return Samples(torch.tensor(x, dtype=dtype), torch.tensor(y))


def tiny(depth: int = 2) -> Stacked:
    found = build("lstm", (LENGTH,), CLASSES, {"hidden": HIDDEN, "layers": depth}, vectors())
    assert isinstance(found, Stacked)
    return found


class Theirs(torch.nn.Module):
    """As rFedAvg's repository has it: packed sequences, the output at each text's last token."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, HIDDEN, depth, batch_first=True)
        self.fc = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        phi = out[torch.arange(len(tokens)), lengths - 1]
        return phi, self.fc(phi)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forward_and_gradients_are_those_of_torchs_modules(depth: int, train: bool) -> None:
    """In float64, on padded texts; the loss reads features and logits."""
    net, (x, y, _) = tiny(depth), texts(9, 2, torch.float64)
    params, buffers = initial_model(net, 4, x)
    theirs = Theirs(depth).double()
    theirs.load_state_dict(params)  # the same names and shapes, or this is refused
    lengths = (x != 0).sum(1)
    phi, logits = theirs(x.long(), lengths)
    loss = torch.nn.functional.cross_entropy(logits, y) + phi.square().sum()
    loss.backward()

    watched = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    out = net(watched, buffers, x, train)
    torch.testing.assert_close(out.features, phi, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(out.logits, logits, rtol=1e-12, atol=1e-14)
    mine = torch.nn.functional.cross_entropy(out.logits, y) + out.features.square().sum()
    grads = dict(zip(watched, torch.autograd.grad(mine, list(watched.values())), strict=True))
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_its_parameters_are_the_papers_and_start_as_torchs() -> None:
    """Per layer 4 gates of hidden x (inputs + hidden) and two biases; then 256 - 2; all uniform in
    +-1/sqrt(hidden). The vectors are those that were given."""
    given = torch.ones(10, 300)
    net = lstm((25,), 2, embedding=given)
    params, buffers = net.init(torch.Generator().manual_seed(0))
    first, second = (4 * 256 * (n_in + 256) + 2 * 4 * 256 for n_in in (300, 256))
    assert torch.equal(params.pop(EMBEDDING), given) and net.frozen == {EMBEDDING}
    trained = sum(leaf.numel() for leaf in params.values())
    assert trained == first + second + 256 * 2 + 2 == 1_098_242
    assert (net.feature_size, net.n_classes, net.tokens, buffers) == (256, 2, True, {})
    for key, leaf in params.items():
        assert leaf.abs().max() <= 1 / 16, key
        if leaf.numel() > 99:
            assert leaf.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.15)


def test_only_text_goes_into_it_and_text_only_into_it() -> None:
    with pytest.raises(
        UserError, match=r"^model 'cnn' can't take text, which the data set is; allowed: lstm$"
    ):
        build("cnn", (LENGTH,), 2, {}, vectors())
    with pytest.raises(
        UserError,
        match=r"^model 'lstm' takes text only, .*; allowed: logistic_regression, mlp, cnn,",
    ):
        build("lstm", (1, 28, 28), 10)
    with pytest.raises(
        UserError, match=r"^model 'lstm' needs texts \(tokens\), got samples of \(1, 28, 28\)$"
    ):
        build("lstm", (1, 28, 28), 10, {}, vectors())


def test_the_engine_is_the_sequential_one() -> None:
    made = simulation("fedavg", engine="auto")
    why = "vmap can't take 'lstm': torch has no vmap rule for its LSTM"
    assert (made.engine_name, made.engine_reason) == ("sequential", why)
    with pytest.raises(UserError, match=r"vmap can't take model 'lstm', .*; allowed: auto, sequ"):
        choose_engine("vectorized", tiny(), 1e9)


# in a federation


def simulation(
    recipe: str, options: Any = None, *, engine: str = "sequential", rounds: int = 1
) -> Simulation:
    train = texts(sum(SIZES), 5)
    clients = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return simulate(
        recipe,
        options or {},
        Federation.from_indices(
            train, clients, texts(10, 6), validation=texts(5, 7), public=texts(9, 8)
        ),
        Plan(
            tiny(),
            LocalTraining(lr=0.5, epochs=1, batch_size=4),
            rounds,
            4,
            3,
            engine=engine,
            observing=True,
        ),
    )


REFUSED = {
    "fedftg": "fedftg: its generator makes samples by gradients, and the tokens of a text have",
    "dpsgd": "'dpsgd' takes the gradient of each sample by itself, and torch has no vmap rule for",
}


@pytest.mark.parametrize("recipe", thinned(["fedavg", *METHODS]))
def test_every_method_trains_it_or_says_why_not(recipe: str) -> None:
    """One round of all clients; nobody touches the vectors, and what is trained has moved."""
    if recipe in REFUSED:
        with pytest.raises(UserError, match=rf"\A{REFUSED[recipe]}[^\n]*\Z"):
            simulation(recipe)
        return
    made = simulation(recipe, settings(recipe) if recipe not in ("fedavg", "centralised") else {})
    start, _ = initial_model(tiny(), 3, torch.zeros(1))
    out = made.run()
    assert EMBEDDING not in made.loop.state.params
    for tree in (out.params, out.evaluated):
        assert torch.equal(tree[EMBEDDING], vectors())
        assert all(leaf.isfinite().all() for leaf in tree.values())
    still = [key for key in start if torch.equal(out.params[key], start[key])]
    assert len(still) < len(start) or recipe == "fedproto", "its clients keep their models"


def test_fednlr_scales_the_classifier_alone() -> None:
    net, data = tiny(), texts(8, 9)
    params, buffers = initial_model(net, 0, data.x)
    task = Task(net, SGD(0.1), {EMBEDDING: params.pop(EMBEDDING)})
    own = Pass(data, torch.arange(8), sizes=(8,))
    assert FedNLR().prepare(Client(task, params, buffers, 1, own)).keys() == {*HEAD}
