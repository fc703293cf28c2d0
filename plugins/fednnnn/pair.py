"""The FedML pair of FedNNNN; it only sets `recipe`, the behaviour is in `deploy.host`."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer


class FedNNNNTrainer(HostTrainer):
    """A silo under FedNNNN: trains as in FedAvg."""

    recipe = "fednnnn"


class FedNNNNAggregator(HostAggregator):
    """The server of FedNNNN: stretches the average update to the silos' mean length, with
    momentum."""

    recipe = "fednnnn"
