"""Notes the state of each module's file when Python loads it: a file may be edited afterwards.

`fedml_noniid` imports this first, so few modules are loaded before. It imports nothing of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

State = tuple[str | None, int, int]  # path, time of the last change in ns, bytes
_loaded: dict[str, State] = {}  # module -> its file when it was loaded
_older: set[str] = set()  # modules that may hold objects from before a reload of another one
_uncached: set[str] = set()  # packages that are compiled from their source each time


class _Source(SourceFileLoader):
    """Compiles a source. What lies in `__pycache__` may be of another one."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder:
    """Asks the finders behind it for a module, and notes the file that they find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the first of them finds."""
        # Those in front were asked before: a second finder of this kind may be one of them.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _note(name, spec)
                    return spec
        return None


def edited(package: str) -> str:
    """A loaded module of a package whose file was changed since, or that was not loaded again after
    a changed one was; "" without one."""
    for name in _modules(package):
        state = _state(getattr(sys.modules.get(name), "__spec__", None))
        # An empty file, such as many `__init__.py`, holds nothing of another module.
        if _loaded.setdefault(name, state) != state or (name in _older and state[2]):
            return name
    return ""


def from_source(package: str) -> None:
    """Makes Python compile the modules of a package that it loads from now on, whatever compiled
    ones lie in `__pycache__`."""
    _uncached.add(package)


def _note(name: str, spec: ModuleSpec) -> None:
    package, state = name.partition(".")[0], _state(spec)
    is_edited = name in sys.modules and _loaded.get(name, state) != state  # and loaded again
    if is_edited:
        _older.update(_modules(package))
    _older.discard(name)
    _loaded[name] = state
    # A compiled module counts as that of a source of this size, changed in this second.
    if (is_edited or package in _uncached) and type(spec.loader) is SourceFileLoader:
        spec.loader = _Source(name, spec.loader.path)


def _modules(package: str) -> list[str]:
    """The loaded modules of a package."""
    return [name for name in [*sys.modules] if name.partition(".")[0] == package]


def _state(spec: ModuleSpec | None) -> State:
    path = None if spec is None else spec.origin
    try:
        found = os.stat(path or "")
    except OSError:  # built in, or its file is gone
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


_loaded.update(
    {name: _state(getattr(found, "__spec__", None)) for name, found in [*sys.modules.items()]}
)
sys.meta_path.insert(0, _Finder())
