"""FedNNNN: `algorithm` is the method, `pair` its FedML pair, imported only on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedml_noniid.plugins.extras import on_demand

if TYPE_CHECKING:
    from fedml_noniid.plugins.fednnnn.pair import FedNNNNAggregator, FedNNNNTrainer

__all__ = ["FedNNNNAggregator", "FedNNNNTrainer"]
__getattr__ = on_demand("fedml_noniid.plugins.fednnnn.pair", __all__)
