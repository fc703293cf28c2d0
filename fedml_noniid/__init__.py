"""Federated learning on non-IID data: plugins for FedML, reproduced with DVC and MLflow.

`plugins` and `pipelines` in this folder are links to the checkout's folders. They make the folders
importable under one name, which a wheel can take: `fedml_noniid.plugins` and
`fedml_noniid.pipelines`. The names of `fedml_noniid.api` are names of this package too. They are
imported when they are first used, so the package itself is imported at once.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedml_noniid.api import (
        Callback,
        Choice,
        Data,
        EarlyStop,
        LeaveOneOut,
        Rate,
        Result,
        Results,
        Split,
        UserError,
        choose,
        embed,
        from_arrays,
        from_dataset,
        from_frame,
        from_texts,
        leave_one_out,
        load,
        partition,
        register,
        results,
        run,
        sweep,
    )
    from fedml_noniid.api.notebook import notebook

__version__ = "0.3.0"
__all__ = [
    "Callback",
    "Choice",
    "Data",
    "EarlyStop",
    "LeaveOneOut",
    "Rate",
    "Result",
    "Results",
    "Split",
    "UserError",
    "choose",
    "embed",
    "from_arrays",
    "from_dataset",
    "from_frame",
    "from_texts",
    "leave_one_out",
    "load",
    "notebook",
    "partition",
    "register",
    "results",
    "run",
    "sweep",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        # With both arguments, Python names the near miss.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return getattr(importlib.import_module("fedml_noniid.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
