"""The extras of an installation, `pip install 'fedml-noniid[pipeline]'`: which packages come with
each."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.util import find_spec

from fedml_noniid.plugins.core.errors import UserError

# Extra -> the modules of it that our code imports. pyproject.toml has the distributions.
PIPELINE, DEPLOY, CLUSTER, PRIVACY = "pipeline", "deploy", "cluster", "privacy"
MODULES = {
    PIPELINE: ("dvc", "jinja2", "markdown_it", "mlflow", "pyarrow", "tabulate", "typer"),
    DEPLOY: ("cryptography", "fedml", "grpc", "yaml"),
    CLUSTER: ("cryptography", "dask", "distributed"),
    PRIVACY: ("dp_accounting",),
}
FEDML_PYTHON = (3, 11)  # fedml 0.8.30 needs NumPy 1, of which newer Pythons have no wheels


def require(extra: str, *modules: str) -> None:
    """Raises UserError if a module of an extra is not installed; imports none.

    `modules`: only these.
    """
    missing = [name for name in modules or MODULES[extra] if find_spec(name) is None]
    if missing:
        newer = extra == DEPLOY and sys.version_info[:2] > FEDML_PYTHON
        where = " in an environment of Python {}.{}".format(*FEDML_PYTHON) if newer else ""
        raise UserError(
            f"{missing[0]} is not installed; type: pip install 'fedml-noniid[{extra}]'{where}"
        )


def version(distribution: str) -> str:
    """The installed version of a package; "none" without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
