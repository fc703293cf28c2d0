"""The FedML pair of CCN; `recipe` is all that it sets, behaviour is in `plugins.silo.host`."""

from __future__ import annotations

from plugins.silo.host import HostAggregator, HostTrainer


class CCNTrainer(HostTrainer):
    """A silo under CCN: trains as in FedAvg and reports the mean feature of its data."""

    recipe = "ccn"


class CCNAggregator(HostAggregator):
    """The server of CCN: weighs a silo the less, the more its features resemble those of the others."""

    recipe = "ccn"
