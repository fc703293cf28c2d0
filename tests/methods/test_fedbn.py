"""FedBN (Li et al. 2021) and FedPer (Arivazhagan et al. 2019) against the same federation of
`torch.nn` modules, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import Params, Tree, row
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.personal import PERSONAL
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models.networks import mlp
from fedml_noniid.plugins.registry import METHODS, resolved
from fedml_noniid.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand
from tests.walks import thinned

SIZES, LR, EPOCHS, ROUNDS, COHORT, MU = (4, 6, 5), 0.1, 2, 4, 2, 0.7
RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(sum(SIZES), 3)), RNG.integers(0, 3, sum(SIZES))
CLIENTS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
TESTS = [
    hand.samples(RNG.normal(size=(n, 3)) + k, RNG.integers(0, 3, n))
    for k, n in enumerate((7, 0, 4))
]
BASE, HEAD = ("fc1.weight", "fc1.bias"), ("fc2.weight", "fc2.bias")
NORM = ("bn1.weight", "bn1.bias", "bn1.mean", "bn1.var")
# In the order of `torch.nn`.
THEIRS = {"fc1": "0", "bn1": "1", "fc2": "3", "mean": "running_mean", "var": "running_var"}
OWN_MODELS = {"apfl", "ditto", "fedala", "fedrod", "finetune"}
REFUSED = {"fnr", "feddf", "fedftg", "fsl"} | OWN_MODELS
# Alone it has no training to compose with, or it leaves the batch norms alone.
OTHERS = {"fed3r", "fedproto", "linear_probe"}
PRIVATE = {"dpfedavg", "dpsgd"}  # they refuse batch norms
COMPOSES = sorted(METHODS.keys() - REFUSED - OTHERS - PRIVATE - {"fedbn", "centralised"})


def theirs(name: str) -> str:
    return ".".join(THEIRS.get(part, part) for part in name.split("."))


@dataclass
class Modules:
    """Clients as modules.

    What the server averages goes by name; nothing here knows of a batch norm's role.
    """

    clients: list[nn.Sequential]
    shared: dict[str, Tensor]

    def train(self, k: int, mu: float) -> None:
        model = self.clients[k]
        model.load_state_dict(self.shared, strict=False)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        x, y = torch.tensor(X[CLIENTS[k]]), torch.tensor(Y[CLIENTS[k]])
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, leaf in model.named_parameters():
                if name in self.shared and leaf.grad is not None:
                    leaf.grad += mu * (leaf.detach() - self.shared[name])
            optimizer.step()

    def round(self, cohort: Sequence[int], n: Sequence[float], mu: float) -> None:
        for k in cohort:
            self.train(k, mu)
        states = [copy.deepcopy(self.clients[k].state_dict()) for k in cohort]
        parts = [weight / sum(n) for weight in n]
        self.shared = {
            name: torch.stack(
                [p * state[name] for p, state in zip(parts, states, strict=True)]
            ).sum(0)
            for name in self.shared
        }

    @torch.no_grad()
    def scores(self) -> tuple[float, float]:
        """Accuracy and loss of each client's model on its own test samples, over all samples."""
        hits = loss = n = 0.0
        for model, test in zip(self.clients, TESTS, strict=True):
            model.load_state_dict(self.shared, strict=False)
            model.eval()
            logits = model(test.x)
            hits += (logits.argmax(1) == test.y).sum().item()
            loss += nn.functional.cross_entropy(logits, test.y, reduction="sum").item()
            n += len(test.y)
        return hits / n, loss / n


def simulation(
    recipe: str, settings: Any = None, engine: str = "sequential", cohort: int = COHORT
) -> Simulation:
    return simulate(
        recipe,
        settings or {},
        Federation.from_indices(
            hand.samples(X, Y),
            CLIENTS,
            hand.samples(X, Y),
            validation=hand.samples(X, Y),
            tests=lambda: TESTS,
        ),
        Plan(
            mlp((3,), 3, hidden=4, batch_norm=True),
            LocalTraining(lr=LR, epochs=EPOCHS, batch_size=8),
            ROUNDS,
            cohort,
            0,
            engine=engine,
        ),
    )


