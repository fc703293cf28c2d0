"""Finds what a user wrote by name: as `package.module:name`, where a dot in place of the colon is
the same, or an object that this process was given."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, create_model

from fedml_noniid.core.errors import REFUSED, UNKNOWN, UserError, among, shown
from fedml_noniid.core.options import STRICT, checked_type, validated

T = TypeVar("T")
PLAIN = bool, int, float, str, type(None)  # values that a file can hold, beside lists of them
OURS = "fedml_noniid"  # the name that all our modules are imported by
UNKNOWN_SOURCE = "unknown"  # in place of a hash
OF_PROCESS = " of this process, "  # in the name of an object that no other process finds
TORCH = "/site-packages/torch/"  # no place for a user to look at
_only: tuple[Collection[str], str] | None = (
    None  # SHA-256 of the packages that may run; who says so
)
# Module -> its specification, which is another object after a reload, and the SHA-256 of its file.
_imported: dict[str, tuple[ModuleSpec | None, str]] = {}
_older: set[str] = set()  # modules that may hold objects from before a reload of another one
EMPTY = "", hashlib.sha256().hexdigest()  # of no file and of an empty one, such as `__init__.py`
_registered: dict[str, Any] = {}  # objects that this process was given, by the name that they got
LONGEST = 256  # characters of a file's name
IMPORTED = ".py", ".pyc", ".pyd", ".so"  # endings of what Python imports


class EditedError(UserError):
    """The source of a user's package is not that which this process has imported."""


def find(what: str, name: object, ours: Mapping[str, type[T]], kind: type[T]) -> type[T]:
    """The class of a name, a subclass of `kind`. `what` begins every UserError."""
    if isinstance(name, str) and name in ours:
        return ours[name]
    own = f"a subclass of {kind.__name__} of your own as package.module:name"
    if not isinstance(name, str) or not is_path(name):
        raise UserError(
            f"{what} {shown(name)} is unknown",
            **among(name, ours, f"or {own}"),
        )
    return load(f"{what} {name!r}", *split_path(name), kind, own)


def name_of(value: object) -> str:
    """The name under which `object_of` finds a user's object: its dotted path, or one that only
    this process knows."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is value:
        note(module)
        return f"{module}:{name}"
    for known, item in _registered.items():
        if item is value:
            return known
    name = f"{name or type(value).__name__}{OF_PROCESS}{len(_registered) + 1}"
    _registered[name] = value
    return name


def registered(name: str) -> Any:
    """The object that this process was given under a name of `name_of`; None for other names."""
    return _registered.get(name)


def names_code(name: object) -> bool:
    """Whether a name is that of a user's code: a dotted path, or a name of `name_of`."""
    return isinstance(name, str) and (name in _registered or is_path(name))


def is_own(name: str) -> bool:
    """Whether a name is the dotted path of a user's code, which other processes find too."""
    return name not in _registered and is_path(name)


def object_of(what: str, name: object, ours: Mapping[str, Any], allowed: str) -> Any:
    """The object of a name: one of ours, one that this process was given, or one of a module.

    `what` is its kind. UserError for an unknown name, and for a module that can't be imported.
    """
    if isinstance(name, str) and name in ours:
        return ours[name]
    if isinstance(name, str) and name in _registered:
        return _registered[name]
    if not isinstance(name, str) or not names_code(name):
        raise UserError(
            UNKNOWN if isinstance(name, str) else REFUSED,
            value=name,
            **among(name, ours, f"or {allowed}" if ours else allowed),
        )
    return imported(f"{what} {name!r}", *split_path(name), allowed)


