"""rFedAvg and rFedAvg+: `algorithm` has both, `authors` their code, `pair` the FedML pairs."""

from fedml_noniid.plugins import lazy_pair
from fedml_noniid.plugins.rfedavg.algorithm import RFedAvg as RFedAvg
from fedml_noniid.plugins.rfedavg.algorithm import RFedAvgPlus as RFedAvgPlus

__getattr__ = lazy_pair(__name__)
