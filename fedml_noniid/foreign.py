"""Finds methods of other packages: registered in Python, named by an entry point, or by a dotted
path.

A package names its methods in its pyproject.toml:

    [project.entry-points."fedml_noniid.methods"]
    fedx = "my_package.fedx:FedX"

A package is imported when one of its methods is used, or when `noniid methods` lists it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from importlib import metadata

from fedml_noniid.core.component import Component
from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.core.randomness import identity
from fedml_noniid.own_code import is_path, latest, load, note, package_of, split_path

GROUP = "fedml_noniid.methods"  # of entry points: a method's name -> its class
# Names that stand beside those of methods: in settings, memories and messages.
RESERVED = frozenset({"data", "fedavg", "models", "own", "recipe", "scenario", "train", "tuned"})
OURS = "fedml-noniid"
A_CLASS = "a subclass of Component, as package.module:name"
Methods = Mapping[str, type[Component]]

_known: dict[str, type[Component]] = {}  # methods of others that this process has used


def known() -> Methods:
    """The methods of other packages that this process has used or registered, by name."""
    return dict(_known)


def advertised() -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Name -> entry points of installed packages. Nothing is imported."""
    return _entry_points(tuple(sys.path))


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """The entry points of the packages on a path of Python's, that of now."""
    points: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for point in metadata.entry_points(group=GROUP):
        points[point.name] = (*points.get(point.name, ()), point)
    return points


def find(name: str, ours: Methods) -> type[Component] | None:
    """The method of another package with a name or a dotted path; None for an unknown name.

    UserError if its class can't be imported, is no method, or has a name that is taken.
    """
    if is_path(name):
        what = f"method {name!r}"
        return register(load(what, *split_path(name), Component, A_CLASS), ours, what)
    if name in _known:
        return register(latest(_known[name]), ours)
    points = advertised().get(name, ())
    if not points:
        return None
    packages = [_package(point) for point in points]
    if len(points) > 1:
        raise UserError(
            f"method {name!r} is in several packages: {', '.join(sorted(packages))}; "
            "uninstall all but one"
        )
    what = f"method {name!r} of package {packages[0]}"
    kind = load(what, points[0].module, points[0].attr, Component, A_CLASS)
    if getattr(kind, "name", name) != name:
        raise UserError(f"{what} is called {shown(kind.name)} in its class; allowed: one name")
    return register(kind, ours, what)


def register(kind: type[Component], ours: Methods, what: str = "") -> type[Component]:
    """Makes a method known by its name, in this process and in those that it forks.

    Returns the class. The same class again, such as that of a notebook's cell, replaces the
    earlier one. UserError if it is no method, or if its name is taken. `what` begins the message.
    """
    what = what or f"method {shown(getattr(kind, '__qualname__', kind))}"
    name = _checked(what, kind)
    if kind in (ours.get(name), _known.get(name)):
        return kind
    _refuse_taken(what, kind, name, ours)
    note(kind.__module__)
    _known[name] = kind
    return kind


def _checked(what: str, kind: type[Component]) -> str:
    """The name of a method's class. UserError unless it is a frozen dataclass with defaults."""
    if not (isinstance(kind, type) and issubclass(kind, Component)):
        raise UserError(f"{what} is no subclass of Component; allowed: {A_CLASS}")
    name = getattr(kind, "name", None)
    if name is None:
        example = kind.__name__.lower()
        raise UserError(f"{what} has no name; add `name: ClassVar[str] = {example!r}` to the class")
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise UserError(f"{what}: name = {shown(name)} is refused; allowed: letters, digits and _")
    if name in RESERVED:
        reserved = ", ".join(sorted(RESERVED))
        raise UserError(f"{what}: name = {name!r} is refused; allowed: all but {reserved}")
    # A subclass without a decorator of its own would ignore its hyper-parameters without a word.
    frozen = getattr(vars(kind).get("__dataclass_params__"), "frozen", False)
    if not frozen:
        raise UserError(f"{what} is no frozen dataclass; write @dataclass(frozen=True) above it")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING:
            raise UserError(f"{what}: hyper-parameter {field.name!r} has no default; give it one")
    return name


def _refuse_taken(what: str, kind: type[Component], name: str, ours: Methods) -> None:
    """UserError if another method has the name, or a class of the same name.

    Random keys and the order of a recipe go by the names of classes.
    """
    package = package_of(kind)
    if name in ours:
        raise UserError(f"{what}: the name {name!r} is taken by package {OURS}; choose another")
    other = _known.get(name)
    if other is not None and _place(other) != _place(kind):
        raise UserError(
            f"{what}: the name {name!r} is taken by {'.'.join(_place(other))}; choose another"
        )
    for point in advertised().get(name, ()):
        if point.module.partition(".")[0] != package:
            raise UserError(
                f"{what}: the name {name!r} is taken by package {_package(point)}; choose another"
            )
    number = identity(kind())
    methods = (*ours.values(), *_known.values())
    for taken in methods:
        related = _place(taken) == _place(kind) or any(
            issubclass(kind, base) and issubclass(taken, base) for base in (kind, *methods)
        )
        if not related and identity(taken()) == number:
            raise UserError(
                f"{what}: the name of its class, {kind.__name__}, is taken by method "
                f"{taken.name!r}; choose another"
            )


def _place(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _package(point: metadata.EntryPoint) -> str:
    return "unknown" if point.dist is None else point.dist.name
