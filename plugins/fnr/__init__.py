"""FNR-FL: `algorithm` is the paper, `authors` their code, `pair` the FedML pair, imported only on
demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedml_noniid.plugins.fnr.pair import FNRAggregator, FNRTrainer

__all__ = ["FNRAggregator", "FNRTrainer"]


def __getattr__(name: str) -> object:
    # FedML takes 11 s and 1 GB: a simulation never imports it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedml_noniid.plugins.fnr import pair

    found: object = getattr(pair, name)
    return found
