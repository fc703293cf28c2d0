"""Owners that take no part: nothing is fitted to their samples, and models are tested on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedml_noniid.core.errors import UserError, known, located
from fedml_noniid.data.streams import stream

if TYPE_CHECKING:
    from fedml_noniid.data.dataset import Dataset

MIN_OTHERS = 2  # owners that train together


def checked(unseen: Any) -> Any:
    """A number of owners, or the names of some. UserError for other values."""
    is_list = isinstance(unseen, list) and all(type(name) in (str, int) for name in unseen)
    if not (is_list and unseen) and type(unseen) is not int:
        raise UserError(value=unseen, allowed="a number of owners, or a list of their names")
    return list(map(str, unseen)) if is_list else unseen


def without(data: Dataset, unseen: Any) -> Dataset:
    """The data set read anew without some owners, whose samples it has apart.

    `unseen`: their names, or how many are drawn, always the same ones. UserError for data that
    can't be read without an owner, and for owners that don't fit.
    """
    names = data.owner_names
    with located("unseen"):
        unseen = checked(unseen)
        if data.without is None or not names or not data.has_classes:
            raise UserError(
                f"data set {data.name!r} can't be read without an owner; allowed: classes with "
                "owners, in a table, texts, arrays or by a reader of yours, without `size`"
            )
        count, most = unseen if isinstance(unseen, int) else len(unseen), len(names) - MIN_OTHERS
        if not 1 <= count <= most:
            allowed = f"1 to {most} owners, as {MIN_OTHERS} of {len(names)} train"
            raise UserError(value=unseen, allowed=allowed)
        if isinstance(unseen, int):
            drawn = stream(0, "unseen").permutation(len(names))[:count].tolist()
            unseen = [names[number] for number in drawn]
        for name in unseen:
            known("owner", name, names)
            if unseen.count(name) > 1:
                raise UserError(f"owner {name!r} is named twice", allowed="once")
        dataset: Dataset = data.without(sorted(unseen, key=names.index))
        return dataset
