"""FedNNNN: `algorithm` is the method, `pair` its FedML pair."""

from fedml_noniid.plugins import lazy_pair
from fedml_noniid.plugins.fednnnn.algorithm import FedNNNN as FedNNNN

__getattr__ = lazy_pair(__name__)
