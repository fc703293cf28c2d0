"""The extras of an installation, `pip install 'fedml-noniid[pipeline]'`: which packages come with
each."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.util import find_spec

from fedml_noniid.core.errors import UserError

EXCEL = "excel"
# Extra -> the modules of it that our code imports. pyproject.toml has the distributions.
PIPELINE, SILO, CLUSTER, PRIVACY = "pipeline", "silo", "cluster", "privacy"
TENSORBOARD, WANDB = "tensorboard", "wandb"
MODULES = {
    PIPELINE: ("dvc", "jinja2", "markdown_it", "mlflow", "pyarrow", "tabulate", "typer"),
    SILO: ("cryptography", "fedml", "grpc", "yaml"),
    EXCEL: ("openpyxl",),
    CLUSTER: ("cryptography", "dask", "distributed"),
    PRIVACY: ("dp_accounting",),
    TENSORBOARD: ("tensorboard",),
    WANDB: ("wandb",),
}
FEDML_PYTHON = (3, 11)  # fedml and its wandb need NumPy 1, of which newer Pythons have no wheels


def require(extra: str, *modules: str) -> None:
    """Raises UserError if a module of an extra is not installed; imports none.

    `modules`: only these.
    """
    missing = [name for name in modules or MODULES[extra] if find_spec(name) is None]
    if missing:
        newer = extra == SILO and sys.version_info[:2] > FEDML_PYTHON
        environment = " in an environment of Python {}.{}".format(*FEDML_PYTHON) if newer else ""
        raise UserError(
            f"{missing[0]} is not installed; type: pip install 'fedml-noniid[{extra}]'{environment}"
        )


def require_command() -> None:
    """Raises UserError if the command line can't run: typer is missing, or is too old for click."""
    require(PIPELINE, "typer")
    typer, click = ([*map(int, version(name).split(".")[:2])] for name in ("typer", "click"))
    if typer < [0, 16] and click >= [8, 2]:  # FedML 0.9.6 needs typer 0.9
        raise UserError(
            f"typer {version('typer')} does not work with click {version('click')}; "
            "type: pip install 'click<8.2'"
        )


def version(distribution: str) -> str:
    """The installed version of a package; "none" without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
