"""rFedAvg and rFedAvg+: `algorithm` has the methods, `pair` their FedML pairs, imported only on
demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedml_noniid.plugins.rfedavg.pair import (
        RFedAvgAggregator,
        RFedAvgPlusAggregator,
        RFedAvgPlusTrainer,
        RFedAvgTrainer,
    )

__all__ = ["RFedAvgAggregator", "RFedAvgPlusAggregator", "RFedAvgPlusTrainer", "RFedAvgTrainer"]


def __getattr__(name: str) -> object:
    # FedML takes 11 s and 1 GB: training and simulation do without it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedml_noniid.plugins.rfedavg import pair

    found: object = getattr(pair, name)
    return found
