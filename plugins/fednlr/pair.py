"""The FedML pair of FedNLR; it only sets `recipe`, the behaviour is in `deploy.host`."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer


class FedNLRTrainer(HostTrainer):
    """A silo under FedNLR: trains each neuron at a rate that grows with its activation on the
    silo's data."""

    recipe = "fednlr"


class FedNLRAggregator(HostAggregator):
    """The server of FedNLR: averages as in FedAvg."""

    recipe = "fednlr"
