"""CCN: `algorithm` is the method, `pair` its FedML pair, imported only on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedml_noniid.plugins.extras import on_demand

if TYPE_CHECKING:
    from fedml_noniid.plugins.ccn.pair import CCNAggregator, CCNTrainer

__all__ = ["CCNAggregator", "CCNTrainer"]
__getattr__ = on_demand("fedml_noniid.plugins.ccn.pair", __all__)
