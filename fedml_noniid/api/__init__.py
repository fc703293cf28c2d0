"""The Python API: load or pass data, partition them, run methods, compare.

Names, defaults and checks are those of params.yaml, and the same settings give the same bits. Bad
input raises `UserError` with one line per mistake.

>>> import fedml_noniid as nd
>>> data = nd.load("digits")
>>> split = nd.partition(data, "dirichlet", clients=5, alpha=0.5)
>>> result = nd.run("scaffold", split, rounds=2, seeds=[0, 1])
>>> bool(result.rounds["test_accuracy"].max() > 0.2)
True
"""

from fedml_noniid.api.data import Data, from_arrays, from_frame, from_texts, load
from fedml_noniid.api.notebook import notebook
from fedml_noniid.api.result import Result, Results
from fedml_noniid.api.running import run, sweep
from fedml_noniid.api.split import Split, partition
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.engines.callbacks import Callback, EarlyStop
from fedml_noniid.plugins.rates import Rate

__all__ = [
    "Callback",
    "Data",
    "EarlyStop",
    "Rate",
    "Result",
    "Results",
    "Split",
    "UserError",
    "from_arrays",
    "from_frame",
    "from_texts",
    "load",
    "notebook",
    "partition",
    "run",
    "sweep",
]
