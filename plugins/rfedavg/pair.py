"""The FedML pairs of rFedAvg and rFedAvg+; `recipe` is all that they set, behaviour is in `plugins.silo.host`."""

from __future__ import annotations

from plugins.silo.host import HostAggregator, HostTrainer


class RFedAvgTrainer(HostTrainer):
    """A silo under rFedAvg: pulls its mean features towards those of every other silo."""

    recipe = "rfedavg"


class RFedAvgAggregator(HostAggregator):
    """The server of rFedAvg: keeps every silo's mean feature and sends each the others'."""

    recipe = "rfedavg"


class RFedAvgPlusTrainer(HostTrainer):
    """A silo under rFedAvg+: pulls its mean features towards the mean of the others'."""

    recipe = "rfedavg_plus"


class RFedAvgPlusAggregator(HostAggregator):
    """The server of rFedAvg+: averages, then has the silos map their data with the new model."""

    recipe = "rfedavg_plus"
