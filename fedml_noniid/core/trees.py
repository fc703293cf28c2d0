"""Computes with trees: nested dicts of tensors.

Parameters and buffers are flat trees, `dict[str, Tensor]`; messages and memories may nest. Nothing
is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedml_noniid.core.options import RecipeError

Tree = dict[str, Any]
Params = dict[str, Tensor]

ONE_BY_ONE: Any = object()  # in place of weights: rows are measured, not added up
NORM_BLOCK = 512  # numbers whose squares are added up one after the other


class Rows:
    """The rows [M, ...] of a tensor that are added up or measured, and not read by themselves."""

    def __init__(self, rows: Any, weights: tuple[Any, ...] | None = None) -> None:
        """`weights`: the ones by which they may be added up, as objects; None: any."""
        self._rows, self._weights = rows, weights

    def __getattr__(self, *_: object) -> Any:
        raise RecipeError(
            "the method reads what single clients have sent, and declares that it needs sums",
            allowed="Needs(replies=Replies.SCALARS) for uploads, Replies.MODELS for models",
        )

    __torch_function__ = __getitem__ = __iter__ = __len__ = __neg__ = __abs__ = __getattr__
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = __getattr__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __lt__ = __gt__ = __getattr__


def hidden(tree: Tree, weights: tuple[Any, ...] | None = None) -> Tree:
    """A stacked tree of which only sums and norms can be taken, see `Rows`."""
    return {
        key: hidden(branch, weights) if isinstance(branch, dict) else Rows(branch, weights)
        for key, branch in tree.items()
    }


def opened(leaf: Any, weights: Tensor | None = None) -> Any:
    """The tensor, for the functions that add it up by `weights` or measure its rows."""
    if not isinstance(leaf, Rows):
        return leaf
    held = vars(leaf)
    if held["_weights"] is not None and not any(weights is known for known in held["_weights"]):
        raise RecipeError(
            "the method declares that it needs sums, and measures rows or weighs them by itself",
            allowed="sums by server.omega after training; sums without weights after exchanges of "
            "the method's own, or with Needs(unweighted=True); both and more with "
            "Needs(replies=Replies.SCALARS)",
        )
    return held["_rows"]


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `fn` to the tensors that stand at the same place in all trees.

    KeyError if the structures differ.
    """
    mapped = {}
    for key, value in tree.items():
        others = [other[key] for other in rest]
        mapped[key] = (
            tree_map(fn, value, *others) if isinstance(value, dict) else fn(value, *others)
        )
    return mapped


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in insertion order."""
    for value in tree.values():
        yield from leaves(value) if isinstance(value, dict) else (value,)


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros of the same structure, shapes, dtypes and devices."""
    return tree_map(torch.zeros_like, tree)


def add(a: Tree, b: Tree) -> Tree:
    """a + b."""
    return tree_map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b."""
    return tree_map(torch.sub, a, b)


def combined(op: Callable[[Tensor, Tensor], Tensor], *trees: Params | None) -> Params:
    """Flat trees as one: leaves of the same name are combined by `op`, other leaves stay as they
    are. None is empty."""
    whole: Params = {}
    for tree in trees:
        for name, leaf in (tree or {}).items():
            whole[name] = op(whole[name], leaf) if name in whole else leaf
    return whole


def scale(factor: float | Tensor, tree: Tree) -> Tree:
    """factor * tree; `factor` is a number or a 0-d tensor."""
    return tree_map(lambda leaf: factor * leaf, tree)


def norm(tree: Tree) -> Tensor:
    """The L2 norm of all tensors taken as one vector, a 0-d tensor."""
    return together([leaf_row_norms(leaf.unsqueeze(0)) for leaf in leaves(tree)])[0]


def row_norms(stacked: Tree) -> Tensor:
    """The L2 norm of each row of a stacked tree, leaves `[M, ...]`, as `[M]`."""
    return together([leaf_row_norms(leaf) for leaf in leaves(stacked)])


def leaf_row_norms(leaf: Tensor | Rows) -> Tensor:
    """The L2 norm of each row of `[M, ...]`, as `[M]`.

    Part by part, because torch's kernel adds up a row's squares in few sums. For a million numbers
    in float32 these can be off by a thousandth. Storing the squares first would take three times as
    long.
    """
    tensor = opened(leaf, ONE_BY_ONE)
    if not isinstance(tensor, Tensor):  # which was measured row by row
        return cast("Tensor", tensor.norms)
    rows = tensor.reshape(len(tensor), -1)
    whole = rows.shape[1] // NORM_BLOCK * NORM_BLOCK
    if whole <= NORM_BLOCK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms
    parts = torch.linalg.vector_norm(rows[:, :whole].reshape(len(tensor), -1, NORM_BLOCK), dim=2)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
    return leaf_row_norms(torch.cat([parts, rest], dim=1))


def together(norms: Sequence[Tensor]) -> Tensor:
    """The norms of vectors that consist of parts with these norms, each `[M]`."""
    whole: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    return whole


def row(stacked: Tree, index: int | slice | Tensor) -> Tree:
    """Row `index` (or, for a slice or an index tensor, the rows) of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], stacked)


def rows_at(leaf: Tensor, index: Tensor) -> Tensor:
    """leaf[index], [n, ...] and [...] -> [..., ...]: for whole rows five times as fast."""
    if index.ndim == 1:
        return leaf.index_select(0, index)
    return leaf.index_select(0, index.reshape(-1)).reshape(index.shape + leaf.shape[1:])


def leading(values: Tensor, like: Tensor) -> Tensor:
    """`values` [...] with axes of size 1 appended, up to the number of axes of `like` [...,
    ...]."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def select(condition: Tensor | None, a: Tree, b: Tree) -> Tree:
    """`a` where the boolean `condition`, 0-d or [M] for leaves [M, ...], holds, else `b`.

    None: `a`.
    """
    return (
        a
        if condition is None
        else tree_map(lambda x, y: torch.where(leading(condition, x), x, y), a, b)
    )


def n_bytes(tree: Tree) -> int:
    """The size of all tensors in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))
