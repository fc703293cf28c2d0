"""Names the silos that send far more than the others.

A silo's answer has parts: the update of the model, that of its buffers, and each tensor that a
method sends beside them. The norm of a part may be `ratio` times the reference at most. The
reference is the median of the silos that have answered, or the median of earlier rounds, whichever
is larger. `python -m benchmarks poison` measures the ratios of honest silos.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fedml_noniid.core.trees import Params
from fedml_noniid.engines.client_tests import TEST

Norms = Mapping[str, float]  # by part
KEPT = 20  # medians of earlier questions
STANDS_OUT = 4.0  # times the reference: the least norm that a round is repeated without


def part(key: str) -> str:
    """The part of an answer that a tensor of a flat reply belongs to; "" for counts and loss."""
    first, *names = key.split("/")
    if first == "upload" and names[0] != TEST:  # a silo may have no tests; their ranges bound them
        return "/".join([first, *names[:2]])
    return first if first in ("deltas", "buffers") else ""


def norms(leaves: Params) -> dict[str, float]:
    """The Euclidean norm of each part of a flat reply."""
    squares: dict[str, float] = {}
    for key, leaf in leaves.items():
        if name := part(key):
            values = (leaf if leaf.dtype == torch.float32 else leaf.double()).reshape(-1)
            square = torch.dot(values, values).item()  # ten times as fast as `norm`
            squares[name] = squares.get(name, 0.0) + square
    return {name: square**0.5 for name, square in squares.items()}


class Outliers:
    """Compares the answers to each question of a run, and remembers who was left out of it."""

    def __init__(self, ratio: float) -> None:
        """`ratio`: as in the module's docstring."""
        self.ratio = ratio
        self.norms: dict[int, Norms] = {}  # by client, of the answers to the present question
        self.medians: dict[str, list[float]] = {}  # job and part -> of earlier questions
        # By client: the largest ratio of its answers to the reference, in this round and the last.
        self.ratios, self.last_ratios = dict[int, float](), dict[int, float]()
        self.left_out: dict[int, str] = {}  # clients that are asked no more, and why

    def refused(self, job: str, clients: Collection[int]) -> dict[int, str]:
        """By client: why its answer is too far from the others', in words."""
        return {
            client: f"the norm of its {name} is {ratio:.3g} times the median silo's; allowed: "
            f"{self.ratio:g}, train_args.max_norm_ratio"
            for client, (ratio, name) in self._largest(job, clients).items()
            if ratio > self.ratio
        }

    def count(self, job: str, clients: Collection[int]) -> None:
        """Notes answers that count, if they were checked; a question is over."""
        clients = [client for client in clients if client in self.norms]
        for client, (ratio, _) in self._largest(job, clients).items():
            self.ratios[client] = max(ratio, self.ratios.get(client, 0.0))
        for name, median in self._medians(clients).items():
            earlier = [*self.medians.get(f"{job} {name}", []), median]
            self.medians[f"{job} {name}"] = earlier[-KEPT:]
        self.norms = {}

    def suspect(self, ratios: Mapping[int, float]) -> int | None:
        """The client that stands out in a round; None if nobody does."""
        client = max(ratios, key=lambda client: ratios[client], default=None)
        return None if client is None or ratios[client] < STANDS_OUT else client

    def state(self) -> dict[str, Any]:
        """What a checkpoint has, as JSON."""
        own: dict[str, dict[int, Any]] = {"ratios": self.last_ratios, "left_out": self.left_out}
        return {key: list(by_client.items()) for key, by_client in own.items()} | {
            "medians": self.medians
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self.medians, self.norms, self.ratios = state["medians"], {}, {}
        self.last_ratios, self.left_out = dict(state["ratios"]), dict(state["left_out"])

    def _largest(self, job: str, clients: Collection[int]) -> dict[int, tuple[float, str]]:
        """By client: the largest ratio of a part of its answer to the reference, and the part."""
        references = {
            name: max(median, statistics.median_low(self.medians.get(f"{job} {name}", [0.0])))
            for name, median in self._medians(clients).items()
        }
        return {
            client: max((_ratio(norm, references[name]), name) for name, norm in own.items())
            for client in clients
            if (own := self.norms[client])
        }

    def _medians(self, clients: Collection[int]) -> dict[str, float]:
        """The median of each part; the lower one of an even number, so that half can't hide one."""
        answers = [self.norms[client] for client in clients]
        names = dict.fromkeys(name for own in answers for name in own)
        return {name: statistics.median_low([own[name] for own in answers]) for name in names}


def _ratio(norm: float, reference: float) -> float:
    """How many times the reference a norm is; infinite if most silos send nothing but zeros."""
    return norm / reference if reference else (math.inf if norm else 0.0)
