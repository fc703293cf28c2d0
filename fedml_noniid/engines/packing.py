"""Stacks and flattens trees, as they are stored and sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedml_noniid.core.trees import Params, Tree, tree_map


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one structure to one tree with a new first axis."""
    return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def flatten(tree: Tree, prefix: str = "") -> Params:
    """A nested tree as a flat one with keys `outer/inner`. Empty dicts vanish."""
    flat: Params = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Params, like: Tree, prefix: str = "") -> Tree:
    """The inverse of `flatten` for a tree of the structure `like`.

    KeyError if a tensor is missing.
    """
    return {
        key: unflatten(flat, value, f"{prefix}{key}/")
        if isinstance(value, dict)
        else flat[prefix + key]
        for key, value in like.items()
    }
