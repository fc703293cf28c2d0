"""What a worker has to be like to compute the bits of the front, and what differs where it isn't.

A worker carries each trait as a dask resource, and one more that is the hash of all. An item asks
for that one, so dask itself gives it to no other worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from fedml_noniid.pipelines.experiment import provenance
from fedml_noniid.plugins import registry

LABEL = "bits-"
CODE = "fedml_noniid.pipelines.cluster.job"  # with its imports, all that a worker runs


def traits(device: torch.device, threads: int) -> dict[str, str]:
    """The facts of this process that may change a result's bits.

    The code is all of ours that an item may run, with all methods. Methods of other packages are
    compared item by item, by its fingerprint.
    """
    own = {kind.__module__ for kind in registry.METHODS.values()}
    return {
        "code": provenance.code(CODE, *sorted(own))[:16],
        **provenance.kind_of(device, threads),
    }


def label(traits: Mapping[str, str]) -> str:
    """The resource that an item asks for."""
    return LABEL + provenance.digest(dict(traits))[:16]


def resources(traits: Mapping[str, str]) -> dict[str, float]:
    """What a worker with these traits carries. It takes one item at a time."""
    return {label(traits): 1.0} | {f"{name}={value}": 1.0 for name, value in traits.items()}


def differences(wanted: Mapping[str, str], carried: Collection[str]) -> str:
    """What differs at a worker that carries these resources, in words."""
    theirs = dict(resource.split("=", 1) for resource in carried if "=" in resource)
    if not theirs:
        return "was not started by `noniid cluster worker`"
    names = [name for name in {**wanted, **theirs} if wanted.get(name) != theirs.get(name)]
    return "has " + ", ".join(
        f"{name} {theirs.get(name, 'none')} (here {wanted.get(name, 'none')})" for name in names
    )
