"""CCN: `algorithm` is the method, `pair` its FedML pair."""

from fedml_noniid.plugins import lazy_pair
from fedml_noniid.plugins.ccn.algorithm import CCN as CCN

__getattr__ = lazy_pair(__name__)
