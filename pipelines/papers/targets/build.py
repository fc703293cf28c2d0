"""Builds one target of any kind from the finished runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.papers.targets.spec import KINDS, Built, Target
from fedml_noniid.plugins.core.errors import UserError

Builder = Callable[[Target, Measured], Built]


def build(target: Target, measured: Measured) -> Built:
    """Builds a target of any kind, with remarks on the runs that it reads.

    UserError for a kind that is not in KINDS and not a function of the paper's figures.py.
    """
    measured.forget()
    built = builder(target)(target, measured)
    return built._replace(remarks=measured.remarks())


def builder(target: Target) -> Builder:
    """The function that builds targets of this kind."""
    if target.kind in KINDS:
        found: Any = importlib.import_module(
            f"fedml_noniid.pipelines.papers.targets.{target.kind}"
        ).build
        return found  # type: ignore[no-any-return]  # found by its name
    module = f"fedml_noniid.pipelines.papers.{target.paper}.figures"
    try:
        found = getattr(importlib.import_module(module), target.kind.replace("-", "_"), None)
    except ModuleNotFoundError:
        found = None
    if found is None:
        allowed = f"{', '.join(KINDS)}, functions of {module}"
        raise UserError(f"{target.id}: kind {target.kind!r} is unknown; allowed: {allowed}")
    return found  # type: ignore[no-any-return]  # as above
