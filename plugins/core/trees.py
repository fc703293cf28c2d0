"""Trees: nested dicts of tensors, and the few functions on them that every method needs.

Parameters and buffers are flat trees, `dict[str, Tensor]`; messages and memories may nest. Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plugins.core.cores import all_cores

Tree = dict[str, Any]
Params = dict[str, Tensor]

PART = 512  # numbers whose squares are added up one after the other


def tree_map(fn: Callable[..., Tensor], tree: Tree, *rest: Tree) -> Tree:
    """Applies `fn` to the tensors that stand at the same place in all trees. KeyError if the structures differ."""
    return {
        key: tree_map(fn, value, *(other[key] for other in rest))
        if isinstance(value, dict)
        else fn(value, *(other[key] for other in rest))
        for key, value in tree.items()
    }


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in insertion order."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same structure, shapes, dtypes and devices."""
    return tree_map(torch.zeros_like, tree)


def add(a: Tree, b: Tree) -> Tree:
    """a + b."""
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b."""
    return tree_map(torch.sub, a, b)


def scale(factor: float | Tensor, tree: Tree) -> Tree:
    """factor * tree; `factor` is a number or a 0-d tensor."""
    return tree_map(lambda leaf: factor * leaf, tree)


def norm(tree: Tree) -> Tensor:
    """The L2 norm of all tensors taken as one vector, a 0-d tensor."""
    return together([leaf_row_norms(leaf.unsqueeze(0)) for leaf in leaves(tree)])[0]


def row_norms(stacked: Tree) -> Tensor:
    """The L2 norm of each row of a stacked tree, leaves `[M, ...]`, as `[M]`."""
    return together([leaf_row_norms(leaf) for leaf in leaves(stacked)])


def leaf_row_norms(leaf: Tensor) -> Tensor:
    """The L2 norm of each row of `[M, ...]`, as `[M]`.

    Part by part: torch's kernel adds up a row's squares in few sums, which in float32 can be off by a thousandth for a
    million numbers, and takes a third of the time of squares that are laid down first.
    """
    rows = leaf.reshape(len(leaf), -1)
    whole = rows.shape[1] // PART * PART
    if whole <= PART:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    with all_cores(rows):
        parts = torch.linalg.vector_norm(rows[:, :whole].reshape(len(leaf), -1, PART), dim=2)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
    return leaf_row_norms(torch.cat([parts, rest], dim=1))


def together(norms: Sequence[Tensor]) -> Tensor:
    """The norms of vectors that consist of parts with these norms, each `[M]`."""
    whole: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    return whole


def weighted_sum(weights: Tensor, stacked: Tree) -> Tree:
    """sum_i weights[i] * row i; `weights` is `[M]`, leaves are `[M, ...]`."""

    def total(leaf: Tensor) -> Tensor:
        # Matrix times vector: as a product of two matrices, one of them a row, it takes twice as long.
        rows = leaf.reshape(len(leaf), -1)
        summed: Tensor = torch.mv(rows.t(), weights.to(leaf.dtype))
        return summed.reshape(leaf.shape[1:])

    return tree_map(total, stacked)


def stack(trees: Sequence[Tree]) -> Tree:
    """Trees of one structure to one tree with a new first axis."""
    return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def row(stacked: Tree, index: int | slice | Tensor) -> Tree:
    """Row `index` (or, for a slice or an index tensor, the rows) of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], stacked)


def rows_at(leaf: Tensor, index: Tensor, room: Tensor | None = None) -> Tensor:
    """leaf[index], which for whole rows copies five times as fast; [n, ...] and [...] -> [..., ...].

    `room`: where they may be put, [at least as many rows, ...].
    """
    flat = index.reshape(-1)
    rows = leaf.index_select(0, flat) if room is None else torch.index_select(leaf, 0, flat, out=room[: len(flat)])
    return rows.reshape(index.shape + leaf.shape[1:])


def replace_row(stacked: Tree, index: int, tree: Tree) -> None:
    """Writes `tree` into row `index` of a stacked tree, in place: engines only, for storage that is their own."""
    tree_map(lambda rows, leaf: rows[index].copy_(leaf), stacked, tree)


def leading(values: Tensor, like: Tensor) -> Tensor:
    """`values` [...] with as many axes behind them as `like` [..., ...] has more."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def select(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """`a` where the boolean `condition`, 0-d or [M] for leaves [M, ...], holds, else `b`."""
    return tree_map(lambda x, y: torch.where(leading(condition, x), x, y), a, b)


def detach(tree: Tree) -> Tree:
    """The same values, cut off from autograd."""
    return tree_map(torch.Tensor.detach, tree)


def n_bytes(tree: Tree) -> int:
    """The size of all tensors in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


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
    """The inverse of `flatten` for a tree of the structure `like`. KeyError if a tensor is missing."""
    return {
        key: unflatten(flat, value, f"{prefix}{key}/") if isinstance(value, dict) else flat[prefix + key]
        for key, value in like.items()
    }
