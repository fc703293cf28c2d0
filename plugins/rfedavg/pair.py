"""The FedML pairs of rFedAvg and rFedAvg+; they only set `recipe`, the behaviour is in
`deploy.host`."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer


class RFedAvgTrainer(HostTrainer):
    """A silo under rFedAvg: pulls its mean features towards those of every other silo."""

    recipe = "rfedavg"


class RFedAvgAggregator(HostAggregator):
    """The server of rFedAvg: keeps the silos' mean features and sends each silo those of the
    others."""

    recipe = "rfedavg"


class RFedAvgPlusTrainer(HostTrainer):
    """A silo under rFedAvg+: pulls its mean features towards the mean of the others'."""

    recipe = "rfedavg_plus"


class RFedAvgPlusAggregator(HostAggregator):
    """The server of rFedAvg+: averages, then asks the silos to map their data with the new
    model."""

    recipe = "rfedavg_plus"
