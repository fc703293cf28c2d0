"""Golden vectors: every random stream and the weights of five recipes, the same on every Python and
NumPy.

NumPy does not promise that a `Generator` method keeps its stream from version to version (NEP 19),
so these numbers are committed. `python -m tests.test_golden` writes tests/golden.json again.
Weights depend on the kind of processor and on torch: each kind has its own hashes, and a kind that
is not in the file is added by the same command.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core import randomness
from fedml_noniid.core.component import Ask
from fedml_noniid.data import client_tests, label_noise, splits, streams, subsample, text
from fedml_noniid.data.partitions import PARTITIONS, partition
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.made_tweets import _sentences as sentences
from fedml_noniid.engines import absences
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.hashing import model_tensors, weights_sha256
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.models import MODELS, build
from fedml_noniid.pipelines.experiment.provenance import kind_of
from tests import federation
from tests.recipe_table import PARAMETERS

FILE = Path(__file__).with_name("golden.json")
COMMAND = "python -m tests.test_golden"
LABELS = np.arange(600) * 7 % 11 % 6  # six classes of about a hundred samples
OWNERS = np.arange(600) ** 2 % 37 % 9
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dirichlet": [{"alpha": 0.3}, {"alpha": 0.3, "cap": "off", "min_size": 2}],
    "shards": [{"classes_per_client": 2}],
    "similarity": [{"s": 0.3}],
    "by_classes": [{"classes": [[k, (k + 2) % 6] for k in range(6)], "sizes": "equal"}],
    "two_classes": [{"sizes": kind, "total": 300} for kind in ("power_law", "lognormal")] + [{}],
    "by_sizes": [{"sizes": [5, 10, 20, 40, 80, 160]}],
    "iid_unbalanced": [{"sizes": kind} for kind in ("power_law", "lognormal")],
    "natural_grouped": [{}, {"users": 7}],
}
RECIPES = ("fedavg", "scaffold+fnr", "fednnnn", "rfedavg_plus", "fedadam+fednlr")


def digest(value: object) -> str:
    """The first 16 digits of the SHA-256 of whole numbers and words."""

    def plain(found: Any) -> object:
        return [*found] if isinstance(found, Ragged) else found.tolist()

    return hashlib.sha256(json.dumps(value, default=plain).encode()).hexdigest()[:16]


def partitions() -> dict[str, str]:
    """Every partition with every law that draws."""
    return {
        f"{name} {options}": digest(
            partition(name, LABELS, np.arange(20, 580), 6, 3, OWNERS, **options)
        )
        for name in PARTITIONS
        for options in OPTIONS.get(name, [{}])
    }


def batches() -> list[object]:
    """The orders of three clients in two rounds, as the engines ask for them."""
    clients = federation.simulation("fedavg").engine.clients
    return [
        order.index.tolist() for round_ in (1, 7) for order in clients.orders((0, 3, 5), round_)
    ]


def keys() -> list[int]:
    """The keys of clients' random numbers, and of the server's."""
    clients = federation.simulation("scaffold+fnr").engine.clients
    return [
        *clients.keys(Ask("train", (0, 2, 5)), 4).tolist(),
        streams.key(3, "server", 4),
        streams.key(3, "noisy test", 2),
    ]


def integers() -> dict[str, object]:
    """What every machine draws alike."""
    counts = np.array(
        [np.bincount(LABELS[part], minlength=6) for part in np.split(np.arange(600), [50, 250])]
    )
    parts = partition("iid", LABELS, np.arange(600), 4, 0)
    rate = label_noise.rates("level", 0.6, 4)
    key, tweets = torch.tensor(streams.key(1, "golden")), streams.stream(0, "sent140/split")
    return partitions() | {
        "cohort": [draw_cohort(seed, round_, 100, 10) for seed, round_ in ((0, 1), (0, 2), (9, 1))],
        "batches": digest(batches()),
        "keys": keys(),
        "absent": [
            sorted(absences.sometimes(0.4, 5)(round_, 0, tuple(range(12)))) for round_ in (1, 2, 3)
        ],
        "split": digest(splits.hold_out(LABELS, 0.2, 50, 4)),
        "fewer": digest(subsample.subsample(LABELS, 200)),
        "test clients": digest(
            client_tests.in_proportion(counts, LABELS, streams.stream(2, "test clients"))
        ),
        "label noise": [
            digest(label_noise.flipped(kind, rate, LABELS, parts, 6, 8))
            for kind in ("symmetric", "pair")
        ],
        "own data": digest(user_data.cut(LABELS, OWNERS, 0.25, "golden")[:2]),
        "sent140 users": streams.stream(0, "sent140/users").choice(50, 8, replace=False).tolist(),
        "sent140 split": [digest(np.argsort(tweets.random(99))), digest(tweets.permutation(99))],
        "made tweets": digest([sentences(user) for user in range(20)]),
        "uniform": (randomness.uniform(key, 4, dtype=torch.float64) * 2**24).long().tolist(),
        "permutation": randomness.permutation(key, 9).tolist(),
        "integers": randomness.integers(key, 1000, 5).tolist(),
        "torch": torch.randint(1 << 30, (4,), generator=streams.torch_stream(3, "init")).tolist(),
    }


def numbers() -> dict[str, list[float]]:
    """Draws that pass through a logarithm or a cosine: their last bit may depend on the machine's
    library."""
    key = torch.tensor(streams.key(1, "golden"))
    return {
        "normal": randomness.normal(key, 5, dtype=torch.float64).tolist(),
        "embedding": text.embedding(["", "a", "b"], Path("there is no such folder"))[0][
            1, :4
        ].tolist(),
        "made tweets": streams.stream(0, "made tweets/vectors").standard_normal(4).tolist(),
        "init": [
            leaf.abs().double().mean().item()
            for model in MODELS
            for leaf in (next(iter(initial_model(network(model), 3, torch.zeros(()))[0].values())),)
        ],
    }


def network(name: str) -> Any:
    """The network for the smallest samples that it takes."""
    if name == "lstm":
        return build(name, (5,), 3, {"hidden": 4}, torch.zeros(7, 2))
    return build(name, (1, 28, 28) if name == "fednnnn_mnist" else (3, 32, 32), 3)


def weights() -> dict[str, str]:
    """The SHA-256 of five recipes' final models."""
    found = {}
    for recipe in RECIPES:
        out = federation.run(
            recipe, {name: PARAMETERS[name] for name in recipe.split("+") if name in PARAMETERS}
        )
        found[recipe] = weights_sha256(model_tensors(out.params, out.evaluated, out.buffers))
    return found


def kind() -> str:
    """The kind of machine, and torch's version without the mark of its build."""
    facts = kind_of(torch.device("cpu"), 1)
    return " ".join((facts["vendor"], facts["instructions"], facts["torch"].partition("+")[0]))


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def write() -> None:
    known = kept()["weights"] if FILE.is_file() else {}
    found = {"integers": integers(), "numbers": numbers(), "weights": known | {kind(): weights()}}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def test_every_stream_draws_the_same_whole_numbers() -> None:
    found, wanted = json.loads(json.dumps(integers())), kept()["integers"]
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def test_every_stream_draws_the_same_numbers() -> None:
    wanted, found = kept()["numbers"], numbers()
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert values == pytest.approx(wanted[name], rel=1e-6 if name == "init" else 1e-12), name


def test_five_recipes_end_with_the_same_weights() -> None:
    known = kept()["weights"]
    if kind() not in known:
        pytest.skip(f"no weights of {kind()} are kept; `{COMMAND}` adds them")
    assert weights() == known[kind()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
