"""The FedML pair of FNR-FL; it only sets `recipe`, the behaviour is in `deploy.host`."""

from __future__ import annotations

from fedml_noniid.deploy.host import HostAggregator, HostTrainer


class FNRTrainer(HostTrainer):
    """A silo under FNR-FL: trains, reports feature norms and accuracy on public data, refines on
    request."""

    recipe = "fnr"


class FNRAggregator(HostAggregator):
    """The server of FNR-FL: asks the silos that are worst on public data to refine their models,
    then averages."""

    recipe = "fnr"
