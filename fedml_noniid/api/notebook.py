"""The notebook that comes with the package."""

from __future__ import annotations

from pathlib import Path

from fedml_noniid.api.saved import folder_of
from fedml_noniid.core.errors import UserError

NAME = "first_steps.ipynb"


def notebook(folder: str | Path = ".") -> Path:
    """Copies the notebook of first steps into a folder; returns its path. `jupyter lab` opens it.

    UserError if the folder can't be written or has a file of that name.

    >>> import tempfile
    >>> import fedml_noniid as nd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nd.notebook(folder).name
    'first_steps.ipynb'
    """
    path = folder_of("notebook", folder) / NAME
    if path.exists():
        raise UserError(f"notebook: {str(path)!r} is there already; allowed: a folder without it")
    path.write_bytes(Path(__file__).parents[1].joinpath(NAME).read_bytes())
    return path
