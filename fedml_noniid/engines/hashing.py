"""Collects and hashes the tensors of a trained model, to compare runtimes and runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.engines.packing import flatten


def model_tensors(
    params: Params,
    evaluated: Params,
    buffers: Params,
    own: Tree | None = None,
    frozen: Collection[str] = (),
) -> Params:
    """The content of `model.safetensors`: `params/<name>`, `buffers/<name>`, and `evaluated/<name>`
    where it differs.

    Where clients keep a part to themselves, also `own/params/<name>` and `own/buffers/<name>`, [N,
    ...]. Where they have one of K models, `own/models/params/<name>` and so on, [K, ...], and
    `own/model_of`, the number of each client's, [N]. The evaluated model differs from the sent one
    if their values do; object identity would not survive a restart. Tensors are contiguous copies
    on the CPU; those of `params/` that are `frozen`, which may be large, are no copies unless
    several share their memory.
    """
    parts: Tree = {"params": params, "buffers": buffers, "own": flatten(own or {})}
    if any(not torch.equal(evaluated[key], params[key]) for key in params):
        parts["evaluated"] = evaluated
    n_users = Counter(leaf.untyped_storage().data_ptr() for leaf in params.values())
    return {
        f"{part}/{key}": leaf.detach().cpu().contiguous()
        if part == "params" and key in frozen and n_users[leaf.untyped_storage().data_ptr()] == 1
        else leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for part, tree in parts.items()
        for key, leaf in tree.items()
    }


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, over name, dtype, shape and bytes of every tensor, in the order of
    the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        leaf = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        # Viewed as bytes, because numpy has no bfloat16. For that a 0-d tensor needs an axis.
        digest.update(leaf.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
