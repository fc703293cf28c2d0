"""The FedML pair of FNR-FL; `recipe` is all that it sets, behaviour is in `plugins.silo.host`."""

from __future__ import annotations

from plugins.silo.host import HostAggregator, HostTrainer


class FNRTrainer(HostTrainer):
    """A silo under FNR-FL: trains, reports feature norms and accuracy on public data, refines when told to."""

    recipe = "fnr"


class FNRAggregator(HostAggregator):
    """The server of FNR-FL: has the silos that are worst on public data refine their models, then averages."""

    recipe = "fnr"
