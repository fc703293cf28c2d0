"""What a trained model consists of, and one hash of it, by which runtimes and runs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from plugins.core.trees import Params


def model_tensors(params: Params, evaluated: Params, buffers: Params) -> Params:
    """The content of `model.safetensors`: `params/<name>`, `buffers/<name>`, and `evaluated/<name>` where it differs.

    Values decide whether the evaluated model differs from the sent one, not identity, which a restart loses. Tensors
    are contiguous copies on the CPU.
    """
    parts = {"params": params, "buffers": buffers}
    if any(not torch.equal(evaluated[key], params[key]) for key in params):
        parts["evaluated"] = evaluated
    return {
        f"{part}/{key}": leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for part, tree in parts.items()
        for key, leaf in tree.items()
    }


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, over name, dtype, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        leaf = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        # As bytes first: numpy has no bfloat16. A 0-d tensor has to get an axis for that.
        digest.update(leaf.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
