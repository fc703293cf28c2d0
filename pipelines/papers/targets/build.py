"""Builds one target of any kind from the finished runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import fedml_noniid
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.papers.targets.spec import KINDS, Built, Target
from fedml_noniid.plugins.core.errors import UserError

Builder = Callable[[Target, Measured], Built]
# Pictures are drawn by files of the checkout, which no wheel holds.
CHECKOUT = Path(fedml_noniid.__file__).parents[1]
NO_CHECKOUT = "it is drawn in a checkout of the repository only"


def build(target: Target, measured: Measured) -> Built:
    """Builds a target of any kind, with remarks on the runs that it reads.

    UserError for a kind that is not in KINDS and no function of `papers/` in the checkout.
    """
    measured.forget()
    built = builder(target)(target, measured)
    return built._replace(remarks=measured.remarks())


def builder(target: Target) -> Builder:
    """The function that builds targets of this kind.

    It is that of the paper's figures.py, or of papers/curves.py. In an installed package, where
    these are not, the target is said to be missing.
    """
    if target.kind in KINDS:
        name = f"fedml_noniid.pipelines.papers.targets.{target.kind}"
        return importlib.import_module(name).build
    if not (CHECKOUT / "papers" / target.paper / "figures.py").is_file():
        return lambda target, measured: Built((), {}, (), (NO_CHECKOUT,))
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    kind = target.kind.replace("-", "_")
    for name in (f"papers.{target.paper}.figures", "papers.curves"):
        found = getattr(importlib.import_module(name), kind, None)
        if isinstance(found, FunctionType):
            return found
    allowed = f"{', '.join(KINDS)}, curves, functions of papers/{target.paper}/figures.py"
    raise UserError(f"{target.id}: kind {target.kind!r} is unknown; allowed: {allowed}")