def modules(of: Simulation, shared: Sequence[str]) -> Modules:
    """The modules with the weights that a simulation starts from; the server averages `shared`."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    start = of.loop.start
    first = start.params | start.task.personal["params"]
    model.load_state_dict({theirs(name): leaf for name, leaf in first.items()}, strict=False)
    state = model.state_dict()
    averaged = {theirs(name): state[theirs(name)].clone() for name in shared}
    return Modules([copy.deepcopy(model) for _ in SIZES], averaged)


def same(found: Params, wanted: dict[str, Tensor], names: Sequence[str]) -> None:
    assert found.keys() == set(names)
    for name, leaf in found.items():
        torch.testing.assert_close(leaf, wanted[theirs(name)], rtol=1e-12, atol=1e-12, msg=name)


def personal(of: Simulation, k: int) -> Params:
    parts: Tree = row(of.engine.clients.memory.whole()[PERSONAL], k)
    return parts["params"] | parts["buffers"]


@pytest.mark.parametrize(
    ("recipe", "weights", "shared"),
    [
        ("fedbn", "size", (*BASE, *HEAD)),
        ("fedbn", "uniform", (*BASE, *HEAD)),
        ("fedprox+fedbn", "size", (*BASE, *HEAD)),
        ("fedper", "size", (*BASE, *NORM)),
        ("fedprox+fedper", "size", (*BASE, *NORM)),
        ("fedbn+fedper", "size", BASE),
        ("fedper", "size", (*HEAD, "bn1.weight", *NORM[2:])),
    ],
)
def test_it_is_the_federation_of_modules(
    recipe: str, weights: str, shared: Sequence[str], engine: str
) -> None:
    """Two of three clients a round, so a client's own part waits for it.

    FedProx pulls at the shared part only. The last row keeps what patterns name.
    """
    settings: dict[str, dict[str, object]] = {"fedprox": {"mu": MU}, "fedbn": {"weights": weights}}
    if "fc2.weight" in shared:
        settings["fedper"] = {"keep": ["fc1.*", "bn?.bias"]}
    ours = simulation(recipe, {name: settings.get(name, {}) for name in recipe.split("+")}, engine)
    reference = modules(ours, shared)
    own = [name for name in (*BASE, *HEAD, *NORM) if name not in shared]
    for t, found in enumerate(ours.rounds(), start=1):
        cohort = draw_cohort(0, t, len(SIZES), COHORT)
        n = [SIZES[k] if weights == "size" else 1 for k in cohort]
        reference.round(cohort, n, MU if "fedprox" in recipe else 0.0)
        same(ours.loop.state.params | ours.loop.state.buffers, reference.shared, shared)
        for k, module in enumerate(reference.clients):
            same(personal(ours, k), module.state_dict(), own)
        sent = sum(leaf.numel() for leaf in reference.shared.values())
        assert found["bytes_up"] == found["bytes_down"] == COHORT * sent * 8
        accuracy, loss = reference.scores()
        assert found["test_accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert found["sent_accuracy"] == found["test_accuracy"]
        assert found["test_loss"] == pytest.approx(loss, rel=1e-12)
        assert np.isnan(found["validation_accuracy"]), "nobody's part belongs to that split"
    assert t == ROUNDS


@pytest.mark.parametrize("others", ["", "+scaffold+ccn"])
def test_without_batch_norm_it_changes_no_bit_and_says_so(others: str, engine: str) -> None:
    with_it = federation.simulation(f"fedbn{others}", engine=engine)
    assert federation.equal(with_it.run(), federation.run(f"fedavg{others}", engine=engine))
    assert with_it.remarks == {
        "no_effect": "mlp has no batch norms that a client could keep to itself, so it trains as "
        + (others[1:].replace("scaffold+ccn", "ccn+scaffold") or "fedavg")
    }
    assert federation.simulation(f"fedavg{others}").remarks == {}
    assert list(federation.simulation("fedbn", batch_norm=True).remarks) == ["own_models"]
    both = federation.simulation("fedbn+fedper", engine=engine).remarks
    assert both.keys() == {"own_models", "no_effect"} and both["no_effect"].endswith("as fedper")


@pytest.mark.parametrize(
    ("recipe", "keep", "message"),
    [
        ("fedper", ["fc1.*", "fc3.*"], r"'fc3\.\*': 'mlp' trains no such .* pattern of fc[12]"),
        ("fedper", ["body"], "fedper: keep = 'body' is refused; allowed: head, or patterns"),
        ("fedper", ["*"], "nothing would be left to train together"),
        ("fedper+fedrs", ["*.bias"], "would keep fc2.bias, and one of .* needs a classifier"),
        ("fedper+fedbabu", ["fc2.*"], "can't keep 'fc2"),
    ],
)
def test_what_clients_cannot_keep(recipe: str, keep: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        simulation(recipe, {"fedper": {"keep": keep}})


def test_patterns_of_the_classifier_are_the_default() -> None:
    """A recipe without patterns has the settings, and the fingerprint, that it had before."""
    ran = [federation.run("fedper", {"fedper": keep}) for keep in ({}, {"keep": ["fc2.*"]})]
    assert federation.equal(*ran)
    assert resolved("fedper", {}) == {"fedper": {}}
    keep = {"fedper": {"keep": ["fc1.*"]}}
    assert resolved("fedper", keep) == keep


@pytest.mark.parametrize("method", thinned(COMPOSES, 0, 6))
def test_other_methods_see_the_shared_part_only(method: str) -> None:
    """No state, memory or message has a batch norm.

    Both engines end at the same place, and the batch norms move.
    """
    ends = []
    for engine in ("sequential", "vectorized"):
        ours = federation.simulation(
            f"fedbn+{method}",
            {"trimmed_mean": {"beta": 0.25}} if method == "trimmed_mean" else {},
            dtype=torch.float64,
            batch_norm=True,
            engine=engine,
        )
        exchanges = hand.tapped(ours)
        out = ours.run()
        memory = ours.engine.clients.memory.whole()
        memory.pop(PERSONAL, None)
        sent = [
            {
                "ask": ask.params | ask.shared | ask.each,
                "reply": reply.deltas | reply.buffers | reply.upload,
            }
            for ask, reply in exchanges
        ]
        for tree in ({"state": ours.loop.state._asdict()}, memory, *sent):
            assert not {key.rpartition("/")[2] for key in flatten(tree)} & set(NORM)
        assert out.personal["params"]["bn1.weight"].std(0).min() > 0, "each client has its own"
        ends.append(out.params | flatten(out.personal))
    for key, leaf in ends[0].items():
        torch.testing.assert_close(ends[1][key], leaf, rtol=1e-8, atol=1e-10, msg=key)