def function_of(what: str, name: object, ours: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of a name, as `object_of` finds it. UserError."""
    allowed = "a function of your own as package.module:name"
    value = object_of(what, name, ours, allowed)
    if not callable(value):
        raise UserError(f"{what} {name!r} is a {type(value).__name__}", allowed=allowed)
    function: Callable[..., Any] = value
    return function


def check_arguments(
    function: Callable[..., object], values: Mapping[str, object], filled: Iterable[str] = ()
) -> None:
    """UserError with every mistake unless a user's function takes `values` by name.

    `filled`: the arguments that it gets beside them. Types are checked where it has annotations of
    numbers, texts and flags.
    """
    # mypy fears that a subclass may have another `__init__`; this class itself is called.
    kind = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError):  # no annotations, or some for type checkers only
        hints = {}
    takes_all, names, fields = False, set(filled), dict[str, Any]()
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        takes_all |= parameter.kind is parameter.VAR_KEYWORD
        if (
            parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and parameter.name not in names
        ):
            default = ... if parameter.default is parameter.empty else parameter.default
            # An alias: any name may be an argument, but not a field.
            field = Field(default, alias=parameter.name)
            fields[f"argument_{number}"] = checked_type(hints.get(parameter.name, Any)), field
    extra = ConfigDict(extra="allow") if takes_all else ConfigDict()
    validated(create_model("Arguments", __config__=STRICT | extra, **fields), values)


def defaults_of(function: Callable[..., object], filled: Iterable[str] = ()) -> dict[str, object]:
    """The defaults of a function's or a class's arguments, of those that a file can hold.

    `filled`: the arguments that no file has, since they are filled in.
    """
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
    }
    return {
        name: value
        for name, value in defaults.items()
        if name not in filled
        for parts in [value if isinstance(value, tuple | list) else (value,)]
        if all(isinstance(part, PLAIN) for part in parts)
    }


def defaults_by_name(
    name: str, ours: Mapping[str, Any], filled: Iterable[str] = ()
) -> dict[str, object]:
    """As `defaults_of`, of what a name stands for: one of ours, or a user's own. A name of what
    Python holds, such as a data frame, has none."""
    if name not in ours and not names_code(name):
        return {}
    return defaults_of(object_of("", name, ours, ""), filled)


def call(what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a user's function returns. UserError says where it failed; `what` begins it."""
    return running(what, partial(function, *args, **options), getattr(function, "__name__", ""))


def running(what: str, job: Callable[[], T], function: str) -> T:
    """What a job returns that runs a user's `function`, such as `forward`. UserError as `call`."""
    try:
        return job()
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of any kind: the code is the user's
        raise failure(what, error, function) from error


def failure(what: str, error: Exception, function: str) -> UserError:
    """The error of a user's code in one line, with its file and line."""
    return UserError(f"{what} failed, {location(error, function)}{_told(error)}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:260]}"


def is_path(name: str) -> bool:
    """Whether a name is a dotted path: package.module:name, or with a dot in place of the colon."""
    return "." in name or ":" in name


def split_path(name: str) -> tuple[str, str]:
    """(module, class) of a dotted path."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return module, attribute


def load(what: str, module: str, attribute: str, kind: type[T], allowed: str) -> type[T]:
    """A class of a user's module, a subclass of `kind`. `what` begins every UserError."""
    cls = imported(what, module, attribute, allowed)
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise UserError(f"{what} is no subclass of {kind.__name__}; allowed: {allowed}")
    return cls


def import_only(hashes: Collection[str], rule: str) -> None:
    """Lets this process import packages with these SHA-256 only; `rule`: who says so."""
    global _only
    _only = hashes, rule


def imported(what: str, module: str, attribute: str, allowed: str) -> Any:
    """What a user's module has under a name. `what` begins the UserError."""
    if _only is not None:
        if (sha := source_of(module)) not in _only[0]:
            raise UserError(f"{what}: its package has the SHA-256 {sha}", allowed=_only[1])
        # What lies in `__pycache__` may be of another source. For good: functions import too.
        sys.pycache_prefix = os.devnull
    try:
        value = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of any kind: the code is the user's
        failed = sys.modules.get(module) or sys.modules.get(module.partition(".")[0])
        position, file = location(error, ""), getattr(failed, "__file__", None)
        # Perhaps of another module of this name: those beside a user's settings come last.
        inside = f" in {file}" if file and not position else ""
        raise UserError(
            f"{what} can't be imported, {position}{_told(error)}{inside}; allowed: {allowed}"
        ) from error
    note(module)
    return value


def note(name: str) -> dict[str, str]:
    """Records the files of a package's loaded modules, of each when it is first seen here.

    `name`: of the package or a module. Returns the SHA-256 of each module's file as it is now.
    """
    package = name.partition(".")[0]
    loaded = {
        key: getattr(module, "__spec__", None)
        for key, module in [*sys.modules.items()]
        if key.partition(".")[0] == package
    }
    hashes = {
        key: _sha256_cached(file) if (file := Path((spec and spec.origin) or "")).is_file() else ""
        for key, spec in loaded.items()
    }
    new = {
        key: (spec, hashes[key])
        for key, spec in loaded.items()
        if key not in _imported or _imported[key][0] is not spec
    }
    if any(_imported.get(key, new[key])[1] != hashes[key] for key in new):  # loaded again
        # An empty file holds nothing of another module.
        _older.update(key for key in loaded.keys() - new if hashes[key] not in EMPTY)
    _older.difference_update(new)
    _imported.update(new)
    return hashes


def check_unchanged(package: str) -> None:
    """EditedError if a loaded module of a package has another file than when it was first seen
    here, or was not loaded again after such a one."""
    for module, sha256 in note(package).items():
        if module in _older or _imported[module][1] != sha256:
            raise _edited(package, module)


def look_in(folder: Path) -> None:
    """Makes the modules in a folder importable, behind all others: those beside a user's
    settings."""
    if (name := str(folder.resolve())) not in sys.path:
        sys.path.append(name)


def location(error: Exception, function: str) -> str:
    """`file, line 3: `, where a user's code failed: in `function` if the error has passed through
    it."""
    passed = traceback.extract_tb(error.__traceback__)
    lines = [
        at
        for at in passed
        if at.filename != importlib.__file__
        and at.filename[0] != "<"
        and TORCH not in at.filename
        and not at.filename.startswith(str(Path(__file__).parent))
    ]
    last = next((at for at in lines[::-1] if at.name == function), lines[-1] if lines else None)
    return "" if last is None else f"{last.filename}, line {last.lineno}: "


def source_of(name: str) -> str:
    """The SHA-256 of the source of a user's class: its file, or all files of its package that
    Python can import.

    UserError. EditedError if the files are not those that this process runs: a result of the old
    class would get the hash of the new one.
    """
    top = name.replace(":", ".").partition(".")[0]
    try:
        sha = sha256_of(files_of(top))
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: the source of {top} can't be read ({error})") from None
    check_unchanged(top)
    return sha


def source_with_files(name: str, options: Mapping[str, object]) -> str:
    """As `source_of`; the files of the working folder that the options name count too."""
    parts, named = [source_of(name)], map(Path, texts_of(name, options))
    try:
        parts += [_sha256(path) for path in named if path.is_file()]
    except OSError as error:
        raise UserError(f"{name}: {error.filename} can't be read ({error.strerror})") from None
    return _joined(parts)


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def texts_of(name: str, options: Mapping[str, object]) -> list[str]:
    """The texts that may be names of files among what a user's function gets, in lists too: options
    and, of other parameters, defaults."""
    known = inspect.signature(object_of("", name, {}, "")).parameters.values()
    texts = _texts({parameter.name: parameter.default for parameter in known} | {**options})
    return [text for text in texts if 0 < len(text) < LONGEST]


def _texts(option: object) -> list[str]:
    if isinstance(option, Mapping):
        option = [*option.values()]
    if isinstance(option, list | tuple):
        return [text for part in option for text in _texts(part)]
    return [str(option)] if isinstance(option, str | Path) else []


def _edited(top: str, module: str) -> EditedError:
    reload = "" if top == OURS else f" (or call importlib.reload({module}))"
    return EditedError(
        f"the source of {top} was changed after this process had imported "
        f"{getattr(sys.modules.get(module), '__file__', module)}; start the process again{reload}"
    )


def files_of(top: str, endings: tuple[str, ...] = IMPORTED) -> list[Path]:
    """The files of a package that Python can import, or others, or the file of a module.

    ValueError, OSError.
    """
    spec = importlib.util.find_spec(top)
    folders = list((spec and spec.submodule_search_locations) or [])
    files = sorted(
        file
        for folder in folders
        for file in _inside(Path(folder), set())
        # Python keeps `x.cpython-312.pyc` for `x.py`, and imports `x.pyc`.
        if file.suffix in endings and not (file.suffix == ".pyc" and file.name.count(".") > 1)
    )
    return files or [Path(str(spec and spec.origin))]


def _inside(folder: Path, known: set[Path]) -> Iterator[Path]:
    """The files in a folder, also behind links to folders, each folder once."""
    known.add(folder.resolve())
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif path.resolve() not in known:
            yield from _inside(path, known)


def sha256_of(files: Sequence[Path]) -> str:
    """Of a file; of several, that of what `sha256sum` says of them in the first one's folder.

    Their names count: code may move to the start of the next file.
    """
    first, *others = files
    lines = [f"{_sha256(file)}  {os.path.relpath(file, first.parent)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if others else _sha256(first)


def _sha256(file: Path) -> str:
    """Of a file; of another one than a source, which may be large, as `_sha256_cached`."""
    if file.suffix == ".py":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return _sha256_cached(file)


def _sha256_cached(file: Path) -> str:
    """Of a file, computed once in each state."""
    state = file.stat()
    return _hash(file, state.st_mtime_ns, state.st_size)


@functools.cache
def _hash(file: Path, changed_ns: int, size: int) -> str:
    """The SHA-256 of a file in this state."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def package_of(kind: type) -> str:
    """The package or module that a class is in, by its first name."""
    return kind.__module__.partition(".")[0]


def packages_of(kind: type) -> list[str]:
    """The packages of a class and of its parents, without ours and Python's."""
    packages = dict.fromkeys(package_of(parent) for parent in kind.__mro__)
    return [name for name in packages if name not in sys.stdlib_module_names and name != OURS]


def latest(kind: type) -> type:
    """The class that its module has by its name: another one after `importlib.reload`."""
    current = getattr(sys.modules.get(kind.__module__), kind.__qualname__, kind)
    return (
        current if isinstance(current, type) and current.__qualname__ == kind.__qualname__ else kind
    )


def source_of_class(kind: type) -> str:
    """The SHA-256 of the source of a class and its parents, as `source_of` counts it.

    Of a class of a notebook or script, its own lines count. UNKNOWN_SOURCE if it has none.
    EditedError.
    """
    try:
        parts = [source_of(top) for top in packages_of(kind)]
        for parent in kind.__mro__:
            if latest(parent) is not parent:
                raise _edited(package_of(parent), kind.__module__)
    except EditedError:
        raise
    except UserError:
        try:
            parts = [hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()]
        except (OSError, TypeError):
            return UNKNOWN_SOURCE
    return _joined(parts)
