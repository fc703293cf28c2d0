"""The examples of the API's docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import matplotlib as mpl
import pytest
from matplotlib import pyplot

import fedml_noniid
from fedml_noniid import api

MODULES = [
    importlib.import_module(f"{api.__name__}.{found.name}")
    for found in pkgutil.iter_modules(api.__path__)
]


@pytest.mark.parametrize("module", [api, *MODULES], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    mpl.use("agg")
    assert not doctest.testmod(module).failed
    pyplot.close("all")


def test_every_public_name_has_an_example() -> None:
    """Functions and classes of the API, and the methods of the classes that do something."""
    names = {name: getattr(api, name) for name in fedml_noniid.__all__}
    ours = {name: one for name, one in names.items() if one.__module__.startswith(api.__name__)}
    for name, one in [*ours.items()]:
        methods = inspect.getmembers(one, inspect.isfunction) if inspect.isclass(one) else ()
        ours |= {f"{name}.{key}": function for key, function in methods if key[0] != "_"}
    for name, one in ours.items():
        of_sequence = name in ("Results.count", "Results.index")
        assert of_sequence or doctest.DocTestParser().get_examples(inspect.getdoc(one) or ""), name
    assert all(getattr(fedml_noniid, name) is one for name, one in names.items())
