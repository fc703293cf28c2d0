"""An attack on the methods with privacy noise: many runs with and without a canary, and the largest
epsilon that they refute.

A canary is a sample, or a client, with one input that no other has. So the weights of this input
move by what the canary adds, and by noise. An attacker knows all else, and guesses from their move
whether the canary was there. Jagielski, Ullman, Oprea: Auditing Differentially Private Machine
Learning, NeurIPS 2020, https://arxiv.org/abs/2006.07709: under (epsilon, delta), false positives
FPR and misses FNR satisfy FPR + e^epsilon FNR >= 1 - delta, and FNR + e^epsilon FPR too. Bounds of
Clopper and Pearson on both rates give a lower bound of epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fedml_noniid.core.data import Samples
from fedml_noniid.core.trees import Params, tree_map
from fedml_noniid.engines.callbacks import Callback, CurrentRun, Exchange, Row
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan, initial_model
from fedml_noniid.models import build
from fedml_noniid.privacy.accounting import epsilon
from fedml_noniid.simulate import simulate

WEIGHT = "fc.weight"
INPUTS, CLASSES, OWN = 4, 2, 4  # of the model; samples of a client, which are one batch
# Steps are so short that the model stays where it was: a canary's gradient is the same in each.
LR, CLIP = 1e-6, {"dpsgd": 1.0, "dpfedavg": 1e-8}
LARGE = 1e4  # the canary's last input, so that its gradient is this input's, and is clipped
DELTA, CONFIDENCE = 1e-5, 0.95


class Setting(NamedTuple):
    """What is attacked. `releases`: epochs of a round for a sample, rounds for a client."""

    method: str
    noise: float
    releases: int


class Watching(Callback):
    """Keeps what an attacker sees: the clients' updates of the first round [M, ...], and the
    model after each round."""

    def __init__(self) -> None:
        self.updates: Params = {}
        self.models: list[Params] = []

    def on_exchange(self, exchange: Exchange) -> None:
        self.updates = self.updates or tree_map(torch.clone, exchange.reply.deltas)

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self.models.append(tree_map(torch.clone, run.state.params))

    def state(self) -> dict[str, Any]:
        return {}


def data(clients: int, canaries: Sequence[int], label: int, seed: int) -> Federation:
    """Random samples of so many clients. The first sample of each of `canaries` is a canary: the
    last input is its alone, and the model takes it for another class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(clients * OWN, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (clients * OWN,), generator=generator)
    x[:, -1] = 0
    x[torch.tensor(canaries, dtype=torch.long) * OWN, -1] = LARGE
    y[::OWN] = label
    mine = list(np.arange(clients * OWN).reshape(clients, OWN))
    return Federation.from_indices(Samples(x, y), mine, Samples(x[:2].clone(), y[:2].clone()))


def watched(
    of: Setting, clients: int, canaries: Sequence[int], rounds: int, seed: int
) -> tuple[Watching, Params, int, Row]:
    """(what is seen, w_0, the canary's label, the last row) of a run of logistic regression."""
    epochs = of.releases if of.method == "dpsgd" else 1
    network = build("logistic_regression", (INPUTS,), CLASSES, {})
    start, _ = initial_model(network, seed, torch.zeros((), dtype=torch.float64))
    label = int(start[WEIGHT][:, -1].argmin())
    local = LocalTraining(lr=LR, epochs=epochs, batch_size=OWN)
    engine = "vectorized" if of.method == "dpsgd" else "sequential"
    plan = Plan(network, local, rounds, clients, seed, evaluate_every=rounds, engine=engine)
    given = {of.method: {"clip": CLIP[of.method], "noise": of.noise, "delta": DELTA}}
    seen = Watching()
    made = simulate(of.method, given, data(clients, canaries, label, seed), plan, [seen])
    row = made.run().rows[-1]
    (seen,) = (one for one in made.loop.callbacks if isinstance(one, Watching))
    return seen, start, label, row


def moves(of: Setting, runs: int, seed: int) -> tuple[NDArray[Any], NDArray[Any], float]:
    """(how far the canary's weights move, [runs], without it and with it; the stated epsilon).

    A sample: each client of one round is a run. A client: each `releases` rounds are one.
    """
    if of.method == "dpsgd":
        seen, _, label, row = watched(of, 2 * runs, range(runs, 2 * runs), 1, seed)
        move = _towards(seen.updates[WEIGHT], label)
        return move[:runs], move[runs:], row["epsilon_per_sample"]
    found = []
    for canaries in ([], [0]):
        seen, start, label, _ = watched(of, 2, canaries, runs * of.releases, seed + len(canaries))
        places = torch.stack([start[WEIGHT], *(model[WEIGHT] for model in seen.models)])
        found.append(np.diff(_towards(places, label)[:: of.releases]))
    return found[0], found[1], epsilon({of.noise: of.releases}, DELTA)


def _towards(weights: torch.Tensor, label: int) -> NDArray[Any]:
    """How far the last input's weights [..., C, d] lean to a class."""
    move: NDArray[Any] = (weights[..., label, -1] - weights[..., 1 - label, -1]).numpy()
    return move


def lower_bound(without: NDArray[Any], there: NDArray[Any], delta: float) -> float:
    """The largest epsilon that the scores refute with CONFIDENCE; 0 if none.

    The first half chooses the threshold and the side; the second half is counted.
    """
    half = len(without) // 2
    best, threshold = -1.0, 0.0
    for at in np.quantile(np.concatenate([without[:half], there[:half]]), np.linspace(0, 1, 201)):
        found = _refuted(without[:half], there[:half], at, delta)
        if found > best:
            best, threshold = found, at
    return max(0.0, _refuted(without[half:], there[half:], threshold, delta))


def _refuted(without: NDArray[Any], there: NDArray[Any], at: float, delta: float) -> float:
    high = [
        _upper(int((without > at).sum()), len(without)),  # false positives
        _upper(int((there <= at).sum()), len(there)),  # misses
    ]
    return max(_ratio(high[0], high[1], delta), _ratio(high[1], high[0], delta))


def _ratio(one: float, other: float, delta: float) -> float:
    return math.log((1 - delta - one) / other) if 1 - delta - one > 0 else -math.inf


def _upper(hits: int, n: int) -> float:
    """The upper end of Clopper and Pearson's interval; both rates hold with CONFIDENCE."""
    return 1.0 if hits == n else float(stats.beta.ppf(1 - (1 - CONFIDENCE) / 2, hits + 1, n - hits))
