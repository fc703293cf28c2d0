"""What is recorded of every round, in every runtime: the columns of rounds.csv."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from plugins.core.component import Ask, Reply, Samples, Server
from plugins.core.errors import NonFiniteError
from plugins.core.task import Network
from plugins.core.trees import Params, norm, row_norms, sub, tree_map
from plugins.engines.clients import refuse_non_finite
from plugins.engines.evaluation import evaluate
from plugins.engines.traffic import Meter


class Recorder:
    """Sees each exchange, and makes a row at the end of each round."""

    def __init__(self, network: Network, test: Samples, validation: Samples | None) -> None:
        self.network, self.test, self.validation = network, test, validation
        self.meter = Meter()
        self.rows: list[dict[str, float]] = []
        self._began = time.perf_counter()
        self._start: Params = {}
        self._local_loss = self._moved = torch.tensor(math.nan)

    def begin(self, server: Server) -> None:
        """A round begins with this server."""
        self._began, self._start = time.perf_counter(), server.params

    def exchange(self, ask: Ask, reply: Reply, round_: int) -> None:
        """One Ask and what came back. Raises NonFiniteError, naming the client."""
        refuse_non_finite(reply, round_)
        self.meter.count(ask, reply)
        if ask.job == "train":
            self._local_loss = reply.loss.mean()
            self._moved = row_norms(tree_map(torch.sub, reply.params, ask.params)).mean()

    def end(self, round_: int, server: Server, evaluated: Params, look: bool = True) -> dict[str, float]:
        """The row of the round that ends; NaN where `look` is False or there is nothing to look at.

        Raises NonFiniteError when the server's update is not finite.
        """
        moved: Tensor = norm(sub(server.params, self._start))
        if not torch.isfinite(moved):
            raise NonFiniteError(
                f"round {round_}, server: the update is not finite; lower train.lr or the method's coefficients"
            )
        row: dict[str, float] = {"round": round_}
        for name, samples in (("test", self.test), ("validation", self.validation)):
            found = None if samples is None or not look else evaluate(self.network, evaluated, server.buffers, samples)
            row[f"{name}_accuracy"] = found.accuracy if found else math.nan
            row[f"{name}_loss"] = found.loss if found else math.nan
        up, down = self.meter.read()
        row |= {
            "local_loss": self._local_loss.item(),
            "update_norm_client": self._moved.item(),
            "update_norm_server": moved.item(),
            "bytes_up": up,
            "bytes_down": down,
            "seconds": time.perf_counter() - self._began,
        }
        self.rows.append(row)
        return row
