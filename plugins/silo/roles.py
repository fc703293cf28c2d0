"""FedML's two roles over our transport: each has the `run()` that `FedMLRunner(...,
algorithm_flow=...)` calls.

They call trainer and aggregator in the order in which FedML's own managers do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.exit_codes import QuorumError, SetBackError
from fedml_noniid.plugins.silo.silo_client import SiloClient

if TYPE_CHECKING:
    from fedml.cross_silo.client.fedml_trainer_dist_adapter import TrainerDistAdapter

    from fedml_noniid.plugins.silo.host import HostAggregator

LOG = logging.getLogger(__name__)


class ServerRole:
    """Asks, waits for a quorum, aggregates; tells the silos how the run ends."""

    def __init__(self, aggregator: HostAggregator, coordinator: Coordinator) -> None:
        self._aggregator, self._coordinator = aggregator, coordinator

    def run(self) -> None:
        """Runs to the end. Raises UserError."""
        try:
            self._run()
        except UserError as error:
            # The reason may quote a silo's own words, which are not for the others.
            few = isinstance(error, QuorumError)
            self._coordinator.finish(
                "stop", "too few silos answered" if few else "the server has failed"
            )
            raise
        self._coordinator.finish("over", "")

    def _run(self) -> None:
        aggregator, server_run = self._aggregator, self._aggregator.server_run
        if server_run.down.ask is not None:
            self._coordinator.gather(server_run.resumed)
        while (ask := server_run.down.ask) is not None:
            found = self._coordinator.ask(server_run.down, server_run.schema, server_run.opened)
            server_run.without([client for client in ask.to if client not in found])
            uploads: list[Any] = [(float(up["leaves"]["n"]), up) for up in found.values()]
            kept, _ = aggregator.on_before_aggregation(uploads)
            aggregator.set_model_params(aggregator.on_after_aggregation(aggregator.aggregate(kept)))


class SiloRole:
    """Answers until the run is over."""

    def __init__(self, adapter: TrainerDistAdapter, client: SiloClient) -> None:
        self._adapter, self._client = adapter, client

    def run(self) -> None:
        """Runs to the end. Raises UserError."""
        while (down := self._client.task()) is not None:
            self._adapter.update_dataset(self._adapter.client_index)
            self._adapter.update_model(down)
            try:
                up, _ = self._adapter.train(down.round)
            except UserError as error:
                LOG.warning("exchange %d: %s", down.exchange, error)
                self._client.fail(down.exchange, str(error))
                if isinstance(error, SetBackError):
                    raise
            else:
                self._client.answer(up)
