"""Data sets of a user's own: a function that returns arrays, or data sets of torch.

A function gets `root`, the folder of the settings, if it has a parameter of this name. All other
parameters are options. It returns one of these:

- arrays by the names of `fedml_noniid.from_arrays`: x and y, perhaps test_x, test_y, owner,
  test_owner, classes, layout and test_share
- (x, y) or (x, y, test_x, test_y)
- a `torch.utils.data.Dataset` of pairs (sample, label), or one for training and one for the test;
  a sample may be a dict of several inputs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset as TorchDataset

from fedml_noniid.core.errors import UserError, located, shown
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers import items
from fedml_noniid.data.readers.arrays import NAMES, of_named
from fedml_noniid.own_code import call

FILLED = ("root",)  # what a function may ask for
ALLOWED = "(x, y), (x, y, test_x, test_y), a dict of such arrays, or one or two data sets of torch"


def read(
    name: str,
    function: Callable[..., Any],
    root: Path,
    options: Mapping[str, Any],
    unseen: Sequence[str] = (),
) -> Raw:
    """The samples that a function returns, checked as `fedml_noniid.from_arrays` checks them.

    Without the owners `unseen`, whose samples it has apart: the function runs again. UserError.
    """
    asked = {"root": root} if "root" in inspect.signature(function).parameters else {}
    what = f"data set {name}"
    result = call(what, function, **asked, **options)
    with located(source=what):
        raw = of_named(_named(result), unseen)
    return replace(raw, without=partial(read, name, function, root, options))


def _named(result: Any) -> Mapping[str, Any]:
    """What a function returned, by the names of the arrays. UserError."""
    if isinstance(result, Mapping):
        return result
    parts = [*result] if isinstance(result, tuple | list) else [result]
    if len(parts) in (1, 2) and all(isinstance(part, TorchDataset) for part in parts):
        return items.arrays_of(*parts)
    if len(parts) not in (2, 4):
        raise UserError(f"the function returned {shown(result)}", allowed=ALLOWED)
    return dict(zip(NAMES, parts, strict=False))
