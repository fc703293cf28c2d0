"""What the stranger does with it: `python runs.py WHAT [FOLDER]` prints SHA-256s of weights.

It imports nothing but the two installed packages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hospitals
from hospitals.data import by_hospital, scans
from hospitals.metric import sureness
from hospitals.network import GatedNet

import fedml_noniid as nd

RECIPE = "fedprox+fedmean"
ROUNDS = 30
CLIENTS = 3
HOW: dict[str, Any] = {
    "model": GatedNet,
    "model_options": {"p": 0.3},
    "metrics": {sureness: {"power": 2.0}},
    "fedmean": {"mu": 0.3},
    "rounds": ROUNDS,
    "epochs": 1,
    "batch_size": 16,
    "lr": 0.05,
    "progress": False,
}


def say(*words: object) -> None:
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()


def split() -> nd.Split:
    return nd.partition(nd.load(scans), by_hospital, clients=CLIENTS, share=0.9)


def simulated(folder: Path) -> None:
    """By each engine, and with two processes for the clients of a round."""
    for engine, processes in (("sequential", 1), ("sequential", 2), ("vectorized", 1)):
        found = nd.run(RECIPE, split(), engine=engine, processes=processes, **HOW)
        last = found.rounds.iloc[-1]
        say(found.sha256[0], last["test_accuracy"], last["test_sure"])


def silos(folder: Path) -> None:
    """Three silos and a server as processes."""
    from fedml_noniid.data.shards import Parts
    from fedml_noniid.deploy import settings
    from fedml_noniid.processes import loopback

    made = split()
    deployment = settings.check(
        {
            "model_args": {"model": "hospitals.network:GatedNet", "model_options": {"p": 0.3}},
            "train_args": {
                "recipe": RECIPE,
                "settings": {"fedmean": {"mu": 0.3}},
                "metrics": {"hospitals.metric:sureness": {"power": 2.0}},
                "rounds": ROUNDS,
                "epochs": 1,
                "batch_size": 16,
                "client_optimizer": "sgd",
                "learning_rate": 0.05,
                "client_num_in_total": CLIENTS,
                "client_num_per_round": CLIENTS,
            },
        },
        "runs.py",
    )
    parts = Parts.cut(made.data.dataset, made.indices)
    say(loopback.run(deployment, parts, folder / "silos"))


if __name__ == "__main__":
    assert "site-packages" in hospitals.__file__ and "site-packages" in nd.__file__
    {"simulated": simulated, "silos": silos}[sys.argv[1]](Path(sys.argv[2]))
