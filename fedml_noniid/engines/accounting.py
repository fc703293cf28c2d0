"""Accounts for the privacy noise of methods: epsilon after each round, in rounds.csv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedml_noniid.core.component import Mechanism
from fedml_noniid.engines.callbacks import Callback, Columns, CurrentRun, RoundEnd, Row
from fedml_noniid.engines.local_training import LocalTraining
from fedml_noniid.privacy.accounting import epsilon


class Accounting(Callback):
    """Measures `epsilon_per_sample` and `epsilon_per_client`, of the unit with the most releases.

    A round with a client is one release of the client. Each pass over its samples in local training
    is one release of each sample. Counted are the answers that the server took. Nobody's draw, of a
    cohort or of a batch, amplifies anything.
    """

    def __init__(self, mechanisms: Sequence[Mechanism]) -> None:
        self._mechanisms = mechanisms
        # releases by unit, then of each client
        self.releases: dict[str, list[int]] = {mechanism.unit: [] for mechanism in mechanisms}
        self._next = self.releases
        self._local: LocalTraining | None = None

    def on_start(self, run: CurrentRun) -> None:
        self._local = run.start.plan.local
        self.releases = {unit: [0] * run.federation.size for unit in self.releases}
        for mechanism in self._mechanisms:  # now, if dp-accounting is not there
            epsilon({mechanism.noise: 1}, mechanism.delta)

    def measure(self, end: RoundEnd) -> Columns:
        assert self._local is not None, "the run has started"
        self._next = {unit: [*counts] for unit, counts in self.releases.items()}
        for client, n in zip(end.reply.clients, end.reply.n.tolist(), strict=True):
            for unit, counts in self._next.items():
                counts[client] += self._local.passes(n) if unit == "sample" else 1
        return {
            f"epsilon_per_{mechanism.unit}": epsilon(
                {mechanism.noise: max(self._next[mechanism.unit])}, mechanism.delta
            )
            for mechanism in self._mechanisms
        }

    def on_round(self, run: CurrentRun, row: Row) -> None:
        self.releases = self._next

    def state(self) -> dict[str, Any]:
        return {"releases": self.releases}
