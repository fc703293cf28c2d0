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

from fedml_noniid.api.choosing import Choice as Choice
from fedml_noniid.api.choosing import choose as choose
from fedml_noniid.api.data import Data as Data
from fedml_noniid.api.data import from_arrays as from_arrays
from fedml_noniid.api.data import from_dataset as from_dataset
from fedml_noniid.api.data import from_frame as from_frame
from fedml_noniid.api.data import from_texts as from_texts
from fedml_noniid.api.data import load as load
from fedml_noniid.api.embedding import embed as embed
from fedml_noniid.api.leaving_out import LeaveOneOut as LeaveOneOut
from fedml_noniid.api.leaving_out import leave_one_out as leave_one_out
from fedml_noniid.api.notebook import notebook as notebook
from fedml_noniid.api.result import Result as Result
from fedml_noniid.api.result import Results as Results
from fedml_noniid.api.result import results as results
from fedml_noniid.api.running import run as run
from fedml_noniid.api.running import sweep as sweep
from fedml_noniid.api.split import Split as Split
from fedml_noniid.api.split import partition as partition
from fedml_noniid.core.errors import UserError as UserError
from fedml_noniid.engines.callbacks import Callback as Callback
from fedml_noniid.engines.callbacks import EarlyStop as EarlyStop
from fedml_noniid.plugins.registry import register as register
from fedml_noniid.rates import Rate as Rate
