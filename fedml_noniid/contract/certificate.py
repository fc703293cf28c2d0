"""The certificate of a method: what holds, what does not, what was not tried and why, and of which
code it says so."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch

import fedml_noniid
from fedml_noniid.contract.suite import CHECKS
from fedml_noniid.own_code import package_of, source_of_class
from fedml_noniid.pipelines.experiment.provenance import git_commit
from fedml_noniid.plugins import registry

Results = Mapping[str, tuple[str, str]]  # check -> "passed", "failed" or "skipped", why
PARTS = (("passed", "holds"), ("failed", "does not hold"), ("skipped", "was not tried"))


def certificate(method: str, results: Results, settings: Sequence[str] = ()) -> str:
    """The text. `settings`: the neutral hyper-parameters, as they were given."""
    kind = registry.method(method)
    package = package_of(kind)
    lines = [
        f"Certificate of {kind.name} ({kind.__module__}.{kind.__qualname__})",
        f"  package: {package} {_version(package)}",
        f"  source: SHA-256 {source_of_class(kind)}",
        f"  by: fedml-noniid {fedml_noniid.__version__} ({git_commit()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}",
    ]
    if settings:
        lines.append(f"  neutral: {', '.join(settings)}")
    for outcome, heading in PARTS:
        outcomes = [(name, why) for name, (result, why) in results.items() if result == outcome]
        if outcomes:
            lines.append(f"{heading} ({len(outcomes)}):")
        for name, why in outcomes:
            check = CHECKS[name]
            lines.append(f"  {check.group}: {check.description}" + (f"\n    {why}" if why else ""))
    missing = [name for name in CHECKS if name not in results]
    if missing:
        lines.append(f"left out: {', '.join(missing)}")
    return "\n".join([*lines, ""])


def _version(package: str) -> str:
    """The version of the distribution that a package is from."""
    names = metadata.packages_distributions().get(package, ())
    return next((metadata.version(name) for name in names), "(not installed)")
