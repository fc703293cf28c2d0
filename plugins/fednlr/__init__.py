"""FedNLR: `algorithm` is the method, `pair` its FedML pair, imported only on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedml_noniid.plugins.extras import on_demand

if TYPE_CHECKING:
    from fedml_noniid.plugins.fednlr.pair import FedNLRAggregator, FedNLRTrainer

__all__ = ["FedNLRAggregator", "FedNLRTrainer"]
__getattr__ = on_demand("fedml_noniid.plugins.fednlr.pair", __all__)
