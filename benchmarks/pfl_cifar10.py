"""pfl-research's CIFAR-10 benchmark in our simulation: `python -m benchmarks.pfl_cifar10 [--rounds
N] [--device D]`.

It has 1,500 rounds. Each round trains 50 of 1,000 users, with 50 images each, for one epoch with
batches of 10 and dropout. Every 10 rounds the accuracy on 10,000 images is measured (Granqvist et
al. 2024, https://arxiv.org/abs/2404.06430). The images are random numbers, since only the time
counts here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Watch, line
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.engines.device import be_deterministic, resolve_device
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.models import build
from fedml_noniid.plugins.simulate import simulate

ROUNDS, FEW = 1500, 20  # on a GPU, and on a CPU


@dataclass(frozen=True)
class Size:
    """How large the benchmark is; the defaults are pfl's."""

    users: int = 1000
    cohort: int = 50
    images: int = 50  # per user
    test: int = 10000
    every: int = 10  # rounds from one evaluation to the next


def run(rounds: int, device: torch.device, size: Size = Size(), workers: int = 1) -> dict[str, Any]:
    """Seconds of `rounds` rounds with their evaluations, after two rounds of warm-up."""
    generator = torch.Generator().manual_seed(0)
    n = size.users * size.images

    def drawn(count: int) -> Samples:
        x = torch.randn(count, 3, 32, 32, generator=generator)
        return Samples(x.to(device), torch.randint(0, 10, (count,), generator=generator).to(device))

    train, test = drawn(n), drawn(size.test)
    users = [np.arange(k * size.images, (k + 1) * size.images) for k in range(size.users)]

    def simulation(rounds: int) -> Simulation:
        local = LocalTraining(lr=0.1, epochs=1, batch_size=10)
        network = build("pfl_cnn", (3, 32, 32), 10)
        plan = Plan(
            network, local, rounds, size.cohort, 0, evaluate_every=size.every, workers=workers
        )
        return simulate("fedavg", {}, Federation.of(train, users, test), plan)

    simulation(2).run()
    taken = simulation(rounds)
    began = time.perf_counter()
    taken.run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    steps = rounds * size.cohort * -(-size.images // 10)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "seconds_for_1500_rounds": seconds * ROUNDS / rounds,
        "steps_per_s": steps / seconds,
        "engine": taken.engine_name,
        "workers": workers,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pfl_cifar10", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, help=f"number of rounds (default: {ROUNDS} on a GPU, {FEW} on a CPU)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes on a CPU (default: 0, one per core)"
    )
    given = parser.parse_args(arguments)
    try:
        be_deterministic()
        device = resolve_device(given.device)
        rounds = (
            given.rounds if given.rounds is not None else ROUNDS if device.type == "cuda" else FEW
        )
        if rounds < 1:
            raise UserError(f"--rounds {rounds}: must be at least 1")
        watch = Watch()
        torch.set_num_threads(1)
        found = run(rounds, device, workers=given.workers or len(os.sched_getaffinity(0)))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(
        json.dumps(found | {"machine": watch.found()}) + "\n" + line(watch.found()) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
