"""FNR-FL: `algorithm` is the paper, `authors` their code, `pair` the FedML pair."""

from fedml_noniid.plugins import lazy_pair
from fedml_noniid.plugins.fnr.algorithm import FNR as FNR

__getattr__ = lazy_pair(__name__)
