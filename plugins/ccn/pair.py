"""The FedML pair of CCN; it only sets `recipe`, the behaviour is in `deploy.host`."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer


class CCNTrainer(HostTrainer):
    """A silo under CCN: trains as in FedAvg and reports the mean feature of its data."""

    recipe = "ccn"


class CCNAggregator(HostAggregator):
    """The server of CCN: gives a silo less weight if its features resemble those of the others."""

    recipe = "ccn"
