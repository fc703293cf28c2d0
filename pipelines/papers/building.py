"""Builds targets from the finished runs, beside the paper's own numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import fedml_noniid
from fedml_noniid.pipelines.papers import table
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.targets import Built, Target, nothing
from fedml_noniid.plugins.core.errors import UserError

# Every other kind is a function of papers/<paper>/figures.py, papers/curves.py or
# papers/settings.py in the checkout.
TABLE = "table"
CHECKOUT = Path(fedml_noniid.__file__).parents[1]
NO_CHECKOUT = "it is made in a checkout of the repository only"


def build(target: Target, measured: Measured) -> Built:
    """Builds a target of any kind, with remarks on the runs that it reads.

    UserError for a kind that is no table and no function of `papers/` in the checkout.
    """
    measured.forget()
    built = builder(target)(target, measured)
    return built._replace(remarks=measured.remarks())


def builder(target: Target) -> Callable[[Target, Measured], Built]:
    """The function that builds targets of this kind.

    In an installed package, which has no pictures, a figure is said to be missing.
    """
    if target.kind == TABLE:
        return table.build
    if not (CHECKOUT / "papers" / target.paper / "figures.py").is_file():
        return lambda target, measured: nothing([NO_CHECKOUT])
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    for name in (f"papers.{target.paper}.figures", "papers.curves", "papers.settings"):
        found = getattr(importlib.import_module(name), target.kind.replace("-", "_"), None)
        if isinstance(found, FunctionType):
            return found
    allowed = f"{TABLE}, curves, settings, functions of papers/{target.paper}/figures.py"
    raise UserError(f"{target.id}: kind {target.kind!r} is unknown; allowed: {allowed}")
