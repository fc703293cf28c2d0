"""FNR-FL: `algorithm` is the paper, `authors` their code, `pair` the FedML pair, imported only on
demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedml_noniid.plugins.extras import on_demand

if TYPE_CHECKING:
    from fedml_noniid.plugins.fnr.pair import FNRAggregator, FNRTrainer

__all__ = ["FNRAggregator", "FNRTrainer"]
__getattr__ = on_demand("fedml_noniid.plugins.fnr.pair", __all__)
