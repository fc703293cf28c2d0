"""FedNLR: `algorithm` is the method, `pair` its FedML pair."""

from fedml_noniid.plugins import lazy_pair
from fedml_noniid.plugins.fednlr.algorithm import FedNLR as FedNLR

__getattr__ = lazy_pair(__name__)
