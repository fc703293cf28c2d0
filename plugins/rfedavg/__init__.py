"""rFedAvg and rFedAvg+: `algorithm` has the methods, `pair` their FedML pairs, imported only on
demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedml_noniid.plugins.extras import on_demand

if TYPE_CHECKING:
    from fedml_noniid.plugins.rfedavg.pair import (
        RFedAvgAggregator,
        RFedAvgPlusAggregator,
        RFedAvgPlusTrainer,
        RFedAvgTrainer,
    )

__all__ = ["RFedAvgAggregator", "RFedAvgPlusAggregator", "RFedAvgPlusTrainer", "RFedAvgTrainer"]
__getattr__ = on_demand("fedml_noniid.plugins.rfedavg.pair", __all__)
