"""Writes the package of a method of one's own, for `noniid new method`."""

from __future__ import annotations

import keyword
import sys
from importlib.util import find_spec
from pathlib import Path

import jinja2

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.plugins import registry

TEMPLATES = Path(__file__).with_name("templates")
# File of the package -> its template.
FILES = {
    "pyproject.toml": "method_pyproject.toml.j2",
    "README.md": "method_README.md.j2",
    "{package}/__init__.py": "method_init.py.j2",
    "{package}/algorithm.py": "method_algorithm.py.j2",
    "tests/test_by_hand.py": "method_test_by_hand.py.j2",
    "tests/test_contract.py": "method_test_contract.py.j2",
}


def write(name: str, folder: Path | None) -> list[Path]:
    """Writes the package of a method whose class is called `name`.

    Returns its files. UserError for a name that is taken or is none, and if a file exists; then
    nothing is written.
    """
    package = _package(name)
    target = Path(package) if folder is None else folder
    templates = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    texts = {}
    for file, template in FILES.items():
        text = (TEMPLATES / template).read_text()
        made = templates.from_string(text).render(name=name, package=package)
        texts[target / file.format(package=package)] = made
    for path in texts:
        if path.exists() or path.is_symlink():
            raise UserError(f"{path}: exists, and is not replaced; choose another folder with --to")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    except OSError as error:
        raise UserError(
            f"{target}: can't be written ({error.strerror or error}); choose another with --to"
        ) from None
    return [*texts]


def _package(name: str) -> str:
    """The name of the package and of the recipe: that of the class in lower case. UserError."""
    package = name.lower()
    if not (name.isascii() and name.isidentifier() and name[0].isupper()):
        allowed = "a class's name, such as FedX: letters and digits, the first a capital"
        raise UserError(path=("NAME",), value=name, allowed=allowed)
    taken = ""
    if package in ("fedavg", *registry.names()):
        taken = "there is a method of that name, which `noniid methods` shows"
    elif any(kind.__name__ == name for kind in registry.loaded().values()):
        taken = "there is a method with a class of that name"
    elif package in sys.stdlib_module_names or keyword.iskeyword(package):
        taken = "Python itself has that name"
    elif find_spec(package) is not None:
        taken = f"a module {package} is installed, or lies in this folder"
    if taken:
        raise UserError(f"NAME = {name!r}: {taken}; choose another")
    return package
