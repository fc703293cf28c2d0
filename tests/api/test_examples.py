"""The examples of the API's docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mpl.use("agg")
    yield
    pyplot.close("all")


@pytest.mark.parametrize("module", [api, *MODULES], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    assert not doctest.testmod(module).failed


def public() -> dict[str, object]:
    """The functions and classes of the API, and the methods of the classes that do something."""
    found: dict[str, object] = {}
    for name in fedml_noniid.__all__:
        one = getattr(api, name)
        if not one.__module__.startswith(api.__name__):
            continue
        found[name] = one
        if inspect.isclass(one):
            functions = inspect.getmembers(one, inspect.isfunction)
            found |= {f"{name}.{key}": value for key, value in functions if not key.startswith("_")}
    # What a `Sequence` has.
    return {
        name: one for name, one in found.items() if name not in ("Results.count", "Results.index")
    }


@pytest.mark.parametrize(("name", "one"), public().items())
def test_every_public_name_has_an_example(name: str, one: object) -> None:
    assert doctest.DocTestParser().get_examples(inspect.getdoc(one) or ""), name


def test_the_package_has_the_names_of_the_api() -> None:
    names = {*fedml_noniid.__all__}
    assert names <= {*dir(fedml_noniid)}
    assert all(getattr(fedml_noniid, name) is getattr(api, name) for name in names)
    assert names == {name for name, one in vars(api).items() if name in names or callable(one)}
