"""Finds classes by name: ours by a short one, a user's own as `package.module.Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedml_noniid.plugins.core.errors import UserError, closest, shown

T = TypeVar("T")
TORCH = "/site-packages/torch/"  # no place for a user to look at


def find(what: str, name: object, ours: Mapping[str, type[T]], kind: type[T]) -> type[T]:
    """The class of a name, a subclass of `kind`. `what` begins every UserError."""
    if isinstance(name, str) and name in ours:
        return ours[name]
    own = f"a subclass of {kind.__name__} of your own as package.module.Class"
    if not isinstance(name, str) or not is_dotted(name):
        raise UserError(
            f"{what} {shown(name)} is unknown",
            allowed=f"{', '.join(ours)}, or {own}",
            meant=closest(name, ours),
        )
    found = imported(what, name, own)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise UserError(f"{what} {name!r} is no subclass of {kind.__name__}; allowed: {own}")
    return found


def is_dotted(name: str) -> bool:
    """Whether a name leads into a module: `package.module.name`, or `package.module:name`."""
    return "." in name or ":" in name


def imported(what: str, name: str, allowed: str) -> Any:
    """What a dotted name leads to. `what` begins the UserError."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of any kind: the code is the user's
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{what} {name!r} can't be imported, {place(error, '')}{told}; allowed: {allowed}"
        ) from error


def look_in(folder: Path) -> None:
    """Makes the modules in a folder importable, behind all others: those beside a user's
    settings."""
    if (name := str(folder.resolve())) not in sys.path:
        sys.path.append(name)


def place(error: Exception, function: str) -> str:
    """`file, line 3: `, where a user's code failed: in `function` if the error has passed through
    it."""
    passed = traceback.extract_tb(error.__traceback__)
    lines = [
        at
        for at in passed
        if at.filename not in (__file__, importlib.__file__)
        and at.filename[0] != "<"
        and TORCH not in at.filename
    ]
    last = next((at for at in lines[::-1] if at.name == function), lines[-1] if lines else None)
    return "" if last is None else f"{last.filename}, line {last.lineno}: "


def source_of(name: str) -> str:
    """The SHA-256 of the source of a user's class: its file, or all Python files of its package.

    UserError.
    """
    top = name.replace(":", ".").partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
        folders = list((found and found.submodule_search_locations) or [])
        files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
        files = files or [Path(str(found and found.origin))]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: the source of {top} can't be read ({error})") from None
